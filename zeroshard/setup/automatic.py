"""`"auto"` in `shard(stage=, offload=)`: the lowest row and the least offload that fit a device.

Owns the choices. Activations are unknown when a model is sharded, so model states and buffers may use half of the
device; `zs.plan(stage="auto")` and `zs.plan(offload="auto")` also know activations, and use the whole plan.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn

from zeroshard import devices
from zeroshard.describe.offload import Offload, choices_for, least_of, reached, row_with, text_of
from zeroshard.describe.precision import Precision
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import UnitPlan
from zeroshard.optim.updates import updates_of_optimizer
from zeroshard.table.bytes import Updates, on_device, predict
from zeroshard.table.cells import Residency
from zeroshard.table.settings import Settings
from zeroshard.table.spec import BucketSpec, UnitSpec
from zeroshard.table.wires import Messages, Silence
from zeroshard.wire.comm import gather_across_ranks
from zeroshard.wire.mesh import Mesh

__all__ = ["device_bytes", "free_bytes", "least_offload", "least_row"]

STATES_PART: Final = 0.5
"""The fraction of the device for model states and buffers; the rest is for activations."""
USUAL_COST: Final = (2, 4)
"""The states assumed for an optimizer that is attached later, or whose states no trial step determines: AdamW's."""
MB: Final = 1e6


def least_row(
    rows: Sequence[Residency],
    plans: Sequence[UnitPlan],
    optimizers: Sequence[torch.optim.Optimizer],
    precision: Precision,
    mesh: Mesh,
    numel_of: Callable[[nn.Parameter], int],
    memory_bytes: int,
) -> Residency:
    """Return the first row whose model states and buffers fit half of a device; otherwise the last row.

    Args:
        memory_bytes: the memory of the device.
    """

    def fits(row: Residency) -> bool:
        units = _units_of(row, plans, precision, mesh, numel_of)
        return _kept_bytes(units, plans, optimizers, mesh) <= STATES_PART * memory_bytes

    return next(filter(fits, rows), rows[-1])


def least_offload(
    row: Residency,
    plans: Sequence[UnitPlan],
    optimizers: Sequence[torch.optim.Optimizer],
    precision: Precision,
    mesh: Mesh,
    numel_of: Callable[[nn.Parameter], int],
    room_bytes: int | None,
) -> tuple[Offload | None, str]:
    """Return the smallest offload that fits, and a line that explains the choice.

    Args:
        room_bytes: device memory for this rank's values, equal on all ranks; None for no limit.

    Raises:
        ValueError: model states and buffers exceed half of `room_bytes` even with full offload.
    """
    if room_bytes is None:
        return None, "offload='auto': nothing is offloaded, since device and host share one memory"
    is_alone = mesh.shard_size * mesh.replicas == 1

    def units_with(offload: Offload | None) -> Sequence[UnitSpec]:
        return _units_of(row_with(row, offload, is_alone=is_alone), plans, precision, mesh, numel_of)

    def bytes_with(offload: Offload | None) -> int:
        return _kept_bytes(units_with(offload), plans, optimizers, mesh)

    most_bytes = int(STATES_PART * room_bytes)
    chosen, is_fitting = least_of(choices_for(row), lambda one: bytes_with(one) <= most_bytes)
    all_bytes, kept_bytes = bytes_with(None), bytes_with(chosen)
    room = f"{most_bytes / MB:,.1f} MB, half of the {room_bytes / MB:,.1f} MB free"
    if not is_fitting:
        remedy = "Use more ranks or precision='bf16'."
        if not row.cuts_parameters:
            remedy = f"stage=3 can also offload parameters. {remedy}"
        raise ValueError(
            f"offload='auto': model states and buffers need {all_bytes / MB:,.1f} MB of a rank's device, and "
            f"{kept_bytes / MB:,.1f} MB with full offload; they may use {room}. {remedy}"
        )
    if chosen is None:
        return None, f"offload='auto': nothing is offloaded: {all_bytes / MB:,.1f} MB fit {room}"
    moved = f"states={chosen.states:g}" + f", parameters={chosen.parameters:g}" * bool(chosen.parameters)
    return chosen, (
        f"offload='auto': zs.Offload({moved}), which moves {text_of(reached(units_with(chosen)))}, leaves "
        f"{kept_bytes / MB:,.1f} of {all_bytes / MB:,.1f} MB on the device, where model states may use {room}"
    )


def _units_of(
    row: Residency,
    plans: Sequence[UnitPlan],
    precision: Precision,
    mesh: Mesh,
    numel_of: Callable[[nn.Parameter], int],
) -> Sequence[UnitSpec]:
    """Return the units as the first rank has them: with the least padding."""
    return describe_units(plans, row, precision, shard_size=mesh.shard_size, replicas=mesh.replicas, numel_of=numel_of)


def _kept_bytes(
    units: Sequence[UnitSpec], plans: Sequence[UnitPlan], optimizers: Sequence[torch.optim.Optimizer], mesh: Mesh
) -> int:
    """Return the bytes of model states and buffers on the device of a rank."""
    places = {name: (b, i) for u in units for b in u.buckets for i, name in enumerate(b.names)}
    names = {id(p): name for plan in plans for name, p in plan.parameters}

    def place_of(parameter: nn.Parameter) -> tuple[BucketSpec, int]:
        return places[names[id(parameter)]]

    updates = [_updates_of(one, place_of, mesh.shard_size) for one in optimizers]
    updates = updates or [Updates([*places.values()], *USUAL_COST)]
    wire = Silence() if mesh.shard_size * mesh.replicas == 1 else Messages()
    return on_device(predict(units, updates, wire))


def _updates_of(
    optimizer: torch.optim.Optimizer, place_of: Callable[[nn.Parameter], tuple[BucketSpec, int]], ranks: int
) -> Updates:
    """Return an optimizer's updates; those of AdamW where a trial step does not determine its states."""
    found, _ = updates_of_optimizer(optimizer, place_of, ranks)
    return found or Updates([place_of(p) for group in optimizer.param_groups for p in group["params"]], *USUAL_COST)


def free_bytes(mesh: Mesh, settings: Settings, model: nn.Module) -> int | None:
    """Return the bytes of each rank's device for model states and activations; None without a limit, as on a CPU.

    Collective: on CUDA devices an all-gather of 8 bytes; every rank must call.
    """
    if mesh.device.type == "cpu":
        return settings.device_bytes
    free = devices.free_bytes(mesh.device)
    # The model's tensors on the device become a part of its states.
    held = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()  # `describe` refuses others
    free += sum(one.nbytes for one in held if one.device == mesh.device)
    least = int(gather_across_ranks(torch.tensor([free], device=mesh.device)).min())
    return least if settings.device_bytes is None else min(least, settings.device_bytes)


def device_bytes(mesh: Mesh) -> int:
    """Return the memory of this rank's device; on a CPU, its part of host memory."""
    if mesh.device.type == "cuda":
        return int(torch.cuda.get_device_properties(mesh.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.world_size
