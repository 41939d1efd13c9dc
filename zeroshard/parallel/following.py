"""Which tensors of the code between the parts of a pipe depend on parts, in the first forward of each shape.

Owns a mode of torch that follows them, and the names of functions that draw random numbers. It must not know chunks or
messages. `parallel/chunked.py` asks it what crosses a border.
"""

import warnings
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, final

from torch import Tensor
from torch.overrides import TorchFunctionMode

from zeroshard.parallel.drawn import Drawn, drawn, states_of_others
from zeroshard.parallel.remote import SHAPE_OF_SECOND, VALUE_FREE, Remote, writes
from zeroshard.torch_private import base_of
from zeroshard.tree import find

__all__ = ["Came", "Following"]


class Came(IntEnum):
    """Where a tensor comes from; of several, the largest decides."""

    DRAWN = 1
    """Random numbers that code between parts draws: at each place other ones."""
    HERE = 2
    ELSEWHERE = 3


DRAWS = frozenset(
    """
    rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like randint_like dropout
    alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu gumbel_softmax
    normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_
    """.split()
)
"""Functions that draw random numbers, by name."""


@final
class Following(TorchFunctionMode):
    """Follows which tensors depend on parts, in the code between them.

    Args:
        own, removed: the loose parameters of this place, and what stands for those of others, by name.
        place: names this rank in errors.
        is_first: whether the chunk is the first one, which may use numbers that it has drawn.
    """

    def __init__(self, own: Mapping[str, Tensor], removed: Mapping[str, Tensor], place: str, *, is_first: bool) -> None:
        super().__init__()
        self._place, self._is_first = place, is_first
        self.is_inside = False
        """Whether a part runs, whose code is not followed."""
        # The tensors, too: an identity is that of a living tensor only.
        self._known: dict[int, tuple[Tensor, Came, str]] = {}
        self._others = states_of_others()
        self._has_drawn_otherwise = False
        for name, tensor in own.items():
            self.note(tensor, Came.HERE, name)
        for name, tensor in removed.items():
            self.note(tensor, Came.ELSEWHERE, name)

    def note(self, value: Any, source: Came, name: str) -> None:
        """Note that the tensors of a value come from a part, here or at another place."""
        for one in find(value, Tensor):
            self._known[id(one)] = one, source, name

    def look(self, *, is_outside: bool) -> None:
        """Note whether Python or NumPy drew numbers since the last look, if code between parts ran."""
        before, self._others = self._others, states_of_others()
        self._has_drawn_otherwise |= is_outside and before != self._others

    def warn_of_others(self) -> None:
        """Warn, at the end of a chunk, if Python or NumPy drew numbers between parts."""
        self.look(is_outside=True)
        if self._has_drawn_otherwise:
            warnings.warn(
                f"{self._place} The code between modules draws random numbers by Python or NumPy, at each place of the "
                "pipe other ones. If a later chunk needs them, draw them before, and pass them with the inputs.",
                stacklevel=2,
            )

    def source_of(self, tensor: Tensor | Drawn) -> tuple[int, str]:
        """Return where a tensor or number comes from, and the part; 0 if it depends on none."""
        if isinstance(tensor, Drawn):
            return Came.DRAWN, tensor.origin
        if isinstance(tensor, Remote):
            return Came.ELSEWHERE, tensor.origin
        _, source, name = self._known.get(id(tensor), (tensor, 0, ""))
        return source, name

    def refuse_drawn(self, who: str, name: str) -> None:
        """Raise if a chunk after the first needs random numbers that were drawn between parts."""
        if not self._is_first:
            raise RuntimeError(
                f"{self._place} {who} needs random numbers that the code between modules draws ({name}), at each place "
                "of the pipe other ones. Draw them before, and pass them with the inputs."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_inside:
            return result
        called = getattr(func, "__name__", "")
        is_drawn = called in DRAWS and _draws(called, args, kwargs)
        if func in VALUE_FREE:
            if is_drawn:
                self.note(result, Came.DRAWN, called)
            return result
        given: list[Tensor | Drawn] = find((args[:1] if func in SHAPE_OF_SECOND else args, kwargs), Tensor, Drawn)
        sources = [self.source_of(one) for one in given]
        source, name = max(sources, default=(0, ""))
        if source == Came.HERE and (names := [one for kind, one in sources if kind == Came.DRAWN]):
            self.refuse_drawn(f"{called}()", names[0])
        if not source and is_drawn:
            source, name = Came.DRAWN, called
        if source == Came.DRAWN and called == "item":
            return drawn(result, name)
        if source:
            self.note(result, Came(source), name)
            if writes(called, kwargs):
                for one in find(kwargs.get("out", args[:1]), Tensor):
                    self.note([one, *filter(None.__ne__, [base_of(one)])], Came(source), name)
        return result


def _draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws numbers that a generator of the user does not determine."""
    if "dropout" in name:  # input, probability, whether it trains
        p, is_training = [*args[1:3], *(None,) * 2][:2]
        return bool(kwargs.get("p", p)) and bool(kwargs.get("train", kwargs.get("training", is_training)))
    return kwargs.get("generator") is None
