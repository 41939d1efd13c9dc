"""The memory beside the device's that a model's states get: made, and its room taken, before anything is changed.

Owns the checks of a folder and the room that a rank needs. It must not know engines. Read `store/apart.py` first.
"""

import warnings
from collections.abc import Sequence
from typing import Final

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.optimizer import ShardedOptimizer, Source
from zeroshard.optim.keeps import state_cost
from zeroshard.state import early
from zeroshard.state.admission import ELEMENTWISE
from zeroshard.state.in_backward import InBackward
from zeroshard.state.request import Described
from zeroshard.state.streamed import Streams
from zeroshard.store import files
from zeroshard.store.apart import Apart
from zeroshard.store.disk import BLOCK_BYTES
from zeroshard.table.cells import Residency
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.wire.transports import MEMORIES

__all__ = ["check_updates", "home_of", "make_apart", "reserve", "source_of"]

IN_MEMORY: Final = ("tmpfs", "ramfs")


def make_apart(described: Described) -> Apart | None:
    """Return the memory that a described model's states get, with room for them; None where all is on the device.

    Raises:
        ValueError: no file can be made where files are asked for, its disk has no room, or an optimizer's states cannot
            be updated in pieces.
    """
    cell = described.row.states
    check_updates(described.row, described.units, described.optimizers)
    if cell.memory not in MEMORIES:
        return None
    try:
        apart = MEMORIES[cell.memory](described.mesh.device, cell, str(described.mesh))
    except OSError as error:
        raise ValueError(
            f"offload to '{cell.folder}': no file can be made there ({error}). Give a folder that exists, on a disk of "
            "this host, in which this user may write."
        ) from error
    if apart.disk is not None:
        if (kind := files.kind_of(apart.disk.folder)) in IN_MEMORY:
            warnings.warn(
                f"{described.mesh} offload to '{cell.folder}': a {kind}, whose files lie in memory of the host. "
                "Give a folder on a disk, or write offload='host'.",
                stacklevel=4,
            )
        reserve(apart, described.units, described.optimizers, has_masters=True)
    return apart


def home_of(described: Described, apart: Apart | None) -> Apart | None:
    """Return the memory that a described model's parameters lie in between uses; None where all are on the device.

    Args:
        apart: that of the states, which passes its buffers on where it is the same.
    """
    cell = described.row.parameters
    if cell.memory not in MEMORIES:
        return None
    if apart is not None and apart.cell.memory == cell.memory:
        return apart
    return MEMORIES[cell.memory](described.mesh.device, cell, str(described.mesh))


def reserve(
    apart: Apart | None, units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer], *, has_masters: bool
) -> None:
    """Take room on the disk for the states of optimizers, if they lie there.

    Raises:
        ValueError: the host or the disk has less memory than that; the text says how much it has.
    """
    if apart is None or apart.disk is None:
        return
    states = max((cost[0] for one in optimizers if (cost := state_cost(one)) is not None), default=0)
    try:
        apart.disk.reserve(sum(_room_of(b, states, has_masters=has_masters) for unit in units for b in unit.buckets))
    except OSError as error:
        raise ValueError(
            f"offload to '{apart.disk.folder}': {error}. Make room, give another folder, or move less: "
            f"zs.Offload(states={apart.cell.fraction / 2:g}, to=...)."
        ) from error


def _room_of(bucket: BucketSpec, states: int, *, has_masters: bool) -> int:
    start, stop = bucket.apart_states
    sizes = [itemsize(bucket.formats.master)] * has_masters + [itemsize(bucket.formats.state)] * states
    return sum(-(-(stop - start) * size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes) if stop > start else 0


def check_updates(row: Residency, units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise where states in files cannot be updated in pieces, or those on the host not in the backward.

    Raises:
        ValueError: an optimizer that is not known to update each element by itself; masters that are rounded at random;
            what an update in the backward cannot be taken back for.
    """
    if row.states.spares:
        _check_ahead(units, optimizers)
    if row.states.memory != "file":
        return
    for optimizer in optimizers:
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim") or kind.__name__ not in ELEMENTWISE:
            raise ValueError(
                f"{kind.__name__} cannot keep its states in files: they are updated in pieces of parameters, and which "
                f"of its states go with which elements is known of {', '.join(sorted(ELEMENTWISE))} of torch.optim "
                "alone. Use one of these, or offload='host'."
            )
    if any(b.apart and b.formats.state != b.formats.master for unit in units for b in unit.buckets):
        raise ValueError(
            "rounding='stochastic' widens all masters for an update, which those in files cannot be. Use master= "
            "torch.float32, or offload='host'."
        )


def _check_ahead(units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise where states cannot be updated in the backward, before `step()` is called.

    Raises:
        ValueError: several optimizers, or one that is not known to update each element by itself; masters that are
            rounded at random, or are parameters.
    """
    mode = "Offload(update='in-backward')"
    if len(optimizers) > 1:
        names = ", ".join(type(one).__name__ for one in optimizers)
        raise ValueError(
            f"{mode} takes one optimizer, since max_norm= is of all gradients and step() clips them; got "
            f"{len(optimizers)}: {names}. Put all parameters into groups of one, or write update='step'."
        )
    for optimizer in optimizers:
        if not early.may_be_early(optimizer):
            raise ValueError(
                f"{mode} cannot update with {type(optimizer).__name__}: units are updated one by one, in a thread, "
                f"which is known to be right of {', '.join(sorted(ELEMENTWISE))} of torch.optim alone. Use one of "
                "these, or write update='step'."
            )
    buckets = [bucket for unit in units for bucket in unit.buckets if bucket.apart and bucket.is_trained]
    if any(bucket.formats.state != bucket.formats.master for bucket in buckets):
        raise ValueError(
            f"{mode} with rounding='stochastic': masters are widened at step() for the update. Use "
            "master=torch.float32, or write update='step'."
        )
    if shared := [bucket for bucket in buckets if bucket.shares_apart]:
        raise ValueError(
            f"{mode} with Offload(parameters=): the {shared[0].formats.param} parameters on the host are the master "
            f"weights, which are read while the backward runs ('{shared[0].name}', {len(shared)} buckets in all). Use "
            "precision='bf16', whose masters lie beside them, leave parameters= out, or write update='step'."
        )


def source_of(engine: Engine, apart: Apart | None, sharded: ShardedOptimizer) -> Source | None:
    """Return what updates an optimizer's entries in files, or in the background; None where `step()` does it all."""
    if apart is None:
        return None
    if apart.cell.spares:
        return InBackward(engine, sharded, apart.cell.max_norm)
    if apart.disk is None:
        has_time = early.is_worthwhile(engine.mesh.device) and early.may_be_early(sharded.optimizer)
        return early.Early(engine) if has_time and sharded.exchange is None else None
    states = sharded.state_cost[0] if sharded.state_cost is not None else 0
    return Streams(engine, apart.disk, states, apart.cell.staging_bytes)
