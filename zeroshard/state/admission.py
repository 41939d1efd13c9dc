"""Which optimizers may be cut into slices, and what they keep.

Owns the list of torch's element-wise optimizers and the trial of any other. Nothing here communicates.
"""

import inspect
from collections.abc import Sequence

import torch

from zeroshard.optim.packed import PackingOptimizer, parts_of

__all__ = ["ELEMENTWISE", "admit", "state_cost"]

Tensor = torch.Tensor

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]
)
"""Classes of torch.optim whose update of an element depends on that element alone."""
SLICED = frozenset(["AdamW8bit", "Lamb", "Lion"])
"""Classes of zeroshard.optim that update slices: as they would any tensor, or with sums that ranks add up."""


def admit(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> None:
    """Raise unless the optimizer's update may be cut into slices.

    Torch's own element-wise optimizers are known. Another is tried: three steps on a small matrix, whole and in slices,
    must agree bit for bit.

    Raises:
        ValueError: the update is not element-wise, or cannot be tried.
    """
    cls = type(optimizer)
    known = ELEMENTWISE if cls.__module__.startswith("torch.optim") else SLICED
    is_ours = cls.__module__.startswith(("torch.optim", "zeroshard.optim"))
    if elementwise or (is_ours and cls.__name__ in known):
        return
    remedy = (
        "Use one of "
        + ", ".join(sorted(ELEMENTWISE))
        + ", keep it with stage=0, or pass settings=zs.Settings(elementwise=True) if its update of an "
        "element depends on that element alone."
    )
    if elementwise is False:
        raise ValueError(
            f"{cls.__name__} was declared not element-wise (Settings(elementwise=False)), so it cannot be sharded. "
            f"{remedy}"
        )
    try:
        whole, parts = _probe(optimizer, (6, 4), [24]), _probe(optimizer, None, [7, 0, 12, 5])
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} is not known to be element-wise, and trying it on slices failed with "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error
    if not torch.equal(whole, parts):
        count = int((whole != parts).sum())
        raise ValueError(
            f"{cls.__name__} is not element-wise: after three steps {count} of {whole.numel()} elements differ between "
            f"a whole matrix and slices of it, so sharding would change the training. {remedy}"
        )


def _probe(optimizer: torch.optim.Optimizer, shape: tuple[int, ...] | None, numels: Sequence[int]) -> Tensor:
    """Run three steps of a fresh optimizer of the same class on 24 elements, cut into `numels`; return the elements."""
    values = torch.linspace(-1.0, 2.0, 24)
    parts = [
        torch.nn.Parameter((part.reshape(shape) if shape else part).clone()) for part in values.split(list(numels))
    ]
    fresh = _rebuild(optimizer, parts)
    for step in range(3):
        grads = torch.sin(torch.arange(24.0) * (step + 1)).split(list(numels))
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.reshape(part.shape).clone()
        fresh.step()
    return torch.cat([part.detach().flatten() for part in parts])


def state_cost(optimizer: torch.optim.Optimizer) -> tuple[int, ...] | None:
    """Return what an optimizer keeps, found by a step, or None: the fields of `Updates` behind its parameters.

    These are state elements for each element and bytes of counters for each parameter, and, of states that lie packed,
    bytes for each element, bytes for each block and elements of a block.
    """
    part = torch.nn.Parameter(torch.zeros(3))
    try:
        fresh = _rebuild(optimizer, [part])
        part.grad = torch.ones(3)
        fresh.step()
    except Exception:  # a prediction is not worth an error: the caller says that it has none
        return None
    parts = parts_of(fresh, state := fresh.state[part])
    values = [value for key, value in state.items() if isinstance(value, Tensor) and key not in parts]
    numbers, counter_bytes = sum(v.numel() == 3 for v in values), sum(v.nbytes for v in values if v.numel() != 3)
    if not isinstance(fresh, PackingOptimizer):
        return numbers, counter_bytes
    packed = fresh.packed_bytes
    return numbers, counter_bytes, packed.element_bytes, packed.block_bytes, packed.block_numel


def _rebuild(optimizer: torch.optim.Optimizer, parts: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and hyper-parameters on other parameters."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    # Some classes put more into their defaults than their constructor takes (AdamW: decoupled_weight_decay).
    defaults = {key: value for key, value in optimizer.defaults.items() if takes_all or key in accepted}
    return type(optimizer)(parts, **defaults)
