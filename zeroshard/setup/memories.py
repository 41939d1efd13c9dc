"""The memory beside the device's that a model's states get: made, and its room taken, before anything is changed.

Owns the checks of a folder and the room that a rank needs. It must not know engines. Read `store/apart.py` first.
"""

import warnings
from collections.abc import Sequence
from typing import Final

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.guard import FUSED
from zeroshard.describe.offload import check_in_files
from zeroshard.optim.keeps import state_cost
from zeroshard.optim.whole import whole_of
from zeroshard.setup.request import Described
from zeroshard.store import file_calls
from zeroshard.store.apart import Apart
from zeroshard.store.disk import BLOCK_BYTES
from zeroshard.table.cells import Cell, Residency
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.update import background
from zeroshard.update.admission import is_elementwise
from zeroshard.update.exchange import Exchange
from zeroshard.update.pieces import AtOnce, Source
from zeroshard.update.streamed import Files, Streams
from zeroshard.wire.transports import MEMORIES

__all__ = ["check_updates", "make_apart", "reserve", "source_of"]

IN_MEMORY: Final = ("tmpfs", "ramfs")


def make_apart(described: Described) -> tuple[Apart | None, Apart | None]:
    """Return the memories for states and for parameters of a described model; None for what is on the device.

    Both are the same object if both are in one memory. The disk space of a file is reserved.

    Raises:
        ValueError: a file cannot be created, the disk has too little space, or an optimizer's states cannot be updated
            there.
    """
    row, made = described.row, dict[str, Apart]()
    check_updates(row, described.units, described.optimizers, described.mesh.device)
    for cell in (row.states, row.parameters):
        if cell.memory in MEMORIES and cell.memory not in made:
            made[cell.memory] = _make(described, cell)
    reserve(made.get("file"), described.units, described.optimizers, is_first=True)
    return made.get(row.states.memory), made.get(row.parameters.memory)


def _make(described: Described, cell: Cell) -> Apart:
    mesh = described.mesh
    try:
        apart = MEMORIES[cell.memory](mesh.device, cell, str(mesh))
    except OSError as error:
        raise ValueError(
            f"offload to '{cell.folder}': no file can be made there ({error}). Give a folder that exists, on a disk of "
            "this host, in which this user may write."
        ) from error
    apart.is_alone = mesh.world_size == 1
    if apart.disk is not None and (kind := file_calls.kind_of(apart.disk.folder)) in IN_MEMORY:
        warnings.warn(
            f"{mesh} offload to '{cell.folder}': a {kind}, whose files lie in memory of the host. Give a folder on a "
            "disk, or write offload='host'.",
            stacklevel=5,
        )
    return apart


def reserve(
    apart: Apart | None, units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer], *, is_first: bool
) -> None:
    """Reserve disk space for the states of optimizers in files.

    Args:
        is_first: also reserve space for parameters and master weights.

    Raises:
        ValueError: the disk has too little space; the text has the numbers.
    """
    if apart is None or apart.disk is None:
        return
    states = max((cost[0] for one in optimizers if (cost := state_cost(one)) is not None), default=0)
    buckets = [bucket for unit in units for bucket in unit.buckets]
    try:
        apart.disk.reserve(sum(_room_of(bucket, states, is_first=is_first) for bucket in buckets))
    except OSError as error:
        column = "states" if any(bucket.row.states.memory == "file" for bucket in buckets) else "parameters"
        raise ValueError(
            f"offload to '{apart.disk.folder}': {error}. Make room, give another folder, or move less: "
            f"zs.Offload({column}={apart.cell.fraction / 2:g}, to=...)."
        ) from error


def _room_of(bucket: BucketSpec, states: int, *, is_first: bool) -> int:
    """Return the bytes of a bucket in a file, in whole blocks for each array."""
    numel, sizes, formats = bucket.apart_states[1] - bucket.apart_states[0], list[int](), bucket.formats
    if bucket.is_trained and bucket.row.states.memory == "file":
        sizes += [numel * itemsize(formats.state)] * states
    if is_first and bucket.master_memory == "file" and not bucket.shares_apart:
        sizes.append(numel * itemsize(formats.master))
    if is_first and bucket.row.parameters.memory == "file":
        sizes.append((bucket.apart_shard[1] - bucket.apart_shard[0]) * itemsize(formats.param))
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def check_updates(
    row: Residency, units: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> None:
    """Raise where states cannot be updated in the memory in which they lie.

    Args:
        device: the rank's.

    Raises:
        ValueError: an optimizer with states in files that is not known to update each element by itself; masters there
            that are rounded at random; `capturable=True` where the host updates.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    if device.type == "cpu" or any(bucket.master_memory != "device" for bucket in buckets):
        for optimizer in optimizers:
            _check_capturable(optimizer, device)
    for optimizer in optimizers if row.states.memory == "file" else ():
        check_in_files(type(optimizer).__name__, is_elementwise=is_elementwise(optimizer))
    # From the row, not from this rank's slices: all ranks must decide alike, and a fraction may move none of them.
    in_files = [one for one in buckets if "file" in (one.master_memory, one.row.parameters.memory)]
    if any(bucket.formats.state != bucket.formats.master for bucket in in_files):
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


def source_of(
    engine: Engine, apart: Apart | None, home: Apart | None, optimizer: torch.optim.Optimizer, per_element: int
) -> Source:
    """Return where the pieces of an optimizer's updates come from; its groups hold the model's parameters.

    Args:
        apart: the memory of states.
        home: the memory of parameters.
        per_element: states that the optimizer keeps for each element.
    """
    apart = home if apart is None and home is not None and home.disk is not None else apart
    files = None if apart is None or apart.disk is None else Files(engine, apart.disk)
    if (whole := whole_of(optimizer)) is not None:
        return Exchange(engine, optimizer, whole, files)
    if apart is not None and files is not None:
        return Streams(files, optimizer, per_element, apart.cell.staging_bytes)
    has_time = apart is not None and background.is_worthwhile(engine.mesh.device)
    return background.Background(engine, optimizer) if has_time and is_elementwise(optimizer) else AtOnce()
