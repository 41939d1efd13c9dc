"""Tensors saved by autograd: parameters, which unpacking gathers, and activations with their treatments.

Owns the only pair of saved-tensor hooks, around each outermost forward pass: of nested pairs, autograd runs only the
innermost. A tensor saved from a bucket is packed with its unit, and unpacking gathers the unit first; this works for
any graph, unlike hooks on gradients. Other tensors are stored in boxes, which a treatment processes after the forward
that saved them. These hooks disable autograd's own version check, so boxes contain the versions for a check here.

Note: derivatives of derivatives
    A backward with `create_graph=True` also saves tensors, and begins outside the hooks of modules. So a node that
    unpacks a tensor of a bucket sets these hooks for the tensors that it saves: autograd resets the hooks of its thread
    for each node, so they end with the node. No other node saves a tensor of a bucket.
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

__all__ = ["Box", "ChangedInPlaceError", "SavedTensors", "Treatment"]

Tensor = torch.Tensor


class ChangedInPlaceError(RuntimeError):
    """A saved tensor was changed in place after the forward pass saved it."""


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
    """A saved tensor that is not from a parameter.

    Args:
        value: the tensor, or its replacement by a treatment.
        version: version of the tensor when autograd saved it.
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


class SavedTensors:
    """The hooks of one model.

    Args:
        buckets: (unit, bucket) pairs.
        need: gathers a unit; called while a backward pass unpacks.
        treatment: the treatment of activations, or None.
        unit_under_way: returns the unit of the running forward.
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
        """Tensors saved by running forwards, by unit."""

    def context(self) -> Any:
        """Return a context manager with the saved-tensor hooks."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

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

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return a tensor's place in a bucket, as storage and offset in elements; None if it is in no bucket."""
        inner = tensor if type(tensor) is Tensor else local_of(tensor)
        storage = storage_of(inner) if inner.layout is torch.strided else 0
        return (storage, int(inner.storage_offset())) if storage in self._by_storage else None

    def pack(self, tensor: Tensor) -> Any:
        """Return the packed form of a tensor."""
        # Autograd saves a DTensor itself; its bytes are in the local tensor.
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
        """Return the tensor of a packed form.

        Raises:
            RuntimeError: the tensor has changed since.
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
            raise ChangedInPlaceError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {packed.value.dtype} tensor{where} of shape {tuple(packed.value.shape)} is at version "
                f"{version_of(packed.value)}; the forward pass saved version {packed.version}. Clone it before "
                "changing it."
            )
        if is_of_bucket:
            self._need(packed.unit)
        if torch.is_grad_enabled() and graph_task() != -1:
            if is_called_by_checkpoint():
                # Recomputed tensors bypass these hooks, and nodes would save them without the hooks.
                raise RuntimeError(
                    "create_graph=True through activation checkpointing is not supported with sharded parameters or "
                    "treated activations. Exclude the modules that are differentiated twice from checkpointing "
                    "(including activations='recompute'), or keep parameters replicated (stage 2)."
                )
            self.context().__enter__()
        found: Tensor = packed.value if treatment is None else treatment.restore(packed)
        return found
