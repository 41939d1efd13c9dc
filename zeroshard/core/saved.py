"""What autograd saves: parameters that are gathered on unpacking, and activations with their treatments.

Owns the only pair of saved-tensor hooks, around each outermost forward pass: of nested pairs autograd runs the
innermost alone. Every tensor that autograd saves from a bucket is packed with its unit, and unpacking has the unit
gathered first; this holds for whatever graph the user builds, where hooks on gradients are only hints. All other
tensors go through the chain of treatments. These hooks switch off autograd's own version check, so what is kept as it
is carries what is needed to check it here.

Note: derivatives of derivatives
    A backward with `create_graph=True` saves tensors, too, and begins where no hook of a module can see it. So a node
    that unpacks a tensor of a bucket has these hooks set for what it saves itself: autograd sets the hooks of its
    thread anew for each node, so they end with the node. No other node saves a tensor of a bucket.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.torch_private import graph_task, local_of, storage_of, version_of

__all__ = ["SavedTensors", "Treatment"]

Tensor = torch.Tensor


@dataclass(slots=True)
class _Saved:
    tensor: Tensor
    version: int


@dataclass(slots=True)
class _FromBucket(_Saved):
    unit: int
    bucket: Bucket
    updates: int


class Treatment(ABC):
    """What is done with activations between forward and backward: a link of a chain."""

    @abstractmethod
    def pack(self, value: Any, unit: int) -> Any:
        """Return what is kept of a tensor that autograd saves in the forward of a unit.

        Args:
            value: what the treatment before this one returned; a tensor in the first one.
        """

    @abstractmethod
    def unpack(self, packed: Any) -> Any:
        """Return what `pack` was given, with the same bits."""


class SavedTensors:
    """The hooks of one model.

    Args:
        buckets: (unit, bucket) pairs.
        need: makes a unit whole; called while a backward pass unpacks.
        treatments: of activations, in the order of packing.
        unit_under_way: tells which unit's forward runs.
    """

    def __init__(
        self,
        buckets: list[tuple[int, Bucket]],
        need: Callable[[int], None],
        treatments: Sequence[Treatment],
        unit_under_way: Callable[[], int],
    ) -> None:
        self._by_storage = {storage_of(bucket.full): (unit, bucket) for unit, bucket in buckets}
        self._need, self._treatments, self._unit_under_way = need, tuple(treatments), unit_under_way

    def context(self) -> Any:
        """Return the context manager that packs what is saved inside it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        # Autograd saves a DTensor as it is; the bytes are those of its local tensor.
        inner = local_of(tensor)
        found = self._by_storage.get(storage_of(inner)) if inner.layout is torch.strided else None
        if found is None:
            return self._treat(tensor.detach()) if self._treatments else _Saved(tensor.detach(), version_of(tensor))
        unit, bucket = found
        return _FromBucket(tensor.detach(), version_of(tensor), unit, bucket, bucket.updates)

    def _treat(self, value: Any) -> Any:
        unit = self._unit_under_way()
        for treatment in self._treatments:
            value = treatment.pack(value, unit)
        return value

    def _untreat(self, value: Any) -> _Saved:
        for treatment in reversed(self._treatments):
            value = treatment.unpack(value)
        return _Saved(value, version_of(value))

    def _unpack(self, kept: Any) -> Tensor:
        packed = kept if isinstance(kept, _Saved) else self._untreat(kept)
        if isinstance(packed, _FromBucket) and packed.bucket.updates != packed.updates:
            raise RuntimeError(
                f"The parameters of '{packed.bucket.spec.name}' changed {packed.bucket.updates - packed.updates} "
                "time(s) between this forward pass and its backward (an optimizer step or gathered(writeback=True)), "
                "so its gradients would be wrong. Call backward() before the step, or run the forward pass again."
            )
        if version_of(packed.tensor) != packed.version:
            where = f" of '{packed.bucket.spec.name}'" if isinstance(packed, _FromBucket) else ""
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {packed.tensor.dtype} tensor{where} of shape {tuple(packed.tensor.shape)} is at version "
                f"{version_of(packed.tensor)}; the forward pass saved version {packed.version}. Clone it before "
                "changing it."
            )
        if isinstance(packed, _FromBucket):
            self._need(packed.unit)
        if torch.is_grad_enabled() and graph_task() != -1:
            if sys._getframe(1).f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
                # What it recomputes is handed to nodes past these hooks, and they would save it past them.
                raise RuntimeError(
                    "create_graph=True through activation checkpointing is not supported where parameters are sharded. "
                    "Leave checkpointing out of what is differentiated twice, or keep parameters whole (stage 2)."
                )
            self.context().__enter__()
        return packed.tensor
