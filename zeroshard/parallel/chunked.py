"""A model of which each place of a pipe runs its chunks: the user's forward, with modules of other places left out.

Owns the forward of one chunk: where it begins, where it ends, and what modules of other places return. It must not know
schedules or messages. Read `parallel/cut.py` first.

Note: one forward, a chunk at a time
    The user's forward runs at every place, with the same inputs. Parts of earlier chunks are not called: they return
    their input, or zeros of the shape that they return elsewhere. The first part of the chunk gets the tensors of the
    *border*, which the place before has sent, in their place. The first part of the next chunk ends the forward: its
    arguments are the border there. So code between the parts (masks, positions) runs at each place, on real inputs.
Note: what crosses a border
    In the first forward of each shape, a mode of torch follows what code between parts computes. An argument at the
    border is sent if it depends on an output of a part, or on a loose parameter. A value that depends on a part of
    another place, and did not cross the border, is an error where a part or the output of the model needs it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroshard.parallel.cut import Cut
from zeroshard.torch_private import call_through
from zeroshard.tree import find, map_tensors

__all__ = ["Border", "ChunkedModel", "Learned", "with_graph"]


@final
@dataclass(frozen=True)
class Border:
    """A tensor that crosses a border: its shape, its dtype, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Border":
        """Return the description of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}{'' if self.has_gradient else ' without gradient'}"


@final
@dataclass
class Learned:
    """What the first forward of a chunk found for inputs of one shape."""

    is_heard: bool = False
    """Whether the place before has told what follows."""
    arrives: tuple[Border, ...] = ()
    """The tensors of the border before the chunk."""
    heard: dict[str, list[Any]] = field(default_factory=dict)
    """What parts of earlier chunks return at each call, with a `Border` for each tensor."""
    is_known: bool = False
    """Whether a forward of the chunk has found what follows."""
    sent: tuple[Border, ...] = ()
    """The tensors of the border behind it."""
    entry: tuple[int, ...] = ()
    """The places of the border's tensors among those in the arguments of the first part."""
    left: tuple[int, ...] = ()
    """The same at the end, of the first part of the next chunk."""
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    """What parts of this chunk return at each call."""
    is_told: bool = False
    """Whether the next place has heard what follows from the above."""


class _Left(BaseException):
    """Ends the forward of a chunk: the next one begins. No `Exception`, which user code may catch."""


class _Source(IntEnum):
    HERE = 1
    ELSEWHERE = 2


VALUE_FREE = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        *(getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")),
    }
)
"""Functions whose results depend on the shape and the dtype of their first argument alone."""
SHAPE_OF_SECOND = frozenset(getattr(Tensor, name) for name in ("view_as", "expand_as", "reshape_as", "type_as"))


@final
class _Following(TorchFunctionMode):
    """Follows which tensors depend on parts, in the code between them."""

    def __init__(self, removed: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.is_inside = False
        """Whether a part runs, whose code is not followed."""
        # The tensors, too: an identity is that of a living tensor only.
        self._known: dict[int, tuple[Tensor, _Source, str]] = {}
        for name, tensor in own.items():
            self.note(tensor, _Source.HERE, name)
        for name, tensor in removed.items():
            self.note(tensor, _Source.ELSEWHERE, name)

    def note(self, value: Any, source: _Source, name: str) -> None:
        """Note that the tensors of a value come from a part, here or at another place."""
        for one in find(value, Tensor):
            self._known[id(one)] = one, source, name

    def source_of(self, tensor: Tensor) -> tuple[int, str]:
        """Return where a tensor comes from, and the part; 0 if it depends on none."""
        _, source, name = self._known.get(id(tensor), (tensor, 0, ""))
        return source, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_inside or func in VALUE_FREE:
            return result
        given = find((args[:1] if func in SHAPE_OF_SECOND else args, kwargs), Tensor)
        source, name = max((self.source_of(one) for one in given), default=(0, ""))
        if source:
            self.note(result, _Source(source), name)
            called = getattr(func, "__name__", "")
            if called == "__setitem__" or (called.endswith("_") and not called.endswith("__")) or "out" in kwargs:
                self.note(kwargs.get("out", args[:1]), _Source(source), name)
        return result


@final
class ChunkedModel:
    """The forward of a model, one chunk at a time.

    Args:
        own: the chunks of this place.
        removed: what stands for the parameters of other places, by name.
    """

    def __init__(self, model: nn.Module, cut: Cut, own: Sequence[int], removed: Mapping[str, Tensor]) -> None:
        self.model, self.cut, self.own, self._removed, self.place = model, cut, own, removed, ""
        """`place` is the text that names this rank in errors."""
        self._forward: Callable[..., Any] = model.forward
        self._routes = {part: functools.partial(self.call, part) for part in cut.parts}
        self.chunk: int | None = None
        """The chunk that runs; None outside a forward of the pipeline."""
        self._arrived: tuple[Tensor, ...] = ()
        self._learned = Learned()
        self._following: _Following | None = None
        self._calls: dict[str, int] = {}
        self._has_entered = False
        self._sent: tuple[Tensor, ...] | None = None

    def install(self) -> None:
        """Put this object in the way of calls of the model and its parts; again, where a part was compiled since."""
        for part, route in self._routes.items():
            call_through(part, route)

    # -- a forward ----------------------------------------------------------------------------------------------------

    def run(
        self, chunk: int, args: Sequence[Any], kwargs: Mapping[str, Any], arrived: tuple[Tensor, ...], learned: Learned
    ) -> Any:
        """Run the forward of a chunk, and return the tensors of its border, or the output of the last chunk.

        Args:
            arrived: the tensors of the border before the chunk.
            learned: what is known of inputs of this shape; the first forward fills it.
        """
        self.install()
        self.chunk, self._arrived, self._learned = chunk, arrived, learned
        self._calls, self._has_entered, self._sent = {}, False, None
        try:
            return self.model(*args, **kwargs)
        finally:
            self.chunk, self._arrived, self._sent, self._following = None, (), None, None

    def replacement(self) -> Callable[..., Any]:
        """Return what replaces the model's `forward`, with its signature."""

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        return forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward as far as the chunk."""
        if self.chunk is None:
            if self.cut.count == 1:
                return self._forward(*args, **kwargs)
            raise RuntimeError(
                f"{self.place} The model was called by itself, but this place has only a part of it. Train with "
                "pipe.step(), and evaluate with pipe.evaluate(), which run it on all places."
            )
        is_last = self.chunk == self.cut.count - 1
        try:
            with self._followed():
                output = self._forward(*args, **kwargs)
        except _Left:
            assert self._sent is not None
            return self._sent
        if not is_last:
            raise RuntimeError(
                f"{self.place} The forward of {type(self.model).__name__} ended before it called "
                f"'{self.cut.starts[self.chunk]}', where chunk {self.chunk + 1} begins. Begin chunks at modules that "
                "each forward calls."
            )
        if self._following is not None:
            for one in find(output, Tensor):
                self._refuse_elsewhere(one, f"The output of {type(self.model).__name__}")
        return output

    @contextmanager
    def _followed(self) -> Iterator[None]:
        if self._learned.is_known:
            yield
            return
        own = {name: self.model.get_parameter(name) for name, chunk in self.cut.loose.items() if chunk in self.own}
        with _Following(self._removed, own) as self._following:
            self._following.note(self._arrived, _Source.HERE, "the border")
            yield

    def call(self, part: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part, or return what stands for its output; the replacement of a part's `__call__`."""
        name, chunk = self.cut.parts[part]
        if self.chunk is None:
            if chunk in self.own:
                return plain(*args, **kwargs)
            raise RuntimeError(f"{self.place} Module '{name}' is at another place of the pipe, in chunk {chunk}.")
        if chunk < self.chunk:
            return self._pass_over(name, chunk, args, kwargs)
        if chunk > self.chunk:
            self._leave(name, chunk, args, kwargs)
        following = self._following
        if not self._has_entered:
            self._has_entered = True
            if self.chunk > 0:
                args, kwargs = self._enter(name, args, kwargs)
        if following is None:
            return plain(*args, **kwargs)
        for one in find((args, kwargs), Tensor):
            self._refuse_elsewhere(one, f"Module '{name}'")
        is_nested, following.is_inside = following.is_inside, True
        try:
            output = plain(*args, **kwargs)
        finally:
            following.is_inside = is_nested
        following.note(output, _Source.HERE, name)
        self._learned.outputs.setdefault(name, []).append(self._described(name, output))
        return output

    def _pass_over(self, name: str, chunk: int, args: Any, kwargs: Any) -> Any:
        """Return what stands for the output of a part of an earlier chunk."""
        if self._has_entered:
            raise RuntimeError(
                f"{self.place} The forward calls '{name}', of chunk {chunk}, after a module of chunk {self.chunk}: "
                "modules must be registered in the order in which they are called, or cut= name other modules."
            )
        number = self._calls[name] = self._calls.get(name, -1) + 1
        known = self._learned.heard.get(name, [])
        if number >= len(known):
            raise RuntimeError(
                f"{self.place} The forward calls '{name}' {number + 1} times here, and {len(known)} times at its own "
                "place: the calls must depend on the inputs alone."
            )
        first = next(iter(find((args, kwargs), Tensor)), None)

        def stand_in(border: Border) -> Tensor:
            if first is not None and tuple(first.shape) == border.shape and first.dtype == border.dtype:
                return first.detach()
            return torch.zeros(border.shape, dtype=border.dtype, device=self._device)

        output = map_tensors(known[number], stand_in, Border)
        if self._following is not None:
            self._following.note(output, _Source.ELSEWHERE, name)
        return output

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _enter(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the first part of the chunk, with the tensors of the border in their places."""
        tensors, learned = find((args, kwargs), Tensor), self._learned
        if self._following is not None:
            learned.entry = self._crossing(tensors, _Source.ELSEWHERE)
            if len(learned.entry) != len(self._arrived):
                raise RuntimeError(
                    f"{self.place} '{name}', where chunk {self.chunk} begins, needs {len(learned.entry)} tensors of "
                    f"earlier chunks here, and was given {len(self._arrived)} by them: the code before it must do the "
                    "same at each place."
                )
        arriving = dict(zip(learned.entry, self._arrived, strict=True))
        numbers = iter(range(len(tensors)))
        return map_tensors((args, kwargs), lambda one: arriving.get(next(numbers), one))  # type: ignore[no-any-return]

    def _leave(self, name: str, chunk: int, args: Any, kwargs: Any) -> None:
        """End the forward with the tensors of the border."""
        assert self.chunk is not None
        if chunk > self.chunk + 1 or not self._has_entered:
            raise RuntimeError(
                f"{self.place} The forward calls '{name}', of chunk {chunk}, before a module of chunk "
                f"{chunk - 1 if self._has_entered else self.chunk}: modules must be registered in the order in which "
                "they are called, or cut= name other modules."
            )
        tensors = find((args, kwargs), Tensor)
        if self._following is not None:
            self._learned.left = self._crossing(tensors, _Source.HERE)
            for at in self._learned.left:
                self._refuse_elsewhere(tensors[at], f"Module '{name}'")
            if not self._learned.left:
                raise RuntimeError(
                    f"{self.place} '{name}' begins chunk {chunk}, but takes nothing from chunk {self.chunk}."
                )
        self._sent = tuple(tensors[at] for at in self._learned.left)
        raise _Left

    def _crossing(self, tensors: Sequence[Tensor], least: _Source) -> tuple[int, ...]:
        assert self._following is not None
        return tuple(at for at, one in enumerate(tensors) if self._following.source_of(one)[0] >= least)

    def _refuse_elsewhere(self, tensor: Tensor, who: str) -> None:
        assert self._following is not None
        source, name = self._following.source_of(tensor)
        if source == _Source.ELSEWHERE:
            raise RuntimeError(
                f"{self.place} {who} needs a value of '{name}', which is at another place of the pipe, and which the "
                "first module of the chunk is not given: a skip over the border of a chunk. Cut elsewhere, or pass the "
                "value from module to module."
            )

    def _described(self, name: str, output: Any) -> Any:
        described = map_tensors(output, Border.of)
        if not _is_plain(described):
            raise RuntimeError(
                f"{self.place} Module '{name}' returns a {type(output).__name__}. Modules of a pipe return a tensor, "
                "or tuples, lists or mappings of tensors, of which other places get the shapes."
            )
        return described


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return type(value) in (tuple, list) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    return isinstance(value, Border | bool | int | float | str | type(None))


class _Arrive(torch.autograd.Function):
    """Gives a chunk the tensors of its border, and takes their gradients as soon as autograd has them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensors: Sequence[Tensor], take: Callable[[Sequence[Any]], None]) -> Any:
        ctx.take = take
        return tuple(one.detach() for one in tensors)  # no views: the chunk may change them in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.take(grads)
        return None, None, None


def with_graph(
    token: Tensor, borders: Sequence[Border], arrived: Sequence[Tensor], take: Callable[[Sequence[Any]], None]
) -> tuple[Tensor, ...]:
    """Return the tensors of a border as autograd sees them in the chunk behind it.

    Args:
        token: requires a gradient, and gets none.
        take: called with the gradients of the tensors that have one, None where no loss depends on a tensor.
    """
    places = [at for at, border in enumerate(borders) if border.has_gradient]
    if not places:
        return tuple(arrived)
    followed = _Arrive.apply(token, [arrived[at] for at in places], take)  # type: ignore[no-untyped-call]
    found = dict(zip(places, followed, strict=True))
    return tuple(found.get(at, one) for at, one in enumerate(arrived))
