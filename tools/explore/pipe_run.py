"""One program of a pipeline run on simulated ranks, and what must hold of it.

Owns a rank's loop of steps, as user code writes it, and the checks. Read `pipe_world.py` first.

Note: what must hold
    - Without a failure, and with one of user code, all ranks come to the end. The step with a failure raises on all of
      them, its gradients are dropped, and the steps behind it are right. After the error of a broken connection, each
      rank gets an error, at once or from the watchdog, and none has made a step that another has not.
    - Ranks of a place took part in the same collectives, in one order; all ranks did in those of all places. Between
      two ranks messages are received in the order in which they were sent, and none is left.
    - Each gradient is in the sum of a step once, over the places that have its parameter; a pass sums a unit at most
      once, and a step as often as it reduces. Gradients and activations have the values of their micro-batch.
    - A pass gathers and sums the units of its chunk alone. A unit that is used is whole, and none is left whole.
    - Passes that are as those before them follow their record.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.engine import Engine
from zeroshard.parallel.batch import Batch
from zeroshard.parallel.runner import Runner
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.pipeline import Kind, Schedule, schedule_of
from zeroshard.table.trace import Ledger

from .pipe_program import PLACES, RANKS, Departure, PipeFailure, PipeProgram
from .pipe_world import Across, Letters, Model, PipeMesh, PipeUnit, PlaceComm
from .program import Path
from .world import Crew, Stuck, World

__all__ = ["PipeOutcome", "failures_of", "run_pipe"]

FORWARDS = (Kind.FORWARD, Kind.RECOMPUTE)
WIRE = "wire: "
"""What marks of messages begin with."""
FAILED = "A step of the pipeline failed"
TOLERANCE = 1e-5
"""Of fp32 values near 1."""


class Planned(Exception):
    """The failure of a program, in user code."""


class Broken(RankMismatchError):
    """The failure of a program, of a connection: what the transport raises."""


@dataclass
class PipeOutcome:
    """What came of a run.

    Args:
        verdict: "right"; "failed step", an error of one step on all ranks, and right steps behind it; "broken", an
            error on all ranks that ends the program; "fault".
        marks: of each rank and step, what there was.
    """

    verdict: str
    faults: list[str]
    collectives: int = 0
    messages: int = 0
    peaks: Counter[str] = field(default_factory=Counter)
    marks: list[list[list[str]]] = field(default_factory=list)
    ranks: list["PipeRank"] = field(default_factory=list)


class PipeRank:
    """One rank: the real runner and engine, and the loop of a user."""

    def __init__(
        self,
        number: int,
        program: PipeProgram,
        schedule: Schedule,
        worlds: Sequence[World],
        everything: World,
        letters: Letters,
    ) -> None:
        self.number, self.program = number, program
        self.place, self.column = divmod(number, RANKS)
        self.faults: list[str] = []
        self.marks: list[list[str]] = [[] for _ in range(program.steps)]
        self.ending = ""
        self.error: BaseException | None = None
        self.step = -1
        self.struck = ""
        """The mark at which this rank failed."""
        self._is_stepping = False
        places = [[*range(at * RANKS, (at + 1) * RANKS)] for at in range(PLACES)]
        self.across = Across(everything, number, PipeMesh(number, range(PLACES * RANKS), places), letters, self._mark)
        mesh = PipeMesh(number, places[self.place], places)
        mesh.across = self.across.mesh
        self.comm = PlaceComm(worlds[self.place], number, mesh, self.across)
        self.units = self._made_units()
        tied = self.units[-1] if program.is_tied else None
        engine: Any = Engine(mesh, self.comm, self.units, Ledger())  # type: ignore[arg-type]
        self.engine: Engine = engine
        self._open, engine.order.open = engine.order.open, self._opened
        kinds = {Kind.BACKWARD: "backward"} | ({} if program.is_whole else dict.fromkeys(FORWARDS, "forward"))
        self._passes = [(kinds[one.kind], one.chunk) for one in schedule.actions[self.place] if one.kind in kinds]
        self._done = self._chunk = 0
        self._chunks: dict[int, int] = {}
        """The chunk of each pass, by its number."""
        self._followed: list[Any] = []
        """Passes that are as those before them."""
        for unit in self.units:
            unit.hang(engine, self._mark)
        own = range(self.place, PLACES * program.chunks, PLACES)
        self.model = Model(
            engine, PLACES * program.chunks, PLACES, self.units, tied, self._path_of, self._mark, self._tell
        )
        numbers = {chunk: [0, 1 + 2 * at, 2 + 2 * at] for at, chunk in enumerate(own)}
        if tied is not None:
            tied.is_tied = True
            numbers[own[0] if self.place == 0 else own[-1]].append(tied.number)
        self.numbers = numbers
        column = [at * RANKS + self.column for at in range(PLACES)]
        shared = {} if tied is None else {self.model.parameters()[-1]: column}
        self.runner = Runner(
            engine,
            self.model,  # type: ignore[arg-type]
            schedule,
            column,
            self._loss,
            numbers,
            shared,  # type: ignore[arg-type]
            reduces_last=program.reduce == "last",
        )
        self.per_step: list[Any] = []
        """Of each step: None if it failed, or what landed here and what is held and used, by unit."""
        self.landed: Counter[int] = Counter()
        self._inputs = torch.tensor([self._value_of(at) for at in range(program.micro_batches)], device="cpu")
        self._weights = torch.tensor([self._weight_of(at) for at in range(program.micro_batches)], device="cpu")
        self._uses: Counter[tuple[int, int, int]] = Counter()
        self._backward = (-1, -1)

    def _made_units(self) -> list[PipeUnit]:
        program = self.program
        count = 1 + 2 * program.chunks + program.is_tied
        return [
            PipeUnit(
                number,
                self.number,
                1 if number else program.chunks,
                is_whole=program.is_whole,
                until=program.until,
                told=self._tell,
                landed=self._landed,
                moved=self._moved,
            )
            for number in range(count)
        ]

    def _value_of(self, micro: int) -> float:
        return 1.0 + self.column + RANKS * micro

    def _weight_of(self, micro: int) -> float:
        return 1.0 + self.column / 4 + micro / 2

    def _micro_of(self, value: float) -> int:
        return int(value - 1 - self.column) // RANKS

    @property
    def order(self) -> Any:
        """The engine's."""
        return self.engine.order

    def _tell(self, text: str) -> None:
        self.faults.append(f"rank {self.number}, step {self.step}: {text}")

    # -- what the model and the transport ask -----------------------------------------------------------------------

    def _mark(self, what: str) -> None:
        if not self._is_stepping:
            return
        marks, failure = self.marks[self.step], self.program.failure
        marks.append(what)
        if failure is not None and (failure.rank, failure.step, failure.mark) == (
            self.number,
            self.step,
            len(marks) - 1,
        ):
            self.struck = what
            raise Broken("a connection has ended") if what.startswith(WIRE) else Planned(what)

    def _path_of(self, chunk: int, value: float) -> tuple[Path, tuple[int, ...]]:
        micro = self._micro_of(value)
        departure = self._departure(chunk, micro)
        return departure.path, departure.silent

    def _departure(self, chunk: int, micro: int) -> Departure:
        plain = Departure(self.number, self.step, chunk, micro)
        here = (self.number, self.step, chunk, micro)
        found = (one for one in self.program.departures if (one.rank, one.step, one.chunk, one.micro_batch) == here)
        return next(found, plain)

    def _loss(self, output: Tensor, weight: Tensor) -> Tensor:
        self._mark("loss")
        return (output * weight).sum()

    def _opened(self, phase: str, key: Any, **options: Any) -> Any:
        """Open a pass: the next one of the schedule."""
        wanted, self._chunk = self._passes[self._done] if self._done < len(self._passes) else ("no", -1)
        self._done += 1
        if phase != wanted:
            self._tell(f"a {phase} {key} is where the schedule has {wanted} pass of chunk {self._chunk}")
        pass_ = self._open(phase, key, **options)
        self._chunks[pass_.number] = self._chunk
        if self.program.departures or self.program.failure is not None or self.step == 0:
            return pass_
        self._followed.append(pass_)
        return pass_

    def _moved(self, kind: str, unit: int) -> None:
        # What a pass before has left is served while the next one opens.
        pass_ = self.engine.order.current
        chunk = self._chunk if pass_ is None else self._chunks.get(pass_.number, self._chunk)
        if unit not in self.numbers.get(chunk, ()):
            self._tell(f"{pass_} of chunk {chunk} has the {kind} of unit {unit}")

    def _landed(self, unit: int, index: int, grad: Tensor) -> None:
        """Note a gradient, whose value says of which micro-batch it is, and how often its parameter was used."""
        self.landed[unit] += 1
        if not self.model.is_exact:
            return
        sizes = {
            round(uses * self._value_of(micro) * self._weight_of(micro) / self.program.micro_batches, 4)
            for micro in range(self.program.micro_batches)
            for uses in (1, 2)
        }
        if round(grad.item(), 4) not in sizes:
            self._tell(f"the gradient {grad.item()} of unit {unit} is of no micro-batch of this rank")

    # -- a run ------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run the program, and note how it ended."""
        try:
            for step in range(self.program.steps):
                self.step = step
                self._step()
            self.engine.leave_passes("the end of the program")
            self.engine.order.settle("the end of the program")
            self.ending = "end"
            for one in self._followed:
                if one.asks or one.agreed:
                    self._tell(f"{one} {one.key} was as those before it, and ranks agreed on {one.agreed}")
        except Stuck as error:
            self.ending, self.error = "watchdog", error
        except RankMismatchError as error:
            self.ending, self.error = "mismatch", error
            if self.program.failure is None:
                self._tell(str(error))
        except Exception as error:
            self.ending, self.error = "crash", error
            self._tell(f"{type(error).__name__}: {error}")
        for unit in self.units:
            unit.unhang()
        saved = self.engine.saved
        while saved.is_innermost():  # of a forward that was interrupted, on a thread that runs the next program
            saved.context().__exit__()

    def _step(self) -> None:
        program, engine = self.program, self.engine
        failure = program.failure
        self.model.is_exact = failure is None or failure.step != self.step
        self.landed = Counter()
        self._done = 0
        before = [len(unit.sums) for unit in self.units]
        batch = Batch((self._inputs,), {}, self._weights, program.micro_batches, str(engine.mesh))
        self._is_stepping = True
        try:
            self.runner.step(batch, is_last=True)
        except Planned:
            self._drop()
            return
        except RankMismatchError as error:
            if FAILED not in str(error):
                raise
            self._drop()
            return
        finally:
            self._is_stepping = False
        self._norm()
        engine.leave_passes("optimizer.step()")
        engine.check_reduced("optimizer.step()")
        if not engine.order.settle(f"step {len(self.per_step)}"):
            self._tell("a step was voted down")
        self._check_end(before)
        engine.order.next_number()
        engine.order.publish([], lambda unit: [])
        self.per_step.append(
            (dict(self.landed), [unit.held for unit in self.units], [any(unit.used) for unit in self.units])
        )
        for gradient in self.model.parameters():
            gradient.grad = None

    def _norm(self) -> None:
        engine, what = self.engine, "a norm"
        engine.leave_passes(what)
        engine.check_reduced(what)
        engine.answer(what)
        engine.order.votes.span(what)
        self.across.collect(torch.zeros(1, device="cpu"), what)

    def _drop(self) -> None:
        """See that a step that failed has left nothing, and count it."""
        self.per_step.append(None)
        self.engine.catch_up()
        for unit in self.units:
            if unit.local or unit.held or unit.waits:
                self._tell(f"{unit} keeps gradients of a step that failed")

    def _check_end(self, before: Sequence[int]) -> None:
        program = self.program
        for unit, count in zip(self.units, before, strict=True):
            if unit.is_open and not unit.spec.is_whole:
                self._tell(f"{unit} was left whole")
            sums = unit.sums[count:]
            most = (program.chunks if unit.number == 0 else 1) * (
                1 if program.reduce == "last" else program.micro_batches
            )
            if len(sums) > most or len(set(sums)) < len(sums):
                self._tell(f"{unit} was summed in the passes {sums}, {most} at most")


# -- a run ------------------------------------------------------------------------------------------------------------


def run_pipe(
    program: PipeProgram, crew: Crew, choose: Callable[[int], int] | None = None, schedule: Schedule | None = None
) -> PipeOutcome:
    """Run a program and judge it.

    Args:
        choose: who goes on; see `Crew.choose`. It decides nothing else.
        schedule: that of a step, if not the one that the program names.
    """
    if schedule is None:
        again = range(PLACES * program.chunks) if program.is_recomputed else ()
        schedule = schedule_of(program.schedule, PLACES, program.micro_batches, program.chunks, recomputed=again)
    worlds = [World(crew, RANKS) for _ in range(PLACES)]
    everything, letters = World(crew, PLACES * RANKS), Letters(crew)
    ranks = [PipeRank(number, program, schedule, worlds, everything, letters) for number in range(PLACES * RANKS)]
    crew.run([rank.work for rank in ranks], choose)
    faults = [fault for rank in ranks for fault in rank.faults]
    endings, struck = {rank.ending for rank in ranks}, "".join(rank.struck for rank in ranks)
    if endings == {"end"}:
        verdict = "failed step" if struck else "right"
        faults += _faults_at_the_end(program, ranks, letters, has_failed=bool(struck))
    else:
        verdict = "broken"
        if not struck.startswith(WIRE) or not endings <= {"mismatch", "watchdog"}:
            faults.append(f"ranks ended with {', '.join(rank.ending for rank in ranks)}")
    made = [sum(one is not None for one in rank.per_step) for rank in ranks]
    if len(set(made)) > 1:
        faults.append(f"ranks made {', '.join(map(str, made))} steps")
    return PipeOutcome(
        "fault" if faults else verdict,
        faults,
        sum(len(one.sequence) for rank in ranks for one in (rank.comm, rank.across)),
        letters.count,
        Counter(),
        [rank.marks for rank in ranks],
        ranks,
    )


def failures_of(program: PipeProgram, outcome: PipeOutcome, steps: Sequence[int]) -> Iterator[PipeProgram]:
    """Yield the program with each failure of each rank at each mark that a right run of it had in these steps."""
    for rank, marks in enumerate(outcome.marks):
        for step in steps:
            for mark in range(len(marks[step])):
                yield replace(program, failure=PipeFailure(rank, step, mark))


def _faults_at_the_end(
    program: PipeProgram, ranks: Sequence[PipeRank], letters: Letters, *, has_failed: bool
) -> list[str]:
    faults = []
    if letters.left:
        faults.append(f"{letters.left} messages have a sender or a receiver alone")
    for (kind, source, to, parity), sent in letters.order.items():
        received = letters.order["received", source, to, parity]
        if kind == "sent" and sent != received:
            faults.append(f"rank {source} sends to rank {to} {sent[:9]}, which receives {received[:9]}")
    for rank in ranks:
        for name, one, other in (
            ("the place", rank.comm, ranks[rank.number // RANKS * RANKS].comm),
            ("all places", rank.across, ranks[0].across),
        ):
            faults += _differences(name, rank.number, one.sequence, other.sequence)
    for step in range(program.steps):
        of_ranks = [rank.per_step[step] for rank in ranks]
        if any(one is None for one in of_ranks):
            is_planned = has_failed and program.failure is not None and program.failure.step == step
            if not is_planned or any(one is not None for one in of_ranks):
                faults.append(f"step {step} failed on {[rank for rank, one in enumerate(of_ranks) if one is None]}")
            continue
        faults += _sums(program, step, of_ranks)
    return faults


def _differences(where: str, rank: int, one: list[Any], other: list[Any]) -> list[str]:
    names = sorted({str(item[1][0]) for item in (*one, *other)})
    faults = []
    for name in names:
        ones, others = ([item for item in items if item[1][0] == name] for items in (one, other))
        if ones != others:
            faults.append(f"rank {rank} differs from the first rank of {where} in {name}: {ones[-3:]}, {others[-3:]}")
    return faults


def _sums(program: PipeProgram, step: int, of_ranks: Sequence[Any]) -> list[str]:
    faults = []
    for rank, (_, held, used) in enumerate(of_ranks):
        for unit, bits in enumerate(held):
            is_tied = program.is_tied and unit == len(held) - 1
            among = range(len(of_ranks)) if is_tied else range(rank // RANKS * RANKS, (rank // RANKS + 1) * RANKS)
            expected = sum(of_ranks[other][0].get(unit, 0) << (4 * other) for other in among)
            if bits != expected:
                faults.append(f"step {step}: rank {rank} holds {bits:b} of unit {unit}, not {expected:b}")
            if used[unit] != bool(expected):
                faults.append(f"step {step}: rank {rank} takes unit {unit} for {'un' * (not used[unit])}used")
    return faults
