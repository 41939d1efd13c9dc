"""Hybrid sharding: copies of the sharded state

    torchrun --nproc-per-node 4 examples/hybrid.py

`replicas=2` keeps two copies of the sharded state, each over half of the ranks, best the ranks of one host:
gathers then stay inside a host, and only sums of gradient shards cross between hosts. A rank holds as much as with half
of the ranks.
"""

import torch
from torch import nn

import zeroshard as zs


def build() -> nn.Sequential:
    """Return a model of equal blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))


def main(copies: int = 2, steps: int = 5) -> tuple[list[float], int]:
    """Train; return the mean losses, and the bytes of optimizer states that this rank holds."""
    ranks = zs.init(seed=0)
    model = build().to(ranks.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zs.shard(model, optimizer, stage=3, replicas=copies)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + ranks.rank)  # every rank has data of its own
        batch = torch.randn(8, 64, generator=generator).to(ranks.device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zs.mean_across_ranks(loss.detach()).item())
    states_bytes = int(zero.memory().resident_bytes["states"])
    if ranks.rank == 0:
        print(f"{copies} copies on {ranks.world_size} ranks: {states_bytes:,} bytes of states on a rank")
    return losses, states_bytes


if __name__ == "__main__":
    main()
