"""Predictions of memory and time, without a device. `zs.plan(...)` calls this package.

It must not know the engine. Modules with only data or arithmetic import without torch: plans of shapes do not need it.
Read `planning.py`, then `film.py`; for traced models `tracer.py`, then `events.py`; for the gathers and reductions of a
step `passes.py`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.plan.result import Plan

__all__: list[str] = []


class _Callable(ModuleType):
    """The package, which is also callable: `zs.plan` is both the package and its main function."""

    def __call__(self, model: Any, **asked: Any) -> "Plan":
        from zeroshard.plan.planning import make_plan  # its modules import this one

        return make_plan(model, **asked)


sys.modules[__name__].__class__ = _Callable
