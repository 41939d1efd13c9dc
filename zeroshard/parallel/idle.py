"""Passes that a rank makes without computing, in step with ranks that compute: a chunk of a pipeline has failed here.

Owns these passes. Their results are not used on any rank. Read "Note: a step" in `core/engine.py` first.
"""

from zeroshard.core.engine import Engine
from zeroshard.core.flights import Chunk
from zeroshard.core.states import Scope

__all__ = ["idle_backward", "idle_forward"]


def idle_forward(engine: Engine, chunk: Chunk, *, has_grad: bool) -> None:
    """Make the pass of a chunk's forward. Collective: as the forward."""
    if engine.is_sharded:
        engine.flights.chunk = chunk
        is_apart = engine.scope is not Scope.ALL
        key, place = engine.flights.forward_of("", has_grad=has_grad, is_apart=is_apart)
        engine.flights.chunk = None
        engine.close(engine.order.open("forward", key, place=place, holds=has_grad))


def idle_backward(engine: Engine, chunk: Chunk) -> None:
    """Make the pass of a chunk's backward. Collective: as the backward."""
    engine.learn()
    key = ("backward", chunk.name, engine.scope is not Scope.RANK)
    engine.close(engine.order.open("backward", key, scope=engine.scope, numbers=chunk.numbers))
