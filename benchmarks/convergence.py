"""What islands cost in convergence: the default job of `zeroshard train`, synchronous and with `zs.shard(outer=)`.

    python -m benchmarks.convergence
    python -m benchmarks.convergence --table

Owns the comparison and its tables in docs/outer.md. Model, text, optimizer, schedule and batches are those of
`zeroshard train`; each island reads its part of the same batches, so that all runs read equal tokens. An island is one
rank. After the last step `zero.finish()` makes the islands' parameters equal, and these are scored on held-out text.

The result file keeps every run; a run that is in it is not made again, so an interrupted comparison goes on. Runs do
not depend on the time that they take, so other work on the machine changes nothing.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroshard as zs
from benchmarks.machine import circumstances, put_table, write_result
from benchmarks.optimizers import open_text
from zeroshard.testing import run_ranks
from zeroshard.train.config import Config, load_config
from zeroshard.train.corpus import Corpus
from zeroshard.train.data import IGNORED, count_scored, heldout_batches, training_batch
from zeroshard.train.models.language import LanguageModel, make_gpt
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.run import learning_rate_factor

RATES: Final = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
MOMENTA: Final = (0.5, 0.9)
PROMISING: Final = ((0.7, 0.9), (0.5, 0.5), (0.7, 0.5), (1.0, 0.5))
"""Rates and momenta that run first: the published ones, and those whose steps are about as long as averaging's."""
SEEDS: Final = (1, 2, 3)
SHORT, NORMAL, LONG = 800, 1500, 2400
EVAL_WINDOWS: Final = 8
TIMEOUT_S: Final = 7200.0
RESULT: Final = Path(__file__).parent / "results" / "convergence.json"
PAGE: Final = Path(__file__).parents[1] / "docs" / "outer.md"


@final
@dataclass(frozen=True)
class Asked:
    """One run.

    Args:
        every: steps between exchanges; 0 for synchronous training.
        rate, momentum: of the outer optimizer, SGD with Nesterov's momentum; a rate of 0 averages.
    """

    steps: int
    islands: int = 2
    every: int = 0
    bits: int = 32
    rate: float = 0.0
    momentum: float = 0.0

    def outer(self) -> zs.Outer | None:
        """Return the argument of `zs.shard`."""
        if not self.every:
            return None
        if not self.rate:
            return zs.Outer(every=self.every, bits=self.bits)  # type: ignore[arg-type]
        return zs.Outer(
            every=self.every,
            optimizer=lambda p: torch.optim.SGD(p, lr=self.rate, momentum=self.momentum, nesterov=True),
        )


SYNCHRONOUS: Final = (Asked(NORMAL), Asked(SHORT), Asked(LONG))
AVERAGING: Final = (
    Asked(NORMAL, every=10),
    Asked(NORMAL, islands=4, every=10, bits=4),
    Asked(NORMAL, every=50),
)
GRID_EVERY: Final = 50
GRID: Final = tuple(
    Asked(SHORT, every=GRID_EVERY, rate=rate, momentum=momentum) for momentum in MOMENTA for rate in RATES
)
AVERAGING_SHORT, AVERAGING_LONG = Asked(SHORT, every=GRID_EVERY), Asked(LONG, every=100)


def train(asked: Asked, seed: int, cache: Path) -> dict[str, Any]:
    """Train on this rank, and return bits per byte of the held-out text, and how long it took."""
    torch.set_num_threads(1)
    config = load_config(overrides=[f"train.steps={asked.steps}", f"run.seed={seed}", f"run.ranks={asked.islands}"])
    settings, rank, ranks = config.train, dist.get_rank(), dist.get_world_size()
    corpus = open_text(cache)
    zs.init(seed)
    with torch.device("meta"):
        language = make_gpt(config.gpt)
    optimizer = make_optimizer(settings, language)
    outer = asked.outer()
    zero = zs.shard(
        language.module,
        optimizer,
        stage=3,
        weights=language.weights,
        mesh=None if outer is None else asked.islands,
        outer=outer,
        settings=zs.Settings(watchdog_s=config.zero.watchdog_s),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step, steps=settings.steps, warmup_fraction=settings.warmup_fraction, final_fraction=settings.final_fraction
        ),
    )
    start_s = time.perf_counter()
    for step in range(settings.steps):
        inputs, targets = training_batch(
            corpus.train,
            seed=seed,
            step=step,
            batch=settings.batch,
            context=config.model.context,
            rank=rank,
            world_size=ranks,
        )
        language.compute_loss(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(language.module.parameters(), settings.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    train_s = time.perf_counter() - start_s
    zero.finish()
    zero.check_copies()
    return {"bits_per_byte": evaluate(language, corpus, config), "train_s": round(train_s, 1)}


@torch.no_grad()
def evaluate(language: LanguageModel, corpus: Corpus, config: Config) -> float:
    """Return bits per byte of held-out text, of which each rank scores a part."""
    ranks = dist.get_world_size()
    scored, scored_bytes = count_scored(corpus.heldout_ends, config.train.eval_bytes)
    batches = heldout_batches(
        corpus.heldout,
        batch=EVAL_WINDOWS,
        context=config.model.context,
        scored=scored,
        rank=dist.get_rank(),
        world_size=ranks,
    )
    nats = torch.zeros((), dtype=torch.float64, device="cpu")
    language.module.eval()
    for inputs, targets in batches:
        logits = language.compute_logits(inputs).flatten(0, 1)
        nats += F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return float(zs.mean_across_ranks(nats)) * ranks / scored_bytes / math.log(2)


def runs_of(made: Sequence[dict[str, Any]]) -> Iterator[tuple[Asked, int]]:
    """Yield what is to be run, the most telling first; the best two of the grid follow from what was made."""
    first, *others = SEEDS
    normal, long = (SYNCHRONOUS[0], *AVERAGING), (SYNCHRONOUS[2], AVERAGING_LONG)
    short, promising = (SYNCHRONOUS[1], AVERAGING_SHORT), [one for one in GRID if (one.rate, one.momentum) in PROMISING]
    yield from ((asked, first) for asked in (*normal, *short, *promising, *long, *GRID))
    yield from ((asked, seed) for seed in others for asked in normal)
    yield from ((asked, seed) for seed in others for asked in (*short, *best_two(made)))
    yield from ((asked, seed) for seed in others for asked in long)


def best_two(made: Sequence[dict[str, Any]]) -> list[Asked]:
    """Return the best two of the grid, by the first seed."""
    scores = {asked: values[SEEDS[0]] for asked in GRID if SEEDS[0] in (values := values_of(made, asked))}
    return sorted(scores, key=lambda asked: scores[asked])[:2]


def values_of(made: Sequence[Mapping[str, Any]], asked: Asked) -> dict[int, float]:
    """Return bits per byte by seed."""
    return {run["seed"]: run["bits_per_byte"] for run in made if run["asked"] == asdict(asked)}


def row_of(made: Sequence[Mapping[str, Any]], name: str, asked: Asked, against: Asked) -> list[str]:
    """Return a row of a table: the mean and range of values, and their ratio to another run's by seed; or []."""
    values, others = values_of(made, asked), values_of(made, against)
    if not values:
        return []
    found = sorted(values.values())
    ratios = sorted(values[seed] / others[seed] - 1 for seed in values if seed in others)
    told = f"{statistics.mean(ratios):+.1%}" if ratios else "not measured"
    if len(ratios) > 1:
        told += f" ({ratios[0]:+.1%} to {ratios[-1]:+.1%})"
    spread = f" ({found[0]:.3f} to {found[-1]:.3f})" if len(found) > 1 else ""
    cells = (name, str(asked.steps), str(len(found)), f"{statistics.mean(found):.3f}{spread}", told)
    return ["| " + " | ".join(cells) + " |"]


def name_of(asked: Asked) -> str:
    """Return a row's name."""
    if not asked.every:
        return "synchronous"
    outer = f"Nesterov {asked.rate:g}, {asked.momentum:g}" if asked.rate else "averaging"
    return f"{asked.islands} islands, every {asked.every}, {outer}" + f", {asked.bits} bits" * (asked.bits < 32)


def table_of(result: Mapping[str, Any]) -> str:
    """Return the tables for the page."""
    made = result["runs"]
    lines = ["| run | steps | seeds | held-out bits per byte | against synchronous |", "|---|---:|---:|---|---|"]
    for against, some in (
        (SYNCHRONOUS[0], AVERAGING),
        (SYNCHRONOUS[2], (AVERAGING_LONG,)),
        (SYNCHRONOUS[1], (AVERAGING_SHORT, *best_two(made))),
    ):
        for asked in (against, *some):
            lines += row_of(made, name_of(asked), asked, against)
    grid = {asked: values_of(made, asked).get(SEEDS[0]) for asked in GRID}
    if sum(value is not None for value in grid.values()) > 2:
        head = "".join(f" {rate:g} |" for rate in RATES)
        lines += ["", f"| momentum, rate: |{head}", "|---|" + "---:|" * len(RATES)]
        for momentum in MOMENTA:
            cells = [grid[asked] for asked in GRID if asked.momentum == momentum]
            lines.append(f"| {momentum:g} |" + "".join(" - |" if one is None else f" {one:.3f} |" for one in cells))
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cache", type=Path, default=Path("runs/.cache"))
    parser.add_argument("--table", action="store_true", help="write the tables into the page from the file, and stop")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    if options.table:
        PAGE.write_text(put_table(PAGE.read_text(), "convergence", table_of(result)))
        return
    open_text(options.cache)
    start_s = time.monotonic()
    for asked, seed in runs_of(result["runs"]):
        if seed in values_of(result["runs"], asked) or time.monotonic() - start_s > 60 * options.minutes:
            continue
        found = run_ranks(train, asked.islands, asked, seed, options.cache.resolve(), timeout_s=TIMEOUT_S)[0]
        result["runs"].append({"asked": asdict(asked), "seed": seed, **found})
        result["circumstances"] = circumstances("benchmarks.convergence")
        write_result(options.out, result)
        print(f"{name_of(asked)}, {asked.steps} steps, seed {seed}: {found}", flush=True)


if __name__ == "__main__":
    # Ranks import what they run by its name, which the module does not have as a program.
    from benchmarks.convergence import main as named_main

    named_main()
