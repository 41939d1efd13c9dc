"""What forwards leave for their backward: their kinds, the units that they used, and how often.

Owns these records. It knows units as records of calls, and must not know passes. Read "Note: a step" in
`core/engine.py` first.

Note: micro-batches in flight
    A loss may come from several forwards, and a forward may have no backward, so a backward ends all forwards before
    it, and its kind has theirs. On a pipe, forwards of other micro-batches and parts are in flight as well. So what a
    forward of a part leaves is set apart as a *flight*, which autograd keeps with the outputs of the part and of its
    units, and comes back with the first gradient there: the kind of that backward names the part, and nothing else that
    is in flight.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final
from weakref import ref

from zeroshard.core.unit import Unit
from zeroshard.torch_private import graph_task

__all__ = ["Chunk", "Flight", "Flights"]

KEPT_FORWARDS = 64


@final
class Chunk(NamedTuple):
    """A part of a model that is called by itself, though no module of its own: see `parallel/runner.py`."""

    name: str
    numbers: Sequence[int]
    """Its units."""
    is_last: bool
    """Whether its outputs are those of the model."""


@final
@dataclass(eq=False)
class Flight:
    """What one forward leaves for its backward, once it is set apart."""

    part: str | None = None
    """The name of the part of the model; None before it is set apart."""
    numbers: Sequence[int] = ()
    """The units of the part, whose gradients its backwards reduce."""
    used: frozenset[int] = frozenset()
    calls: tuple[tuple[int, int], ...] = ()
    """Each unit that the forward used, and the number of its calls."""


@final
class Flights:
    """The forwards of one model whose backward has not ended."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._forwards, self.used = list[Hashable](), set[int]()
        self.parts = frozenset({""})
        """The names of what user code calls: the model, or its parts at one place of a pipe, and forward methods."""
        self.chunk: Chunk | None = None
        """The chunk that is called next, where the calls of one module run several."""
        self._next = Flight()
        """What the current forward, or the next one, leaves."""
        self._arrived = -1, list[Flight]()
        """A backward, as autograd numbers it, and the flights whose outputs it has reached."""
        self._open = -1
        """The backward whose pass is open."""

    def forward_of(self, name: str, *, has_grad: bool, is_apart: bool) -> tuple[Hashable, str]:
        """Return the kind of a forward, and the name of its beginning for votes.

        Args:
            name: the method that runs, other than the model's forward.
            is_apart: whether a backward that began now would leave sums to a later one, as under `no_sync()`.
        """
        what = "training forward" + " (no_sync)" * is_apart if has_grad else "no-grad forward"
        place = f"the beginning of a {what}" + f" of '{name}'" * bool(name)
        return ("forward", name, has_grad, self.chunk.name if self.chunk is not None else ""), place

    def is_cut(self) -> bool:
        """Return whether the outputs of the current forward are no outputs of the model, but inside it."""
        return self.chunk is not None and not self.chunk.is_last

    def begin(self, kind: Hashable) -> None:
        """Note a forward with gradients."""
        # Forwards without a backward would create ever more kinds; the last forwards distinguish them well enough.
        self._forwards = [*self._forwards[1 - KEPT_FORWARDS :], kind]

    def use(self, numbers: Iterable[int]) -> None:
        """Note a call of a module that uses these units."""
        for number in numbers:
            self.used.add(number)
            self._units[number].calls += 1

    def set_apart(self, part: str, numbers: Sequence[int]) -> None:
        """End the forward of a part, so that other backwards do not end it."""
        flight, self._next = self._next, Flight()
        flight.part, flight.numbers = (part, numbers) if self.chunk is None else self.chunk[:2]
        flight.used, flight.calls = frozenset(self.used), tuple((u.number, u.calls) for u in self._units if u.calls)
        self.end()

    def arrival(self) -> Callable[[], None]:
        """Return a function for hooks of the current forward, which notes that its backward has reached them."""
        flight, alive = self._next, ref(self)  # see the note of `core/hints.py`

        def arrive() -> None:
            if flight.part is not None and (flights := alive()) is not None:
                flights._arrive(flight)

        return arrive

    def _arrive(self, flight: Flight) -> None:
        task, arrived = graph_task(), self._arrived
        known = arrived[1] if arrived[0] == task else []
        if flight not in known:
            self._arrived = task, [*known, flight]
            if self._open == task:
                self._take_back(flight)

    def kind_of(self, task: int) -> tuple[Hashable, Sequence[int] | None]:
        """Return the kind of a backward that begins, and the units whose gradients it reduces; None for all."""
        self._open = task
        if self._arrived[0] != task:
            return tuple(self._forwards), None
        for flight in self._arrived[1]:
            self._take_back(flight)
        return self._arrived[1][0].part, self._arrived[1][0].numbers

    def _take_back(self, flight: Flight) -> None:
        self.used |= flight.used
        for number, calls in flight.calls:
            self._units[number].calls += calls

    def end(self) -> None:
        """Forget what was not set apart: a backward has ended."""
        self._forwards, self.used, self._open = [], set(), -1
        for unit in self._units:
            unit.calls = 0
