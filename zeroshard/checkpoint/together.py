"""Shared failures: if one rank fails, all ranks raise the same error at the same place.

Owns the agreement after each piece of local work. Work that may fail on one rank runs under `together`, and continues
only if it succeeded on all ranks. All ranks are those of the mesh, with each place of a pipe.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.core.engine import Engine
from zeroshard.table.errors import CheckpointError

__all__ = ["agree_equal", "begin", "describe", "meet", "together"]


def begin(engine: Engine, what: str) -> None:
    """Complete open passes.

    Collective: a barrier; every rank must call.

    Raises:
        RuntimeError: called inside a pass or `gathered()`.
    """
    engine.leave_passes(what)
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} {what} under gathered(): leave the context first.")
    engine.order.settle(what)


def meet(engine: Engine, place: str, payload: int = 0) -> tuple[int, int]:
    """Wait until all ranks are at `place`; return the minimum and the maximum payload.

    Collective: an all-reduce of 40 bytes, with a pipe three; every rank must call.
    """
    least, greatest = engine.order.barrier(place, payload)
    span = engine.order.votes.span
    return span(place, least), -span(place, -greatest)


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
    if meet(engine, what, int(failure is not None))[1]:
        texts = engine.comm.across.texts(describe(failure), f"the error in {what}")
        failed = [rank for rank, text in enumerate(texts) if text]
        more = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        first = engine.mesh.across.numbers[failed[0]]
        raise CheckpointError(f"{what} failed on rank {first}{more}: {texts[failed[0]]} {advice}") from failure


def describe(failure: Exception | None) -> str:
    """Return an error as a sentence; "" for None."""
    if failure is None:
        return ""
    text = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
    return text if text.endswith((".", ":")) else f"{text}."


def agree_equal(
    engine: Engine, what: str, digest: int, message: str, *, common: int | None = None, shown: str = ""
) -> None:
    """Raise on every rank unless all digests are equal.

    Args:
        digest: equal at each place of a pipe.
        common: equal on all ranks, at least 0; `digest` by default.
        shown: the values of this rank, which the error lists where ranks have others.

    Collective: as `meet`; where digests differ, an all-gather of 4 KiB.
    """
    least, greatest = engine.order.barrier(what, digest)
    value, span = (digest if common is None else common) if least == greatest else -1, engine.order.votes.span
    least, greatest = span(what, value), -span(what, -value)
    if least < greatest or least < 0:
        texts = engine.comm.across.texts(shown, f"the values in {what}")
        lines = f"\n{engine.mesh.across.lines(texts)}" if len({*texts}) > 1 else ""
        raise CheckpointError(f"{what}: {message}{lines}")
