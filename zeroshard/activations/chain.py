"""The treatments of a model's activations as one: each unit has a chain of links, and a tensor goes through them.

Owns the order of links, and that what takes time on the way back begins ahead of use. `core/saved.py` says when a
forward of a unit is over; each link is a class in a module beside this one.

Note: ahead of use
    What one forward of a unit saved is used at about one time, and the forward before it saved what is used next. So
    when the first tensor of a batch is asked for, the last link of the batch two before it begins, and of the batch
    before it the link before that one. A chain of two links, parts in memory of the host say, has its part on the way
    from the host while the part before it is on its way to the other ranks.
"""

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch

from zeroshard.core.saved import Box, Treatment
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import local_of, storage_of, version_of
from zeroshard.tree import find

__all__ = ["CAPTURED", "Chained", "Counted", "Held", "Link"]

Tensor = torch.Tensor

CAPTURED: Final = "captured"
"""Of the ledger: what the user's own activation checkpointing keeps beside its positional inputs."""


class Link(ABC):
    """One treatment."""

    @abstractmethod
    def treat(self, held: Sequence["Held"], unit: int, outputs: Any) -> None:
        """Put what is to be kept of tensors in their place (`Held.put`), where there is something to gain.

        Args:
            held: what autograd saved in one forward of a unit, in order. A value that another link made of a tensor is
                a dataclass; a link that works on values of others reads the tensors in its fields.
            outputs: what that forward returned.
        """

    def start(self, value: Any) -> Any:
        """Begin to restore what `treat` put somewhere, without waiting; return what `restore` is given."""
        return value

    @abstractmethod
    def restore(self, started: Any) -> Any:
        """Return the value that `treat` found."""

    def held_on_device(self, value: Any) -> list[Tensor]:
        """Return the tensors of a value whose memory is the device's."""
        return find(value, Tensor)


@final
class Held:
    """What is kept of one saved tensor.

    Args:
        value: the tensor, and after a link took it, what this link made of it.
        is_input: whether it is an input of a module that is recomputed.
    """

    __slots__ = ("__weakref__", "_moving", "_place", "batch", "is_input", "steps", "value")

    def __init__(self, value: Any, is_input: bool) -> None:
        self.value, self.is_input = value, is_input
        self.steps: list[Link] = []
        self.batch: _Batch | None = None
        self._place, self._moving = -1, None

    def put(self, link: Link, value: Any) -> None:
        """Keep what a link made of the value instead."""
        self.value = value
        self.steps.append(link)

    def advance(self, place: int) -> None:
        """Undo links, from the last one to that at `place`, which only begins."""
        if self._place == -1:
            self._place = len(self.steps)
        while self._place > place:
            is_first = self._place == len(self.steps)
            value = self.value if is_first else self.steps[self._place].restore(self._moving)
            self._place -= 1
            self._moving = self.steps[self._place].start(value)

    def restore(self) -> Tensor:
        """Return the tensor; it may be asked for again."""
        self.advance(0)
        found: Tensor = self.steps[0].restore(self._moving)
        self._place, self._moving = -1, None
        return found


@final
class _Batch:
    """What was saved in one forward of a unit; weak, so that a graph that is gone leaves nothing behind."""

    def __init__(self, held: Sequence[Held], previous: "weakref.ref[_Batch] | None") -> None:
        self._held, self._previous = [weakref.ref(one) for one in held], previous
        for one in held:
            one.batch = self

    def prepare(self) -> None:
        """Begin what will be asked for next."""
        batch: _Batch | None = self
        for distance in (0, 1):
            batch = None if batch is None or batch._previous is None else batch._previous()
            for ref in batch._held if batch is not None else ():
                if (one := ref()) is not None:
                    one.advance(min(distance, len(one.steps) - 1))


@final
class Counted:
    """Counts the memory of some tensors in a column for as long as it lives itself.

    Args:
        uses: how many others count a storage.
    """

    def __init__(self, tensors: Sequence[Tensor], ledger: Ledger, uses: Counter[int], column: str) -> None:
        self._ledger, self._uses, self._column = ledger, uses, column
        self._sizes = {storage_of(one): one.untyped_storage().nbytes() for one in map(local_of, tensors)}
        for storage, nbytes in self._sizes.items():
            uses[storage] += 1
            if uses[storage] == 1:
                ledger.add(column, nbytes)

    def __del__(self) -> None:
        for storage, nbytes in self._sizes.items():
            self._uses[storage] -= 1
            if not self._uses[storage]:
                del self._uses[storage]
                self._ledger.add(self._column, -nbytes)


@final
class Chained(Treatment):
    """The chains of all units.

    Args:
        links: of each unit, by number.
        ledger: counts the bytes that stay on the device, each storage once.
    """

    def __init__(self, links: Mapping[int, Sequence[Link]], ledger: Ledger) -> None:
        self._links, self._ledger = links, ledger
        ledger.add("activations", 0)
        self._uses: Counter[int] = Counter()
        self._captured: Counter[int] = Counter()
        self._last: weakref.ref[_Batch] | None = None

    def treat(self, boxes: Sequence[Box], unit: int, outputs: Any) -> None:
        """Run the links of the unit, each over all tensors."""
        links = self._links.get(unit, ())
        # A tensor that was changed in place since it was saved stays as it is: reading it raises, as without links.
        sound = [box for box in boxes if version_of(box.value) == box.version]
        held = [Held(box.value, box.is_input) for box in sound]
        for link in links:
            link.treat(held, unit, outputs)
        treated = [one for one in held if one.steps]
        for box, one in zip(sound, held, strict=True):
            tensors = one.steps[-1].held_on_device(one.value) if one.steps else [one.value]
            # A count of the same memory elsewhere stays as it is.
            counts = [box.count, Counted(tensors, self._ledger, self._uses, "activations")]
            if box.captured:
                counts.append(Counted(box.captured, self._ledger, self._captured, CAPTURED))
                box.captured = ()
            box.count = counts
            if one.steps:
                box.value, box.treatment = one, self
        if treated:
            self._last = weakref.ref(_Batch(treated, self._last))

    def restore(self, box: Box) -> Tensor:
        """Run the links backwards."""
        held: Held = box.value
        found = held.restore()
        if held.batch is not None:
            held.batch.prepare()
        return found
