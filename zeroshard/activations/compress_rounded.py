"""Rounded encodings of saved tensors: bf16, or one byte per element with a scale for each block of 128.

Owns the three encodings and the bounds on their errors. NaN and infinities are restored exactly. Read
`compress_codes.py` first.

Note: bounds
    For an element x that is restored as y, with m the largest finite absolute value in the block of x:

    - bf16: |x - y| <= |x| / 256, for |x| from 2**-126 to 3.38e38, and to nearest even. Larger x become infinite.
    - fp8 (e4m3): |x - y| <= max(|x| / 16, m / 416 / 1024), times 1 + 2**-20 for the rounding of the scale.
    - int8: |x - y| <= m / 252, times 1 + 2**-14 likewise.

    The last two hold if m is at least 1e-35; the error of smaller blocks is at most 1e-38 larger. The largest finite
    values of a block become 416 and 126, one code below the last code, which represents infinity.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch

from zeroshard.activations.compress_codes import Code, Form

__all__ = ["BLOCK", "Rounded", "RoundedTo", "round_to"]

Tensor = torch.Tensor
RoundedTo = Literal["bf16", "fp8", "int8"]

BLOCK = 128
"""Number of elements with the same scale."""
_BLOCKS_AT_ONCE = 1024
_TINY = 2.0**-126


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """The rounded elements of contiguous memory.

    Args:
        codes: bf16, float8_e4m3fn or int8; whole blocks.
        scales: fp32, one a block; None for bf16.
        dtype: the dtype of the original elements.
        numel: the number of original elements.
    """

    codes: Tensor
    scales: Tensor | None
    dtype: torch.dtype
    numel: int

    def flat(self) -> Tensor:
        """Return the elements."""
        if self.scales is None:
            return self.codes.to(self.dtype)
        made = torch.empty(self.codes.shape, dtype=self.dtype, device=self.codes.device)
        is_cpu = made.device.type == "cpu"
        table = _values(self.codes.dtype, made.device)
        step = _BLOCKS_AT_ONCE if is_cpu else max(len(made), 1)
        for begin in range(0, len(made), step):
            end = begin + step
            codes = self.codes[begin:end].view(torch.uint8)
            values = table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
            made[begin:end] = values.mul_(self.scales[begin:end])
        return made.view(-1)[: self.numel]


@final
@dataclass(frozen=True, slots=True)
class Rounded(Code):
    """A tensor with rounded elements; tensors on the same memory share the elements."""

    memory: Memory
    form: Form

    def restore(self) -> Tensor:
        """Return the tensor, within the bound of its encoding."""
        return self.form.spread(self.memory.flat())


def round_to(kind: RoundedTo, flat: Tensor) -> Memory:
    """Return the rounded encoding of floating-point elements, (n,)."""
    if kind == "bf16":
        return Memory(flat.to(torch.bfloat16), None, flat.dtype, flat.numel())
    count = -(-flat.numel() // BLOCK)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
    codes = torch.empty((count, BLOCK), dtype=dtype, device=flat.device)
    scales = torch.empty((count, 1), dtype=torch.float32, device=flat.device)
    step = _BLOCKS_AT_ONCE if flat.device.type == "cpu" else max(count, 1)
    for begin in range(0, count, step):
        part = flat[begin * BLOCK : (begin + step) * BLOCK].float()
        if part.numel() % BLOCK:
            part = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK))
        part = part.view(-1, BLOCK)
        _round_blocks(part, codes[begin : begin + step], scales[begin : begin + step])
    return Memory(codes, scales, flat.dtype, flat.numel())


def _round_blocks(part: Tensor, codes: Tensor, scales: Tensor) -> None:
    finite = torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0)
    most = 126.0 if codes.dtype is torch.int8 else 416.0
    scales.copy_(finite.abs_().amax(dim=1, keepdim=True).div_(most).clamp_(min=_TINY))
    scaled = part / scales
    if codes.dtype is torch.int8:
        codes.copy_(scaled.nan_to_num_(nan=-128.0, posinf=127.0, neginf=-127.0).round_())
    else:
        codes.copy_(scaled.nan_to_num_(nan=torch.nan, posinf=448.0, neginf=-448.0))


def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the value of each byte, (256,)."""
    numbers = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8).view(dtype).float()
    if dtype is torch.int8:
        numbers[128] = torch.nan
    return torch.where(numbers.abs() == (127.0 if dtype is torch.int8 else 448.0), numbers * torch.inf, numbers)
