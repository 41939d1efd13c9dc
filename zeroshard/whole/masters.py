"""Master values that code outside a step reads and changes: which there are, and copies of them to parameters.

Owns the copy after a change by a checkpoint, an average or islands, and the refusal of masters that are trained later.
It must not know the code that changes masters. Read `core/buffer.py` (`Bucket.follow_masters`) first.
"""

from collections.abc import Mapping

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine

__all__ = ["check_trained", "follow_masters", "left_out", "trained_since"]


def left_out(engine: Engine) -> dict[Bucket, int]:
    """Return the buckets that are frozen now, and how many steps have trained each before: see `trained_since`."""
    return {one: one.trained for unit in engine.units for one in unit.buckets if one not in unit.reducible()}


def trained_since(left: Mapping[Bucket, int], what: str) -> str:
    """Say which parameter an optimizer's step has trained, thawed or not now, since `what` left it out, or ""."""
    for bucket in (bucket for bucket, count in left.items() if bucket.trained != count):
        now = [name for name, p in zip(bucket.spec.names, bucket.parameters, strict=True) if p.requires_grad]
        names = " or ".join(map(repr, now or bucket.spec.names))
        return f"{names} was trained; {what} left it out as frozen: freeze it after that."
    return ""


def check_trained(engine: Engine, left: Mapping[Bucket, int], what: str) -> None:
    """Raise RuntimeError if a parameter was trained since `what` left it out."""
    if text := trained_since(left, what):
        raise RuntimeError(f"{engine.mesh} {text}")


def follow_masters(engine: Engine) -> None:
    """Copy master values to all parameters.

    Collective: an all-gather of parameters that are kept whole and updated in parts; every rank must call.
    """
    engine.leave_passes("A change of master values")
    engine.order.let_go()
    engine.order.barrier("a change of master values")
    number = engine.order.next_number()
    for unit in engine.units:
        for bucket in unit.buckets:
            bucket.follow_masters()
        for pending in unit.publish(engine.comm, number, f"new values of {unit}", "state", is_forced=True):
            pending.wait()
        for bucket in unit.buckets:
            bucket.count_update()
