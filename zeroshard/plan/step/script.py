"""What a rank's model does in a micro-batch: for each pass one sequence of instructions and marks.

Owns the marks between instructions, and the script of a shape, whose units are used one after the other. It must not
know how a pass is played (`passes.py`). Read `plan/shape/tape.py` first. Needs no torch.

Note: marks
    Between instructions stand the marks of `table/schedule.py`: "need" and "leave" (a use of a unit), "complete" (the
    last gradient of a unit has arrived, the mark "land" there) and "close". "land" is an instruction here: a gradient
    arrives. It names a parameter and has a tensor in a trace; of a shape, any gradient of the unit arrives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal, final

from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.shape.tape import GIVEN, INPUT, Instruction, Parts
from zeroshard.table.schedule import ROOT, Mark
from zeroshard.table.step import Uses

__all__ = ["Call", "MARKS", "Script", "mark", "script_of"]

MarkKind = Literal["need", "leave", "land", "close"]
MARKS: Final[Mapping[str, MarkKind]] = MappingProxyType(
    {"need": "need", "leave": "leave", "complete": "land", "close": "close"}
)
"""The marks of `table/schedule.py`, by the kind of the instruction that stands for them."""
BY_MARK: Final = MappingProxyType({what: Instruction(kind, "") for kind, what in MARKS.items()})
NOTHING: Final = -1
"""The number of a tensor without memory."""
STRIDE: Final = 1 << 24
"""More than a tape has numbers."""

Entry = tuple[int, Instruction]


@final
@dataclass(frozen=True)
class Call:
    """A use of a unit in a forward: what it does there and in the backward."""

    unit: int
    parts: Parts


@final
@dataclass(frozen=True)
class Script:
    """Instructions with the number of their unit, and marks between them. Tensors have one numbering.

    Args:
        partial: units that do not get all of their gradients.
    """

    forward: Sequence[Entry]
    backward: Sequence[Entry]
    partial: frozenset[int] = frozenset()

    @cached_property
    def uses(self) -> Uses:
        """The order in which the model uses its units."""
        return Uses(_marks_of(self.forward), _marks_of(self.backward), self.partial)


def _marks_of(entries: Sequence[Entry]) -> tuple[Mark, ...]:
    return tuple((MARKS[one.kind], unit) for unit, one in entries if one.kind in MARKS)


def mark(kind: MarkKind, unit: int) -> Entry:
    """Return a mark of `table/schedule.py` as an entry of a script."""
    return unit, BY_MARK[kind]


def script_of(calls: Sequence[Call], border_bytes: int = 0) -> Script:
    """Return the script of a model that uses units one after the other, inside the root.

    A unit may be used several times: a backward leaves it once, at the first of its calls, which autograd reaches
    last. The first gradients in a backward are those outside units, and their reduction is the last one.

    Args:
        border_bytes: of the output of a chunk of a pipe that is not the last: its gradient is a message, to which
            autograd adds nothing in place.
    """
    forward, backward = [mark("need", ROOT)], [mark("need", ROOT)]
    numbers: list[dict[int, int]] = []
    given = NOTHING
    for place, call in enumerate(calls):
        numbers.append({INPUT: given})
        forward.append(mark("need", call.unit))
        forward += _renumbered(call.unit, call.parts.forward, numbers[-1], place * STRIDE)
        given = numbers[-1].get(call.parts.output, place * STRIDE + call.parts.output)
        forward.append(mark("leave", call.unit))
    forward.append(mark("close", ROOT))
    loss, given = given, len(calls) * STRIDE if border_bytes else NOTHING
    if border_bytes:
        backward.append((ROOT, Instruction("make", "gradients of the border", given, border_bytes)))
    first = {call.unit: place for place, call in reversed([*enumerate(calls)])}
    for place, call in reversed([*enumerate(calls)]):
        own = numbers[place] | {GIVEN: given}
        backward.append(mark("need", call.unit))
        backward += _renumbered(call.unit, call.parts.backward, own, place * STRIDE)
        handed = [one.tensor for one in call.parts.backward if one.kind == "hand"]
        given = own.get(handed[-1], place * STRIDE + handed[-1]) if handed else NOTHING
        if place == len(calls) - 1:
            backward.append((ROOT, Instruction("land", "")))
        if first[call.unit] == place:
            if call.unit != ROOT:
                backward += [(call.unit, Instruction("land", "")), mark("land", call.unit)]
            backward.append(mark("leave", call.unit))
    # The gradient of the input of the first call stays: a place of a pipe sends it.
    backward.append((ROOT, Instruction("drop", "", loss)))
    backward = [*_kept(backward, len(calls) * STRIDE + 1)]
    backward += [(ROOT, Instruction("land", "")), mark("land", ROOT), mark("close", ROOT)]
    return Script(forward, backward)


def _kept(entries: Sequence[Entry], number: int) -> Iterator[Entry]:
    """Yield a backward in which gradients of weights stay until its end, and are then added to their sums.

    Args:
        number: of the first of these gradients.
    """
    kept = list[Entry]()
    for unit, one in entries:
        if one.kind == "keep":
            number += 1
            kept.append((unit, one._replace(kind="make", tensor=number)))
            yield kept[-1]
        else:
            yield unit, one
    for unit, one in kept:
        yield unit, one._replace(kind="drop")
    for unit, one in kept:  # a gradient in two bytes is added to a sum in four
        yield unit, Instruction("run", "add gradients", cost=Cost(moved_bytes=5 * one.nbytes))


def _renumbered(unit: int, run: Sequence[Instruction], own: dict[int, int], shift: int) -> Iterator[Entry]:
    """Yield a module's instructions with numbers of their own.

    Args:
        own: numbers of tensors that came from other modules; a tensor that this module makes again leaves it.
    """
    for one in run:
        if one.kind == "make":
            own.pop(one.tensor, None)
            yield unit, Instruction("make", one.what, shift + one.tensor, one.nbytes)
        elif one.kind in ("drop", "late"):
            yield unit, Instruction(one.kind, one.what, own.get(one.tensor, shift + one.tensor), one.nbytes)
        elif one.kind != "hand":
            yield unit, one
