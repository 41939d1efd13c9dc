"""What the constructors and steps of all optimizers here take, checked and called in one way.

Owns no state. Must not know which optimizer asks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["check_betas", "check_not_negative", "loss_of"]


def check_not_negative(**values: float | torch.Tensor) -> None:
    """Raise ValueError that names each argument below zero, and its value."""
    if wrong := [f"{name}={float(value)}" for name, value in values.items() if not float(value) >= 0.0]:
        raise ValueError(f"{', '.join(values)} must not be negative; got {', '.join(wrong)}.")


def check_betas(name: str, betas: Sequence[float]) -> None:
    """Raise ValueError where a decay of a mean is none."""
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name} must be at least 0 and less than 1; got {betas}.")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure that computes the loss returned, with gradients recorded; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
