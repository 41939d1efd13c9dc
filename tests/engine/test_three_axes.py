"""Three axes at once, 2 x 2 x 2 on eight processes: replicas or a pipe, beside shards and split layers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroshard as zs
from tests.engine.test_tensor_axis import PLAN, WIDTH, Block, state_of, whole
from tests.oracle import WATCHDOG_S, assert_same, randn
from tests.rotation import third
from zeroshard.testing import run_ranks

WORLD = 8
STEPS = 5
CLIP = 0.5
TIMEOUT_S = 300
OUTER = ("replicate", "pipe")
"""The first axis; "shard" and "tensor" follow."""
TOLERANCE = 1e-12
"""Of losses, norms and each parameter's 2-norm, relative, in fp64."""


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    for block in model[:2]:
        # A bias of keys has no true gradient, and AdamW would make steps of what rounding leaves there.
        block.k = nn.Linear(WIDTH, WIDTH, bias=False)
    return model.to(dtype)


def inputs(step: int, place: int, dtype: torch.dtype) -> Tensor:
    return randn(3, 5, WIDTH, key=(step, place), dtype=dtype)


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class Part(nn.Module):
    """The layers of one place, under their names in the whole model."""

    def __init__(self, model: nn.Sequential, mesh: DeviceMesh) -> None:
        super().__init__()
        names = "012"
        if "pipe" in mesh.mesh_dim_names:
            names = ("0", "12")[mesh.get_local_rank("pipe")]
        for name in names:
            self.add_module(name, model[int(name)])
            if isinstance(model[int(name)], Block):
                parallelize_module(model[int(name)], mesh["tensor"], PLAN)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def run_pass(part: Part, mesh: DeviceMesh, x: Tensor, scale: float) -> float | None:
    """Run a forward and a backward, over both places of a pipe; return the loss where it is known."""
    if "pipe" not in mesh.mesh_dim_names:
        loss = loss_of(part(x))
        (loss * scale).backward()
        return loss.item()
    first, last = (int(rank) for rank in mesh["pipe"].mesh)
    if dist.get_rank() == first:
        outputs = part(x)
        dist.send(outputs.detach(), last)
        grad = torch.empty_like(outputs)
        dist.recv(grad, last)
        outputs.backward(grad)
        return None
    given = torch.empty_like(x)
    dist.recv(given, first)
    loss = loss_of(part(given.requires_grad_()))
    (loss * scale).backward()
    dist.send(given.grad, first)
    return loss.item()


def make(outer: str, stage: int, precision: str, optimizer: Any) -> tuple[Part, DeviceMesh, Any, zs.Zero]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(outer, "shard", "tensor"))
    part = Part(build(torch.float64 if precision == "fp32" else torch.float32), mesh)
    made = optimizer(part.parameters())
    settings = zs.Settings(watchdog_s=WATCHDOG_S)
    return part, mesh, made, zs.shard(part, made, stage=stage, precision=precision, mesh=mesh, settings=settings)


def data_place(zero: zs.Zero) -> int:
    return zero.mesh.data_ranks.index(zero.mesh.rank)


def train(cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    found = []
    for outer, stage in cases:
        part, mesh, optimizer, zero = make(outer, stage, "fp32", lambda p: torch.optim.AdamW(p, lr=0.01))
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(run_pass(part, mesh, inputs(step, data_place(zero), torch.float64), 1.0))
            norms.append(nn.utils.clip_grad_norm_(part.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        zero.check_copies()
        with zero.gathered():
            values = {name: whole(p) for name, p in part.named_parameters()}
        found.append({"losses": losses, "norms": norms, "values": values, "place": data_place(zero)})
    return found


def alone(places: int) -> dict[str, Any]:
    model, losses, norms = build(torch.float64), list[list[float]](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        parts = [loss_of(model(inputs(step, place, torch.float64))) for place in range(places)]
        torch.stack(parts).mean().backward()
        losses.append([one.item() for one in parts])
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "values": {name: whole(p) for name, p in model.named_parameters()}}


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_training_equals_a_single_process() -> None:
    cases = third([(outer, stage) for stage in (3, 0, 2, 1) for outer in OUTER])
    expected = {outer: alone(4 if outer == "replicate" else 2) for outer in OUTER}
    by_rank = run_ranks(train, WORLD, cases, timeout_s=TIMEOUT_S)
    for number, case in enumerate(cases):
        right, names = expected[case[0]], set()
        for rank, of_rank in enumerate(by_rank):
            found = of_rank[number]
            if found["losses"][0] is not None:
                mine = [one[found["place"]] for one in right["losses"]]
                assert found["losses"] == pytest.approx(mine, rel=TOLERANCE), (rank, case)
            assert found["norms"] == pytest.approx(right["norms"], rel=TOLERANCE), (rank, case)
            assert found["norms"] == by_rank[0][number]["norms"], (rank, case)
            some = {name: right["values"][name] for name in found["values"]}
            assert_same(some, found["values"], f"rank {rank}, {case}", relative=TOLERANCE)
            names |= some.keys()
        assert names == right["values"].keys()


def train_in_a_pipeline(stages: list[int]) -> list[dict[str, Any]]:
    """Train by `zs.pipeline`, whose two micro-batches are the data of two places of the oracle."""
    mesh, found = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "shard", "tensor")), []
    for stage in stages:
        model = build(torch.float64)
        for block in model[:2]:
            parallelize_module(block, mesh["tensor"], PLAN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"stage": stage, "cut": ["1"], "settings": zs.Settings(watchdog_s=WATCHDOG_S)}
        pipe = zs.pipeline(
            model, optimizer, mesh=mesh, micro_batches=2, loss=lambda outputs, _: loss_of(outputs), **options
        )
        first, losses, norms = 2 * mesh.get_local_rank("shard"), [], []
        for step in range(STEPS):
            batch = torch.cat([inputs(step, place, torch.float64) for place in (first, first + 1)])
            losses.append(pipe.step(batch).item())
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        pipe.zero.check_copies()
        with pipe.zero.gathered():
            values = {name: whole(p) for name, p in model.named_parameters()}
        found.append({"losses": losses, "norms": norms, "values": values})
    return found


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_pipeline_of_split_layers_equals_a_single_process() -> None:
    stages, right, names = [3, 0], alone(4), set[str]()
    means = [sum(losses) / len(losses) for losses in right["losses"]]
    for rank, of_rank in enumerate(run_ranks(train_in_a_pipeline, WORLD, stages, timeout_s=TIMEOUT_S)):
        for stage, found in zip(stages, of_rank, strict=True):
            assert found["losses"] == pytest.approx(means, rel=TOLERANCE), (rank, stage)
            assert found["norms"] == pytest.approx(right["norms"], rel=TOLERANCE), (rank, stage)
            some = {name: right["values"][name] for name in found["values"]}
            assert_same(some, found["values"], f"rank {rank}, stage {stage}", relative=TOLERANCE)
            names |= some.keys()
    assert names == right["values"].keys()


def overflow(cases: list[tuple[str, int]]) -> list[list[tuple[bool, bool, float]]]:
    """Let a gradient overflow on each of some ranks; tell whether all states stayed, then moved, and the scales."""
    return [[*_overflow(*case)] for case in cases]


def _overflow(outer: str, stage: int) -> Iterator[tuple[bool, bool, float]]:
    part, mesh, optimizer, zero = make(outer, stage, "fp16", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    raise_on: int | None = None

    def spoil(grad: Tensor) -> Tensor | None:
        return grad * float("inf") if raise_on == dist.get_rank() else None

    next(iter(part.parameters())).register_hook(spoil)

    def step() -> list[Tensor]:
        # Far from overflow at the first scale.
        run_pass(part, mesh, inputs(0, data_place(zero), torch.float32), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
        return state_of(part, optimizer, zero)

    after = step()
    for rank in (0, 3, 5, 6):
        before, scale, raise_on = after, zero.loss_scale, rank
        skipped, halved, raise_on = step(), zero.loss_scale, None
        after = step()
        stayed = all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
        moved = any(not torch.equal(a, b) for a, b in zip(skipped, after, strict=True))
        yield stayed, moved, halved / scale


@pytest.mark.rotates
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    cases = third([(outer, stage) for stage in (3, 0, 1, 2) for outer in OUTER])
    for found in run_ranks(overflow, WORLD, cases, timeout_s=TIMEOUT_S):
        assert found == [[(True, True, 0.5)] * 4] * len(cases)
