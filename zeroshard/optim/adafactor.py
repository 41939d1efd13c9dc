"""Adafactor with an optional first moment.

Owns only the first moment: statistics, relative step, scale by the parameter and clipping are torch's. Read `whole.py`
(the needs of the update on a sharded model) first.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from zeroshard.optim.arguments import loss_of
from zeroshard.torch_private import adafactor_step

__all__ = ["Adafactor"]

Tensor = torch.Tensor


@final
class Adafactor(torch.optim.Adafactor):
    """Adafactor: for a matrix, second moments of rows and columns instead of elements.

    Without `beta1` it is torch.optim.Adafactor, bit for bit. The step is relative: the minimum of `lr` and 1 / sqrt(t),
    times the root mean square of the parameter, which counts as at least `eps[1]`; the update is clipped to a root mean
    square of `d`. A matrix of n rows and m columns has 4 (n + m) bytes of statistics, in fp32.

    On a sharded model, each tensor is updated on an owner that holds the full tensor, because these are sums over all
    of its elements.

    Args:
        params: parameters, or groups of them.
        lr: maximum relative step.
        beta2_decay: exponent of the decay of second moments, 1 - t ** beta2_decay.
        eps: minimum of second moments (None: from the dtype), and minimum root mean square of the parameter.
        d: maximum root mean square of an update, before the step.
        weight_decay: decoupled, times `lr`.
        beta1: decay of the first moment, which is a mean of updates; None for no first moment and no memory for it.
        foreach: update many tensors at once, without `beta1`.
        maximize: maximize the objective.

    Source: Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5 and section 8.

    ```python
    import torch
    import zeroshard as zs

    model = torch.nn.Linear(64, 32, bias=False)
    optimizer = zs.optim.Adafactor(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert state["row_var"].nbytes + state["col_var"].nbytes == 4 * (64 + 32)
    ```
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        if beta1 is not None and not 0.0 <= beta1 < 1.0:
            raise ValueError(f"beta1 must be None, or at least 0 and less than 1; got {beta1}.")
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, foreach=foreach, maximize=maximize)
        self.defaults["beta1"] = beta1
        for group in self.param_groups:
            group.setdefault("beta1", beta1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: recomputes the loss.

        Returns:
            The result of `closure`.
        """
        with_moment = [group for group in self.param_groups if group["beta1"] is not None]
        if not with_moment:
            return super().step(closure)  # type: ignore[no-untyped-call]
        loss = loss_of(closure)
        everything, self.param_groups = self.param_groups, [g for g in self.param_groups if g["beta1"] is None]
        try:
            super().step()  # type: ignore[no-untyped-call]
        finally:
            self.param_groups = everything
        for group in with_moment:
            self._step_with_moment(group)
        return loss

    def _step_with_moment(self, group: dict[str, Any]) -> None:
        """Update a group by the mean of its updates, each measured as torch's update of a zero parameter."""
        lists: list[list[Any]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        updated, (least_moment, least), lr, decay = lists[0], group["eps"], float(group["lr"]), group["weight_decay"]
        still = [torch.zeros_like(parameter) for parameter in updated]
        settings = {key: group[key] for key in ("d", "beta2_decay", "foreach", "maximize")}
        settings |= {"lr": lr, "weight_decay": 0.0, "eps1": least_moment, "eps2": 1.0}
        adafactor_step(still, *lists[1:], **settings)
        for parameter, update in zip(updated, still, strict=True):
            size = float(parameter.norm(2)) / max(parameter.numel(), 1) ** 0.5
            moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            moment.lerp_(update.mul_(max(least, size)), 1 - group["beta1"])
            parameter.mul_(1 - lr * decay).add_(moment)
