"""`optimizer.state_dict()` and `load_state_dict()` outside `gathered()`, where they need no other rank.

Owns the two methods of a sharded optimizer. If this rank has all states (stage 0, a single rank, or no states yet),
the methods behave as in torch; otherwise the hooks of `update/optimizer.py` raise. Accelerate's copy of states to its
device does nothing: they are where `zs.shard` puts them.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zeroshard.accelerate_private import is_placing
from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.whole.gathered import WholeStates, parameters_of

__all__ = ["open_states"]


def open_states(engine: Engine, sharded: ShardedOptimizer) -> None:
    """Replace an optimizer's methods by ones that save and load its states if this rank has all states."""
    optimizer = sharded.optimizer
    save, load = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(save)
    def state_dict() -> dict[str, Any]:
        if is_placing(sys._getframe(1)):
            return {}
        with _whole(engine, sharded, is_here=_is_here(sharded), writeback=False):
            return save()

    @functools.wraps(load)
    def load_state_dict(state_dict: dict[str, Any]) -> None:
        if is_placing(sys._getframe(1)):
            return
        is_here = _is_here(sharded) and (_has_all(sharded) or not state_dict.get("state"))
        with _whole(engine, sharded, is_here=is_here, writeback=True):
            load(state_dict)

    engine.undo.put(vars(optimizer), "state_dict", state_dict)
    engine.undo.put(vars(optimizer), "load_state_dict", load_state_dict)


def _has_all(sharded: ShardedOptimizer) -> bool:
    return all(slot_of(master).bucket.spec.updates_all for master in sharded.entries)


def _is_here(sharded: ShardedOptimizer) -> bool:
    return not sharded.optimizer.state or _has_all(sharded)


@contextmanager
def _whole(engine: Engine, sharded: ShardedOptimizer, *, is_here: bool, writeback: bool) -> Iterator[None]:
    """Give the optimizer the model's parameters and their whole states, if this rank has them."""
    if engine.gathered is not None or not is_here:
        yield
        return
    engine.leave_passes("state_dict() of an optimizer")
    whole, has_finished = WholeStates(engine, sharded, parameters_of(engine)), False
    try:
        with engine.let_read(writeback=writeback, states=True):
            yield
        has_finished = True
    finally:
        whole.contract(writeback=writeback and has_finished, has_failed=not has_finished)
