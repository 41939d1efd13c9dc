"""The memory beside the device's that a model's states get: made, and its room taken, before anything is changed.

Owns the checks of a folder and the room that a rank needs. It must not know engines. Read `store/stores.py` first.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch

from zeroshard.core.engine import Engine
from zeroshard.describe.offload import reached
from zeroshard.optim.keeps import state_cost
from zeroshard.setup.request import Described
from zeroshard.store.stores import Stores
from zeroshard.table.cells import Cell
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.update import background
from zeroshard.update.admission import ELEMENTWISE
from zeroshard.update.optimizer import ShardedOptimizer, Source
from zeroshard.update.streamed import Streams

__all__ = ["check_updates", "make_stores", "reserve", "source_of"]


def make_stores(described: Described) -> Stores:
    """Return the memories of a described model, with the disk space of files reserved.

    Raises:
        ValueError: a file cannot be created, the disk has too little space, or an optimizer's states cannot be updated
            in pieces.
    """
    mesh = described.mesh
    check_updates(described.units, described.optimizers)
    stores = Stores(described.row, mesh.device, str(mesh), is_alone=mesh.world_size == 1)
    for store in stores.far.values():
        if text := store.warning():
            warnings.warn(f"{mesh} offload to '{store.place.folder}': {text}", stacklevel=4)
    reserve(stores, described.units, described.optimizers, is_first=True)
    return stores


def reserve(
    stores: Stores, units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer], *, is_first: bool
) -> None:
    """Reserve disk space for the states of optimizers in files.

    Args:
        is_first: also reserve space for parameters and master weights.

    Raises:
        ValueError: the disk has too little space; the text has the numbers.
    """
    states = max((cost[0] for one in optimizers if (cost := state_cost(one)) is not None), default=0)
    tensors = [one for unit in units for b in unit.buckets for one in _tensors_of(b, states, is_first=is_first)]
    for store in stores.far.values():
        try:
            store.reserve([nbytes for cell, nbytes in tensors if stores.of(cell) is store])
        except OSError as error:
            column, moved = next(iter(reached(units).items()))
            raise ValueError(
                f"offload to '{store.place.folder}': {error}. Make room, give another folder, or move less: "
                f"zs.Offload({column}={moved.fraction / 2:g}, to=...)."
            ) from error


def _tensors_of(bucket: BucketSpec, states: int, *, is_first: bool) -> Iterator[tuple[Cell, int]]:
    """Yield the cell and the bytes of each tensor of a bucket between steps."""
    row, formats, numel = bucket.row, bucket.formats, bucket.states[1] - bucket.states[0]
    if bucket.is_trained:
        yield from [(row.states, numel * itemsize(formats.state))] * states
    if is_first:
        yield row.states, numel * itemsize(formats.master) * bucket.has_masters
        yield row.parameters, bucket.layout.shard_numel * itemsize(formats.param)


def check_updates(units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise where states in files cannot be updated in pieces.

    Raises:
        ValueError: an optimizer that is not known to update each element by itself; masters that are rounded at random.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    for optimizer in optimizers if any(b.row.states.is_in_file and b.is_trained for b in buckets) else ():
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim") or kind.__name__ not in ELEMENTWISE:
            raise ValueError(
                f"{kind.__name__} cannot keep its states in files: they are updated in pieces of parameters, and which "
                f"of its states go with which elements is known of {', '.join(sorted(ELEMENTWISE))} of torch.optim "
                "alone. Use one of these, or offload='host'."
            )
    in_files = [bucket for bucket in buckets if bucket.row.states.is_in_file or bucket.row.parameters.is_in_file]
    if any(bucket.formats.state != bucket.formats.master for bucket in in_files):
        raise ValueError(
            "rounding='stochastic' widens all masters for an update, which those in files cannot be. Use "
            "torch.float32, or offload='host'."
        )


def source_of(engine: Engine, stores: Stores, sharded: ShardedOptimizer) -> Source | None:
    """Return what updates an optimizer's entries in files, or in the background; None where `step()` does it all."""
    if (filed := stores.filed) is not None:
        states = sharded.state_cost[0] if sharded.state_cost is not None else 0
        return Streams(engine, filed.disk, states, filed.place.staging_bytes)
    is_known = background.is_worthwhile(engine.mesh.device) and background.may_be_early(sharded.optimizer)
    buckets = [bucket.spec for unit in engine.units for bucket in unit.buckets]
    has_time = is_known and any(one.is_trained and not one.row.states.is_on_device for one in buckets)
    return background.Early(engine) if has_time and sharded.exchange is None else None
