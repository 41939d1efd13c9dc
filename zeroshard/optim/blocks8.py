"""Numbers in 8 bits: a code for each element, and the largest magnitude of each block of 256.

Owns the codes and their two directions. It must not know optimizers.

A block's largest magnitude is its scale, kept in fp32; the others are codes of what they are of it. The codes are dense
near zero, so that a block may span seven decades. Encoding decoded values again gives the same codes and scales, bit
for bit, since the largest magnitude has a code of its own.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (arXiv 2110.02861), section 2.2 and
appendix F: dynamic tree quantization. There -1 has no code; here the most negative value is -1 instead of -0.993.
"""

import functools
from typing import Final, final

import torch

__all__ = ["BLOCK_NUMEL", "Code", "block_count", "code_of", "decode", "encode", "from_rows", "to_rows"]

Tensor = torch.Tensor

BLOCK_NUMEL: Final = 256
DECADES: Final = 7
CELLS: Final = 1 << 16
"""Floats that agree in their first 16 bits share a cell of the table; none holds two borders between codes."""


@final
class Code:
    """The 256 values that codes stand for, in order, and what finds the nearest; `zero` is the code of 0.

    Args:
        is_signed: whether half of them are negative.
    """

    def __init__(self, *, is_signed: bool, device: torch.device) -> None:
        values = _values(is_signed=is_signed)
        borders = (values[1:] + values[:-1]) / 2
        # The number of borders below the least float of each cell; the comparison with the next one decides the rest.
        cells = torch.arange(CELLS, dtype=torch.int32)
        lowest = torch.where(cells < CELLS // 2, cells << 16, (cells << 16) | 0xFFFF).view(torch.float32)
        below = torch.bucketize(lowest.nan_to_num(0.0), borders)
        self.zero = int((values == 0.0).nonzero())
        self.values = values.to(device)
        self._below = below.to(torch.uint8).to(device)
        self._borders = torch.cat([borders, torch.full((1,), float("inf"))]).to(device)

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes of values between -1 and 1, fp32, as uint8 of the same shape."""
        flat = values.reshape(-1)
        cells = flat.view(torch.int32).bitwise_right_shift(16).bitwise_and_(CELLS - 1)
        below = self._below.index_select(0, cells)
        above = flat > self._borders.index_select(0, below.int())
        return below.add_(above).view(values.shape)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, fp32 of the same shape."""
        return self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _values(*, is_signed: bool) -> Tensor:
    """Return the values in order, (256,) fp32: in each decade twice as many as in the one below."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        borders = torch.linspace(0.1, 1.0, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        means = (borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - DECADES + 1)
        found += means.tolist() + (-means).tolist() * is_signed
    values = torch.tensor(sorted(found), dtype=torch.float64).float()
    if is_signed:
        values[0] = -1.0
    return values


@functools.cache
def code_of(*, is_signed: bool, device: torch.device) -> Code:
    """Return the code on a device."""
    return Code(is_signed=is_signed, device=device)


def block_count(numel: int) -> int:
    """Return in how many blocks `numel` elements lie; the last may be short."""
    return -(-numel // BLOCK_NUMEL)


def to_rows(flat: Tensor, fill: int = 0) -> Tensor:
    """Return elements as (blocks, 256), with `fill` behind the last; a view where no block is short."""
    missing = -flat.numel() % BLOCK_NUMEL
    return (torch.nn.functional.pad(flat, (0, missing), value=fill) if missing else flat).view(-1, BLOCK_NUMEL)


def from_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the elements of (blocks, 256) without those behind the last, in a memory of their own size."""
    flat, numel = rows.reshape(-1), shape.numel()
    return (flat if flat.numel() == numel else flat[:numel].clone()).view(shape)


def encode(rows: Tensor, *, is_signed: bool, least: float) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of blocks: uint8 of the same shape, and fp32, (blocks,).

    A block with what is no number, or is not finite, has such a scale, so that none of its elements is decoded to a
    finite one.

    Args:
        rows: (blocks, 256), fp32.
        least: blocks whose magnitudes are all smaller become zero, as products of codes and scales would be inexact.
    """
    scales = rows.abs().amax(1)
    scales = scales.masked_fill(scales < least, 0.0)
    parts = rows / scales.masked_fill(scales == 0.0, 1.0)[:, None]
    return code_of(is_signed=is_signed, device=rows.device).nearest(parts), scales


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the blocks' values, (blocks, 256), fp32."""
    return code_of(is_signed=is_signed, device=codes.device).numbers(codes).mul_(scales[:, None])
