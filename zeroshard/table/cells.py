"""The cells of the residency table: where one column of the training state is stored.

A cell answers three questions: which part of a bucket does a rank keep, in which memory, and when must it be on the
device? Everything else follows from the comparison of two columns (`table/spec.py`), so no code depends on a stage or
the class of a cell. A new kind of storage is a new class here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal, final, get_args

from zeroshard.table.activations import Activations, fits
from zeroshard.table.layout import Layout, plan_layout

__all__ = ["Cell", "DEVICE", "Elsewhere", "FAR", "Place", "Replicated", "Residency", "Sharded", "check_memories"]


DEVICE: Final = "device"
FAR: Final = MappingProxyType({"host": "on the host", "file": "in files"})
"""The other memories, in words; `store/stores.py` has a class for each."""
Until = Literal["use", "backward", "step"]


@final
@dataclass(frozen=True)
class Place:
    """A memory, and what is chosen of it.

    Args:
        memory: "device", "host" or "file".
        folder: the folder of files; "" for other memories.
        staging_bytes: bytes of the staging buffer through which elements pass in pieces; 0 on the device.
    """

    memory: str = DEVICE
    folder: str = ""
    staging_bytes: int = 0


class Cell(ABC):
    """One cell of the table."""

    word: str

    @abstractmethod
    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the elements of a bucket that `rank` keeps between steps, as (start, stop)."""

    @property
    def place(self) -> Place:
        """Where the kept elements are between uses; on the device they always are."""
        return Place()

    @property
    def memory(self) -> str:
        """The memory of the kept elements between uses."""
        return self.place.memory

    @property
    def is_on_device(self) -> bool:
        """Whether the kept elements are always on the device."""
        return self.memory == DEVICE

    def is_beside(self, *, is_cpu: bool) -> bool:
        """Whether the kept elements are in one memory with what a device computes: for a CPU, on the host, too."""
        return self.is_on_device or is_cpu

    @property
    def is_in_file(self) -> bool:
        """Whether the kept elements are in a file between uses."""
        return self.memory == "file"

    @property
    def released(self) -> "Until":
        """When gathered parameters are released."""
        return "use"

    @property
    def plain(self) -> "Cell":
        """A cell that keeps the same elements on the device."""
        return self

    def at(self, place: Place) -> "Cell":
        """Return a cell that keeps the same elements in another memory, or on the device."""
        return self.plain if place.memory == DEVICE else Elsewhere(self.plain, place)

    def of_buckets(self, sizes: Sequence[int]) -> list["Cell"]:
        """Return the cell of each bucket of a model.

        Args:
            sizes: bytes of the column in each bucket, in the order of units, equal on all ranks.
        """
        return [self] * len(sizes)

    def __str__(self) -> str:
        return self.word


@final
@dataclass(frozen=True)
class Replicated(Cell):
    """Every rank keeps all elements.

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

    Args:
        until: for parameters, when gathered parameters are released: "use" releases them after each use, but for those
            that a backward uses first, which are outside blocks or in the last one: they stay for it. "backward" keeps
            all from a forward with gradients until its backward has used them: a backward gathers nothing, but all
            parameters are full at once. "step" keeps them until the optimizer's step, so that several micro-batches
            gather once.

    ```python
    import zeroshard as zs

    assert str(zs.Sharded()) == "sharded"
    assert str(zs.Sharded(until="backward")) == "sharded, whole until the backward"
    ```
    """

    until: Until = "use"
    word = "sharded"

    def __post_init__(self) -> None:
        if self.until not in get_args(Until):
            raise ValueError(f"Sharded(until=) must be 'use', 'backward' or 'step'; got {self.until!r}.")

    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the shard of `rank`."""
        return layout.shard_range(rank)

    @property
    def released(self) -> Until:
        """See `Cell`."""
        return self.until

    @property
    def plain(self) -> Cell:
        """See `Cell`."""
        return Sharded()

    def __str__(self) -> str:
        return self.word if self.until == "use" else f"{self.word}, whole until the {self.until}"


@final
@dataclass(frozen=True)
class Elsewhere(Cell):
    """The elements of another cell, or a part of them, in another memory than the device's, except during use.

    Args:
        inner: the cell that says which elements are kept.
        where: their memory between uses.
        fraction: fraction of the bytes in that memory, rounded up to whole buckets.
    """

    inner: Cell
    where: Place
    fraction: float = 1.0

    def kept_range(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Return the elements of the inner cell."""
        return self.inner.kept_range(layout, rank)

    def of_buckets(self, sizes: Sequence[int]) -> list[Cell]:
        """See `Cell`. Whole buckets move, evenly spread, until the fraction is reached.

        The order does not depend on the fraction, so a larger fraction moves what a smaller one moves, and more.
        """
        cells, moved, wanted = [self.inner] * len(sizes), 0, Fraction(str(self.fraction)) * sum(sizes)
        usual = sorted(sizes)[len(sizes) // 2] if sizes else 0
        # Reversed bits: of eight buckets, half are every second one. Larger ones, such as an embedding's, come last,
        # since they would exceed a small fraction by far.
        for place in sorted(range(len(sizes)), key=lambda place: (sizes[place] > 2 * usual, f"{place:b}"[::-1])):
            if moved < wanted:
                cells[place], moved = replace(self, fraction=1.0), moved + sizes[place]
        return cells

    @property
    def place(self) -> Place:
        """See `Cell`."""
        return self.where

    @property
    def released(self) -> Until:
        """See `Cell`."""
        return self.inner.released

    @property
    def plain(self) -> Cell:
        """See `Cell`."""
        return self.inner.plain

    def __str__(self) -> str:
        # Without the folder, which may differ between ranks.
        return f"{self.inner}, {f'{self.fraction:.0%} ' * (self.fraction < 1)}{FAR.get(self.memory, self.memory)}"


@dataclass(frozen=True)
class Residency:
    """A row of the table: one cell for each column.

    Args:
        units: pairs of a pattern of unit names, with shell wildcards, and the cell of their parameters; the first match
            has priority over `parameters`. The name of the root is "(root)".

    Raises:
        ValueError: a combination of cells with which no rank can compute.

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
    units: tuple[tuple[str, Cell], ...] = ()

    def __post_init__(self) -> None:
        for pattern, cell in self.units:
            if not isinstance(pattern, str) or not isinstance(cell, Cell):
                raise TypeError(f"Residency(units=...) takes pairs of a pattern and a cell; got {(pattern, cell)!r}.")
            replace(self, parameters=cell, units=())
        columns = (("states", Cell), ("gradients", Cell), ("parameters", Cell), ("activations", Activations))
        for name, kind in columns:
            if not isinstance(cell := getattr(self, name), kind):
                raise TypeError(f"Residency({name}=...) takes a cell such as zs.Sharded(); got {cell!r}.")
        if not all(_covers(b, a) and _covers(c, b) for a, b, c in map(self._kept, (0, 1))):
            raise ValueError(
                f"Residency(states={self.states}, gradients={self.gradients}, parameters={self.parameters}): a rank "
                "must keep the gradient of each element whose state it keeps, and the parameter of each element whose "
                "gradient it keeps, because the optimizer updates states from gradients, and parameters from states. "
                "So a column can be sharded only if the columns before it are sharded."
            )

    def of_unit(self, name: str) -> "Residency":
        """Return the row of a unit by name; the root is "" or, in patterns and output, "(root)"."""
        if not self.units:
            return self
        cell = next((cell for pattern, cell in self.units if fits(name, pattern)), self.parameters)
        return replace(self, parameters=cell, units=())

    @property
    def state(self) -> tuple[Cell, Cell, Cell]:
        """The cells of the state between steps: states, gradients, parameters."""
        return self.states, self.gradients, self.parameters

    @property
    def is_cut(self) -> bool:
        """Whether a rank may update only a part of a parameter."""
        return self._kept(0)[0] != (0, 2)

    @property
    def cuts_gradients(self) -> bool:
        """Whether a rank keeps only a part of each gradient."""
        return self._kept(0)[1] != (0, 2)

    @property
    def cuts_parameters(self) -> bool:
        """Whether a rank keeps only a part of each parameter: units are gathered before use and released after it."""
        return self._kept(0)[2] != (0, 2)

    def _kept(self, rank: int) -> list[tuple[int, int]]:
        """Return the elements that a rank keeps of a bucket of two elements on two ranks, by column."""
        probe = plan_layout([2], 64, 2)
        return [cell.kept_range(probe, rank) for cell in self.state]


def check_memories(row: Residency) -> None:
    """Raise where a row requests a memory that does not exist, or does not support a column.

    Raises:
        ValueError: the cell, and what is supported.
    """
    everywhere = (DEVICE, *FAR)
    for column, known in (("states", everywhere), ("gradients", (DEVICE, "host")), ("parameters", everywhere)):
        if (cell := getattr(row, column)).memory not in known:
            raise ValueError(
                f"Residency({column}={cell}) requests memory '{cell.memory}', which does not support {column}; "
                f"supported: {', '.join(known)}."
            )


def _covers(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
