"""Early stopping, and the best checkpoint

    torchrun --nproc-per-node 2 examples/early_stopping.py

Ranks must leave a loop together. Here the held-out loss is a mean over ranks, equal on all of them, so each rank may
decide by itself. Where a decision depends on one rank's data, clock or signals, `zero.agree(...)` makes it common.
"""

import torch
from torch import nn

import zeroshard as zs

PATIENCE = 3


def data_of(key: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (12, 16), and the target (12, 1): a noisy function of the first input."""
    generator = torch.Generator().manual_seed(key)
    inputs = torch.randn(12, 16, generator=generator)
    return inputs, inputs[:, :1].sin() + noise * torch.randn(12, 1, generator=generator)


def main(folder: str, most_epochs: int = 60) -> tuple[int, float, float]:
    """Train until the held-out loss has not improved for some epochs; return epochs, best loss, loss after loading."""
    mesh = zs.init(seed=0)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).to(
        mesh.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zs.shard(model, optimizer, stage=3)
    train, held_out = data_of(mesh.rank, noise=0.5), data_of(100 + mesh.rank, noise=0.0)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, target = (tensor.to(mesh.device) for tensor in batch)
        return (model(inputs) - target).square().mean()

    def held_out_loss() -> float:
        with torch.no_grad():
            return zs.mean_across_ranks(loss_of(held_out)).item()

    best, best_epoch, epoch = float("inf"), 0, 0
    for epoch in range(most_epochs):
        loss_of(train).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (loss := held_out_loss()) < best:
            best, best_epoch = loss, epoch
            zero.save(f"{folder}/step-{epoch}", extra={"loss": loss}, keep=2)
        elif epoch - best_epoch >= PATIENCE:
            break
    zero.load(zs.latest(folder))  # only improvements were saved, so the newest checkpoint is the best
    if mesh.rank == 0:
        print(f"stopped after {epoch + 1} epochs; the best is epoch {best_epoch}, held-out loss {best:.4f}")
    return epoch + 1, best, held_out_loss()


if __name__ == "__main__":
    main("runs/early-stopping")
