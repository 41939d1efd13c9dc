"""The kernels of a trace's device: the tensors that they save, and their temporary memory.

Owns the differences between torch's operations on fake tensors on the CPU and a device's kernels. It must not know
events, modules or phases.

Note: two places where a device shows
    A function may run other operations (attention, dropout, RMS norm), which save other tensors: `rewriting()` returns
    a context that replaces functions. An operation may have results of other dtypes, and temporary memory: `run()` and
    `workspace()`. Memory that libraries allocate outside torch's allocator (MKL, cuBLAS) is not counted, nor is
    oneDNN's memory inside it for LSTMs, and for products and convolutions in bf16, which depends on the processor.
"""

import contextlib
import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zeroshard.plan.shape.tape import Exchange

__all__ = ["PERSONALITIES", "Personality", "exchange_of", "is_wait"]

aten: Final = torch.ops.aten

# torch's own functions, even while their names are replaced.
_LINEAR: Final = F.linear
_DROPOUT: Final = F.dropout
_ATTENTION: Final = F.scaled_dot_product_attention


class Personality(ABC):
    """The differences of a device's kernels from fake tensors on the CPU."""

    name: str
    _bias: Tensor | None = None

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """Return replacements of torch's functions."""
        return {_LINEAR: self._linear}

    def rewriting(self) -> AbstractContextManager[Any]:
        """Return a context in which functions run the operations of the device."""
        return _Rewriting(self.functions())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; its results have the device's dtypes."""
        if func is aten.add.Tensor and self._bias is not None and args[1] is self._bias:
            # `linear` adds its bias in place, except for fake tensors.
            return aten.add_.Tensor(*args).detach()
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Kernels take float32 and float16, too; torch's shape function refuses them.
            like = [torch.empty_strided(one.shape, one.stride(), dtype=torch.bfloat16) for one in args[:2]]
            made = func(*like, *args[2:], **kwargs)
            return torch.empty_strided(made.shape, made.stride(), dtype=args[0].dtype)
        if func in _CTC:
            return _ctc_loss(*args)
        if func in _CTC_BACKWARD:
            return torch.empty_like(args[1], memory_format=torch.contiguous_format)
        out = func(*args, **kwargs)
        if func in _LOSSES and not out.dim():
            # A result that shrinks keeps its storage.
            out = out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).resize_(())
        return out

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer choose the implementation that it would choose on the device."""
        return

    def workspace(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Return the peak temporary memory of a kernel in bytes, without its results."""
        measure = _WORKSPACES[self.name].get(func)
        return measure(args, out) if measure is not None else 0

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._bias = bias
        try:
            return _LINEAR(x, weight, bias)
        finally:
            self._bias = None


@final
class _Rewriting(TorchFunctionMode):
    """Replaces functions by others.

    Args:
        functions: replacements, by the replaced function.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # The mode does not see calls inside a function of torch, so the names in its module are replaced.
            with _exchanged_names(self._functions):
                return func(*args, **kwargs)
        return self._functions.get(func, func)(*args, **kwargs)


@contextlib.contextmanager
def _exchanged_names(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace names in `torch.nn.functional` by other functions."""
    own = {name: one for name, one in vars(F).items() if callable(one) and one in functions}
    vars(F).update({name: functions[one] for name, one in own.items()})
    try:
        yield
    finally:
        vars(F).update(own)


def is_wait(func: Any) -> bool:
    """Return whether an operation waits for a collective; it returns its argument."""
    return func.namespace in _NAMESPACES and func.overloadpacket.__name__ == "wait_tensor"


def exchange_of(func: Any, args: tuple[Any, ...], made: Sequence[Tensor]) -> Exchange | None:
    """Return the collective of an operation, or None.

    Raises:
        RuntimeError: the traffic of the collective is unknown.
    """
    if func.namespace not in _NAMESPACES:
        return None
    name = func.overloadpacket.__name__
    if name not in _EXCHANGES:
        raise RuntimeError(
            f"The model runs the collective {func}, which a plan cannot count; supported: {', '.join(_EXCHANGES)}. "
            "Change the layout of its tensors to use only these."
        )
    return Exchange(_EXCHANGES[name], max(one.nbytes for one in (args[0], *made)))


_NAMESPACES: Final = ("_c10d_functional", "_dtensor", "c10d")
_EXCHANGES: Final[Mapping[str, str]] = MappingProxyType(
    {"all_reduce": "all-reduce", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}
)
"""torch's functional collectives, and their kinds in a plan."""


# -- CPU --------------------------------------------------------------------------------------------------------------


@final
class CPU(Personality):
    """torch's CPU kernels in eager mode, with torch's current number of threads."""

    name = "cpu"


def _flash_splits(query: Tensor, key: Tensor) -> tuple[int, int, bool]:
    """Return the rows of a block of queries and of keys, and whether blocks are copied in half precision.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, `flash_attention_kernel_impl`.
    """
    rows = next(split for least, split in ((768, 256), (192, 64), (0, 32)) if query.shape[2] >= least)
    return min(rows, query.shape[2]), min(512, key.shape[2]), query.dtype in _HALVES


def _cpu_flash(args: tuple[Any, ...], out: Any) -> int:
    rows, columns, is_half = _flash_splits(*args[:2])
    numel = rows * columns + 2 * rows + rows * int(args[0].shape[3])
    return torch.get_num_threads() * (4 * numel + 2 * rows * columns * is_half)


def _cpu_flash_backward(args: tuple[Any, ...], out: Any) -> int:
    grad, query, key = args[:3]
    rows, columns, is_half = _flash_splits(query, key)
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    # Scores and their gradients, both also in half precision, and a sum per row.
    each = 2 * rows * columns * (6 if is_half else 4) + 4 * rows
    return int(copied + torch.get_num_threads() * each)


def _cpu_layer_norm_backward(args: tuple[Any, ...], out: Any) -> int:
    return int(2 * torch.get_num_threads() * args[1].shape[-len(args[2]) :].numel() * args[1].element_size())


def _safe_softmax(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of the softmax before fully masked rows are replaced, and of the mask of these rows."""
    return int(out.nbytes + out.numel())


def _ctc_loss(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the losses, and the sums over alignments, of targets as long as their rows; torch has no shape function.

    Source: aten/src/ATen/native/LossCTC.cpp, `ctc_loss_allocate_outputs`.
    """
    batch = log_probs.shape[1:-1]
    if log_probs.dim() == 3 and targets.dim() == 1:
        raise RuntimeError(
            f"A trace has no values, but ctc_loss gets all {targets.numel():,} targets of {batch[0]:,} sequences in a "
            "row, whose lengths it reads. Give the targets as (sequences, length) in the inputs of the plan."
        )
    return log_probs.new_empty(batch), log_probs.new_empty(math.prod(batch), len(log_probs), 2 * targets.shape[-1] + 1)


def _trilinear(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of the product of two factors, and of it and the third, for one place of an unrolled dimension.

    Source: aten/src/ATen/native/Linear.cpp, `_trilinear`.
    """
    sums, unrolled = args[6], args[7] if len(args) > 7 else 1
    sizes = []
    for one, missing in zip(args[:3], args[3:6], strict=True):
        own = iter(one.shape)
        sizes.append([1 if dim in missing else next(own) for dim in range(one.dim() + len(missing))])

    def numel(factors: int, summed: Sequence[int]) -> int:
        whole = enumerate(zip(*sizes[:factors], strict=True))
        return math.prod(max(each) for dim, each in whole if dim != unrolled and dim not in summed)

    return int(out.element_size()) * (numel(2, [dim for dim in sums if dim in args[5]]) + numel(3, sums))


def _product(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of factors that must be copied first, because neither stride is 1."""
    return sum(one.nbytes for one in args[-2:] if isinstance(one, Tensor) and not _is_ready(one))


def _is_ready(factor: Tensor) -> bool:
    (rows, columns), (first, second) = factor.shape[-2:], factor.stride()[-2:]
    return (second == 1 and first >= max(1, columns)) or (first == 1 and second >= max(1, rows))


@final
@dataclass(frozen=True)
class _Convolution:
    """What oneDNN copies for a convolution on the CPU, in bytes of (input, weight, result).

    It computes on blocks of 16 channels, as on processors with AVX-512: inputs of few channels are read as they are or,
    for the gradient of the weight, in blocks of 8. Where channels are last, it copies weights alone: also into that
    order, and to blocks of each group for their gradient. No bytes where torch does not call it.
    Source: aten/src/ATen/native/Convolution.cpp, `use_mkldnn`, the kernels that ONEDNN_VERBOSE=1 names, and
    measurements.

    Args:
        forward, to_input, to_weight: of the result, and of the two gradients.
        summed: the gradient of the weight.
        is_last: whether channels are last.
        is_exchanged: whether the gradient of the input comes with channels last, and is copied into the usual order.
    """

    forward: Sequence[int] = (0, 0, 0)
    to_input: Sequence[int] = (0, 0, 0)
    to_weight: Sequence[int] = (0, 0, 0)
    summed: int = 0
    is_last: bool = False
    is_exchanged: bool = False

    def forward_bytes(self, result: int) -> int:
        """Return the most bytes beside a result; it is made when the other copies are gone, or first."""
        return sum(self.forward) if self.is_last else max(sum(self.forward) - result, self.forward[2])

    def input_bytes(self, result: int) -> int:
        """Return the most bytes with the gradient of an input."""
        return max(sum(self.to_input) + result * self.is_last, self.to_input[0] + result * (1 + self.is_exchanged))


def _convolved(
    x: Tensor, weight: Tensor, y: Tensor, strides: Sequence[int], dilations: Sequence[int], groups: int
) -> _Convolution:
    outs, ins, *kernel = weight.shape[0] // groups, *weight.shape[1:]  # channels of a group
    is_strided, is_dilated, is_deep = {*strides} != {1}, {*dilations} != {1}, len(kernel) == 3 and {*kernel} != {1}
    is_single = torch.get_num_threads() == 1 and x.shape[0] < 16 and {*kernel, *strides, *dilations} == {1}
    is_single |= x.shape[0] == groups == 1 and x.numel() <= 20480
    if x.dtype is torch.float64 or (x.dtype is torch.float32 and is_single):
        return _Convolution()
    each = [_rounded(count, 16) / count for count in (outs, ins)]
    blocked = int(weight.nbytes * each[0] * (each[1] if ins >= 16 else 1)) if groups == 1 else weight.nbytes
    if _is_last(x, weight):
        ordered = 0 if weight.is_contiguous(memory_format=torch.channels_last) else weight.nbytes
        is_blocked = groups > 1 and max(kernel) > min(3, *x.shape[2:])
        summed = int(weight.nbytes * math.prod(each)) if is_blocked else blocked
        copies = (0, blocked + ordered, 0)
        return _Convolution(copies, copies, copies, summed + ordered + weight.nbytes, is_last=True)
    is_depthwise, is_few = outs == ins == 1 < groups, groups == 1 and ins < 16 and {*kernel} != {1}
    is_fixed = groups == 1 or is_depthwise or x.dtype in _HALVES
    block = 16 if is_fixed else next((size for size in (16, 8, 4) if outs % size == ins % size == 0), 1)
    whole, summed = [_in_blocks(one, block) for one in (x, y)], weight.nbytes
    parts = [_in_blocks(one, 8) for one in (x, y)] if is_few and ins >= 4 else whole
    is_exchanged = is_strided and not is_dilated and (groups == 1 or min(outs, ins) > 8)
    wide = [int(weight.nbytes * one) if groups == 1 else weight.nbytes for one in (math.prod(each), each[1])]
    forward = (whole[0] * (not is_few), blocked, whole[1])
    to_input = (x.nbytes, wide[1], y.nbytes) if is_exchanged else (whole[0], wide[0], whole[1])
    to_weight = (parts[0] * (not is_few or ins >= 4), blocked, parts[1])
    if x.dtype in _HALVES:
        return _Convolution(forward, to_input, to_weight, blocked, is_exchanged=is_exchanged)
    # Where it has no kernel on blocks, it multiplies by the input of each position; each thread has its own.
    unfolded = 4 * ins * math.prod((*kernel, *y.shape[2:][-2:])) * (is_strided or {*kernel} != {1})
    threads = torch.get_num_threads() if x.shape[0] > 1 else 1
    if block == 1 or (is_depthwise and is_deep and is_dilated):
        forward = (unfolded, 0, y.nbytes)
    is_unfolded = block == 1 or (is_strided and is_dilated) or (is_depthwise and (is_deep or is_dilated))
    if is_unfolded and not is_exchanged:
        to_input = (x.nbytes, unfolded * threads, 0)
    if block == 8 or is_depthwise or (is_few and ins >= 4):
        is_unfolded = is_deep or is_dilated or (is_depthwise and max(kernel) not in (2, 3))
    else:
        is_unfolded = block < 8 or (is_dilated and (is_deep or (is_strided and len(kernel) > 1)))
    if is_unfolded:
        threads = threads if y.shape[2:].numel() < 256 * threads else 1
        to_weight = (unfolded * threads, (1 + 4 * threads) * summed, 0)
    return _Convolution(forward, to_input, to_weight, summed if is_unfolded else blocked, is_exchanged=is_exchanged)


def _in_blocks(one: Tensor, channels: int) -> int:
    return _rounded(one.shape[1], channels) * int(one.nbytes) // one.shape[1]


def _is_last(x: Tensor, weight: Tensor) -> bool:
    return any(
        one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last) and one.stride(3) >= one.shape[1] > 1
        for one in (x, weight)
    )


def _ordered(x: Tensor, weight: Tensor, *gradients: Tensor) -> int:
    """Return the bytes of copies of what is not in the order of the convolution, as an expanded gradient is not."""
    order = torch.channels_last if _is_last(x, weight) else torch.contiguous_format
    return sum(one.nbytes for one in (x, *gradients) if not one.is_contiguous(memory_format=order))


def _cpu_convolution(args: tuple[Any, ...], out: Any) -> int:
    x, weight, _, strides, _, dilations, is_transposed, _, groups = args[:9]
    if is_transposed:  # the gradient of the input of another convolution
        copies = _convolved(out, weight, x, strides, dilations, groups).input_bytes(out.nbytes) - int(out.nbytes)
    else:
        copies = _convolved(x, weight, out, strides, dilations, groups).forward_bytes(out.nbytes)
    return _ordered(x, weight) + copies


def _cpu_convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    y, x, weight, _, strides, _, dilations, is_transposed, _, groups = args[:10]
    one = _convolved(*((y, weight, x) if is_transposed else (x, weight, y)), strides, dilations, groups)
    to_input, to_weight = int(x.nbytes) * args[10][0], int(weight.nbytes) * args[10][1]
    first = to_input + one.forward_bytes(to_input) if is_transposed else one.input_bytes(to_input)
    wide = 2 * one.summed if x.dtype in _HALVES else 0  # sums in fp32
    second = to_input + max(max(sum(one.to_weight), one.summed) + wide, one.summed + to_weight)
    most = max(first * bool(to_input), second * bool(to_weight), to_input + to_weight)
    return int(_ordered(x, weight, y) + most - to_input - to_weight)


def _cpu_upsample(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of copies, with channels last, of an input and of its small result.

    Source: aten/src/ATen/native/cpu/UpSampleKernel.cpp, `_use_vectorized_kernel_cond_2d`.
    """
    x, is_small = args[0], sum(out.shape[-2:]) <= 128
    is_copied = is_small and not x.is_contiguous(memory_format=torch.channels_last)
    return int(x.nbytes + out.nbytes) * is_copied


def _cpu_upsample_backward(args: tuple[Any, ...], out: Any) -> int:
    grad = args[0]
    is_ready = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
    return 0 if is_ready else int(grad.nbytes)


_HALVES: Final = (torch.bfloat16, torch.float16)


# -- CUDA -------------------------------------------------------------------------------------------------------------


@final
class CUDA(Personality):
    """torch's kernels on NVIDIA GPUs: flash attention in half precision, fused norms and dropout, foreach optimizers.

    Bytes are requested bytes; the caching allocator rounds each request up to 512.
    """

    name = "cuda"

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """See `Personality`."""
        # cuDNN's recurrent layers cannot be traced without a device; their products stand for them.
        is_enabled, *_ = torch.backends.mkldnn.set_flags(False)
        try:
            with super().rewriting():
                yield
        finally:
            torch.backends.mkldnn.set_flags(is_enabled)

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """Return replacements of torch's functions."""
        norms = dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm)
        dropouts = dict.fromkeys((_DROPOUT, torch.dropout), _dropout)
        return {**super().functions(), **norms, **dropouts, _ATTENTION: _attention}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; statistics of layer norms are fp32."""
        out = super().run(func, args, kwargs)
        if func is aten.native_layer_norm.default:
            return out[0], out[1].float(), out[2].float()
        return out

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer update lists of tensors, torch's default on GPUs, unless configured otherwise."""
        for one in optimizer.param_groups:
            is_chosen = one.get("fused") or one.get("foreach") is not None or one.get("differentiable")
            if "foreach" in one and not is_chosen:
                one["foreach"] = True


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that torch prefers: flash attention in half precision without a mask, otherwise efficient."""
    width = query.shape[-1]
    is_half, is_4d = query.dtype in _HALVES, query.dim() == key.dim() == value.dim() == 4
    if is_half and is_4d and attn_mask is None and width <= 256 and value.shape[-1] == width:
        # The kernel requires widths that are multiples of 8.
        query, key, value = (F.pad(one, (0, -width % 8)) if width % 8 else one for one in (query, key, value))
        scale = width**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width] if width % 8 else out  # type: ignore[no-any-return]
    if not is_4d or query.dtype not in (*_HALVES, torch.float32):
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_sums = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    run = aten._scaled_dot_product_efficient_attention
    return run(query, key, value, attn_mask, needs_sums, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1 or not x.numel():
        return _DROPOUT(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, tuple(normalized_shape), weight)  # type: ignore[no-any-return,no-untyped-call]


@final
class _RMSNorm(torch.autograd.Function):
    """The fused RMS norm: it saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        rows = x.shape[: x.dim() - len(shape)]
        scales = x.new_empty((*rows, *(1 for _ in shape)), dtype=torch.float32)
        ctx.save_for_backward(x, scales, weight)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cuda_flash_backward(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of the gradient of the queries in fp32, and of one number per row of the queries.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.
    """
    query, key = args[1:3]
    batch, heads, length, width = query.shape
    rows = batch * heads * _rounded(length, 128)
    shared = 2 * batch * heads * key.shape[2] * width * query.element_size() * (heads != key.shape[1])
    return int(4 * rows * _rounded(width, 32) + 4 * rows + shared)


def _cuda_efficient_backward(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of one fp32 number per row of the queries."""
    return int(4 * args[1].shape[:3].numel())


_LOSSES: Final = tuple(
    getattr(aten, name).default for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
"""Their kernels, on CPUs and GPUs, compute all elements into the result, or beside it, and reduce them last.

Source: aten/src/ATen/native/Loss.cpp and cuda/Loss.cu.
"""
_CTC: Final = (aten._ctc_loss.default, aten._ctc_loss.Tensor)
_CTC_BACKWARD: Final = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
_OF_BOTH: Final = (
    {
        aten._safe_softmax.default: _safe_softmax,
        aten._trilinear.default: _trilinear,
        **dict.fromkeys(_CTC_BACKWARD, lambda args, out: int(args[6].nbytes)),  # sums from the other end
        # The negated targets, and their products with the predictions, of which the exponentials are made.
        aten.soft_margin_loss_backward.default: lambda args, out: 2 * int(out.nbytes),
    }
    | dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default), _product)
    | dict.fromkeys(_LOSSES[:2], lambda args, out: int(out.untyped_storage().nbytes() - out.nbytes))
)
_UPSAMPLES: Final = ("upsample_bilinear2d", "upsample_nearest2d", "_upsample_nearest_exact2d")
_WORKSPACES: Final[Mapping[str, Mapping[Any, Callable[[tuple[Any, ...], Any], int]]]] = MappingProxyType(
    {
        "cpu": _OF_BOTH
        | {
            aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_flash,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_flash_backward,
            aten.native_layer_norm_backward.default: _cpu_layer_norm_backward,
            aten.convolution.default: _cpu_convolution,
            aten.convolution_backward.default: _cpu_convolution_backward,
        }
        | {getattr(aten, name).default: _cpu_upsample for name in _UPSAMPLES}
        | {getattr(aten, f"{name}_backward").default: _cpu_upsample_backward for name in _UPSAMPLES},
        "cuda": _OF_BOTH
        | {
            aten._scaled_dot_product_flash_attention_backward.default: _cuda_flash_backward,
            aten._scaled_dot_product_efficient_attention_backward.default: _cuda_efficient_backward,
        },
    }
)
"""By personality and operation, from torch's sources and measurements."""

PERSONALITIES: Final[Mapping[str, Callable[[], Personality]]] = MappingProxyType({"cpu": CPU, "cuda": CUDA})
"""Constructors of personalities by name."""
