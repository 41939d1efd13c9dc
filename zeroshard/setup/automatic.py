"""`"auto"` in `shard(stage=, offload=)`: what fits a device, and the line that explains the choice.

Owns the answer of `shard()` to what fits; `describe/asked.py` has the choice. Activations are unknown when a model is
sharded, so model states and buffers may use half of the device; `zs.plan(stage="auto")` and `zs.plan(offload="auto")`
also know activations, and use the whole plan.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import torch
from torch import nn

from zeroshard import devices
from zeroshard.describe.asked import Resolved, choose
from zeroshard.describe.offload import Offload, choices_for, first_of, reached, row_with, text_of
from zeroshard.describe.precision import Precision
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import UnitPlan
from zeroshard.optim.updates import USUAL_COST, Entry, updates_of_optimizer
from zeroshard.table.bytes import Sliced, on_device, predict
from zeroshard.table.cells import Residency
from zeroshard.table.settings import Settings
from zeroshard.table.sizes import size_text
from zeroshard.table.spec import UnitSpec
from zeroshard.table.whole import make_updates
from zeroshard.table.wires import Messages, Silence
from zeroshard.wire.comm import gather_across_ranks
from zeroshard.wire.mesh import Mesh

__all__ = ["KeptBytes", "choose_least", "free_bytes"]

STATES_PART: Final = 0.5
"""The fraction of the device for model states and buffers; the rest is for activations."""
ONE_MEMORY: Final = "offload='auto': nothing is offloaded, since device and host share one memory"


@final
@dataclass(frozen=True)
class KeptBytes:
    """The bytes of model states and buffers on the device of the first rank, which has the least padding.

    Args:
        numel_of: returns the number of elements of a parameter on this rank.
    """

    plans: Sequence[UnitPlan]
    optimizers: Sequence[torch.optim.Optimizer]
    precision: Precision
    mesh: Mesh
    numel_of: Callable[[nn.Parameter], int]

    @property
    def is_alone(self) -> bool:
        """Whether this rank has no other rank to share states with."""
        return self.mesh.shard_size * self.mesh.replicas == 1

    def units(self, row: Residency, offload: Offload | None) -> Sequence[UnitSpec]:
        """Return the units with a row and an offload."""
        mesh, moved = self.mesh, row_with(row, offload, is_alone=self.is_alone)
        sizes = {"shard_size": mesh.shard_size, "replicas": mesh.replicas}
        is_part = mesh.pipe is not None
        return describe_units(self.plans, moved, self.precision, numel_of=self.numel_of, is_part=is_part, **sizes)

    def __call__(self, row: Residency, offload: Offload | None) -> int:
        """Return the bytes with a row and an offload."""
        units = self.units(row, offload)
        names = {id(p): name for plan in self.plans for name, p in plan.parameters}
        places = {name: (b, index) for unit in units for b in unit.buckets for index, name in enumerate(b.names)}

        def entry_of(parameter: nn.Parameter) -> Entry:
            return *places[names[id(parameter)]], tuple(parameter.shape), -1

        # States that no trial step determines, or of an optimizer that is attached later, count as AdamW's.
        updates = [updates_of_optimizer(one, entry_of, unknown=USUAL_COST) for one in self.optimizers]
        updates = updates or [make_updates(Sliced(*place, USUAL_COST) for place in places.values())]
        wire = Silence() if self.is_alone else Messages()
        return on_device(predict(units, updates, wire))


def choose_least(resolved: Resolved, kept: KeptBytes, room_bytes: int | None) -> tuple[Residency, Offload | None, str]:
    """Return the row and the offload of arguments, and a line that explains the choice of offload "auto".

    Args:
        room_bytes: device memory for this rank's values, equal on all ranks; None for no limit.

    Raises:
        ValueError: model states and buffers exceed half of `room_bytes` even with full offload.
    """
    free = room_bytes if room_bytes is not None else _host_bytes(kept.mesh)
    most_bytes = int(STATES_PART * free)

    def fits(row: Residency, offload: Offload | None) -> bool:
        return kept(row, offload) <= most_bytes

    row, chosen, is_fitting = choose(
        resolved, fits, lambda row: first_of(choices_for(row), partial(fits, row)), shares_memory=room_bytes is None
    )
    if not resolved.is_auto or room_bytes is None:
        return row, chosen, ONE_MEMORY * resolved.is_auto
    all_bytes, kept_bytes = kept(row, None), kept(row, chosen)
    room = f"{size_text(most_bytes)}, half of the {size_text(room_bytes)} free"
    if not is_fitting:
        remedy = "Use more ranks or precision='bf16'."
        if not row.cuts_parameters:
            remedy = f"stage=3 can also offload parameters. {remedy}"
        raise ValueError(
            f"offload='auto': model states and buffers need {size_text(all_bytes)} of a rank's device, and "
            f"{size_text(kept_bytes)} with full offload; they may use {room}. {remedy}"
        )
    if chosen is None:
        return row, None, f"offload='auto': nothing is offloaded: {size_text(all_bytes)} fit {room}"
    moved = f"states={chosen.states:g}" + ", gradients=0" * (chosen.gradients == 0)
    moved += f", parameters={chosen.parameters:g}" * bool(chosen.parameters)
    left = f"{size_text(kept_bytes)} of {size_text(all_bytes)} on the device, where model states may use {room}"
    reaches = text_of(reached(kept.units(row, chosen)))
    return row, chosen, f"offload='auto': zs.Offload({moved}), which moves {reaches}, leaves {left}"


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
    least = int(gather_across_ranks(torch.tensor([free], device="cpu"), mesh).min())
    return min(least, settings.device_bytes) if isinstance(settings.device_bytes, int) else least


def _host_bytes(mesh: Mesh) -> int:
    """Return a rank's part of host memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.world_size
