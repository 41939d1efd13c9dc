"""Bits that depend on the program alone: whatever record of passes a run has, at any stage, over both transports.

Ranks take different paths here: routes differ by rank, step and micro-batch, in order and in length. A job that resumes
from a checkpoint begins without records, so it agrees on passes that an undisturbed one follows.
"""

import itertools
import logging
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, assert_heard
from tests.rotation import third
from zeroshard.testing import run_ranks

Route = list[int]
DEPTH = 4
PROGRAMS = 4
SAME_ORDER: Route = [0, 1, 2, 3]


def draw(seed: int, world: int) -> list[list[tuple[bool, list[Route]]]]:
    """Return a program: by step and micro-batch whether gradients are reduced, and the route of each rank."""
    rng = random.Random(seed)

    def route() -> Route:
        blocks = rng.sample(range(DEPTH), rng.randint(0, DEPTH))
        return sorted(blocks) if rng.random() < 0.6 else blocks + rng.choices(range(DEPTH), k=rng.randint(0, 2))

    steps = []
    for _ in range(4):
        micros = rng.randint(1, 3)
        syncs = [rng.random() < 0.5 for _ in range(micros - 1)] + [True]
        alike = route() if rng.random() < 0.3 else None
        steps.append([(is_synced, [alike or route() for _ in range(world)]) for is_synced in syncs])
    return steps


def build(stage: int, shares: bool, seed: int, replicas: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, zs.Zero]:
    """Return a model of blocks that each are a unit, and what trains it."""
    model = models.build(models.Routed, depth=DEPTH)
    optimizer = models.adamw(model) if seed % 2 else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    zero = zs.shard(
        model,
        optimizer,
        stage=stage,
        units=list(model.blocks),
        mesh=replicas,
        settings=zs.Settings(shared_memory=shares, watchdog_s=WATCHDOG_S),
    )
    assert_heard(zero, model, stage, shared_memory=shares, units=model.blocks, mesh=replicas)
    return model, optimizer, zero


def run(seed: int, stage: int, shares: bool, folder: Path | None, replicas: int = 1) -> list[Tensor]:
    """Train program `seed`, begun anew from a checkpoint before each step where there is a folder; return the end."""
    model, optimizer, zero = build(stage, shares, seed, replicas)
    world, rank = zero.mesh.world_size, zero.mesh.rank
    for step, micros in enumerate(draw(seed, world)):
        if folder is not None and step:
            zero.save(folder / f"step-{step}")
            model, optimizer, zero = build(stage, shares, seed, replicas)
            zero.load(folder / f"step-{step}")
        for micro, (is_synced, routes) in enumerate(micros):
            x = models.features(step, rank, micro)
            if is_synced:
                model(x, routes[rank]).square().mean().backward()
            else:
                with zero.no_sync():
                    model(x, routes[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return [p.detach().clone() for p in model.parameters()]


def runs(folder: str, seeds: list[int], replicas: int = 1) -> list[str]:
    """Return, for each program, which of its runs end elsewhere than the first."""
    found = []
    for seed in seeds:
        first = run(seed, 3, True, None, replicas)
        for stage, shares, resumes in itertools.product(STAGES, (True, False), (False, True)):
            where = Path(folder) / f"{seed}-{stage}-{shares}" if resumes else None
            # Each stage and transport once, undisturbed or resumed in turn, costs half of all.
            if (stage + shares + resumes + seed) % 2:
                end = run(seed, stage, shares, where, replicas)
                if not all(map(torch.equal, first, end)):
                    found.append(f"program {seed}, stage {stage}, shared memory {shares}, resumed {resumes}")
    return found


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_neither_stage_nor_transport_nor_record_changes_bits(world: int, tmp_path: Path) -> None:
    seeds = third(range(PROGRAMS if world == 2 else PROGRAMS // 2))
    for found in run_ranks(runs, world, str(tmp_path), seeds, timeout_s=3 * TIMEOUT_S):
        assert found == []


@pytest.mark.rotates
def test_neither_do_copies_of_the_state(tmp_path: Path) -> None:
    for found in run_ranks(runs, 4, str(tmp_path), [1], 2, timeout_s=3 * TIMEOUT_S):
        assert found == []


def opposite(stage: int, shares: bool) -> tuple[list[str], list[list[zs.Event]]]:
    """Use units in opposite orders on two ranks; return what was logged, and each step's trace."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard.core.order").addHandler(handler)
    model, optimizer, zero = build(stage, shares, 0)
    steps = []
    for step in range(3):
        route = SAME_ORDER if zero.mesh.rank == 0 else SAME_ORDER[::-1]
        model(models.features(step, zero.mesh.rank), route).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(zero.trace.step_events(step))
    return logged, steps


@pytest.mark.product
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_waits_for_other_ranks_is_said_once_and_then_expected(stage: int, shares: bool) -> None:
    for logged, (first, _, last) in run_ranks(opposite, 2, stage, shares, timeout_s=TIMEOUT_S):
        assert len(logged) <= 1
        assert any(event.kind == "postpone" for event in first)
        assert not any(event.kind == "postpone" for event in last), "the record knows better now"
        gathers = [(event.phase, event.unit) for event in last if event.kind == "gather"]
        assert len(set(gathers)) == len(gathers), "what is needed again stays"
