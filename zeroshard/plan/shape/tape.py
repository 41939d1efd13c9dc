"""The memory and time of one module, operation by operation, without running the module.

Owns the record of a module's forward (`Tape`), and the instructions derived from it: of its forward, its recomputation
and its backward, as autograd would run them. It must not know the modules (`transformer.py`), ranks, or the gathers of
units. Needs no torch; `tests/plan` compares it with the tracer.

Note: how autograd is stood for
    A tensor lives until the last operation that reads it has run, or, if an operation saves it, until that operation's
    backward has run. The backward runs operations in reverse order; each operation makes a gradient for every input
    that requires one, and for its weights, and then the gradients of its results and its saved tensors are released. A
    second gradient of the same tensor is made separately and added to the first in place.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, final

from zeroshard.plan.machine.hardware import Cost

__all__ = ["Exchange", "Instruction", "Operation", "Parts", "Tape", "coarse", "instructions"]

INPUT: Final = 0
"""The number of a tape's input."""
WORKSPACE: Final = -2
"""The number of a kernel's temporary memory."""
GIVEN: Final = -3
"""The number of the gradient of a tape's output, an input of the backward."""
PART: Final = -4
"""The number of the kept part of a recomputed module's input: a tensor rank's part."""


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective along an axis, inside an operation.

    Args:
        kind: "all-reduce", "gather", "reduce" or "send".
        nbytes: bytes of the full tensor.
        axis: "tensor" or "pipe".
    """

    kind: str
    nbytes: int
    axis: str = "tensor"


class Instruction(NamedTuple):
    """One event.

    `kind` is "make" or "drop" (a tensor), "run" (a kernel, or several in `seconds`), "exchange", "copy" (to the host or
    back), "land" (the gradient of weights is complete), or "hand" (the next module takes the tensor over). For a
    gradient that lands, `is_alone` states whether it does not share its memory. A "late" drop is of a tensor that a
    collective used on its own stream. "issue" begins a copy of that number on the lane `what`, beside computation, and
    "await" waits for it. "keep" makes a gradient of weights that stays until the backward ends.
    `launches` is the number of kernels that the host queues for a "run", and `least_s` the seconds from the moment that
    it begins to queue them until the last of several ends.
    """

    kind: str
    what: str
    tensor: int = -1
    nbytes: int = 0
    cost: Cost | None = None
    exchange: Exchange | None = None
    seconds: float = 0.0
    is_alone: bool = False
    launches: int = 1
    least_s: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a forward.

    Args:
        reads: numbers of input tensors.
        makes: (number, bytes) of results.
        saves: numbers of tensors that its backward needs.
        wants: those of `reads` that require gradients.
        weight_bytes: bytes of the gradient of its weights.
        workspace: temporary bytes of its forward and its backward.
        is_kept: whether "recompute-rest" keeps its results.
        passes: whether its inputs share the gradient of its result, as in a sum.
        exchanged, exchanged_back: the collectives of its forward and its backward.
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
        saved_bytes: change of live bytes by the forward: kept tensors and the output, less an input that is no longer
            needed.
        forward_bytes: peak of the forward above that.
        backward_bytes: peak of the backward (with recomputation) above the bytes at its start, without gradients of
            weights.
        output: number of the tensor that the forward leaves for the next module.
    """

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    output: int

    @cached_property
    def saved_bytes(self) -> int:
        """Return the change of live bytes by the forward."""
        return self._kept[0]

    @cached_property
    def forward_bytes(self) -> int:
        """Return the peak of the forward above that."""
        return self._kept[1]

    @cached_property
    def backward_bytes(self) -> int:
        """Return the peak of the backward above the bytes at its start."""
        return most_bytes(self.backward)[1]

    @cached_property
    def _kept(self) -> tuple[int, int]:
        left, most = most_bytes(self.forward)
        return left, most - left


def coarse(parts: Parts, seconds: Callable[[Cost], float], queue_s: float = 0.0) -> Parts:
    """Return a module's instructions, combined: the bytes that stay, the peak above them, the time of all kernels.

    The peak of a step does not change, because the module's peak occurs at one time. For searches.

    Args:
        queue_s: seconds of the host for a kernel.
    """
    forward = _coarse(parts.forward, (seconds, queue_s), parts.output, dict[int, int]())
    kept = {one.tensor: one.nbytes for one in forward if one.kind == "make" and one.tensor == _KEPT}
    return Parts(forward, _coarse(parts.backward, (seconds, queue_s), None, kept), parts.output)


_KEPT: Final = -5
_EXTRA: Final = -6


def _coarse(
    run: Sequence[Instruction],
    times: tuple[Callable[[Cost], float], float],
    output: int | None,
    kept: Mapping[int, int],
) -> tuple[Instruction, ...]:
    """Combine a forward (with its output) or a backward."""
    left, most = most_bytes(run)
    made = {one.tensor: one.nbytes for one in run if one.kind == "make"}
    dropped = {one.tensor: one.nbytes for one in run if one.kind == "drop"}
    given = INPUT if output is not None else GIVEN
    ends = [
        Instruction("drop", "its input", one, dropped[one])
        for one in {INPUT, given}
        if one in dropped and one not in made
    ]
    work = _works(run, *times)
    if kept_bytes := sum(one.nbytes for one in run if one.kind == "keep"):
        work.append(Instruction("keep", "gradients", nbytes=kept_bytes))
    ended_bytes = sum(one.nbytes for one in ends)
    if output is not None:
        rest = left + ended_bytes - made[output]
        stays = [Instruction("make", "output", output, made[output]), Instruction("make", "saved", _KEPT, rest)]
        extra = Instruction("make", "temporary", _EXTRA, most - made[output] - rest)
        return (*stays, extra, *work, extra._replace(kind="drop"), *ends)
    handed = [one.tensor for one in run if one.kind == "hand"]
    # When gradients land, memory of the engine adds to the module's, so the bytes before and after count.
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
    landed = [*(run[each] for each in lands), then, then._replace(kind="drop")] if lands else []
    return (first, *work, first._replace(kind="drop"), *landed, *ends, *last)


def _works(run: Sequence[Instruction], seconds: Callable[[Cost], float], queue_s: float) -> list[Instruction]:
    """Return the kernels between exchanges and copies as one run each, and these."""
    works, took_s, least_s, launches = list[Instruction](), 0.0, 0.0, 0
    for one in (*run, None):
        if one is not None and one.cost is not None:
            took_s, launches = took_s + (each_s := seconds(one.cost)), launches + one.launches
            least_s = max(least_s + each_s, launches * queue_s)
        elif one is None or one.kind in ("exchange", "copy"):
            works += [Instruction("run", "kernels", seconds=took_s, launches=launches, least_s=least_s)] * bool(
                launches
            )
            works += [one] if one is not None else []
            took_s, least_s, launches = 0.0, 0.0, 0
    return works


def most_bytes(run: Iterable[Instruction]) -> tuple[int, int]:
    """Return the bytes that are left after some instructions, and their peak."""
    now = most = 0
    for one in run:
        if one.kind == "make":
            now += one.nbytes
            most = max(most, now)
        elif one.kind in ("drop", "late"):
            now -= one.nbytes
    return now, most


@final
@dataclass(eq=False)
class Tape:
    """A module's forward while it is recorded: call `add` for each operation, in order.

    Args:
        itemsize: bytes of an element of activations.
        input_bytes: bytes of the module's input; 0 if it requires no gradient.
    """

    input_bytes: int
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes: list[int] = [self.input_bytes]
        self._is_given: list[bool] = [self.input_bytes > 0]

    @property
    def output(self) -> int:
        """The number of the module's output: the first result of the last operation."""
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
        """Record an operation, and return the number of its first result.

        Args:
            reads: numbers of tensors, from `input` and earlier calls.
            makes: bytes of each result; the first result gets a gradient.
            saves: numbers of input tensors that the backward needs.
            saves_made: indices in `makes` of results that the backward needs.
            backward_flops: by default twice the forward's.
            moved: bytes read and written by forward and backward, by default those of its tensors and weights.
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
    """Return the instructions of a module in one step.

    Another module owns the input, and drops it when this module no longer needs it. The next module drops the output,
    and in the backward the gradient of the input.

    Args:
        treatment: of saved tensors: "keep", "recompute" all, or "recompute-rest", all but products and attention.
        input_parts: number of tensor ranks that each keep a part of a recomputed module's input (P_a).
        is_input_offloaded: whether the kept part of that input is in host memory (P_a+cpu).
    """
    is_treated = input_parts > 1 or is_input_offloaded
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
    """A tape during its simulation: live tensors and gradients, and the instructions so far."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._out = tape, list[Instruction]()
        self._live = {INPUT} if tape.input_bytes else set[int]()
        self._last_read = {number: place for place, one in enumerate(tape.operations) for number in one.reads}
        self._gradients: dict[int, int] = {}
        """For each tensor, the number of the memory that holds its gradient."""
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def take(self) -> tuple[Instruction, ...]:
        """Return the instructions since the last call."""
        taken, self._out = tuple(self._out), []
        return taken

    def forget(self, number: int) -> None:
        """Leave a tensor to the next module."""
        self._live.discard(number)

    def put_away(self, parts: int, *, is_offloaded: bool) -> None:
        """Keep a part of the input, on the device or in host memory, instead of the input."""
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
        """Restore the full input."""
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
        """Simulate the operations in order, except operations whose results are all in `skips`.

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
        """Simulate the operations in reverse order, from the gradient of the output to the gradient of the input."""
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
        """Give a tensor a gradient; a second gradient is added in place if nothing else uses the first."""
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
            self._out.append(Instruction("run", name, cost=cost, launches=2 if name.endswith("backward") else 1))
        if workspace_bytes:
            self._out.append(Instruction("drop", name, WORKSPACE, workspace_bytes))
        if exchange is not None:
            self._out.append(Instruction("exchange", name, exchange=exchange))

    def _drop(self, number: int, name: str) -> None:
        if number in self._live:
            self._live.remove(number)
            self._out.append(Instruction("drop", name, number, self._tape.sizes[number]))
