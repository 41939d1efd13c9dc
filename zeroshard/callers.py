"""Remedies for code that reads a released parameter.

Owns the inspection of the call stack, which only errors of released parameters use. It must not know engines or passes;
`core/parameter.py` calls it.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["SPLIT", "remedy_for", "split_backward"]

CONVERSIONS = frozenset("bfloat16 cpu cuda double float half ipu mtia share_memory_ to to_empty type xpu".split())
"""Methods of modules that replace their parameters."""
DISPATCH = frozenset(["__call__", "_call_impl", "_wrapped_call_impl"])
"""Functions that torch runs between the call of a module and its method."""
AVERAGE = re.compile("Averaged|MovingAverage|EMA|Ema(?![a-z])")
"""Matches the class names of averages in torch, timm, diffusers and torch_ema."""
COPIES = frozenset(["__deepcopy__", "deepcopy", "lerp", "lerp_"])
"""The operations with which hand-written averages begin."""
SPLIT = ("torch.distributed.pipelining._backward", ("stage_backward_input", "stage_backward_weight"))
"""The functions of torch that compute gradients of inputs and of weights apart, and their module."""
SAVES = frozenset(["save", "save_file", "save_model", "save_pretrained", "save_state_dict"])


COMPUTES = frozenset(
    """
    __matmul__ __rmatmul__ addmm baddbmm batch_norm bilinear bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cross_entropy einsum embedding embedding_bag group_norm layer_norm linear matmul mm mv rms_norm t T
    """.split()
)
"""Operations of layers on parameters."""


def remedy_for(parameter: torch.Tensor, name: str, what: str = "") -> str:
    """Return the remedy for the code that is reading a released parameter.

    Args:
        name: name of the parameter in the sharded model.
        what: name of the function that reads the parameter.
    """
    methods: list[str] = []
    for frame in _frames():
        code, owner = frame.f_code.co_name, _self_of(frame)
        if isinstance(owner, torch.optim.Optimizer):
            return (
                f"{type(owner).__name__} was built from parameters of a sharded model: pass it to "
                "zero.attach(optimizer)."
            )
        if _is_average(owner):
            return (
                f"{type(owner).__name__} keeps full copies of parameters. zero.ema(decay) keeps a sharded average; "
                "inside `with zero.gathered():` every other average works."
            )
        if code in SPLIT[1] and frame.f_globals.get("__name__") == SPLIT[0]:
            return split_backward(f"{code}()", f" of '{name}'")
        if code in SAVES:
            return "zero.save(path) writes a checkpoint of all ranks; `with zero.gathered():` gathers full parameters."
        if isinstance(owner, nn.Module):
            if code in CONVERSIONS:
                return "Move and convert the model before zs.shard(), and build the optimizer after that."
            methods += filter(None, [_path_of(owner, code, parameter, name)])
    plain = (
        "Use `with zero.gathered():` around the code that reads parameters (`writeback=True` to change them); every "
        "rank must enter it. Move, convert, resize or initialize the model before zs.shard()."
    )
    if torch.is_grad_enabled() and what not in COMPUTES:
        plain += (
            " To train through this code, run it in the model's forward, or keep parameters whole (stage=2, or "
            "parameters='replicated')."
        )
    if what in COPIES:
        return f"For an average of parameters, zero.ema(decay) keeps a sharded one. {plain}"
    module = name.rpartition(".")[0]
    if what in COMPUTES and module and not methods:
        return (
            f"To compute with it after the forward, call the module that holds it (`model.{module}(...)`), name a "
            f"method of it in zs.shard(settings=zs.Settings(forward_methods=('{module}.forward',))), or keep its unit "
            f"whole: zs.shard(parameters={{'{module}': 'replicated'}}), or stage=2. {plain}"
        )
    if methods:
        method = methods[-1]
        instead = f"name {methods[-2]!r} instead" if len(methods) > 1 else "run this part in the model's forward"
        inner = f" If '{method}' runs backward() itself, {instead}, or keep parameters whole (stage=2)."
        return (
            f"It was read in '{method}', called outside a forward of the model: name that in "
            f"zs.shard(settings=zs.Settings(forward_methods=({method!r},))), and it trains as `forward` does.{inner} "
            f"{plain}"
        )
    return plain


def split_backward(what: str, whose: str = "") -> str:
    """Return why a split backward is refused, and what to use instead.

    Args:
        what: the function or schedule of torch.
        whose: the parameter, as in " of 'head.weight'".
    """
    return (
        f"{what} of torch splits backwards: gradients of weights{whose} come from torch.autograd.grad and are assigned "
        "to weight.grad, so that ranks would not sum them. Nothing was changed. Use ScheduleGPipe, Schedule1F1B or "
        "ScheduleInterleaved1F1B, whose backwards are whole."
    )


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _self_of(frame: FrameType) -> Any:
    """Return the object whose method the frame runs; None for a plain function."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    method = inspect.unwrap(getattr(type(owner), code.co_name, None) or _self_of)
    return owner if getattr(method, "__code__", None) is code else None


def _is_average(owner: Any) -> bool:
    """Return whether an object keeps an average of parameters; such classes share only their naming."""
    return any(AVERAGE.search(kind.__name__) for kind in type(owner).__mro__)


def _path_of(module: nn.Module, method: str, parameter: torch.Tensor, name: str) -> str:
    """Return a method of the sharded model or of a module in it, such as "encoder.encode"; otherwise ""."""
    # What every module has, such as apply(), computes nothing of a model's own.
    if method in DISPATCH or method.startswith("__") or (method != "forward" and hasattr(nn.Module, method)):
        return ""
    for inner, one in module.named_parameters():
        if one is parameter and (name == inner or name.endswith(f".{inner}")):
            return f"{name[: len(name) - len(inner)]}{method}"
    return ""
