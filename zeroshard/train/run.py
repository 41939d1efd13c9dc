"""The objects of one run on one rank, and what is counted over its steps.

Owns how they are made, in the order of the README: model, optimizer, `zs.shard`, scheduler. Must not know the loop that
uses them (`loop.py`). Read `Run` first.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import final

import torch

import zeroshard as zs
from zeroshard.train.config import Config
from zeroshard.train.data import load_corpus
from zeroshard.train.metrics import EvalRecord
from zeroshard.train.models.gpt import GPT

__all__ = ["Run", "Tally", "learning_rate_factor"]


@final
class Run:
    """One run on one rank: the objects of the loop, and what was counted so far."""

    def __init__(self, config: Config, mesh: zs.Mesh, start_s: float) -> None:
        self.config, self.mesh, self.start_s = config, mesh, start_s
        self.corpus = load_corpus(
            config.data.path, context=config.model.context, heldout_fraction=config.data.heldout_fraction
        )
        self.model = GPT(config.gpt).to(mesh.device)
        self.parameters_numel = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(self.model.decayed()), "weight_decay": config.train.weight_decay},
                {"params": list(self.model.undecayed()), "weight_decay": 0.0},
            ],
            lr=config.train.learning_rate,
            betas=(config.train.beta1, config.train.beta2),
            fused=True,
        )
        self.zero = zs.shard(
            self.model,
            self.optimizer,
            stage=config.zero.stage,
            cut=config.zero.cut,
            watchdog_s=config.zero.watchdog_s,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        self.tally = Tally()

    def _factor(self, step: int) -> float:
        train = self.config.train
        return learning_rate_factor(
            step,
            steps=train.steps,
            warmup_fraction=train.warmup_fraction,
            final_fraction=train.final_fraction,
        )


@final
@dataclass
class Tally:
    """What is counted over the steps of a run, on this rank."""

    losses: list[float] = field(default_factory=list)
    train_s: float = 0.0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    predicted_step_bytes: Counter[str] = field(default_factory=Counter)
    memory: zs.Memory | None = None
    last_eval: EvalRecord | None = None


def learning_rate_factor(step: int, *, steps: int, warmup_fraction: float, final_fraction: float) -> float:
    """Return what the highest learning rate is multiplied with at a step: a linear rise, then a cosine fall.

    Args:
        step: counts from 0.
        steps: of the run.
        warmup_fraction: share of the steps in which it rises.
        final_fraction: where the fall ends.
    """
    warmup = max(1, round(steps * warmup_fraction))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
