"""Shared failures: if one rank fails, all ranks raise the same error at the same place.

Owns the agreement after each piece of local work. Work that may fail on one rank runs under `together`, and continues
only if it succeeded on all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.core.engine import Engine
from zeroshard.table.errors import CheckpointError

__all__ = ["agree_equal", "begin", "describe", "together"]


def begin(engine: Engine, what: str) -> None:
    """Complete open passes.

    Collective: a barrier; every rank must call.

    Raises:
        RuntimeError: called inside a pass or `gathered()`, or the mesh has an axis "pipe".
    """
    if engine.mesh.pipe is not None:
        raise RuntimeError(
            f"{engine.mesh} {what}: a checkpoint of a mesh with an axis 'pipe' is not written or read yet. Save each "
            "place by itself: `with zero.gathered(states=True):` gives whole values of its module and optimizer."
        )
    engine.leave_passes(what)
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} {what} under gathered(): leave the context first.")
    engine.order.settle(what)


@contextmanager
def together(engine: Engine, what: str, advice: str) -> Iterator[None]:
    """Raise on every rank if the body raises on any, with the text of the first rank that failed.

    Args:
        what: description of the body, equal on every rank.
        advice: unchanged state, and the remedy.

    Collective: an all-reduce of 32 bytes; if a rank failed, an all-gather of 4 KiB; every rank must enter.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # any error: the other ranks wait for this rank
        failure = error
    if engine.order.barrier(what, int(failure is not None))[1]:
        texts = engine.comm.texts(describe(failure), f"the error in {what}")
        failed = [rank for rank, text in enumerate(texts) if text]
        more = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        first = engine.mesh.numbers[failed[0]]
        raise CheckpointError(f"{what} failed on rank {first}{more}: {texts[failed[0]]} {advice}") from failure


def describe(failure: Exception | None) -> str:
    """Return an error as a sentence; "" for None."""
    if failure is None:
        return ""
    text = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
    return text if text.endswith((".", ":")) else f"{text}."


def agree_equal(engine: Engine, what: str, digest: int, message: str) -> None:
    """Raise on every rank unless all digests are equal. Collective: an all-reduce of 32 bytes."""
    least, greatest = engine.order.barrier(what, digest)
    if least != greatest:
        raise CheckpointError(f"{what}: {message}")
