"""Activation recomputation: modules keep their inputs alone, and run once more in the backward pass.

Owns which modules do so, what of their inputs is kept, and that a recomputation is an event of the engine, so that
parameters are gathered once for it and for the backward behind it. How saved tensors are dropped, made again and
compared, with random numbers and autocast as they were, is torch's (`torch.utils.checkpoint`).

Note: every k modules
    The inputs of a module are most often the outputs of the one before. Where a module follows in its segment, such an
    input is not kept; a node of autograd beside the module before, `_Marked`, saves it inside what is recomputed there,
    where keeping costs nothing, and reading it has that module run again. So one recomputation asks for the other, back
    to the beginning of the segment, and each module runs once more in all. Inputs that come from elsewhere, changed by
    code between the modules, say, are kept like those of the first one.
"""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from zeroshard.core.hooks import Enter, Exit, Hook
from zeroshard.core.saved import SavedTensors
from zeroshard.core.tree import find, map_tensors
from zeroshard.table.activations import Recomputed
from zeroshard.torch_private import version_of

__all__ = ["recompute"]

Tensor = torch.Tensor

PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
"""What `Recomputed(keeps="products")` keeps the results of: most of the time of a forward, and few of its bytes."""


def recompute(
    modules: Sequence[tuple[nn.Module, Recomputed]], hooks: Mapping[nn.Module, tuple[Enter, Exit]], saved: SavedTensors
) -> None:
    """Have modules keep their inputs alone.

    Args:
        modules: in the order of the model, each with how.
        hooks: what tells the engine of a module's forward.
        saved: the hooks of the model.
    """
    counts: dict[Recomputed, int] = {}
    for _, how in modules:
        counts[how] = counts.get(how, 0) + 1
    segments = {
        how: _Segments(max(1, round(math.sqrt(count))) if how.every == "sqrt" else how.every)
        for how, count in counts.items()
    }
    for module, how in modules:
        module.__dict__["forward"] = _Forward(module, how, hooks[module], saved, segments[how])


@final
class _Forward(Hook):
    """Stands for a module's forward."""

    def __init__(
        self,
        module: nn.Module,
        how: Recomputed,
        hooks: tuple[Enter, Exit],
        saved: SavedTensors,
        segments: "_Segments",
    ) -> None:
        self.module, self.plain, self.segments = module, module.forward, segments
        self.enter, self.leave = hooks
        self._saved = saved
        self._contexts = (
            functools.partial(create_selective_checkpoint_contexts, _keep_products)
            if how.keeps == "products"
            else noop_context_fn
        )
        functools.update_wrapper(self, self.plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, to be run again in the backward pass.

        Inside other recomputation, the user's own say, it only runs: what it saves is dropped there.
        """
        if not torch.is_grad_enabled() or not self._saved.is_innermost():
            return self.plain(*args, **kwargs)
        run = _Run(self, (args, kwargs))
        try:
            return checkpoint(run, *run.begin(), use_reentrant=False, context_fn=self._contexts)
        finally:
            run.end()


@dataclass(frozen=True, slots=True)
class _Input:
    """Stands for the input tensor of this number."""

    index: int


@final
class _Outputs:
    """The output tensors of one call of a module, which the next one's recomputation reads.

    The tensors hold this, and the next call: not the call itself, whose graph would hold itself then.

    Args:
        node: has saved them.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._values: tuple[Tensor, ...] = ()

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors, for which the call runs again."""
        if not self._values:
            with torch.no_grad():
                self._values = self._node.saved_tensors
        return self._values

    def forget(self) -> None:
        """Drop the tensors, once the next call has all it needs of them."""
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


@dataclass(frozen=True, slots=True)
class _Mark:
    """What an output tensor carries: that the next call need not keep it.

    Args:
        place: of the call in its segment.
        call: the number of the call.
        version: of the tensor; a later one was changed in place.
    """

    outputs: _Outputs
    index: int
    segments: "_Segments"
    place: int
    call: int
    version: int


@final
class _Segments:
    """Calls of modules in a row, of which one in `every` keeps its inputs."""

    KEY: ClassVar = "_zeroshard_mark"

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def find(self, tensor: Tensor) -> _Mark | None:
        """Return the mark of an unchanged output of the call before, in the same segment."""
        mark: _Mark | None = tensor.__dict__.get(self.KEY)
        is_next = mark is not None and mark.segments is self and mark.call == self.calls
        return mark if is_next and mark is not None and mark.version == version_of(tensor) else None


@final
class _Run:
    """One call of a module, and what it takes to repeat it."""

    def __init__(self, forward: _Forward, inputs: Any) -> None:
        self._forward, self._first, self._inputs = forward, inputs, None
        self._place = 0

    def begin(self) -> list[Tensor]:
        """Return the input tensors that are to be kept; the rest of the inputs stays in here."""
        kept: list[Tensor] = []

        def replace(tensor: Tensor) -> Any:
            if (mark := self._forward.segments.find(tensor)) is not None:
                if not self._place:
                    # torch keeps the state of random numbers of the devices that it sees.
                    kept.append(tensor.new_empty(0))
                self._place = mark.place + 1
                return _Output(mark.outputs, mark.index, tensor.requires_grad)
            kept.append(tensor)
            return _Input(len(kept) - 1)

        self._inputs = map_tensors(self._first, replace)
        self._forward.segments.calls += 1
        return kept

    def end(self) -> None:
        """Let go of the tensors of the first time."""
        self._first = None

    def __call__(self, *kept: Tensor) -> Any:
        """Run the module: the first time as it was called, then from what was kept."""
        forward = self._forward
        if self._first is not None:
            args, kwargs = self._first
            self._first = None
            return self._mark(forward.plain(*args, **kwargs), is_first=True)
        args, kwargs = map_tensors(self._inputs, lambda one: one.read(), _Output)
        for one in find(self._inputs, _Output):
            one.of.forget()
        args, kwargs = map_tensors((args, kwargs), lambda one: kept[one.index], _Input)
        forward.enter(forward.module, args, kwargs)
        try:
            return self._mark(forward.plain(*args, **kwargs), is_first=False)
        finally:
            forward.leave(forward.module, args, kwargs, None)

    def _mark(self, outputs: Any, *, is_first: bool) -> Any:
        """Have output tensors saved where the next call of the segment can ask for them."""
        segments = self._forward.segments
        if (self._place + 1) % segments.every == 0:
            return outputs
        if tensors := [tensor for tensor in find(outputs, Tensor) if tensor.requires_grad]:
            node = _Marked.apply(*tensors).grad_fn  # type: ignore[no-untyped-call]
            held = _Outputs(node)
            for index, tensor in enumerate(tensors if is_first else ()):
                mark = _Mark(held, index, segments, self._place, segments.calls, version_of(tensor))
                tensor.__dict__[segments.KEY] = mark
        return outputs


class _Marked(torch.autograd.Function):
    """Saves tensors, beside the graph: outputs of a function could not be changed in place."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Save the tensors."""
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = getattr(op, "overloadpacket", op) in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
