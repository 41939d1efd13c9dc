"""Predictions: what fits, how fast, and where memory goes, without a device. `zs.plan(...)` calls this package.

Must not know the engine. What only holds data or does arithmetic imports without torch: plans of shapes need none. Read
`planning.py`, then `film.py`; for models that are traced `tracer.py`, then `events.py`; for what a step gathers and
reduces `passes.py`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.plan.result import Plan

__all__: list[str] = []


class _Callable(ModuleType):
    """The package, which plans when it is called: `zs.plan` is both its name and that of what it does."""

    def __call__(self, model: Any, **asked: Any) -> "Plan":
        from zeroshard.plan.planning import make_plan  # its modules import this one

        return make_plan(model, **asked)


sys.modules[__name__].__class__ = _Callable
