"""Checks of arguments and calls of closures, shared by all optimizers here.

Owns no state. It must not know the optimizers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["check_betas", "check_not_negative", "loss_of"]


def check_not_negative(**values: float | torch.Tensor) -> None:
    """Raise ValueError with the name and value of each negative argument."""
    if wrong := [f"{name}={float(value)}" for name, value in values.items() if not float(value) >= 0.0]:
        raise ValueError(f"{', '.join(values)} must not be negative; got {', '.join(wrong)}.")


def check_betas(name: str, betas: Sequence[float]) -> None:
    """Raise ValueError if a decay of a mean is not in [0, 1)."""
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name} must be at least 0 and less than 1; got {betas}.")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a closure that computes the loss, with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
