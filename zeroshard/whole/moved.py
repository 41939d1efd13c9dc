"""Temporary moves of states to the host, for phases that need device memory: generation, evaluation.

Owns the moves in both directions. It must not know permanently offloaded states, which do not move. Read
`core/buffer.py` (`Bucket.move_masters`) first.
"""

from collections.abc import Sequence

import torch

from zeroshard import devices
from zeroshard.core.engine import Engine
from zeroshard.core.slices import point_at
from zeroshard.core.slot import slot_of
from zeroshard.update.optimizer import ShardedOptimizer

__all__ = ["move_states_away", "move_states_back"]

Tensor = torch.Tensor


def move_states_away(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Move states, and masters that are kept beside parameters, to the host. See `Zero.offload_states`.

    Collective: an all-reduce of 32 bytes; every rank must call.
    """
    _begin(engine, "offload_states()")
    if not engine.has_moved_states:
        _move(engine, optimizers, torch.device("cpu"))
    engine.move_states(is_away=True)


def move_states_back(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Move them back to the device. See `Zero.reload_states`. Collective: as `move_states_away`."""
    _begin(engine, "reload_states()")
    if engine.has_moved_states:
        _move(engine, optimizers, engine.mesh.device)
    engine.move_states(is_away=False)


def _begin(engine: Engine, what: str) -> None:
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} {what} inside gathered(): leave the context first.")
    engine.leave_passes(what)
    engine.order.barrier(what)


def _move(engine: Engine, optimizers: Sequence[ShardedOptimizer], device: torch.device) -> None:
    for bucket in {id(b): b for unit in engine.units for b in unit.buckets}.values():
        bucket.move_masters(lambda tensor: _to(tensor, device))
    for one in optimizers:
        for master in one.entries:
            slot = slot_of(master)
            if not slot.bucket.spec.row.states.is_on_device:
                continue
            point_at(master, slot.bucket.entry(slot.index))
            state = one.optimizer.state.get(master, {})
            for key, value in state.items():
                # 0-d counters stay on the device of the kernels that increment them.
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = _to(value, device)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if device.type != "cpu":
        return tensor.to(device)
    return devices.pinned(tensor.shape, tensor.dtype).copy_(tensor)
