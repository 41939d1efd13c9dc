"""What a thousand ranks ask of the store, and when all know of a host that left: the watchdog's code, a fake clock."""

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from zeroshard.watch import watchdog
from zeroshard.watch.pages import _hosts_of, words_of

RANKS, PER_HOST = 1000, 8
MOST_A_SECOND = 100.0


class Clock:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Store:
    """A store in this process that counts requests."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {watchdog.CAUSE: watchdog.NOTHING.encode()}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests["compare_set"] += 1
        if self.values[key] == expected.encode():
            self.values[key] = desired.encode()
        return self.values[key]


class Pages:
    """The pages of one rank's host, in this process."""

    def __init__(self, pages: dict[int, str], rank: int, hosts: tuple[tuple[int, ...], ...]) -> None:
        self._pages, self._rank, self.hosts = pages, rank, hosts
        self.near = next(ranks for ranks in hosts if rank in ranks)

    def write(self, text: str) -> None:
        self._pages[self._rank] = text

    def read(self, rank: int) -> str:
        return self._pages[rank]

    def is_alive(self, rank: int) -> bool:
        return True


class Ranks:
    """All ranks of a run, whose threads look and speak when it is their time."""

    def __init__(self, heartbeat_s: float, world: int = RANKS) -> None:
        self.clock, self.store, self.heartbeat_s, pages = Clock(), Store(), heartbeat_s, dict[int, str]()
        self.hosts = tuple(tuple(range(first, min(first + PER_HOST, world))) for first in range(0, world, PER_HOST))
        self.statuses, self.near, self.far = [], list[watchdog._Near](), list[watchdog._Far]()
        self.left: dict[int, float] = {}
        """When ranks ended because of what they learned."""
        self.gone: set[int] = set()
        draw = random.Random(3)
        self._due: list[tuple[float, int, bool]] = []
        for rank in range(world):
            now = ("in user code since", "a step", 0.0)
            status = watchdog._Status(self.store, rank, range(world), "", 600.0, heartbeat_s, now, clock=self.clock)  # type: ignore[arg-type]
            status.pages = Pages(pages, rank, self.hosts)  # type: ignore[assignment]
            status.pages.write(status.page("start"))
            self.statuses.append(status)
            self.store.values[f"host/{rank}"] = b""
            for is_near in (True, False):
                self._due.append((draw.uniform(0, status.beat_s), rank, is_near))
        self.near = [watchdog._Near(status) for status in self.statuses]
        self.far = [watchdog._Far(status) for status in self.statuses]
        heapq.heapify(self._due)

    def run(self, end_s: float) -> Iterator[float]:
        """Go on until a time; yield it after each thing that was done."""
        while self._due[0][0] < end_s:
            self.clock.now_s, rank, is_near = heapq.heappop(self._due)
            status = self.statuses[rank]
            if rank in self.gone or rank in self.left:
                continue
            if is_near:
                pause_s = status.beat_s / (watchdog.HURRY if status.is_in_hurry else 1)
                if self.near[rank].look():
                    self.left[rank] = self.clock.now_s
                if status.wake.is_set():
                    status.wake.clear()
                    self.far[rank].speak()
            else:
                pause_s = status.beat_s
                self.far[rank].speak()
            heapq.heappush(self._due, (self.clock.now_s + pause_s, rank, is_near))
            yield self.clock.now_s


def a_second(ranks: Ranks, seconds: float) -> float:
    """Return the requests a second over some seconds."""
    ranks.store.requests.clear()
    for _ in ranks.run(ranks.clock.now_s + seconds):
        pass
    return ranks.store.requests.total() / seconds


def test_a_check_that_is_late_leaves_the_end_of_its_rank_as_it_is() -> None:
    """On a busy machine a rank may end while its thread is in a check, or before one: it saw no rank that lives."""
    ranks = Ranks(2.0, world=2)
    a_second(ranks, 4.0)
    for near, status in zip(ranks.near, ranks.statuses, strict=True):
        status.pages.write(f"end\n0 0 0 \n0.0\n{watchdog.ENDED}a step")
        status.stop.set()
        assert near.look() == ""
        assert words_of(status.pages.read(status.rank)).startswith(watchdog.ENDED)
    for near, status in zip(ranks.near, ranks.statuses, strict=True):
        status.stop.clear()  # as it was when the check began
        with patch.object(Pages, "write"):
            assert near.look() == ""
        assert not status.leads


def test_a_thousand_ranks_make_at_most_a_hundred_requests_a_second() -> None:
    ranks = Ranks(30.0)
    a_second(ranks, 4.0)  # until they have their rhythm
    found = a_second(ranks, 15.0)
    print(f"{found:.1f} requests a second")
    assert 0 < found <= MOST_A_SECOND


@pytest.mark.product
@pytest.mark.parametrize(
    ("heartbeat_s", "waits", "world"),
    [(2.0, "hosts", 200), (2.0, "devices", 200), (30.0, "devices", 200), (30.0, "hosts", RANKS)],
)
def test_a_host_that_leaves_is_named_by_all_within_a_heartbeat_and_a_second(
    heartbeat_s: float, waits: str, world: int
) -> None:
    ranks = Ranks(heartbeat_s, world)
    a_second(ranks, 1.3 * heartbeat_s / watchdog.BEATS + 1.0)
    left_s, lost = ranks.clock.now_s, set(ranks.hosts[7])
    ranks.gone |= lost
    for rank, status in enumerate(ranks.statuses):
        if rank not in lost and waits == "hosts":
            status.now = ("waits for", "a gather", left_s)
        elif rank not in lost:
            status.marks.add(lambda: False, "a gather", left_s)
    ranks.store.requests.clear()
    for _ in ranks.run(left_s + 3 * heartbeat_s):
        if len(ranks.left) + len(lost) == world:
            break
    took_s = ranks.clock.now_s - left_s
    print(f"{took_s:.2f} s, {ranks.store.requests.total() / took_s:.0f} requests a second meanwhile")
    assert len(ranks.left) == world - len(lost)
    assert 0.8 * heartbeat_s <= took_s <= heartbeat_s + 1.0
    for rank in ranks.left:
        assert ranks.statuses[rank].known.startswith(f"rank {min(lost)}: no sign of life"), ranks.statuses[rank].known


@pytest.mark.parametrize("place", [0, 3])
def test_a_stopped_rank_is_named_by_its_host_and_another_speaks_for_it(place: int) -> None:
    ranks = Ranks(2.0, 24)
    a_second(ranks, 2.0)
    left_s, lost = ranks.clock.now_s, ranks.hosts[1][place]
    ranks.gone.add(lost)
    for rank, status in enumerate(ranks.statuses):
        status.now = status.now if rank == lost else ("waits for", "a gather", left_s)
    for _ in ranks.run(left_s + 6.0):
        if len(ranks.left) == 23:
            break
    assert len(ranks.left) == 23
    assert ranks.clock.now_s - left_s <= 3.0
    assert {status.known.split(":")[0] for status in ranks.statuses if status.rank != lost} == {f"rank {lost}"}


def test_ranks_that_wait_long_for_one_that_lives_go_on() -> None:
    ranks = Ranks(2.0, 24)
    for rank in range(1, 24):
        ranks.statuses[rank].now = ("waits for", "a gather", 0.0)
    a_second(ranks, 20.0)
    assert not ranks.left


@pytest.mark.parametrize(
    ("seen", "hosts"),
    [
        ([(0, 1), (0, 1), (2,)], ((0, 1), (2,))),
        ([(0, 2), (1, 3), (0, 2), (1, 3)], ((0, 2), (1, 3))),
        ([(0, 1, 2), (0, 1, 2), (2,)], ((0,), (1,), (2,))),  # rank 2 cannot open the others' pages
    ],
)
def test_ranks_share_a_host_where_all_see_the_same(
    seen: list[tuple[int, ...]], hosts: tuple[tuple[int, ...], ...]
) -> None:
    assert _hosts_of(seen) == hosts
