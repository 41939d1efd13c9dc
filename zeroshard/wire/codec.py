"""The encoding of gradients in messages, and the order of their sums.

Owns the interface of codecs, rounding, and the order of additions, which makes all stages bitwise equal. It must not
know transports. `table/spec.py` has the sizes; `wire/transports.py` finds a codec by name.

Note: blocks
    Each block of BLOCK_NUMEL elements is encoded separately, whatever part of a gradient a transport handles at a time.
    Messages and shared memory therefore give the same bits, and sums stay in the cache. The message for several blocks
    is the concatenation of the messages for each block.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch

from zeroshard.table.spec import BLOCK_NUMEL, SCALED_NUMEL, message_of

__all__ = ["Codec", "Rounded", "Scaled", "sum_in_rank_order"]

Tensor = torch.Tensor


class Codec(ABC):
    """The encoding of a gradient in a message.

    Invariant: the first element of a message never has all bits set, because that pattern marks a sender that is not
    ready (in floating-point messages, except for this NaN).

    Args:
        name: as in `Formats.reduce`; `table/spec.py` looks up sizes by name.
    """

    is_summable = False
    """Whether the sum of messages is the message for the sum, so that a backend can sum messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype: torch.dtype = getattr(torch, message_of(name, 0)[1])
        """The dtype of messages."""

    def message_numel(self, numel: int) -> int:
        """Return the number of elements of the message for `numel` elements."""
        return message_of(self.name, numel)[0]

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message for `numel` elements."""
        return self.message_numel(numel) * self.dtype.itemsize

    def is_message(self, values: Tensor) -> bool:
        """Return whether these values are their own message, which needs no copy."""
        return False

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write the message for values (numel,), of any number of blocks, to `message` (message_numel(numel),)."""

    @abstractmethod
    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of one block in `dtype`; they may share the memory of the message."""

    def round(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values (numel,) of one block after encoding and decoding, in `dtype`."""
        message = torch.empty(self.message_numel(values.numel()), dtype=self.dtype, device=values.device)
        self.encode(values, message)
        return self.decode(message, dtype)

    def rounded_blocks(self, values: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield values (numel,) after encoding and decoding, block by block."""
        return (self.round(block, dtype) for block in values.split(BLOCK_NUMEL))

    def decoded_blocks(self, message: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the values of a message, block by block."""
        return (self.decode(block, dtype) for block in message.split(self.message_numel(BLOCK_NUMEL)))


@final
class Rounded(Codec):
    """Elements rounded to a dtype, the codec's name."""

    is_summable = True

    def is_message(self, values: Tensor) -> bool:
        """See `Codec`."""
        return values.dtype == self.dtype

    def encode(self, values: Tensor, message: Tensor) -> None:
        """See `Codec`."""
        message.copy_(values)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        return message.to(dtype)

    def round(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        return values.to(self.dtype).to(dtype)


@final
class Scaled(Codec):
    """Integers of 8 or 4 bits, and one fp32 scale for each `SCALED_NUMEL` elements: their largest absolute value.

    A value is rounded to the nearest multiple of its scale divided by the largest integer. A value that is not finite
    makes all values that share its scale NaN. The message of a block has the integers first, counted from 0.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._bits = int(name.removeprefix("scaled"))
        self._most = 2 ** (self._bits - 1) - 1

    def encode(self, values: Tensor, message: Tensor) -> None:
        """See `Codec`.

        Raises:
            ValueError: 4 bits, and an odd number of values.
        """
        if self._bits == 4 and values.numel() % 2:
            raise ValueError(f"Codec {self.name!r} encodes pairs of values; got {values.numel():,} values.")
        parts = message.split(self.message_numel(BLOCK_NUMEL))
        for block, part in zip(values.split(BLOCK_NUMEL), parts, strict=True):
            rows = torch.nn.functional.pad(block.float(), (0, -block.numel() % SCALED_NUMEL)).view(-1, SCALED_NUMEL)
            scales = rows.abs().amax(1) / self._most
            # The smallest numbers would have an infinite inverse.
            scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 0.0)
            inverse = torch.where(scales == 0.0, 0.0, 1.0 / scales)
            codes = (rows * inverse[:, None]).round_().clamp_(-self._most, self._most).nan_to_num_(0.0)
            codes = codes.add_(self._most).to(torch.uint8).view(-1)[: block.numel()]
            packed = codes if self._bits == 8 else codes[::2] | codes[1::2] << 4
            part[: packed.numel()] = packed
            part[packed.numel() :] = scales.view(torch.uint8)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        count = -(-message.numel() // self.message_numel(SCALED_NUMEL))
        packed, scales = message.split([message.numel() - 4 * count, 4 * count])
        codes = packed if self._bits == 8 else torch.stack([packed & 15, packed >> 4], 1).view(-1)
        values = codes.to(dtype).sub_(self._most)
        padded = torch.nn.functional.pad(values, (0, -values.numel() % SCALED_NUMEL)).view(-1, SCALED_NUMEL)
        padded *= scales.clone().view(torch.float32).to(dtype)[:, None]
        return padded.view(-1)[: values.numel()]


def sum_in_rank_order(ranks: Sequence[Iterable[Tensor]], scale: float, out: Tensor) -> None:
    """Write scale * (values of rank 0 + values of rank 1 + ...) to `out`, which may alias one rank's values.

    Args:
        ranks: the values of each rank in blocks of BLOCK_NUMEL, all in one dtype, fp32 or better.
    """
    for result, total, *others in zip(out.split(BLOCK_NUMEL), *ranks, strict=True):
        for other in others[:-1]:
            total = total + other
        if others and result.dtype == total.dtype:
            torch.add(total, others[-1], out=result).mul_(scale)
        else:
            result.copy_((total + others[-1] if others else total) * scale)
