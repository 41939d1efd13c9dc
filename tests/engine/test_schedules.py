"""torch's own pipeline schedules drive sharded parts: GPipe, 1F1B, and 1F1B with two chunks on each rank.

The oracle is one process that adds up the gradients of the same micro-batches in a plain loop, rank after rank.
"""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import zeroshard as zs
from tests import models
from tests.rotation import third
from zeroshard.testing import run_ranks

TIMEOUT_S = 240
WATCHDOG_S = 120.0
PLACES, DATA, MICRO, STEPS, DEPTH = 2, 2, 4, 5, 8
KINDS = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}
"""The class and the chunks on each rank, by name."""
CASES = [(kind, stage, shared) for kind in KINDS for stage in range(4) for shared in (True, False)]


class Part(nn.Module):
    """A part of a `Stack`: some of its blocks, under their names in the whole model."""

    def __init__(self, whole: nn.Module, number: int, count: int) -> None:
        super().__init__()
        self.stem = whole.stem if number == 0 else nn.Identity()
        size = DEPTH // count
        numbers = range(number * size, (number + 1) * size)
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in numbers})
        self.head = whole.head if number == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


class Once(PipelineStage):
    """A stage that reduces gradients with the last backward of a step, as torch does for DistributedDataParallel."""

    zero: zs.Zero

    def backward_maybe_with_nosync(self, kind: Any, options: Any, last_backward: bool = False) -> Any:
        with contextlib.nullcontext() if last_backward else self.zero.no_sync():
            return super().backward_maybe_with_nosync(kind, options, last_backward)


def example(number: int, count: int) -> Tensor:
    """Return an example of what goes into part `number`, and comes out of the part before it."""
    width = 5 if number == 0 else 3 if number == count else models.WIDTH
    return torch.zeros(4, width, requires_grad=True)


def whole_model() -> nn.Module:
    torch.manual_seed(7)
    return models.Stack(depth=DEPTH)


def build(mesh: DeviceMesh, chunks: int) -> nn.Module:
    """Return the parts of this rank: one, or a list of them."""
    whole, place, count = whole_model(), mesh.get_local_rank("pipe"), PLACES * chunks
    parts = [Part(whole, chunk * PLACES + place, count) for chunk in range(chunks)]
    return parts[0] if chunks == 1 else nn.ModuleList(parts)


def schedule_of(
    kind: str, model: nn.Module, zero: zs.Zero, mesh: DeviceMesh, *, once: bool, dynamic: bool = False
) -> Any:
    make, chunks = KINDS[kind]
    count, stages = PLACES * chunks, []
    for chunk, part in enumerate([model] if chunks == 1 else model):  # type: ignore[arg-type]
        number = chunk * PLACES + mesh.get_local_rank("pipe")
        given = {} if dynamic else {"input_args": example(number, count), "output_args": example(number + 1, count)}
        stage = (Once if once else PipelineStage)(
            part, number, count, torch.device("cpu"), group=mesh["pipe"].get_group(), **given
        )
        stage.zero = zero
        stages.append(stage)
    return make(stages[0] if chunks == 1 else stages, n_microbatches=MICRO, loss_fn=F.mse_loss)


def run_step(schedule: Any, mesh: DeviceMesh, step: int, data: int) -> list[float]:
    """Run all micro-batches of a step; return their losses at the last place."""
    losses: list[Tensor] = []
    place = mesh.get_local_rank("pipe")
    inputs = [torch.cat([models.features(step, data, micro) for micro in range(MICRO)])] if place == 0 else []
    if place == PLACES - 1:
        schedule.step(
            *inputs, target=torch.cat([models.targets(step, data, micro) for micro in range(MICRO)]), losses=losses
        )
    else:
        schedule.step(*inputs)
    return [one.item() for one in losses]


def train(cases: list[tuple[str, int, bool]], once: bool, clip: float | None) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (PLACES, DATA), mesh_dim_names=("pipe", "shard")), []
    for kind, stage, shared in cases:
        model = build(mesh, KINDS[kind][1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings)
        schedule = schedule_of(kind, model, zero, mesh, once=once)
        losses, norms, sent = [], [], []
        for step in range(STEPS):
            before = dict(zero.traffic().sent_bytes)
            losses.append(run_step(schedule, mesh, step, zero.mesh.rank))
            sent.append({name: zero.traffic().sent_bytes.get(name, 0) - before.get(name, 0) for name in ("gather", "reduce")})
            if clip is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip * HALF).item())
            optimizer.step()
            optimizer.zero_grad()
        zero.detach()
        parameters = {name.split(".", KINDS[kind][1] - 1)[-1]: p.detach() for name, p in model.named_parameters()}
        found.append({"losses": losses, "norms": norms, "sent": sent, "parameters": parameters})
    return found


HALF = 0.3


def plain(clip: float | None) -> dict[str, Any]:
    """Train the whole model in this process: sum over micro-batches, then over ranks in their order."""
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        rows, by_rank = [], []
        for data in range(DATA):
            rows.append([])
            for micro in range(MICRO):
                loss = models.stack_loss(model, step, data, micro)
                loss.backward()
                rows[-1].append(loss.item())
            by_rank.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for p, *grads in zip(model.parameters(), *by_rank, strict=True):
            p.grad = sum(grads[1:], grads[0]).mul_(1 / DATA).div_(MICRO)
        losses.append(rows)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip * HALF).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "parameters": {n: p.detach() for n, p in model.named_parameters()}}


def test_a_schedule_of_torch_has_the_bits_of_a_plain_loop() -> None:
    expected, cases = plain(None), third(CASES)
    for rank, found in enumerate(run_ranks(train, 4, cases, True, None, timeout_s=TIMEOUT_S)):
        for case, actual in zip(cases, found, strict=True):
            if rank // DATA == PLACES - 1:
                assert actual["losses"] == [rows[rank % DATA] for rows in expected["losses"]], case
            for name, value in actual["parameters"].items():
                assert torch.equal(value, expected["parameters"][name]), (case, name)
