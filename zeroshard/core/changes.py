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
from collections.abc import Sequence
from typing import final

import torch

__all__ = ["Changes"]

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
        versions = [p._version for p in self._parameters]
        for index, alias in self._aliases.items():
            versions[index] += alias._version
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

    def checksum(self, start: int) -> int:
        """Return the CRC-32 of the names and values of the change, continued from `start`."""
        if self.values is None:
            return start
        crc = zlib.crc32(" ".join(self.names).encode(), start)
        return zlib.crc32(self.values.view(torch.uint8).cpu().numpy().data, crc)

    def clear(self) -> None:
        """Forget a change that was kept or refused."""
        self.values, self.names = None, []

    def accept(self) -> None:
        """Take what is there for what ranks agreed on."""
        self.clear()
        self._seen = self._versions()
