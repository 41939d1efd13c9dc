"""Programs for the order protocol: what each rank uses in each pass, and which rank fails where.

Owns programs as data, how they are counted, drawn and made smaller. It must not know the engine.

Note: programs
    A *path* is what a rank's forward does, as signed units: `(1, 2, -2, -1)` enters unit 1, in it unit 2, and leaves
    both. The root is entered and left around it. The backward follows from the paths of the forwards before it: last
    call first, and a unit's gradients land when the backward of its first call ends. *Marks* are the single events of a
    forward or a backward; a failure is at the place before one of them.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

__all__ = [
    "Failure",
    "Mark",
    "Op",
    "Path",
    "Program",
    "backward_marks",
    "draw",
    "failures_in",
    "flat",
    "is_valid",
    "orders",
    "orders_again",
    "smaller",
    "train",
]

Path = tuple[int, ...]
Mark = tuple[Literal["need", "land", "leave"], int]
Transport = Literal["messages", "host", "nccl"]
SOME = ("late", "silent", "lost")
TRANSPORTS: tuple[Transport, ...] = ("messages", "host", "nccl")


@dataclass(frozen=True)
class Op:
    """What all ranks do next, each in its own way.

    Args:
        kind: "forward"; "evaluate", a forward without gradients; "backward" of the forwards since the last one;
            "local", a backward under `no_sync`, and "copies", one that leaves sums over copies to a later one; "norm",
            of gradients; "meet", a collective of the user's; "step", of the optimizer.
        paths: of a forward, by rank.
        late: of a backward, by rank: units whose gradients land after they were left.
        silent: of a backward, by rank: units that get no gradient though they were used.
        lost: of a backward, by rank: units of which autograd promises a gradient that does not come.
    """

    kind: Literal["forward", "evaluate", "backward", "local", "copies", "norm", "meet", "step"]
    paths: tuple[Path, ...] = ()
    late: tuple[Path, ...] = ()
    silent: tuple[Path, ...] = ()
    lost: tuple[Path, ...] = ()

    @property
    def is_forward(self) -> bool:
        """Whether it has paths."""
        return self.kind in ("forward", "evaluate")

    @property
    def is_backward(self) -> bool:
        """Whether gradients land in it."""
        return self.kind in ("backward", "local", "copies")


@dataclass(frozen=True)
class Failure:
    """One rank raises, once, before a mark of an operation.

    Args:
        op: place of the operation; a forward or a backward.
        mark: place of the mark: 0 is before the operation begins, 1 before its first mark.
        caught: where the exception is caught. "step": the program continues with its next step, or the norm before it;
            "after": behind that step; "inside": in the module around the one that raised, which continues without its
            result.
    """

    rank: int
    op: int
    mark: int
    caught: Literal["step", "after", "inside"] = "step"


@dataclass(frozen=True)
class Program:
    """What ranks do.

    Args:
        units: how many, with the root.
        is_whole: whether parameters stay whole, as at stages 0 to 2.
        copies: of the state, each over as many ranks.
        held: units that stay whole from a forward to its backward.
    """

    ranks: int
    units: int
    ops: tuple[Op, ...]
    failure: Failure | None = None
    transport: Transport = "messages"
    is_whole: bool = False
    copies: int = 1
    held: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return it as one line, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        ops = tuple(
            Op(one["kind"], *(tuple(map(tuple, one[name])) for name in ("paths", *SOME))) for one in fields.pop("ops")
        )
        failure, held = fields.pop("failure"), tuple(fields.pop("held", ()))
        return cls(**fields, ops=ops, failure=Failure(**failure) if failure else None, held=held)


def train(ranks: int, units: int, *steps: Sequence[Sequence[int]]) -> Program:
    """Return the program that trains in each step with these orders of units, by rank."""
    ops: list[Op] = []
    for orders_of_ranks in steps:
        ops += [Op("forward", tuple(map(flat, orders_of_ranks))), Op("backward"), Op("step")]
    return Program(ranks, units, tuple(ops))


def flat(order: Iterable[int]) -> Path:
    """Return the path that uses units one after the other."""
    return tuple(mark for unit in order for mark in (unit, -unit))


def orders(units: int) -> list[Path]:
    """Return all ordered subsets of the units besides the root."""
    return [order for k in range(units) for order in itertools.permutations(range(1, units), k)]


def orders_again(units: int) -> list[Path]:
    """Return all ordered subsets with one unit entered again, at once or later."""
    found = {
        (*order[:place], unit, *order[place:])
        for order in orders(units)
        for at, unit in enumerate(order)
        for place in range(at + 1, len(order) + 1)
    }
    return sorted(found)


# -- what follows from a program --------------------------------------------------------------------------------------


def backward_marks(paths: Sequence[Path], calls: Counter[int], late: Path = (), silent: Path = ()) -> list[Mark]:
    """Return the marks of the backward of these forwards.

    Args:
        calls: of each unit, those whose backward must end before it is left.
    """
    marks: list[Mark] = []
    waiting: list[int] = []
    left = Counter(calls)
    for mark in (-mark for path in reversed(paths) for mark in reversed(path)):
        if mark > 0:
            marks.append(("need", mark))
            marks += [("land", unit) for unit in waiting]
            waiting = []
            continue
        left[-mark] -= 1
        if left[-mark] == 0:
            if -mark in late and -mark not in silent:
                waiting.append(-mark)
            elif -mark not in silent:
                marks.append(("land", -mark))
            marks.append(("leave", -mark))
    return marks + [("land", unit) for unit in (*waiting, *(() if 0 in silent or not paths else (0,)))]


def failures_in(program: Program, op: int) -> Iterator[Failure]:
    """Yield the failures of each rank at each mark of an operation."""
    here = program.ops[op]
    for rank in range(program.ranks):
        if here.is_forward:
            path = here.paths[rank]
            for mark in range(len(path) + 2):
                yield Failure(rank, op, mark, "step")
            depth = 0
            for mark, unit in enumerate(path, 1):
                if depth:
                    yield Failure(rank, op, mark, "inside")
                depth += 1 if unit > 0 else -1
        elif here.is_backward:
            paths = _pending(program.ops, op, rank)
            count = len(backward_marks(paths, Counter(m for path in paths for m in path if m > 0)))
            for mark in range(count + 2):
                yield Failure(rank, op, mark, "step")


def _pending(ops: Sequence[Op], at: int, rank: int) -> list[Path]:
    paths: list[Path] = []
    for op in ops[:at]:
        if op.kind == "forward":
            paths.append(op.paths[rank])
        elif op.is_backward:
            paths = []
    return paths


# -- random programs --------------------------------------------------------------------------------------------------


def draw(seed: int, ranks: int = 0) -> Program:
    """Return the program of a seed: 2 to 6 ranks, to 6 units, some steps, at times a failure."""
    r = random.Random(seed)
    ranks, is_whole = ranks or r.choice([2, 2, 2, 3, 3, 4, 5, 6]), r.random() < 0.1
    units = r.choice([2, 3, 4, 4, 5, 6])
    is_alike = r.random() < 0.3  # all ranks take one path in a forward
    ops: list[Op] = []
    earlier: list[tuple[Path, ...]] = []
    for _ in range(r.choice([1, 2, 2, 3])):
        micro = r.choice([1, 1, 1, 2])
        for place in range(micro):
            if r.random() < 0.1:
                ops.append(Op("evaluate", _draw_paths(r, ranks, units, is_alike)))
            for _ in range(r.choice([1, 1, 1, 1, 2])):
                paths = r.choice(earlier) if earlier and r.random() < 0.4 else _draw_paths(r, ranks, units, is_alike)
                earlier.append(paths)
                ops.append(Op("forward", paths))
            # Gradients that are summed over all ranks have none added that are not.
            if r.random() < 0.2:
                ops.append(Op("meet"))
            is_summed = place == micro - 1 or r.random() < 0.4
            some = (_draw_some(r, ranks, units) for _ in SOME)
            ops.append(Op("backward" if is_summed else r.choice(["local", "copies"]), (), *some))
        # A rank that asks for a unit in a backward waits for the others, who must not wait for it in user code.
        ops += [Op("meet")] * (is_whole and r.random() < 0.5) + [Op("norm")] * (r.random() < 0.6)
        ops.append(Op("step"))
    if r.random() < 0.1:
        # Passes that are alike, until the record has all of them.
        paths = _draw_paths(r, ranks, units, is_alike)
        ops = [*ops, *[Op("forward", paths), Op("backward")] * (units + 2), Op("norm"), Op("step")]
    copies = r.choice([1, 2]) if ranks in (4, 6) else 1
    program = Program(ranks, units, tuple(ops), None, r.choice(TRANSPORTS), is_whole, copies)
    if r.random() < 0.25:
        places = [at for at, op in enumerate(ops) if op.is_forward or op.is_backward]
        failures = list(failures_in(program, r.choice(places)))
        failure = r.choice(failures)
        if failure.caught == "step" and r.random() < 0.2:
            failure = replace(failure, caught="after")
        program = replace(program, failure=failure)
    if r.random() < 0.3:
        program = replace(program, held=tuple(unit for unit in range(units) if r.random() < 0.7))
    return program


def _draw_paths(r: random.Random, ranks: int, units: int, is_alike: bool) -> tuple[Path, ...]:
    if is_alike or r.random() < 0.2:
        return (_draw_path(r, units),) * ranks
    return tuple(_draw_path(r, units) for _ in range(ranks))


def _draw_path(r: random.Random, units: int) -> Path:
    count = r.randrange(units)
    order = sorted(r.sample(range(1, units), count)) if r.random() < 0.4 else r.sample(range(1, units), count)
    if order and r.random() < 0.3:
        order.insert(r.randrange(len(order) + 1), r.choice(order))
    path: list[int] = []
    open_: list[int] = []
    for unit in order:
        if unit in open_:
            continue
        path.append(unit)
        open_.append(unit)
        # Mostly one after the other, at times one in another.
        while open_ and r.random() < 0.85:
            path.append(-open_.pop())
    return (*path, *(-unit for unit in reversed(open_)))


def _draw_some(r: random.Random, ranks: int, units: int) -> tuple[Path, ...]:
    if r.random() < 0.8:
        return ()
    return tuple(tuple(unit for unit in range(units) if r.random() < 0.2) for _ in range(ranks))


# -- smaller programs -------------------------------------------------------------------------------------------------


def is_valid(program: Program) -> bool:
    """Tell whether a program is one: it steps at its end, its backwards have forwards, its failure has a place."""
    if program.ranks < 2 or program.ranks % program.copies or not program.ops or program.ops[-1].kind != "step":
        return False
    has_forward, is_summed, has_sums = False, True, False
    for op in program.ops:
        if op.kind == "forward":
            has_forward = True
        elif op.is_backward:
            if not has_forward or (has_sums and op.kind == "copies"):
                return False
            has_forward, is_summed = False, op.kind == "backward"
            has_sums |= is_summed
        elif op.kind in ("norm", "step"):
            if not is_summed:
                return False
            has_sums &= op.kind == "norm"
        elif op.kind == "meet" and not (has_forward or program.is_whole):
            return False
    failure = program.failure
    if failure is None:
        return True
    if failure.op >= len(program.ops) or failure.rank >= program.ranks:
        return False
    return replace(failure, caught="step") in failures_in(program, failure.op) and (
        failure.caught != "inside" or failure in failures_in(program, failure.op)
    )


def smaller(program: Program) -> Iterator[Program]:
    """Yield valid programs with one thing less, those that lose most first."""
    yield from filter(is_valid, _smaller(program))


def _smaller(program: Program) -> Iterator[Program]:
    ops, failure = program.ops, program.failure
    if failure is not None:
        yield replace(program, failure=None)
    for size in (3, 2, 1):
        for at in range(len(ops) - size + 1):
            moved = failure
            if failure is not None:
                if at <= failure.op < at + size:
                    continue
                moved = replace(failure, op=failure.op - size * (failure.op >= at + size))
            yield replace(program, ops=ops[:at] + ops[at + size :], failure=moved)
    for rank in range(program.ranks):
        moved = failure
        if failure is not None:
            if failure.rank == rank:
                continue
            moved = replace(failure, rank=failure.rank - (failure.rank > rank))
        fewer = tuple(
            replace(op, **{n: v[:rank] + v[rank + 1 :] for n in ("paths", *SOME) if (v := getattr(op, n))})
            for op in ops
        )
        yield replace(program, ranks=program.ranks - 1, ops=fewer, failure=moved)
    for at, op in enumerate(ops):
        for name in SOME:
            if getattr(op, name):
                yield replace(program, ops=(*ops[:at], replace(op, **{name: ()}), *ops[at + 1 :]))
        for rank, path in enumerate(op.paths):
            for unit in sorted({abs(mark) for mark in path}):
                less = tuple(mark for mark in path if abs(mark) != unit)
                paths = (*op.paths[:rank], less, *op.paths[rank + 1 :])
                yield replace(program, ops=(*ops[:at], replace(op, paths=paths), *ops[at + 1 :]))
    used = max((abs(mark) for op in ops for path in op.paths for mark in path), default=0)
    if used + 1 < program.units:
        yield replace(program, units=used + 1)
    if program.transport != "messages":
        yield replace(program, transport="messages")
    if program.is_whole:
        yield replace(program, is_whole=False)
    if program.copies > 1:
        yield replace(program, copies=1)
    for unit in program.held:
        yield replace(program, held=tuple(other for other in program.held if other != unit))
    if failure is not None and failure.mark:
        yield replace(program, failure=replace(failure, mark=failure.mark - 1))
