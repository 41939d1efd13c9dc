"""Predictions of memory and time, without a device. `zs.plan(...)` calls this package.

It must not know the engine. Modules with only data or arithmetic import without torch: plans of shapes do not need it.
Read `planning.py`, then `film.py`; for traced models `tracer.py`, then `events.py`; for the gathers and reductions of a
step `passes.py`.
"""

import sys
from collections.abc import Callable
from inspect import Parameter, Signature, getdoc, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.plan.result import Plan

__all__: list[str] = []


_ABOUT = __doc__


class _Callable(ModuleType):
    """The package, which is also callable: `zs.plan` is both the package and its main function."""

    def __call__(self, *model: Any, **asked: Any) -> "Plan":
        return _function()(*model, **asked)

    @property
    def __signature__(self) -> Signature:
        return signature(_function())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        # What `help(zs.plan)` and an editor show, for which the package is the function.
        bare = (one.replace(annotation=Parameter.empty) for one in self.__signature__.parameters.values())
        return f"plan{Signature([*bare])}\n\n{getdoc(_function())}\n\nThe package: {_ABOUT}"


def _function() -> Callable[..., "Plan"]:
    from zeroshard.plan.planning import make_plan  # its modules import this one

    # What Python says of a wrong argument names the function that was called.
    make_plan.__qualname__ = make_plan.__name__ = "plan"
    return make_plan


sys.modules[__name__].__class__ = _Callable
