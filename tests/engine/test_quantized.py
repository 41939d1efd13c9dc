"""Frozen parameters that cannot have gradients: quantized weights under low-rank trainable ones, at every stage."""

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Case, randint, randn, single_run
from tools.settled import settled
from zeroshard.testing import run_ranks

WIDTH = 12
KINDS = (torch.int8, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


class Adapted(nn.Module):
    """A frozen linear layer of quantized weights, and a low-rank change to it that is trained."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for kind in KINDS:
            codes = randint(2, WIDTH, WIDTH - 1, key=(number,)).to(kind)
            self.register_parameter(str(kind)[6:], nn.Parameter(codes, requires_grad=False))
        self.scale = nn.Parameter(randn(WIDTH, 1, key=(number, 1)), requires_grad=False)
        self.down = nn.Parameter(randn(WIDTH - 1, 2, key=(number, 2)))
        self.up = nn.Parameter(torch.zeros(2, WIDTH))

    def reset_parameters(self) -> None:
        """Write the values that the constructor gives."""
        other = Adapted(0)
        for name, parameter in self.named_parameters():
            parameter.copy_(other.get_parameter(name))

    def forward(self, x: Tensor) -> Tensor:
        for kind in KINDS:
            weight = self.get_parameter(str(kind)[6:])
            assert weight.dtype == kind
            x = x + 0.1 * F.linear(x[:, 1:], (weight.real if weight.is_complex() else weight).to(x.dtype) * self.scale)
        return x + x[:, 1:] @ self.down @ self.up


class Model(nn.Module):
    """Adapted layers, the first of them outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Adapted(0)
        self.blocks = nn.ModuleList(Adapted(0) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(randn(4, WIDTH, key=(step, rank))).square().mean()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def alone() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train in one process on both ranks' data; return the values after each step, and the average at the end."""
    seen: list[dict[str, Tensor]] = []
    single_run(Case(Model, loss_of, models.adamw, steps=2), 2, after_step=lambda model: seen.append(values(model)))
    average: dict[str, Tensor] = {}
    for found in seen:
        trained = {name: found[name] for name, p in Model().named_parameters() if p.requires_grad}
        average = {name: torch.lerp(average.get(name, value), value, 0.5) for name, value in trained.items()}
    return seen, {**seen[-1], **average}


def train(
    stage: int, shared_memory: bool, folder: str, on_meta: bool
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Train sharded, save and load into another model; return what was seen."""
    with torch.device("meta" if on_meta else "cpu"):
        model = Model()
    optimizer = models.adamw(model)
    options: dict[str, Any] = {"stage": stage, "shared_memory": shared_memory, "watchdog_s": WATCHDOG_S}
    zero = zs.shard(model, optimizer, **settled(options))
    seen = []
    for step in range(2):
        loss_of(model, step, dist.get_rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            average = zero.ema(0.5)
        with zero.gathered(states=True):
            seen.append(values(model))
    average.update()
    assert "int8" in zero.summary()
    assert zero.memory().resident_bytes["parameters"] > 0
    zero.check_copies()
    path = zero.save(f"{folder}/{stage}-{shared_memory}-{on_meta}/step-2")
    with average.swapped(), zero.gathered():
        averaged = values(model)
    other = Model()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    loaded = zs.shard(other, models.adamw(other), **settled(options))
    loaded.load(path)
    with zero.gathered(writeback=True), torch.no_grad():
        model.blocks[0].int8.add_(1)
    with loaded.gathered(), zero.gathered():
        return seen, {"average": averaged, "loaded": values(other), "written": values(model)}


def everything(stage: int) -> list[str]:
    expected, average = alone()
    written = {**expected[-1], "blocks.0.int8": expected[-1]["blocks.0.int8"] + 1}
    problems = []
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    for shared_memory, on_meta in ((True, False), (False, False), (True, True)):
        seen, others = train(stage, shared_memory, folders[0], on_meta)
        wanted = {"average": average, "loaded": expected[-1], "written": written}
        problems += [
            f"shared_memory={shared_memory}, on_meta={on_meta}: {where}"
            for where in differences([*seen, *others.values()], [*expected, *wanted.values()])
        ]
    return problems


def differences(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[str]:
    """Name the tensors that differ in a bit, a shape or a dtype."""
    return [
        f"{place}: {name} {ours.dtype} {tuple(ours.shape)}"
        for place, (mine, wanted) in enumerate(zip(found, expected, strict=True))
        for name in mine.keys() | wanted.keys()
        if _raw(ours := mine[name]) != _raw(wanted[name])
    ]


def _raw(value: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_quantized_frozen_weights_beside_trainable_ones(stage: int) -> None:
    assert run_ranks(everything, 2, stage, timeout_s=2 * TIMEOUT_S) == [[], []]


def half(stage: int) -> dict[str, str]:
    """Return the dtypes of a model in bfloat16: what is quantized stays as it is."""
    model = Model()
    zero = zs.shard(
        model, models.adamw(model), stage=stage, precision="bf16", settings=zs.Settings(watchdog_s=WATCHDOG_S)
    )
    loss_of(model, 0, dist.get_rank()).backward()
    zero.optimizers[0].step()
    with zero.gathered():
        return {name: str(p.dtype) for name, p in model.blocks[1].named_parameters()}


def test_precision_leaves_quantized_weights_as_they_are() -> None:
    kept = {str(kind)[6:]: str(kind) for kind in KINDS}
    for found in run_ranks(half, 2, 3, timeout_s=TIMEOUT_S):
        assert found == {**kept, "scale": "torch.bfloat16", "down": "torch.bfloat16", "up": "torch.bfloat16"}
