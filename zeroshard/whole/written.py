"""What code writes to the optimizer's entries and to `.data` of gradients outside steps.

Owns when parameters and held gradients follow. It must not know passes. Read `core/slices.py` first.

Note: entries that are ahead
    An entry is a view of a bucket's masters, whose version counts writes to entries alone. Lookahead, a decay by hand
    or a hook after a step write to them; parameters are then behind, on other ranks or in their own format. Before the
    next forward every rank copies and gathers all parameters. Ranks wait for each other there, so a write on one rank
    alone ends in an error. A backward whose forward had other values raises.
"""

import weakref
from typing import Any

from zeroshard.core.buffer import refuse_ahead
from zeroshard.core.engine import Engine
from zeroshard.core.slot import keep_shown
from zeroshard.whole.masters import follow_masters

__all__ = ["watch_written"]


def watch_written(engine: Engine) -> None:
    """Have the engine ask, before forwards and backwards, what code has written."""
    owner, check_forward = weakref.ref(engine), engine.check_forward
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    slots = [slot for unit in engine.units for slot in unit.slots if slot.is_whole]

    def follow() -> None:
        ahead = [bucket for bucket in buckets if bucket.is_ahead]
        if not ahead or (living := owner()) is None:
            return
        for bucket in ahead:
            if bucket.updating is not None:
                raise RuntimeError(
                    f"{living.mesh} Code has written to the optimizer's entries (near '{bucket.spec.names[0]}' first) "
                    "while their update ran in the background. Write to `entry.data`, which waits for it."
                )
        follow_masters(living)

    def before_forward(name: str, inputs: Any) -> None:
        check_forward(name, inputs)
        follow()

    def before_backward() -> None:
        if (living := owner()) is not None:
            refuse_ahead(buckets, f"{living.mesh} The backward")
        keep_shown(slots)

    engine.follow_entries, engine.check_forward, engine.check_written = follow, before_forward, before_backward
