"""Write the README's tables and its figure from results that are in the repository.

    for s in 0 1 2 3; do zeroshard train --stage $s --depth 12 --steps 4 --name stage-$s; done
    python -m tools.tables runs stage-0 stage-1 stage-2 stage-3     # keep them in benchmarks/results/readme.json
    zeroshard train --name default
    python -m tools.tables runs default                             # keep it in benchmarks/results/readme-run.json
    python -m tools.captures                                        # keep captures.json
    python -m tools.tables                                          # write from what is kept

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`, which this script replaces. A test compares tables
and figure with what this script writes.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zeroshard as zs
from benchmarks.machine import circumstances, put_table
from benchmarks.report import ratio_of_medians, ratios_of
from tools import ages, captures
from zeroshard.table.sizes import GIB, MIB

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEPT_STAGES, KEPT_RUN = RESULTS / "readme.json", RESULTS / "readme-run.json"
FIGURE = ROOT / "docs" / "pictures" / "memory.svg"
README = ROOT / "README.md"
STAGES = range(4)
SAID = ("step    40", "score ", "loss ", "speed ", "memory ")
"""First words of the lines of a capture that the README has."""
COLUMNS = ("states", "gradients", "parameters", "transient")
KEPT = {
    "stage 0": ("replicated", "replicated", "replicated"),
    "stage 1": ("sharded", "replicated", "replicated"),
    "stage 2": ("sharded", "sharded", "replicated"),
    "stage 3": ("sharded", "sharded", "sharded"),
}
SPEED_CASES = {"GPT, 30M": "gpt-30m", "GPT, 124M": "gpt-124m", "1,002 small tensors": "small-tensors"}
CONTESTANTS = {
    "zeroshard 1": "zs-1",
    "zeroshard 3": "zs-3",
    "with messages": "zs-3-wire",
    "FSDP1": "fsdp1-3",
    "FSDP2": "fsdp2-3",
    "DeepSpeed 3": "ds-3",
}
COLOURS = {"states": "#4c78a8", "gradients": "#f58518", "parameters": "#54a24b", "transient": "#b8b8b8"}
LABELS = {"states": "optimizer states", "transient": "transient, at most"}


def keep(runs: Path, names: Sequence[str]) -> None:
    """Write what the tables need of the runs' summaries, with the date and the commit."""
    summaries = {}
    for name in names:
        one = json.loads((runs / name / "summary.json").read_text())
        summaries[name] = {key: value for key, value in one.items() if key not in ("sample", "plan", "profile")}
    kept = {
        **circumstances("tools.tables"),
        "machine": "CPU, gloo, 2 cores",
        "load": os.getloadavg()[1],
        "runs": summaries,
    }
    path = KEPT_RUN if "default" in names else KEPT_STAGES
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read(path: Path) -> Any:
    """Return what is kept in a file."""
    return json.loads(path.read_text())


def origin(*names: str) -> str:
    """Return where the numbers of results come from, and whether much of the code has changed since."""
    found = [read(RESULTS / name) for name in names]
    commits = dict.fromkeys(f"commit {one['commit'][:7]}, {one['date']}" for one in found)
    return "; ".join(commits) + max(map(ages.note, names))


def residency_table() -> str:
    """Return the residency table: where each column lives, in MiB of rank 0, and a 7B model's plan beside it."""
    kept = read(KEPT_STAGES)
    summaries = [kept["runs"][f"stage-{stage}"] for stage in STAGES]
    first = summaries[0]
    lines = [
        f"{kept['machine']}: {first['model']}; fp32, AdamW, {first['world_size']} ranks.",
        "MiB of each rank, measured ([readme.json](benchmarks/results/readme.json), "
        f"{origin(KEPT_STAGES.name)}). Last column: Llama 2 7B, planned.",
        "",
        "| | optimizer states | gradients | parameters | kept in all | transient, at most | sent a step | 7B, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage, one in zip(STAGES, summaries, strict=True):
        rank = one["ranks"][0]
        if rank["predicted_bytes"] != rank["peak_bytes"]:
            raise SystemExit(f"{one['name']}: predicted {rank['predicted_bytes']}, measured {rank['peak_bytes']}")
        held, sent = rank["resident_bytes"], sum(rank["sent_bytes"][kind] for kind in ("gather", "reduce"))
        cells = [f"{kept} {_mib(held[column])}" for kept, column in zip(KEPT[one["row"]], COLUMNS[:3], strict=True)]
        cells += [_mib(sum(held[column] for column in COLUMNS[:3])), _mib(rank["peak_bytes"]["transient"])]
        cells += [_mib(sent / one["steps"]), f"{plan_of_7b(stage).total_bytes / GIB:.1f}"]
        lines.append(f"| {one['row']} | {' | '.join(cells)} |")
    lines += [
        "",
        "The plan before the run predicted every cell to the byte. 7B: planned peak memory of a rank on 8 GPUs:",
        "`zeroshard plan llama-2-7b --ranks 8 --batch 2 --activations recompute --stage N`.",
    ]
    return "\n".join(lines)


def plan_of_7b(stage: int) -> zs.Plan:
    """Return the plan of the table's last column."""
    return zs.plan("llama-2-7b", world_size=8, device="h100-80", batch=2, activations="recompute", stage=stage)


def speed_table() -> str:
    """Return step times beside peers; of peers that were also measured with other settings, the range."""
    heats = {name: json.loads((RESULTS / f"step-{case}-2x1.json").read_text()) for name, case in SPEED_CASES.items()}
    where = origin(*(f"step-{case}-2x1.json" for case in SPEED_CASES.values()))
    lines = [
        f"CPU, gloo, 2 cores: time of a step ({where}), 2 ranks on one host,",
        "micro-batch 1, interleaved rounds, as a multiple of DDP with a static graph.",
        "",
        f"| | {' | '.join(CONTESTANTS)} |",
        f"|---|{'---|' * len(CONTESTANTS)}",
    ]
    for name, one in heats.items():
        ratios = {key: ratio for key, (ratio, _, _) in ratios_of(one["time"]).items()}
        cells = [_range(ratios, key) for key in CONTESTANTS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *gpu_lines()])


def gpu_lines() -> list[str]:
    """Return what one GPU showed beside FSDP2, at stages 2 and 3 of each number of emulated ranks."""
    found = json.loads((RESULTS / "gpu.json").read_text())
    rows = [one["entrants"].values() for one in found["sections"] if one["first"].startswith("FSDP2")]
    steps = [ratio_of_medians(ours["wall_s"], base["wall_s"])[0] for base, ours in rows]
    memory = [ours["allocated_bytes"] / base["allocated_bytes"] for base, ours in rows]
    return [
        '"With messages": stage 3 as between hosts; a range: fastest settings to defaults '
        "([docs/benchmarks.md](docs/benchmarks.md)).",
        f"One H100 as rank 0 of 8 and of 64, without a network (GPT 1.3B in bf16, {origin('gpu.json')}, "
        "[gpu.json](benchmarks/results/gpu.json)): "
        f"steps take {min(steps):.2f} to {max(steps):.2f} of FSDP2's time at stages 2 and 3, memory is "
        f"{min(memory):.2f} to {max(memory):.2f} of FSDP2's.",
    ]


def _range(ratios: Mapping[str, float], name: str) -> str:
    """Return the ratio of a contestant; with that of its best settings where they are faster."""
    if name not in ratios:
        return ""
    own = f"{ratios[name]:.2f}"
    if name.startswith("zs"):
        return own
    best = f"{min(ratio for key, ratio in ratios.items() if key.startswith(name)):.2f}"
    return own if own == best else f"{best} to {own}"


def run_table() -> str:
    """Return what the default run came to, and where to see what a run prints."""
    kept = read(KEPT_RUN)
    one = kept["runs"]["default"]
    shown = read(captures.KEPT)["captures"]["pipe"]
    said = [line for line in shown["text"].splitlines() if line.startswith(SAID)]
    return "\n".join(
        [
            *("```text", f"$ {shown['command']}", *said, "```"),
            f"[More of the terminal](benchmarks/results/captures.md) ({origin(captures.KEPT.name)}). `make train` on a "
            f"{kept['machine']}: {one['wall_s']:.0f} seconds (load average {kept['load']:.0f}, its",
            f"own ranks included), {one['steps']:,} steps of {one['model'].split(':')[1].strip()}, "
            f"{one['tokens_per_s']:,.0f} tokens/s, {one['bits_per_byte']:.3f} bits per byte on held-out text of "
            f"Python's documentation ({origin(KEPT_RUN.name)}).",
        ]
    )


def figure() -> str:
    """Return the figure, as SVG: what a rank holds at each stage, by column, as in the residency table."""
    kept = read(KEPT_STAGES)
    left, bar, top, wide = 80, 34, 46, 560
    ranks = [kept["runs"][f"stage-{stage}"]["ranks"][0] for stage in STAGES]
    held = [one["resident_bytes"] | {"transient": one["peak_bytes"]["transient"]} for one in ranks]
    most = max(sum(one[column] for column in COLUMNS) for one in held)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{top + 4 * (bar + 10)}" font-family="sans-serif" '
        'font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    x = left
    for column in COLUMNS:
        label = LABELS.get(column, column)
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{COLOURS[column]}"/>')
        parts.append(f'<text x="{x + 17}" y="23">{label}</text>')
        x += 45 + 7 * len(label)
    for stage, one in zip(STAGES, held, strict=True):
        y, x = top + stage * (bar + 10), float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 22}" text-anchor="end">stage {stage}</text>')
        for column in COLUMNS:
            width = wide * one[column] / most
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{bar}" fill="{COLOURS[column]}"/>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 22}">{_mib(sum(one[column] for column in COLUMNS))} MiB</text>')
    return "\n".join([*parts, "</svg>", ""])


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.2f}"


def filled(text: str) -> str:
    """Return the README with its tables."""
    text = put_table(text, "residency", residency_table())
    return put_table(put_table(text, "speed", speed_table()), "run", run_table())


def main(arguments: Sequence[str]) -> None:
    """Keep summaries where a folder of runs and their names are given; write the tables and the figure."""
    if arguments:
        keep(Path(arguments[0]), arguments[1:])
    README.write_text(filled(README.read_text()))
    FIGURE.write_text(figure())


if __name__ == "__main__":
    main(sys.argv[1:])
