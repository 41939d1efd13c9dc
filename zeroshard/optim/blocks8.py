"""Numbers in 8 bits: a code per element, and the largest magnitude of each block of 256.

Owns the codes, their encoding and decoding. It must not know optimizers.

A block's largest magnitude is its scale, kept in fp32; codes represent elements divided by the scale. The codes are
dense near zero, so a block can span seven decades. Encoding decoded values again gives the same codes and scales, bit
for bit, because the largest magnitude has an exact code.

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
"""Floats with equal first 16 bits share a cell of the table; no cell contains two boundaries between codes."""


@final
class Code:
    """The 256 values of the codes, in order, and a table to find the nearest; `zero` is the code of 0.

    Args:
        is_signed: whether half of the values are negative.
    """

    def __init__(self, *, is_signed: bool, device: torch.device) -> None:
        values = _values(is_signed=is_signed)
        borders = (values[1:] + values[:-1]) / 2
        # The number of boundaries below the smallest float of each cell; a comparison with the next decides the rest.
        cells = torch.arange(CELLS, dtype=torch.int32, device="cpu")
        lowest = torch.where(cells < CELLS // 2, cells << 16, (cells << 16) | 0xFFFF).view(torch.float32)
        below = torch.bucketize(lowest.nan_to_num(0.0), borders)
        self.zero = int((values == 0.0).nonzero())
        self.values = values.to(device)
        self._below = below.to(torch.uint8).to(device)
        self._borders = torch.cat([borders, borders.new_full((1,), float("inf"))]).to(device)

    def nearest(self, values: Tensor) -> Tensor:
        """Return the codes of fp32 values in [-1, 1], as uint8 of the same shape."""
        flat = values.reshape(-1)
        cells = flat.view(torch.int32).bitwise_right_shift(16).bitwise_and_(CELLS - 1)
        below = self._below.index_select(0, cells)
        above = flat > self._borders.index_select(0, below.int())
        return below.add_(above).view(values.shape)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the values of codes, fp32 of the same shape."""
        return self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _values(*, is_signed: bool) -> Tensor:
    """Return the values in order, (256,) fp32; each decade has twice as many as the decade below."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        borders = torch.linspace(0.1, 1.0, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64, device="cpu")
        means = (borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - DECADES + 1)
        found += means.tolist() + (-means).tolist() * is_signed
    values = torch.tensor(sorted(found), dtype=torch.float64, device="cpu").float()
    if is_signed:
        values[0] = -1.0
    return values


@functools.cache
def code_of(*, is_signed: bool, device: torch.device) -> Code:
    """Return the code on a device."""
    return Code(is_signed=is_signed, device=device)


def block_count(numel: int) -> int:
    """Return the number of blocks of `numel` elements; the last block may be short."""
    return -(-numel // BLOCK_NUMEL)


def to_rows(flat: Tensor, fill: int = 0) -> Tensor:
    """Return elements as (blocks, 256), padded with `fill`; a view if no block is short."""
    missing = -flat.numel() % BLOCK_NUMEL
    return (torch.nn.functional.pad(flat, (0, missing), value=fill) if missing else flat).view(-1, BLOCK_NUMEL)


def from_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the elements of (blocks, 256) without padding, in a separate allocation of their size."""
    flat, numel = rows.reshape(-1), shape.numel()
    return (flat if flat.numel() == numel else flat[:numel].clone()).view(shape)


def encode(rows: Tensor, *, is_signed: bool, least: float) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of blocks: uint8 of the same shape, and fp32, (blocks,).

    The scale of a block with NaN or infinite elements is NaN or infinite too, so none of its elements decodes to a
    finite value.

    Args:
        rows: (blocks, 256), fp32.
        least: blocks with only smaller magnitudes become zero, because products of codes and scales would be inexact.
    """
    scales = rows.abs().amax(1)
    scales = scales.masked_fill(scales < least, 0.0)
    parts = rows / scales.masked_fill(scales == 0.0, 1.0)[:, None]
    return code_of(is_signed=is_signed, device=rows.device).nearest(parts), scales


def decode(codes: Tensor, scales: Tensor, *, is_signed: bool) -> Tensor:
    """Return the values of the blocks, (blocks, 256), fp32."""
    return code_of(is_signed=is_signed, device=codes.device).numbers(codes).mul_(scales[:, None])
