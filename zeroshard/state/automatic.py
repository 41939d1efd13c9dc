"""Which row of the residency table `stage="auto"` stands for.

Owns the choice. Activations are not known when a model is sharded, so model states and buffers may take half of the
device; `zs.plan(stage="auto")` knows activations, too, and reads the whole plan.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn

from zeroshard.describe.precision import Precision
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import UnitPlan
from zeroshard.state.admission import state_cost
from zeroshard.table.activations import Activations
from zeroshard.table.bytes import Updates, predict
from zeroshard.table.cells import Residency
from zeroshard.table.stages import STAGES
from zeroshard.table.wires import Messages, Silence
from zeroshard.wire.mesh import Mesh

__all__ = ["device_bytes", "least_row"]

STATES_PART: Final = 0.5
"""Of the device that model states and buffers may take; the rest is for activations."""
USUAL_COST: Final = (2, 4)
"""Of an optimizer that is attached later: AdamW's."""


def least_row(
    plans: Sequence[UnitPlan],
    optimizers: Sequence[torch.optim.Optimizer],
    precision: Precision,
    mesh: Mesh,
    cell: Activations,
    numel_of: Callable[[nn.Parameter], int],
    memory_bytes: int,
) -> Residency:
    """Return the row of the least stage whose model states and buffers fit half of a device; the last one if none does.

    Args:
        cell: of the activations column.
        memory_bytes: of the device.
    """
    costs = [(state_cost(one) or USUAL_COST, one) for one in optimizers]
    chosen = Residency()
    for row in STAGES.values():
        units = describe_units(
            plans, row, precision, shard_size=mesh.shard_size, replicas=mesh.replicas, numel_of=numel_of
        )
        places = {name: (b, i) for u in units for b in u.buckets for i, name in enumerate(b.names)}
        names = {id(p): name for plan in plans for name, p in plan.parameters}
        updates = [
            Updates([places[names[id(p)]] for group in one.param_groups for p in group["params"]], *cost)
            for cost, one in costs
        ] or [Updates([*places.values()], *USUAL_COST)]
        wire = Silence() if mesh.shard_size * mesh.replicas == 1 else Messages()
        chosen = Residency(row.states, row.gradients, row.parameters, cell)
        if sum(predict(units, updates, wire).values()) <= STATES_PART * memory_bytes:
            break
    return chosen


def device_bytes(mesh: Mesh) -> int:
    """Return the memory of this rank's device; of a host, its part of it."""
    if mesh.device.type == "cuda":
        return int(torch.cuda.get_device_properties(mesh.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.world_size
