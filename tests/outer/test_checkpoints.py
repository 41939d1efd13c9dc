"""Checkpoints of islands: resumed in the middle of an interval bit for bit, and read by runs with other islands."""

import shutil
import tempfile
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.oracle import assert_same
from tests.outer.plain import adamw, build, loss_of, mesh_of, nesterov, whole
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import RankFailure, run_ranks

TIMEOUT_S = 120.0
STEPS, SAVED_AFTER = 9, 5
OPTIONS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "average": {"every": 3},
        "momentum, 4 bits": {"every": 3, "bits": 4, "optimizer": nesterov},
        # Saved between the beginning and the end of an exchange.
        "delayed": {"every": 6, "fragments": 2, "delay": 2, "mix": 0.5, "optimizer": torch.optim.Adam, "bits": 8},
    }
)


def made(islands: int, stage: int, outer: dict[str, Any], precision: Any = "fp32") -> tuple[zs.Zero, nn.Module, Any]:
    """Shard a model on islands; on one without `islands`."""
    model = build(torch.float32)
    optimizer = adamw(model.parameters())
    mesh = mesh_of(islands) if islands else None
    options = zs.Outer(**outer) if islands else None
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, outer=options, precision=precision)
    return zero, model, optimizer


def go_on(made: tuple[zs.Zero, nn.Module, Any], steps: range) -> list[Any]:
    """Train; return all parameters after each step."""
    zero, model, optimizer = made
    found = []
    for step in steps:
        loss_of(model, step, dist.get_rank(), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(zero, model))
    return found


def resumed(folder: str, islands: int, stage: int, name: str, precision: Any) -> Any:
    """Return what an interrupted run has after each step since, and what one has that was not interrupted."""
    path = f"{folder}/{stage} {name}/step-{SAVED_AFTER}"
    first = made(islands, stage, OPTIONS[name], precision)
    go_on(first, range(SAVED_AFTER))
    first[0].save(path, keep=2)
    expected = go_on(first, range(SAVED_AFTER, STEPS))
    second = made(islands, stage, OPTIONS[name], precision)
    assert second[0].load(path).step == SAVED_AFTER
    second[0].check_copies()
    actual = go_on(second, range(SAVED_AFTER, STEPS))
    for zero, model, _ in (first, second):
        zero.finish()
        zero.check_copies()
        (expected if zero is first[0] else actual).append(whole(zero, model))
    return expected, actual


CASES = [(stage, name) for stage in range(4) for name in OPTIONS]


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_resumes_in_the_middle_of_an_interval(name: str, tmp_path: Path) -> None:
    precision = zs.Precision(param=torch.bfloat16) if name == "average" else "fp32"
    for found in run_ranks(all_stages, 4, str(tmp_path), name, precision, timeout_s=TIMEOUT_S):
        for stage, (expected, actual) in enumerate(found):
            assert_same(expected, actual, f"stage {stage}, {name}")
    verify(tmp_path / f"0 {name}" / f"step-{SAVED_AFTER}")
    names = sorted(one.name for one in (tmp_path / f"3 {name}").iterdir())
    assert names == ["LATEST", f"step-{SAVED_AFTER}"]


def all_stages(folder: str, name: str, precision: Any) -> list[Any]:
    """Resume at each stage."""
    return [resumed(folder, 2, stage, name, precision) for stage in range(4)]


def save_two(folder: str) -> None:
    """Save two runs; in the second one the second island reads another batch after the last exchange."""
    for name, batch in (("one", 3), ("other", 7)):
        run = made(2, 0, OPTIONS["average"])
        go_on(run, range(3))
        go_on(run, range(batch, batch + 1) if dist.get_rank() else range(3, 4))
        run[0].save(f"{folder}/{name}/step-4")


def test_each_island_is_compared(tmp_path: Path) -> None:
    run_ranks(save_two, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    one, other = (tmp_path / name / "step-4" for name in ("one", "other"))
    assert diff(one, one) == []
    found = {difference.name for difference in diff(one, other)}
    assert {name.split(":")[0] for name in found} == {"island 1"}
    assert {name.split("/")[1] for name in found} == {"exp_avg", "exp_avg_sq", "local"}
    shutil.rmtree(other / "islands")
    with pytest.raises(zs.CheckpointError, match="islands/1"):
        diff(one, other)


# -- other runs -------------------------------------------------------------------------------------------------------


def saved(folder: str, stage: int) -> Any:
    """Save on two islands in the middle of an interval; return the anchors, the values of the last exchange."""
    first = made(2, stage, {"every": 3, "bits": 8, "optimizer": nesterov})
    anchors = go_on(first, range(4))[2]
    first[0].save(f"{folder}/step-4")
    return anchors, torch.get_rng_state()


def loaded(folder: str, islands: int, stage: int) -> Any:
    """Load with another number of islands, or without; return the values, and after some steps those of all ranks."""
    run = made(islands, stage, {"every": 2, "optimizer": nesterov})
    torch.manual_seed(100 + dist.get_rank())
    own = torch.get_rng_state()
    run[0].load(f"{folder}/step-4")
    first, generator = whole(run[0], run[1]), torch.get_rng_state()
    run[0].check_copies()
    go_on(run, range(2))
    run[0].check_copies()
    return first, whole(run[0], run[1]), generator, own


@pytest.mark.rotates
def test_other_islands_start_from_the_anchors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = run_ranks(saved, 4, folder, 0, timeout_s=TIMEOUT_S)
        for islands, stage in ((4, 3), (0, 1)):
            found = run_ranks(loaded, 4, folder, islands, stage, timeout_s=TIMEOUT_S)
            for rank, (first, after, generator, own) in enumerate(found):
                assert_same(before[0][0], first, f"{islands} islands, rank {rank}: the anchors")
                assert_same(found[0][1], after, f"{islands} islands, rank {rank}: after an exchange")
                if islands:
                    # The first island goes on with its generators; the others have none of their own there.
                    assert torch.equal(generator, before[0][1] if rank == 0 else own), rank
        with pytest.raises(RankFailure) as failure:
            run_ranks(saved, 4, folder, 0, timeout_s=TIMEOUT_S)
        assert {error.message.count("exists") for error in failure.value.errors.values()} == {1}


def other_optimizers(folder: str) -> Any:
    """Load with an outer optimizer of another class, and of the same; return warnings, and states after an exchange."""
    first = made(2, 0, {"every": 2, "optimizer": nesterov})
    go_on(first, range(2))
    first[0].save(f"{folder}/step-2")
    found = []
    for optimizer in (torch.optim.Adam, nesterov):
        run = made(2, 0, {"every": 2, "optimizer": optimizer})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run[0].load(f"{folder}/step-2")
        go_on(run, range(2, 4))
        run[0].check_copies()
        (state,) = run[0]._islands.optimizer.state.values()
        found.append(([str(one.message) for one in caught], sorted(state), int(state.get("step", 0))))
    return found


def test_another_outer_optimizer_begins_without_states(tmp_path: Path) -> None:
    for other, same in run_ranks(other_optimizers, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        text = f"{tmp_path}/step-2: its outer optimizer is SGD, here Adam, which begins without states."
        assert other[0] in ([text], [text.replace("step-2", "step-2/islands/1")])
        assert other[1:] == (["exp_avg", "exp_avg_sq", "step"], 1)
        assert same == ([], ["momentum_buffer"], 0)


def damaged(folder: str) -> list[str]:
    """Load a checkpoint of which a part is damaged, and save where one island cannot; return the errors."""
    run = made(2, 3, {"every": 3, "bits": 8, "optimizer": nesterov})
    found = []
    for action in (lambda: run[0].load(f"{folder}/step-4"), lambda: run[0].save(f"{folder}/step-5", asynchronous=True)):
        try:
            action()
        except (zs.CheckpointError, ValueError) as error:
            found.append(str(error))
    return found


def test_a_failure_of_one_island_is_one_of_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(saved, 4, folder, 3, timeout_s=TIMEOUT_S)
        damage(Path(folder) / "step-4" / "islands" / "1")
        with pytest.raises(zs.CheckpointError, match="islands/1"):
            verify(Path(folder) / "step-4")
        for rank, (why, refused) in enumerate(run_ranks(damaged, 4, folder, timeout_s=TIMEOUT_S)):
            assert "are damaged" in why, rank
            assert "asynchronous=True) does not support islands" in refused


def spoil(folder: Path) -> None:
    """Leave checkpoints whose part is missing, damaged, or that of another one; and a stray file in a good one."""
    for name in ("a-4", "b-4", "c-4", "d-4"):
        shutil.copytree(folder / "step-4", folder / name)
    shutil.rmtree(folder / "a-4" / "islands" / "1")
    shutil.rmtree(folder / "b-4" / "islands")
    shutil.rmtree(folder / "c-4" / "islands" / "1")
    shutil.copytree(folder / "other" / "step-4" / "islands" / "1", folder / "c-4" / "islands" / "1")
    damage(folder / "d-4" / "islands" / "1")
    (folder / "step-4" / "islands" / ".nfs0001").touch()


def damage(folder: Path) -> None:
    """Change a byte of a part."""
    part = folder / "params-00001-of-00002.safetensors"
    data = bytearray(part.read_bytes())
    data[-9] ^= 1
    part.write_bytes(data)


def load_spoilt(folder: str) -> list[tuple[str, bool]]:
    """Load these checkpoints; return the error of each, and whether parameters are as before."""
    run, found = made(2, 3, {"every": 3, "bits": 8, "optimizer": nesterov}), []
    before = whole(run[0], run[1])
    for name in ("a-4", "b-4", "c-4", "d-4", "step-4"):
        try:
            run[0].load(f"{folder}/{name}")
            text = ""
        except zs.CheckpointError as error:
            text = str(error)
        found.append((text, all(torch.equal(value, before[key]) for key, value in whole(run[0], run[1]).items())))
    return found


def test_a_part_that_is_missing_damaged_or_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        run_ranks(saved, 4, str(folder), 3, timeout_s=TIMEOUT_S)
    spoil(tmp_path)
    missing = "islands/1: is not a checkpoint"
    texts = [missing, missing, "islands/1: was not saved together", "islands/1/params-00001"]
    for name, text in zip("abcd", texts, strict=True):
        with pytest.raises(zs.CheckpointError, match=text):
            verify(tmp_path / f"{name}-4")
    verify(tmp_path / "step-4")
    for found in run_ranks(load_spoilt, 4, str(tmp_path), timeout_s=TIMEOUT_S):
        for text, (why, is_unchanged) in zip(texts, found[:-1], strict=True):
            assert text in why and "Nothing in memory was changed." in why and is_unchanged
        assert found[-1] == ("", False)
