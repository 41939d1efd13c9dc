"""`zs.Outer`: how islands exchange what they learned, and what is refused.

Owns the options of `zs.shard(outer=)`. It must not know ranks or engines.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, final

import torch

from zeroshard.optim.keeps import kept_by
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.mailbox_codec import BITS
from zeroshard.outer.places import split
from zeroshard.table.cells import Cell, Elsewhere, Place, Sharded
from zeroshard.table.pipeline import balanced
from zeroshard.wire.mesh import Mesh

__all__ = ["Outer"]

_T = TypeVar("_T")

AVERAGE = "average"
CELLS = MappingProxyType({"device": Sharded(), "host": Elsewhere(Sharded(), Place("host"))})
"""The cells of what islands keep besides the engine's state, by `Outer(memory=)`."""
TOGETHER = ("optimizer", "fragments", "delay", "mix")
ALONE = ("secret_file", "island", "islands", "staleness", "log", "replay")
"""Options of the islands of one launch, and of islands that are launches of their own."""


@final
@dataclass(frozen=True, kw_only=True)
class Outer:
    """How islands, the places along the axis "replicate" of `zs.shard(mesh=)`, exchange what they learned.

    Between exchanges an island trains by itself. In an exchange each island sends the change of its parameters since
    the last one; all take the mean of these changes, and apply it to their common parameters, the anchors.

    Args:
        every: number of steps from one exchange of a parameter to the next, at least 1. Each call of `optimizer.step()`
            counts, also one that is skipped; with several optimizers, the one that has made the fewest steps counts.
        optimizer: "average" replaces the parameters by their mean over islands. Or a function that makes an
            element-wise optimizer of a list of parameters, such as `lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9,
            nesterov=True)`: its gradient is the mean change with the sign of a gradient. It is sharded as the inner
            optimizer is, and its states are fp32.
        fragments: number of parts of the model that are exchanged one after the other, in equal distances. A part has
            whole units. It divides `every`.
        delay: number of steps between the beginning of an exchange and its end, which training overlaps; below the
            distance of two exchanges. The exchange ends at its step, and begins `delay` steps before. With 0 the step
            waits for the exchange.
        mix: the weight of the island's own parameters where the result of an exchange arrives, in [0, 1). With 0 the
            result replaces them, and so the changes of the last `delay` steps. With another weight the islands'
            parameters are not equal after an exchange; the anchors are.
        bits: bits of an element of a change in messages: 32 (the anchors' own format), 8 or 4, in blocks of 256
            elements with one scale. What rounding loses is added to the island's next change. An axis "tensor" of the
            mesh needs 32.
        memory: "device" or "host": where anchors, outer states and what rounding lost are.
        address: "host:port" of a mailbox, which `zeroshard outer --serve` starts: this launch is one island, of as many
            ranks as it has, and the others are launches of their own (docs/mailbox.md). Anchors are in host memory,
            and the other options up to here but `every` and `bits` keep their defaults.
        secret_file: with `address`, a file with the secret that islands and mailbox have in common.
        island: with `address`, the name of this island, that no other has.
        islands: with `address`, the number of islands at the start, by which each change is divided.
        staleness: with `address`: 0 waits in each exchange for all islands (BSP), a number bounds by how many exchanges
            the fastest may lead (SSP), and None never waits (ASP).
        log: with `address`, a folder for everything that this island sends and takes in.
        replay: a folder that `log` has written: the island takes in what it took in then, instead of what arrives.

    Source: Stich 2018 (local SGD, averaging); Douillard et al. 2023 (DiLoCo); Douillard et al. 2025 (fragments, delay,
        mix; arXiv 2501.18512).

    ```python
    import torch, zeroshard as zs

    outer = zs.Outer(every=50, optimizer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), bits=8)
    assert outer.every == 50
    ```
    """

    every: int
    optimizer: Literal["average"] | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = "average"
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    bits: Literal[32, 8, 4] = 32
    memory: Literal["device", "host"] = "device"
    address: str = ""
    secret_file: str | Path = ""
    island: str = ""
    islands: int = 0
    staleness: int | None = 0
    log: str | Path | None = None
    replay: str | Path | None = None

    @property
    def is_alone(self) -> bool:
        """Whether this launch is one island."""
        return bool(self.address)

    def alone(self) -> IslandOptions:
        """Return the options of an island that is a launch of its own."""
        where = self.address, self.secret_file, self.log
        return IslandOptions(self.island, self.islands, self.every, self.staleness, *where, self.bits)

    @property
    def distance(self) -> int:
        """Number of steps from the end of one exchange to the end of the next."""
        return self.every // self.fragments

    @property
    def cell(self) -> Cell:
        """The cell of anchors, outer states and what rounding lost: each rank has its shard."""
        return CELLS[self.memory]

    def codec(self, dtype: str) -> str:
        """Return the codec of messages, by name, of changes in a dtype."""
        return dtype if self.bits == BITS[0] else f"scaled{self.bits}"

    @property
    def kept_per_element(self) -> int:
        """What is kept for each element of an island's shards: the anchor, outer states, and what rounding lost."""
        optimizer = self.trial()
        kept = 0 if optimizer is None else kept_by(optimizer).per_element
        return 1 + kept + (self.bits < BITS[0])

    def check_units(self, trained: int) -> None:
        """Raise ValueError if there are more fragments than units with trained parameters."""
        if trained < self.fragments:
            raise ValueError(
                f"Outer(fragments={self.fragments}), but the model has {trained} unit(s) with trained parameters, and "
                "units are not cut. Use fewer fragments, or name smaller units with units=."
            )

    def divided(self, units: Sequence[_T], sizes: Sequence[int]) -> list[Sequence[_T]]:
        """Divide units with trained parameters into fragments of about equal sizes; units are not cut.

        Raises:
            ValueError: as `check_units`.
        """
        self.check_units(len(units))
        return [units[start:stop] for start, stop in pairwise([*balanced(sizes, self.fragments), len(units)])]

    def apart(self, asked: Any, world_size: int) -> tuple[Any, int]:
        """Return what `mesh=` means on an island, and the number of islands of one launch, for a plan.

        Args:
            asked: the argument `mesh=`.
            world_size: the ranks of all islands of the launch.

        Raises:
            TypeError, ValueError: an option is not supported, or the mesh has no islands.
        """
        self.check()
        if self.is_alone:
            return asked, 1
        found = split(asked, Mesh(0, world_size, 0, torch.device("cpu")))
        return found.asked, found.across.world_size

    def check_axes(self, axes: Mapping[str, int]) -> None:
        """Raise ValueError if islands with these axes cannot exchange so.

        Args:
            axes: sizes by name.
        """
        if axes.get("pipe", 1) > 1 and not self.is_alone:
            raise ValueError("outer= with pipe=: islands have the axes 'shard' and 'tensor'. Leave out one.")
        # In an exchange, what is split lies beside what all ranks along the axis have.
        if axes.get("tensor", 1) > 1 and self.bits != BITS[0]:
            raise ValueError(
                f"Outer(bits={self.bits}) with an axis 'tensor': elements that share a scale are rounded together, and "
                "ranks along 'tensor' would round their copies of a parameter differently. Use bits=32."
            )

    def trial(self) -> torch.optim.Optimizer | None:
        """Return an outer optimizer of small anchors; None for the average. See `make`."""
        return self.make(
            [torch.nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu")) for _ in range(self.fragments)]
        )

    def check(self) -> None:
        """Raise unless the options have a meaning.

        Raises:
            TypeError, ValueError: an option is not supported; the text names it.
        """
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        why = "is for islands of one launch, without" if self.is_alone else "needs the mailbox of other launches:"
        for name in TOGETHER if self.is_alone else ALONE:
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"Outer({name}={value!r}) {why} address=.")
        if self.is_alone:
            self.alone()
        for name in ("every", "fragments", "delay"):
            if type(number := getattr(self, name)) is not int:
                raise TypeError(f"Outer({name}=) must be an integer; got {number!r}.")
            if number < (least := 0 if name == "delay" else 1):
                raise ValueError(f"Outer({name}=) must be at least {least}; got {number}.")
        if self.every % self.fragments:
            raise ValueError(
                f"Outer(fragments={self.fragments}) must divide every={self.every}, because fragments are exchanged in "
                "equal distances."
            )
        if self.delay >= self.distance:
            raise ValueError(
                f"Outer(delay={self.delay}) must be below the {self.distance} step(s) between two exchanges "
                f"(every={self.every}, fragments={self.fragments}), so that one exchange ends before the next begins."
            )
        if isinstance(self.mix, bool) or not isinstance(self.mix, int | float) or not 0 <= self.mix < 1:
            raise ValueError(
                f"Outer(mix=) is the weight of an island's own parameters, at least 0 and below 1; got {self.mix!r}."
            )
        if isinstance(self.bits, bool) or self.bits not in BITS:
            raise ValueError(f"Outer(bits=) must be one of {BITS}; got {self.bits!r}.")
        try:
            hash(self.cell)
        except (KeyError, TypeError):  # unknown, or no text
            raise ValueError(f"Outer(memory=) must be one of {tuple(CELLS)}; got {self.memory!r}.") from None
        if self.optimizer != AVERAGE and not callable(self.optimizer):
            raise TypeError(
                f"Outer(optimizer=) must be {AVERAGE!r} or a function that returns an optimizer of a list of "
                f"parameters; got {self.optimizer!r}. Write optimizer=lambda p: torch.optim.SGD(p, lr=0.7)."
            )

    def make(self, anchors: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return the optimizer of the anchors; None for the average.

        Raises:
            TypeError: the function returned no optimizer of exactly these parameters.
        """
        if not callable(self.optimizer):
            return None
        made: Any = self.optimizer(list(anchors))
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"The function of Outer(optimizer=) returned {made!r}, which is no torch.optim.Optimizer.")
        if [id(one) for group in made.param_groups for one in group["params"]] != [id(one) for one in anchors]:
            raise TypeError(
                "The function of Outer(optimizer=) must return an optimizer of exactly the parameters that it is given."
            )
        return made
