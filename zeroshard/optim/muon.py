"""Muon: orthogonalized momentum for matrices, AdamW for all other parameters.

Owns the assignment of parameters to both, and shapes that are not matrices. The update of a matrix is torch's. Read
`whole.py` (the needs of a matrix update on a sharded model) first.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon,
2024 (momentum, five steps of a quintic Newton-Schulz iteration, its coefficients); Liu et al., "Muon is Scalable for
LLM Training", arXiv 2502.16982 (decoupled weight decay, and the scale that matches the size of AdamW's updates).

Note: one learning rate
    An orthogonal matrix of m rows and n columns has elements of root mean square 1 / sqrt(max(m, n)), and AdamW's
    updates have about 0.2 to 0.4. Scaled by 0.2 * sqrt(max(m, n)), Muon's updates have the same size for every shape,
    so AdamW's learning rate, weight decay and schedule work for all groups.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim.adamw import adamw

from zeroshard.optim.arguments import check_betas, check_not_negative, loss_of
from zeroshard.optim.whole import Whole
from zeroshard.table.owners import newton_schulz_cost
from zeroshard.torch_private import muon_step

__all__ = ["Muon", "muon_groups"]

Tensor = torch.Tensor

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
HEADS: Final = frozenset(["lm_head", "head", "output", "embed_out", "classifier", "fc_out", "score"])
"""Names of output layers."""


def _is_stack(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2


@final
class Muon(torch.optim.Optimizer):
    """Muon for matrices of hidden layers, AdamW for all other parameters.

    AdamW updates groups with `"use_muon": False`, and parameters of fewer than two dimensions, which are moved to a
    separate group. Parameters of three dimensions are stacks of matrices, such as experts; in a group with
    `"is_stacked": False` they are flattened to one matrix each. Parameters of four dimensions (convolutions) are always
    flattened.

    On a sharded model, each matrix is updated on an owner that holds the full matrix; AdamW's groups are updated on
    slices.

    Args:
        params: parameters, or groups of them; `muon_groups(model)` makes the usual groups.
        lr: learning rate of all groups without one.
        weight_decay: decoupled, times `lr`.
        momentum: decay of the momentum.
        nesterov: use Nesterov momentum.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: the scale of an update by its shape: "match_rms_adamw" is 0.2 * sqrt(max(m, n)), for AdamW's
            learning rates; "original" is sqrt(max(1, m / n)), for Muon's learning rates, around 0.02.
        adamw_lr: learning rate of AdamW's groups without one; `lr` by default.
        adamw_betas, adamw_eps: parameters of AdamW.
        maximize: maximize the objective.

    ```python
    import torch
    import zeroshard as zs

    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 16))
    optimizer = zs.optim.Muon(zs.optim.muon_groups(model), lr=1e-3)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 4]
    ```
    """

    _zeroshard_whole = Whole(_is_stack, newton_schulz_cost)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        check_not_negative(
            lr=lr,
            adamw_lr=lr if adamw_lr is None else adamw_lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adamw_eps=adamw_eps,
        )
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn must be 'match_rms_adamw' or 'original'; got {adjust_lr_fn!r}.")
        check_betas("adamw_betas", adamw_betas)
        self._adamw_lr = lr if adamw_lr is None else adamw_lr
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "maximize": maximize,
            "use_muon": True,
            "is_stacked": True,
        }
        super().__init__(_separate(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; all its parameters are updated either by Muon or by AdamW.

        Args:
            param_group: the group, with `"use_muon": False` for AdamW.

        Raises:
            ValueError: parameters of fewer than two dimensions are in a group for Muon.
        """
        if not param_group.get("use_muon", True):
            param_group.setdefault("lr", self.__dict__.get("_adamw_lr", self.defaults["lr"]))
            param_group["whole"] = False
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if added["use_muon"] and (flat := next((p for p in added["params"] if p.ndim < 2), None)) is not None:
            self.param_groups.pop()
            raise ValueError(
                f"A parameter of shape {tuple(flat.shape)} is in a group for Muon, which takes matrices. Give it to a "
                'group with "use_muon": False.'
            )

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
            updated = [(parameter, grad) for parameter in group["params"] if (grad := parameter.grad) is not None]
            if any(grad.is_sparse or parameter.is_complex() for parameter, grad in updated):
                raise RuntimeError("Muon supports neither sparse gradients nor complex parameters.")
            if group["use_muon"]:
                self._step_matrices(group, updated)
            elif updated:
                self._step_others(group, updated)
        return loss

    def _step_matrices(self, group: dict[str, Any], updated: list[tuple[Tensor, Tensor]]) -> None:
        for parameter, grad in updated:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.contiguous_format)
            whole = parameter.detach().contiguous()
            signed = grad.neg() if group["maximize"] else grad
            tensors = (whole, signed.contiguous(), state["momentum_buffer"])
            muon_step(
                *(_matrices(tensor, is_stacked=group["is_stacked"]) for tensor in tensors),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                ns_coefficients=COEFFICIENTS,
                ns_steps=group["ns_steps"],
                eps=1e-7,
                adjust_lr_fn=group["adjust_lr_fn"],
                has_complex=False,
            )
            if not parameter.is_contiguous():
                parameter.copy_(whole)

    def _step_others(self, group: dict[str, Any], updated: list[tuple[Tensor, Tensor]]) -> None:
        for parameter, _ in updated:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter, _ in updated]
        adamw(
            [parameter for parameter, _ in updated],
            [grad for _, grad in updated],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def muon_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into a group for Muon and a group for AdamW, by the usual rule.

    AdamW gets parameters of fewer than two dimensions, the weights of embeddings, parameters tied to them, and the
    output layer: the last linear layer, and linear layers with usual names such as `lm_head`. Biases and norms have the
    weight decay of AdamW's group.

    Args:
        model: the model, before or after `zs.shard()`.
        options: further options of both groups, such as `weight_decay`.

    Returns:
        The group for Muon, and the group for AdamW, with their parameters in the model's order. A group may be empty.
    """
    others = {id(parameter) for parameter in _embeddings_and_heads(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for_muon = [p for p in trained if p.ndim >= 2 and id(p) not in others]
    chosen = {id(parameter) for parameter in for_muon}
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    return [{**options, "params": for_muon}, {**options, "params": rest, "use_muon": False}]


def _embeddings_and_heads(model: nn.Module) -> Iterator[Tensor]:
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight
    for place, (name, module) in enumerate(linears):
        if place == len(linears) - 1 or name.rpartition(".")[2] in HEADS:
            yield module.weight


def _separate(params: Iterable[Any]) -> list[Any]:
    """Return groups for one algorithm each: parameters of fewer than two dimensions are split off Muon's groups."""
    given = list(params)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    found: list[dict[str, Any]] = []
    for group in groups:
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not group.get("use_muon", True):
            found.append({**group, "params": entries})
            continue
        flat = [entry for entry in entries if _tensor_of(entry).ndim < 2]
        if len(flat) < len(entries) or not entries:
            found.append({**group, "params": [entry for entry in entries if _tensor_of(entry).ndim >= 2]})
        if flat:
            found.append({**group, "params": flat, "use_muon": False})
    return found


def _tensor_of(entry: Any) -> Any:
    """Return the parameter of an entry, which may be a (name, parameter) pair."""
    return entry[1] if isinstance(entry, tuple) else entry


def _matrices(tensor: Tensor, *, is_stacked: bool) -> list[Tensor]:
    """Return a contiguous tensor as views of its matrices."""
    if tensor.ndim == 2:
        return [tensor]
    return [*tensor.unbind()] if tensor.ndim == 3 and is_stacked else [tensor.flatten(1)]
