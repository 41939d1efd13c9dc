"""Detection of parameters registered after `zs.shard()`: they are in no unit, so they are not reduced or saved.

Owns torch's hooks on registration, which add no cost to a step. It must not know passes. `core/hooks.py` (`Enter`)
checks `Additions` before each forward of the model.
"""

import functools
import weakref
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.core.parameter import ShardedParameter

__all__ = ["Additions"]


@final
class Additions:
    """The parameters added to a model.

    Args:
        model: a sharded model; its parameters that are not sharded are ignored ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._left = frozenset(_unsharded(model))
        self.is_suspected = False
        """Whether a parameter, or a module with parameters, was registered."""
        watched = _watched()
        for module in model.modules():
            watched[module] = self

    def end(self) -> None:
        """Watch no module any more."""
        watched = _watched()
        for module in [module for module, one in watched.items() if one is self]:
            del watched[module]

    def first(self) -> str:
        """Return the name of the first added parameter that still exists; "" if there is none."""
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
    # torch calls the hooks for every module of the process, so each hook is registered once.
    watched: weakref.WeakKeyDictionary[nn.Module, Additions] = weakref.WeakKeyDictionary()

    def look(module: nn.Module, name: str, value: Any) -> None:
        if value is not None and (additions := watched.get(module)) is not None:
            additions.is_suspected = True

    # Dynamo cannot trace the look-up of a module that it has wrapped.
    untraced = torch.compiler.disable(look)
    register_module_parameter_registration_hook(untraced)
    register_module_module_registration_hook(untraced)
    return watched
