"""Activation recomputation: modules keep their inputs alone, and run once more in the backward pass.

Owns which modules do so, what of their inputs is kept, and that a recomputation is an event of the engine, so that
parameters are gathered once for it and for the backward behind it. How saved tensors are dropped, made again and
compared, with random numbers and autocast as they were, is torch's (`torch.utils.checkpoint`).

Note: every k modules
    The inputs of a module are most often the outputs of the one before. Where a module follows in its segment, such an
    input is not kept; a node of autograd beside the graph, `_Marked`, saves it inside what is recomputed there, where
    keeping costs nothing, and reading the input has the module before run again. So a recomputation first runs the call
    before it, back to the beginning of the segment, and each module runs once more in all. Inputs that come from
    elsewhere, changed by code between the modules, say, are kept like those of the first one.

    A node leads to the recomputation of its call, where Python's collector cannot look. So a call does not hold its own
    node: the next call does, and until then `_Segments`, as long as an output lives.
"""

import copy
import functools
import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from zeroshard.activations.products import Products
from zeroshard.activations.surroundings import Kept, Surroundings
from zeroshard.core.hooks import Enter, Exit, Hook
from zeroshard.table.activations import Recomputed
from zeroshard.torch_private import graph_task, is_inside_transform, local_of, version_of, without_modes
from zeroshard.tree import find, map_tensors

__all__ = ["recompute"]

Tensor = torch.Tensor


def recompute(
    modules: Sequence[tuple[nn.Module, Recomputed]],
    hooks: Mapping[nn.Module, tuple[Enter, Exit]],
    products: Products,
    rounded: Collection[nn.Module] = (),
) -> None:
    """Have modules keep their inputs alone.

    Args:
        modules: in the order of the model, each with how.
        hooks: what tells the engine of a module's forward.
        products: keeps results of products, where a cell asks for it.
        rounded: those whose inputs are kept rounded, so that a recomputation gives other outputs.
    """
    counts: dict[Recomputed, int] = {}
    for _, how in modules:
        counts[how] = counts.get(how, 0) + 1
    segments = {
        how: _Segments(max(1, round(math.sqrt(count))) if how.every == "sqrt" else how.every)
        for how, count in counts.items()
    }
    for module, how in modules:
        forward = _Forward(module, how, hooks[module], products, segments[how])
        forward.is_compared = module in rounded
        module.__dict__["forward"] = forward


@final
class _Forward(Hook):
    """Stands for a module's forward."""

    def __init__(
        self,
        module: nn.Module,
        how: Recomputed,
        hooks: tuple[Enter, Exit],
        products: Products,
        segments: "_Segments",
    ) -> None:
        self.module, self.plain, self.segments = module, module.forward, segments
        self.surroundings = Surroundings(module)
        self.is_compared = False
        """Whether a recomputation has been compared with its forward, or cannot be."""
        self.enter, self.leave = hooks
        self._saved = products.saved
        self._contexts = (
            functools.partial(products.contexts, self.enter) if how.keeps == "products" else noop_context_fn
        )
        functools.update_wrapper(self, self.plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.plain,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, to be run again in the backward pass.

        Inside other recomputation, the user's own say, it only runs: what it saves is dropped there.

        Raises:
            RuntimeError: a transform of torch.func is under way.
        """
        if not torch.is_grad_enabled() or not self._saved.is_innermost():
            return self.plain(*args, **kwargs)
        if is_inside_transform():
            raise RuntimeError(
                f"torch.vmap, or another transform of torch.func, over '{self.enter.name}', which is recomputed: its "
                "recomputation would run in the backward, outside the transform. Batch its inputs without torch.vmap, "
                "or leave its unit out of activations='recompute'."
            )
        run = _Run(
            self, ([*map(self._without_cache, args)], {k: self._without_cache(one) for k, one in kwargs.items()})
        )
        # To be compared, a recomputation has to come to its end; torch stops it at the last tensor that is saved.
        with nullcontext() if self.is_compared else set_checkpoint_early_stop(False):
            try:
                return checkpoint(run, *run.begin(), use_reentrant=False, context_fn=self._contexts)
            finally:
                run.end()

    def _without_cache(self, value: Any) -> Any:
        """Return None for a cache of keys and values that is empty: nobody reads it in training.

        Raises:
            RuntimeError: it has contents, to which a recomputation would add once more.
        """
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if value.get_seq_length():
            raise RuntimeError(
                f"'{self.enter.name}' is recomputed and was given a {type(value).__name__} with contents, to which it "
                "would add once more. Train without: model.config.use_cache = False."
            )
        return None

    def compare(self, first: Tensor, again: Tensor) -> None:
        """Raise unless a recomputation gave what the forward gave."""
        self.is_compared = True
        # Some kernels of GPUs add up in any order.
        tolerance = 0.0 if first.device.type == "cpu" else 1e-2
        with without_modes():
            # A tensor of a trace has no values.
            is_traced = type(first) is not Tensor
            is_same = is_traced or bool(torch.isclose(first, again, tolerance, 0.0, equal_nan=True).all())
        if not is_same:
            raise RuntimeError(
                f"The recomputation of '{self.enter.name}' ({type(self.module).__name__}) gave other outputs than its "
                "forward, so gradients would be wrong: it reads something that has changed in between, such as an "
                "attribute, a counter, a cache, or random numbers that are not torch's. Leave its unit out of "
                "activations='recompute'."
            )


@dataclass(frozen=True, slots=True)
class _Input:
    """Stands for the input tensor of this number."""

    index: int


@final
class _Outputs:
    """The output tensors of one call of a module, which the next one's recomputation reads."""

    def __init__(self) -> None:
        self.node: Any = None
        self._task, self._values = -1, tuple[Tensor, ...]()

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors; the call runs again for them unless it has done so in this backward."""
        if self._task != graph_task() or not self._values:
            with torch.no_grad():
                self._task, self._values = graph_task(), self.node.saved_tensors
        return self._values

    def forget(self) -> None:
        """Drop the tensors: the only call that reads them has done so."""
        self._values = ()


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for an input tensor that is an output of the call before."""

    of: _Outputs
    index: int
    requires_grad: bool

    def read(self) -> Tensor:
        """Return it, without the graph behind it."""
        return self.of.read()[self.index].detach().requires_grad_(self.requires_grad)


@final
class _Segments:
    """What is known of the calls before, to tell which inputs need not be kept.

    Args:
        every: calls in a segment.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._place, self._last = -1, _Outputs()
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []

    def find(self, tensor: Tensor) -> _Output | None:
        """Return what stands for a tensor that is an unchanged output of the call before, in the same segment."""
        for index, (known, version) in enumerate(self._tensors):
            if known() is tensor and version_of(tensor) == version:
                return _Output(self._last, index, tensor.requires_grad)
        return None

    def place(self, follows: bool) -> int:
        """Return the place in its segment of a call that does or does not read an output of the call before."""
        return self._place + 1 if follows else 0

    def note(self, place: int, outputs: _Outputs, tensors: Sequence[Tensor]) -> None:
        """Note the call that has just ended."""
        self._place, self._last = place, outputs
        self._tensors = [(weakref.ref(one, self._forget), version_of(one)) for one in tensors]

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        """Let go of a call whose outputs are gone: nothing will ask for them."""
        if self._tensors and all(known() is None for known, _ in self._tensors):
            self._last, self._tensors = _Outputs(), []


@final
class _Run:
    """One call of a module, and what it takes to repeat it."""

    def __init__(self, forward: _Forward, inputs: Any) -> None:
        self._forward, self._first, self._inputs = forward, inputs, None
        self._place = 0
        self._around: Kept = forward.surroundings.keep()
        self._marked: Sequence[Tensor] = ()
        self._node: Any = None
        self._sums: Tensor | None = None

    def begin(self) -> list[Tensor]:
        """Return the input tensors that are to be kept; the rest of the inputs stays in here."""
        kept: list[Tensor] = []
        follows = False

        def replace(tensor: Tensor) -> Any:
            nonlocal follows
            if (output := self._forward.segments.find(tensor)) is not None:
                if not follows:
                    # torch keeps the state of random numbers of the devices that it sees.
                    kept.append(tensor.new_empty(0))
                follows = True
                return output
            kept.append(tensor)
            return _Input(len(kept) - 1)

        self._inputs = map_tensors(self._first, replace)
        self._place = self._forward.segments.place(follows)
        return kept

    def end(self) -> None:
        """Let go of the tensors of the first time, and tell the segments of what came out."""
        self._first = None
        self._forward.surroundings.note(self._around)
        if self._forward.segments.every > 1:
            outputs = _Outputs()
            outputs.node = self._node
            self._forward.segments.note(self._place, outputs, self._marked)
        self._marked, self._node = (), None

    def __call__(self, *kept: Tensor) -> Any:
        """Run the module: the first time as it was called, then from what was kept."""
        forward = self._forward
        if self._first is not None:
            args, kwargs = self._first
            self._first = None
            outputs = forward.plain(*args, **kwargs)
            self._marked, self._node = self._mark(outputs)
            self._sums = None if forward.is_compared else _sums_of(outputs)
            return outputs
        args, kwargs = map_tensors(self._inputs, lambda one: one.read(), _Output)
        for output in find(self._inputs, _Output):
            output.of.forget()
        args, kwargs = map_tensors((args, kwargs), lambda one: kept[one.index], _Input)
        forward.enter(forward.module, args, kwargs)
        try:
            with self._around.restored():
                outputs = forward.plain(*args, **kwargs)
            self._mark(outputs)
            if self._sums is not None and (sums := _sums_of(outputs)) is not None:
                forward.compare(self._sums, sums)
            return outputs
        finally:
            forward.leave(forward.module, args, kwargs, None)

    def _mark(self, outputs: Any) -> tuple[Sequence[Tensor], Any]:
        """Have output tensors saved where the next call of the segment can ask for them; return them and the node."""
        if (self._place + 1) % self._forward.segments.every == 0:
            return (), None
        tensors = [tensor for tensor in find(outputs, Tensor) if tensor.requires_grad]
        if not tensors:
            return (), None
        aliases = (one.detach().requires_grad_() for one in tensors)
        return tensors, _Marked.apply(*aliases).grad_fn  # type: ignore[no-untyped-call]


class _Marked(torch.autograd.Function):
    """Saves tensors, beside the graph: no backward comes here."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Save the tensors."""
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)


def _sums_of(outputs: Any) -> Tensor | None:
    """Return the sum and the norm of each floating-point tensor, which tell two results apart."""
    with torch.no_grad(), without_modes():
        tensors = [local_of(one).detach() for one in find(outputs, Tensor) if one.is_floating_point() and one.numel()]
        sums = [fold for one in tensors for fold in (one.sum(dtype=torch.float64), one.norm(dtype=torch.float64))]
        return torch.stack(sums) if sums else None


def _itself(forward: Any) -> Any:
    """Return what a pickled module has for its forward: a copy is not recomputed."""
    return forward
