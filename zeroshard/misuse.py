"""Calls that the public functions do not take, and what to write instead.

Owns the refusal of removed arguments, of those of other libraries, and of positional ones. `peers.py` has the names of
other libraries. It must not know what the arguments mean.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn, ParamSpec, TypeVar, final

from zeroshard import accelerate_private, peers
from zeroshard.table.settings import Settings

__all__ = ["HABIT", "Loop", "OLD", "refuse_others", "refuse_those"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

HABIT: Final = (
    "zs.shard() shards the model in place and returns a handle: write `zero = zs.shard(model, optimizer)` and keep "
    "using `model`."
)
OLD: Mapping[str, str] = MappingProxyType(
    {"cut": "shards are cut anywhere; leave it out", "init_fn": "write weights=function"}
)
"""Removed arguments and their replacements; arguments that became fields of `Settings` are not listed."""


def refuse_others(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `shard` to reject removed arguments, those of other libraries, and libraries that shard, too."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        fields = {field.name: f"write settings=zs.Settings({field.name}=...)" for field in dataclasses.fields(Settings)}
        known = {**peers.ARGUMENTS, **fields, **OLD}
        for name in options.keys() & known.keys():
            raise TypeError(f"shard() has no argument {name}=: {known[name]}.")
        _refuse_unknown(function, options)
        if len(args) > 2:
            raise TypeError(
                "shard() takes the model and its optimizer by position and all else by name, such as stage=3; got a "
                f"third argument, of type {type(args[2]).__name__}. See {peers.SEE.split()[0]}."
            )
        accelerate_private.refuse_plugins()
        return function(*args, **options)

    return call


def _refuse_unknown(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that a function does not have; wrappers must not take more than it does."""
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in [name for name in options if name not in parameters]:
            known = [one for one in parameters if one != "self"]
            near = "".join(f": did you mean {other}=?" for other in difflib.get_close_matches(name, known, 1))
            raise TypeError(f"{function.__name__}() has no argument {name}={near or '.'}")


def refuse_those(known: Mapping[str, str]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a wrapper of a function that rejects arguments which people know from elsewhere.

    Args:
        known: for each name of an argument that the function does not have, what to write instead.

    >>> from zeroshard.misuse import refuse_those
    >>> @refuse_those({"colour": "write color="})
    ... def draw(**options):
    ...     return options
    >>> draw(colour=1)
    Traceback (most recent call last):
    TypeError: draw() has no argument colour=: write color=.
    """

    def wrap(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **options: _P.kwargs) -> _T:
            for name in options.keys() & known.keys():
                raise TypeError(f"{function.__name__}() has no argument {name}=: {known[name]}.")
            _refuse_unknown(function, options)
            return function(*args, **options)

        return call

    return wrap


@final
class Loop(Iterator[None]):
    """The iterator of a `for` loop, which refuses a `with` statement: its body would run on every rank."""

    def __init__(self, inner: Iterator[None]) -> None:
        self._inner = inner

    def __next__(self) -> None:
        return next(self._inner)

    def __enter__(self) -> NoReturn:
        raise TypeError("on_first_rank() is a loop: write `for _ in zero.on_first_rank():` instead of `with`.")

    def __exit__(self, *exception: object) -> None: ...
