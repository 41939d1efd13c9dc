"""Optimizers and schedules of learning rates that DeepSpeed's JSON names.

Owns their classes, defaults and formulas, which are DeepSpeed's. `deepspeed.py` reads the sections. Needs no DeepSpeed.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR

import zeroshard as zs

__all__ = ["optimizer_of", "scheduler_of"]

KERNELS: Final = frozenset("torch_adam adam_w_mode fp32_optimizer_states set_grad_none cuda_aware".split())
"""Parameters of DeepSpeed's optimizers that choose kernels."""
SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "WarmupLR": MappingProxyType(
            {"warmup_num_steps": 1000, "warmup_type": "log", "warmup_min_lr": 0.0, "warmup_max_lr": None}
        ),
        "WarmupDecayLR": MappingProxyType(
            {
                "warmup_num_steps": 1000, "warmup_type": "log", "warmup_min_lr": 0.0, "warmup_max_lr": 0.001,
                "total_num_steps": None,
            }
        ),
        "WarmupCosineLR": MappingProxyType(
            {
                "warmup_num_steps": 1000, "warmup_type": "log", "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001,
                "total_num_steps": None,
            }
        ),
    }
)  # fmt: skip
"""Parameters of DeepSpeed's schedules with their defaults; a rate of None is the optimizer's."""
AUTO: Final = "'auto': write a value, or pass args=TrainingArguments(...), which gives it."


def optimizer_of(name: str, asked: Mapping[str, Any]) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Return what makes an optimizer of parameters.

    Args:
        name, asked: "type" and "params" of the section.

    Raises:
        ValueError: the optimizer has no equal, or a parameter is unknown.
    """
    given = dict(asked)
    if not given.pop("bias_correction", True):
        raise ValueError("optimizer.params: bias_correction is false; torch's Adam corrects its bias.")
    kind, options = name.lower(), {one: value for one, value in given.items() if one not in KERNELS}
    if kind in ("adam", "adamw"):
        is_decoupled = kind == "adamw" or given.get("adam_w_mode", True)
        cls: Any = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        if not given.get("torch_adam", False):
            options = {"weight_decay": 0.0, **options}  # the default of DeepSpeed's Adam, whichever its decay
    elif kind == "lion":
        cls, options = zs.optim.Lion, {"lr": 1e-3, "betas": (0.9, 0.999), **options}  # DeepSpeed's defaults
    elif kind in ("lamb", "muon", "muadam", "muadamw", "musgd") or "bit" in kind:
        raise ValueError(
            f"optimizer.type: {name!r} of DeepSpeed has no equal here (zs.optim.Lamb and zs.optim.Muon have other "
            "formulas); make the optimizer yourself, and leave the section out."
        )
    else:
        cls = {one.lower(): value for one, value in vars(torch.optim).items() if inspect.isclass(value)}.get(kind)
    if cls is None or "params" not in (taken := inspect.signature(cls).parameters):
        raise ValueError(f"optimizer.type: {name!r} is not an optimizer of DeepSpeed or torch.")
    if unknown := sorted(options.keys() - taken.keys()):
        raise ValueError(f"optimizer.params: {cls.__name__} does not take {', '.join(unknown)}.")
    if "auto" in options.values():
        raise ValueError(f"optimizer.params: {AUTO}")
    return lambda parameters: cls(parameters, **options)


def scheduler_of(name: str, given: Mapping[str, Any]) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return what makes a schedule of an optimizer: the rates that DeepSpeed's has after as many steps.

    Args:
        name, given: "type" and "params" of the section.

    Raises:
        ValueError: the schedule is another one, or a parameter is unknown.
    """
    if name not in SCHEDULES:
        raise ValueError(f"scheduler.type: {name!r}; use a scheduler of torch.optim.lr_scheduler, and leave this out.")
    params = {**SCHEDULES[name], **given}
    if params.pop("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params: last_batch_iteration must be -1; resume with the schedule's state_dict.")
    if unknown := sorted(params.keys() - SCHEDULES[name].keys()):
        raise ValueError(f"scheduler.params: {name} does not take {', '.join(unknown)}.")
    if "auto" in params.values():
        raise ValueError(f"scheduler.params: {AUTO}")
    if name != "WarmupLR" and params["total_num_steps"] is None:
        raise ValueError(f"scheduler.params: {name} needs total_num_steps.")
    for key, value in params.items():
        _check(key, value)
    # releases before 0.19.6 take a warm-up of 0 steps, as 2
    warmup, total = max(2, params["warmup_num_steps"]), params.get("total_num_steps", 0)

    def risen(step: int) -> float:
        return step / warmup if params["warmup_type"] == "linear" else math.log(step + 1) / math.log(warmup)

    def gamma(step: int) -> float:
        if step < warmup:
            return risen(step)
        return 1.0 if name == "WarmupLR" else max(0.0, (total - step) / max(1.0, total - warmup))

    def ratio(calls: int) -> float:
        step, least = calls - 1, params["warmup_min_ratio"]
        if step < 0:
            return 0.0
        if step < warmup:
            return float(least + risen(step) * (1.0 - least))
        lowest, part = params["cos_min_ratio"], min(1.0, (step - warmup + 1) / max(1, total - warmup))
        return float(max(0.0, lowest + (1.0 - lowest) * (1 + math.cos(math.pi * part)) / 2))

    def make(optimizer: torch.optim.Optimizer) -> LambdaLR:
        if name == "WarmupCosineLR":
            return LambdaLR(optimizer, ratio)

        def factor_of(least: float, most: float, base: float) -> Callable[[int], float]:
            return lambda calls: (least + (most - least) * gamma(calls - 1) if calls else least) / base

        groups, factors = optimizer.param_groups, []
        ends = [_spread(key, params[key], len(groups)) for key in ("warmup_min_lr", "warmup_max_lr")]
        for group, least, most in zip(groups, *ends, strict=True):
            most = group["lr"] if most is None else most
            group["lr"] = group["initial_lr"] = most or 1.0  # LambdaLR multiplies it
            factors.append(factor_of(least, most, group["lr"]))
        return LambdaLR(optimizer, factors)

    return make


def _check(key: str, value: Any) -> None:
    """Raise unless a value is one of its parameter."""
    if key == "warmup_type" or (key == "warmup_max_lr" and value is None):
        return
    kind, is_rate = int if key == "warmup_num_steps" else int | float, key.endswith("_lr")
    values = value if is_rate and isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, kind) and type(one) is not bool and one >= 0 for one in values):
        wanted = ("an integer" if kind is int else "a number") + (" (or a list, one for each group)" if is_rate else "")
        raise ValueError(f"scheduler.params: {key} must be {wanted} of at least 0; got {value!r}.")


def _spread(key: str, value: Any, count: int) -> list[Any]:
    """Return the values of the groups of an optimizer."""
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"scheduler.params: {key} has {len(values)} rates, and the optimizer {count} groups.")
    return values
