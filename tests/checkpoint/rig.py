"""A small model with everything a checkpoint must hold, and what the tests of this folder do with it on ranks.

Owns models and targets for `run_ranks`.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests.oracle import randint, randn, seed
from tools.settled import settled

TIMEOUT_S = 40.0
WATCHDOG_S = 8.0


class Zoo(nn.Module):
    """Tied, frozen, unused, one-element and channels-last parameters; buffers that are saved and one that is not.

    It stays as it is: the golden checkpoints are of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((5,), 0.5), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(self.frozen(x)) * self.gain + self.convolution(image).mean()
        return self.head(F.dropout(x, 0.1))


def build(key: int = 0) -> tuple[Zoo, list[Optimizer]]:
    """Return a model and its optimizers: AdamW with two groups, and SGD with momentum for the convolution."""
    seed(7, key)
    model = Zoo()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
        model.scale.fill_(0.5 + key)
        model.norm.running_mean.add_(key)
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and p.requires_grad]
    plain = [p for name, p in model.named_parameters() if p.ndim < 2 and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    conv = [p for p in model.parameters() if p.ndim == 4]
    return model, [torch.optim.AdamW(groups, lr=1e-2), torch.optim.SGD(conv, lr=0.1, momentum=0.9)]


@dataclasses.dataclass
class Trainer:
    """One rank's model, optimizers and handle."""

    model: nn.Module
    optimizers: list[Optimizer]
    zero: zs.Zero

    @classmethod
    def make(cls, stage: int, key: int = 0, **options: Any) -> "Trainer":
        model, optimizers = build(key)
        zero = zs.shard(model, optimizers, stage=stage, **settled({"watchdog_s": WATCHDOG_S, **options}))
        rank = dist.get_rank() if dist.is_initialized() else 0
        seed(99, rank)
        random.seed(rank)
        np.random.seed(rank)
        return cls(model, optimizers, zero)

    def train(self, first: int, last: int) -> list[float]:
        """Take steps [first, last); every rank has data of its own, and dropout draws from its generator."""
        losses = []
        rank = self.zero.mesh.rank
        for step in range(first, last):
            ids = randint(11, 8, key=(5, step, rank))
            logits = self.model(ids, randn(2, 2, 4, 4, key=(6, step, rank)))
            loss = F.cross_entropy(logits.float(), (ids + 1) % 11)
            loss.backward()
            losses.append(loss.item())
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    def state(self) -> dict[str, Any]:
        """Return everything logical, by value, and this rank's generators."""
        with self.zero.gathered(states=True):
            return {
                "parameters": {name: p.detach().clone() for name, p in self.model.named_parameters()},
                "buffers": {name: b.clone() for name, b in self.model.named_buffers() if name != "scale"},
                "optimizers": [copied(optimizer.state_dict()) for optimizer in self.optimizers],
                "draws": [*torch.get_rng_state().tolist(), str(random.getstate()), str(np.random.get_state())],
            }


def copied(value: Any) -> Any:
    """Copy nested state."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def write(folder: str, stages: list[int], steps: int = 2, more: int = 2) -> dict[int, dict[str, Any]]:
    """At each stage: train, save as `<world>-<stage>`, and go on; return the state saved and what came after."""
    result = {}
    for stage in stages:
        trainer = Trainer.make(stage)
        trainer.train(0, steps)
        before = trainer.state()
        trainer.zero.save(f"{folder}/{trainer.zero.mesh.world_size}-{stage}", extra={"losses": [0.5], "epoch": (1, 2)})
        result[stage] = {"before": before, "losses": trainer.train(steps, steps + more), "after": trainer.state()}
    return result


def read(paths: list[str], stages: list[int], steps: int = 2, more: int = 2) -> list[dict[str, Any]]:
    """Load each path at its stage into another model, and go on training; return what `write` returned."""
    result = []
    for path, stage in zip(paths, stages, strict=True):
        trainer = Trainer.make(stage, key=1)
        if stage % 2:
            trainer.train(40, 41)  # states are there already: they are read into place
        loaded = trainer.zero.load(path)
        before = trainer.state()
        if Path(path).name[0] != str(trainer.zero.mesh.world_size):
            seed(55, trainer.zero.mesh.rank)  # with other ranks than saved, not all have a generator to go on with
        losses = trainer.train(steps, steps + more)
        result.append({"before": before, "losses": losses, "after": trainer.state(), "loaded": loaded})
    return result
