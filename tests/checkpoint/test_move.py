"""Any number of ranks and any stage to any other: every logical tensor is equal bit for bit, and training goes on."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.oracle import assert_same, randn, seed
from tests.rotation import share, third
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from . import rig
from .rig import TIMEOUT_S, WATCHDOG_S, Trainer, copied

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, int], list[dict[str, Any]]]]:
    """A checkpoint of every number of ranks and every stage, with what each rank saw before and after."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved = {}
    for world in WORLDS:
        by_rank = run_ranks(rig.write, world, str(folder), STAGES, timeout_s=TIMEOUT_S, process_group=world > 1)
        for stage in STAGES:
            saved[world, stage] = [result[stage] for result in by_rank]
    return folder, saved


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_the_same_ranks_go_on_as_if_nothing_had_happened(written: Any, world: int) -> None:
    folder, saved = written
    paths = [str(folder / f"{world}-{stage}") for stage in STAGES]
    by_rank = run_ranks(rig.read, world, paths, STAGES, timeout_s=TIMEOUT_S, process_group=world > 1)
    for rank, results in enumerate(by_rank):
        for stage, result in zip(STAGES, results, strict=True):
            loaded = result.pop("loaded")
            assert loaded.extra == {"losses": [0.5], "epoch": (1, 2)}
            expected = saved[world, stage][rank]
            # Running statistics are each rank's own, and rank 0's are saved, as DistributedDataParallel would have it.
            expected["before"]["buffers"] = saved[world, stage][0]["before"]["buffers"]
            if rank:
                del expected["after"]["buffers"], result["after"]["buffers"]
            assert_same(expected, result, f"[rank {rank}/{world}] stage {stage}")


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_is_read_at_every_number_of_ranks(written: Any, world: int) -> None:
    """All 16 layouts, each at a stage drawn for it; what follows is compared between all of them."""
    folder, saved = written
    layouts = [layout for layout in saved if layout[0] != world]
    stages = random.Random(world).choices(STAGES, k=len(layouts))
    paths = [str(folder / f"{ranks}-{stage}") for ranks, stage in layouts]
    by_rank = run_ranks(rig.read, world, paths, stages, timeout_s=TIMEOUT_S, process_group=world > 1)
    for rank, results in enumerate(by_rank):
        for layout, stage, result in zip(layouts, stages, results, strict=True):
            where = f"{layout} read by [rank {rank}/{world}] at stage {stage}"
            for part in ("parameters", "buffers", "optimizers"):
                assert_same(saved[layout][0]["before"][part], result["before"][part], where)
    for layout, result in zip(layouts, by_rank[0], strict=True):
        twin = next(other for kept, other in zip(layouts, by_rank[0], strict=True) if kept[0] == layout[0])
        assert_same(
            twin["after"]["parameters"], result["after"]["parameters"], f"training after {layout} at {world} ranks"
        )


def test_stages_write_the_same_checkpoint(written: Any) -> None:
    folder, _ = written
    for world in WORLDS:
        for stage in STAGES[1:]:
            assert diff(folder / f"{world}-0", folder / f"{world}-{stage}") == []
    assert diff(folder / "1-0", folder / "2-0") != []


def write_replicas(folder: str, stage: int) -> dict[str, Any]:
    """Save from two replicas, and load that on two replicas of another stage."""
    trainer = Trainer.make(stage, mesh=2)
    trainer.train(0, 2)
    trainer.zero.save(f"{folder}/replicas-{stage}")
    other = Trainer.make(3 - stage, key=1, mesh=2)
    other.zero.load(f"{folder}/replicas-{stage}")
    return {"before": trainer.state(), "after": other.state()}


@pytest.mark.parametrize("stage", [0, 3])
def test_replicas_write_each_element_once(tmp_path: Path, stage: int) -> None:
    for result in run_ranks(write_replicas, 4, str(tmp_path), stage, timeout_s=TIMEOUT_S):
        for part in ("parameters", "optimizers"):
            assert_same(result["before"][part], result["after"][part], part)
    path = tmp_path / f"replicas-{stage}"
    manifest = verify(path)
    written = sum(c.stop - c.start for name in manifest.files for c, _ in manifest.place_of(name))
    assert written == sum(spec.numel for spec in manifest.tensors)
    # Ranks 2 and 3 hold copies; of what they write only their own random generators are left.
    for name in ("params-00003-of-00004.safetensors", "params-00004-of-00004.safetensors"):
        assert manifest.place_of(name) == []


def move_between_orders(folder: str, stage: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Save convolutions that lie in one order in memory, load them into another; return the state saved and loaded."""
    moved = []
    for key, orders in enumerate(itertools.permutations([torch.contiguous_format, torch.channels_last])):
        states = []
        for order in orders:
            seed(8, key, len(states))
            model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 2, 3)).to(memory_format=order)
            optimizer = torch.optim.AdamW(model.parameters())
            zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
            if states:
                zero.load(f"{folder}/{key}")
            else:
                model(randn(2, 3, 8, 8, key=(9, key))).square().sum().backward()
                optimizer.step()
                zero.save(f"{folder}/{key}")
            with zero.gathered(states=True):
                states.append(copied({"parameters": model.state_dict(), "optimizer": optimizer.state_dict()}))
        moved.append((states[0], states[1]))
    return moved


@pytest.mark.product
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (3, 3)])
def test_tensors_are_read_into_another_order(world: int, stage: int, tmp_path: Path) -> None:
    args = (str(tmp_path), stage)
    for moved in run_ranks(move_between_orders, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1):
        for saved, loaded in moved:
            assert_same(saved, loaded)


# -- on the way -------------------------------------------------------------------------------------------------------

BATCH, STEPS_EACH = 12, 4
PATH = [(4, 3), (3, 2), (1, 0)]


def make_plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that know nothing of ranks."""
    seed(11)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def losses_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, rank: int = 0, world: int = 1
) -> list[float]:
    """Take some steps, each on this rank's part of a batch that does not depend on ranks."""
    losses = []
    for step in range(first, first + STEPS_EACH):
        x = randn(BATCH, 6, key=(21, step))[rank * BATCH // world : (rank + 1) * BATCH // world]
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(zs.mean_across_ranks(loss)) if world > 1 else loss.item())
    return losses


def go_on(folder: str, stage: int, first: int) -> list[float]:
    """Load what was saved after `first` steps, if any were made, train on, and save."""
    model, optimizer = make_plain()
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    if first:
        assert zero.load(f"{folder}/step-{first}").step == first
    losses = losses_of(model, optimizer, first, zero.mesh.rank, zero.mesh.world_size)
    zero.save(f"{folder}/step-{first + STEPS_EACH}")
    return losses


@pytest.mark.rotates
def test_a_run_moves_along_the_curve_of_plain_torch(tmp_path: Path) -> None:
    model, optimizer = make_plain()
    oracle = [loss for leg in range(len(PATH)) for loss in losses_of(model, optimizer, leg * STEPS_EACH)]
    moved = []
    for leg, (world, stage) in enumerate(PATH):
        args = (str(tmp_path), stage, leg * STEPS_EACH)
        moved += run_ranks(go_on, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1)[0]
    # The same sums in another order: fp32's 2**-24 each, some tens of times over.
    assert moved == pytest.approx(oracle, rel=1e-5)
    assert moved[-1] < 0.7 * moved[0]


# -- at random --------------------------------------------------------------------------------------------------------

MOVES = 60
PRECISIONS = ["fp32", "bf16", "fp16"]
REPLICAS = {1: [1], 2: [1], 3: [1], 4: [1, 2]}


def draw_options(draw: random.Random, world: int) -> dict[str, Any]:
    """Draw how a job of this many ranks is sharded."""
    replicas = draw.choice(REPLICAS[world])
    return {
        "stage": draw.choice(STAGES),
        "precision": draw.choice(PRECISIONS),
        **({"mesh": replicas} if replicas > 1 else {}),
    }


def write_kinds(folder: str, kinds: list[dict[str, Any]]) -> None:
    """Train and save one job after the other, of each kind one."""
    for number, options in enumerate(kinds):
        trainer = Trainer.make(**options)
        trainer.train(0, 2)
        trainer.zero.save(f"{folder}/{trainer.zero.mesh.world_size}-{number}", {"losses": [0.5]})


def move(pairs: list[tuple[str, dict[str, Any], str]]) -> None:
    """Load each source into a job of other options, and save that at once."""
    for source, options, target in pairs:
        trainer = Trainer.make(key=2, **options)
        loaded = trainer.zero.load(source)
        trainer.zero.save(target, loaded.extra, step=loaded.step)


@pytest.mark.timeout(400)
def test_random_moves_lose_no_bit(tmp_path: Path) -> None:
    """Different moves between jobs of all kinds, drawn once and for all."""
    draw = random.Random(2026)
    sources = []
    for world in WORLDS:
        # Each stage and precision once, so that every kind of job is left by some moves, and entered by others.
        every = third(itertools.product(STAGES, PRECISIONS))
        kinds = [draw_options(draw, world) | {"stage": stage, "precision": name} for stage, name in every]
        run_ranks(write_kinds, world, str(tmp_path), kinds, timeout_s=TIMEOUT_S, process_group=world > 1)
        sources += [(f"{world} ranks {kind}", tmp_path / f"{world}-{number}") for number, kind in enumerate(kinds)]
    moved, count = {}, int(share(MOVES // len(WORLDS)))
    for world in WORLDS:
        pairs = []
        while len(pairs) < count:
            (before, source), after = draw.choice(sources), draw_options(draw, world)
            if (what := f"{before} to {world} ranks {after}") not in moved:
                moved[what] = source, tmp_path / f"moved-{world}-{len(pairs)}"
                pairs.append((str(source), after, str(moved[what][1])))
        run_ranks(move, world, pairs, timeout_s=TIMEOUT_S, process_group=world > 1)
    assert len(moved) == count * len(WORLDS)
    assert {what: found for what, (source, target) in moved.items() if (found := differences(source, target))} == {}


def differences(source: Path, target: Path) -> list[str]:
    """Return what differs; a loss scale, which belongs to a precision, may."""
    found = [f"{one.name}: {one.what}" for one in diff(source, target) if one.name != "extra.json"]
    before, after = (json.loads((path / "extra.json").read_bytes()) for path in (source, target))
    return found + [key for key in ("extra", "optimizers") if before[key] != after[key]]
