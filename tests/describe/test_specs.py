"""Records of a model: what is in which bucket, equal on the meta device and on the ranks of a run."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.describe.precision import Precision, precision_of
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import plan_units
from zeroshard.table.spec import Formats, UnitSpec
from zeroshard.table.stages import STAGES as ROWS
from zeroshard.testing import run_ranks

SINGLE = Formats("float32", "float32", "float32", "float32", "float32")
MIXED = Formats("bfloat16", "float32", "float32", "float32", "float32")


class Normed(nn.Module):
    """A frozen layer, a layer in half precision, and a norm that keeps its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.half = nn.Linear(5, 7, bias=False).half()
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.half(self.frozen(x).half()).float()))
        return hidden


def test_a_bucket_for_each_set_of_formats_and_trainability() -> None:
    model = Normed()
    (unit,) = describe_units(plan_units(model, []), ROWS[3], precision_of("bf16"), shard_size=2, shard_rank=1)
    found = [(one.number, one.names, one.formats, one.is_trained) for one in unit.buckets]
    assert found == [
        (0, ("frozen.weight", "frozen.bias"), MIXED, False),
        (1, ("half.weight", "head.weight", "head.bias"), MIXED, True),
        (2, ("norm.weight", "norm.bias"), SINGLE, True),
    ]
    assert {one.rank for one in unit.buckets} == {1} and unit.buckets[1].layout.numels == (35, 14, 2)


def test_formats_by_column() -> None:
    rounded = Precision(param=torch.bfloat16, reduce=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
    assert rounded.formats_of(torch.float32, is_kept=False) == Formats(
        "bfloat16", "bfloat16", "float32", "bfloat16", "float32"
    )
    assert rounded.formats_of(torch.float32, is_kept=True) == SINGLE
    assert rounded.formats_of(torch.int8, is_kept=False).state == "int8"
    assert Precision().formats_of(torch.float64, is_kept=False).grad == "float64"
    # What is given alone is heard: the rest keeps the dtype of the parameters.
    for name in ("reduce", "grad", "master"):
        alone = Precision(**{name: torch.bfloat16}).formats_of(torch.float32, is_kept=False)
        assert getattr(alone, name) == "bfloat16"
        assert alone.param == "float32"
    halves = Precision(master=torch.float32).formats_of(torch.bfloat16, is_kept=False)
    assert halves == Formats("bfloat16", "bfloat16", "bfloat16", "float32", "float32")
    assert Precision().formats_of(torch.bfloat16, is_kept=False) == Formats(*["bfloat16"] * 5)


def test_what_a_rank_has_of_a_parameter_is_the_callers_to_say() -> None:
    plans = plan_units(models.Stack(), None)
    halves = describe_units(plans, ROWS[3], Precision(), shard_size=2, numel_of=lambda p: p.numel() // 2)
    wholes = describe_units(plans, ROWS[3], Precision(), shard_size=2)
    for half, whole in zip(halves, wholes, strict=True):
        assert half.buckets[0].layout.numels == tuple(numel // 2 for numel in whole.buckets[0].layout.numels)
        assert half.buckets[0].names == whole.buckets[0].names


def built(stage: int, precision: str, replicas: int) -> list[UnitSpec]:
    """Return what the units of an engine were built from."""
    model = models.build(models.GPT)
    model.blocks[0].requires_grad_(False)
    settings = zs.Settings(watchdog_s=WATCHDOG_S)
    zero = zs.shard(model, models.adamw(model), stage=stage, precision=precision, mesh=replicas, settings=settings)
    return [replace(unit.spec, buckets=tuple(b.spec for b in unit.buckets)) for unit in zero._engine.units]


@pytest.mark.product
@pytest.mark.parametrize(
    ("stage", "precision", "replicas", "world"),
    [*((stage, "fp32", 1, 2) for stage in STAGES), (3, "bf16", 1, 3), (2, "fp16", 2, 4)],
)
def test_an_engine_is_built_from_what_the_meta_device_says(
    stage: int, precision: str, replicas: int, world: int
) -> None:
    with torch.device("meta"):
        model = models.GPT()
    model.blocks[0].requires_grad_(False)
    plans = plan_units(model, None)
    for rank, units in enumerate(run_ranks(built, world, stage, precision, replicas, timeout_s=TIMEOUT_S)):
        size = world // replicas
        described = describe_units(
            plans, ROWS[stage], precision_of(precision), shard_size=size, shard_rank=rank % size, replicas=replicas
        )
        assert tuple(units) == described, f"[rank {rank}/{world}]"
