"""Parameters that are registered in a model after `zs.shard()`: no unit has them, so nothing reduces or saves them.

Owns torch's hooks on registration, which cost a step nothing. It must not know passes. `core/hooks.py` (`Enter`) asks
`Additions` before each forward of the model.
"""

import functools
import weakref
from typing import Any, final

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.core.parameter import ShardedParameter

__all__ = ["Additions"]


@final
class Additions:
    """What was added to one model.

    Args:
        model: sharded by now; parameters of it that are not sharded are the caller's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._left = frozenset(_unsharded(model))
        self.is_suspected = False
        """Whether something was registered that has parameters of its own."""
        watched = _watched()
        for module in model.modules():
            watched[module] = self

    def first(self) -> str:
        """Return the name of the first parameter that was added and is still there; "" if there is none."""
        if not self.is_suspected or (model := self._model()) is None:
            return ""
        added = [name for name in _unsharded(model) if name not in self._left]
        self.is_suspected = bool(added)
        return added[0] if added else ""


def _unsharded(model: nn.Module) -> list[str]:
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not isinstance(parameter, ShardedParameter)]


@functools.cache
def _watched() -> "weakref.WeakKeyDictionary[nn.Module, Additions]":
    # torch calls the hooks for every module of the process, so there is one of each.
    watched: weakref.WeakKeyDictionary[nn.Module, Additions] = weakref.WeakKeyDictionary()

    def look(module: nn.Module, name: str, value: Any) -> None:
        if value is not None and (additions := watched.get(module)) is not None:
            additions.is_suspected = True

    register_module_parameter_registration_hook(look)
    register_module_module_registration_hook(look)
    return watched
