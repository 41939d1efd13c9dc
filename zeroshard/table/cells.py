"""The cells of the residency table: where one column of the training state lives.

A cell answers three questions: which part of a bucket does a rank keep, in which memory, and at which moment must it be
on the device? Everything else follows from comparing the answers of two columns (`table/spec.py`), so that no code
needs to know a stage or the class of a cell. A new place to live is a new class here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, final

from zeroshard.table.activations import Activations
from zeroshard.table.layout import Layout, plan_layout

__all__ = ["Cell", "Replicated", "Residency", "Sharded"]


class Cell(ABC):
    """One cell of the table."""

    word: str
    memory: Literal["device", "host", "file"] = "device"
    """Where what is kept lies between uses."""
    moment: Literal["always", "used"] = "always"
    """When what is kept must be on the device: all the time, or while it is used."""

    @abstractmethod
    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the elements of a bucket that `rank` keeps between steps, as (start, stop)."""

    def __str__(self) -> str:
        return self.word


@final
@dataclass(frozen=True)
class Replicated(Cell):
    """Every rank keeps the whole.

    ```python
    import zeroshard as zs

    assert str(zs.Replicated()) == "replicated"
    ```
    """

    word = "replicated"

    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the whole bucket."""
        return 0, layout.full_numel

    __str__ = Cell.__str__


@final
@dataclass(frozen=True)
class Sharded(Cell):
    """Every rank keeps its own shard.

    ```python
    import zeroshard as zs

    assert str(zs.Sharded()) == "sharded"
    ```
    """

    word = "sharded"

    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the shard of `rank`."""
        return layout.shard_range(rank)

    __str__ = Cell.__str__


@dataclass(frozen=True)
class Residency:
    """A row of the table: one cell for each column.

    Raises:
        ValueError: a combination that no rank could compute with.

    ```python
    import zeroshard as zs

    row = zs.Residency(states=zs.Sharded(), gradients=zs.Sharded())  # what stage 2 names
    assert str(row.parameters) == "replicated"
    ```
    """

    states: Cell = field(default_factory=Replicated)
    gradients: Cell = field(default_factory=Replicated)
    parameters: Cell = field(default_factory=Replicated)
    activations: Activations = field(default_factory=Activations)

    def __post_init__(self) -> None:
        columns = (("states", Cell), ("gradients", Cell), ("parameters", Cell), ("activations", Activations))
        for name, kind in columns:
            if not isinstance(cell := getattr(self, name), kind):
                raise TypeError(f"Residency({name}=...) takes a cell such as zs.Sharded(); got {cell!r}.")
        if not all(_covers(b, a) and _covers(c, b) for a, b, c in map(self._kept, (0, 1))):
            raise ValueError(
                f"Residency(states={self.states}, gradients={self.gradients}, parameters={self.parameters}): a rank "
                "must keep the gradient of each element whose state it keeps, and the parameter of each element whose "
                "gradient it keeps, because the optimizer reads gradients for its states, and every gradient needs the "
                "parameter it belongs to. So a column can be sharded only if the columns before it are."
            )

    @property
    def is_cut(self) -> bool:
        """Whether a rank may update a part of a parameter."""
        return self._kept(0)[0] != (0, 2)

    def _kept(self, rank: int) -> list[tuple[int, int]]:
        """Return what a rank keeps of a bucket of two elements on two ranks, by column."""
        probe = plan_layout([2], 64, 2)
        return [cell.kept_range(probe, rank) for cell in (self.states, self.gradients, self.parameters)]


def _covers(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
