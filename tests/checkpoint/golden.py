"""Checkpoints of each format version, which every later version must read.

Their content follows from formulas, so that a test knows it without them. Written once by

    python -m tests.checkpoint.golden tests/checkpoint/golden/version-<number>

and never changed afterwards.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import VERSION
from zeroshard.testing import run_ranks

from .rig import TIMEOUT_S, Trainer

FOLDER = Path(__file__).parent / "golden"
STEP = 12
EXTRA = {
    "scheduler": {"last_epoch": 3, "base_lrs": [0.5, float("inf")], "betas": (0.9, 0.95)},
    "seen": {1: "one", None: True, "$tuple": -7},
    "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
}


def made() -> Trainer:
    """Return this rank's trainer, of which everything that a checkpoint holds is set by formula."""
    trainer = Trainer.make(3, precision="fp16")
    scale = trainer.zero._engine.loss_scale
    assert scale is not None
    scale.value, scale.history = 1024.0, [4096.0, 2048.0]
    trainer.train(0, 1)
    scale._good_steps = 2
    with trainer.zero.gathered(writeback=True, states=True), torch.no_grad():
        for number, parameter in enumerate(trainer.model.parameters()):
            set_by_formula(parameter, 8, -number)
        for number, buffer in enumerate(trainer.model.buffers()):
            set_by_formula(buffer, 1, number)
        for number, optimizer in enumerate(trainer.optimizers):
            for place, state in enumerate(optimizer.state.values()):
                for key, value in sorted(state.items()):
                    set_by_formula(value, 16 + len(key), number + place)
            for group in optimizer.param_groups:
                group["lr"] = 0.125 * (number + 1)
    torch.manual_seed(trainer.zero.mesh.rank)
    np.random.seed(trainer.zero.mesh.rank)
    random.seed(trainer.zero.mesh.rank)
    return trainer


def set_by_formula(value: Tensor, divisor: int, first: int) -> None:
    """Give a tensor numbers that float16 holds exactly."""
    numbers = torch.arange(value.numel()).reshape(value.shape)
    value.copy_(numbers / divisor + first if value.is_floating_point() else numbers % 2 + first)


def write(folder: str) -> None:
    """Save from one of two ranks."""
    made().zero.save(folder, EXTRA, step=STEP)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    assert target.name == f"version-{VERSION}"
    run_ranks(write, 2, str(target), timeout_s=TIMEOUT_S)
    (target.parent / "LATEST").unlink()
