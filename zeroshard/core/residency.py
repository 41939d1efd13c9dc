"""The cells of the residency table: where one column of the training state lives.

A cell answers one question: which part of a bucket does a rank keep? Everything else follows from comparing the parts
of
two columns, so that no code needs to know a stage: parameters that are not kept whole are gathered before use and
released after; states that cover less than the parameters mean that updated parameters are gathered after the step;
states that cover the whole bucket mean that every rank needs the whole sum of the gradients. A new place to live is a
new class here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

from zeroshard.core.layout import Layout

__all__ = ["Cell", "Kept", "Replicated", "Residency", "Sharded"]


class Cell(ABC):
    """One cell of the table."""

    word: str

    @abstractmethod
    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the elements of a bucket that `rank` keeps between steps, as (start, stop)."""

    def is_whole(self, layout: Layout, rank: int) -> bool:
        """Tell whether `rank` keeps the whole bucket (always true of a single rank)."""
        return self.kept_range(layout, rank) == (0, layout.full_numel)

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


@final
@dataclass(frozen=True)
class Kept:
    """Activations stay where the forward pass left them."""

    word = "kept"

    def __str__(self) -> str:
        return self.word


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
    activations: Kept = field(default_factory=Kept)

    def __post_init__(self) -> None:
        for name, kind in (("states", Cell), ("gradients", Cell), ("parameters", Cell), ("activations", Kept)):
            if not isinstance(cell := getattr(self, name), kind):
                raise TypeError(f"Residency({name}=...) takes a cell such as zs.Sharded(); got {cell!r}.")
        sharded = [isinstance(cell, Sharded) for cell in (self.states, self.gradients, self.parameters)]
        if sharded != sorted(sharded, reverse=True):
            raise ValueError(
                f"Residency(states={self.states}, gradients={self.gradients}, parameters={self.parameters}): a column "
                "can be sharded only if the columns before it are (states, gradients, parameters), because the "
                "optimizer reads whole gradients for whole states, and every gradient needs the parameter it belongs "
                "to."
            )
