"""Time that offload hides and does not hide: runs on an emulated machine beside the planner's schedule.

Owns the comparison. The engine's own code begins and waits; `tools/emulated_offload.py` has how long things take. What
compute, copies, host and disk take is the same for the plan and the run. A run is measured by the machine's moments,
which other programs of this host do not delay.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from tools.emulated_offload import Block, Machine, emulated
from zeroshard.describe.offload import row_with
from zeroshard.describe.precision import Precision
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import plan_units
from zeroshard.plan.machine.hardware import Span
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.named import OPTIMIZERS, updates_of
from zeroshard.plan.shape.tape import Instruction, Parts
from zeroshard.plan.step.film import Film
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.script import Call
from zeroshard.plan.step.simulate import make_film
from zeroshard.table.stages import row_of_stage
from zeroshard.table.wires import Silence

DEPTH, WIDTH = 3, 320
FORWARD_S, BACKWARD_S = 0.008, 0.016
BYTES_PER_ELEMENT = 28.0
"""That an update of AdamW in fp32 reads and writes: master and states twice, the gradient once."""
STEPS = 2


def model_on(machine: Machine) -> nn.Sequential:
    return nn.Sequential(*(Block(WIDTH, machine, FORWARD_S, BACKWARD_S) for _ in range(DEPTH)))


def predict(model: nn.Module, machine: Machine, stage: int, offload: zs.Offload, micro_batches: int) -> Film:
    """Return the planner's schedule of a step."""
    row = row_with(row_of_stage(stage), offload, is_alone=True)
    plans = plan_units(model, [Block])
    specs = describe_units(plans, row, Precision(), shard_size=1)
    device = dataclasses.replace(
        DEVICES["h100-80"],
        host_bytes_per_s=machine.bus,
        link_part=1.0,
        host_memory_bytes_per_s=machine.host,
        disk_bytes_per_s=machine.disk,
    )
    calls = []
    for unit in specs[1:]:
        nbytes = 4 * unit.buckets[0].layout.numel
        run = Instruction("run", "forward", seconds=FORWARD_S)
        make = Instruction("make", "output", 1, 4)
        back = (run._replace(what="backward", seconds=BACKWARD_S), Instruction("land", "gradient", nbytes=nbytes))
        calls.append(Call(unit.number, Parts((run, make), (*back, Instruction("drop", "output", 1, 4)), 1)))
    updates = [updates_of(specs, OPTIMIZERS["adamw"])]
    spans = {"shard": Span(1, 1)}
    job = Job(
        specs, calls, updates, Silence(), device, "float32", spans, micro_batches, seconds=lambda _: 0.0, is_early=True
    )
    return make_film(job, is_settled=True)


def measure(
    model: nn.Module, machine: Machine, stage: int, offload: zs.Offload, micro_batches: int
) -> tuple[float, float]:
    """Return the seconds of a steady step, and those of its kernels."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zs.shard(model, optimizer, stage=stage, units=[Block], offload=offload)
    x, grad_bytes = torch.ones(1, WIDTH), 4 * sum(p.numel() for p in model.parameters())

    def advance() -> None:
        for _ in range(micro_batches):
            model(x).sum().backward()
        # Whether gradients are finite, and their norm: both read them.
        _ = [p.grad for group in optimizer.param_groups for p in group["params"]]
        machine.work(2 * offload.states * grad_bytes)
        optimizer.step()
        optimizer.zero_grad()
        machine.follow()

    machine.start()
    advance()
    # No break from here on: work that continues after a step belongs to the next step.
    start_s, before_s = machine.now_s, machine.computed_s
    for _ in range(STEPS):
        advance()
    return (machine.now_s - start_s) / STEPS, (machine.computed_s - before_s) / STEPS


CASES: Sequence[tuple[str, str, dict[str, float], int]] = (
    ("the bus is slow", "host", {"bus": 10e6, "host": 1e9, "disk": 1e9}, 1),
    ("the host is slow", "host", {"bus": 40e6, "host": 100e6, "disk": 1e9}, 1),
    ("micro-batches", "host", {"bus": 30e6, "host": 400e6, "disk": 1e9}, 2),
    ("gradients fill the bus", "host", {"bus": 15e6, "host": 1e9, "disk": 1e9}, 3),
    ("gradients in pieces", "tiny pieces", {"bus": 40e6, "host": 1e9, "disk": 1e9}, 3),
    ("the update goes on", "parameters, too", {"bus": 40e6, "host": 100e6, "disk": 1e9}, 1),
    ("parameters are awaited", "parameters, too", {"bus": 15e6, "host": 500e6, "disk": 1e9}, 2),
    ("copies in many pieces", "small pieces", {"bus": 60e6, "host": 500e6, "disk": 1e9}, 2),
    ("the disk is slow", "file", {"bus": 100e6, "host": 500e6, "disk": 15e6}, 1),
    ("parameters in files", "file with parameters", {"bus": 60e6, "host": 500e6, "disk": 30e6}, 1),
    ("disk and host are alike", "file", {"bus": 30e6, "host": 125e6, "disk": 30e6}, 1),
)


@pytest.mark.product
@pytest.mark.parametrize(("name", "place", "rates", "micro_batches"), CASES, ids=[one[0] for one in CASES])
def test_exposed_time_is_the_schedule_s(
    name: str, place: str, rates: dict[str, float], micro_batches: int, tmp_path: Path
) -> None:
    to, parameters = str(tmp_path) if "file" in place else "host", float("parameters" in place or "small" in place)
    staging_bytes = {"small pieces": 1 << 16, "tiny pieces": 1 << 17, "file with parameters": 1 << 18}.get(
        place, 1 << 20
    )
    offload, stage = zs.Offload(to=to, parameters=parameters, staging_bytes=staging_bytes), 3 if parameters else 0
    with emulated(Machine(**rates), BYTES_PER_ELEMENT) as machine:
        model = model_on(machine)
        film = predict(model, machine, stage, offload, micro_batches)
        assert film.step_s - film.compute_s == pytest.approx(film.offload_s)
        if place == "small pieces":
            # A unit is many times the buffers: the device waits no longer than with a buffer for a whole unit.
            whole = predict(model, machine, stage, dataclasses.replace(offload, staging_bytes=1 << 24), micro_batches)
            assert film.offload_s <= whole.offload_s
        step_s, compute_s = measure(model, machine, stage, offload, micro_batches)
    assert compute_s == pytest.approx(film.compute_s)
    assert step_s - compute_s == pytest.approx(film.offload_s, rel=0.1)
