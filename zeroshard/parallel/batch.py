"""The batch of a step of a pipeline, and its micro-batches.

Owns the cut along the first dimension, and the comparison of the batches that places of one pipe have. It must not know
schedules, messages or models.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor

from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import local_of
from zeroshard.tree import find, map_tensors
from zeroshard.wire.mesh import Mesh
from zeroshard.wire.readback import Readback

__all__ = ["Batch", "Compared"]

COMPARED_NUMEL: Final = 1 << 16
"""Elements of each input that are compared: other batches differ in them, and the comparison needs little memory."""
INTEGERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32})
BITS: Final = (1 << 52) - 1
"""What fp64 holds exactly."""
SAME = (
    "Ranks that differ only along 'pipe' make one model, and need the same batch in the same mode: divide data by "
    "mesh.get_local_rank('shard') instead of the rank, and call train() or eval() on all."
)


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
            shown = ", ".join(sorted(f"length {size[0]}" if size else "no dimension" for size in sizes))
            raise ValueError(
                f"{self.place} A pipe cuts the first dimension of each tensor of inputs and targets into "
                f"micro-batches, and needs tensors of one length there; got {shown or 'no tensor'}."
            )
        if torch.is_grad_enabled() and any(one.requires_grad for one in find(self._all, Tensor)):
            raise ValueError(
                f"{self.place} An input of a pipe's step requires a gradient, of which each place would have a part: "
                "detach() it, or make it a parameter of the model."
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
        """What the shapes at the borders follow from: those of a micro-batch, and what is no tensor."""
        return self.rows // self.micro_batches, _form(self._all[:2])

    def checksum(self, device: torch.device) -> Tensor:
        """Return (): a checksum of the inputs' bits, a whole number in fp64; the host does not wait for it."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        for one in find(self._all[:2], Tensor):
            first = local_of(one.detach()).reshape(-1)[:COMPARED_NUMEL].contiguous()
            bits = first.view(INTEGERS.get(first.element_size(), torch.int64)).long()
            odd = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)  # so that the order matters
            total += (bits * odd).sum().to(device)
        return ((total ^ (total >> 12)) & BITS).double()  # the highest bits, too: signs and exponents

    def at(self, micro_batch: int) -> tuple[Any, Any, Any]:
        """Return args, kwargs and targets of a micro-batch: copies, since each chunk runs the forward from the start.

        A forward may change its inputs in place.
        """
        size = self.rows // self.micro_batches
        rows = slice(micro_batch * size, (micro_batch + 1) * size)
        return map_tensors(self._all, lambda t: t[rows].clone())  # type: ignore[no-any-return]


def _form(value: Any) -> Any:
    """Return what the way of a forward may follow from: shapes, structure, and what is neither tensor nor fraction."""
    if isinstance(value, Tensor):
        return tuple(value.shape[1:]), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _form(one)) for key, one in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return value if isinstance(value, bool | int | str | None) else type(value).__qualname__


@final
class Compared:
    """The comparison of the inputs of each step, or evaluation, over the places of a pipe.

    On a device it is read at the next call, and at the first call with inputs of a shape: the host does not wait.

    Args:
        mesh: the ranks of this place.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._known = mesh.across, set[Hashable]()
        self._sums: Readback | None = None

    def keep(self, sums: Tensor, key: Hashable) -> None:
        """Compare the checksums of all ranks, now or at the next call.

        Args:
            key: the shapes.

        Raises:
            RankMismatchError: ranks along the pipe have other inputs; on every rank alike.
        """
        self._sums, is_first = Readback(sums), key not in self._known
        self._known.add(key)
        if is_first or self._mesh.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise if the inputs of the last call differ; see `keep`."""
        sums, self._sums = self._sums.read() if self._sums is not None else [], None
        for ranks in self._mesh.rows("pipe").tolist() if sums else ():
            if others := [rank for rank in ranks if sums[rank] != sums[ranks[0]]]:
                first, other = (replace(self._mesh, rank=rank) for rank in (ranks[0], others[0]))
                raise RankMismatchError(f"{self._mesh} The inputs of {other} are not those of {first}. {SAME}")
