"""Tensors that autograd saves: the boxes that stand for them in the graph, and the treatment of boxes.

Owns the boxes of running forwards. It must not know parameters: `core/saved.py` packs those of buckets, and
`plan/trace/treated.py` those of a trace.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zeroshard.describe.saved_nodes import Packed
from zeroshard.torch_private import graph_task, innermost_hooks, untraced, version_of

__all__ = ["BECAUSE", "Box", "ChangedInPlaceError", "Plain", "Saved", "Treatment"]

Tensor = torch.Tensor

BECAUSE: Final = (
    ", so gradients would be wrong: it reads state that changed in between, such as an attribute, a counter, a cache, "
    "or random numbers from outside torch. Exclude its unit from activations='recompute'."
)
"""Ends the error for a recomputation that is not its forward."""


class ChangedInPlaceError(RuntimeError):
    """A saved tensor was changed in place after the forward pass saved it."""

    def __init__(self, text: str) -> None:
        outer, _ = innermost_hooks() or (None, None)
        if getattr(outer, "__module__", "") == torch.autograd.graph.__name__:
            text += (
                " A context of torch.autograd.graph, such as allow_mutation_on_saved_tensors(), does not help: the "
                "hooks of zs.shard() take the place of its hooks in the model's forward."
            )
        super().__init__(text)


@dataclass(slots=True)
class Plain:
    """A saved tensor, and its version when autograd saved it."""

    value: Any
    version: int


@dataclass(slots=True)
class Box(Plain, Packed):
    """A saved tensor that is not from a parameter.

    Args:
        value: the tensor, or its replacement by a treatment.
        is_input: whether it is an input of a module that activation checkpointing recomputes.
        treatment: the treatment that created the value, and restores the tensor.
        count: an object with the lifetime of the box.
        captured: objects that activation checkpointing keeps besides such inputs, until the treatment.
    """

    is_input: bool
    treatment: "Treatment | None" = None
    count: Any = None
    captured: Sequence[Tensor] = ()


class Treatment(ABC):
    """The treatment of activations between forward and backward."""

    @abstractmethod
    def treat(self, boxes: Sequence[Box], unit: int, outputs: Any) -> None:
        """Change the values of boxes, and set their treatment.

        Args:
            boxes: the tensors that autograd saved in one finished forward of a unit, in order.
            outputs: the result of that forward.
        """

    @abstractmethod
    def restore(self, box: Box) -> Tensor:
        """Return the tensor that autograd saved, with the same bits; may be called again.

        Raises:
            ChangedInPlaceError: the tensor changed before the treatment had it.
        """


class Saved(ABC):
    """The saved-tensor hooks of one model, which box tensors for a treatment.

    Args:
        treatment: the treatment of activations, or None.
        unit_under_way: returns the unit of the running forward.
    """

    def __init__(self, treatment: Treatment | None, unit_under_way: Callable[[], int]) -> None:
        self._treatment, self._unit_under_way = treatment, unit_under_way
        self._boxes: dict[int, list[Box]] = {}
        """Tensors saved by running forwards, by unit."""
        self._to_pop = 0
        """How often the hooks are on this thread's stack although their forward has ended."""
        self.kept = weakref.WeakSet[Any]()
        """What forwards that may be recomputed have kept beside saved tensors (`surroundings.py`)."""

    def preserve(self, buffers: Sequence[Tensor]) -> None:
        """Copy the values of buffers, which are about to be written, for the recomputations that read them."""
        written = {id(one) for one in buffers}
        for one in [*self.kept]:
            one.preserve(written)

    def context(self) -> Any:
        """Return a context manager with the saved-tensor hooks."""
        return torch.autograd.graph.saved_tensors_hooks(untraced(self.pack), untraced(self.unpack))

    def push(self) -> None:
        """Put the hooks on this thread's stack.

        Raises:
            RuntimeError: a transform of torch.func disables hooks of saved tensors.
        """
        self._settle()
        self.context().__enter__()

    def pop(self) -> None:
        """Take the hooks from the stack; in a backward, or below other hooks, at a later `push` or `pop`.

        Autograd gives its thread the caller's stack before each node, so that a change inside a node does not last.
        """
        self._to_pop += 1
        self._settle()

    def _settle(self) -> None:
        while self._to_pop and graph_task() == -1 and self.is_innermost():
            self.context().__exit__()
            self._to_pop -= 1

    def is_innermost(self) -> bool:
        """Return whether these hooks are the innermost."""
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self.pack

    def treat(self, unit: int, outputs: Any) -> None:
        """Treat the tensors saved by a finished forward of a unit."""
        if self._treatment is not None and (boxes := self._boxes.pop(unit, None)):
            self._treatment.treat(boxes, unit, outputs)

    def forget(self) -> None:
        """Leave the tensors of an unfinished forward untreated."""
        self._boxes.clear()

    def box(self, tensor: Tensor, is_input: bool, captured: Sequence[Tensor]) -> Box:
        """Return a new box of a tensor, for the treatment at the end of the running forward."""
        box = Box(tensor.detach(), version_of(tensor), is_input, captured=captured)
        self._boxes.setdefault(self._unit_under_way(), []).append(box)
        return box

    @abstractmethod
    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return a parameter's place, as storage and offset in elements; None for other tensors."""

    @abstractmethod
    def pack(self, tensor: Tensor) -> Any:
        """Return the packed form of a tensor."""

    @abstractmethod
    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of a packed form."""
