"""torch's own pipeline schedules drive sharded parts: GPipe, 1F1B, and 1F1B with two chunks on each rank.

The oracle is one process that adds up the gradients of the same micro-batches in a plain loop, rank after rank.
"""

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import zeroshard as zs
from tests import models
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.rotation import third
from zeroshard.testing import run_ranks

TIMEOUT_S = 480
WATCHDOG_S = 120.0
PLACES, DATA, MICRO, STEPS, DEPTH = 2, 2, 4, 5, 8
KINDS = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}
"""The class and the chunks on each rank, by name."""
Case = tuple[str, int, bool, bool, bool]
"""A schedule, a stage, whether ranks share memory, whether the last backward reduces, whether torch infers shapes."""
CASES = [(stage, shared) for stage in range(4) for shared in (True, False)]


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


def sent_bytes(zero: zs.Zero, kind: str) -> int:
    return zero.traffic().sent_bytes.get(kind, 0)


def train(cases: list[Case], clips: bool = False) -> list[dict[str, Any]]:
    """Train by a schedule; tell losses, norms and bytes of each step, and the parameters at the end."""
    mesh, found = init_device_mesh("cpu", (PLACES, DATA), mesh_dim_names=("pipe", "shard")), []
    for kind, stage, shared, once, dynamic in cases:
        model, chunks = build(mesh, KINDS[kind][1]), KINDS[kind][1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings)
        schedule = schedule_of(kind, model, zero, mesh, once=once, dynamic=dynamic)
        each = {name: sum(unit.described().sent_bytes(name) for unit in zero.units) for name in ("gather", "reduce")}
        losses, norms, sent = [], [], []
        for step in range(STEPS):
            before = {name: sent_bytes(zero, name) for name in each}
            losses.append(run_step(schedule, mesh, step, zero.mesh.rank))
            sent.append({name: sent_bytes(zero, name) - nbytes for name, nbytes in before.items()})
            if clips:
                half = zero.grad_norm().item() / 2
                norms += [half, nn.utils.clip_grad_norm_(model.parameters(), half).item()]
            optimizer.step()
            optimizer.zero_grad()
        zero.detach()
        parameters = {name.split(".", chunks - 1)[-1]: p.detach() for name, p in model.named_parameters()}
        found.append({"losses": losses, "norms": norms, "sent": sent, "each": each, "parameters": parameters})
    return found


def plain(clips: bool = False) -> dict[str, Any]:
    """Train the whole model in this process: sum over micro-batches, then over ranks in their order.

    Args:
        clips: whether gradients are clipped to half of their norm.
    """
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
        if clips:
            half = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() / 2
            norms += [half, nn.utils.clip_grad_norm_(model.parameters(), half).item()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "parameters": {n: p.detach() for n, p in model.named_parameters()}}


def check_bytes(case: Case, actual: dict[str, Any]) -> None:
    """Compare the bytes of each step with the formulas: each pass gathers, each backward that reduces, reduces once."""
    _, stage, _, once, _ = case
    gathers = 2 * MICRO * (stage == 3)
    expected = {"gather": gathers * actual["each"]["gather"], "reduce": actual["each"]["reduce"] * (once or MICRO)}
    assert actual["each"]["reduce"] > 0
    assert actual["sent"] == [expected] * STEPS, case


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_of_torch_has_the_bits_of_a_plain_loop(kind: str) -> None:
    expected = plain()
    cases = [(kind, *case, True, False) for case in third(CASES)]
    for rank, found in enumerate(run_ranks(train, 4, cases, timeout_s=TIMEOUT_S)):
        for case, actual in zip(cases, found, strict=True):
            if rank // DATA == PLACES - 1:
                assert actual["losses"] == [rows[rank % DATA] for rows in expected["losses"]], case
            for name, value in actual["parameters"].items():
                assert torch.equal(value, expected["parameters"][name]), (case, name)
            check_bytes(case, actual)


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_in_each_backward_and_clipping_are_those_of_one_process(kind: str) -> None:
    expected = plain(clips=True)
    cases = [(kind, stage, stage % 2 == 0, False, stage == 3) for stage in third(reversed(range(4)))]
    for rank, found in enumerate(run_ranks(train, 4, cases, True, timeout_s=TIMEOUT_S)):
        for case, actual in zip(cases, found, strict=True):
            assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-6), case
            if rank // DATA == PLACES - 1:
                for mine, rows in zip(actual["losses"], expected["losses"], strict=True):
                    assert mine == pytest.approx(rows[rank % DATA], rel=1e-6), case
            for name, value in actual["parameters"].items():
                assert torch.allclose(value, expected["parameters"][name], rtol=1e-6, atol=1e-6), (case, name)
            if not case[-1]:  # torch infers shapes by one more forward
                check_bytes(case, actual)


# -- what is refused --------------------------------------------------------------------------------------------------


def cause_of(error: BaseException) -> str:
    """Return the text of the error that torch's pipelining has wrapped."""
    return cause_of(error.__cause__) if error.__cause__ is not None else str(error)


def told(action: Any) -> str:
    try:
        action()
    except RuntimeError as error:
        return cause_of(error)
    return "nothing was raised"


def split(stage: int) -> tuple[list[str], float, float]:
    """Split backwards by schedules, and by hand, on a pipe of one place, where no rank waits for another place.

    Returns: what was raised, and the norm of the gradients of a whole backward before and after that.
    """
    mesh, found, whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipe", "shard")), [], whole_model()
    model = nn.ModuleList(Part(whole, number, 2) for number in range(2))
    zero = zs.shard(model, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    inputs, group = example(0, 2).detach().requires_grad_(), mesh["pipe"].get_group()

    def norm() -> float:
        model[1](model[0](inputs + zero.mesh.rank)).square().sum().backward()
        found_norm = zero.grad_norm().item()
        model.zero_grad()
        return found_norm

    def by_schedule(make: Any) -> None:
        stages = [PipelineStage(part, n, 2, torch.device("cpu"), group=group) for n, part in enumerate(model)]
        make(stages, n_microbatches=4, loss_fn=F.mse_loss).step(torch.zeros(16, 5), target=torch.zeros(16, 3))

    def by_hand() -> None:
        output = model[0](inputs)
        _, groups = stage_backward_input([output], [torch.ones_like(output)], [inputs], model[0].parameters())
        stage_backward_weight(model[0].parameters(), groups)

    before = norm()
    found += [
        told(lambda make=make: by_schedule(make)) for make in (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
    ]
    found.append(told(by_hand))
    assert all(p.grad is None for p in model.parameters())
    return found, before, norm()


SPLIT = "splits backwards: gradients of weights.* come from torch.autograd.grad and are assigned to weight.grad"


@pytest.mark.product
@pytest.mark.parametrize("stage", range(4))
def test_split_backwards_are_refused(stage: int) -> None:
    for rank, (found, before, after) in enumerate(run_ranks(split, 2, stage, timeout_s=TIMEOUT_S)):
        for name, text in zip(("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"), found, strict=False):
            assert re.match(rf"\[rank {rank}/2\] {name} of torch {SPLIT}", text), text
        name = "stage_backward_weight" if stage < 3 else "stage_backward_input"
        whose = r"of '0\.(blocks|stem)\.\S+' come"
        assert re.match(rf"\[rank {rank}/2\] .*{name}\(\) of torch {SPLIT}", found[-1]), found[-1]
        assert re.search(whose, found[-1]), found[-1]
        assert before == after > 0


class Half(nn.Module):
    """Blocks of a sharded model, called by a module that is none of the model's."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.stem, self.block = whole.stem, whole.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.stem(x))


def run_half(model: nn.Module) -> None:
    pipeline = PipelineStage(Half(model), 0, 2, torch.device("cpu"))
    output = pipeline.forward_maybe_with_nosync(example(0, 2))
    options = {"stage_output": (output,), "output_grads": (torch.ones_like(output),), "input_values": ()}
    pipeline.backward_maybe_with_nosync("full", options)


def without_the_axis(stage: int) -> list[str]:
    """Let torch's stage call modules of a model on a mesh without "pipe", or without a mesh."""
    found = []
    for mesh in (None, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))):
        model = whole_model()
        zs.shard(model, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        found.append(told(lambda model=model: run_half(model)))
        models.stack_loss(model, 0, 0).backward()  # the model itself trains
    return found


def test_a_stage_of_modules_inside_a_model_without_the_axis_is_refused() -> None:
    for stage in (0, 2):
        for found in run_ranks(without_the_axis, 2, stage, timeout_s=TIMEOUT_S):
            for text in found:
                assert "torch's PipelineStage runs a model that zs.shard() took over without an axis 'pipe'" in text


# -- the page ---------------------------------------------------------------------------------------------------------


def run_page() -> None:
    (program,) = [one for one in examples((REPOSITORY / "docs/meshes.md").read_text()) if "PipelineStage" in one]
    run_block(program, "docs/meshes.md")


def test_the_program_of_the_page_runs() -> None:
    run_ranks(run_page, 4, process_group=False, timeout_s=TIMEOUT_S)
