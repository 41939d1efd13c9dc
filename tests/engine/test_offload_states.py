"""States, master weights and gradients elsewhere: the bits of a run that keeps all on the device, by equal kernels.

Owns what offload must not change, at fractions, stages and numbers of ranks, and what it must: where bytes lie. Device
and host are one memory on a CPU, so every difference is an error of the engine. `tests/emulated` has streams.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES_AT, TIMEOUT_S, WATCHDOG_S, assert_same
from tests.rotation import third
from tools.settled import settled
from zeroshard.core.slot import slot_of
from zeroshard.describe.offload import offload_of
from zeroshard.table.cells import Cell, Elsewhere, Place, Sharded
from zeroshard.testing import run_ranks

FRACTIONS = (0.0, 0.3, 1.0)
PLACES = ("host", "file")
STAGING_BYTES = 1 << 16


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def offload_at(fraction: float | None, place: str, folder: str) -> zs.Offload | None:
    if fraction is None:
        return None
    return zs.Offload(states=fraction, to=folder if place == "file" else "host", staging_bytes=STAGING_BYTES)


def accumulates(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero, step: int, seen: list[Any]
) -> torch.Tensor:
    """Two backwards, one of them without a reduction, then clipping."""
    with zero.no_sync():
        models.stack_loss(model, step, rank_of(), 0).backward()
    models.stack_loss(model, step, rank_of(), 1).backward()
    loss = models.stack_loss(model, step, rank_of(), 2)
    loss.backward()
    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    seen.append(zero.grad_norm(1.0))
    return loss


def leaves_out(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero, step: int, seen: list[Any]
) -> torch.Tensor:
    """Ranks use other blocks at each step, some blocks no rank uses, and one gradient is forgotten, one replaced."""
    route = [block for block in range(3) if (block + step + rank_of()) % 3]
    loss = (model(models.features(step, rank_of()), route) - models.targets(step, rank_of())).square().mean()
    loss.backward()
    seen.append([name for name, p in model.named_parameters() if p.grad is None])
    if step == 1:
        model.stem.weight.grad = None
        model.head.bias.grad = torch.full((3,), 0.25)
    if step == 2:
        optimizer.param_groups[0]["lr"] /= 2
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


def overflows(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero, step: int, seen: list[Any]
) -> torch.Tensor:
    """A step whose gradients are not finite on one rank, which the loss scale has skipped on all."""
    loss = models.stack_loss(model, step, rank_of())
    (loss * (float("inf") if step == 1 and rank_of() == 0 else 1.0)).backward()
    seen.append(zero.loss_scale)
    return loss


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero, step: int, seen: list[Any]
) -> torch.Tensor:
    loss = models.gpt_loss(model, step, rank_of())
    loss.backward()
    return loss


AT_RANDOM = zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
STEPS: dict[str, tuple[Any, Callable[..., torch.Tensor], dict[str, Any]]] = {
    "accumulates": (models.Stack, accumulates, {}),
    "leaves-out": (models.Routed, leaves_out, {}),
    "overflows": (models.Stack, overflows, {"precision": "fp16"}),
    "bf16": (models.GPT, plain, {"precision": "bf16"}),
    "masters-at-random": (models.GPT, plain, {"precision": AT_RANDOM}),
}


def build(
    name: str, make: Callable[..., torch.optim.Optimizer], stage: int, **options: Any
) -> tuple[Any, Any, zs.Zero]:
    kind, _, given = STEPS[name]
    model = models.build(kind)
    optimizer = make(model)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": WATCHDOG_S, **given, **options}))
    return model, optimizer, zero


def advance(name: str, run: tuple[Any, Any, zs.Zero], steps: range) -> list[Any]:
    model, optimizer, zero = run
    seen: list[Any] = []
    for step in steps:
        seen.append(STEPS[name][1](model, optimizer, zero, step, seen).detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def state_of(run: tuple[Any, Any, zs.Zero]) -> dict[str, Any]:
    model, optimizer, zero = run
    with zero.gathered(states=True):
        state = optimizer.state_dict()["state"]
        return {
            "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
            "states": {k: {key: v.clone() for key, v in one.items()} for k, one in state.items()},
        }


def train(name: str, make: Callable[..., Any], place: str, cases: Sequence[tuple[int, float]]) -> dict[Any, Any]:
    """Train at stages, with fractions of states elsewhere and, under None, without. Runs on a rank."""
    found: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = dict.fromkeys(one for stage, part in cases for one in ((stage, None), (stage, part)))
        for stage, fraction in runs:
            run = build(name, make, stage, offload=offload_at(fraction, place, folder))
            found[stage, fraction] = {"seen": advance(name, run, range(4)), **state_of(run)}
            run[2].check_copies()
    return found


fused = functools.partial(models.adamw, fused=True)
looped = functools.partial(models.sgd, foreach=False, fused=False)


# Each on two ranks, and each place on 1, 3 and 4 in turn.
@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "world", "place"),
    [
        (name, world, kind)
        for number, name in enumerate([*STEPS][:4])
        for shift, kind in enumerate(PLACES)
        for world in (2, (1, 3, 4)[(number + shift) % 3])
    ],
)
def test_offloaded_runs_equal_resident_ones(name: str, world: int, place: str) -> None:
    cases = third(itertools.product(STAGES_AT[world][::-1], FRACTIONS[::-1]))
    for found in run_ranks(train, world, name, fused, place, cases, timeout_s=2 * TIMEOUT_S, process_group=world > 1):
        for stage, fraction in cases:
            where = f"stage {stage} of {world}, {fraction} {place}"
            assert_same(found[stage, None], found[stage, fraction], where)


@pytest.mark.product
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [looped, functools.partial(models.sgd, fused=True), models.adamw])
def test_other_kernels_are_the_same_there(make: Callable[..., Any], place: str) -> None:
    cases = third(itertools.product((3, 2), FRACTIONS[::-1]))
    for found in run_ranks(train, 2, "accumulates", make, place, cases, timeout_s=2 * TIMEOUT_S):
        for (stage, fraction), one in found.items():
            assert_same(found[stage, None], one, f"stage {stage}, {fraction} {place}")


def test_masters_that_are_rounded_at_random_are_the_same_on_the_host() -> None:
    cases = third(itertools.product((3, 1), FRACTIONS[::-1]))
    for found in run_ranks(train, 2, "masters-at-random", fused, "host", cases, timeout_s=2 * TIMEOUT_S):
        for (stage, fraction), one in found.items():
            assert_same(found[stage, None], one, f"stage {stage}, {fraction}")


def move(name: str, place: str, stage: int) -> dict[str, Any]:
    """Train, save and go on with states in other places each."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        folder, found = Path(shared[0]), {}
        straight = build(name, fused, stage)
        found["straight"] = advance(name, straight, range(6))[-1], state_of(straight)
        first = build(name, fused, stage, offload=offload_at(0.5, place, own))
        advance(name, first, range(2))
        first[2].save(folder / "step-2")
        second = build(name, fused, stage)
        second[2].load(folder / "step-2")
        advance(name, second, range(2, 4))
        second[2].save(folder / "step-4", asynchronous=True)
        second[2].wait()
        third = build(name, fused, stage, offload=offload_at(1.0, place, own))
        third[2].load(folder / "step-4")
        found["moved"] = advance(name, third, range(4, 6))[-1], state_of(third)
        third[2].save(folder / "step-6", asynchronous=True)
        third[2].wait()
        fourth = build(name, fused, stage, offload=offload_at(0.3, place, own))
        fourth[2].load(folder / "step-6")
        found["back"] = found["straight"][0], state_of(fourth)
        if dist.is_initialized():
            dist.barrier()
    return found


@pytest.mark.product
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (3, 3)])
@pytest.mark.parametrize("name", ["leaves-out", "overflows"])
def test_checkpoints_are_ordinary_ones(name: str, world: int, stage: int, place: str) -> None:
    for found in run_ranks(move, world, name, place, stage, timeout_s=2 * TIMEOUT_S, process_group=world > 1):
        assert_same(found["straight"], found["moved"])
        assert_same(found["straight"], found["back"])


def average(place: str, fraction: float | None) -> list[torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, zero = run = build("accumulates", fused, 3, offload=offload_at(fraction, place, folder))
        mean = zero.ema(0.5)
        for step in range(3):
            advance("accumulates", run, range(step, step + 1))
            mean.update()
        with mean.swapped(), zero.gathered():
            inside = [p.detach().clone() for p in model.parameters()]
        with zero.gathered(states=True, writeback=True):
            for p in model.parameters():
                p.detach().mul_(0.5)
            loaded = optimizer.state_dict()
            optimizer.load_state_dict(loaded)
        advance("accumulates", run, range(3, 4))
        return [*inside, *state_of(run)["parameters"].values()]


@pytest.mark.product
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world", [1, 2])
def test_averages_and_whole_states_are_the_same(world: int, place: str) -> None:
    for fraction in FRACTIONS[1:]:
        expected = run_ranks(average, world, place, None, process_group=world > 1)
        assert_same(expected, run_ranks(average, world, place, fraction, process_group=world > 1))


def account(place: str, stage: int, fraction: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = model, optimizer, zero = build("accumulates", fused, stage, offload=offload_at(fraction, place, folder))
        advance("accumulates", run, range(2))
        models.stack_loss(model, 3, rank_of()).backward()
        memory = zero.memory()
        shares = [
            not slot_of(m).bucket.spec.row.states.is_on_device for g in optimizer.param_groups for m in g["params"]
        ]
        return {"now": memory.resident_bytes, "said": memory.predicted_bytes, "shares": shares, "text": zero.summary()}


@pytest.mark.product
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 2), (3, 3)])
def test_resident_bytes_are_predicted_by_memory(world: int, stage: int, place: str) -> None:
    for fraction in FRACTIONS:
        for found in run_ranks(account, world, place, stage, fraction, process_group=world > 1):
            now, said = found["now"], found["said"]
            assert {k: v for k, v in now.items() if k != "transient"} == {
                k: v for k, v in said.items() if k != "transient"
            }
            assert any(found["shares"]) is (fraction > 0)
            assert all(found["shares"]) is (fraction == 1)
            assert (f"{place}" in now) is (fraction > 0)
            assert ("offloaded:" in found["text"]) is (fraction > 0)
            if fraction == 1:
                assert now["states"] == 0
                assert now["gradients"] == 0 or (world > 1 and stage < 2)


def leave(stage: int, fraction: float | None) -> tuple[Any, Any, list[str]]:
    """Train while states leave and come back between steps; what is asked of them meanwhile is the same."""
    found, said = [], []
    for moves in (False, True):
        run = _, optimizer, zero = build("bf16", fused, stage, offload=offload_at(fraction, "host", ""))
        mean = zero.ema(0.5)
        seen: list[Any] = []
        for step in range(3):
            seen += advance("bf16", run, range(step, step + 1))
            if moves:
                zero.offload_states()
                zero.offload_states()
                try:
                    optimizer.step()
                except RuntimeError as error:
                    said.append(str(error))
                assert zero.memory().resident_bytes["states"] == mean.nbytes
            mean.update()
            with mean.swapped(), zero.gathered():
                seen.append(next(zero._model.parameters()).detach().clone())
            seen.append(state_of(run))
            if moves:
                zero.reload_states()
                zero.reload_states()
        found.append((seen, zero.memory().resident_bytes))
    return found[0], found[1], said


@pytest.mark.product
@pytest.mark.parametrize(("world", "stage", "fraction"), [(1, 3, None), (2, 1, None), (2, 3, 0.4)])
def test_states_that_leave_for_a_while_come_back_as_they_were(world: int, stage: int, fraction: float | None) -> None:
    for stayed, left, said in run_ranks(
        leave, world, stage, fraction, process_group=world > 1, timeout_s=2 * TIMEOUT_S
    ):
        assert_same(stayed, left)
        assert len(said) == 3
        assert all("zero.reload_states()" in text for text in said)


def test_what_a_text_asks_for() -> None:
    assert offload_of("states=0.6,to=/scratch") == zs.Offload(states=0.6, to="/scratch")
    assert offload_of("/scratch") == zs.Offload(to="/scratch")
    assert offload_of("staging_bytes=1000000") == zs.Offload(staging_bytes=1000000)
    with pytest.raises(ValueError, match="'disk=/x' is none of"):
        offload_of("disk=/x")
    with pytest.raises(ValueError, match="stands for what"):
        offload_of("auto")


def test_updates_in_the_backward_are_refused_by_name() -> None:
    refused = "updates in the backward were slower than those of optimizer.step\\(\\), and are no longer there"
    for text in ("update=in-backward", "max_norm=1.0"):
        with pytest.raises(ValueError, match=refused):
            offload_of(text)
    with pytest.raises(ValueError, match=refused):
        zs.Offload(update="in-backward", max_norm=1.0)
    assert zs.Offload(update="step") == zs.Offload()


def moved(cell: Cell, sizes: Sequence[int]) -> list[int]:
    return [place for place, one in enumerate(cell.of_buckets(sizes)) if one.memory == "host"]


def test_fractions_round_up_to_whole_buckets_spread_evenly() -> None:
    def host(fraction: float) -> Cell:
        return Elsewhere(Sharded(), Place("host"), fraction)

    assert moved(host(0.5), [64] * 8) == [0, 2, 4, 6]
    assert moved(host(0.25), [64] * 8) == [0, 4]
    assert moved(host(0.07), [64] * 100) == moved(host(0.061), [64] * 100)
    assert len(moved(host(0.07), [64] * 100)) == 7, "7 of 100 are 0.07, although 0.07 * 100 > 7 in floats"
    assert moved(host(1.0), [310, *[46] * 15]) == list(range(16))
    assert len(moved(host(1e-9), [310, *[46] * 15])) == 1, "a fraction above 0 moves at least one"
    sizes = [310, *[46, 3] * 15]
    steps = [set(moved(host(percent / 100), sizes)) for percent in range(1, 101)]
    for percent, (less, more) in enumerate(itertools.pairwise(steps), start=2):
        reached = sum(sizes[place] for place in more)
        assert less <= more and percent / 100 * sum(sizes) <= reached < percent / 100 * sum(sizes) + max(sizes)
    assert moved(Sharded(), sizes) == []


def test_states_that_are_moved_away_join_what_the_host_has() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, units=[nn.Linear], offload=zs.Offload(states=0.5))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = zero.memory().resident_bytes
    assert before["host"] and before["states"]
    zero.offload_states()
    after = zero.memory().resident_bytes
    assert (after["host"], after["states"]) == (before["host"] + before["states"], 0)
