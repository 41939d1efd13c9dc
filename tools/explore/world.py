"""What is simulated: ranks that take turns, collectives between them, and units that hold gradients as numbers.

Owns the turns, the matching of collectives and the state of units. It must not know programs or what must hold of them.
Read `zeroshard/core/order.py` first: everything here is what that module talks to.

Note: turns
    Each rank is a thread, and one of them runs at a time: a rank runs until it waits for a collective that others
    have not come to, and hands over to a rank that can go on. Which one is a choice (`Crew.choose`), so a run repeats
    exactly. Where no rank can go on, those that wait get the error that the watchdog would raise.
Note: completion
    A rank learns nothing of a collective but by waiting for it, and what it learns (a minimum, a sum, that a rank is
    not ready) is the same whenever the collective ends. So each rank does the same things in any order of completions,
    and the order only decides which rank runs first. What differs between transports is what a wait waits for: that all
    ranks have come (messages, NCCL), or that all have also come to the wait (the sums in the memory of a host, which
    others read meanwhile). Both are simulated.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from zeroshard.core.states import Scope
from zeroshard.table.errors import RankMismatchError
from zeroshard.wire.comm import Channel, Vote

__all__ = ["Crew", "FakeComm", "FakeReduction", "FakeUnit", "Stuck", "World"]

LIMIT = 3000
"""Collectives of one rank in one run; more is a loop without an end."""
Key = tuple[Any, ...]
_CONTROL: Key = ("control",)
"""The channel of what all ranks tell at once, which holds one order for all; votes have one for each channel."""
Bits = int
"""Gradients: four bits a rank, which count how often it landed."""


class Stuck(RankMismatchError):
    """No rank can go on: what the watchdog raises after its limit."""


class Crew:
    """Threads, one for each rank, of which one runs at a time.

    Args:
        count: ranks at most.
    """

    def __init__(self, count: int) -> None:
        self._locks = [threading.Lock() for _ in range(count)]
        self._done = threading.Lock()
        self._jobs: list[Callable[[], None]] = []
        self._runnable: list[int] = []
        self._unfinished: set[int] = set()
        self.choose: Callable[[int], int] | None = None
        """Given how many ranks can go on (two at least), the place of the next one; None takes the first."""
        self.is_stuck = False
        self._done.acquire()
        for rank, lock in enumerate(self._locks):
            lock.acquire()
            threading.Thread(target=self._work, args=(rank,), daemon=True).start()

    def run(self, jobs: Sequence[Callable[[], None]], choose: Callable[[int], int] | None) -> None:
        """Return when each rank has done its job."""
        self._jobs, self.choose, self.is_stuck = list(jobs), choose, False
        self._runnable, self._unfinished = list(range(len(jobs))), set(range(len(jobs)))
        self._locks[self._pick()].release()
        self._done.acquire()

    def _work(self, rank: int) -> None:
        while True:
            self._locks[rank].acquire()
            self._jobs[rank]()
            self._unfinished.remove(rank)
            if self._unfinished:
                self._locks[self._pick()].release()
            else:
                self._done.release()

    def _pick(self) -> int:
        runnable = self._runnable
        if not runnable:
            self.is_stuck = True
            runnable.extend(sorted(self._unfinished))
        if len(runnable) == 1 or self.choose is None:
            return runnable.pop(0)
        return runnable.pop(self.choose(len(runnable)))

    def wake(self, ranks: Sequence[int]) -> None:
        """Note that these can go on."""
        self._runnable.extend(ranks)

    def pause(self, rank: int) -> None:
        """Let others run, until this rank is woken.

        Raises:
            Stuck: nobody can go on.
        """
        following = self._pick()
        if following != rank:
            self._locks[following].release()
            self._locks[rank].acquire()
        if self.is_stuck:
            raise Stuck("no rank can go on")

    def give_way(self, rank: int) -> None:
        """Let another rank run first, if the choice falls on it."""
        if self.choose is not None and self._runnable and not self.is_stuck:
            self._runnable.append(rank)
            self.pause(rank)


class _Collective:
    """One collective: who has come with what."""

    __slots__ = ("is_refused", "kind", "missing", "result", "values", "waiting")

    def __init__(self, kind: Key, count: int) -> None:
        self.kind, self.missing, self.is_refused = kind, count, False
        self.values: dict[int, Any] = {}
        self.waiting: list[int] = []
        self.result: Any = None


class World:
    """The collectives of one run, matched as messages with tags are.

    Args:
        copies: of the state, each over as many ranks that follow one another.
        is_in_place: whether a sum is made where the others' gradients lie, so that its end is a meeting, too.
        is_device: whether hosts go on where tensors of other ranks are waited for, and so do not read votes first.
    """

    def __init__(
        self,
        crew: Crew,
        ranks: int,
        copies: int = 1,
        *,
        is_in_place: bool = False,
        can_postpone: bool = True,
        is_device: bool = False,
    ) -> None:
        self.crew, self.ranks, self.copies = crew, ranks, copies
        self.is_in_place, self.can_postpone, self.is_device = is_in_place, can_postpone, is_device
        self._collectives: dict[Key, _Collective] = {}

    def come(self, rank: int, key: Key, kind: Key, value: Any, count: int) -> _Collective:
        """Have one of `count` ranks take part in the collective of this key.

        Ranks that mean different kinds by it are never done.
        """
        one = self._collectives.get(key)
        if one is None:
            one = self._collectives[key] = _Collective(kind, count)
        elif one.kind != kind:
            one.is_refused = True
        one.values[rank] = value
        one.missing -= 1
        if not one.missing and not one.is_refused:
            one.result = _RESULTS[kind[0]](one.values)
            if one.waiting:
                self.crew.wake(one.waiting)
        return one

    def wait(self, rank: int, one: _Collective) -> Any:
        """Return its result once all ranks have come."""
        if self.crew.is_stuck:
            raise Stuck("no rank can go on")
        while one.missing or one.is_refused:
            one.waiting.append(rank)
            self.crew.pause(rank)
        return one.result


def _least(values: dict[int, list[int]]) -> list[int]:
    return [min(each) for each in zip(*values.values(), strict=True)]


def _sum(values: dict[int, Bits | None]) -> Bits | None:
    given = list(values.values())
    return None if None in given else sum(bits for bits in given if bits)


def _in_order(values: dict[int, Any]) -> list[Any]:
    return [values[rank] for rank in sorted(values)]


_RESULTS: dict[str, Callable[[dict[int, Any]], Any]] = {
    "agree": _least,
    "texts": _in_order,
    "collect": _in_order,
    "gather": lambda values: True,
    "reduce": _sum,
    "read": lambda values: True,
    "meet": lambda values: True,
    "norm": lambda values: True,
}


class FakePending:
    """A collective under way."""

    __slots__ = ("_comm", "_meets", "_one", "is_there")

    def __init__(self, comm: "FakeComm", one: _Collective, meets: Key | None = None) -> None:
        self._comm, self._one, self._meets, self.is_there = comm, one, meets, False

    def wait(self) -> Any:
        """Return its result."""
        comm = self._comm
        comm.catch_up()
        result = comm.world.wait(comm.rank, self._one)
        if self._meets is not None:
            comm.world.wait(comm.rank, comm.world.come(comm.rank, self._meets, ("read",), None, comm.shards))
            self._meets = None
        self.is_there = True
        return result


class FakeComm:
    """The collectives of one rank, as far as `core/order.py` and the fake units use them."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self._crew = world, rank, world.crew
        self.can_postpone = world.can_postpone
        self.wire = SimpleNamespace(is_in_place=world.is_in_place)
        self.mesh: Any = _Mesh(rank, world.ranks)
        self.shards = world.ranks // world.copies
        """Ranks of one copy."""
        self._copy, self._shard = ("copy", rank // self.shards), ("shard", rank % self.shards)
        self.sequence: list[Key] = []
        """What this rank took part in, in its order."""
        self._counts: dict[Key, int] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.is_on_host = not world.is_device
        self.catch_up: Callable[[], None] = lambda: None
        self.across = self

    def call_before_waits(self, catch_up: Callable[[], None]) -> None:
        """Have it called before each wait of the host for a tensor."""
        if self.is_on_host:
            self.catch_up = catch_up

    def _come(self, channel: Key, kind: Key, value: Any, among: Key = (), ranks: int = 0) -> _Collective:
        count = self._counts.get(channel, 0)
        self._counts[channel] = count + 1
        self.sequence.append((kind, channel))
        if len(self.sequence) > LIMIT:
            raise AssertionError("a loop without an end")
        one = self.world.come(self.rank, (channel, count, among), kind, value, ranks or self.world.ranks)
        if self._crew.choose is not None and one.missing:
            self._crew.give_way(self.rank)
        return one

    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        """Tell the others some numbers; what is returned waits for the least of each."""
        one = self._come((channel.name,), ("agree", len(values)), values)
        return Vote(lambda: self.world.wait(self.rank, one))

    def agree(self, values: list[int], what: str) -> list[int]:
        """Return the minimum over ranks of each number."""
        self.catch_up()
        return self.post(values, what, Channel.OTHERS).read()

    def meet(self, kind: str) -> None:
        """Take part in a collective of the user's, for which the host waits, or in that of a norm."""
        one = self._come((kind,), (kind,), None)
        if kind == "norm":
            self.catch_up()
        if self.is_on_host or kind == "meet":
            self.world.wait(self.rank, one)

    def texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text."""
        found: list[str] = self.world.wait(self.rank, self._come(_CONTROL, ("texts",), text))
        return found

    def collect(self, tensor: Any, what: str) -> list[Any]:
        """Return every rank's tensor."""
        found: list[Any] = self.world.wait(self.rank, self._come(_CONTROL, ("collect",), tensor))
        return found

    def gather(self, number: int, unit: int) -> FakePending:
        """Begin the gather of a unit in a pass."""
        self.sent_bytes["gather"] += 1
        return FakePending(self, self._come(("gather", number, unit), ("gather",), None, self._copy, self.shards))

    def reduce(self, bits: Bits | None, number: int, unit: int) -> FakePending:
        """Begin the reduction of a unit in a pass, over one copy; None where this rank is not ready."""
        self.sent_bytes["reduce"] += 1
        channel = ("reduce", number, unit)
        one = self._come(channel, ("reduce",), bits, self._copy, self.shards)
        meets = ("read", *channel[1:], self._counts[channel], self._copy) if self.world.is_in_place else None
        return FakePending(self, one, meets)

    def reduce_copies(self, bits: Bits | None, number: int, unit: int) -> FakePending:
        """Begin to sum over copies; None where one is not ready."""
        channel = ("copies", number, unit)
        return FakePending(self, self._come(channel, ("reduce",), bits, self._shard, self.world.copies))


class _Mesh:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.data_ranks = rank, world_size, tuple(range(world_size))
        self.device = None

    def lines(self, texts: Sequence[str]) -> str:
        return "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text)

    def __str__(self) -> str:
        return f"[rank {self.rank}/{self.world_size}]"


class FakeUnit:
    """One unit of one rank: whether it is whole, and its gradients as numbers.

    Args:
        told: called with what is wrong.
        opened: called when it becomes whole.
        released: when one that is held is released: after its "backward", or behind the "step".
    """

    def __init__(
        self,
        number: int,
        rank: int,
        *,
        is_whole: bool,
        is_held: bool,
        told: Callable[[str], None],
        opened: Callable[[], None],
        expects: Callable[[int], bool],
        released: str = "backward",
    ) -> None:
        self.number, self.name = number, f"unit{number}" if number else ""
        self.spec = SimpleNamespace(
            number=number,
            name=self.name,
            is_whole=is_whole,
            is_held=is_held and not is_whole,
            is_last=False,
            released=released if is_held and not is_whole else "use",
            sent_bytes=lambda kind: 1,
            wire_dtypes=lambda kind: "float32",
        )
        """What events are made of."""
        self.is_open = is_whole
        self.users = 0
        self.local: Bits = 0
        """Gradients of this rank that were not reduced."""
        self.held: Bits = 0
        """The sum over the ranks of `scope`."""
        self.scope = Scope.ALL
        self.sums: list[int] = []
        """The numbers of passes that made a sum."""
        self.not_ready = 0
        """How often a rank was not ready."""
        self._rank, self._told, self._opened, self._expects = rank, told, opened, expects
        self._pending: list[FakePending] = []
        self.is_used = False
        """Whether some rank has used it since the last step, as ranks agreed."""
        self.changes: list[Any] = []
        self._has_landed = self._has_values = False

    def __str__(self) -> str:
        return f"unit '{self.name}'" if self.name else "the root unit"

    @property
    def is_there(self) -> bool:
        """Whether its values can be computed with; gathered again they stay what they are."""
        return self.spec.is_whole or self._has_values

    # -- what Order asks --------------------------------------------------------------------------------------------

    def start_gather(self, comm: FakeComm, number: int, where: str, kind: str = "gather") -> None:
        """Begin to make it whole."""
        if self.spec.is_whole:
            return
        self._pending.append(comm.gather(number, self.number))
        if not self.is_open:
            self.is_open = True
            self._opened()

    def wait(self) -> None:
        """Return when its values are there."""
        pending, self._pending = self._pending, []
        for one in pending:
            one.wait()
            self._has_values = True

    def release(self) -> int:
        """Give its memory back; tell whether there was any."""
        if self.spec.is_whole:
            return 0
        self.wait()
        if self.users:
            self._told(f"{self} was released while it was in use")
        if not self.is_open:
            self._told(f"{self} was released twice")
        self.is_open = self._has_values = False
        return 1

    def hold(self) -> int:
        """Stay whole after a pass, where nothing may read it."""
        self.wait()
        return self.number

    def rest(self) -> None:
        """Cost as little as possible."""

    def copy_arrived(self, *, is_sent: bool = False) -> None:
        """Have gradients in the memory that is sent."""

    @property
    def has_local(self) -> bool:
        """Whether there are gradients that were not reduced."""
        return self.local != 0

    @property
    def is_deferred(self) -> bool:
        """Whether a sum over copies was left to a later pass."""
        return self.scope is Scope.COPY

    def reducible(self) -> list[None]:
        """Return its buckets that want gradients: one."""
        return [None]

    def is_complete(self) -> bool:
        """Tell whether the backward under way brings no more gradients of it."""
        return not self._expects(self.number)

    def start_reduction(
        self, comm: FakeComm, number: int, where: str, scope: Scope, *, is_ready: bool
    ) -> "FakeReduction":
        """Begin to sum its gradients."""
        return FakeReduction(self, comm, number, scope, is_ready=is_ready)

    def finish_deferred(self, comm: FakeComm, number: int, where: str) -> list[Any]:
        """Sum over copies what earlier passes left to this one."""
        if self.scope is Scope.COPY:
            self.scope = Scope.ALL
            if comm.world.copies > 1:
                self.held = comm.reduce_copies(self.held, number, self.number).wait()
        return []

    def has_landed(self) -> list[bool]:
        """Tell of each parameter whether a gradient of it came."""
        return [self._has_landed]

    def take_used(self, flags: Iterator[bool]) -> None:
        """Take which parameters some rank used."""
        if self.local:
            self._told(f"gradients of {self} were taken for summed, and are not")
        self.is_used |= next(flags)
        self._has_landed = False

    def note_changes(self) -> None:
        """Note changes in place: there are none."""

    keep_changes = drop_changes = note_changes

    local_bytes = 0

    def described(self) -> SimpleNamespace:
        """Return what events are made of."""
        return self.spec

    # -- what the program does --------------------------------------------------------------------------------------

    def land(self) -> None:
        """Take a gradient of this rank."""
        self.local += 1 << (4 * self._rank)
        self._has_landed = True

    def take_local(self) -> Bits:
        """Hand the gradients over; what lands from now on lands anew."""
        taken, self.local = self.local, 0
        return taken

    def take_back(self, bits: Bits) -> None:
        """Take them back, because a rank was not ready."""
        if self.local:
            self._told(f"a gradient landed in {self} after this rank had said that it was ready")
        self.local += bits


class FakeReduction:
    """The reduction of one unit under way, as `zeroshard.core.unit.Reduction` is."""

    def __init__(self, unit: FakeUnit, comm: FakeComm, number: int, scope: Scope, *, is_ready: bool) -> None:
        self.unit, self._comm, self._number, self._scope = unit, comm, number, scope
        self._given = unit.take_local() if is_ready else None
        self._pending = comm.reduce(self._given, number, unit.number)

    def advance(self) -> bool:
        """Leave all to `finish`, as messages of hosts do."""
        return True

    def finish(self) -> list[Any] | None:
        """Add the sum to what is held; None where a rank was not ready."""
        total: Bits | None = self._pending.wait()
        scope = min(self.unit.scope, self._scope)
        if scope is Scope.ALL and self._comm.world.copies > 1:
            total = self._comm.reduce_copies(total, self._number, self.unit.number).wait()
        if total is None:
            self.unit.not_ready += 1
            if self._given is not None:
                self.unit.take_back(self._given)
            return None
        self.unit.scope = scope
        if total or self._comm.world.copies == 1:
            # A copy that has its sum takes part in the others' later ones with nothing.
            self.unit.held += total
            self.unit.sums.append(self._number)
        return []
