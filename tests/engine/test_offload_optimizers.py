"""Optimizers that need more than elements beside offload: a resident run's bits on the host, a refusal in files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests import models
from tests.oracle import WATCHDOG_S, assert_same, run_cases
from tests.rotation import third
from zeroshard.table.whole import ELEMENTWISE
from zeroshard.testing import run_ranks

MAKES = {
    "Muon": lambda model: zs.optim.Muon(zs.optim.muon_groups(model), lr=0.01),
    "torch's Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "AdamW8bit": lambda model: zs.optim.AdamW8bit(model.parameters(), lr=0.01),
    "Lamb": lambda model: zs.optim.Lamb(model.parameters(), lr=0.01),
    "Lion": lambda model: zs.optim.Lion(model.parameters(), lr=0.001),
}
FRACTIONS = (0.0, 0.5, 1.0)


def train(name: str, stage: int, states: float) -> dict[str, Any]:
    """Train a few steps; return parameters and states, whole. Checks the predicted bytes of states. Runs on a rank."""
    model = models.build(models.GPT)
    optimizer = MAKES[name](model)
    offload = zs.Offload(states=states) if states else None
    settings = zs.Settings(watchdog_s=WATCHDOG_S)
    zero = zs.shard(model, optimizer, stage=stage, offload=offload, settings=settings)
    for step in range(3):
        models.gpt_loss(model, step, zero.mesh.rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        memory = zero.memory()  # includes gradients, as the prediction does
        optimizer.zero_grad()
    for column in ("states", "host"):
        held, predicted = memory.resident_bytes.get(column), memory.predicted_bytes.get(column)
        assert held == predicted, f"{name}, stage {stage}, {states}, {column}: {held}, {predicted}"
    with zero.gathered(states=True):
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        return {"parameters": parameters, "states": optimizer.state_dict()["state"]}


@pytest.mark.product
@pytest.mark.parametrize("name", MAKES)
def test_states_on_the_host_change_no_bit(name: str) -> None:
    stages = third((3, 0))
    found = run_cases(train, 2, [(name, stage, states) for stage in stages for states in FRACTIONS])
    for stage in stages:
        for states in FRACTIONS[1:]:
            assert_same(found[name, stage, 0.0], found[name, stage, states], f"stage {stage}, {states:g} of the states")


def last_values(name: str, offload: zs.Offload | None) -> dict[str, torch.Tensor]:
    """Train a small model with a class of torch.optim and its defaults; return the parameters."""
    model = models.build(models.Stack, depth=1)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=3, offload=offload, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for step in range(2):
        models.stack_loss(model, step, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def compare_defaults() -> None:
    for name in sorted(ELEMENTWISE):
        assert_same(last_values(name, None), last_values(name, zs.Offload(states=0.5, parameters=1.0)), name)


def test_defaults_of_torch_have_the_same_bits_with_offload() -> None:
    """Where the user leaves `fused` and `foreach` open, offload on a CPU must not choose other kernels."""
    run_ranks(compare_defaults, 2)


@pytest.mark.product
@pytest.mark.parametrize("name", MAKES)
def test_files_take_states_of_elements_alone(name: str, tmp_path: Path) -> None:
    model = models.build(models.GPT)
    with pytest.raises(ValueError, match="cannot keep its states in files"):
        zs.shard(model, MAKES[name](model), stage=2, offload=str(tmp_path))
