"""Parameters elsewhere, brought to the device for use: the bits of a run whose shards stay on the device.

Owns what fractions of parameters, beside fractions of states, must not change, and where bytes lie. Ranks of one host
send messages here: what one rank keeps elsewhere the others cannot read in place. `test_offload_states.py` has the
runs, and `tests/emulated` streams.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.engine import test_offload_states as runs
from tests.oracle import TIMEOUT_S, assert_same
from tests.rotation import third
from zeroshard.core.slot import slot_of
from zeroshard.testing import run_ranks

FRACTIONS = ((0.0, 1.0), (0.3, 0.3), (0.3, 1.0), (1.0, 0.3), (1.0, 1.0))
"""Of states, and of parameters; without parameters see `test_offload_states.py`."""


def offload_at(states: float, parameters: float, folder: str = "", parameters_to: str | None = None) -> zs.Offload:
    return zs.Offload(
        states=states,
        parameters=parameters,
        to=folder or "host",
        parameters_to=parameters_to,
        staging_bytes=runs.STAGING_BYTES,
    )


def train(name: str, to: str, several: Sequence[tuple[float, float]]) -> dict[Any, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {"host": (), "file": (folder,), "both": (folder, "host")}[to]
        for fractions in (None, *several):
            offload = None if fractions is None else offload_at(*fractions, *places)
            run = runs.build(name, runs.fused, 3, offload=offload)
            found[fractions] = {"seen": runs.advance(name, run, range(4)), **runs.state_of(run)}
            run[2].check_copies()
    return found


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "world", "to"),
    [
        ("accumulates", 1, "host"),
        ("accumulates", 2, "host"),
        ("accumulates", 1, "file"),
        ("accumulates", 2, "file"),
        ("accumulates", 2, "both"),
        ("leaves-out", 1, "file"),
        ("leaves-out", 3, "host"),
        ("overflows", 1, "host"),
        ("overflows", 2, "host"),
        ("bf16", 1, "host"),
        ("bf16", 3, "host"),
        ("bf16", 1, "file"),
        ("bf16", 2, "file"),
        ("bf16", 1, "both"),
        ("overflows", 2, "file"),
        ("masters-at-random", 2, "host"),
    ],
)
def test_runs_with_parameters_elsewhere_equal_resident_ones(name: str, world: int, to: str) -> None:
    several = third(FRACTIONS[::-1])
    for found in run_ranks(train, world, name, to, several, timeout_s=2 * TIMEOUT_S, process_group=world > 1):
        for fractions in several:
            assert_same(found[None], found[fractions], f"{fractions} of {world}")


def recompute(offload: zs.Offload | None) -> list[Any]:
    """Recomputed blocks, a tied head that is read outside its module, one frozen block, an evaluation."""
    model = models.build(models.GPT, depth=3)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    optimizer = runs.fused(model)
    zero = zs.shard(model, optimizer, stage=3, offload=offload, activations="recompute", precision="bf16")
    mean = zero.ema(0.5)
    seen: list[Any] = []
    for step in range(3):
        loss = models.gpt_loss(model, step, runs.rank_of())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        mean.update()
        with torch.no_grad():
            seen += [loss.detach(), models.gpt_loss(model, 9, runs.rank_of())]
        if step == 1:
            with zero.gathered(writeback=True):
                for p in model.parameters():
                    p.detach().mul_(0.5)
    with zero.gathered():
        seen += [value.clone() for value in model.state_dict().values()]
    with mean.swapped(), zero.gathered():
        seen += [p.detach().clone() for p in model.parameters()]
    zero.offload_states()
    zero.reload_states()
    return seen


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_recomputed_tied_and_frozen_parameters_and_averages(world: int, tmp_path: Path) -> None:
    expected = run_ranks(recompute, world, None, process_group=world > 1)
    for fractions, folder in (
        ((0.3, 1.0), ""),
        ((1.0, 0.6), ""),
        ((0.3, 1.0), str(tmp_path)),
        ((1.0, 1.0), str(tmp_path)),
    ):
        found = run_ranks(recompute, world, offload_at(*fractions, folder), process_group=world > 1)
        assert_same(expected, found, f"{fractions} in {folder or 'memory'}")


def move(stage: int) -> dict[str, Any]:
    """Train, save and go on with parameters in other places each."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        folder, found, name = Path(shared[0]), {}, "overflows"
        straight = runs.build(name, runs.fused, stage)
        found["straight"] = runs.advance(name, straight, range(4))[-1], runs.state_of(straight)
        first = runs.build(name, runs.fused, 3, offload=offload_at(1.0, 0.7, own))
        runs.advance(name, first, range(2))
        first[2].save(folder / "step-2", asynchronous=True)
        first[2].wait()
        second = runs.build(name, runs.fused, stage)
        second[2].load(folder / "step-2")
        runs.advance(name, second, range(2, 3))
        second[2].save(folder / "step-3")
        third = runs.build(name, runs.fused, 3, offload=offload_at(0.3, 1.0))
        third[2].load(folder / "step-3")
        found["moved"] = runs.advance(name, third, range(3, 4))[-1], runs.state_of(third)
        if dist.is_initialized():
            dist.barrier()
    return found


@pytest.mark.product
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (3, 1)])
def test_checkpoints_are_ordinary_ones(world: int, stage: int) -> None:
    for found in run_ranks(move, world, stage, timeout_s=2 * TIMEOUT_S, process_group=world > 1):
        assert_same(found["straight"], found["moved"])


def copy() -> list[Any]:
    """Copies of the state, each of one rank or of two, with parameters here and elsewhere."""
    found: list[Any] = []
    for offload in (None, offload_at(0.3, 0.6), offload_at(0.5, 0.3)):
        run = runs.build("accumulates", runs.fused, 3, offload=offload, mesh=2)
        found.append([runs.advance("accumulates", run, range(3)), runs.state_of(run)])
        run[2].check_copies()
    return found


def test_copies_of_the_state() -> None:
    for resident, *moved in run_ranks(copy, 4, timeout_s=2 * TIMEOUT_S):
        for one in moved:
            assert_same(resident, one)


def account(states: float, parameters: float, folder: str, precision: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = models.Stack()
        model.blocks[1].requires_grad_(False)
    offload = offload_at(states, parameters, folder)
    optimizer = runs.fused(model)
    zero = zs.shard(model, optimizer, stage=3, offload=offload, precision=precision)
    for step in range(2):
        models.stack_loss(model, step, runs.rank_of()).backward()
        optimizer.step()
        optimizer.zero_grad()
    models.stack_loss(model, 3, runs.rank_of()).backward()
    memory = zero.memory()
    specs = [bucket.spec for unit in zero._engine.units for bucket in unit.buckets]
    moved = sum(spec.layout.shard_numel for spec in specs if spec.row.parameters.memory != "device")
    return {
        "now": memory.resident_bytes,
        "said": memory.predicted_bytes,
        "peak": memory.peak_bytes["transient"],
        "moved": moved,
        "whole": any(
            one.requires_grad and slot_of(one).bucket.spec.row.parameters.memory == "device"
            for one in model.parameters()
        ),
        "text": zero.summary(),
        "row": str(zero.residency.parameters),
    }


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("states", "parameters", "place"),
    [(0.0, 0.4, "host"), (0.0, 0.4, "file"), (1.0, 1.0, "file"), (0.4, 1.0, "host"), (0.4, 1.0, "file")],
)
def test_bytes_are_predicted_by_memory(
    states: float, parameters: float, place: str, precision: str, world: int, tmp_path: Path
) -> None:
    folder = str(tmp_path) if place == "file" else ""
    for found in run_ranks(account, world, states, parameters, folder, precision, process_group=world > 1):
        now, said = found["now"], found["said"]
        assert {k: v for k, v in now.items() if k != "transient"} == {k: v for k, v in said.items() if k != "transient"}
        assert found["peak"] == said["transient"]
        assert now["file" if folder else "host"] >= found["moved"] * (2 if precision == "bf16" else 4) > 0
        assert (now["parameters"] == 0) is (parameters == 1.0)
        assert "offloaded: the parameters with" in found["text"]
        words = "in files" if folder else "on the host"
        assert found["row"] == (f"sharded, {words}" if parameters == 1.0 else f"sharded, 40% {words}")


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_where_parameters_stay_whole_the_error_names_stage_3(stage: int) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Offload\(parameters=0.5\) with parameters replicated.* Write stage=3"):
        zs.shard(model, runs.fused(model), stage=stage, offload=zs.Offload(parameters=0.5))
    assert type(model.weight) is nn.Parameter
