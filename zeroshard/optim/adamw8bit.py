"""AdamW with two moments of one byte per element each.

Owns the update. Read `blocks8.py` (the codes) and `packed.py` (the conversion of moments) first.

Note: what is quantized
    Between steps, the first moment and the square root of the second moment are codes. A step decodes them, updates
    them in fp32, computes the update, and encodes them again. The square root is the divisor of an update, so its
    relative error matters; and it spans half the decades of its square, so small moments do not meet a zero divisor.
Note: blocks and batches
    The blocks of a parameter start at its first element, or at the first element of this rank's slice; the last block
    may be short. Parameters are updated in batches of whole blocks: several small parameters together, a large
    parameter in several batches. The result of a block does not depend on the batch.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import torch

from zeroshard.optim.arguments import check_betas, check_not_negative, loss_of
from zeroshard.optim.blocks8 import BLOCK_NUMEL, block_count, code_of, decode, encode, from_rows, to_rows
from zeroshard.optim.packed import Packed, PackedBytes, PackingOptimizer, State

__all__ = ["AdamW8bit"]

Tensor = torch.Tensor

BATCH_NUMEL: Final = MappingProxyType({"cpu": 1 << 16})
"""Number of elements to update at once: few enough for a cache."""
BATCH_NUMEL_ELSEWHERE: Final = 1 << 23
"""A batch takes 38 bytes an element, 304 MiB; a kernel that moves 64 MiB still takes longer than its launch."""
LEAST: Final = 2.0**-38
"""If all moments or roots of a block are smaller, they become zero. The square of the smallest code is still normal."""

MOMENTS: Final = MappingProxyType({"exp_avg": True, "exp_avg_sq": False})
"""The moments, and whether they are signed. Codes of the second moment are of its square root."""


class _Entry(NamedTuple):
    """One parameter in an update: its flat elements, those of its gradient, and its states."""

    values: Tensor
    grad: Tensor
    state: dict[str, Any]


class _Piece(NamedTuple):
    """Blocks of one entry: elements [start, stop)."""

    entry: _Entry
    start: int
    stop: int

    def blocks(self) -> slice:
        """Return the indices of the blocks in the entry."""
        return slice(self.start // BLOCK_NUMEL, block_count(self.stop))


@final
class AdamW8bit(PackingOptimizer):
    """AdamW with 8-bit moments, in blocks of 256 elements with one fp32 scale each: 2.03 bytes per parameter.

    States are `exp_avg` and `exp_avg_sq`, uint8 with the parameter's shape, and their scales, `exp_avg_scales` and
    `exp_avg_sq_scales`. Floating-point moments, as in AdamW, are also accepted, and packed at the next step.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the divisor.
        weight_decay: decoupled, times `lr`.
        maximize: maximize the objective.

    Source: Dettmers et al., arXiv 2110.02861; Loshchilov and Hutter, arXiv 1711.05101.

    ```python
    import torch
    import zeroshard as zs

    model = torch.nn.Linear(64, 64)
    optimizer = zs.optim.AdamW8bit(model.parameters(), lr=1e-3)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.uint8
    ```
    """

    packed_bytes = PackedBytes(element_bytes=2, block_numel=BLOCK_NUMEL, block_bytes=8)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            together: dict[tuple[float, torch.device], list[_Entry]] = {}
            scattered = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entry, steps = self._enter(parameter)
                    together.setdefault((steps, parameter.device), []).append(entry)
                    if not parameter.is_contiguous():
                        scattered.append((parameter, entry.values))
            for (steps, device), entries in together.items():
                for batch in _batches(entries, BATCH_NUMEL.get(device.type, BATCH_NUMEL_ELSEWHERE)):
                    _update(batch, steps, **_hyperparameters(group))
            for parameter, values in scattered:
                parameter.copy_(values.view(parameter.shape))
        return loss

    def _enter(self, parameter: Tensor) -> tuple[_Entry, float]:
        """Return the entry of a parameter, and its number of steps including this step."""
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse or parameter.is_complex():
            raise RuntimeError("AdamW8bit supports neither sparse gradients nor complex parameters.")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for key, is_signed in MOMENTS.items():
                zero = code_of(is_signed=is_signed, device=parameter.device).zero
                state[key] = torch.full(parameter.shape, zero, dtype=torch.uint8, device=parameter.device)
                scales = torch.zeros(block_count(parameter.numel()), dtype=torch.float32, device=parameter.device)
                state[f"{key}_scales"] = scales
        elif self.state[parameter]["exp_avg"].is_floating_point():
            state.update(self.pack_state(state))
        state["step"] += 1
        return _Entry(parameter.detach().reshape(-1), grad.detach().reshape(-1), state), float(state["step"])

    def packed_states(self, state: State) -> dict[str, Packed]:
        """See `PackingOptimizer`."""
        found = {}
        for key in MOMENTS:
            codes = state.get(key)
            if isinstance(codes, Tensor) and codes.dtype == torch.uint8:
                parts = (key, f"{key}_scales")
                found[key] = Packed(parts, codes.shape, torch.float32, partial(_unpack, state, key))
        return found

    def pack_state(self, state: State) -> dict[str, Any]:
        """See `PackingOptimizer`."""
        packed = dict(state)
        for key, is_signed in MOMENTS.items():
            value = state.get(key)
            if isinstance(value, Tensor) and value.is_floating_point():
                rows = to_rows(value.detach().float().reshape(-1))
                codes, scales = encode(rows if is_signed else rows.sqrt(), is_signed=is_signed, least=LEAST)
                packed |= {key: from_rows(codes, value.shape), f"{key}_scales": scales}
        return packed


def _unpack(state: State, key: str) -> Tensor:
    """Return a moment, fp32, with the shape of its codes."""
    codes, is_signed = state[key], MOMENTS[key]
    rows = decode(to_rows(codes.reshape(-1)), state[f"{key}_scales"], is_signed=is_signed)
    return from_rows(rows if is_signed else rows.square_(), codes.shape)


def _batches(entries: Iterable[_Entry], most_numel: int) -> Iterator[list[_Piece]]:
    """Yield all blocks of the entries, in batches of at most `most_numel` elements."""
    batch: list[_Piece] = []
    numel = 0
    for entry in entries:
        total = entry.values.numel()
        for start in range(0, total, most_numel):
            piece = _Piece(entry, start, min(start + most_numel, total))
            held = BLOCK_NUMEL * block_count(piece.stop - piece.start)
            if batch and numel + held > most_numel:
                yield batch
                batch, numel = [], 0
            batch.append(piece)
            numel += held
    if batch:
        yield batch


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]),
        "betas": tuple(float(beta) for beta in group["betas"]),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "sign": -1.0 if group["maximize"] else 1.0,
    }


def _update(
    batch: list[_Piece],
    steps: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    sign: float,
) -> None:
    """Update a batch of blocks, with their states."""
    device = batch[0].entry.values.device
    values = _join([entry.values[a:b].float() for entry, a, b in batch])
    grad = _join([entry.grad[a:b].float() for entry, a, b in batch])
    moments = {}
    for key, is_signed in MOMENTS.items():
        zero = code_of(is_signed=is_signed, device=device).zero
        codes = _join([entry.state[key].view(-1)[a:b] for entry, a, b in batch], zero)
        scales = torch.cat([piece.entry.state[f"{key}_scales"][piece.blocks()] for piece in batch])
        moments[key] = decode(codes, scales, is_signed=is_signed)
    average = moments["exp_avg"].mul_(betas[0]).add_(grad, alpha=sign * (1 - betas[0]))
    root = moments["exp_avg_sq"].square_().mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1]).sqrt_()
    divisor = (root / (1 - betas[1] ** steps) ** 0.5).add_(eps)
    values = (values * (1 - lr * weight_decay)).addcdiv_(average, divisor, value=-lr / (1 - betas[0] ** steps))
    _split(values, [entry.values[a:b] for entry, a, b in batch])
    for key, moment in (("exp_avg", average), ("exp_avg_sq", root)):
        codes, scales = encode(moment, is_signed=MOMENTS[key], least=LEAST)
        _split(codes, [entry.state[key].view(-1)[a:b] for entry, a, b in batch])
        first = 0
        for piece in batch:
            target = piece.entry.state[f"{key}_scales"][piece.blocks()]
            target.copy_(scales[first : first + len(target)])
            first += len(target)


def _join(parts: list[Tensor], fill: int = 0) -> Tensor:
    """Return the blocks of all parts, (blocks, 256); a view if there is only one part and it allows a view."""
    rows = [to_rows(part, fill) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _split(rows: Tensor, targets: list[Tensor]) -> None:
    """Copy blocks back to the parts from which they were joined."""
    flat, first = rows.view(-1), 0
    for target in targets:
        target.copy_(flat[first : first + target.numel()])
        first += BLOCK_NUMEL * block_count(target.numel())
