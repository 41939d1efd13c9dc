"""What modules and functions take and return: tensors in tuples, lists, mappings and dataclasses, one in another.

Owns the one walk over such values. It must not know what the tensors are.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch

__all__ = ["find", "map_floating"]

_T = TypeVar("_T")


def find(value: Any, *kinds: type[_T]) -> list[_T]:
    """Return what is of one of the classes in a value, in order."""
    if isinstance(value, kinds):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, (list, tuple)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        items = (getattr(value, name, None) for name in value.__dataclass_fields__)
    return [one for item in items for one in find(item, *kinds)]


def map_floating(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with `change` applied to each floating-point tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        items = [map_floating(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_floating(item, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_floating(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value
