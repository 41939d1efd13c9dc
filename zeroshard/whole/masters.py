"""Master values that code outside a step reads and changes: which there are, and copies of them to parameters.

Owns the copy after a change by a checkpoint, an average or islands, and the refusal of masters that are trained later.
It must not know the code that changes masters. Read `core/buffer.py` (`Bucket.follow_masters`) first.
"""

from collections.abc import Collection

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine

__all__ = ["check_trained", "follow_masters"]


def check_trained(engine: Engine, known: Collection[Bucket], what: str) -> None:
    """Raise RuntimeError if a parameter is trained that was frozen when `what` chose the buckets that it knows."""
    for bucket in (one for unit in engine.units for one in unit.reducible() if one.has_states and one not in known):
        name = next(name for name, one in zip(bucket.spec.names, bucket.parameters, strict=True) if one.requires_grad)
        raise RuntimeError(f"{engine.mesh} '{name}' is trained; {what} left it out as frozen: freeze it after that.")


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
