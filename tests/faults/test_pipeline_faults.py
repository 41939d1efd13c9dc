"""Exceptions at one place of a pipeline: every rank raises one error, and the next step is right."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.rotation import third
from zeroshard.testing import run_ranks

TIMEOUT_S = 300
WATCHDOG_S = 60.0
PLACES, DATA, MICRO, DEPTH = 2, 2, 4, 8


class Fault:
    """Raises in the forward or the backward of a block, at one micro-batch of one step on one rank."""

    def __init__(self, rank: int, where: str, micro_batch: int) -> None:
        self.rank, self.where, self.micro_batch = rank, where, micro_batch
        self.is_armed, self.count = False, 0

    def strike(self, rank: int) -> None:
        if self.is_armed and rank == self.rank:
            self.count += 1
            if self.count == self.micro_batch + 1:
                raise ArithmeticError(f"planted in the {self.where}")

    def hang(self, block: nn.Module, rank: int) -> None:
        if self.where == "forward":
            block.register_forward_hook(lambda *_: self.strike(rank))
        elif self.where == "backward":

            def watch(module: nn.Module, args: Any, output: Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(lambda grad: self.strike(rank))

            block.register_forward_hook(watch)


def batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    rows = range(MICRO)
    return (
        torch.cat([models.features(step, data, micro) for micro in rows]),
        torch.cat([models.targets(step, data, micro) for micro in rows]),
    )


def run(cases: list[tuple[str, int, str, int, str, int]]) -> list[Any]:
    mesh, found = init_device_mesh("cpu", (PLACES, DATA), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, reduce, rank, where, micro_batch in cases:
        fault = Fault(rank, where, micro_batch)
        torch.manual_seed(7)
        model = models.Stack(depth=DEPTH)
        number = torch.distributed.get_rank()
        for place, block in ((0, model.blocks[1]), (1, model.blocks[6])):
            if rank // DATA == place:
                fault.hang(block, number)

        def loss(output: Tensor, target: Tensor, fault: Fault = fault, number: int = number) -> Tensor:
            if fault.where == "loss":
                fault.strike(number)
            return F.mse_loss(output, target)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = zs.Settings(watchdog_s=WATCHDOG_S)
        options = {"stage": stage, "settings": settings, "reduce": reduce, "loss": loss}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, schedule=schedule, **options)
        told, losses = [], []
        for step, is_armed in enumerate((True, False, True, False, False)):
            fault.is_armed, fault.count = is_armed, 0
            try:
                losses.append(pipe.step(*batch(step, pipe.zero.mesh.rank)).item())
            except (ArithmeticError, zs.RankMismatchError) as error:
                told.append((type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))))
                assert all(p.grad is None for p in model.parameters())
                continue
            optimizer.step()
            optimizer.zero_grad()
        pipe.zero.detach()
        found.append((told, losses, {name: p.detach() for name, p in model.named_parameters()}))
    return found


def plain() -> tuple[list[float], nn.Module]:
    torch.manual_seed(7)
    model, losses = models.Stack(depth=DEPTH), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 3, 4):
        total = sum(models.stack_loss(model, step, data, micro) for data in range(DATA) for micro in range(MICRO))
        loss = total / (DATA * MICRO)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


CASES = [
    (schedule, stage, reduce, rank, where, micro_batch)
    for number, (schedule, where) in enumerate(
        (schedule, where)
        for schedule in ("naive", "gpipe", "1f1b", "interleaved")
        for where in ("forward", "backward", "loss")
    )
    for stage in (number % 4, (number + 2) % 4)
    for reduce in (("last", "each")[(number + stage) % 2],)
    for rank, micro_batch in (((1, 0), (2, 1), (3, 3))[(number + stage) % 3],)
    if where != "loss" or rank >= DATA
]


def test_an_exception_at_one_place_is_one_error_on_all_ranks() -> None:
    losses, model = plain()
    expected = dict(model.named_parameters())
    cases = third(CASES)
    for rank, found in enumerate(run_ranks(run, PLACES * DATA, cases, timeout_s=TIMEOUT_S)):
        for case, (told, actual, parameters) in zip(cases, found, strict=True):
            assert len(told) == 2, (case, told)
            for kind, text, notes in told:
                if rank == case[3]:
                    assert (kind, text) == ("ArithmeticError", f"planted in the {case[4]}"), (case, text)
                    assert f"Micro-batch {case[5]}" in notes, (case, notes)
                else:
                    assert kind == "RankMismatchError", (case, kind, text)
                    assert f"[rank {case[3]}/4: pipe {case[3] // DATA}, shard {case[3] % DATA}]" in text, (case, text)
                    assert f"ArithmeticError: planted in the {case[4]}" in text, (case, text)
            assert actual == pytest.approx(losses, rel=1e-5), case
            for name, value in parameters.items():
                assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (case, name)
