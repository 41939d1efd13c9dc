"""What the caller writes about offload, and the row of the residency table that follows.

Owns `Offload` and its checks. Needs no torch, so that plans read the same arguments. `table/cells.py` has the cell that
it stands for (`Elsewhere`), and says which elements lie where.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from types import MappingProxyType
from typing import Any, Final, final

from zeroshard.table.cells import Cell, Elsewhere, Residency
from zeroshard.table.spec import BucketSpec, Range, UnitSpec

__all__ = ["AUTO", "Offload", "OffloadLike", "choices_for", "least_of", "offload_of", "row_with", "with_apart"]

AUTO = "auto"
HOST = "host"
STEP: Final = "step"
IN_BACKWARD: Final = "in-backward"
PARTS = 100
"""Into how many a column is cut for `offload="auto"`."""
STAGING_BYTES = 16 << 20
LEAST_STAGING_BYTES = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class Offload:
    """What lies in memory of the host, or in files, instead of on the device: `zs.shard(offload=)`.

    Args:
        states: the fraction of the optimizer's states, with the master weights, of a rank, from 0 to 1; whole slices of
            parameters are moved, so `zero.summary()` says what was reached.
        gradients: None moves them with their states, wherever a rank keeps the gradients that it updates with and no
            others: at stages 2 and 3, and on one rank. 0 leaves them on the device until the update.
        parameters: the fraction of a rank's shard of the parameters, at stage 3, also of one rank: they are brought to
            the device ahead of use, and released after it. With files, too, they lie in memory of the host.
        to: "host", or a folder on a local disk, where each rank makes a file that nobody else can open and that is gone
            with the process; gradients lie on the host then.
        staging_bytes: of the memory through which everything passes, in pieces, whatever the size of a model.
        update: "step": `optimizer.step()` makes the update, or begins it where a device can compute meanwhile.
            "in-backward": a copy of the states on the host is updated while the backward runs, unit by unit;
            `optimizer.step()` takes what it would have computed itself, and makes the rest of the update.
        max_norm: with "in-backward", `step()` clips the 2-norm of all gradients to it, as `clip_grad_norm_` would; None
            does not clip. `clip_grad_norm_` and `clip_grad_value_` raise then.

    Raises:
        ValueError, TypeError: a value that is none of these.

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
    staging_bytes: int = STAGING_BYTES
    update: str = STEP
    max_norm: float | None = None

    def __post_init__(self) -> None:
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
                f"Offload(gradients={self.gradients}) with states={self.states}: gradients lie where their states do. "
                "Leave gradients= out, or write gradients=0 to keep them on the device until the update."
            )
        self._check_update()
        if isinstance(self.staging_bytes, bool) or not isinstance(self.staging_bytes, int):
            raise TypeError(f"Offload(staging_bytes=) takes a number of bytes; got {self.staging_bytes!r}.")
        if self.staging_bytes < LEAST_STAGING_BYTES:
            raise ValueError(
                f"Offload(staging_bytes=) must be at least {LEAST_STAGING_BYTES:,}, so that a copy is worth its "
                f"launch; got {self.staging_bytes:,}. The default is {STAGING_BYTES:,}."
            )
        if self.to != HOST and not str(self.to).startswith("/"):
            raise ValueError(
                f"Offload(to={self.to!r}): write 'host', or a folder as an absolute path, such as '/scratch', since "
                "ranks may run in different folders."
            )

    def _check_update(self) -> None:
        is_ahead = self.update == IN_BACKWARD
        if self.update not in (STEP, IN_BACKWARD):
            raise ValueError(f"Offload(update=) must be 'step' or 'in-backward'; got {self.update!r}.")
        if is_ahead and (self.to != HOST or not self.states or self.gradients == 0):
            raise ValueError(
                f"Offload(update='in-backward') updates states in memory of the host with gradients that come there; "
                f"got to={self.to!r}, states={self.states:g} and gradients={self.gradients}. Leave to= and gradients= "
                "out, and give states= above 0; or write update='step'."
            )
        if self.max_norm is None:
            return
        is_number = isinstance(self.max_norm, int | float) and not isinstance(self.max_norm, bool)
        if not is_number or not 0 < self.max_norm < math.inf:
            raise ValueError(f"Offload(max_norm=) takes a norm above 0, such as 1.0, or None; got {self.max_norm!r}.")
        if not is_ahead:
            raise ValueError(
                f"Offload(max_norm={self.max_norm:g}) is for update='in-backward', where step() clips. With "
                "update='step' call torch.nn.utils.clip_grad_norm_() before optimizer.step()."
            )


NUMBERS = MappingProxyType(
    {"states": float, "gradients": float, "parameters": float, "staging_bytes": int, "max_norm": float}
)
"""What a text may give beside `TEXTS`."""
TEXTS = ("to", "update")

OffloadLike = Offload | str | PathLike[str] | None
"""What the caller of `shard()` may write."""


def offload_of(asked: OffloadLike) -> Offload | None:
    """Return what a caller's argument asks for: None, "host", a folder, "states=0.6,to=/scratch", or an `Offload`.

    Raises:
        ValueError, TypeError: it is none of these.

    ```python
    import zeroshard as zs

    assert zs.offload_of("states=0.6,to=/scratch") == zs.Offload(states=0.6, to="/scratch")
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
        return Offload(**dict(_value_of(part) for part in asked.split(",")))
    if isinstance(asked, str | PathLike):
        return Offload(to=asked)
    raise TypeError(f"offload= takes 'host', a folder, a zs.Offload or None; got {asked!r}.")


def choices_for(row: Residency) -> list[Offload | None]:
    """Return what `offload="auto"` tries, least first: nothing, then states with gradients, then parameters as well."""
    fractions = [part / PARTS for part in range(1, PARTS + 1)]
    moved = [Offload(states=fraction) for fraction in fractions]
    moved += [Offload(parameters=fraction) for fraction in fractions] if row.cuts_parameters else []
    return [None, *moved]


def least_of(choices: Sequence[Offload | None], fits: Callable[[Offload | None], bool]) -> tuple[Offload | None, bool]:
    """Return the first choice that fits, and True; the last one, and False, if none does.

    Each choice leaves no more on the device than the one before it, so that few of them are tried.
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
    """Return a name and a value of "states=0.6,to=/scratch"."""
    name, _, text = (one.strip() for one in part.partition("="))
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
    """Return a row with cells elsewhere, as `offload` says.

    Args:
        is_alone: whether one rank keeps everything, so that no gradient is whole for others' sake.

    Raises:
        ValueError: parameters are to be elsewhere, and are used where they lie; states are to be updated in the
            backward, and gradients do not come to them there.
    """
    if offload is None:
        return row
    if offload.parameters:
        if not row.cuts_parameters:
            raise ValueError(
                f"Offload(parameters={offload.parameters:g}) with parameters {row.parameters}: they are used where "
                "they lie, so they stay on the device. Write stage=3, also for one rank, which has units brought there "
                "before use and released after it; or leave parameters= out."
            )
        moved = Elsewhere(row.parameters, "host", offload.parameters, staging_bytes=offload.staging_bytes)
        row = replace(row, parameters=moved)
    if not offload.states:
        return row
    folder = "" if offload.to == HOST else str(offload.to)
    states = Elsewhere(
        row.states,
        "file" if folder else "host",
        offload.states,
        folder,
        offload.staging_bytes,
        IN_BACKWARD if offload.update == IN_BACKWARD else STEP,
        offload.max_norm,
    )
    moves = offload.gradients is None and (is_alone or row.cuts_gradients)
    moves |= bool(offload.gradients)
    if states.spares and not (is_alone or row.cuts_gradients):
        raise ValueError(
            f"Offload(update='in-backward') with gradients {row.gradients}: they stay whole on the device until the "
            "update, so none comes to the host while the backward runs. Write stage=2 or stage=3; or update='step'."
        )
    gradients = Elsewhere(row.gradients, "host", offload.states) if moves else row.gradients
    return replace(row, states=states, gradients=gradients)


def with_apart(units: Sequence[UnitSpec], row: Residency) -> tuple[UnitSpec, ...]:
    """Say of each bucket which parameters, and whose states, are elsewhere; what is not trained has no states."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    states = _counts(row.states, [(one, one.states) for one in buckets if one.is_trained])
    # Units with a cell of their own keep their parameters as that says.
    parameters = _counts(row.parameters, [(one, one.shard) for one in buckets if one.row.parameters == row.parameters])

    def with_apart(one: BucketSpec) -> BucketSpec:
        # What is frozen has masters alone, and these lie with its parameters.
        moved = parameters.get(one.number, 0)
        return replace(one, apart=states.get(one.number, moved), apart_parameters=moved)

    return tuple(replace(unit, buckets=tuple(map(with_apart, unit.buckets))) for unit in units)


def _counts(cell: Cell, kept: Sequence[tuple[BucketSpec, Range]]) -> dict[int, int]:
    """Return how many parameters of each bucket a cell keeps elsewhere, by the bucket's number."""
    numels = [
        [b - a for a, b in (one.layout.overlap(index, *range_) for index in range(len(one.names)))]
        for one, range_ in kept
    ]
    return {one.number: count for (one, _), count in zip(kept, cell.apart(numels), strict=True)}
