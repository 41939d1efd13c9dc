"""What autograd saves: parameters that are gathered on unpacking, and activations with their treatments.

Owns the only pair of saved-tensor hooks, around each outermost forward pass: of nested pairs autograd runs the
innermost alone. Every tensor that autograd saves from a bucket is packed with its unit, and unpacking has the unit
gathered first; this holds for whatever graph the user builds, where hooks on gradients are only hints. All other
tensors lie in boxes, which a treatment sees when the forward that saved them is over. These hooks switch off autograd's
own version check, so what is kept carries what is needed to check it here.

Note: derivatives of derivatives
    A backward with `create_graph=True` saves tensors, too, and begins where no hook of a module can see it. So a node
    that unpacks a tensor of a bucket has these hooks set for what it saves itself: autograd sets the hooks of its
    thread anew for each node, so they end with the node. No other node saves a tensor of a bucket.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.describe.saved_nodes import Packed
from zeroshard.torch_private import (
    captured_by_checkpoint,
    graph_task,
    innermost_hooks,
    is_called_by_checkpoint,
    local_of,
    storage_of,
    version_of,
)

__all__ = ["Box", "SavedTensors", "Treatment"]

Tensor = torch.Tensor


@dataclass(slots=True)
class _Saved:
    value: Any
    version: int


@dataclass(slots=True)
class _FromBucket(_Saved):
    unit: int
    bucket: Bucket
    updates: int


@dataclass(slots=True)
class Box(_Saved, Packed):
    """What is kept of a tensor that autograd saved, if it is not a parameter's.

    Args:
        value: the tensor, or what a treatment put in its place.
        version: of the tensor as autograd saved it.
        is_input: whether it is an input of a module that activation checkpointing recomputes.
        treatment: what made the value, and makes the tensor of it again.
        count: what lives as long as the box.
        captured: what activation checkpointing keeps beside such inputs; until the treatment has seen it.
    """

    is_input: bool
    treatment: "Treatment | None" = None
    count: Any = None
    captured: Sequence[Tensor] = ()


class Treatment(ABC):
    """What is done with activations between forward and backward."""

    @abstractmethod
    def treat(self, boxes: Sequence[Box], unit: int, outputs: Any) -> None:
        """Change the values of boxes, and name the treatment in those.

        Args:
            boxes: what autograd saved in one forward of a unit, which is over, in order.
            outputs: what that forward returned.
        """

    @abstractmethod
    def restore(self, box: Box) -> Tensor:
        """Return the tensor that autograd saved, with the same bits; the box may be asked again."""


class SavedTensors:
    """The hooks of one model.

    Args:
        buckets: (unit, bucket) pairs.
        need: makes a unit whole; called while a backward pass unpacks.
        treatment: of activations, if there is one.
        unit_under_way: tells which unit's forward runs.
    """

    def __init__(
        self,
        buckets: list[tuple[int, Bucket]],
        need: Callable[[int], None],
        treatment: Treatment | None,
        unit_under_way: Callable[[], int],
    ) -> None:
        self._by_storage = {storage_of(bucket.full): (unit, bucket) for unit, bucket in buckets}
        self._need, self._treatment, self._unit_under_way = need, treatment, unit_under_way
        self._boxes: dict[int, list[Box]] = {}
        """What forwards under way have saved, by unit, until they are over."""

    def context(self) -> Any:
        """Return the context manager that packs what is saved inside it."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def is_innermost(self) -> bool:
        """Tell whether what autograd saves here goes through these hooks."""
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self.pack

    def treat(self, unit: int, outputs: Any) -> None:
        """Treat what the forward of a unit has saved, which is over."""
        if self._treatment is not None and (boxes := self._boxes.pop(unit, None)):
            self._treatment.treat(boxes, unit, outputs)

    def forget(self) -> None:
        """Leave untreated what an unfinished forward has saved."""
        self._boxes.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return what is kept of a tensor."""
        # Autograd saves a DTensor as it is; the bytes are those of its local tensor.
        inner = tensor if type(tensor) is Tensor else local_of(tensor)
        found = self._by_storage.get(storage_of(inner)) if inner.layout is torch.strided else None
        if found is not None:
            unit, bucket = found
            return _FromBucket(tensor.detach(), version_of(tensor), unit, bucket, bucket.updates)
        if self._treatment is None or graph_task() != -1:
            return _Saved(tensor.detach(), version_of(tensor))
        box = Box(tensor.detach(), version_of(tensor), is_called_by_checkpoint())
        if box.is_input:
            box.captured = captured_by_checkpoint()
        self._boxes.setdefault(self._unit_under_way(), []).append(box)
        return box

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of which this was kept.

        Raises:
            RuntimeError: it has changed since.
        """
        is_of_bucket, treatment = type(packed) is _FromBucket, packed.treatment if type(packed) is Box else None
        if is_of_bucket and packed.bucket.updates != packed.updates:
            raise RuntimeError(
                f"The parameters of '{packed.bucket.spec.name}' changed {packed.bucket.updates - packed.updates} "
                "time(s) between this forward pass and its backward (an optimizer step or gathered(writeback=True)), "
                "so its gradients would be wrong. Call backward() before the step, or run the forward pass again."
            )
        if treatment is None and version_of(packed.value) != packed.version:
            where = f" of '{packed.bucket.spec.name}'" if is_of_bucket else ""
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {packed.value.dtype} tensor{where} of shape {tuple(packed.value.shape)} is at version "
                f"{version_of(packed.value)}; the forward pass saved version {packed.version}. Clone it before "
                "changing it."
            )
        if is_of_bucket:
            self._need(packed.unit)
        if torch.is_grad_enabled() and graph_task() != -1:
            if is_called_by_checkpoint():
                # What it recomputes is handed to nodes past these hooks, and they would save it past them.
                raise RuntimeError(
                    "create_graph=True through activation checkpointing is not supported where parameters are sharded, "
                    "or activations treated. Leave checkpointing (activations='recompute' included) out of what is "
                    "differentiated twice, or keep parameters whole (stage 2)."
                )
            self.context().__enter__()
        found: Tensor = packed.value if treatment is None else treatment.restore(packed)
        return found
