"""Any number of ranks and any stage to any other: every logical tensor is equal bit for bit, and training goes on."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.oracle import assert_same
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from . import rig
from .rig import TIMEOUT_S, Trainer

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
    trainer = Trainer.make(stage, replicas=2)
    trainer.train(0, 2)
    trainer.zero.save(f"{folder}/replicas-{stage}")
    other = Trainer.make(3 - stage, key=1, replicas=2)
    other.zero.load(f"{folder}/replicas-{stage}")
    return {"before": trainer.state(), "after": other.state()}


@pytest.mark.parametrize("stage", [0, 3])
def test_replicas_write_each_element_once(tmp_path: Path, stage: int) -> None:
    for result in run_ranks(write_replicas, 4, str(tmp_path), stage, timeout_s=TIMEOUT_S):
        for part in ("parameters", "optimizers"):
            assert_same(result["before"][part], result["after"][part], part)
    path = tmp_path / f"replicas-{stage}"
    manifest = verify(path)
    written = sum(c.stop - c.start for entry in manifest.files.values() for c in entry.chunks)
    assert written == sum(spec.numel for spec in manifest.tensors)
    # Ranks 2 and 3 hold copies; of what they write only their own random generators are left.
    for name in ("params-00003-of-00004.safetensors", "params-00004-of-00004.safetensors"):
        assert manifest.files[name].chunks == ()


def moves(folder: str, seed: int, count: int) -> list[tuple[str, str]]:
    """Load at a random stage and precision, save at once: what is written must be what was read."""
    draw = random.Random(seed)
    pairs = []
    world = Trainer.make(0).zero.mesh.world_size
    for number in range(count):
        source = f"{draw.choice(WORLDS)}-{draw.choice(STAGES)}"
        stage, precision = draw.choice(STAGES), draw.choice(["fp32", "bf16", "fp16"])
        trainer = Trainer.make(stage, key=2, precision=precision, cut=draw.choice(["element", "row", "tensor"]))
        loaded = trainer.zero.load(f"{folder}/{source}")
        target = f"{folder}/moved-{world}-{seed}-{number}-{precision}-{stage}"
        trainer.zero.save(target, loaded.extra)
        pairs.append((f"{folder}/{source}", target))
    return pairs


@pytest.mark.parametrize("world", WORLDS)
def test_random_moves_between_stages_and_precisions(written: Any, world: int) -> None:
    folder, _ = written
    pairs = run_ranks(moves, world, str(folder), world, 12, timeout_s=TIMEOUT_S, process_group=world > 1)[0]
    for source, target in pairs:
        found = [one for one in diff(source, target) if one.name not in ("extra.json", "step")]
        assert found == [], (source, target)
