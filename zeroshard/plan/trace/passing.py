"""The temporary memory of an optimizer's step, from traces of steps on a few small parameters.

Owns these traces. It must not know a model or its shards: `named.py` has the sizes of a rank's slices.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from zeroshard.optim.keeps import kept_by, options_of, rebuild
from zeroshard.plan.named import Passing, States
from zeroshard.plan.trace.events import Phase
from zeroshard.plan.trace.tracer import trace_step

__all__ = ["passing_of"]

NUMEL = 1 << 12
"""Elements of a parameter in a trace."""
READ = (0.5, 1000.0)
"""Values of counters and of products of momentums: their kernels differ, and some divide by one less the value."""


def passing_of(optimizer: torch.optim.Optimizer, known: States, *, is_cpu: bool) -> Passing:
    """Return what a step of an optimizer has beside its states: the most of any group.

    Args:
        known: of the optimizer by its name; they count where no trace succeeds.
    """
    # Constants that the step keeps in a cache are made here, not by a trace, whose tensors have no memory.
    kept_by(optimizer)
    found = dict[str, Passing]()
    for options in (options_of(optimizer, group) for group in optimizer.param_groups):
        if known.is_fused and not is_cpu and options.get("foreach") is options.get("fused") is None:
            options["fused"] = True
        if (key := repr(sorted(options.items()))) in found:
            continue
        taken = [one for read in READ if (one := _taken(optimizer, options, read, is_cpu=is_cpu)) is not None]
        if not taken:
            return known.passing
        one, two, three = map(max, zip(*taken, strict=True))
        total = three - two
        found[key] = Passing(total, one - total, two - one - total)
    return Passing(*(max(getattr(one, name) for one in found.values()) for name in ("total", "own", "before")))


def _taken(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], read: float, *, is_cpu: bool
) -> list[float] | None:
    """Return the peaks of a second step on one, two and three parameters, in numbers for each element of one."""
    found = []
    for count in (1, 2, 3):
        try:
            trace = trace_step(
                lambda model: torch.stack([parameter.sum() for parameter in model]).sum(),
                nn.ParameterList(nn.Parameter(torch.empty(NUMEL, device="meta")) for _ in range(count)),
                optimizer=lambda parameters: rebuild(optimizer, [{**options, "params": [*parameters]}]),
                personality="cpu" if is_cpu else "cuda",
                reads=lambda value: read if value.is_floating_point() else True,
                steps=2,
            )
        except Exception:  # a failed prediction must not fail the plan
            return None
        *_, first = takewhile(lambda event: event.phase is Phase.UPDATE, reversed(trace.events))
        live = trace.live[first.order - 1 :]
        found.append(round((max(live) - live[0]) / (4 * NUMEL), 1))
    return found
