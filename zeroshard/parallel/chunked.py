"""A model of which each place of a pipe runs its chunks: the user's forward, with modules of other places left out.

Owns the forward of one chunk: where it begins, where it ends, and what modules of other places return. It must not know
schedules or messages. Read `parallel/cut.py` first.

Note: one forward, a chunk at a time
    The user's forward runs at every place, with the same inputs. Parts of earlier chunks are not called: they return
    tensors without contents (`parallel/remote.py`), of the shapes that they return at their own place. The first part
    of the chunk gets the tensors of the *border*, which the place before has sent, in their place. The first part of
    the next chunk ends the forward: its arguments are the border there. So code between the parts (masks, positions)
    runs at each place, on real inputs.
Note: what crosses a border
    In the first forward of each shape, a mode of torch follows what code between parts computes. An argument at the
    border is sent if it depends on an output of a part, or on a loose parameter. A value that depends on a part of
    another place, and did not cross the border, is an error where a part or the output of the model needs it.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.parallel.cut import Cut
from zeroshard.parallel.drawn import Drawn
from zeroshard.parallel.following import Came, Following
from zeroshard.parallel.outside import Outside
from zeroshard.parallel.remote import Absence, Remote, remote
from zeroshard.torch_private import call_through, has_split, is_fake, version_of
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


@final
class ChunkedModel:
    """The forward of a model, one chunk at a time.

    Args:
        own: the chunks of this place.
        removed: what stands for the parameters of other places, by name.
        absence: of the values of other places.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        own: Sequence[int],
        removed: Mapping[str, Tensor],
        absence: Absence | None = None,
    ) -> None:
        self.model, self.cut, self.own, self._removed, self.absence = model, cut, own, removed, absence or Absence()
        self.outside = Outside(model, cut.parts, len(own))
        self._forward: Callable[..., Any] = model.forward
        self._routes = {part: functools.partial(self.call, part) for part in cut.parts}
        self.chunk: int | None = None
        """The chunk that runs; None outside a forward of the pipeline."""
        self._arrived: tuple[Tensor, ...] = ()
        self._learned = Learned()
        self._following: Following | None = None
        self._calls: dict[str, int] = {}
        self._has_entered = False
        self._entries: set[str] = set()
        """The parts that were given what arrived, in place of their arguments."""
        self._sent: tuple[Tensor, ...] | None = None
        self._theirs = set(self._hooks())
        """Hooks of user code on the results of the whole model."""
        self._own_hooks: set[int] | None = None
        """Those of the engine, once it has added them."""

    def note_hooks(self) -> None:
        """Note that what was added to the hooks of the model since the construction is the engine's."""
        self._own_hooks = set(self._hooks()) - self._theirs

    def _hooks(self) -> list[int]:
        hooks = self.model._forward_hooks, self.model._backward_hooks, self.model._backward_pre_hooks
        return [number for some in hooks for number in some]

    @property
    def place(self) -> str:
        """The text that names this rank in errors."""
        return self.absence.place

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
        if self.cut.count > 1 and self._own_hooks is not None and not self._own_hooks.issuperset(self._hooks()):
            raise RuntimeError(
                f"{self.place} A forward or backward hook of {type(self.model).__name__} as a whole would run at each "
                "chunk, on what crosses its border. Register it on the module that the forward calls last."
            )
        self.install()
        self.chunk, self._arrived, self._learned = chunk, arrived, learned
        self._calls, self._has_entered, self._sent = {}, False, None
        try:
            with self.absence.during():
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
        before = None if self._learned.is_known else self.outside.versions()
        try:
            with self._followed():
                output = self._forward(*args, **kwargs)
        except _Left:
            assert self._sent is not None
            self._refuse_changes(before)
            return self._sent
        self._refuse_changes(before)
        if not is_last:
            raise RuntimeError(
                f"{self.place} The forward of {type(self.model).__name__} ended before it called "
                f"'{self.cut.starts[self.chunk]}', where chunk {self.chunk + 1} begins. Begin chunks at modules that "
                "each forward calls."
            )
        self._refuse(output, f"The output of {type(self.model).__name__}")
        return output

    @contextmanager
    def _followed(self) -> Iterator[None]:
        if self._learned.is_known:
            yield
            return
        own = {name: self.model.get_parameter(name) for name, chunk in self.cut.loose.items() if chunk in self.own}
        with Following(own, self._removed, self.place, is_first=self.chunk == 0) as self._following:
            self._following.note(self._arrived, Came.HERE, "the border")
            try:
                yield
            finally:
                self._following.warn_of_others()

    def _refuse_changes(self, before: Mapping[str, tuple[int, int]] | None) -> None:
        """Raise if the first forward changed state outside of parts.

        Args:
            before: the versions of saved buffers; None in later forwards.
        """
        if before is not None and (following := self._following) is not None and self.chunk is not None:
            self.outside.refuse_changes(self.place, self.chunk, before, lambda one: following.source_of(one)[0] > 0)

    def call(self, part: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part, or return what stands for its output; the replacement of a part's `__call__`."""
        name, chunk = self.cut.parts[part]
        if self.chunk is None:
            self._refuse_in_recomputation(name, args, kwargs)
            if chunk in self.own:
                return plain(*args, **kwargs)
            raise RuntimeError(f"{self.place} Module '{name}' is at another place of the pipe, in chunk {chunk}.")
        if chunk < self.chunk:
            return self._pass_over(name, chunk, args, kwargs)
        if chunk > self.chunk:
            self._leave(name, chunk, args, kwargs)
        if not self._has_entered:
            self._has_entered = True
            if self.chunk > 0:
                args, kwargs = self._enter(name, args, kwargs)
        self._refuse((args, kwargs), f"Module '{name}'")
        if self._following is None:
            return self._compared(name, plain(*args, **kwargs))
        return self._first_call(self._following, name, part, plain, args, kwargs)

    def _first_call(
        self, following: Following, name: str, part: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a part of this chunk in the first forward, and note what it returns."""
        plainly = [one for one in find((args, kwargs), Tensor) if not following.source_of(one)[0]]
        before = _state_of(plainly, (args, kwargs))
        is_nested, following.is_inside = following.is_inside, True
        following.look(is_outside=not is_nested)
        try:
            output = plain(*args, **kwargs)
        finally:
            following.is_inside = is_nested
            following.look(is_outside=False)
        if not is_nested and before != _state_of(plainly, (args, kwargs)):
            raise RuntimeError(
                f"{self.place} Module '{name}' changes an argument in place that other places of the pipe have, too, "
                "and do not see changed: a list, a mapping or a tensor. Return the value instead."
            )
        if not is_nested and (kept := _keeps(part)):
            warnings.warn(
                f"{self.place} Module '{name}' keeps a value of its forward as '{kept}'. Other places of the pipe do "
                "not have it: a loss that reads it there is another one. Return it from the module.",
                stacklevel=2,
            )
        following.note(output, Came.HERE, name)
        self._learned.outputs.setdefault(name, []).append(self._described(name, output))
        return output

    def _compared(self, name: str, output: Any) -> Any:
        """Return the output of a later call; raise if numbers in it are not those of the first forward."""
        number = self._calls[name] = self._calls.get(name, -1) + 1
        known = self._learned.outputs.get(name, ())
        if number < len(known) and (told := _plain_in(known[number])) and told != _plain_in(output):
            raise RuntimeError(
                f"{self.place} Module '{name}' returns {_plain_in(output)} beside its tensors, and returned {told} "
                "with the first micro-batch, which other places of the pipe still use. Return tensors."
            )
        return output

    def _refuse_in_recomputation(self, name: str, args: Any, kwargs: Any) -> None:
        # The values of other places are of no class in a trace, where nothing else calls a part outside of a forward.
        is_traced = name in self._entries and any(map(is_fake, find((args, kwargs), Tensor)))
        if is_traced or find((args, kwargs), Remote):
            raise RuntimeError(
                f"{self.place} torch.utils.checkpoint runs '{name}' again, without the tensors that its place of the "
                "pipe was sent. Write activations='recompute' in zs.pipeline() instead."
            )

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
            # What was given may be the user's, and be written to.
            if isinstance(first, Remote) and tuple(first.shape) == border.shape and first.dtype == border.dtype:
                return remote(first.detach(), name, self.absence)
            made = torch.zeros(border.shape, dtype=border.dtype, device=self._device)
            return remote(made, name, self.absence)

        output = map_tensors(known[number], stand_in, Border)
        if self._following is not None:  # those of a trace are of no class
            self._following.note(output, Came.ELSEWHERE, name)
        return output

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _enter(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the first part of the chunk, with the tensors of the border in their places."""
        tensors, learned = find((args, kwargs), Tensor), self._learned
        if self._following is not None:
            learned.entry = self._crossing(tensors, Came.ELSEWHERE)
        if len(learned.entry) != len(self._arrived) or max(learned.entry, default=-1) >= len(tensors):
            raise RuntimeError(
                f"{self.place} '{name}', where chunk {self.chunk} begins, needs {len(learned.entry)} of its "
                f"{len(tensors)} tensors from earlier chunks here, and was given {len(self._arrived)} by them: the "
                "code before it must do the same at each place, and with each micro-batch."
            )
        self._entries |= {name} if self._arrived else set()
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
            self._learned.left = self._crossing(tensors, Came.HERE)
            if not self._learned.left:
                raise RuntimeError(
                    f"{self.place} '{name}' begins chunk {chunk}, but takes nothing from chunk {self.chunk}."
                )
        self._refuse(tensors, f"Module '{name}'")
        if max(self._learned.left) >= len(tensors):
            raise RuntimeError(
                f"{self.place} '{name}' begins chunk {chunk}, and is given {len(tensors)} tensors, fewer than with the "
                "first micro-batch."
            )
        self._sent = tuple(tensors[at] for at in self._learned.left)
        if has_split(map(type, self._sent)):
            raise RuntimeError(
                f"{self.place} '{name}' begins chunk {chunk}, and is given a DTensor, which messages do not carry. "
                "Give it local tensors: write use_local_output=True in the plan of the layer before it."
            )
        raise _Left

    def _crossing(self, tensors: Sequence[Tensor], least: Came) -> tuple[int, ...]:
        assert self._following is not None
        return tuple(at for at, one in enumerate(tensors) if self._following.source_of(one)[0] >= least)

    def _refuse(self, given: Any, who: str) -> None:
        """Raise if a part, or the output, needs a value that is not here, or random numbers of its own place."""
        needed: list[Tensor | Drawn] = find(given, Tensor, Drawn)
        for tensor in needed:
            if isinstance(tensor, Remote):
                raise RuntimeError(
                    f"{self.place} {who} needs a value of '{tensor.origin}', which is at another place of the pipe, "
                    "and which the first module of the chunk is not given: a skip over the border of a chunk. Cut "
                    "elsewhere, or pass the value from module to module."
                )
            if self._following is not None:
                source, name = self._following.source_of(tensor)
                if source == Came.DRAWN:
                    self._following.refuse_drawn(who, name)

    def _described(self, name: str, output: Any) -> Any:
        described = map_tensors(output, Border.of)
        if not _is_plain(described):
            raise RuntimeError(
                f"{self.place} Module '{name}' returns a {type(output).__name__}. Modules of a pipe return a tensor, "
                "or tuples, lists or mappings of tensors, of which other places get the shapes."
            )
        return described


def _state_of(tensors: Sequence[Tensor], value: Any) -> Any:
    """Return what changes with tensors, and with the lists and mappings in a value."""
    return [version_of(one) for one in tensors if not one.is_inference()], _lengths(value)


def _lengths(value: Any) -> list[int]:
    """Return the lengths of the lists and mappings in a value."""
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return [len(value), *(length for item in items for length in _lengths(item))]
    return []


def _plain_in(value: Any) -> list[Any]:
    """Return the numbers, texts and None in a value."""
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return [one for item in items for one in _plain_in(item)]
    return [value] if isinstance(value, bool | int | float | str | type(None)) else []


def _keeps(part: nn.Module) -> str:
    """Return the name of an attribute of a part that is a tensor with a graph, or ""."""
    for path, module in part.named_modules():
        for key, value in vars(module).items():
            is_made = {f"{key}_orig", f"{key}_g"} & module._parameters.keys()  # by a norm of weights
            if isinstance(value, Tensor) and value.grad_fn is not None and not is_made:
                return f"{path}.{key}".removeprefix(".")
    return ""


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
