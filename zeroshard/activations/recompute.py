"""Activation checkpointing: modules keep only their inputs, and run again in the backward pass.

Owns the kept inputs, and the engine's event for a recomputation, so that parameters are gathered once for it and the
following backward. `torch.utils.checkpoint` drops, recomputes and compares saved tensors, and restores random numbers
and autocast.

Note: every k modules
    The inputs of a module are usually the outputs of the previous module. Within a segment, such an input is not kept.
    An autograd node outside the graph, `_Marked`, saves it inside the recomputed region of the previous module, at no
    cost, and reading the input runs the previous module again. So a recomputation first runs the previous calls of the
    segment, and each module runs once more in total. Other inputs, for example after code between the modules, are kept
    like those of the first module. A node references the recomputation of its call, invisibly for Python's collector.
    So a call does not reference its own node: the next call does, and until then `_Segments`, while an output is alive.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from zeroshard.activations.products import Products
from zeroshard.activations.saved import BECAUSE
from zeroshard.activations.surroundings import Kept, Surroundings
from zeroshard.activations.trail import Trails
from zeroshard.activations.values import Values, values_of
from zeroshard.table.activations import Recomputed
from zeroshard.torch_private import (
    graph_task,
    is_inside_reentrant_checkpoint,
    is_inside_transform,
    local_of,
    version_of,
    without_modes,
)
from zeroshard.tree import find, map_tensors

__all__ = ["Enter", "Hooks", "Put", "Suspect", "are_alike", "recompute", "refuse_reentrant", "sums_of"]

Tensor = torch.Tensor
SUMMED_NUMEL: Final = 1 << 18
"""Elements of an output that are cast to fp64 at a time."""
Suspect = Callable[[str, Tensor | bool], None]
Put = Callable[[MutableMapping[str, Any], str, Any], object]
"""Replaces a value, such as an attribute in `vars(object)`."""


class Enter(Protocol):
    """What runs before a module's forward and before its recomputations, with the module and its inputs.

    Args:
        name: of the module.
    """

    name: str

    @property
    def rank(self) -> str:
        """The rank as errors name it, such as "[rank 0/2]"."""

    def __call__(self, *args: Any) -> None:
        """Run."""


Hooks = Mapping[nn.Module, tuple[Enter, Callable[..., None]]]
"""What runs before and after the forward of each module."""


def recompute(
    modules: Sequence[tuple[nn.Module, Recomputed]],
    hooks: Hooks,
    products: Products,
    suspect: Suspect,
    put: Put,
    unread: Collection[nn.Module] = (),
) -> None:
    """Set up activation checkpointing of modules.

    Args:
        modules: modules in model order, each with its treatment.
        hooks: the engine's hooks of each module.
        products: stores results of products, if a cell requests it.
        suspect: receives the name of a module, and a flag that is True if a recomputation differs.
        put: sets the forward of a module.
        unread: modules whose recomputations are not compared: inputs are rounded, or tensors have no values.
    """
    counts: dict[Recomputed, int] = {}
    for _, how in modules:
        counts[how] = counts.get(how, 0) + 1
    segments = {
        how: _Segments(max(1, round(math.sqrt(count))) if how.every == "sqrt" else how.every)
        for how, count in counts.items()
    }
    for module, how in modules:
        forward = _Forward(module, how, hooks[module], products, segments[how], suspect, module not in unread)
        put(vars(module), "forward", forward)


@final
class _Forward:
    """Replaces a module's forward."""

    def __init__(
        self,
        module: nn.Module,
        how: Recomputed,
        hooks: tuple[Enter, Callable[..., None]],
        products: Products,
        segments: "_Segments",
        suspect: Suspect,
        is_exact: bool,
    ) -> None:
        self.module, self.plain, self.segments = module, module.forward, segments
        self.is_compared = not is_exact
        """Whether outputs of a recomputation have been compared with those of its forward, or cannot be."""
        self.enter, self.leave = hooks
        self.surroundings = Surroundings(module, f"{self.enter.rank} A forward of {self._shown}", products.saved.kept)
        self._saved = products.saved
        doubt = functools.partial(suspect, f"The recomputation of {self._shown}")
        self.trails = Trails(products.saved, is_exact, doubt, self.differs)
        self._contexts = (
            functools.partial(products.contexts, f"{self.enter.rank} The recomputation of '{self.enter.name}'")
            if how.keeps == "products"
            else noop_context_fn
        )
        functools.update_wrapper(self, self.plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.plain,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with checkpointing.

        Inside another recomputation, such as the user's own, it only runs: saved tensors are dropped there.

        Raises:
            RuntimeError: a transform of torch.func is active.
        """
        if not torch.is_grad_enabled() or not self._saved.is_innermost():
            return self.plain(*args, **kwargs)
        if is_inside_transform():
            raise RuntimeError(
                f"{self.enter.rank} torch.vmap, or another transform of torch.func, over '{self.enter.name}', which is "
                "recomputed: its recomputation would run in the backward, outside the transform. Batch its inputs "
                "without torch.vmap, or exclude its unit from activations='recompute'."
            )
        run = _Run(
            self, ([*map(self._without_cache, args)], {k: self._without_cache(one) for k, one in kwargs.items()})
        )
        # The comparison needs a complete recomputation; torch stops it at the last saved tensor.
        with nullcontext() if self.is_compared else set_checkpoint_early_stop(False):
            try:
                return checkpoint(run, *run.begin(), use_reentrant=False, context_fn=self._contexts)
            finally:
                run.end()

    def _without_cache(self, value: Any) -> Any:
        """Return None for an empty cache of keys and values, which training does not read.

        Raises:
            RuntimeError: the cache has contents, to which a recomputation would add again.
        """
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if value.get_seq_length():
            raise RuntimeError(
                f"{self.enter.rank} '{self.enter.name}' is recomputed, but received a {type(value).__name__} with "
                "contents, to which a recomputation would add again. Disable the cache: model.config.use_cache = False."
            )
        return None

    def compare(self, first: Tensor, again: Tensor) -> None:
        """Raise unless a recomputation gave the outputs of the forward."""
        self.is_compared = True
        if not are_alike(first, again):
            raise self.differs("gave other outputs than its forward")

    def differs(self, what: str) -> RuntimeError:
        """Return the error for a recomputation that is not the forward."""
        return RuntimeError(f"{self.enter.rank} The recomputation of {self._shown} {what}{BECAUSE}")

    @property
    def _shown(self) -> str:
        return f"'{self.enter.name}' ({type(self.module).__name__})"


@dataclass(frozen=True, slots=True)
class _Input:
    """Represents the input tensor with this number."""

    index: int


@final
class _Outputs:
    """The output tensors of one call of a module, which the recomputation of the next call reads."""

    def __init__(self) -> None:
        self.marked: Any = None
        self._task, self._values = -1, tuple[Tensor, ...]()

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors; run the call again unless it has already run in this backward."""
        if self._task != graph_task() or not self._values:
            with torch.no_grad():
                self._task, self._values = graph_task(), self.marked.grad_fn.saved_tensors
        return self._values

    def forget(self) -> None:
        """Drop the tensors, after their only reader."""
        self._values = ()


@dataclass(frozen=True, slots=True)
class _Output:
    """Represents an input tensor that is an output of the previous call."""

    of: _Outputs
    index: int
    requires_grad: bool

    def read(self) -> Tensor:
        """Return the tensor without its graph."""
        return self.of.read()[self.index].detach().requires_grad_(self.requires_grad)


@final
class _Segments:
    """Previous calls, to find inputs that need not be kept.

    Args:
        every: number of calls in a segment.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._place, self._last = -1, _Outputs()
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []

    def find(self, tensor: Tensor) -> _Output | None:
        """Return the representation of an unchanged output of the previous call in the same segment, or None."""
        for index, (known, version) in enumerate(self._tensors):
            if known() is tensor and version_of(tensor) == version:
                return _Output(self._last, index, tensor.requires_grad)
        return None

    def place(self, follows: bool) -> int:
        """Return the index of a call in its segment; `follows` if it reads an output of the previous call."""
        return self._place + 1 if follows else 0

    def note(self, place: int, outputs: _Outputs, tensors: Sequence[Tensor]) -> None:
        """Record the call that has just ended."""
        self._place, self._last = place, outputs
        self._tensors = [(weakref.ref(one, self._forget), version_of(one)) for one in tensors]

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        """Drop a call whose outputs were freed."""
        if self._tensors and all(known() is None for known, _ in self._tensors):
            self._last, self._tensors = _Outputs(), []


@final
class _Run:
    """One call of a module, with the data to repeat it."""

    def __init__(self, forward: _Forward, inputs: Any) -> None:
        self._forward, self._first, self._inputs = forward, inputs, None
        self._place = 0
        self._around: Kept = forward.surroundings.keep()
        self._tensors: Sequence[Tensor] = ()
        self._marked: Any = None
        self._sums: Tensor | None = None
        self._trail = forward.trails.start()

    def begin(self) -> list[Tensor]:
        """Return the input tensors to keep; the other inputs stay in this object."""
        kept: list[Tensor] = []
        follows = False

        def replace(tensor: Tensor) -> Any:
            nonlocal follows
            if (output := self._forward.segments.find(tensor)) is not None:
                if not follows:
                    # torch keeps the generator states of the devices of these tensors.
                    kept.append(tensor.new_empty(0))
                follows = True
                return output
            kept.append(tensor)
            return _Input(len(kept) - 1)

        self._inputs = map_tensors(self._first, replace)
        self._place = self._forward.segments.place(follows)
        return kept

    def end(self) -> None:
        """Drop the tensors of the first run, and record the outputs in the segments."""
        self._first = None
        self._forward.surroundings.note(self._around)
        if self._forward.segments.every > 1:
            outputs = _Outputs()
            outputs.marked = self._marked
            self._forward.segments.note(self._place, outputs, self._tensors)
        self._tensors, self._marked = (), None

    def __call__(self, *kept: Tensor) -> Any:
        """Run the module: first with the given inputs, then with the kept inputs."""
        forward = self._forward
        if self._first is not None:
            args, kwargs = self._first
            self._first = None
            with self._trail.noted():
                outputs = forward.plain(*args, **kwargs)
                self._tensors, self._marked = self._mark(outputs)
            is_short = self._trail.end()
            self._sums = sums_of(outputs) if is_short or not forward.is_compared else None
            return outputs
        args, kwargs = map_tensors(self._inputs, lambda one: one.read(), _Output)
        for output in find(self._inputs, _Output):
            output.of.forget()
        args, kwargs = map_tensors((args, kwargs), lambda one: kept[one.index], _Input)
        forward.enter(forward.module, args, kwargs)
        try:
            with self._trail.followed():
                with self._around.restored():
                    outputs = forward.plain(*args, **kwargs)
                self._mark(outputs)
            if self._sums is not None and (sums := sums_of(outputs)) is not None:
                forward.compare(self._sums, sums)
            return outputs
        finally:
            forward.leave(forward.module, args, kwargs, None)

    def _mark(self, outputs: Any) -> tuple[Sequence[Tensor], Any]:
        """Save output tensors for the next call of the segment; return them and the tensor whose node has them."""
        if (self._place + 1) % self._forward.segments.every == 0:
            return (), None
        tensors = [tensor for tensor in find(outputs, Tensor) if tensor.requires_grad]
        if not tensors:
            return (), None
        # An edge to each tensor would keep it; without any, there would be no node.
        edge = tensors[0].new_empty(0, requires_grad=True)
        return tensors, _Marked.apply(edge, *(one.detach() for one in tensors))  # type: ignore[no-untyped-call]


class _Marked(torch.autograd.Function):
    """Saves tensors outside the graph, without a backward; up to torch 2.12, as long as its output exists."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, *tensors: Tensor) -> Tensor:
        """Save the tensors."""
        ctx.save_for_backward(*tensors)
        return edge.new_empty(0)


def are_alike(first: Tensor, again: Tensor) -> bool:
    """Return whether the sums of two results are those of equal ones, or have no values."""
    tolerance = 0.0 if first.device.type == "cpu" else 1e-2  # some GPU kernels sum in varying order
    with without_modes():
        is_known = values_of(first) is not Values.NEVER
        return not is_known or bool(torch.isclose(first, again, tolerance, 0.0, equal_nan=True).all())


def sums_of(outputs: Any) -> Tensor | None:
    """Return the sum and the norm of each floating-point tensor, to compare two results."""
    with torch.no_grad(), without_modes():
        tensors = [local_of(one).detach() for one in find(outputs, Tensor) if one.is_floating_point() and one.numel()]
        sums = [fold for one in tensors for fold in _sum_and_norm(one)]
        return torch.stack(sums) if sums else None


def _sum_and_norm(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the norm in fp64, which a CPU computes from a copy: this one is of a part at a time."""
    if not tensor.is_cpu:
        return tensor.sum(dtype=torch.float64), tensor.norm(dtype=torch.float64)
    parts: Sequence[Tensor] = (tensor,)
    if tensor.numel() > SUMMED_NUMEL:
        dim = max(range(tensor.ndim), key=tensor.shape.__getitem__)
        parts = tensor.split(max(1, SUMMED_NUMEL * tensor.shape[dim] // tensor.numel()), dim)
    pairs = [((wide := part.double()).sum(), wide.norm()) for part in parts]
    sums, norms = zip(*pairs, strict=True)
    return functools.reduce(torch.add, sums), functools.reduce(torch.hypot, norms)


def refuse_reentrant() -> None:
    """Raise if a reentrant checkpoint of the user's is recomputing."""
    if is_inside_reentrant_checkpoint():
        raise RuntimeError(
            "Reentrant checkpointing runs a backward pass inside another, so gradients would be reduced several "
            "times. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); for Transformers models: "
            "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
        )


def _itself(forward: Any) -> Any:
    """Return the plain forward for a pickled module: a copy is not recomputed."""
    return forward
