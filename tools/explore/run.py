"""One program run on simulated ranks, and what must hold of it.

Owns how a rank calls `core/order.py` (as `core/engine.py` and `update/optimizer.py` do) and the checks. Read `world.py`
first.

Note: what must hold
    - Without a failure all ranks come to the end. With one they do, or each gets a `RankMismatchError`: at once, where
      ranks meet at different places, or from the watchdog, where nobody can go on.
    - No rank has made a step that another has not.
    - Where all come to the end, all took part in the same collectives in the same order: ranks of one copy of the state
      in all, ranks of several in what all ranks share. Each gradient is in one sum, once. Each pass sums a unit once,
      where ranks can say that they are not ready, and each time that one said so is an event "postpone" in the trace.
      Ranks know alike which units were used.
    - A norm is of the gradients that the step behind it has. On a device some rank may leave its record in a backward
      when others have taken the norm already: then all get an error that says so, and no step is made.
    - A unit that a rank uses is whole. At most two units besides the root, and those that outlast others, are: four
      where a rank left the record.
    - Ranks have the same records. A pass like those before it, as many as there are units, agrees on nothing but its
      beginning and its end: each that left the record taught it something.
"""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from zeroshard.core import order as order_module
from zeroshard.core.states import Scope
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.schedule import ROOT, WINDOW, Record

from .program import Mark, Op, Path, Program, backward_marks
from .world import Bits, Crew, FakeComm, FakeUnit, Stuck, World

__all__ = ["FAULTY", "Outcome", "PEAKS", "chooser", "run", "state_of"]

PEAKS = {"followed": WINDOW, "agreed": WINDOW, "left": 2 * WINDOW}
"""Units that may be whole besides the root and those that outlast others, by kind of pass: it follows its record, it
has none, or some rank left it. In the last two, what others ask for and this rank will still need comes on top."""
FAULTY = "fault"


class Planned(Exception):
    """The failure of a program."""


class Refused(RuntimeError):
    """A step that one rank refuses: gradients were not reduced there."""


@dataclass
class Outcome:
    """What came of a run.

    Args:
        verdict: "right"; "mismatch", an error on all ranks at once; "watchdog", an error on all ranks after its limit;
            "early", the error of a norm that was too early; "fault".
        states: after each step, what the ranks' orders decide by; equal states behave alike from there on.
    """

    verdict: str
    faults: list[str]
    peaks: Counter[str] = field(default_factory=Counter)
    collectives: int = 0
    states: list[Hashable] = field(default_factory=list)
    ranks: list["Rank"] = field(default_factory=list)


class Rank:
    """One rank: the engine and the optimizer, as far as they call `Order`."""

    def __init__(self, world: World, number: int, program: Program, *, keeps_states: bool) -> None:
        self.number, self.program, self._keeps_states = number, program, keeps_states
        self.comm = FakeComm(world, number)
        self.faults: list[str] = []
        self.units = [
            FakeUnit(
                unit,
                number,
                is_whole=program.is_whole,
                is_held=unit in program.held,
                told=self._tell,
                opened=self._note_peak,
                expects=lambda unit: unit in self.to_land,
            )
            for unit in range(program.units)
        ]
        self.order: Any = order_module.Order(self.units, self.comm)  # type: ignore[arg-type]
        self.to_land: set[int] = set()
        """Units whose gradients the backward under way will still bring."""
        self.landed = [0] * program.units
        """By unit: gradients of this rank since the last step."""
        self.per_step: list[tuple[list[int], list[Bits], list[bool]]] = []
        """Of each step and unit: what landed here, what is held, and whether it is known as used."""
        self.peaks: Counter[str] = Counter()
        self.states: list[Hashable] = []
        self.begins_at = 0
        """The operation that is the first to be run."""
        self.ending = ""
        self._peak = 0
        self._forwards: list[Hashable] = []
        self._paths: list[Path] = []
        self._used: set[int] = set()
        self._calls: Counter[int] = Counter()
        self._mark, self._op = 0, 0
        self._last: dict[Hashable, tuple[Any, int]] = {}
        self._normed: list[Bits] = []
        """By unit: what the last norm was of, until the step."""
        self._failure = program.failure if program.failure and program.failure.rank == number else None

    def _tell(self, text: str) -> None:
        self.faults.append(f"rank {self.number}, operation {self._op}: {text}")

    def work(self) -> None:
        """Run the program, and note how it ended."""
        try:
            self._run()
            self.ending = "end"
        except Stuck:
            self.ending = "watchdog"
        except RankMismatchError as error:
            self.ending = "early" if "some ranks had answered" in str(error) else "mismatch"
        except Refused:
            self.ending = "refused"
        except Exception as error:
            self.ending = "crash"
            self._tell(f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        skips = ""
        for index, op in enumerate(self.program.ops):
            if index < self.begins_at:
                continue
            self._op, self._mark = index, 0
            if skips:
                if op.kind == "norm" and skips == "step":
                    skips = ""
                elif op.kind == "step":
                    is_over, skips = skips == "after", ""
                    if is_over:
                        continue
                else:
                    continue
            try:
                if op.is_forward:
                    self._forward(op)
                elif op.is_backward:
                    self._backward(op)
                elif op.kind == "meet":
                    self.comm.meet("meet")
                elif op.kind == "norm":
                    self._norm()
                else:
                    self._step()
            except Planned:
                assert self._failure is not None
                skips = self._failure.caught
        self._complete()
        self.order.settle("the end of the program")

    # -- marks ------------------------------------------------------------------------------------------------------

    def _pass_mark(self) -> None:
        """Raise where the program fails; see that what is used is whole."""
        failure = self._failure
        if failure is not None and failure.op == self._op and failure.mark == self._mark and failure.caught != "inside":
            self._mark += 1
            raise Planned
        self._mark += 1
        for unit in self.units:
            if unit.users and not unit.is_there:
                self._tell(f"{unit} is used and not whole")

    def _note_peak(self) -> None:
        pass_ = self.order.current
        if pass_ is None:
            return
        apart = pass_.schedule.staying | pass_.schedule.held | pass_.schedule.carried
        if pass_.asks or pass_.agreed:
            # What this rank will still need, it keeps when others have asked for it.
            apart |= {unit.number for unit in self.units if not unit.users and unit.number in pass_.expected}
        others = [unit for unit in self.units[1:] if unit.is_open and unit.number not in apart]
        # Of units in use at once, all but the innermost outlast others, though the schedule does not know that yet.
        self._peak = max(self._peak, len(others) - max(0, sum(unit.users > 0 for unit in others) - 1))

    def _count_peak(self, pass_: Any, *, has_failed: bool) -> None:
        kind = "agreed" if pass_.asks else "left" if pass_.agreed else "followed"
        name = f"{pass_.phase}, {kind}" + (", failed" if has_failed else "")
        self.peaks[name] = max(self.peaks[name], self._peak)
        if self._peak > PEAKS.get(kind, len(self.units)):
            self._tell(f"{self._peak} units were whole in {pass_}, which {kind}")
        self._peak = 0

    # -- forward ----------------------------------------------------------------------------------------------------

    def _forward(self, op: Op) -> None:
        path, has_grad = op.paths[self.number], op.kind == "forward"
        self._pass_mark()
        self._complete()
        kind, key = "training" if has_grad else "no-grad", ("forward", "", has_grad)
        if not self.program.is_whole:
            self._forwards += [key] * has_grad
        place = "" if self.program.is_whole else f"the beginning of a {kind} forward"
        pass_ = self.order.open("forward", key, place=place, holds=has_grad)
        self._enter(ROOT, has_grad=has_grad)
        open_: list[int] = []
        kept: list[int] = []
        skips = 0
        for at, mark in enumerate(path):
            self._pass_mark()
            failure = self._failure
            if failure and (failure.op, failure.mark, failure.caught) == (self._op, at + 1, "inside"):
                # The innermost module raises, and the one around it goes on: its unit is not left.
                skips = open_[-1]
                self.units[skips].users -= 1
            if skips:
                # What that module would have done besides is not done; its call has no backward.
                if mark == -skips:
                    open_.pop()
                    skips = 0
                continue
            kept.append(mark)
            if mark > 0:
                self._enter(mark, has_grad=has_grad)
                open_.append(mark)
            else:
                self.units[-mark].users -= 1
                self.order.leave(-mark)
                open_.remove(-mark)
        self._pass_mark()
        self.units[ROOT].users -= 1
        self.order.leave(ROOT)
        if has_grad:
            self._paths.append(_without_open(kept))
        self._close_forward(pass_)

    def _enter(self, unit: int, *, has_grad: bool) -> None:
        self.order.need(unit)
        self.units[unit].users += 1
        if has_grad:
            self._used.add(unit)
            self._calls[unit] += 1

    def _close_forward(self, pass_: Any) -> None:
        self.order.close()
        self._count_peak(pass_, has_failed=False)
        self._check_steady(pass_)

    # -- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, op: Op) -> None:
        if not self._paths and not self._forwards:
            return
        late, silent, lost = (of[self.number] if of else () for of in (op.late, op.silent, op.lost))
        marks = backward_marks(self._paths, self._calls, late, (*silent, *lost))
        self._pass_mark()
        self._complete()
        self.to_land = {unit for kind, unit in marks if kind == "land"} | {*lost}
        scope = {"local": Scope.RANK, "copies": Scope.COPY, "backward": Scope.ALL}[op.kind]
        key = ("backward", tuple(self._forwards), scope is not Scope.RANK)
        pass_ = self.order.open("backward", key, scope=scope, expected=set(self._used))
        if ROOT in self._used:
            self.order.need(ROOT)
            self.units[ROOT].users = 1
        self._follow(marks)
        self._pass_mark()
        for unit in self.units:
            unit.users = 0
        self._close(pass_)

    def _follow(self, marks: list[Mark]) -> None:
        for kind, unit in marks:
            self._pass_mark()
            if kind == "land":
                self.to_land.discard(unit)
                self.landed[unit] += 1
                self.units[unit].land()
                self.order.land(unit)
            elif kind == "need":
                self.order.need(unit)
                self.units[unit].users = 1
            else:
                self.units[unit].users = 0
                self.order.leave(unit)

    def _complete(self) -> None:
        """Complete a pass that a failure left open."""
        if self.order.current is not None:
            for unit in self.units:
                unit.users = 0
            self._close(self.order.current, has_failed=True)

    def _close(self, pass_: Any, *, has_failed: bool = False) -> None:
        try:
            self.order.close()
        finally:
            if pass_.phase == "backward":
                self._forwards, self._paths, self._used = [], [], set()
                self._calls.clear()
                self.to_land = set()
        self._count_peak(pass_, has_failed=has_failed)
        if pass_.scope is not Scope.RANK and any(unit.has_local for unit in self.units) and not self.order.is_behind:
            self._tell(f"gradients were left over by {pass_}")
        self._check_steady(pass_)

    def _check_steady(self, pass_: Any) -> None:
        """A pass like those before it of its kind follows the record, if no failure changed it."""
        if self.program.failure is not None or any(op.kind in ("local", "copies") for op in self.program.ops):
            return
        op = self.program.ops[self._op]
        like = self.program.ops[self._start_of(self._op) : self._op + 1]
        before, times = self._last.get(pass_.key, (None, 0))
        times = (times + 1) * (before == like)
        self._last[pass_.key] = (like, times)
        if times >= self.program.units and pass_.agreed:
            self._tell(f"{op.kind} was as the {times} before it, and ranks agreed on {pass_.agreed}")

    def _start_of(self, at: int) -> int:
        """Return the first of the operations that decide what this one does."""
        ops = self.program.ops
        if ops[at].is_forward:
            return at
        start = at
        while start and ops[start - 1].is_forward:
            start -= 1
        return start

    # -- steps ------------------------------------------------------------------------------------------------------

    def _check_reduced(self) -> None:
        """Do as `Engine.check_reduced` does."""
        if any(unit.has_local or unit.is_deferred for unit in self.units):
            self.order.catch_up()
        if any(unit.has_local or unit.is_deferred for unit in self.units):
            raise Refused

    def _norm(self) -> None:
        self._complete()
        self._check_reduced()
        self.order.answer("a norm")
        self._normed = [unit.held for unit in self.units]
        self.comm.meet("norm")

    def _step(self) -> None:
        self._complete()
        self._check_reduced()
        if not self.order.settle(f"step {len(self.per_step)}"):
            self._tell("a step was voted down")
        for unit in self.units:
            if unit.is_open and not unit.spec.is_whole:
                self._tell(f"{unit} was left whole")
        self.order.publish([], lambda unit: [])
        held = [unit.held for unit in self.units]
        if self._normed not in ([], held):
            self._tell(f"a norm was of {self._normed}, the step of {held}")
        self._normed = []
        self.per_step.append((self.landed, held, [unit.is_used for unit in self.units]))
        self.landed = [0] * len(self.units)
        for unit in self.units:
            unit.held, unit.is_used = 0, False
        if self._keeps_states:
            self.states.append(state_of(self.order))


def _without_open(marks: list[int]) -> Path:
    """Return the calls that were left."""
    path: list[int] = []
    for at, mark in enumerate(marks):
        if mark < 0 or -mark in marks[at:]:
            path.append(mark)
    return tuple(path)


# -- a run ------------------------------------------------------------------------------------------------------------


def run(
    program: Program,
    crew: Crew,
    choose: Callable[[int], int] | None = None,
    *,
    keeps_states: bool = False,
    behind: Outcome | None = None,
) -> Outcome:
    """Run a program and judge it.

    Args:
        choose: who goes on; see `Crew.choose`. It decides nothing else.
        keeps_states: whether the outcome has states.
        behind: the right outcome of the program's first operations, up to a step: only those behind them are run.
    """
    transport = program.transport
    is_device = transport == "nccl"
    world = World(
        crew,
        program.ranks,
        program.copies,
        is_in_place=transport == "host",
        can_postpone=not is_device,
        is_device=is_device,
    )
    ranks = [Rank(world, number, program, keeps_states=keeps_states) for number in range(program.ranks)]
    for rank, before in zip(ranks, behind.ranks if behind else (), strict=False):
        vars(rank.order).update(_copied(before.order))
        done = before.order.history
        vars(rank.order.history).update(steps=done.steps, _has_stepped=done._has_stepped, _records=rank.order._records)
        rank.begins_at = len(before.program.ops)
    crew.run([rank.work for rank in ranks], choose)
    faults = [fault for rank in ranks for fault in rank.faults]
    endings = {rank.ending for rank in ranks}
    if endings == {"end"}:
        verdict = "right"
        faults += _faults_at_the_end(program, ranks)
    else:
        verdict = "mismatch" if endings == {"mismatch"} else "early" if endings == {"early"} else "watchdog"
        if verdict == "early" and is_device and not program.is_whole:
            pass
        elif program.failure is None:
            faults.append(f"ranks ended with {', '.join(rank.ending for rank in ranks)}")
        elif not endings <= {"mismatch", "watchdog", "refused"}:
            faults.append(f"one rank raised, and ranks ended with {', '.join(rank.ending for rank in ranks)}")
        if len({len(rank.per_step) for rank in ranks}) > 1:
            faults.append(f"ranks made {', '.join(str(len(rank.per_step)) for rank in ranks)} steps")
    peaks: Counter[str] = Counter()
    for rank in ranks:
        for name, count in rank.peaks.items():
            peaks[name] = max(peaks[name], count)
    states: list[Hashable] = list(zip(*(rank.states for rank in ranks), strict=False))
    collectives = sum(len(rank.comm.sequence) for rank in ranks)
    return Outcome(FAULTY if faults else verdict, faults, peaks, collectives, states, ranks)


def _faults_at_the_end(program: Program, ranks: list[Rank]) -> list[str]:
    faults = []
    for rank in ranks[1:]:
        first = ranks[rank.number // rank.comm.shards * rank.comm.shards]
        # Each communicator, and each channel of votes, has an order of its own.
        for name in sorted({str(one[1][0]) for of in (first, ranks[0], rank) for one in of.comm.sequence}):
            other = first if name in WITHIN_COPIES else ranks[0]
            both = [[one for one in of.comm.sequence if one[1][0] == name] for of in (other, rank)]
            faults += _differences(f" of {name}", other, rank, *both)
    for rank in ranks[1:]:
        for key, record in ranks[0].order._records.items():
            other = rank.order._records.get(key)
            if other is None or (other.requests, other.pinned) != (record.requests, record.pinned):
                faults.append(f"ranks 0 and {rank.number} have other records of {key}: {record}, {other}")
    for step, of_ranks in enumerate(zip(*(rank.per_step for rank in ranks), strict=True)):
        for unit in range(program.units):
            expected = sum(landed[unit] << (4 * rank) for rank, (landed, _, _) in enumerate(of_ranks))
            for rank, (_, held, used) in enumerate(of_ranks):
                if held[unit] != expected:
                    faults.append(f"step {step}: rank {rank} holds {held[unit]:b} of unit {unit}, not {expected:b}")
                if used[unit] != bool(expected):
                    faults.append(f"step {step}: rank {rank} takes unit {unit} for {'un' * (not used[unit])}used")
    for rank in ranks:
        for unit in rank.units:
            if len(set(unit.sums)) < len(unit.sums) and program.transport != "nccl":
                faults.append(f"rank {rank.number} summed {unit} twice in a pass: {unit.sums}")
            named = sum(e.kind == "postpone" and e.unit == unit.name for e in rank.order.history.trace.events)
            if named != unit.not_ready and len(rank.per_step) <= KEPT_STEPS:
                faults.append(f"rank {rank.number} postponed {unit} {unit.not_ready} times and named it {named} times")
    return faults


def _differences(where: str, one: Rank, other: Rank, ones: list[Any], others: list[Any]) -> list[str]:
    if ones == others:
        return []
    at = next((i for i, (a, b) in enumerate(zip(ones, others, strict=False)) if a != b), "the end")
    return [f"ranks {one.number} and {other.number} differ at collective {at}{where}: {ones[-3:]}, {others[-3:]}"]


WITHIN_COPIES = frozenset(["gather", "reduce"])
"""Collectives of the ranks that share one copy of the state."""
KEPT_STEPS = 2
"""Steps whose events the trace is sure to hold all of, with the one behind them."""


def chooser(seed: int) -> Callable[[int], int]:
    """Return who goes on, drawn from a seed."""
    return random.Random(seed).randrange


# -- states -----------------------------------------------------------------------------------------------------------

_OWN = frozenset(["_units", "_comm", "_staying", "_changes", "history", "votes", "check_update", "launch", "buffers"])
"""Attributes of an `Order` that belong to it alone."""
_NOT_DECIDING = _OWN | {"_has_warned", "_has_made_rounds"}
"""Attributes of an `Order` that decide nothing: what it works on, and what it tells."""


def state_of(order: Any) -> Hashable:
    """Return all that an order between two steps decides by."""
    return tuple((name, _frozen(value)) for name, value in vars(order).items() if name not in _NOT_DECIDING)


def _copied(order: Any) -> dict[str, Any]:
    """Return what an order has between two steps, so that another can go on with it."""
    kept = {name: value for name, value in vars(order).items() if name not in _OWN}
    return {name: type(value)(value) if isinstance(value, dict | list) else value for name, value in kept.items()}


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Record):
        stays = (value.pinned, value.outlasting, value.held, value.carried)
        return (value.requests, *(tuple(sorted(units)) for units in stays))
    if isinstance(value, dict):
        return tuple((key, _frozen(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    return value if isinstance(value, int | str | bool | None) else repr(value)
