"""What the caller writes about offload, and the row of the residency table that follows.

Owns `Offload` and its checks. Needs no torch, so that plans read the same arguments. `table/cells.py` has the cell that
it stands for (`Elsewhere`), and says which elements lie where.
"""

import math
from dataclasses import dataclass, replace
from os import PathLike, fspath
from types import MappingProxyType
from typing import Any, final

from zeroshard.table.cells import Elsewhere, Residency

__all__ = ["Offload", "OffloadLike", "offload_of", "row_with"]

HOST = "host"
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
        parameters: 0; parameters stay on the device.
        to: "host", or a folder on a local disk, where each rank makes a file that nobody else can open and that is gone
            with the process; gradients lie on the host then.
        staging_bytes: of the memory through which everything passes, in pieces, whatever the size of a model.

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
        if self.parameters:
            raise ValueError(
                f"Offload(parameters={self.parameters}): parameters stay on the device. Leave parameters= out; stage=3 "
                "keeps a rank's shard of them alone, and precision='bf16' two bytes of each."
            )
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


NUMBERS = MappingProxyType({"states": float, "gradients": float, "parameters": float, "staging_bytes": int})
"""What a text may give beside `to`."""

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
    if asked == "auto":
        raise ValueError(
            "offload='auto' is not there yet. Write offload=zs.Offload(states=0.6), with the fraction of the states "
            "that does not fit; zero.memory() says what lies where."
        )
    if isinstance(asked, str) and "=" in asked and not asked.startswith("/"):
        return Offload(**dict(_value_of(part) for part in asked.split(",")))
    if isinstance(asked, str | PathLike):
        return Offload(to=asked)
    raise TypeError(f"offload= takes 'host', a folder, a zs.Offload or None; got {asked!r}.")


def _value_of(part: str) -> tuple[str, Any]:
    """Return a name and a value of "states=0.6,to=/scratch"."""
    name, _, text = (one.strip() for one in part.partition("="))
    if name not in NUMBERS and name != "to":
        raise ValueError(
            f"offload=: '{part}' is none of {', '.join([*NUMBERS, 'to'])}, as in 'states=0.6,to=/scratch'."
        )
    if name == "to":
        return name, text
    try:
        return name, NUMBERS[name](text)
    except ValueError as error:
        raise ValueError(f"offload=: {name} takes a number, as in 'states=0.6'; got {text!r}.") from error


def row_with(row: Residency, offload: Offload | None, *, is_alone: bool) -> Residency:
    """Return a row with cells elsewhere, as `offload` says.

    Args:
        is_alone: whether one rank keeps everything, so that no gradient is whole for others' sake.
    """
    if offload is None or not offload.states:
        return row
    folder = "" if offload.to == HOST else str(offload.to)
    states = Elsewhere(row.states, "file" if folder else "host", offload.states, folder, offload.staging_bytes)
    moves = offload.gradients is None and (is_alone or row.cuts_gradients)
    moves |= bool(offload.gradients)
    gradients = Elsewhere(row.gradients, "host", offload.states) if moves else row.gradients
    return replace(row, states=states, gradients=gradients)
