"""The benchmark's command line: what is measured, in which launches, and where the results go.

    python -m benchmarks.run --case gpt-30m --only zs-3,ddp --steps 20   # a table on the terminal
    python -m benchmarks.run --case gpt-30m --only zs-*,ds-3 --memory    # the same for memory
    python -m benchmarks.run --plan                                      # what is published, with an estimate each
    python -m benchmarks.run --plan all                                  # measure it; or name some of it

Owns the plan of a run and the comparison of losses. It must not know how a step is timed (`measure.py`) or what a
contestant is (`peers.py`). Read `main` first, then `plan.py`.

Note: heats
    Contestants that do not fit into memory together run in several launches, heats. The reference and zeroshard at the
    same stage take part in each, so that every contestant is compared with both in the same launch.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch

from benchmarks.cases import CASES
from benchmarks.launch import launch
from benchmarks.machine import available_bytes, circumstances, write_result
from benchmarks.measure import Job
from benchmarks.peers import CONTESTANTS, reference_of
from benchmarks.plan import PLAN, Setting
from benchmarks.report import aligned, memory_table, scaling_table, time_table

__all__ = ["LOSS_TOLERANCE", "best_of_sweep", "check_losses", "main", "merge_ranks", "pack_heats", "select"]

RESULTS: Final = Path(__file__).parent / "results"

LOSS_TOLERANCE: Final = 1e-3
"""By how much, of the reference's loss, a contestant's may differ in any round."""

MALLOC: Final = {"default": {}, "mmap threshold 128 KiB": {"MALLOC_MMAP_THRESHOLD_": "131072"}}
"""Settings of glibc's allocator under which memory is measured: what the environment adds, by title."""

_USED_SHARE: Final = 0.8
"""Of the memory that is available: what a heat may need by estimate, which leaves out activations and imports."""

_SWEEP_WARMUP, _SWEEP_ROUNDS = 2, 5
_MEMORY_WARMUP, _MEMORY_ROUNDS = 3, 5
_ELEMENT_BYTES: Final = 4


def main(arguments: Sequence[str]) -> int:
    """Measure what the arguments ask for and show it; return 1 if some of it failed.

    Result files are written where a folder is named, and for the plan. What fails is told, and the rest is measured.
    """
    options = _parse(arguments)
    if options.plan == []:
        for name, setting in PLAN.items():
            _say(f"{setting.minutes:4d} min  {name}")
        _say(f"{sum(setting.minutes for setting in PLAN.values()):4d} min  all")
        return 0
    failed = []
    for setting in _planned(options.plan) if options.plan else _settings(options):
        _say(f"{setting.name}: {CASES[setting.case].title}, {setting.ranks} ranks, micro-batch {setting.samples}")
        try:
            result = {"setting": asdict(setting), **_circumstances(), **_measure(setting)}
        except RuntimeError as error:
            _say(f"  failed: {error}")
            failed.append(setting.name)
            continue
        for line in aligned(_table(result)):
            _say(line)
        if options.output or options.plan:
            write_result((options.output or RESULTS) / f"{setting.name}.json", result)
    if failed:
        _say(f"Failed: {', '.join(failed)}")
    return int(bool(failed))


def _circumstances() -> dict[str, Any]:
    return circumstances("benchmarks.run", ("torch", "deepspeed", "numpy"))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--plan", nargs="*", choices=["all", *PLAN], metavar="NAME", help="what is published; no name: list"
    )
    what.add_argument("--case", nargs="+", choices=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[1], help="samples of a micro-batch")
    parser.add_argument(
        "--only", default="default", help=f"contestants: names or patterns, with commas between. {_names()}"
    )
    parser.add_argument("--steps", type=int, default=30, help="recorded steps of each contestant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before")
    parser.add_argument(
        "--sweep", default="", help="contestants whose fastest, of each library and stage, take part, too"
    )
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--output", type=Path, help="folder for a result file of each setting")
    return parser.parse_args(arguments)


def _names() -> str:
    return f"'default' and 'sweep' are many. There are: {', '.join(CONTESTANTS)}"


def _planned(names: Sequence[str]) -> list[Setting]:
    return list(PLAN.values()) if "all" in names else [PLAN[name] for name in names]


def _settings(options: argparse.Namespace) -> list[Setting]:
    kind = "memory" if options.memory else "step"
    return [
        Setting(kind, case, ranks, samples, options.only, options.sweep, options.warmup, options.steps)
        for case in options.case
        for ranks in options.ranks
        for samples in options.micro_batch
    ]


def select(patterns: str) -> list[str]:
    """Return the contestants that any of the patterns matches, in the order of tables.

    Raises:
        ValueError: a pattern that matches none.
    """
    found: set[str] = set()
    for pattern in patterns.split(",") if patterns else []:
        matched = [
            name
            for name, one in CONTESTANTS.items()
            if fnmatchcase(name, pattern) or pattern == ("sweep" if one.is_sweep else "default")
        ]
        if not matched:
            raise ValueError(f"No contestant is called {pattern!r}. {_names()}.")
        found.update(matched)
    return [name for name in CONTESTANTS if name in found]


def _measure(setting: Setting) -> dict[str, Any]:
    names = select(setting.only)
    if setting.kind == "memory":
        return {"memory": {title: _run_memory(setting, names, added) for title, added in MALLOC.items()}}
    result: dict[str, Any] = {"sweep": []}
    if setting.sweep:
        result["sweep"] = _run_heats(setting, _swept(names, select(setting.sweep)), _SWEEP_WARMUP, _SWEEP_ROUNDS)
        names = [name for name in CONTESTANTS if name in {*names, *best_of_sweep(result["sweep"])}]
    result["time"] = _run_heats(setting, names, setting.warmup, setting.steps)
    if setting.kind == "scaling" and len(result["time"]) > 1:
        raise RuntimeError(f"{setting.only} do not fit into one launch, so their times cannot be added up.")
    return result


def _table(result: dict[str, Any]) -> list[str]:
    if result["setting"]["kind"] == "memory":
        return memory_table(result["memory"])
    if result["setting"]["kind"] == "scaling":
        return scaling_table([result])
    return time_table(result["time"], result["setting"])


# -- time ------------------------------------------------------------------------------------------------------------


def _swept(names: Sequence[str], sweep: Sequence[str]) -> list[str]:
    """Return the sweep, the reference, and those of its libraries at its stages that take part anyway."""
    swept = {(CONTESTANTS[name].library, CONTESTANTS[name].stage) for name in sweep}
    beside = [name for name in names if (CONTESTANTS[name].library, CONTESTANTS[name].stage) in swept]
    return [name for name in CONTESTANTS if name in {reference_of(names), *beside, *sweep}]


def _run_heats(setting: Setting, names: Sequence[str], warmup: int, rounds: int) -> list[dict[str, Any]]:
    """Return one record for each launch: the contestants' merged series, and the load of the machine before."""
    heats = []
    for heat in pack_heats(names, count_numel(setting.case), setting.ranks, available_bytes() * _USED_SHARE):
        _say(f"  {rounds} rounds of {len(heat)}: {', '.join(heat)}")
        load = round(os.getloadavg()[0], 2)
        job = Job("time", setting.case, setting.samples, tuple(heat), warmup, rounds)
        contestants = merge_ranks(launch(job, setting.ranks, {}))
        check_losses(contestants)
        heats.append({"warmup": warmup, "load_before": load, "contestants": contestants})
    return heats


def pack_heats(names: Sequence[str], numel: int, ranks: int, limit_bytes: float) -> list[list[str]]:
    """Divide contestants into launches that fit into memory, as few as a first fit in their order gives.

    Invariant: with each contestant its heat has the reference, and zeroshard at the same stage, if they take part.
    """
    heats: list[list[str]] = []
    waiting, reference = list(names), reference_of(names)
    while waiting:
        heat: list[str] = []
        for name in waiting:
            joined = [one for one in names if one in {*heat, name, reference} or _is_measure_of(one, name)]
            if not heat or _needed_bytes(joined, numel, ranks) <= limit_bytes:
                heat = joined
        waiting = [name for name in waiting if name not in heat]
        heats.append(heat)
    return heats


def _is_measure_of(one: str, name: str) -> bool:
    """Tell whether `one` is zeroshard at the stage of `name`."""
    return CONTESTANTS[one].library == "zeroshard" and CONTESTANTS[one].stage == CONTESTANTS[name].stage


def _needed_bytes(names: Sequence[str], numel: int, ranks: int) -> float:
    """Return about what a launch needs: what all keep between steps, and what the one whose turn it is adds."""
    kept = sum(CONTESTANTS[name].kept_numel(numel, ranks) for name in names)
    return ranks * _ELEMENT_BYTES * (kept + 2 * numel)


def count_numel(case: str) -> int:
    """Return the elements of a case's model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in CASES[case].build().parameters())


def merge_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one series of each contestant's series on all ranks.

    Returns: by name and round, the slowest rank's time, all ranks' CPU seconds, the mean of their sent bytes and of
    their losses; predictions are rank 0's.
    """
    merged = {}
    for name, first in ranks[0].items():
        series = [key for key in first if key != "predicted"]
        rounds = {key: list(zip(*(rank[name][key] for rank in ranks), strict=True)) for key in series}
        merged[name] = {
            "wall_s": [max(values) for values in rounds["wall_s"]],
            "cpu_s": [round(sum(values), 6) for values in rounds["cpu_s"]],
            "wire_bytes": [round(fmean(values)) for values in rounds["wire_bytes"]],
            "loss": [float(f"{fmean(values):.8g}") for values in rounds["loss"]],
            "predicted": first["predicted"],
        }
    return merged


def check_losses(contestants: dict[str, Any]) -> None:
    """Note each contestant's largest deviation from the reference's losses, as a share of them.

    Raises:
        RuntimeError: one trained another model than the reference, whose times would say nothing.
    """
    reference = reference_of(contestants)
    expected = contestants[reference]["loss"]
    for name, one in contestants.items():
        if CONTESTANTS[name].stage is None:
            continue  # each rank trains alone
        deviations = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(one["loss"], expected, strict=True)]
        one["loss_deviation"] = float(f"{max(deviations):.2g}")
        if not one["loss_deviation"] <= LOSS_TOLERANCE:
            number = max(range(len(deviations)), key=deviations.__getitem__)
            raise RuntimeError(
                f"{name} did not train as {reference}: in recorded round {number} its loss was "
                f"{one['loss'][number]:.7g}, expected {expected[number]:.7g} within {LOSS_TOLERANCE:g} of it. "
                "Its times cannot be compared."
            )


def best_of_sweep(heats: Sequence[dict[str, Any]]) -> list[str]:
    """Return, for each library and stage, the fastest setting of the sweep, unless that is a default already there."""
    times: dict[str, float] = {}
    for heat in heats:
        contestants = heat["contestants"]
        base = median(contestants[reference_of(contestants)]["wall_s"])
        for name, one in contestants.items():
            times.setdefault(name, median(one["wall_s"]) / base)
    best: dict[tuple[str, int | None], str] = {}
    for name in sorted(times, key=times.__getitem__):
        best.setdefault((CONTESTANTS[name].library, CONTESTANTS[name].stage), name)
    return [name for name in CONTESTANTS if CONTESTANTS[name].is_sweep and name in best.values()]


# -- memory ----------------------------------------------------------------------------------------------------------


def _run_memory(setting: Setting, names: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return each contestant's memory, the highest of all ranks, each from a launch of its own."""
    _say(f"  memory of {len(names)}, {' '.join(f'{k}={v}' for k, v in environment.items()) or 'default malloc'}")
    found = {}
    for name in names:
        job = Job("memory", setting.case, setting.samples, (name,), _MEMORY_WARMUP, _MEMORY_ROUNDS)
        ranks = launch(job, setting.ranks, environment)
        found[name] = {key: max(rank[key] for rank in ranks) for key in ("peak_bytes", "step_peak_bytes")}
        found[name]["predicted"] = ranks[0]["predicted"]
    return found


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `launch` ends its ranks on the way out
    raise SystemExit(main(sys.argv[1:]))
