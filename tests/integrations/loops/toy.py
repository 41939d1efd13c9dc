"""The model and the tokens that the loops train on."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, BLOCK_SIZE = 32, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Returns logits and, with targets, the loss, as the GPTs of nanoGPT and minGPT do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def configure_optimizers(self, *_):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def forward(self, idx, targets=None):
        x = self.embedding(idx)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def get_batch(split, batch_size=4):
    """Return windows at places that torch's generator draws, and the tokens that follow."""
    text = torch.arange(400) ** 2 % VOCABULARY
    starts = torch.randint(0 if split == "train" else 300, 300 if split == "train" else 390, (batch_size,))
    return torch.stack([text[s : s + BLOCK_SIZE] for s in starts]), torch.stack(
        [text[s + 1 : s + 1 + BLOCK_SIZE] for s in starts]
    )
