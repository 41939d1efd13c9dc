"""Optimizers that need more than elements beside offload: a resident run's bits on the host, a refusal in files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests import models
from tests.oracle import WATCHDOG_S, assert_same, run_cases

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


@pytest.mark.parametrize("name", MAKES)
def test_states_on_the_host_change_no_bit(name: str) -> None:
    found = run_cases(train, 2, [(name, stage, states) for stage in (0, 3) for states in FRACTIONS])
    for stage in (0, 3):
        for states in FRACTIONS[1:]:
            assert_same(found[name, stage, 0.0], found[name, stage, states], f"stage {stage}, {states:g} of the states")


@pytest.mark.parametrize("name", MAKES)
def test_files_take_states_of_elements_alone(name: str, tmp_path: Path) -> None:
    model = models.build(models.GPT)
    with pytest.raises(ValueError, match="cannot keep its states in files"):
        zs.shard(model, MAKES[name](model), stage=2, offload=str(tmp_path))
