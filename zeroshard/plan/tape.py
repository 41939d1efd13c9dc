"""What one module does to memory and time, operation by operation, written down without running it.

Owns the record of a module's forward (`Tape`), and what follows from it: the instructions of its forward, of its
recomputation and of its backward, as autograd would give them. Must not know which modules there are
(`transformer.py`), ranks, nor when units are gathered. Needs no torch; `tests/plan` compares it with the tracer.

Note: how autograd is stood for
    A tensor lives until the last operation that reads it has run, or longer if an operation saves it: then until that
    operation's backward has run. The backward goes through operations in reverse order; each makes a gradient for
    every input that wants one, and for its weights, and then the gradients of its results and what it saved are gone.
    A second gradient of the same tensor is made apart and added to the first in place.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, final

from zeroshard.plan.hardware import Cost

__all__ = ["Exchange", "Instruction", "Operation", "Parts", "TREATMENTS", "Tape", "coarse", "instructions"]

TREATMENTS: Final = ("keep", "recompute", "recompute-rest")
"""What is done with what a module's forward saves: kept, all recomputed, all but products and attention."""

INPUT: Final = 0
"""The number of a tape's input."""
WORKSPACE: Final = -2
"""The number of what a kernel takes for itself."""
GIVEN: Final = -3
"""The number of the gradient of a tape's output, which the backward is given."""
PART: Final = -4
"""The number of what stays of a recomputed module's input: a tensor rank's part of it."""


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective along an axis, among an operation's own work.

    Args:
        kind: "all-reduce", "gather", "reduce" or "send".
        nbytes: of the whole tensor.
        axis: "tensor", "expert", "context" or "pipe".
    """

    kind: str
    nbytes: int
    axis: str = "tensor"


class Instruction(NamedTuple):
    """One thing that happens.

    `kind` is "make" and "drop" (a tensor), "run" (a kernel, or several in `seconds`), "exchange", "copy" (to the host
    or back), "land" (the gradient of weights is there), or "hand" (the tensor is left to whoever comes next).
    `is_alone` tells of a gradient that lands whether nothing else shares its memory.
    """

    kind: str
    what: str
    tensor: int = -1
    nbytes: int = 0
    cost: Cost | None = None
    exchange: Exchange | None = None
    seconds: float = 0.0
    is_alone: bool = False


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a forward.

    Args:
        reads: numbers of tensors.
        makes: (number, bytes) of results.
        saves: numbers of tensors that its backward needs.
        wants: those of `reads` that get gradients.
        weight_bytes: of the gradient of its weights.
        workspace: bytes that its forward and its backward take for themselves.
        is_kept: whether "recompute-rest" keeps its results.
        passes: whether the gradient of its result is that of its inputs, as in a sum.
        exchanged, exchanged_back: by its forward and its backward.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    saves: tuple[int, ...]
    wants: tuple[int, ...]
    forward: Cost
    backward: Cost
    weight_bytes: int = 0
    workspace: tuple[int, int] = (0, 0)
    is_kept: bool = False
    passes: bool = False
    exchanged: Exchange | None = None
    exchanged_back: Exchange | None = None


@final
@dataclass(frozen=True)
class Parts:
    """The instructions of a module in one step, and sums over them.

    Args:
        saved_bytes: by which the forward changes what is there: what is kept, and the output, less an input that
            nobody needs any more.
        forward_bytes: the most that the forward has beyond that.
        backward_bytes: the most that the backward (with recomputation) has beyond what was there, gradients of
            weights aside.
        output: number of the tensor that the forward leaves for the next module.
    """

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    output: int

    @cached_property
    def saved_bytes(self) -> int:
        """Return by how much the forward changes what is there."""
        return self._kept[0]

    @cached_property
    def forward_bytes(self) -> int:
        """Return the most that the forward has beyond that."""
        return self._kept[1]

    @cached_property
    def backward_bytes(self) -> int:
        """Return the most that the backward has beyond what was there."""
        return most_bytes(self.backward)[1]

    @cached_property
    def _kept(self) -> tuple[int, int]:
        left, most = most_bytes(self.forward)
        return left, most - left


def coarse(parts: Parts, seconds: Callable[[Cost], float]) -> Parts:
    """Return a module's instructions in a few: what stays, the most beyond it, the time of all kernels.

    The peak of a step is the same, because what a module has at most is there at one moment. For searches.
    """
    forward = _coarse(parts.forward, seconds, parts.output, dict[int, int]())
    kept = {one.tensor: one.nbytes for one in forward if one.kind == "make" and one.tensor == _KEPT}
    return Parts(forward, _coarse(parts.backward, seconds, None, kept), parts.output)


_KEPT: Final = -5
_EXTRA: Final = -6


def _coarse(
    run: Sequence[Instruction], seconds: Callable[[Cost], float], output: int | None, kept: Mapping[int, int]
) -> tuple[Instruction, ...]:
    """Sum a forward (with its output) or a backward up."""
    left, most = most_bytes(run)
    made = {one.tensor: one.nbytes for one in run if one.kind == "make"}
    dropped = {one.tensor: one.nbytes for one in run if one.kind == "drop"}
    given = INPUT if output is not None else GIVEN
    ends = [
        Instruction("drop", "its input", one, dropped[one])
        for one in {INPUT, given}
        if one in dropped and one not in made
    ]
    took_s = sum(seconds(one.cost) for one in run if one.kind == "run" and one.cost is not None)
    work = [Instruction("run", "kernels", seconds=took_s), *(one for one in run if one.kind in ("exchange", "copy"))]
    ended_bytes = sum(one.nbytes for one in ends)
    if output is not None:
        rest = left + ended_bytes - made[output]
        stays = [Instruction("make", "output", output, made[output]), Instruction("make", "saved", _KEPT, rest)]
        extra = Instruction("make", "temporary", _EXTRA, most - made[output] - rest)
        return (*stays, extra, *work, extra._replace(kind="drop"), *ends)
    handed = [one.tensor for one in run if one.kind == "hand"]
    # Where gradients land, memory of the engine comes beside the module's: so what is there before and after counts.
    lands = [place for place, one in enumerate(run) if one.kind == "land"]
    place = lands[0] if lands else len(run)
    start, before = most_bytes(run[:place])
    after = start + most_bytes(run[place:])[1]
    first, then = (Instruction("make", "temporary", _EXTRA, max(0, nbytes)) for nbytes in (before, after))
    ends += [Instruction("drop", "saved", tensor, nbytes) for tensor, nbytes in kept.items()]
    last = [
        step
        for tensor in handed
        for step in (Instruction("make", "gradient", tensor, made.get(tensor, 0)), Instruction("hand", "", tensor))
        if tensor != GIVEN or step.kind == "hand"
    ]
    landed = [run[place], then, then._replace(kind="drop")] if lands else []
    return (first, *work, first._replace(kind="drop"), *landed, *ends, *last)


def most_bytes(run: Iterable[Instruction]) -> tuple[int, int]:
    """Return the bytes that are left after some instructions, and the most on the way."""
    now = most = 0
    for one in run:
        if one.kind == "make":
            now += one.nbytes
            most = max(most, now)
        elif one.kind == "drop":
            now -= one.nbytes
    return now, most


@final
@dataclass(eq=False)
class Tape:
    """A module's forward while it is written down: call `add` for each operation, in order.

    Args:
        itemsize: bytes of an element of activations.
        input_bytes: of the tensor that the module is given; 0 where it wants no gradient.
    """

    itemsize: int
    input_bytes: int
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes: list[int] = [self.input_bytes]
        self._is_given: list[bool] = [self.input_bytes > 0]

    @property
    def input(self) -> int:
        """The number of the tensor that the module is given."""
        return INPUT

    @property
    def output(self) -> int:
        """The number of the tensor that it returns: the first result of the last operation."""
        return self.operations[-1].makes[0][0]

    def add(
        self,
        name: str,
        reads: Sequence[int],
        makes: Sequence[int],
        saves: Sequence[int] = (),
        *,
        saves_made: Sequence[int] = (),
        flops: float = 0,
        backward_flops: float | None = None,
        kind: str = "memory",
        shape: tuple[int, int] = (0, 0),
        weight_bytes: int = 0,
        read_weight_bytes: int = 0,
        workspace: tuple[int, int] = (0, 0),
        is_kept: bool = False,
        passes: bool = False,
        moved: tuple[float, float] | None = None,
        exchanged: Exchange | None = None,
        exchanged_back: Exchange | None = None,
    ) -> int:
        """Write an operation down, and return the number of its first result.

        Args:
            reads: numbers of tensors, as `input` and earlier calls gave them.
            makes: bytes of each result; the first one gets a gradient.
            saves: numbers of read tensors that the backward needs.
            saves_made: places in `makes` of results that it needs.
            backward_flops: twice the forward's where not said.
            moved: bytes read and written by forward and backward, where they are not those of its tensors and weights.
        """
        first = len(self.sizes)
        self.sizes += makes
        self._is_given += [place == 0 for place in range(len(makes))]
        read_bytes = sum(self.sizes[one] for one in reads)
        made_bytes = sum(makes)
        once = read_bytes + made_bytes + read_weight_bytes
        forward_bytes, backward_bytes = moved or (once, 2 * once)
        back = 2 * flops if backward_flops is None else backward_flops
        numbers = tuple(range(first, first + len(makes)))
        self.operations.append(
            Operation(
                name,
                tuple(reads),
                tuple(zip(numbers, makes, strict=True)),
                (*saves, *(numbers[place] for place in saves_made)),
                tuple(one for one in dict.fromkeys(reads) if self._is_given[one]),
                Cost(flops, forward_bytes, kind, *shape),
                Cost(back, backward_bytes, kind, *shape),
                weight_bytes,
                workspace,
                is_kept,
                passes,
                exchanged,
                exchanged_back,
            )
        )
        return first


def instructions(
    tape: Tape, treatment: str = "keep", *, input_parts: int = 1, is_input_offloaded: bool = False
) -> Parts:
    """Return what a module does in one step.

    Its input is somebody else's output, and it drops that when nothing of its own needs it any more. Its output, and in
    the backward the gradient of its input, are left for others to drop.

    Args:
        treatment: of what the forward saves, one of `TREATMENTS`.
        input_parts: tensor ranks that each keep a part of a recomputed module's input (P_a).
        is_input_offloaded: whether what is kept of that input lies in memory of the host (P_a+cpu).

    Raises:
        ValueError: there is no such treatment, or one that keeps no input is to part or offload it.
    """
    if treatment not in TREATMENTS:
        raise ValueError(f"treatment must be one of {', '.join(TREATMENTS)}; got {treatment!r}.")
    is_treated = input_parts > 1 or is_input_offloaded
    if is_treated and treatment == "keep":
        raise ValueError(
            f"input_parts={input_parts}, is_input_offloaded={is_input_offloaded}: only recomputation keeps "
            "inputs; give treatment='recompute'."
        )
    run = _Run(tape)
    if treatment == "keep":
        run.forward({number for one in tape.operations for number in one.saves} | {tape.output})
        run.forget(tape.output)
        forward = run.take()
    else:
        kept = {n for one in tape.operations for n, _ in one.makes if one.is_kept and treatment == "recompute-rest"}
        run.forward(kept | {INPUT, tape.output})
        if is_treated:
            run.put_away(input_parts, is_offloaded=is_input_offloaded)
        forward = run.take()
        if is_treated:
            run.bring_back(input_parts, is_offloaded=is_input_offloaded)
        if tape.output not in kept:
            run.forget(tape.output)
        run.forward({number for one in tape.operations for number in one.saves}, skips=kept)
    run.backward()
    return Parts(forward, run.take(), tape.output)


@final
class _Run:
    """A tape as it is played: which tensors and gradients are live, and the instructions so far."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._out = tape, list[Instruction]()
        self._live = {INPUT} if tape.input_bytes else set[int]()
        self._last_read = {number: place for place, one in enumerate(tape.operations) for number in one.reads}
        self._gradients: dict[int, int] = {}
        """Of tensors: the number of the memory that their gradient is in."""
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def take(self) -> tuple[Instruction, ...]:
        """Return the instructions since the last call."""
        taken, self._out = tuple(self._out), []
        return taken

    def forget(self, number: int) -> None:
        """Leave a tensor to its other user, the next module."""
        self._live.discard(number)

    def put_away(self, parts: int, *, is_offloaded: bool) -> None:
        """Keep a part of the input, here or in memory of the host, in place of the input."""
        name, nbytes = "keep a part of the input", -(-self._tape.input_bytes // parts)
        if parts > 1:
            self._out.append(Instruction("make", name, PART, nbytes))
            self._out.append(Instruction("run", name, cost=Cost(moved_bytes=2 * nbytes)))
        if is_offloaded:
            self._out.append(Instruction("copy", "copy to the host", nbytes=nbytes))
            if parts > 1:
                self._out.append(Instruction("drop", name, PART, nbytes))
        self._drop(INPUT, name)

    def bring_back(self, parts: int, *, is_offloaded: bool) -> None:
        """Make the input whole again."""
        name, whole_bytes = "gather the input", self._tape.input_bytes
        nbytes = -(-whole_bytes // parts)
        self._live.add(INPUT)
        if is_offloaded:
            self._out.append(Instruction("make", name, PART if parts > 1 else INPUT, nbytes))
            self._out.append(Instruction("copy", "copy from the host", nbytes=nbytes))
        if parts > 1:
            self._out.append(Instruction("make", name, INPUT, whole_bytes))
            self._out.append(Instruction("exchange", name, exchange=Exchange("gather", whole_bytes)))
            self._out.append(Instruction("drop", name, PART, nbytes))

    def forward(self, held: set[int], skips: Collection[int] = ()) -> None:
        """Play the operations in order; those whose results are all in `skips` do not run again.

        Args:
            held: numbers of the tensors that stay.
        """
        for place, one in enumerate(self._tape.operations):
            if not (skips and all(number in skips for number, _ in one.makes)):
                for number, nbytes in one.makes:
                    if number not in self._live:
                        self._live.add(number)
                        self._out.append(Instruction("make", one.name, number, nbytes))
                self._work(one.name, one.workspace[0], one.forward, one.exchanged)
            for number in sorted({*one.reads, *(number for number, _ in one.makes)} - held):
                if self._last_read.get(number, -1) <= place:
                    self._drop(number, one.name)

    def backward(self) -> None:
        """Play the operations in reverse order, from the gradient of the output to that of the input."""
        tape = self._tape
        self._sizes[GIVEN], self._users[GIVEN] = tape.sizes[tape.output], 1
        self._gradients[tape.output] = GIVEN
        needed = Counter(number for one in tape.operations for number in one.saves)
        for one in reversed(tape.operations):
            name = f"{one.name} backward"
            arrived = self._gradients.pop(one.makes[0][0], None)
            sizes = [tape.sizes[number] for number in one.wants]
            news = [arrived if one.passes and arrived is not None else self._new(size, name) for size in sizes]
            if one.weight_bytes:
                self._out.append(Instruction("land", name, nbytes=one.weight_bytes))
            self._work(name, one.workspace[1], one.backward, one.exchanged_back)
            for new in news:
                self._users[new] += 1
            if arrived is not None:
                self._leave(arrived, name)
            for number, new in zip(one.wants, news, strict=True):
                self._deliver(number, new, name)
            for number in one.saves:
                needed[number] -= 1
                if not needed[number]:
                    self._drop(number, name)
        for number in sorted(self._live):
            self._drop(number, "end of the backward")
        if INPUT in self._gradients:
            self._out.append(Instruction("hand", "end of the backward", self._gradients[INPUT]))

    def _deliver(self, number: int, gradient: int, name: str) -> None:
        """Give a tensor a gradient: it is added to the one that is there, in place where nothing else uses that."""
        before = self._gradients.get(number)
        if before is None:
            self._gradients[number] = gradient
            return
        if self._users[before] > 1:
            total = self._new(self._tape.sizes[number], name)
            self._users[total] = 1
            self._leave(before, name)
            self._gradients[number] = total
        self._leave(gradient, name)

    def _new(self, nbytes: int, name: str) -> int:
        number = len(self._tape.sizes) + len(self._sizes)
        self._sizes[number] = nbytes
        self._out.append(Instruction("make", name, number, nbytes))
        return number

    def _leave(self, gradient: int, name: str) -> None:
        self._users[gradient] -= 1
        if not self._users[gradient]:
            self._out.append(Instruction("drop", name, gradient, self._sizes[gradient]))

    def _work(self, name: str, workspace_bytes: int, cost: Cost, exchange: Exchange | None) -> None:
        if workspace_bytes:
            self._out.append(Instruction("make", name, WORKSPACE, workspace_bytes))
        if cost.flops or cost.moved_bytes:
            self._out.append(Instruction("run", name, cost=cost))
        if workspace_bytes:
            self._out.append(Instruction("drop", name, WORKSPACE, workspace_bytes))
        if exchange is not None:
            self._out.append(Instruction("exchange", name, exchange=exchange))

    def _drop(self, number: int, name: str) -> None:
        if number in self._live:
            self._live.remove(number)
            self._out.append(Instruction("drop", name, number, self._tape.sizes[number]))
