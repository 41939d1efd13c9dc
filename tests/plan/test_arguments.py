"""Arguments of `zs.shard` that plans take, too: precision by module, ignored parameters, parameters of units.

Owns what a plan says beside what real runs hold. `test_offload.py` and `test_owners.py` have offload and optimizers.
"""

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, WATCHDOG_S, run_cases
from tests.rotation import third

CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)
COLUMNS = ("parameters", "gradients", "states", "padding")
"""Pooled buffers aside: which of them serve gradients depends on the order in which parallel branches land theirs."""
PIECE_BYTES = 1 << 10


class Mixed(models.Stack):
    """A stack with a norm that keeps its dtype, and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__(3)
        self.norm, self.own = nn.BatchNorm1d(models.WIDTH), nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x) + self.own(x.to(self.own.weight.dtype)).to(x.dtype))
        return out


ASKED: dict[str, dict[str, Any]] = {
    "by module": {"precision": {"": "bf16", "blocks.1": "fp32", nn.BatchNorm1d: "fp32"}},
    "output": {"precision": zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, output=torch.float16)},
    "rounded at random": {
        "precision": zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
    },
    "dtype": {"precision": torch.bfloat16},
    "ignored": {"ignored": ["own.*"]},
    "ignored, by module": {"ignored": ["own.*"], "precision": {"": "bf16", "head": "fp32"}},
    "until the backward": {"parameters": "until-backward"},
    "by unit": {"parameters": {"head": "replicated", "blocks.*": "until-backward"}},
}
UNITS = ["Block", "BatchNorm1d", "Linear"]


def cases_at(world: int) -> list[tuple[str, int]]:
    """Return (arguments, stage): each at one stage at least, parameters where they are sharded."""
    stages = {name: (3,) if "parameters" in asked else STAGES for name, asked in ASKED.items()}
    return [(name, s) for place, (name, some) in enumerate(stages.items()) for s in some if (s + place + world) % 2]


def optimizer_of(model: nn.Module, asked: dict[str, Any]) -> torch.optim.Optimizer:
    left = "own" if "ignored" in asked else "none"
    return torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith(left)])


def hold(name: str, stage: int) -> dict[str, int]:
    """Train two steps; return what lies where between steps. Runs on a rank."""
    asked, model = ASKED[name], models.build(Mixed)
    left_bytes = sum(p.nbytes for p in model.own.parameters()) if "ignored" in asked else 0
    optimizer = optimizer_of(model, asked)
    settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=False, wire_bytes=PIECE_BYTES)
    zero = zs.shard(model, optimizer, stage=stage, units=UNITS, settings=settings, **asked)
    for step in range(2):
        model(models.features(step, zero.mesh.rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = dict(zero.memory().resident_bytes)
    held["parameters"] += left_bytes + sum(buffer.nbytes for buffer in model.buffers())
    return {column: held[column] for column in COLUMNS}


def plan_at(world: int, name: str, stage: int) -> zs.Plan:
    with torch.device("meta"):
        model = Mixed()
    asked = {"precision": "fp32", **ASKED[name]}
    return zs.plan(
        model,
        world_size=world,
        stage=stage,
        device=CPU,
        units=UNITS,
        shared_memory=False,
        wire_bytes=PIECE_BYTES,
        inputs=[models.features(0, 0)],
        loss=lambda out: out.float().square().mean(),
        **asked,
    )


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3])
def test_resident_bytes_are_those_of_a_run(world: int) -> None:
    for case, by_rank in run_cases(hold, world, third(cases_at(world))).items():
        classes = [one for one in plan_at(world, *case).ranks for _ in range(one.count)]
        for rank, (held, planned) in enumerate(zip(by_rank, classes, strict=True)):
            assert held == {column: planned.resident_bytes[column] for column in COLUMNS}, f"{case}, rank {rank}"


def test_each_module_computes_in_its_precision() -> None:
    """A head of its own precision takes its input and gives its output in two dtypes, and the model's is cast."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 256, bias=False))
    options: dict[str, Any] = {
        "world_size": 1,
        "device": CPU,
        "inputs": [torch.zeros(512, 64)],
        "loss": lambda out: out.sum(),
    }
    narrow = zs.plan(model, precision="bf16", **options)
    wide = zs.plan(model, precision={"": "bf16", "1": "fp32"}, **options)

    def made(plan: zs.Plan) -> list[int]:
        return [one.nbytes for one in plan.film.events if one.column == "activations" and one.nbytes > 0]

    assert made(narrow).count(512 * 256 * 4) < made(wide).count(512 * 256 * 4)
    assert made(narrow).count(512 * 64 * 4) < made(wide).count(512 * 64 * 4)
    assert wide.resident_bytes["parameters"] == 64 * 64 * 2 + 64 * 256 * 4
    half = zs.plan(model, precision=zs.Precision(param=torch.bfloat16, output=torch.bfloat16), **options)
    assert made(half).count(512 * 256 * 4) < made(narrow).count(512 * 256 * 4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"precision": {"": "bf16", "nowhere": "fp32"}}, "precision= names 'nowhere', which matches no module"),
        ({"precision": {"0": "fp32"}}, 'precision= as a mapping needs the key ""'),
        ({"ignored": ["nowhere"]}, "ignored= has 'nowhere', which is not a parameter"),
        ({"parameters": {"nowhere": "replicated"}}, "parameters= names 'nowhere', which matches no unit"),
        ({"wire_bytes": 0}, "wire_bytes must be at least 1, got 0"),
        ({"ignored": ["0.*"], "parallelize": lambda *_: None}, "parallelize= with ignored="),
    ],
)
def test_what_a_plan_cannot_know_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match=said):
        zs.plan(model, world_size=2, inputs=[torch.ones(2, 64)], **asked)


def test_modules_are_not_named_of_shapes() -> None:
    with pytest.raises(ValueError, match="precision= by module is of modules only; gpt2 is a shape"):
        zs.plan("gpt2", world_size=2, precision={"": "bf16", "norm": "fp32"})
    with pytest.raises(TypeError, match="ignored: of modules only; gpt2 is a shape"):
        zs.plan("gpt2", world_size=2, ignored=["norm"])
    named, object_ = (zs.plan("gpt2", world_size=2, precision=one) for one in ("bf16", torch.bfloat16))
    assert named.resident_bytes == object_.resident_bytes


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_plan_that_is_made_without_gradients_is_of_a_step_that_trains(context: type) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    options: dict[str, Any] = {"world_size": 2, "stage": 1, "device": CPU, "inputs": [torch.ones(2, 8)]}

    def planned() -> list[object]:
        asked: list[dict[str, Any]] = [{"activations": "recompute"}, {"optimizer": "muon"}, {"pipe": 2}]
        plans = [zs.plan(model, micro_batches=2, **options, **one) for one in asked]
        return [(one.ranks, one.step_s, one.film.sent_bytes, one.flops_per_step) for one in plans]

    usual = planned()
    with context():
        assert planned() == usual
