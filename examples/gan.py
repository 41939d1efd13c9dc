"""A GAN: two models, two optimizers

    torchrun --nproc-per-node 2 examples/gan.py

Generator and discriminator are sharded separately, each with its optimizer. The generator's loss runs through the
discriminator, whose gradients of that backward are dropped by `zero_grad()`, as in one process.
"""

import torch
from torch import Tensor, nn

import zeroshard as zs

bce = nn.functional.binary_cross_entropy_with_logits


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    layers = [nn.Sequential(nn.Linear(inputs if n == 0 else 64, 64), nn.LeakyReLU(0.2)) for n in range(3)]
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def real(key: int) -> Tensor:
    """Return points (64, 2) around (2, -1)."""
    return torch.randn(64, 2, generator=torch.Generator().manual_seed(key)) * 0.3 + torch.tensor([2.0, -1.0])


def main(steps: int = 100) -> tuple[float, float]:
    """Train; return how far the mean of generated points is from that of the data, before and after."""
    mesh = zs.init(seed=0)
    generator, discriminator = mlp(8, 2).to(mesh.device), mlp(2, 1).to(mesh.device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    zs.shard(generator, of_generator, stage=2)
    zs.shard(discriminator, of_discriminator, stage=2)
    ones, zeros = torch.ones(64, 1, device=mesh.device), torch.zeros(64, 1, device=mesh.device)

    def distance() -> float:
        with torch.no_grad():
            mean = generator(torch.randn(64, 8, device=mesh.device)).mean(0)
        return (zs.mean_across_ranks(mean).cpu() - torch.tensor([2.0, -1.0])).norm().item()

    before = distance()
    for step in range(steps):
        points = real(1000 * step + mesh.rank).to(mesh.device)
        made = generator(torch.randn(64, 8, device=mesh.device))
        loss = bce(discriminator(points), ones) + bce(discriminator(made.detach()), zeros)
        loss.backward()
        of_discriminator.step()
        of_discriminator.zero_grad()

        bce(discriminator(made), ones).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
    after = distance()
    if mesh.rank == 0:
        print(f"distance of the means: {before:.2f} before, {after:.2f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    main()
