"""Traversal of nested tuples, lists, mappings and dataclasses of tensors: the arguments and results of modules.

Owns the traversal that the engine, treatments and traces share. It must not know what the tensors mean. Subclasses of
tuples, lists and mappings keep their class and attributes.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch

__all__ = ["find", "map_floating", "map_tensors"]

_T = TypeVar("_T")


def find(value: Any, *kinds: type[_T]) -> list[_T]:
    """Return the objects of the given classes in a value, in order."""
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
    return map_tensors(value, lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type[Any] = torch.Tensor) -> Any:
    """Return a value with `change` applied to each tensor in it, or to each object of another class."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return _tuple_like(value, [map_tensors(item, change, kind) for item in value])
    if isinstance(value, list):
        copied_list = copy.copy(value)
        copied_list[:] = [map_tensors(item, change, kind) for item in value]
        return copied_list
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_tensors(item, change, kind)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A copy, because `replace` would run __post_init__ again, and lose fields that are not arguments.
        copied: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(copied, field.name, map_tensors(getattr(value, field.name), change, kind))
        return copied
    return value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class as another, without a call of the unknown constructor."""
    kind = type(value)
    if all(map(operator.is_, items, value)):
        return value
    try:
        made: tuple[Any, ...] = tuple.__new__(kind, items)
    except TypeError:
        # A class written in C, such as the result of torch.max, is built from its items.
        return kind(items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made
