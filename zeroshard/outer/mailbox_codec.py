"""The bytes of a change, on the way and on disk: its values as they are, or in few bits.

Owns these messages in numpy, with the sizes of `table/spec.py` and the bits of `wire/codec.py`. It must not know torch,
files or islands.

Note: pieces
    A piece of a message stands for the elements in `PIECE_BYTES` of anchors, which are whole blocks. So a change can be
    added to anchors piece by piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from zeroshard.outer.mailbox_wire import PIECE_BYTES
from zeroshard.table.spec import BLOCK_NUMEL, SCALED_NUMEL, message_of

__all__ = ["BITS", "Form", "check_bits"]

BITS: Final = (32, 8, 4)
"""Of an element in a message; 32 stands for the element as it is."""
_TINY: Final = np.finfo(np.float32).tiny


def check_bits(bits: object) -> int:
    """Return bits of an element.

    Raises:
        ValueError: they are none of `BITS`.
    """
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}; got {repr(bits)[:80]}.")
    return bits


@final
@dataclass(frozen=True)
class Form:
    """The form of the changes of a run.

    Args:
        bits: one of `BITS`.
        dtype: of changes and anchors, "<f4" or "<f8".

    >>> from zeroshard.outer.mailbox_codec import Form
    >>> Form(8, "<f4").nbytes(1000), Form(4, "<f4").nbytes(1000), Form(32, "<f8").nbytes(1000)
    (1016, 516, 8000)
    """

    bits: int
    dtype: str

    @property
    def is_exact(self) -> bool:
        """Whether a message has the values as they are."""
        return self.bits == BITS[0]

    @property
    def plain(self) -> "Form":
        """The form of anchors."""
        return Form(BITS[0], self.dtype)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a message for `PIECE_BYTES` of anchors."""
        return self.nbytes(PIECE_BYTES // int(self.dtype[-1]))

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message of so many elements."""
        return numel * int(self.dtype[-1]) if self.is_exact else message_of(f"scaled{self.bits}", numel)[0]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return the message of a change, (nbytes,) of bytes; they share its memory where it is exact.

        Args:
            values: (numel,), finite.
        """
        if self.is_exact:
            return values.view(np.uint8)
        message, start = np.empty(self.nbytes(values.size), np.uint8), 0
        for first in range(0, values.size, BLOCK_NUMEL):
            codes, scales = self._codes(values[first : first + BLOCK_NUMEL])
            for part in (codes, scales.view(np.uint8)):
                message[start : start + part.size] = part
                start += part.size
        return message

    def _codes(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return packed integers of a block, and its scales."""
        rows = np.zeros((-(-block.size // SCALED_NUMEL), SCALED_NUMEL), np.float32)
        rows.reshape(-1)[: block.size] = block
        scales = np.abs(rows).max(1) / np.float32(self._most)
        # The smallest numbers would have an infinite inverse.
        scales[scales < _TINY] = 0.0
        inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > 0.0)
        codes = np.rint(rows * inverse[:, None]).clip(-self._most, self._most)
        codes = (codes + self._most).astype(np.uint8).reshape(-1)
        if self.bits == 4:
            codes = codes[::2] | codes[1::2] << 4
        return codes[: -(-block.size * self.bits // 8)], scales

    def decode(self, message: np.ndarray, numel: int) -> np.ndarray:
        """Return the values of a message, or of a piece, (numel,); they share its memory where it is exact."""
        if self.is_exact:
            return message.view(self.dtype)
        values = np.empty(numel, self.dtype)
        for first, (packed, scales) in zip(range(0, numel, BLOCK_NUMEL), self._blocks(message), strict=True):
            codes = np.stack([packed & 15, packed >> 4], 1).reshape(-1) if self.bits == 4 else packed
            rows = np.zeros((scales.size, SCALED_NUMEL), self.dtype)
            block = values[first : first + BLOCK_NUMEL]
            rows.reshape(-1)[: block.size] = codes[: block.size]
            rows -= self._most
            rows *= scales[:, None]
            block[:] = rows.reshape(-1)[: block.size]
        return values

    def is_finite(self, piece: bytes | memoryview) -> bool:
        """Return whether all values of a piece are finite."""
        if self.is_exact:
            return bool(np.isfinite(np.frombuffer(piece, self.dtype)).all())
        return all(np.isfinite(scales).all() for _, scales in self._blocks(np.frombuffer(piece, np.uint8)))

    @property
    def _most(self) -> int:
        """The largest integer."""
        return (1 << self.bits - 1) - 1

    def _blocks(self, message: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the packed integers and the scales of each block."""
        size, of_scale = self.nbytes(BLOCK_NUMEL), self.nbytes(SCALED_NUMEL)
        for start in range(0, message.size, size):
            block = message[start : start + size]
            packed = block.size - 4 * -(-block.size // of_scale)
            yield block[:packed], block[packed:].copy().view(np.float32)
