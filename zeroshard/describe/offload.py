"""The argument `offload=`, and the row of the residency table that follows from it.

Owns `Offload` and its checks. Imports no torch, because plans read the same argument. The cell `Elsewhere` of
`table/cells.py` says which elements are stored where.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from os import PathLike, fspath
from types import MappingProxyType
from typing import Any, Final, TypeVar, final

from zeroshard.table.cells import Cell, Elsewhere, Place, Residency
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.table.whole import ELEMENTWISE

__all__ = [
    "AUTO",
    "HOST",
    "Offload",
    "OffloadLike",
    "PARTS",
    "check_in_files",
    "choices_for",
    "first_of",
    "offload_of",
    "reached",
    "row_with",
    "text_of",
    "with_places",
    "written_bytes",
]

Choice = TypeVar("Choice")
AUTO = "auto"
HOST: Final = "host"
PARTS = 100
"""Number of fractions of a column that `offload="auto"` tries."""
STAGING_BYTES = 16 << 20
LEAST_STAGING_BYTES = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class Offload:
    """The state that is stored in host memory or in files instead of on the device, for `zs.shard(offload=)`.

    Args:
        states: fraction of a rank's optimizer states and master weights, from 0 to 1. It rounds up to whole buckets,
            spread evenly over the model; `zero.summary()` shows the resulting fraction.
        gradients: None offloads gradients with their states if a rank keeps only the gradients that it updates: at
            stages 2 and 3, and on one rank. 0 keeps gradients on the device until the update.
        parameters: fraction of a rank's shard of the parameters, from 0 to 1, at stage 3 (also with one rank).
            Parameters are copied to the device before use, and released after it.
        to: "host", or a folder on a local disk. Each rank creates a file there for states and parameters. No other
            process can open the file, and it disappears with the process. Gradients are then in host memory.
        parameters_to: None for the memory of `to`; "host" keeps parameters in host memory while `to` is a folder.
        staging_bytes: size in bytes of the staging buffer. State passes through it in pieces, whatever the size of the
            model.

    Raises:
        ValueError, TypeError: a value is out of range or of another type.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, offload=zs.Offload(states=1.0))
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    assert zero.memory().resident_bytes["states"] == 0
    ```
    """

    states: float = 1.0
    gradients: float | None = None
    parameters: float = 0.0
    to: str | PathLike[str] = HOST
    parameters_to: str | None = None
    staging_bytes: int = STAGING_BYTES
    update: InitVar[str] = "step"
    max_norm: InitVar[float | None] = None

    def __post_init__(self, update: str, max_norm: float | None) -> None:
        if update != "step" or max_norm is not None:
            raise ValueError(
                f"Offload(update={update!r}, max_norm={max_norm!r}): updates in the backward were slower than those of "
                "optimizer.step(), and are no longer there. Leave both out, and clip with "
                "torch.nn.utils.clip_grad_norm_()."
            )
        object.__setattr__(self, "to", fspath(self.to))
        for name in ("states", "gradients", "parameters"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None and name == "gradients":
                continue
            if not is_number or not math.isfinite(value) or not 0 <= value <= 1:
                raise ValueError(f"Offload({name}=) takes a fraction from 0 to 1, such as 0.6; got {value!r}.")
        if self.gradients not in (None, 0, self.states):
            raise ValueError(
                f"Offload(gradients={self.gradients}) with states={self.states}: gradients are stored with their "
                "states. Omit gradients=, or write gradients=0 to keep them on the device until the update."
            )
        if self.parameters_to not in (None, HOST):
            raise ValueError(
                f"Offload(parameters_to={self.parameters_to!r}) with to={self.to!r}: write 'host' for parameters in "
                "host memory, or omit parameters_to= to keep them where to= says."
            )
        if isinstance(self.staging_bytes, bool) or not isinstance(self.staging_bytes, int):
            raise TypeError(f"Offload(staging_bytes=) takes a number of bytes; got {self.staging_bytes!r}.")
        if self.staging_bytes < LEAST_STAGING_BYTES:
            raise ValueError(
                f"Offload(staging_bytes=) must be at least {LEAST_STAGING_BYTES:,} bytes, because small copies cost "
                f"more to launch than to run; got {self.staging_bytes:,}. The default is {STAGING_BYTES:,}."
            )
        if self.to != HOST and not str(self.to).startswith("/"):
            raise ValueError(
                f"Offload(to={self.to!r}): write 'host', or a folder as an absolute path, such as '/scratch', because "
                "ranks may run in different folders. To let zeroshard choose, write offload='auto'."
            )


NUMBERS = MappingProxyType({"states": float, "gradients": float, "parameters": float, "staging_bytes": int})
"""Fields that a string argument may set, besides `TEXTS`."""
TEXTS = ("to", "parameters_to")
GONE = ("update", "max_norm")
"""Fields that `Offload` refuses by name."""

OffloadLike = Offload | str | PathLike[str] | None
"""Values of the argument `offload=`."""


def offload_of(asked: OffloadLike) -> Offload | None:
    """Return the offload for None, "host", a folder, "states=0.6,to=/scratch", or an `Offload`.

    Raises:
        ValueError, TypeError: the argument is none of these.

    ```python
    import zeroshard as zs
    from zeroshard.describe.offload import offload_of

    assert offload_of("states=0.6,to=/scratch") == zs.Offload(states=0.6, to="/scratch")
    ```
    """
    if asked is None or isinstance(asked, Offload):
        return asked
    if asked == AUTO:
        raise ValueError(
            "offload='auto' stands for what zs.shard(), zs.plan() or a training choose for one model; it is no Offload "
            "by itself."
        )
    if isinstance(asked, str) and "=" in asked and not asked.startswith("/"):
        found = [_value_of(part) for part in asked.split(",")]
        if len(found) > len(values := dict(found)):
            raise ValueError(f"offload={asked!r} gives a value twice. Give each of {', '.join(values)} once.")
        return Offload(**values)
    if isinstance(asked, str | PathLike):
        return Offload(to=asked)
    raise TypeError(f"offload= takes 'host', a folder, a zs.Offload or None; got {asked!r}.")


def choices_for(row: Residency) -> list[list[Offload | None]]:
    """Return the candidates of `offload="auto"` where only memory is known, as chains, in the order of trial.

    Each choice of a chain leaves no more on the device than the one before it: nothing and states, whose gradients stay
    on the device; states with their gradients; also parameters. A chain begins with the last choice of the one before.
    """
    fractions = [part / PARTS for part in range(1, PARTS + 1)]
    kept = [None, *(Offload(states=fraction, gradients=0) for fraction in fractions)]
    moved = [kept[-1], *(Offload(states=fraction) for fraction in fractions)]
    also = [moved[-1], *(Offload(parameters=fraction) for fraction in fractions)]
    return [kept, moved, also] if row.cuts_parameters else [kept, moved]


def first_of(chains: Iterable[Sequence[Choice]], fits: Callable[[Choice], bool]) -> tuple[Choice, bool]:
    """Return the least choice of the first chain in which one fits, and True; otherwise the last choice, and False."""
    for chain in chains:
        found = _least_of(chain, fits)
        if found[1]:
            break
    return found


def _least_of(choices: Sequence[Choice], fits: Callable[[Choice], bool]) -> tuple[Choice, bool]:
    """Return the first choice that fits, and True; otherwise the last choice, and False.

    A binary search: each choice leaves no more on the device than the previous choice.
    """
    low, high = 0, len(choices) - 1
    if fits(choices[0]):
        return choices[0], True
    if not fits(choices[high]):
        return choices[high], False
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(choices[middle]) else (middle, high)
    return choices[high], True


def _value_of(part: str) -> tuple[str, Any]:
    """Return the name and the value of one part of "states=0.6,to=/scratch"."""
    name, _, text = (one.strip() for one in part.partition("="))
    if name in GONE:
        return name, text
    if name not in NUMBERS and name not in TEXTS:
        raise ValueError(
            f"offload=: '{part}' is none of {', '.join([*NUMBERS, *TEXTS])}, as in 'states=0.6,to=/scratch'."
        )
    if name in TEXTS:
        return name, text
    try:
        return name, NUMBERS[name](text)
    except ValueError as error:
        raise ValueError(f"offload=: {name} takes a number, as in 'states=0.6'; got {text!r}.") from error


def row_with(row: Residency, offload: Offload | None, *, is_alone: bool) -> Residency:
    """Return a row with the offloaded cells of `offload`.

    Args:
        is_alone: whether there is one rank, which then keeps only gradients that it updates with.

    Raises:
        ValueError: `offload` includes parameters, but the row does not gather them before use.
    """
    if offload is None:
        return row
    is_file = offload.to != HOST
    place = Place("file" if is_file else HOST, str(offload.to) if is_file else "", offload.staging_bytes)
    host = Place(HOST, "", offload.staging_bytes)
    if offload.parameters:
        if not row.cuts_parameters:
            raise ValueError(
                f"Offload(parameters={offload.parameters:g}) with parameters {row.parameters}: replicated parameters "
                "are used in place, so they must stay on the device. Write stage=3, also for one rank, to copy units "
                "to the device before use and release them after it, or omit parameters=."
            )
        where = place if offload.parameters_to is None else host
        row = replace(row, parameters=Elsewhere(row.parameters, where, offload.parameters))
    if not offload.states:
        return row
    states = Elsewhere(row.states, place, offload.states)
    moves = offload.gradients is None and (is_alone or row.cuts_gradients)
    moves |= bool(offload.gradients)
    gradients = Elsewhere(row.gradients, host, offload.states) if moves else row.gradients
    return replace(row, states=states, gradients=gradients)


def with_places(units: Sequence[UnitSpec], row: Residency) -> tuple[UnitSpec, ...]:
    """Return units whose buckets have cells of their own: each bucket's column is in one memory, alike on all ranks."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    # A cell of a unit has priority over the cell of the row.
    alike = [one for one in buckets if one.row.parameters == row.parameters]
    parameters = _cells(row.parameters, alike, lambda one: one.formats.param)
    states = _cells(row.states, [one for one in buckets if one.is_trained], lambda one: one.formats.state)

    def placed(one: BucketSpec) -> BucketSpec:
        own = parameters.get(one.number, one.row.parameters)
        # Frozen parameters have only masters, which are stored with them.
        kept = states.get(one.number) or one.row.states.at(own.place)
        is_with_states = not kept.is_on_device and one.gradients == one.shard
        gradients = one.row.gradients.at(one.row.gradients.place if is_with_states else Place())
        return replace(one, row=replace(one.row, states=kept, gradients=gradients, parameters=own))

    return tuple(replace(unit, buckets=tuple(map(placed, unit.buckets))) for unit in units)


@final
@dataclass(frozen=True)
class Reached:
    """What offload moves of a column: more than its fraction asks for, because whole buckets move."""

    fraction: float
    place: Place


def reached(units: Sequence[UnitSpec]) -> dict[str, Reached]:
    """Return what is moved of "states" and "parameters", by number of elements, where anything is."""
    found, buckets = dict[str, Reached](), [bucket for unit in units for bucket in unit.buckets]
    for column, some in (("states", [one for one in buckets if one.is_trained]), ("parameters", buckets)):
        numel, moved_numel = sum(one.layout.numel for one in some), 0
        for one in some:
            if not (cell := getattr(one.row, column)).is_on_device:
                moved_numel += one.layout.numel
                found[column] = Reached(moved_numel / max(1, numel), cell.place)
    return found


def text_of(found: Mapping[str, Reached]) -> str:
    """Return what is moved in words, as "40.0% of states, 5.0% of parameters"."""
    return ", ".join(f"{one.fraction:.1%} of {column}" for column, one in found.items())


def check_in_files(cells: Iterable[Cell], name: str, *, is_elementwise: bool) -> None:
    """Raise if the states of an optimizer cannot be in files, and are.

    Args:
        cells: of states.
        name: name of the optimizer.
        is_elementwise: whether it is of a class in `ELEMENTWISE`.

    Raises:
        ValueError: the optimizer is of another class.
    """
    if not is_elementwise and any(cell.is_in_file for cell in cells):
        raise ValueError(
            f"{name} cannot keep its states in files: they are updated in pieces of parameters, and which of its "
            f"states go with which elements is known of {', '.join(sorted(ELEMENTWISE))} of torch.optim alone. Use one "
            "of these, or offload='host'."
        )


def written_bytes(bucket: BucketSpec) -> int:
    """Return the bytes of each element that an update of states in files also writes: parameters beside masters."""
    return itemsize(bucket.formats.param) * (bucket.row.parameters.is_in_file and bucket.has_masters)


def _cells(cell: Cell, buckets: Sequence[BucketSpec], dtype_of: Callable[[BucketSpec], str]) -> dict[int, Cell]:
    """Return the cell of each bucket by its number."""
    cells = cell.of_buckets([one.layout.numel * itemsize(dtype_of(one)) for one in buckets])
    return {one.number: own for one, own in zip(buckets, cells, strict=True)}
