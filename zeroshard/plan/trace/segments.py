"""Recomputation in segments of several modules, for traces: only the first module of a segment keeps its inputs.

Owns a reimplementation of the memory effects of `activations/recompute.py`, without the checks of values. It must not
know units. Read `describe/selection.py` first.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.torch_private import graph_task
from zeroshard.tree import find, map_tensors

__all__ = ["Segments"]


@dataclass(frozen=True, slots=True)
class _Input:
    """Stands for the kept tensor of this number."""

    index: int


@final
class _Outputs:
    """The outputs of one call, which the recomputation of the next call reads."""

    def __init__(self) -> None:
        self.node: Any = None
        self._task, self._values = -1, tuple[Tensor, ...]()

    def read(self) -> tuple[Tensor, ...]:
        if self._task != graph_task() or not self._values:
            with torch.no_grad():
                self._task, self._values = graph_task(), self.node.saved_tensors
        return self._values

    def forget(self) -> None:
        self._values = ()


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for an input that is an output of the previous call."""

    of: _Outputs
    index: int

    def read(self) -> Tensor:
        return self.of.read()[self.index].detach().requires_grad_()


class _Marked(torch.autograd.Function):
    """Saves tensors next to the graph, where the next call can read them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing follows from it")


@final
class Segments:
    """The segments of some modules, in the order of their calls.

    Args:
        every: number of calls per segment.
    """

    def __init__(self, every: int) -> None:
        self._every, self._place, self._last = every, -1, _Outputs()
        self._tensors: list[weakref.ref[Tensor]] = []

    def hang(self, module: nn.Module) -> None:
        """Add a module to the segments."""
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(plain, (args, kwargs))

        module.forward = forward

    def _call(self, plain: Callable[..., Any], inputs: Any) -> Any:
        kept: list[Tensor] = []
        is_next = False

        def replace(tensor: Tensor) -> Any:
            nonlocal is_next
            for index, known in enumerate(self._tensors):
                if known() is tensor:
                    if not is_next:
                        kept.append(tensor.new_empty(0))
                    is_next = True
                    return _Output(self._last, index)
            kept.append(tensor)
            return _Input(len(kept) - 1)

        stored = map_tensors(inputs, replace)
        self._place = self._place + 1 if is_next else 0
        run = _Run(plain, inputs, stored, is_marked=(self._place + 1) % self._every != 0)
        del inputs
        out = checkpoint(run, *kept, use_reentrant=False)
        self._last = _Outputs()
        self._last.node = run.node
        self._tensors = [weakref.ref(one) for one in run.marked]
        run.marked, run.node = (), None
        return out


@final
class _Run:
    """One call, repeated in the backward."""

    def __init__(self, plain: Callable[..., Any], first: Any, stored: Any, *, is_marked: bool) -> None:
        self._plain, self._first, self._stored, self._is_marked = plain, first, stored, is_marked
        self.marked: Sequence[Tensor] = ()
        self.node: Any = None

    def __call__(self, *kept: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            out = self._plain(*args, **kwargs)
            self.marked, self.node = self._mark(out)
            return out
        given = map_tensors(self._stored, lambda one: one.read(), _Output)
        for output in find(self._stored, _Output):
            output.of.forget()
        args, kwargs = map_tensors(given, lambda one: kept[one.index], _Input)
        out = self._plain(*args, **kwargs)
        self._mark(out)
        return out

    def _mark(self, out: Any) -> tuple[Sequence[Tensor], Any]:
        tensors = [one for one in find(out, Tensor) if one.requires_grad] if self._is_marked else []
        if not tensors:
            return (), None
        marked = _Marked.apply(*(one.detach().requires_grad_() for one in tensors))  # type: ignore[no-untyped-call]
        return tensors, marked.grad_fn
