"""ZeRO stages 1 to 3 in plain torch.distributed: what zeroshard does, without what makes it fast and safe.

    torchrun --nproc-per-node 2 examples/zero_from_scratch.py

Read `Unit` from top to bottom: it holds the whole method. The parameters of a unit, here a block of the model, lie in
one flat tensor, of which each rank owns one shard. The trained parameters equal those of `zs.shard` bit for bit on gloo
(tests/examples/test_zero_from_scratch.py). Left out: overlap, accumulation, mixed precision, clipping, checks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 16  # elements: matrix kernels may round differently at other addresses than multiples of 64 bytes


class Unit:
    """The parameters of one module: each rank keeps a shard of what the stage divides.

    | stage | optimizer states | gradients | parameters |
    |-------|------------------|-----------|------------|
    | 1     | shard            | whole     | whole      |
    | 2     | shard            | shard     | whole      |
    | 3     | shard            | shard     | shard      |
    """

    def __init__(self, module: nn.Module, stage: int) -> None:
        self.stage, self.world = stage, dist.get_world_size()
        self.parameters = list(module.parameters())
        self.offsets, numel = [], 0
        for parameter in self.parameters:
            self.offsets.append(numel)
            numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.shard_numel = -(-numel // self.world)  # the last shard is padded
        self.full = torch.zeros(self.shard_numel * self.world)
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            view = self.full[offset : offset + parameter.numel()].view_as(parameter)
            parameter.data = view.copy_(parameter.data)  # the same parameter, now a view into the flat tensor
        own = self.full.chunk(self.world)[dist.get_rank()]
        # At stage 3 the flat tensor is released between uses, so the shard is a copy.
        self.shard = nn.Parameter(own.clone() if stage == 3 else own)
        self.missing = len(self.parameters)  # gradients that this backward has not computed yet
        if stage >= 2:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self.count_gradient)
        if stage == 3:
            self.release()
            module.register_forward_pre_hook(lambda *_: self.gather())
            module.register_forward_hook(self.leave_forward)

    def gather(self) -> None:
        """Make the parameters whole: each rank sends its shard to all others (an all-gather)."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        dist.all_gather([*self.full.chunk(self.world)], self.shard.detach())

    def leave_forward(self, _: nn.Module, __: object, output: Tensor) -> None:
        """Release the parameters, and gather them again when the gradient of the output is there."""
        self.release()
        if output.requires_grad:
            output.register_hook(lambda _: self.gather())

    def release(self) -> None:
        """Free the memory of whole parameters. Tensors that autograd saved are views of it, and get it back."""
        self.full.untyped_storage().resize_(0)

    def count_gradient(self, _: Tensor) -> None:
        """Reduce the gradients as soon as the last one is there, while earlier layers still compute theirs."""
        self.missing -= 1
        if self.missing == 0:
            self.reduce()

    def reduce(self) -> None:
        """Leave the mean over ranks of this rank's shard in `shard.grad`, and free the whole gradients.

        A reduce-scatter, written as an exchange and a sum in the order of ranks, which fixes the rounding.
        """
        flat = torch.zeros_like(self.full)
        for parameter, offset in zip(self.parameters, self.offsets, strict=True):
            flat[offset : offset + parameter.numel()] = parameter.grad.flatten()
            parameter.grad = None
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)  # chunk r of what is received: rank r's gradient of this rank's shard
        first, *others = received.chunk(self.world)
        for other in others:
            first = first + other
        self.shard.grad = first * (1 / self.world)
        self.missing = len(self.parameters)
        if self.stage == 3:
            self.release()

    def publish(self) -> None:
        """After an update, make parameters that ranks keep whole equal again."""
        dist.all_gather([*self.full.chunk(self.world)], self.shard.detach().clone())


class Zero:
    """The units of a model, one for each child, and its optimizer."""

    def __init__(self, model: nn.Sequential, stage: int, lr: float) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        self.stage = stage
        self.units = [Unit(block, stage) for block in model]
        self.optimizer = torch.optim.AdamW([unit.shard for unit in self.units], lr=lr)

    def step(self) -> None:
        """Update this rank's shards. At stage 1 gradients were whole until now."""
        for unit in self.units if self.stage == 1 else ():
            unit.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units if self.stage < 3 else ():
            unit.publish()

    def whole(self) -> list[Tensor]:
        """Return copies of all parameters, whole, on every rank, after training."""
        for unit in self.units if self.stage == 3 else ():
            unit.gather()
        return [parameter.detach().clone() for unit in self.units for parameter in unit.parameters]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(24, 4, 50, dropout=0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Linear(7, 24), *blocks, nn.Linear(24, 7))


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(stage: int, steps: int) -> tuple[list[float], list[Tensor]]:
    model, losses = build(), []
    zero = Zero(model, stage, lr=1e-2)
    for step in range(steps):
        batch = batch_of(step, dist.get_rank())
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses, zero.whole()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for chosen in (1, 2, 3):
        curve, _ = train(chosen, steps=5)
        if dist.get_rank() == 0:
            print(f"stage {chosen}: losses of rank 0", " ".join(f"{loss:.6f}" for loss in curve))
    dist.destroy_process_group()
