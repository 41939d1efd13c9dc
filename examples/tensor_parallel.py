"""Tensor parallelism: ranks that split each layer

    torchrun --nproc-per-node 4 examples/tensor_parallel.py

torch's `parallelize_module` splits layers over the axis "tensor"; `zs.shard` shards what each rank holds of them over
the axis "shard". Ranks along "tensor" read the same batch.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs


class Block(nn.Module):
    """An MLP with a shortcut: `up` is split by columns, `down` by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        return x + self.down(self.up(self.norm(x)).relu())


def batch_of(step: int, part: int, parts: int) -> Tensor:
    """Return a part of the batch (8, 32) of a step."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]


def main(tensor: int = 2, steps: int = 5) -> list[float]:
    """Train; return the mean losses."""
    ranks = zs.init()
    parts = ranks.world_size // tensor
    axes = init_device_mesh(ranks.device.type, (parts, tensor), mesh_dim_names=("shard", "tensor"))
    part = axes.get_local_rank("shard")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).to(ranks.device)
    for block in model:
        parallelize_module(block, axes["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zs.shard(model, optimizer, stage=3, mesh=axes)
    losses = []
    for step in range(steps):
        batch = batch_of(step, part, parts).to(ranks.device)
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zs.mean_across_ranks(loss.detach(), zero.mesh).item())
    if ranks.rank == 0:
        print(f"{parts} x {tensor} ranks:", " ".join(f"{loss:.5f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
