"""Selective recomputation: results of matrix products and attention are kept, other operations run again.

Owns the pair of contexts that `torch.utils.checkpoint` enters around a forward and its recomputation. Results are
stored through `saved.py`, so that they are counted and treated by later links. `table/activations.py` lists the
operations.

Note: missing results
    A recomputation runs an operation again if its result was changed in place, or was used by a backward without a
    retained graph. So every graph supports a second backward with `retain_graph=True`, and a graph that is used once
    frees memory early. torch's own contexts (`create_selective_checkpoint_contexts`) support neither.
Note: unsafe aliases
    `x @ weight` and torch's GRU use results through `_unsafe_view` and `unsafe_split`, whose outputs have version
    counters of their own. So changes of these outputs in place, also those after the module, are looked for on aliases
    without memory that share the counters.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from zeroshard.activations.chain import Counted
from zeroshard.activations.saved import Box, ChangedInPlaceError, Saved
from zeroshard.table.activations import PRODUCTS
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import (
    DispatchMode,
    keeps_graph,
    local_of,
    storage_of,
    version_of,
    versions_below_autograd,
)
from zeroshard.tree import find, map_tensors

__all__ = ["COLUMN", "Products", "argument_of"]

Tensor = torch.Tensor

COLUMN: Final = "products"
"""Column of the ledger for bytes of kept results before further links."""

KEPT: Final = frozenset(getattr(torch.ops.aten, name) for name in PRODUCTS)
UNSAFE: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
)
"""Operations whose outputs share memory with their input, but no version counter."""


@dataclass(slots=True, eq=False)
class _Result:
    """The result of one operation.

    Args:
        func: the operation.
        kept: the stored form; None if the result was dropped.
        aliases: tensors without memory that have the version counters of unsafe aliases.
    """

    func: Any
    kept: Any
    aliases: list[Tensor] = field(default_factory=list)

    def is_changed(self) -> bool:
        """Return whether the result was changed in place, as far as boxes do not know."""
        return any(version_of(alias) != 0 for alias in self.aliases)


@final
class Products:
    """The kept results of one model.

    Args:
        saved: the hooks of the model.
        ledger: counts the bytes.
    """

    def __init__(self, saved: Saved, ledger: Ledger) -> None:
        self.saved, self._ledger = saved, ledger
        self._uses: Counter[int] = Counter()

    def contexts(self, what: str) -> "tuple[_Keep, _Use]":
        """Return the contexts of a module's forward and of its recomputations; `what` begins an error."""
        results: list[_Result] = []
        return _Keep(self, results), _Use(self, results, what)

    def keep(self, result: Any) -> Any:
        """Return the stored form of an operation's result."""
        with versions_below_autograd():
            kept = map_tensors(result, self.saved.pack)
        for box in find(kept, Box):
            box.count = Counted([box.value], self._ledger, self._uses, COLUMN)
        return kept

    def take(self, kept: Any) -> Any:
        """Return the result, as new tensors on the kept memory; None if that memory was changed."""
        with torch.no_grad(), suppress(ChangedInPlaceError):
            return map_tensors(kept, lambda box: self.saved.unpack(box).detach(), Box)
        return None


class _Within(DispatchMode):
    """A context that intercepts each operation below autograd; compiled code inside stays compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@final
class _Keep(_Within):
    """Around a forward.

    Args:
        results: receives the results, in order.
    """

    def __init__(self, products: Products, results: list[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._results = products, results
        self._by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs):
            self._results.append(made := _Result(func, self._products.keep(result)))
            self._by_storage |= {_memory(one): made for one in find(result, Tensor)}
        elif _packet(func) in UNSAFE and (known := self._by_storage.get(_memory(args[0]))) is not None:
            known.aliases += [_counter_of(one) for one in find(result, Tensor)]
        return result


@final
class _Use(_Within):
    """Around a recomputation, which runs the same operations in the same order.

    Args:
        what: begins an error: a rank, and the recomputation of the module.
    """

    def __init__(self, products: Products, results: list[_Result], what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._results, self._what = products, results, what
        self._place = 0

    def __enter__(self) -> Any:
        self._place = 0
        return DispatchMode.__enter__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        place, self._place = self._place, self._place + 1
        known = self._results[place] if place < len(self._results) else None
        if known is None or known.func is not func:
            raise RuntimeError(
                f"{self._what} runs {func} where its forward ran "
                f"{known.func if known else 'no more products'}, so gradients would be wrong: it reads state that "
                "changed in between. Exclude its unit from activations='recompute-rest'."
            )
        is_lost = known.kept is None or known.is_changed()
        result = None if is_lost else self._products.take(known.kept)
        if result is None or not keeps_graph():
            known.kept = None
        return result if result is not None else func(*args, **(kwargs or {}))


def _is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether results of an operation are kept: not if it draws random numbers, as attention with dropout.

    A recomputation without the operation would draw other numbers after it.
    """
    if _packet(func) not in KEPT:
        return False
    return not argument_of(func, args, kwargs or {}, "dropout_p")


def argument_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an argument of a call of an operation; None where it is not given, or the operation has none."""
    place = _place_of(func, name)
    return args[place] if place < len(args) else kwargs.get(name)


@functools.cache
def _place_of(func: Any, name: str) -> int:
    """Return the place of an argument of an operation, or one after all arguments."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else len(names)


def _packet(func: Any) -> Any:
    """Return an operation without its overload."""
    return getattr(func, "overloadpacket", func)


def _memory(tensor: Tensor) -> int:
    return storage_of(local_of(tensor))


def _counter_of(alias: Tensor) -> Tensor:
    """Return an empty tensor with the version counter of another tensor."""
    with versions_below_autograd():
        counter = alias.detach()
    counter.data = alias.new_empty(0)
    return counter
