"""The batch of a step of a pipeline, and its micro-batches.

Owns the cut along the first dimension. It must not know schedules, messages or models.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from zeroshard.parallel.alike import checksum
from zeroshard.tree import find, map_tensors

__all__ = ["Batch"]


@final
@dataclass(frozen=True)
class Batch:
    """The inputs and targets of a step, which `at` cuts into micro-batches along the first dimension."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Any
    micro_batches: int
    place: str

    def __post_init__(self) -> None:
        sizes = {tuple(one.shape[:1]) for one in find(self._all, Tensor)}
        if len(sizes) != 1 or () in sizes:
            shown = sorted(size[0] if size else "no dimension" for size in sizes)
            raise ValueError(
                f"{self.place} pipe.step() cuts the first dimension of each tensor of inputs and targets into "
                f"micro-batches, and needs tensors of one length there; got {shown or 'no tensor'}."
            )
        if self.rows % self.micro_batches or not self.rows:
            raise ValueError(
                f"{self.place} A batch of {self.rows} cannot be cut into {self.micro_batches} equal micro-batches: "
                "make the batch a multiple, or change micro_batches= of zs.pipeline()."
            )

    @property
    def _all(self) -> tuple[Any, Any, Any]:
        return self.args, dict(self.kwargs), self.targets

    @property
    def rows(self) -> int:
        """The length of the first dimension."""
        return find(self._all, Tensor)[0].shape[0]

    @property
    def key(self) -> Any:
        """What the shapes at the borders follow from: those of a micro-batch."""
        tensors = find(self._all[:2], Tensor)
        return self.rows // self.micro_batches, tuple((one.shape[1:], one.dtype) for one in tensors)

    def checksum(self, micro_batch: int) -> int:
        """Return a checksum of a micro-batch's inputs, for a comparison of places."""
        inputs = find(self.at(micro_batch)[:2], Tensor)
        return zlib.crc32(repr([checksum(one) for one in inputs]).encode())

    def at(self, micro_batch: int) -> tuple[Any, Any, Any]:
        """Return args, kwargs and targets of a micro-batch."""
        size = self.rows // self.micro_batches
        rows = slice(micro_batch * size, (micro_batch + 1) * size)
        return map_tensors(self._all, lambda t: t[rows])  # type: ignore[no-any-return]
