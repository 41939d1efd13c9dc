"""The memory beside the device's that a model's states get: made, and its room taken, before anything is changed.

Owns the checks of a folder and the room that a rank needs. It must not know engines. Read `store/stores.py` first.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.guard import FUSED
from zeroshard.describe.offload import check_in_files, reached
from zeroshard.optim.admission import is_elementwise
from zeroshard.optim.keeps import kept_by
from zeroshard.optim.whole import whole_of
from zeroshard.setup.request import Described
from zeroshard.store.stores import Stores
from zeroshard.table.cells import Cell
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.update import background
from zeroshard.update.exchange import Exchange
from zeroshard.update.sources import AtOnce, Source
from zeroshard.update.streamed import Files, Streams

__all__ = ["check_updates", "make_stores", "reserve", "source_of"]


def make_stores(described: Described) -> Stores:
    """Return the memories of a described model, with the disk space of files reserved.

    Raises:
        ValueError: a file cannot be created, the disk has too little space, or an optimizer's states cannot be updated
            there.
    """
    mesh = described.mesh
    check_updates(described.units, described.optimizers, mesh.device)
    stores = Stores(described.row, mesh.device, str(mesh), is_alone=mesh.world_size == 1)
    for store in stores.far.values():
        if text := store.warning():
            warnings.warn(f"{mesh} offload to '{store.place.folder}': {text}", stacklevel=4)
    reserve(stores, described.units, described.optimizers, is_first=True)
    return stores


def reserve(
    stores: Stores,
    units: Sequence[UnitSpec],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    is_first: bool,
    room: int = 0,
) -> None:
    """Reserve disk space for the states of optimizers in files.

    Args:
        is_first: also reserve space for parameters and master weights.
        room: states of each element for which space is reserved already.

    Raises:
        ValueError: the disk has too little space; the text has the numbers.
    """
    states = max((kept_by(one).per_element - room for one in optimizers if stores.far), default=0)
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


def check_updates(units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Raise where states cannot be updated in the memory in which they lie.

    Args:
        device: the rank's.

    Raises:
        ValueError: an optimizer with states in files that is not known to update each element by itself; masters there
            that are rounded at random; `capturable=True` where the host updates.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    if device.type == "cpu" or any(not bucket.row.states.is_on_device for bucket in buckets):
        for optimizer in optimizers:
            _check_capturable(optimizer, device)
    trained = [bucket.row.states for bucket in buckets if bucket.is_trained]
    for optimizer in optimizers:
        check_in_files(trained, type(optimizer).__name__, is_elementwise=is_elementwise(optimizer))
    widened = [bucket for bucket in buckets if bucket.formats.state != bucket.formats.master]
    if any(cell.is_in_file for bucket in widened for cell in bucket.row.state):
        raise ValueError(
            "rounding='stochastic' widens all masters for an update, which those in files cannot be. Use "
            "torch.float32, or offload='host'."
        )


def _check_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise where torch refuses an update on the host.

    Each rank would find out at its own step, some of them in the background, while the others wait.
    """
    kind = type(optimizer)
    for group in optimizer.param_groups if kind.__module__.startswith("torch.optim") else ():
        # torch's fused kernels run on a host, too; `update/kernels.py` chooses them for a device's states on the host.
        is_free = device.type != "cpu" and kind in FUSED and group["fused"] is None and group["foreach"] is None
        if group.get("capturable") and not group.get("fused") and not is_free:
            raise ValueError(
                f"capturable=True of {kind.__name__}: torch supports it on devices, and the host updates "
                f"{'parameters on a CPU' if device.type == 'cpu' else 'states in its memory (offload=)'}. "
                "Leave capturable=True out."
            )


def source_of(engine: Engine, stores: Stores, optimizer: torch.optim.Optimizer, per_element: int) -> Source:
    """Return where the pieces of an optimizer's updates come from; its groups hold the model's parameters.

    Args:
        per_element: states that the optimizer keeps for each element.
    """
    files = None if stores.filed is None else Files(engine, stores.filed)
    if (whole := whole_of(optimizer)) is not None:
        return Exchange(engine, optimizer, whole, files)
    if files is not None:
        return Streams(files, optimizer, per_element)
    has_time = "states" in reached([u.spec for u in engine.units]) and background.is_worthwhile(engine.mesh.device)
    return background.Background(engine, optimizer) if has_time and is_elementwise(optimizer) else AtOnce()
