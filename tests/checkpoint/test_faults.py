"""Every file operation may fail, and every process may be killed: one error everywhere, and no checkpoint is lost."""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.oracle import assert_same
from zeroshard.checkpoint import files
from zeroshard.checkpoint.verify import latest, verify
from zeroshard.testing import RankFailure, run_ranks

from . import small
from .faulty import HINT, Failing, fail_each_operation_of_load, fail_each_operation_of_save, refuse
from .rig import TIMEOUT_S, Trainer


def write_half(name: str, args: tuple[Any, ...]) -> int | None:
    """Take a part of what is written, which is no failure: the rest must follow."""
    return os.write(args[0], args[1][: len(args[1]) // 2]) if name == "write" and len(args[1]) > 1 else None


def report_full(name: str, args: tuple[Any, ...]) -> int | None:
    """Say that hardly a byte is free."""
    return 7 if name == "free_bytes" else None


@pytest.mark.parametrize("culprit", [0, 1])
def test_each_file_operation_of_a_save_may_fail(tmp_path: Path, culprit: int) -> None:
    args = (str(tmp_path), culprit, refuse)
    by_rank = run_ranks(fail_each_operation_of_save, 2, *args, timeout_s=TIMEOUT_S)
    operations = [name for name, _ in by_rank[culprit]]
    texts = [[text for _, text in found] for found in by_rank]
    assert texts[0] == texts[1]
    # All but the last, which fails nothing, the question for free bytes, which is answered, and those of LATEST.
    assert [name for name, text in zip(operations, texts[0], strict=True) if not text] == (
        ["free_bytes", *HINT, ""] if culprit == 0 else [""]
    )
    expected = {"create", "write", "sync", "close"}
    assert set(operations) >= (expected | {"rename", "sync_folder", "make_folder"} if culprit == 0 else expected)
    assert all(f"failed on rank {culprit}: OSError: [Errno " in text for text in texts[0] if text)


def test_a_failure_of_the_hint_for_people_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = files.rename

    def fail(source: Path, target: Path) -> None:
        refuse("rename", ()) if target.name == "LATEST" else rename(source, target)

    monkeypatch.setattr(files, "rename", fail)
    with pytest.warns(UserWarning, match=r"committed .*step-2, but could not write its name to .*LATEST, .*Errno 5"):
        verify(small.write(tmp_path))
    assert os.listdir(tmp_path) == ["step-2"]


@pytest.mark.rotates
def test_a_short_write_is_continued(tmp_path: Path) -> None:
    found = run_ranks(fail_each_operation_of_save, 2, str(tmp_path), 0, write_half, timeout_s=TIMEOUT_S)
    assert [text for rank in found for _, text in rank if text] == []
    assert "write" in [name for name, _ in found[0]]


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    found = run_ranks(fail_each_operation_of_save, 2, str(tmp_path), 0, report_full, timeout_s=TIMEOUT_S)
    texts = [text for _, text in found[1] if text]
    assert len(texts) == 1
    assert "has 7 free bytes, and the checkpoint needs" in texts[0]


def test_another_job_may_make_the_folders_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder = files.make_folder

    def make_it_twice(path: Path, *mode: int | None) -> None:
        if path.name in ("runs", "a"):
            path.mkdir()
        make_folder(path, *mode)

    monkeypatch.setattr(files, "make_folder", make_it_twice)
    verify(small.write(tmp_path / "runs" / "a"))


def test_each_file_operation_of_a_load_may_fail(tmp_path: Path) -> None:
    by_rank = run_ranks(fail_each_operation_of_load, 2, str(tmp_path), 1, timeout_s=TIMEOUT_S)
    texts = [[text for _, text in found] for found in by_rank]
    assert texts[0] == texts[1]
    assert sum(1 for text in texts[0] if "Nothing in memory was changed." in text) > 20
    assert {name for name, _ in by_rank[1]} >= {"open_file", "read_at", "size_of", "names_in", "close"}
    assert texts[0][-1] == ""


# -- kill -------------------------------------------------------------------------------------------------------------


def die(name: str, args: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(folder: str, culprit: int, operation: int, after_s: float, options: dict[str, Any]) -> None:
    """Train and save step after step; one rank is killed at an operation of the second save, or after some time."""
    trainer = Trainer.make(3)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/step-1", **options)
    trainer.zero.wait()
    is_culprit = trainer.zero.mesh.rank == culprit
    if is_culprit and after_s:
        threading.Timer(after_s, die, ("", ())).start()
    with Failing(operation if is_culprit else -1, die):
        for step in range(2, 1000):
            trainer.train(step - 1, step)
            trainer.zero.save(f"{folder}/step-{step}", **options)


def undisturbed(last: int) -> list[dict[str, Any]]:
    """Return the state after each step."""
    trainer = Trainer.make(3)
    states = []
    for step in range(last):
        trainer.train(step, step + 1)
        states.append(trainer.state())
    return states


def resume(path: str, first: int, last: int) -> dict[str, Any]:
    """Load and train to `last`, saving once on the way where the killed run would have."""
    trainer = Trainer.make(3, key=1)
    assert trainer.zero.load(path).step == first
    if first + 1 <= last:
        trainer.train(first, first + 1)
        trainer.zero.save(Path(path).parent / f"step-{first + 1}")
        trainer.train(first + 1, last)
    return trainer.state()


@pytest.fixture(scope="module")
def expected() -> dict[int, list[list[dict[str, Any]]]]:
    """The states of an undisturbed run on one rank and on two."""
    return {world: run_ranks(undisturbed, world, 6, timeout_s=TIMEOUT_S, process_group=world > 1) for world in (1, 2)}


@pytest.mark.product
@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {}), (2, {}), (2, {"asynchronous": True}), (2, {"keep": 2}), (2, {"asynchronous": True, "keep": 2})],
    ids=str,
)
def test_a_kill_loses_no_checkpoint(tmp_path: Path, expected: Any, world: int, options: dict[str, Any]) -> None:
    draw = random.Random(f"{world} {options}")
    kills = [(culprit, draw.randint(1, 30 if culprit == 0 else 12), 0.0) for culprit in range(world)]
    kills.append((draw.randrange(world), -1, draw.uniform(0.0, 0.15)))
    for number, (culprit, operation, after_s) in enumerate(kills):
        folder = tmp_path / str(number)
        args = (str(folder), culprit, operation, after_s, options)
        with pytest.raises(RankFailure) as caught:
            run_ranks(save_until_killed, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1)
        assert caught.value.errors[culprit].type_name == "SIGKILL", caught.value
        found = latest(folder)
        assert found is not None
        step = int(found.name.removeprefix("step-"))
        listed = {int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-")}
        # Killed between commit and retention, one more is there than is asked for.
        kept = set(range(max(1, step - options["keep"] + 1) if "keep" in options else 1, step + 1))
        assert kept <= listed <= set(range(1, step + 1)), "a committed checkpoint was lost"
        assert len(listed - kept) <= 1
        for one in listed:
            verify(folder / f"step-{one}")
        if step < 6:
            states = run_ranks(resume, world, str(found), step, 6, timeout_s=TIMEOUT_S, process_group=world > 1)
            for rank, state in enumerate(states):
                mine = dict(expected[world][rank][-1])
                if rank:
                    del mine["buffers"], state["buffers"]
                assert_same(mine, state, f"{args}, rank {rank}")
            assert not [name for name in os.listdir(folder) if name.startswith(".tmp-step")]
