"""The choice of an optimizer's kernels on a device, where the user made none.

Owns the choice and its description. It must not know the kernels' arguments; "Note: two guards" in `core/guard.py`
explains why fused kernels save a wait.
"""

import functools
from types import MappingProxyType

import torch

from zeroshard.core.guard import FUSED, Guard
from zeroshard.core.slot import slot_of
from zeroshard.core.undo import Undo
from zeroshard.torch_private import has_kernel

__all__ = ["choose_kernels", "describe_waits"]

Tensor = torch.Tensor

KERNELS = MappingProxyType(
    {"Adam": "_fused_adam_", "AdamW": "_fused_adamw_", "Adagrad": "_fused_adagrad_", "SGD": "_fused_sgd_"}
)
"""The operations behind `fused=True`; their support on a device differs between releases of torch."""


def choose_kernels(guard: Guard, optimizer: torch.optim.Optimizer, undo: Undo) -> list[str]:
    """Choose fused kernels on a device for groups without `fused` and `foreach`; return lines that describe the choice.

    A loaded state dict has the choice of the run that saved it, so the choice is repeated after loading.
    """
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    # All ranks make the same choice. On a CPU, offload leaves the kernels, and so the bits, as they are without it.
    buckets = {slot_of(master).bucket for master in masters}
    is_apart = any(not one.spec.row.states.is_on_device and one.device.type != "cpu" for one in buckets)
    if not (guard.is_awaited(optimizer) or is_apart) or type(optimizer) not in FUSED:
        return []
    chosen = [_choose(optimizer, group) for group in [optimizer.defaults | {"params": []}, *optimizer.param_groups]]
    if not any(chosen[1:]):
        return []
    # Groups added later start from the defaults.
    optimizer.defaults["fused"] = True if chosen[0] else optimizer.defaults["fused"]
    undo.keep(optimizer.register_load_state_dict_post_hook(_choose_again))
    for group, is_ours in zip([optimizer.defaults, *optimizer.param_groups], chosen, strict=True):
        if is_ours:
            undo.add(functools.partial(group.update, fused=None))
    kind = type(optimizer).__name__
    gain = "one pass over the values in host memory" if is_apart else "steps do not wait for the device"
    return [f"{kind}: fused=True was set, since fused and foreach were None; {gain}"]


def describe_waits(guard: Guard, optimizer: torch.optim.Optimizer) -> str:
    """Return a line about an optimizer whose steps make the host wait."""
    kind = type(optimizer).__name__
    is_known = type(optimizer) in FUSED
    if guard.updates_on_host:
        return (
            f"{kind}: before each update the host waits once for the gradients ({guard.waits:,} times so far), since "
            "the host updates values in its memory"
        )
    remedy = "fused=True without dampening would not wait" if is_known else "Adam, AdamW, Adagrad and SGD can be fused"
    return (
        f"{kind}: before each update the host waits once for the device, to check that gradients are finite "
        f"({guard.waits:,} times so far), since these kernels cannot skip a step; {remedy}"
    )


def _choose_again(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        _choose(optimizer, group)


def _choose(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    """Choose kernels for a group; return whether the group was changed."""
    if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
        return False
    tensors, kernel = group["params"], KERNELS[type(optimizer).__name__]
    assert isinstance(tensors, list)
    # With dampening the first step differs, and only torch's other kernels distinguish parameters in their first step.
    is_damped = group.get("momentum") and group["dampening"]
    devices = {p.device for p in tensors} | {slot_of(p).bucket.master(slot_of(p).index).device for p in tensors}
    if is_damped or not all(p.is_floating_point() for p in tensors) or not all(has_kernel(kernel, d) for d in devices):
        return False
    # Adagrad creates its states in its constructor, in the parameters' dtype then; fused kernels need the masters'.
    states = [
        (slot_of(tensor).bucket.dtypes.master, value)
        for tensor in tensors
        for value in optimizer.state.get(tensor, {}).values()
    ]
    if any(isinstance(value, Tensor) and value.ndim and value.dtype != dtype for dtype, value in states):
        return False
    group["fused"] = True
    for tensor in tensors:
        state = optimizer.state.get(tensor, {})
        if isinstance(step := state.get("step"), Tensor):
            # Fused kernels count steps on the device, the others on the host.
            state["step"] = step.to(tensor.device, torch.float32)
    return True
