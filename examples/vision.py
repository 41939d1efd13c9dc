"""Image classification with batch norms

    torchrun --nproc-per-node 2 examples/vision.py

A small residual network on synthetic images. Statistics of batch norms are those of rank 0, as with
DistributedDataParallel; `zs.Settings(buffers="mean")` takes means over ranks. All ranks evaluate, because a forward at
stage 3 gathers parameters from all of them.
"""

import torch
from torch import Tensor, nn

import zeroshard as zs

CLASSES = 4


class Block(nn.Module):
    """Two convolutions with batch norms around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return features of the same shape."""
        return (images + self.layers(images)).relu()


def batch_of(key: int) -> tuple[Tensor, Tensor]:
    """Return images (16, 3, 12, 12) with a bright quarter, and which quarter it is (16,)."""
    generator = torch.Generator().manual_seed(key)
    labels = torch.randint(CLASSES, (16,), generator=generator)
    images = torch.randn(16, 3, 12, 12, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 6 * (label // 2) :, :][:, :6, 6 * (label % 2) :][..., :6] += 1.0
    return images, labels


def main(steps: int = 25) -> tuple[float, float]:
    """Train; return the held-out accuracy before and after."""
    mesh = zs.init(seed=0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 144, CLASSES))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block(16) for _ in range(3)), head).to(mesh.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    zs.shard(model, optimizer, stage=3)

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            images, labels = batch_of(10_000 + mesh.rank)
            hits = (model(images.to(mesh.device)).argmax(1).cpu() == labels).float().mean()
        model.train()
        return zs.mean_across_ranks(hits).item()

    before = accuracy()
    for step in range(steps):
        images, labels = batch_of(100 * step + mesh.rank)
        loss = nn.functional.cross_entropy(model(images.to(mesh.device)), labels.to(mesh.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = accuracy()
    if mesh.rank == 0:
        print(f"held-out accuracy {before:.2f} before, {after:.2f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    main()
