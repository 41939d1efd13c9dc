"""Copies master values to parameters after a change outside a step, by a checkpoint or an average.

Owns this copy. It must not know the code that changed the masters. Read `core/buffer.py` (`Bucket.follow_masters`)
first.
"""

from zeroshard.core.engine import Engine

__all__ = ["follow_masters"]


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
