"""Whole parameters, and whole optimizer states, for code that reads or changes them.

Owns the way in and the way out of `zero.gathered()`. Read `core/unit.py` (gather and release) first.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zeroshard.core.engine import Engine, Gathered
from zeroshard.core.errors import RankMismatchError
from zeroshard.core.optimizer import ShardedOptimizer
from zeroshard.state.takeover import spread

__all__ = ["gathered"]


@contextmanager
def gathered(
    engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer], *, writeback: bool, states: bool
) -> Iterator[None]:
    """Hold all parameters whole; on the way out with `writeback`, rank 0's values become everybody's.

    Collective: gathers of all units (and all states); with `writeback`, broadcasts of them on the way out.
    """
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} gathered() inside gathered(): the parameters are whole already.")
    engine.check_outside_pass("gathered()")
    engine.complete()
    engine.order.barrier(f"gathered(writeback={writeback}, states={states})")
    number = engine.order.next_tag()
    parameters = {slot.name: p for unit in engine.units for slot, p in zip(unit.slots, unit.parameters, strict=True)}
    for unit in engine.units:
        if not unit.is_whole:
            unit.start_gather(engine.comm, number, "gathered()", kind="state")
            unit.wait()
    if states:
        for optimizer in optimizers:
            optimizer.expand(parameters)
    engine.gathered = Gathered(writeback, states)
    versions = {name: p._version for name, p in parameters.items()}
    has_finished = False
    try:
        yield
        has_finished = True
    finally:
        engine.gathered = None
        changed = [name for name, p in parameters.items() if p._version != versions[name]]
        keeps = writeback and has_finished
        try:
            if keeps:
                _spread(engine, model, optimizers if states else ())
        finally:
            if states:
                for optimizer in optimizers:
                    optimizer.contract(writeback=keeps)
            for unit in engine.units:
                if not unit.is_whole:
                    unit.release()
        if changed and has_finished and not writeback:
            raise RuntimeError(
                f"{engine.mesh} {len(changed)} parameter(s), '{changed[0]}' first, were changed in place under "
                "gathered() without writeback=True. Where parameters are sharded the change is lost, and ranks may "
                "differ now where they are not. Use `with zero.gathered(writeback=True):`."
            )


def _spread(engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Make rank 0's parameters, buffers and states everybody's, and keep this rank's part."""
    buffers = [(name, buffer.data, False) for name, buffer in model.named_buffers()]
    named = [state for optimizer in optimizers for state in optimizer.whole_states()]
    shapes = ";".join(f"{name}{tuple(t.shape)}" for name, t, _ in [*named, *buffers])
    least, greatest = engine.order.barrier("the end of gathered(writeback=True)", zlib.crc32(shapes.encode()))
    if least != greatest:
        raise RankMismatchError(
            f"{engine.mesh} Buffers or optimizer states differ in names or shapes between ranks at the end of "
            "gathered(writeback=True). Load the same state on every rank inside the context."
        )
    with torch.no_grad():
        for unit in engine.units:
            for bucket in unit.buckets:
                spread(bucket, bucket.full, engine.comm, f"the parameters of {unit}", "state")
                bucket.keep()
                bucket.updates += 1
        for name, tensor, is_part in [*buffers, *named]:
            engine.comm.broadcast(tensor, name, "state", is_part=is_part)
