"""Arguments that `zs.shard` had or that other libraries have, and what to write instead.

Owns the removed arguments. It must not know models or ranks. `peers.py` has the names of other libraries.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from zeroshard import accelerate_private, peers
from zeroshard.table.settings import Settings

__all__ = ["OLD", "refuse_others"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

OLD = MappingProxyType(
    {
        "cut": "shards are cut anywhere; leave it out",
        "replicas": "write mesh=2 for two copies",
        "init_fn": "write weights=function",
    }
)
"""Removed arguments and their replacements; arguments that became fields of `Settings` are not listed."""


def refuse_others(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function to reject removed arguments, those of other libraries, and libraries that shard, too."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        fields = {field.name: f"write settings=zs.Settings({field.name}=...)" for field in dataclasses.fields(Settings)}
        known = {**peers.ARGUMENTS, **fields, **OLD}
        for name in options.keys() & known.keys():
            raise TypeError(f"shard() has no argument {name}=: {known[name]}.")
        if len(args) > 2:
            raise TypeError(
                "shard() takes the model and its optimizer by position and all else by name, such as stage=3; got a "
                f"third argument, of type {type(args[2]).__name__}. {peers.SEE[0].upper()}{peers.SEE[1:]}."
            )
        accelerate_private.refuse_plugins()
        return function(*args, **options)

    return call
