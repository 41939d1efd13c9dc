"""What islands take in, and when: each change once, no further apart than the staleness, in the order of islands."""

import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zeroshard.outer import island_post
from zeroshard.outer.island_exchange import Island
from zeroshard.outer.island_log import Log, read_log, replay
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_post import Look
from zeroshard.outer.island_source import Mail, open_mailbox
from zeroshard.outer.mailbox_files import read_array
from zeroshard.outer.mailbox_wire import MailboxError

from .islands import Arrays, Meeting, at_once, island, mailbox, mean_in_order, options_of, same, secret_in, start_values

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without flushes, which take most of the time of a small exchange."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def took(folder: Path) -> list[dict[str, Any]]:
    """Return what an island's log says that it took in."""
    return [entry.about for entry in read_log(folder) if entry.what == "took"]


def test_islands_that_wait_have_the_bits_of_a_mean_in_their_order(tmp_path: Path, quick_disk: None) -> None:
    names, exchanges = ["b", "10", "9"], 4
    changes = {name: np.random.default_rng(sum(map(ord, name))).standard_normal((exchanges, 700)) for name in names}
    found, made = {}, {name: [] for name in names}

    def run(name: str) -> None:
        values = start_values(name, 700)
        one = island(box, tmp_path, name, values, 3)
        start.setdefault("values", one.anchors.copy())
        for change in changes[name]:
            values += change.astype("<f4")
            made[name].append(values - one.anchors)
            one.after_step()
            assert same(values, one.anchors)
        one.finish(others=True)
        found[name] = values

    start: dict[str, np.ndarray] = {}
    with mailbox(tmp_path) as box:
        at_once(*(partial(run, name) for name in names))
        expected = mean_in_order(start["values"], zip(*(made[name] for name in ("9", "b", "10")), strict=True))
        wait_for(lambda: box.book.base == dict.fromkeys(names, exchanges))
        anchors = read_array(box.book.shelf.anchors(box.book.number, 0), 700, "<f4")
    assert all(same(values, expected) for values in found.values())
    assert same(anchors, expected)


def test_an_island_that_waits_leaves_the_next_change_of_a_faster_one(tmp_path: Path, quick_disk: None) -> None:
    """Anchors would have other bits if a change were added before those of the same version."""
    names, exchanges, found = ["a", "b", "c"], 4, {}

    def run(name: str) -> None:
        values = start_values(name)
        one = island(box, tmp_path, name, values, 3, log=tmp_path / "log")
        settle = one._source.settle

        def settle_late(version: int, step: int) -> Any:
            if name == "a" and version < exchanges:
                wait_for(lambda: one._source._post.look().here.get("b", 0) > version)
            return settle(version, step)

        one._source.settle = settle_late  # type: ignore[method-assign]
        for exchange in range(exchanges):
            values += np.float32(0.1) * start_values(f"{name}{exchange}")
            one.after_step()
        found[name] = values.copy()
        one.finish(others=True)

    with mailbox(tmp_path) as box:
        at_once(*(partial(run, name) for name in names))
    for name in names:
        versions = [[version for version, _, _ in about["changes"]] for about in took(tmp_path / "log" / f"{name}-0")]
        assert versions == [[version] * 3 for version in range(1, exchanges + 1)]
        assert same(found[name], found["a"])


class Leaving:
    """A mailbox in which island b has put its fourth change and left; the change arrives at the second look."""

    looks = 0

    def look(self) -> Look:
        self.looks += 1
        return Look({"a": 4, "b": 3 + (self.looks > 1)}, needed={"a": 4}, is_up=True)

    def listed(self, name: str) -> list[int]:
        return [4]

    def wait(self, look: Look, limit_s: float) -> None:
        assert self.looks < 10


@pytest.mark.parametrize(("staleness", "expected"), [(0, 4), (2, 3)])
def test_an_island_that_waits_takes_what_one_has_put_before_it_left(staleness: int, expected: int) -> None:
    options = IslandOptions("a", 2, staleness=staleness, address="127.0.0.1:1", secret_file="secret")
    mail = Mail(options, Arrays(start_values("a")), Leaving())  # type: ignore[arg-type]
    assert mail.settle(4, 4).here == {"a": 4, "b": expected}


@pytest.mark.product
@pytest.mark.parametrize("seed", range(7))
def test_each_change_is_counted_once_in_any_schedule(seed: int, tmp_path: Path, quick_disk: None) -> None:
    """Sums of whole numbers are exact in any order, so that one number per element tells what was counted how often."""
    draw = random.Random(seed)
    islands, ranks, staleness = draw.choice([2, 4]), draw.choice([1, 2]), [None, 0, 3, 1][seed % 4]
    names, steps, every, numel = [f"i{n}" for n in range(islands)], draw.randint(4, 10), draw.randint(1, 2), 40
    put: list[np.ndarray] = [np.zeros(numel) for _ in range(ranks)]
    lock, ahead, found = threading.Lock(), [], {}

    def run(name: str, rank: int, meeting: Meeting, pauses: random.Random) -> None:
        arrays = Arrays(np.zeros(numel, "<f4"), rank, ranks, None, meeting)
        asked = options_of(box, tmp_path, name, islands, every=every, staleness=staleness, log=tmp_path / "log")
        one = Island(asked, arrays, open_mailbox(asked, arrays))
        for _ in range(steps):
            change = np.array([islands * pauses.randint(-9, 9) for _ in range(numel)], "<f4")
            with lock:
                put[rank] += change
            arrays.values += change
            time.sleep(pauses.choice([0, 0, 0.002, 0.02]))
            before = one.exchanges
            one.after_step()
            if one.exchanges > before and staleness is not None:
                ahead.append(one.version - min(one.taken.get(other, 0) for other in names))
        one.finish(others=True)
        assert same(arrays.values, one.anchors)
        found[name, rank] = arrays.values.copy(), one.taken

    with mailbox(tmp_path) as box:
        pairs = [(name, rank, meeting) for name in names for meeting in [Meeting(ranks)] for rank in range(ranks)]
        at_once(*(partial(run, *pair, random.Random(f"{seed} {pair[:2]}")) for pair in pairs))
    for (_, rank), (values, taken) in found.items():
        assert same(values, (put[rank] / islands).astype("<f4"))
        assert taken == found[names[0], 0][1]
    for name, rank in found:
        counted = [tuple(one[:2]) for about in took(tmp_path / "log" / f"{name}-{rank}") for one in about["changes"]]
        assert len(counted) == len(set(counted)) == sum(found[name, rank][1].values())
        replay(tmp_path / "log" / f"{name}-{rank}")
    assert staleness is None or max(ahead) <= staleness


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_island_waits_at_exactly_the_staleness(staleness: int, tmp_path: Path, quick_disk: None) -> None:
    with mailbox(tmp_path) as box:
        fast, slow = at_once(
            *(partial(island, box, tmp_path, n, np.zeros(5, "<f4"), staleness=staleness) for n in "ab")
        )
        counted = threading.Semaphore(0)

        def run() -> None:
            for _ in range(staleness + 2):
                fast.exchange()
                counted.release()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        for _ in range(staleness):
            assert counted.acquire(timeout=5)
        assert not counted.acquire(timeout=0.3)
        assert fast.version == staleness + 1
        slow.exchange()
        assert counted.acquire(timeout=5)
        assert not counted.acquire(timeout=0.3)
        slow.exchange()
        assert counted.acquire(timeout=5)
        thread.join(5)
        at_once(fast.finish, slow.finish)


def test_an_island_that_does_not_wait_goes_on_beside_one_that_stands(tmp_path: Path, quick_disk: None) -> None:
    with mailbox(tmp_path) as box:
        fast, slow = at_once(*(partial(island, box, tmp_path, n, np.zeros(5, "<f4"), staleness=None) for n in "ab"))
        longest_s = 0.0
        for _ in range(40):
            begun_s = time.monotonic()
            fast.exchange()
            longest_s = max(longest_s, time.monotonic() - begun_s)
            time.sleep(0.005)
        assert longest_s < 0.2
        assert fast.version > 3 and slow.version == 0
        slow.finish()
        fast.finish()


def test_an_island_that_was_killed_comes_back_from_the_sum(tmp_path: Path, quick_disk: None) -> None:
    """Whole numbers again: what was acknowledged before the kill is counted, what was not put is not."""
    with mailbox(tmp_path, gone_s=0.5) as box:
        lasting, killed = np.zeros(6, "<f4"), np.zeros(6, "<f4")
        one, other = at_once(
            partial(island, box, tmp_path, "a", lasting, staleness=3),
            partial(island, box, tmp_path, "b", killed, staleness=3),
        )
        for _ in range(3):
            lasting += 2
            killed += 200
            at_once(one.exchange, other.exchange)
        wait_for(lambda: box.book._last("b") == 3)
        killed += 20_000  # is lost
        other.close()
        longest_s = 0.0
        for _ in range(8):
            lasting += 2
            begun_s = time.monotonic()
            one.exchange()
            longest_s = max(longest_s, time.monotonic() - begun_s)
        assert longest_s < 2.0
        again = np.full(6, 7.0, "<f4")
        other = island(box, tmp_path, "b", again, staleness=3)
        assert other.version >= 10
        assert again[0] in (300.0 + n for n in range(12))
        again += 200
        lasting += 2
        at_once(partial(one.finish, others=True), partial(other.finish, others=True))
    assert same(lasting, again)
    assert same(lasting, np.full(6, 4 * 100 + 12.0, "<f4"))


def test_an_island_that_comes_late_starts_from_the_sum(tmp_path: Path, quick_disk: None) -> None:
    with mailbox(tmp_path) as box:
        values = [np.zeros(3, "<f4") for _ in range(3)]
        first = [partial(island, box, tmp_path, name, values[n]) for n, name in enumerate("ab")]
        one, other = at_once(*first)
        for _ in range(3):
            values[0] += 2
            values[1] += 4
            at_once(one.exchange, other.exchange)
        late = island(box, tmp_path, "c", values[2])
        assert same(values[2], np.full(3, 9.0, "<f4"))
        for _ in range(2):
            for each in values:
                each += 2
            at_once(one.exchange, other.exchange, late.exchange)
        at_once(*(partial(each.finish, others=True) for each in (one, other, late)))
    assert all(same(each, np.full(3, 9.0 + 2 * 3, "<f4")) for each in values)


def test_an_island_that_was_silent_joins_again_and_keeps_what_it_learned(
    tmp_path: Path, quick_disk: None, caplog: pytest.LogCaptureFixture
) -> None:
    with mailbox(tmp_path, gone_s=60.0) as box:  # nobody else is silent for so long, however slow the machine is
        values = [np.zeros(3, "<f4") for _ in range(2)]
        one, other = at_once(
            *(partial(island, box, tmp_path, n, v, staleness=2) for n, v in zip("ab", values, strict=True))
        )
        with box.book.changed:  # as for one that was stopped, and went on
            box.book.members["b"].state = "gone"
            box.book._tell()
        for _ in range(5):
            values[0] += 2
            one.exchange()
        wait_for(lambda: box.book.base.get("a", 0) >= 4)  # the last one is taken in later
        values[1] += 40
        other.exchange()
        wait_for(lambda: other._source._post.look().here != {})
        assert values[1][0] >= 40
        at_once(partial(one.finish, others=True), partial(other.finish, others=True))
    assert same(values[0], values[1])
    assert same(values[0], np.full(3, 5.0 + 20, "<f4"))
    assert "joins again" in caplog.text


def test_a_change_that_was_acknowledged_before_an_island_joins_again_is_counted_once(
    tmp_path: Path, quick_disk: None
) -> None:
    with mailbox(tmp_path) as box:
        values = [np.zeros(3, "<f4") for _ in range(2)]
        one, other = at_once(
            *(partial(island, box, tmp_path, n, v, staleness=None) for n, v in zip("ab", values, strict=True))
        )
        values[1] += 4
        other._offer()
        wait_for(lambda: box.book._last("b") == 1)
        values[1] += 2
        other._join_again()
        assert values[1][0] in (2.0, 4.0)
        at_once(partial(one.finish, others=True), partial(other.finish, others=True))
    assert same(values[0], values[1])
    assert same(values[0], np.full(3, 3.0, "<f4"))


@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_values_that_replace_those_of_the_founder_are_the_first_anchors(
    late_s: float, tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an island offered before it joined again is not put late, in the place of what it offers then."""
    with mailbox(tmp_path) as box:
        values = [np.zeros(3, "<f4") for _ in range(2)]
        one, other = (island(box, tmp_path, name, own) for name, own in zip("ab", values, strict=True))
        lines = other._source._post._lines
        use = lines.use

        def use_late(what: str) -> Any:
            time.sleep(late_s * (what == "put"))
            return use(what)

        monkeypatch.setattr(lines, "use", use_late)
        values[0][:] = 7  # as a checkpoint does
        one.come_back()
        other.exchange()  # joins again
        wait_for(lambda: "b" in one._source._post.look().needed)
        values[0] += 2
        values[1] += 4
        at_once(one.exchange, other.exchange)
        at_once(partial(one.finish, others=True), partial(other.finish, others=True))
    assert same(values[0], values[1])
    assert same(values[0], np.full(3, 7.0 + 3, "<f4"))


def test_values_that_replace_those_of_the_founder_too_late_are_refused(tmp_path: Path, quick_disk: None) -> None:
    with mailbox(tmp_path) as box:
        values = [np.zeros(3, "<f4") for _ in range(2)]
        one, other = (island(box, tmp_path, n, own, staleness=1) for n, own in zip("ab", values, strict=True))
        values[1] += 4
        other.exchange()
        values[0][:] = 7
        wait_for(lambda: box.book._last("b") == 1)
        with pytest.raises(MailboxError, match="changes were put before its values were replaced"):
            one.come_back()


@pytest.mark.parametrize("is_new", [False, True])
def test_an_island_that_has_trained_does_not_join_those_that_begin_anew(
    is_new: bool, tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mailbox has lost its folder; the island that founds it again went on, or is a new launch."""
    monkeypatch.setattr(island_post, "_MOST_PAUSE_S", 0.2)
    values = [np.zeros(3, "<f4") for _ in range(2)]
    with mailbox(tmp_path) as box:
        address = box.address
        one, other = (island(box, tmp_path, n, own, staleness=None) for n, own in zip("ab", values, strict=True))
        values[1] += 4
        other.exchange()
        wait_for(lambda: box.book._last("b") == 1)
        one.exchange()
    (tmp_path / "lost").mkdir()
    with mailbox(tmp_path / "lost", address) as box:
        if is_new:
            one.close()
            one = island(box, tmp_path, "a", np.zeros(3, "<f4"), staleness=None)
        else:
            wait_for(lambda: one._source._post.look().is_gone)
            one.exchange()
        wait_for(lambda: other._source._post.look().is_gone)
        values[1] += 2
        before = values[1].copy()
        if is_new:
            with pytest.raises(MailboxError, match="'b' would lose what it learned in the former one"):
                other.exchange()
            assert same(values[1], before)
        else:
            other.exchange()
            at_once(partial(one.finish, others=True), partial(other.finish, others=True))
            assert same(values[0], values[1])


def test_islands_go_on_without_the_mailbox_and_put_later(
    tmp_path: Path, quick_disk: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(island_post, "_MOST_PAUSE_S", 0.2)
    values = [np.zeros(3, "<f4") for _ in range(2)]
    with mailbox(tmp_path) as box:
        address = box.address
        both = at_once(
            *(partial(island, box, tmp_path, n, v, patience_s=0.5) for n, v in zip("ab", values, strict=True))
        )
        values[0] += 2
        values[1] += 4
        at_once(*(one.exchange for one in both))
    time.sleep(0.6)
    begun_s = time.monotonic()
    for _ in range(10):
        values[0] += 2
        values[1] += 4
        at_once(*(one.exchange for one in both))
    assert time.monotonic() - begun_s < 1.0
    assert "goes on by itself" in caplog.text
    with mailbox(tmp_path, address):
        at_once(*(partial(one.finish, others=True) for one in both))
    assert same(values[0], values[1])
    assert same(values[0], np.full(3, 11 * 3.0, "<f4"))


def wait_for(condition: Any, limit_s: float = 10.0) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


# -- a mailbox that is killed -----------------------------------------------------------------------------------------


PROGRAM = """
import sys
from pathlib import Path
from zeroshard.outer.serve import Mailbox
from zeroshard.outer.mailbox_wire import read_secret

address, secret, folder = sys.argv[1:]
with Mailbox(address, read_secret(secret), Path(folder), gone_s=2.0) as box:
    print(box.address, "torch" in sys.modules, flush=True)
    box.wait()
"""


class Server:
    """A mailbox in a process, which can be killed and started again on the same address."""

    def __init__(self, folder: Path) -> None:
        self._options, self.address = [str(secret_in(folder)), str(folder / "mailbox")], "127.0.0.1:0"

    def start(self) -> "Server":
        command = [sys.executable, "-c", PROGRAM, self.address, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address, has_torch = self._process.stdout.readline().split()
        assert has_torch == "False"
        return self

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path).start()
    yield one
    one.kill()


def test_a_killed_mailbox_loses_nothing_that_it_acknowledged(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(island_post, "_MOST_PAUSE_S", 0.2)
    values = {name: np.zeros(300_000, "<f4") for name in "ab"}
    counts = dict.fromkeys("ab", 0)
    is_over = threading.Event()

    def run(name: str) -> None:
        one = island(server, tmp_path, name, values[name], staleness=None, patience_s=0.3)
        while not is_over.is_set():
            values[name] += 2
            counts[name] += 1
            one.after_step()
            time.sleep(0.003)
        one.finish(others=True)

    def kill() -> None:
        draw = random.Random(3)
        for _ in range(3):
            time.sleep(draw.uniform(0.05, 0.4))
            server.kill()
            server.start()
        time.sleep(0.5)
        is_over.set()

    at_once(kill, *(partial(run, name) for name in "ab"))
    assert same(values["a"], values["b"])
    assert same(values["a"], np.full(300_000, float(sum(counts.values())), "<f4"))


# -- logs -------------------------------------------------------------------------------------------------------------


def logged(tmp_path: Path) -> Path:
    """Return the log of a short run."""
    with mailbox(tmp_path) as box:
        one = island(box, tmp_path, "a", start_values("a"), 1, log=tmp_path / "log")
        for _ in range(3):
            one._values.values += 1
            one.after_step()
        one.finish()
        expected = one.anchors
    assert same(replay(tmp_path / "log" / "a-0").anchors, expected)
    return tmp_path / "log" / "a-0"


def test_a_log_gives_the_anchors_again(tmp_path: Path, quick_disk: None) -> None:
    folder = logged(tmp_path)
    found = replay(folder)
    assert (found.exchanges, found.changes) == (3, 3)
    command = [sys.executable, "-m", "zeroshard", "outer", "--replay", str(folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "a-0: 3 exchanges took in 3 changes; the anchors are those of the run, bit for bit" in done.stdout
    assert same(np.fromfile(tmp_path / "out", "<f4"), found.anchors)


def test_a_log_that_was_cut_by_a_kill_gives_what_it_has(tmp_path: Path, quick_disk: None) -> None:
    path = logged(tmp_path) / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"took"' in line)
    path.write_text("".join(lines[:last]) + lines[last][:30])
    assert replay(path.parent).exchanges == 2


@pytest.mark.parametrize("cut", [1, 20])
def test_a_log_that_was_cut_is_continued(cut: int, tmp_path: Path, quick_disk: None) -> None:
    path = logged(tmp_path) / "log.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    shutil.rmtree(tmp_path / "mailbox")
    for number in (2, 3):
        logged(tmp_path)
        assert [entry.what for entry in read_log(path.parent)].count("start") == number
        shutil.rmtree(tmp_path / "mailbox")
    kept = whole[: whole[:-1].rindex(b"\n") + 1]
    assert path.read_bytes().startswith(kept + b'{"what": "start"')


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("what", ["start", "sent", "took"])
def test_what_one_rank_cannot_log_no_rank_has_done(
    what: str, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None
) -> None:
    """Changes are whole numbers, so that the sum of all is exact, however they were put together."""
    note, told, found, meeting = Log.note, [], {}, Meeting(2)

    def refuse(log: Log, event: str, **about: Any) -> None:
        is_due = what == "start" or about.get("step", 0) >= 2
        if (event, log._folder.name) == (what, "a-1") and is_due and len(told) < 2:
            assert log._file is not None
            os.write(log._file.fileno(), b'{"what": "')
            raise OSError(28, "No space left on device")
        note(log, event, **about)

    def run(rank: int) -> None:
        arrays = Arrays(np.zeros(10, "<f4"), rank, 2, None, meeting)
        asked = options_of(box, tmp_path, "a", 1, staleness=staleness, log=tmp_path / "log")
        one = None
        for step in (1, 2, 3, 4):
            try:
                one = one or Island(asked, arrays, open_mailbox(asked, arrays))
                arrays.values += np.float32(step + rank)
                one.after_step()
            except MailboxError as error:
                told.append(str(error))
        assert one is not None
        one.finish()
        found[rank] = arrays.values[0], one.anchors[0], one.version

    monkeypatch.setattr(Log, "note", refuse)
    with mailbox(tmp_path) as box:
        at_once(partial(run, 0), partial(run, 1))
    missed = 1 if what == "start" else 0
    assert [found[rank][:2] for rank in (0, 1)] == [(10 - missed,) * 2, (14 - 2 * missed,) * 2]
    assert found[0][2] == found[1][2]
    assert told[0] == told[1] and len(told) == 2
    assert re.fullmatch(
        r"\[rank 1/2\] island 'a', after step [023]: its log cannot be written: \[Errno 28\] No space left on device. "
        "Make room, and go on or start the island again; or start it without log=.",
        told[0],
    )
    for rank in (0, 1):
        assert replay(tmp_path / "log" / f"a-{rank}").anchors[0] == found[rank][1]
    first, second = ([e.what for e in read_log(tmp_path / "log" / f"a-{rank}")] for rank in (0, 1))
    assert first == second and first.count("start") == 1


def test_a_log_that_one_rank_cannot_open_is_told_on_all(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a-1").write_text("a file where the folder should be")
    meeting = Meeting(2)

    def run(rank: int) -> None:
        arrays = Arrays(np.zeros(10, "<f4"), rank, 2, None, meeting)
        asked = options_of(box, tmp_path, "a", 1, log=tmp_path / "log")
        with pytest.raises(MailboxError, match=r"\[rank 1/2\] island 'a': its log in .*/log/a-1 cannot be opened"):
            Island(asked, arrays, open_mailbox(asked, arrays))

    with mailbox(tmp_path) as box:
        at_once(partial(run, 0), partial(run, 1))


def test_a_log_that_is_not_that_of_the_run_is_refused(tmp_path: Path, quick_disk: None) -> None:
    path = logged(tmp_path) / "log.jsonl"
    text = path.read_text()
    took_first = next(line for line in text.splitlines(keepends=True) if '"took"' in line)
    path.write_text(text.replace(took_first, took_first * 2))
    with pytest.raises(MailboxError, match=r"version 1 of 'a' was taken in twice"):
        replay(path.parent)
    path.write_text(text.replace(took_first, ""))
    with pytest.raises(MailboxError, match="the anchors differ from those of the run"):
        replay(path.parent)
    path.write_text(text)
    part = path.parent / "parts" / "1" / "2-a"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    with pytest.raises(MailboxError, match="a piece is damaged"):
        replay(path.parent)
