"""LAMB: Adam with the update of each tensor scaled by the norm of the tensor.

Owns the update. Slices are updated element-wise; `sums.py` computes the norms, once per step for all tensors.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
algorithm 2, with the identity for its function of the norm.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, final

import torch

from zeroshard.optim.adamw8bit import BATCH_NUMEL, BATCH_NUMEL_ELSEWHERE
from zeroshard.optim.arguments import check_betas, check_not_negative, loss_of
from zeroshard.optim.sums import SummingOptimizer

__all__ = ["Lamb"]

Tensor = torch.Tensor


@final
class Lamb(SummingOptimizer):
    """LAMB: AdamW's update of each tensor, scaled to the norm of the tensor.

    Norms are summed in fp64. All updates are kept until the norms are known: one number per element during a step.

    Args:
        params: parameters, or groups of them.
        lr: learning rate: the change of a tensor, relative to its norm.
        betas: decay of the moments.
        eps: added to the divisor.
        weight_decay: added to the update before the scaling.
        maximize: maximize the objective.

    ```python
    import torch
    import zeroshard as zs

    model = torch.nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    optimizer = zs.optim.Lamb(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert torch.isclose((model.weight - before).norm(), 0.1 * before.norm())
    ```
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("betas", betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: recomputes the loss.

        Returns:
            The result of `closure`.

        Collective: on a sharded model, `Sums.total` of two sums per parameter; every rank must call.
        """
        loss = loss_of(closure)
        if updates := [
            (parameter, self._update_of(parameter, group), float(group["lr"]))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]:
            pairs = [(_squares(self.sums.part(p, p.detach())), _squares(self.sums.part(p, u))) for p, u, _ in updates]
            norms = self.sums.total(torch.stack([square for pair in pairs for square in pair])).sqrt_().view(-1, 2)
            ratios = torch.where((norms > 0).all(1), norms[:, 0] / norms[:, 1], 1.0)
            for (parameter, update, lr), ratio in zip(updates, ratios, strict=True):
                parameter.sub_(update.mul_((ratio * lr).to(update)))
        return loss

    def _update_of(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return a parameter's update before the scaling, and update its moments."""
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse or parameter.is_complex():
            raise RuntimeError("Lamb supports neither sparse gradients nor complex parameters.")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        first, second = group["betas"]
        steps, sign = float(state["step"]), -1.0 if group["maximize"] else 1.0
        average = state["exp_avg"].mul_(first).add_(grad, alpha=sign * (1 - first))
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        divisor = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
        update: Tensor = (average / (1 - first**steps)).div_(divisor)
        return update.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else update


def _squares(values: Tensor) -> Tensor:
    """Return the sum of squares, 0-d fp64.

    torch casts what it sums to fp64 first, so these are parts. All stages have the same `values`, so the same parts.
    """
    parts = values.split(BATCH_NUMEL.get(values.device.type, BATCH_NUMEL_ELSEWHERE))
    squares: list[Tensor] = [torch.linalg.vector_norm(one, dtype=torch.float64).square_() for one in parts]
    return reduce(torch.add, squares)
