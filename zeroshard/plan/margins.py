"""How far predictions of memory are from published runs of other systems, by kind of run.

Owns `margins.json` and the choice of a plan's margin. It must not know how the errors were found: `Scorecard.margins`
computes them, with this program's own plans. Needs no torch.

Note: what a margin is
    Of the published runs of a kind, each source is judged by the errors of the others: the margin is the largest 90th
    percentile of errors that is left when one source is taken out; if a kind has one source, when one model is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.job import Options

__all__ = ["MEMORY", "Margin", "kind_of", "margin_of"]


@final
@dataclass(frozen=True)
class Margin:
    """Errors of memory of a kind of runs: the median, nine in ten, the number of runs, and what was left out."""

    median: float
    nine_tenths: float
    runs: int
    left_out: str
    is_proven: bool = True


OWN: Final = Margin(0.0012, 0.02, 68, "own runs on a CPU")
"""Runs of this library on a CPU: docs/benchmarks.md."""
MEMORY: Final[Mapping[str, Margin]] = MappingProxyType(
    {kind: Margin(**one) for kind, one in json.loads(Path(__file__).with_name("margins.json").read_text()).items()}
)
"""Margins by kind: "margins" of `zeroshard scorecard --json`."""


def kind_of(options: Options) -> str:
    """Return the kind of a run: the axes beside data parallelism, and the last column of the state that is sharded."""
    axes = [name for name, ranks in (("tensor", options.tensor), ("pipe", options.pipe)) if ranks > 1]
    row = options.row
    cut = {"parameters": row.cuts_parameters, "gradients": row.cuts_gradients, "states": row.is_cut}
    sharded = next((name for name, is_cut in cut.items() if is_cut and options.shard_ranks > 1), "nothing")
    return f"{' and '.join(axes) or 'data'}, {sharded} sharded"


def margin_of(options: Options) -> Margin:
    """Return the margin of a plan: the widest, where no published run is of its kind."""
    if options.device.is_cpu:
        return OWN
    found = MEMORY.get(kind_of(options))
    return found or replace(max(MEMORY.values(), key=lambda one: one.nine_tenths), is_proven=False)
