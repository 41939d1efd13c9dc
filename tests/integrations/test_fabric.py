"""Lightning Fabric's loop, as it is: it trains a sharded model with the losses of a plain one.

On one rank the model may be set up, too. On several ranks Fabric would wrap it in DDP, so there the optimizer and the
loader are set up and the model is not.
"""

import functools
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import zeroshard as zs
from tests.oracle import STAGES, WATCHDOG_S, randn, run_cases, seed

lightning_fabric = pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")

PLAIN = -1
WIDTH = 8


def train(stage: int, world: int) -> list[float]:
    """Train as Fabric's documentation does; return the losses. Runs on a rank."""
    if world > 1:
        # Fabric then joins the ranks that are there, as under torchrun, and starts none.
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    seed(7)
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage != PLAIN:
        zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    samples: Any = [randn(WIDTH, key=(3, place)) for place in range(32)]
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=4))
    if world == 1 or stage == PLAIN:
        model, optimizer = fabric.setup(model, optimizer)
    else:
        optimizer = fabric.setup_optimizers(optimizer)
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        fabric.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def trained(world: int) -> dict[tuple[Any, ...], list[Any]]:
    """Train at all stages and plainly, on one group of ranks, or in this process."""
    cases = [(stage, world) for stage in (PLAIN, *STAGES)]
    return run_cases(train, world, cases) if world > 1 else {case: [train(*case)] for case in cases}


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_fabric_trains(world: int, stage: int) -> None:
    found = trained(world)
    for expected, losses in zip(found[PLAIN, world], found[stage, world], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
