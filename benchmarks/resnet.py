"""ResNet-18 in plain torch, as in the paper, for measurements of convolutional models.

Owns the model alone. Source: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

import itertools
from typing import cast, final

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet18"]


@final
class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or entering != width:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, channel, height, width)."""
        inner = self.relu(self.norm1(self.conv1(x)))
        return cast(Tensor, self.relu(self.norm2(self.conv2(inner)) + self.shortcut(x)))


@final
class ResNet18(nn.Module):
    """Eight blocks behind a convolution and a max pool.

    Args:
        classes: how many to tell apart.
        width: channels of the first blocks; 64 in the paper.
    """

    def __init__(self, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [width * times for times in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
        self.blocks = nn.ModuleList(
            Block(before, width, 2 if before != width else 1) for before, width in itertools.pairwise(widths)
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of (batch, 3, height, width)."""
        x = self.pool(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)
