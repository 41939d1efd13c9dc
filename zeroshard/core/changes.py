"""Changes in place that user code makes to parameters outside the optimizer.

Owns the detection of a change, and the changed values until all ranks have agreed on them. It must not know passes.
Read `core/buffer.py` first.

Note: the life of a change
    1. A forward changes a parameter (a codebook, `nn.Embedding(max_norm=)`), or code between steps does (weight
       clipping). torch counts changes in the version of the tensor; the tensor from `.data` has its own version.
    2. Before the parameter is released, the values of its bucket are saved; the next gather restores them.
    3. At the end of the pass, or at the next step for parameters that stay whole, ranks compare checksums
       (`Order.settle`). If all ranks made the same change, it is kept in shards and master weights. Otherwise every
       rank raises.
Note: what an exception leaves
    Code under `gathered()` may fail when it has changed some parameters. Sharded ones have their shards still. Those
    that stay whole have no other values, and ranks may not exchange any after an exception, so they are torn: each
    `Order.settle` raises on every rank, until `gathered(writeback=True)` has written them.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch

from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import version_of
from zeroshard.wire.comm import Comm

__all__ = ["Changes", "check_equal", "checksum_of", "refuse_torn", "torn_on_ranks"]

Tensor = torch.Tensor
TORN: Final = "under gathered(), which an exception ended: "
REMEDY: Final = (
    "Sharded parameters, and states and groups of optimizers, are as before it; parameters that are whole on each rank "
    "have the changed values. Enter `with zero.gathered(writeback=True):` again, on every rank, which keeps the values "
    "that rank 0 writes to all of them, or has; zero.load(path) works after it."
)
"""What holds after such an exception, and what to do."""


@final
class Changes:
    """Changes by user code in one bucket since ranks last agreed.

    Args:
        full: (full_numel,), the tensor that the parameters are views of.
        is_whole: whether `full` always has its values.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], full: Tensor, *, is_whole: bool) -> None:
        self._names, self._parameters, self._full, self._is_whole = names, parameters, full, is_whole
        self._aliases: dict[int, Tensor] = {}
        self._seen: list[int] = []
        self.values: Tensor | None = None
        """All values of the bucket after the change; None without a change."""
        self.names: list[str] = []
        """The changed parameters."""
        self.torn: list[str] = []
        """Those of them that code under `gathered()` had changed when it failed."""

    def data_of(self, index: int, data: Tensor) -> Tensor:
        """Return the tensor for `.data` of a parameter; it has its own version, as in torch, which is recorded here."""
        return self._aliases.setdefault(index, data).detach()

    def versions(self) -> list[int]:
        """Return a number for each parameter, which each change in place increments."""
        versions = list(map(version_of, self._parameters))
        for index, alias in self._aliases.items():
            versions[index] += version_of(alias)
        return versions

    def has_any(self) -> bool:
        """Return whether there is a change that ranks have not agreed on."""
        return self.values is not None or self.versions() != self._seen

    def note(self) -> None:
        """Save changed values; call this while `full` has its values."""
        if (versions := self.versions()) != self._seen:
            now = zip(self._names, versions, self._seen, strict=True)
            self.names += [name for name, new, old in now if new != old and name not in self.names]
            self._seen, self.values = versions, self._full if self._is_whole else self._full.clone()

    def restore(self) -> None:
        """Restore saved values after a gather, which returns the values from before the change."""
        if self.values is not None:
            self._full.copy_(self.values)

    def clear(self) -> None:
        """Clear a change that ranks kept or rejected."""
        self.values, self.names, self.torn = None, [], []

    def tear(self, before: Sequence[int]) -> bool:
        """Mark what has changed since `versions` returned `before` as torn; return whether anything has."""
        now = zip(self._names, self.versions(), before, strict=True)
        self.torn += [name for name, new, old in now if new != old and name not in self.torn]
        return bool(self.torn)

    def accept(self) -> None:
        """Mark the present values as agreed on."""
        self.clear()
        self._seen = self.versions()

    def count_update(self) -> None:
        """Count an update of parameters that stay whole in the versions that autograd checks."""
        torch.autograd.graph.increment_version(list(self._parameters))
        self.accept()


def checksum_of(changes: Iterable[Changes]) -> int:
    """Return the CRC-32 of the names and values of all changes; 0 without a change."""
    crc = 0
    for one in changes:
        if one.values is not None:
            crc = zlib.crc32(" ".join([*one.names, TORN, *one.torn]).encode(), crc)
            crc = max(1, zlib.crc32(one.values.view(torch.uint8).cpu().numpy().data, crc))
    return crc


def check_equal(changes: Sequence[Changes], comm: Comm, what: str) -> None:
    """Raise unless ranks that hold the same tensors made the same changes, of which none is torn.

    Raises:
        RuntimeError: changes are torn; the error names the parameters that each rank changed.
        RankMismatchError: changes differ.

    Collective: every rank must call.
    """
    is_torn = any(change.torn for change in changes)
    rows = comm.collect(torch.tensor([checksum_of(changes)], device=comm.mesh.device), what)
    if comm.agree([int(not is_torn and len(set(rows[list(comm.mesh.data_ranks), 0].tolist())) == 1)], what)[0]:
        return
    if text := torn_on_ranks(changes, comm, what):
        raise RuntimeError(f"{comm.mesh} {text}")
    names = comm.texts(", ".join(name for change in changes for name in change.names), what)
    raise RankMismatchError(f"{comm.mesh} {_describe(_lines(names, comm))}")


def torn_on_ranks(changes: Iterable[Changes], comm: Comm, what: str) -> str:
    """Return what is torn on each rank, and the remedy, equal on all ranks; "" if nothing is.

    Collective: an all-gather of 4 KiB; every rank must call.
    """
    names = [name for change in changes for name in change.torn]
    told = comm.texts(f"{TORN}{', '.join(names)}" if names else "", what)
    return f"Parameters were changed\n{_lines(told, comm)}\n{REMEDY}" if any(told) else ""


def refuse_torn(changes: Iterable[Changes], what: str) -> None:
    """Raise RuntimeError if parameters are torn on this rank, which may be the only one."""
    if names := [name for change in changes for name in change.torn]:
        raise RuntimeError(
            f"{what} after an exception ended gathered(), where {len(names)} parameter(s), '{names[0]}' first, were "
            f"changed. {REMEDY}"
        )


def _lines(names: Iterable[str], comm: Comm) -> str:
    return comm.mesh.lines([name or "(nothing)" for name in names])


def _describe(lines: str) -> str:
    return (
        f"Parameters were changed in place, outside the optimizer, and not to the same values on all ranks:\n{lines}\n"
        "Sharded parameters lost the change; parameters that are not sharded now differ between ranks. Make the same "
        "change on every rank (all_reduce the statistics first), keep values of a single rank in a buffer, or make the "
        "change in `with zero.gathered(writeback=True):`, which keeps the values of rank 0."
    )
