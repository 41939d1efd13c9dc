"""An island of two ranks is killed at random moments and comes back: each change that was put counts once."""

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from zeroshard.outer.island_exchange import Island
from zeroshard.outer.island_log import read_log, replay
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_source import open_mailbox

from .islands import Arrays, Meeting, at_once, mailbox, options_of, same

NUMEL = 50_000


def run_ranks(options: IslandOptions, is_over: Callable[[int], bool], pause_s: float) -> list[np.ndarray]:
    """Run an island of two ranks, as threads, that learns whole numbers; return their values."""
    meeting = Meeting(2)

    def run(rank: int) -> np.ndarray:
        arrays = Arrays(np.zeros(NUMEL, "<f4"), rank, 2, None, meeting)
        one = Island(options, arrays, open_mailbox(options, arrays))
        while "1" not in meeting.texts(rank, str(int(is_over(one.steps)))):
            arrays.values += 2 * (1 + rank)
            time.sleep(pause_s)
            one.after_step()
        one.finish(others=True)
        assert same(arrays.values, one.anchors)
        return arrays.values

    return at_once(*(partial(run, rank) for rank in range(2)))


def be_killed(options: IslandOptions) -> None:
    """Train until somebody kills this process."""
    run_ranks(options, lambda steps: False, 0.002)


@pytest.mark.timeout(120)
@pytest.mark.product
@pytest.mark.parametrize("staleness", [None, 3])
def test_a_killed_island_comes_back_and_each_change_counts_once(
    staleness: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    draw, context, over = random.Random(staleness or 9), multiprocessing.get_context("forkserver"), threading.Event()
    with mailbox(tmp_path, gone_s=1.0) as box:
        asked = partial(options_of, box, tmp_path, staleness=staleness, log=tmp_path / "log")

        def newest() -> int:
            with box.book.changed:
                return box.book._last("b")

        def kill() -> list[np.ndarray]:
            for _ in range(5):
                before = newest()
                process = context.Process(target=be_killed, args=(asked("b"),))
                process.start()
                while newest() == before:
                    assert process.is_alive()
                    time.sleep(0.01)
                time.sleep(draw.uniform(0.0, 0.2))
                process.kill()
                process.join()
            over.set()
            return run_ranks(asked("b"), lambda steps: steps >= 5, 0.002)

        lasting, last = at_once(partial(run_ranks, asked("a"), lambda steps: over.is_set(), 0.005), kill)
    assert all(same(one, other) for one, other in zip(lasting, last, strict=True))
    for rank in range(2):
        replay(tmp_path / "log" / f"a-{rank}")
        took = [entry.about for entry in read_log(tmp_path / "log" / f"a-{rank}") if entry.what == "took"]
        counted = [tuple(change[:2]) for about in took for change in about["changes"]]
        versions = [version for version, name in counted if name == "b"]
        assert len(counted) == len(set(counted))
        assert versions == sorted(versions)
        assert len(versions) >= 5
        assert staleness is None or max(about["lead"] for about in took) <= staleness
