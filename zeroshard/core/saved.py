"""Tensors saved by autograd: parameters, which unpacking gathers, and activations with their treatments.

Owns the saved-tensor hooks of an engine, one pair around each outermost forward pass: of nested pairs, autograd runs
only the innermost. A tensor saved from a bucket is packed with its unit, and unpacking gathers the unit first; this
works for any graph, unlike hooks on gradients. Other tensors are stored in boxes (`activations/saved.py`), which a
treatment processes after the forward that saved them. These hooks disable autograd's own version check, so boxes
contain the versions for a check here.

Note: derivatives of derivatives
    A backward with `create_graph=True` also saves tensors, and begins outside the hooks of modules. So a node that
    unpacks a tensor of a bucket sets these hooks for the tensors that it saves: autograd resets the hooks of its thread
    for each node, so they end with the node. No other node saves a tensor of a bucket.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from zeroshard.activations.saved import Box, ChangedInPlaceError, Plain, Saved, Treatment
from zeroshard.core.buffer import Bucket
from zeroshard.torch_private import (
    captured_by_checkpoint,
    graph_task,
    is_called_by_checkpoint,
    local_of,
    storage_of,
    version_of,
)

__all__ = ["SavedTensors", "Treatment"]

Tensor = torch.Tensor


@dataclass(slots=True)
class _FromBucket(Plain):
    unit: int
    bucket: Bucket
    updates: int


@final
class SavedTensors(Saved):
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
        super().__init__(treatment, unit_under_way)
        self._by_storage = {storage_of(bucket.full): (unit, bucket) for unit, bucket in buckets}
        self._need = need

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return a tensor's place in a bucket, as storage and offset in elements; None if it is in no bucket."""
        inner = tensor if type(tensor) is Tensor else local_of(tensor)
        storage = storage_of(inner) if inner.layout is torch.strided else 0
        return (storage, int(inner.storage_offset())) if storage in self._by_storage else None

    def pack(self, tensor: Tensor) -> Any:
        """Return the packed form of a tensor."""
        # Autograd saves a DTensor itself; its bytes are in the local tensor.
        inner = tensor if type(tensor) is Tensor else local_of(tensor)
        is_strided = inner.layout is torch.strided
        found = self._by_storage.get(storage_of(inner)) if is_strided else None
        if found is not None:
            unit, bucket = found
            return _FromBucket(tensor.detach(), version_of(tensor), unit, bucket, bucket.updates)
        if self._treatment is None or not is_strided or graph_task() != -1:
            return Plain(tensor.detach(), version_of(tensor))
        is_input = is_called_by_checkpoint()
        return self.box(tensor, is_input, captured_by_checkpoint() if is_input else ())

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
