"""Deep copies of a sharded model as plain models, without hooks or an engine.

Owns the implementation of a model's `__deepcopy__`. Read `core/hooks.py` (`Inert`) first.
"""

import copy
from typing import Any

from torch import nn

from zeroshard.core.hooks import Inert

__all__ = ["copy_plain", "owner_of"]


def copy_plain(model: nn.Module, forward_methods: tuple[str, ...], memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of the model without hooks and with plain parameters; raises outside `gathered()`."""
    hidden = []
    for path in ("__deepcopy__", *forward_methods):
        module, name = owner_of(model, path)
        if name in module.__dict__:
            hidden.append((module, name, module.__dict__.pop(name)))
    try:
        copied = copy.deepcopy(model, memo)
    finally:
        for module, name, method in hidden:
            module.__dict__[name] = method
    for module in copied.modules():
        for hooks in vars(module).values():
            if isinstance(hooks, dict):
                for key in [key for key, hook in hooks.items() if _is_inert(hook)]:
                    del hooks[key]
    return copied


def owner_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module and the method name of a path such as "encoder.encode"."""
    module, _, method = path.rpartition(".")
    return model.get_submodule(module), method


def _is_inert(hook: Any) -> bool:
    # torch wraps state-dict pre-hooks in an object with the hook as an attribute.
    return isinstance(hook, Inert) or isinstance(getattr(hook, "hook", None), Inert)
