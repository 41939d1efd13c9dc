"""Changes in place: what user code does to parameters outside the optimizer, and what is kept of it.

Owns how a change is noticed, and the values until all ranks agreed on them. It must not know passes. Read
`core/buffer.py` first.

Note: the life of a change
    1. A forward changes a parameter (a codebook, `nn.Embedding(max_norm=)`), or code between steps does (clipping of
       weights). torch counts changes in the version of the tensor; what `.data` hands out has a version of its own.
    2. Where the parameter is released, the values of its bucket are set aside, and put back if it is gathered again.
    3. At the end of the pass, and for parameters that stay whole at the next step, ranks compare checksums
       (`Order.settle`). Ranks that made the same change keep it, in shards and in master weights. If they did not, each
       of them raises: no rank's values are right for all.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import final

import torch

from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import version_of
from zeroshard.wire.comm import Comm

__all__ = ["Changes", "check_equal", "checksum_of"]

Tensor = torch.Tensor


@final
class Changes:
    """What user code changed in one bucket since ranks last agreed.

    Args:
        full: (full_numel,), of which the parameters are views.
        is_whole: whether its values are always there.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], full: Tensor, *, is_whole: bool) -> None:
        self._names, self._parameters, self._full, self._is_whole = names, parameters, full, is_whole
        self._aliases: dict[int, Tensor] = {}
        self._seen: list[int] = []
        self.values: Tensor | None = None
        """All values of the bucket after the change; None where there was none."""
        self.names: list[str] = []
        """The parameters that were changed."""

    def data_of(self, index: int, data: Tensor) -> Tensor:
        """Return what `.data` of a parameter hands out: as torch does, with a version of its own, but one we keep."""
        return self._aliases.setdefault(index, data).detach()

    def _versions(self) -> list[int]:
        versions = list(map(version_of, self._parameters))
        for index, alias in self._aliases.items():
            versions[index] += version_of(alias)
        return versions

    def has_any(self) -> bool:
        """Tell whether there is a change that ranks have not agreed on."""
        return self.values is not None or self._versions() != self._seen

    def note(self) -> None:
        """Set changed values aside; to be called while the values are there."""
        if (versions := self._versions()) != self._seen:
            now = zip(self._names, versions, self._seen, strict=True)
            self.names += [name for name, new, old in now if new != old and name not in self.names]
            self._seen, self.values = versions, self._full if self._is_whole else self._full.clone()

    def restore(self) -> None:
        """Put what was set aside back, after a gather brought the values from before."""
        if self.values is not None:
            self._full.copy_(self.values)

    def clear(self) -> None:
        """Forget a change that was kept or refused."""
        self.values, self.names = None, []

    def accept(self) -> None:
        """Take what is there for what ranks agreed on."""
        self.clear()
        self._seen = self._versions()

    def count_update(self) -> None:
        """Let autograd know that parameters that stay whole were updated."""
        torch.autograd.graph.increment_version(list(self._parameters))
        self.accept()


def checksum_of(changes: Iterable[Changes]) -> int:
    """Return the CRC-32 of the names and values of all changes, 0 where there is none."""
    crc = 0
    for one in changes:
        if one.values is not None:
            crc = zlib.crc32(" ".join(one.names).encode(), crc)
            crc = max(1, zlib.crc32(one.values.view(torch.uint8).cpu().numpy().data, crc))
    return crc


def check_equal(changes: Sequence[Changes], comm: Comm, what: str) -> None:
    """Raise unless ranks that hold the same tensors made the same changes. Collective: every rank must call.

    Raises:
        RankMismatchError: they did not; the text names the parameters that each rank changed.
    """
    rows = comm.collect(torch.tensor([checksum_of(changes)], device=comm.mesh.device), what)
    if comm.agree([int(len(set(rows[list(comm.mesh.data_ranks), 0].tolist())) == 1)], what)[0]:
        return
    names = comm.texts(", ".join(name for change in changes for name in change.names), what)
    raise RankMismatchError(f"{comm.mesh} {_describe(names)}")


def _describe(names: Sequence[str]) -> str:
    lines = "\n".join(f"  rank {rank}: {text or '(nothing)'}" for rank, text in enumerate(names))
    return (
        f"Parameters were changed in place, outside the optimizer, and not to the same values on all ranks:\n{lines}\n"
        "Where parameters are sharded the change is lost, where they are not ranks differ now. Make the same change on "
        "every rank (all_reduce the statistics that it is made of), hold what belongs to one rank in a buffer, or "
        "change it in `with zero.gathered(writeback=True):`, which keeps rank 0's."
    )
