"""stage="auto": the least stage whose model states fit."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.describe.asked import Asked, resolve
from zeroshard.describe.precision import precision_of
from zeroshard.describe.units import plan_units
from zeroshard.plan.machine.profiles import host_device
from zeroshard.setup.automatic import STATES_PART, KeptBytes, choose_least
from zeroshard.table.stages import row_of_stage
from zeroshard.testing import run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.planned import choose_sharding, plan_run
from zeroshard.wire.mesh import Mesh

WIDTH = 256


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)))


@pytest.mark.product
@pytest.mark.parametrize(
    ("bytes_per_parameter", "stage"),
    # In fp32 with AdamW 16, 10, 7 and 4 bytes a parameter on four ranks, and buffers beside them.
    [(20, 0), (12, 1), (9, 2), (5, 3), (0.1, 3)],
)
def test_the_least_stage_that_fits_is_chosen(bytes_per_parameter: float, stage: int) -> None:
    one = model()
    numel = sum(parameter.numel() for parameter in one.parameters())
    mesh = Mesh(0, 4, 0, torch.device("cpu"))
    plans, optimizer = plan_units(one, None), torch.optim.AdamW(one.parameters())
    kept = KeptBytes(plans, [optimizer], precision_of("fp32"), mesh, nn.Parameter.numel)
    resolved = resolve(Asked(stage="auto"), mesh.world_size)
    row, _, _ = choose_least(resolved, kept, int(bytes_per_parameter * numel / STATES_PART))
    assert row == row_of_stage(stage)


def test_a_small_model_is_not_sharded() -> None:
    one = model()
    zero = zs.shard(one, torch.optim.AdamW(one.parameters()), stage="auto", activations="compress")
    assert (zero.residency.states, zero.residency.parameters) == (zs.Replicated(), zs.Replicated())
    assert "stage 0" in zero.summary()
    with pytest.raises(ValueError, match="Give stage= or residency=, not both; got stage='auto'"):
        zs.shard(model(), stage="auto", residency="C1")


def chosen() -> str:
    zs.init()
    one = model()
    zero = zs.shard(one, torch.optim.AdamW(one.parameters()), stage="auto")
    one(torch.ones(2, WIDTH)).sum().backward()
    zero.optimizers[0].step()
    return zero.summary().splitlines()[0]


def test_ranks_choose_alike() -> None:
    found = run_ranks(chosen, 2)
    assert all("stage 0" in line for line in found)


@pytest.mark.rotates
def test_a_plan_takes_the_least_stage_that_fits() -> None:
    asked = {"world_size": 8, "seq": 2048, "activations": "recompute"}
    found = zs.plan("llama-3-8b", stage="auto", device="a100-80", **asked)  # type: ignore[arg-type]
    assert found.verdict == "fits"
    stage = int(str(found.options["row"]).removeprefix("stage "))
    for lower in range(stage):
        assert zs.plan("llama-3-8b", stage=lower, device="a100-80", **asked).verdict != "fits"  # type: ignore[arg-type]
    assert zs.plan("llama-3-405b", stage="auto", device="v100-32", **asked).options["row"] == "stage 3"  # type: ignore[arg-type]


@pytest.mark.rotates
def test_a_training_takes_the_least_stage_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = choose_sharding(load_config(None, ["zero.stage=auto", "run.ranks=2"]))
    assert config.zero.stage == 0
    assert plan_run(config)[0].verdict == "fits"


def test_ranks_of_a_run_share_the_memory_of_a_host_also_where_they_are_more_than_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no profile
    device = dataclasses.replace(host_device(), node_ranks=2)
    monkeypatch.setattr("zeroshard.train.planned.host_device", lambda: device)
    plan, is_timed = plan_run(load_config(None, ["run.ranks=4"]))
    assert not is_timed
    assert plan.asked.room_bytes == device.memory_bytes // 4
