"""Lion: the sign of an interpolated momentum.

Owns the update, which is element-wise: slices of a sharded model need no communication.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, program 1.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from zeroshard.optim.arguments import check_betas, check_not_negative, loss_of

__all__ = ["Lion"]

Tensor = torch.Tensor


@final
class Lion(torch.optim.Optimizer):
    """Lion: each element moves by the learning rate, in the direction of the sign of a mean of its gradients.

    It keeps one number per element. Its updates are larger than AdamW's; usually its learning rate is AdamW's divided
    by 3 to 10, and its weight decay is multiplied by the same factor.

    Args:
        params: parameters, or groups of them.
        lr: learning rate: the change of each element.
        betas: weight of the momentum in an update, and decay of the momentum.
        weight_decay: decoupled, times `lr`.
        maximize: maximize the objective.

    ```python
    import torch
    import zeroshard as zs

    model = torch.nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = zs.optim.Lion(model.parameters(), lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)
    ```
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas("betas", betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: recomputes the loss.

        Returns:
            The result of `closure`.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, (ahead, kept) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse or parameter.is_complex():
                    raise RuntimeError("Lion supports neither sparse gradients nor complex parameters.")
                grad = parameter.grad.neg() if group["maximize"] else parameter.grad
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                moment = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                mean = (moment * ahead).add_(grad, alpha=1 - ahead)
                # The sign of NaN is 0, which would freeze the element permanently and hide the cause.
                parameter.add_(mean.sign().add_(mean, alpha=0.0), alpha=-lr)
                moment.mul_(kept).add_(grad, alpha=1 - kept)
        return loss
