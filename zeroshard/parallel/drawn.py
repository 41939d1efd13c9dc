"""Random numbers that the code between the parts of a pipe draws, as numbers of Python.

Owns number types that remember how they were drawn, also through arithmetic, and a look at the generators of Python and
NumPy, whose numbers cannot be followed. It must not know parts. `parallel/following.py` follows tensors.
"""

import operator
import random
import sys
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

__all__ = ["Drawn", "drawn", "states_of_others"]

Operation = Callable[..., Any]


def _pair(apply: Operation) -> tuple[Operation, Operation]:
    """Return the methods of an operation and of its reflection."""

    def forth(self: "Drawn", other: Any) -> Any:
        # A tensor then sees this number among its arguments.
        return NotImplemented if isinstance(other, Tensor) else drawn(apply(self.plain, other), self.origin)

    def back(self: "Drawn", other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else drawn(apply(other, self.plain), self.origin)

    return forth, back


class Drawn:
    """A number that depends on random ones; `origin` is the function that drew them."""

    plain: float
    origin: str

    __add__, __radd__ = _pair(operator.add)
    __sub__, __rsub__ = _pair(operator.sub)
    __mul__, __rmul__ = _pair(operator.mul)
    __truediv__, __rtruediv__ = _pair(operator.truediv)
    __floordiv__, __rfloordiv__ = _pair(operator.floordiv)
    __mod__, __rmod__ = _pair(operator.mod)
    __pow__, __rpow__ = _pair(operator.pow)

    def __neg__(self) -> Any:
        return drawn(-self.plain, self.origin)


@final
class _Float(Drawn, float):
    pass


@final
class _Int(Drawn, int):
    pass


def drawn(value: Any, origin: str) -> Any:
    """Return a number as one that depends on random numbers; another value, or a truth value, as it is."""
    kind = {float: _Float, int: _Int}.get(type(value))
    if kind is None:
        return value
    found = kind(value)
    found.plain, found.origin = value, origin
    return found


def states_of_others() -> list[Any]:
    """Return the states of the generators of Python and NumPy."""
    if (numpy := sys.modules.get("numpy")) is None:
        return [random.getstate()]
    _, keys, *rest = numpy.random.get_state()
    return [random.getstate(), keys.tobytes(), rest]
