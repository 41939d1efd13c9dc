"""Selective recomputation: results of matrix products and attention are kept, other operations run again.

Owns the pair of contexts that `torch.utils.checkpoint` enters around a forward and its recomputation. Results are
stored through `core/saved.py`, so that they are counted and treated by later links. `table/activations.py` lists the
operations.

Note: missing results
    A recomputation runs an operation again if its result was changed in place, or was used by a backward without a
    retained graph. So every graph supports a second backward with `retain_graph=True`, and a graph that is used once
    frees memory early. torch's own contexts (`create_selective_checkpoint_contexts`) support neither.
"""

from collections import Counter
from typing import Any, Final, final

import torch

from zeroshard.activations.chain import Counted
from zeroshard.core.hooks import Enter
from zeroshard.core.saved import Box, SavedTensors
from zeroshard.table.activations import PRODUCTS
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import DispatchMode, keeps_graph, version_of, versions_below_autograd
from zeroshard.tree import find, map_tensors

__all__ = ["COLUMN", "Products"]

Tensor = torch.Tensor

COLUMN: Final = "products"
"""Column of the ledger for bytes of kept results before further links."""

KEPT: Final = frozenset(getattr(torch.ops.aten, name) for name in PRODUCTS)


@final
class Products:
    """The kept results of one model.

    Args:
        saved: the hooks of the model.
        ledger: counts the bytes.
    """

    def __init__(self, saved: SavedTensors, ledger: Ledger) -> None:
        self.saved, self._ledger = saved, ledger
        self._uses: Counter[int] = Counter()

    def contexts(self, enter: Enter) -> "tuple[_Keep, _Use]":
        """Return the contexts of a module's forward and of its recomputations."""
        results: list[tuple[Any, Any]] = []
        return _Keep(self, results), _Use(self, results, enter)

    def keep(self, result: Any) -> Any:
        """Return the stored form of an operation's result."""
        with versions_below_autograd():
            kept = map_tensors(result, self.saved.pack)
        for box in find(kept, Box):
            box.count = Counted([box.value], self._ledger, self._uses, COLUMN)
        return kept

    def take(self, kept: Any) -> Any:
        """Return the result, as new tensors on the kept memory; None if that memory was changed."""
        boxes = find(kept, Box)
        if any(box.treatment is None and version_of(box.value) != box.version for box in boxes):
            return None
        with torch.no_grad():
            return map_tensors(kept, lambda box: self.saved.unpack(box).detach(), Box)


class _Within(DispatchMode):
    """A context that intercepts each operation below autograd; compiled code inside stays compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@final
class _Keep(_Within):
    """Around a forward.

    Args:
        results: receives (operation, stored result), in order.
    """

    def __init__(self, products: Products, results: list[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._results = products, results

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func):
            self._results.append((func, self._products.keep(result)))
        return result


@final
class _Use(_Within):
    """Around a recomputation, which runs the same operations in the same order.

    Args:
        enter: has the name of the module, for errors.
    """

    def __init__(self, products: Products, results: list[tuple[Any, Any]], enter: Enter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products, self._results, self._enter = products, results, enter
        self._place = 0

    def __enter__(self) -> Any:
        self._place = 0
        return DispatchMode.__enter__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not _is_kept(func):
            return func(*args, **(kwargs or {}))
        place, self._place = self._place, self._place + 1
        known, kept = self._results[place] if place < len(self._results) else (None, None)
        if known is None or known is not func:
            raise RuntimeError(
                f"The recomputation of '{self._enter.name}' runs {func} where its forward ran "
                f"{known or 'no more products'}, so gradients would be wrong: it reads state that changed in between. "
                "Exclude its unit from activations='recompute-rest'."
            )
        result = self._products.take(kept) if kept is not None else None
        if result is None or not keeps_graph():
            self._results[place] = func, None
        return result if result is not None else func(*args, **(kwargs or {}))


def _is_kept(func: Any) -> bool:
    return getattr(func, "overloadpacket", func) in KEPT
