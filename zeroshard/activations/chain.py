"""The treatment of a model's activations: each unit has a chain of links, which process its saved tensors.

Owns the order of links, and the start of slow restorations ahead of use. `saved.py` calls it after the forward of a
unit; each link is a class in a module of `activations/`.

Note: ahead of use
    Tensors saved by one forward of a unit (a batch) are used together, and backward then uses the previous batch. So
    the first request of a batch starts the last link of the batch two before it, and the second-last link of the batch
    before it. In a chain of two links, such as parts in host memory, one batch is copied from the host while the
    previous batch is gathered from the other ranks.
"""

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, final

import torch

from zeroshard.activations.saved import Box, ChangedInPlaceError, Treatment
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import local_of, storage_of, version_of
from zeroshard.tree import find

__all__ = ["CAPTURED", "Chained", "Counted", "Held", "Link"]

Tensor = torch.Tensor

CAPTURED: Final = "captured"
"""Column of the ledger for objects that the user's activation checkpointing keeps besides positional inputs."""


class Link(ABC):
    """One treatment."""

    is_collective = False
    """Whether restorations need other ranks, which must start them in the same order."""

    @abstractmethod
    def treat(self, held: Sequence["Held"], unit: int, outputs: Any) -> None:
        """Replace values with their compact form (`Held.put`), if this saves memory.

        Args:
            held: the tensors that autograd saved in one forward of a unit, in order. The value of another link is a
                dataclass; a link that processes such values reads the tensors in its fields.
            outputs: the result of that forward.
        """

    def start(self, value: Any) -> Any:
        """Start to restore a value of `treat`, without waiting; return the argument of `restore`."""
        return value

    @abstractmethod
    def restore(self, started: Any) -> Any:
        """Return the value before `treat`."""

    def held_on_device(self, value: Any) -> list[Tensor]:
        """Return the tensors of a value that are in device memory."""
        return find(value, Tensor)


@final
class Held:
    """One saved tensor.

    Args:
        value: the tensor, or its replacement by a link.
        is_input: whether it is an input of a recomputed module.
    """

    __slots__ = ("__weakref__", "_moving", "_place", "batch", "is_input", "steps", "value")

    def __init__(self, value: Any, is_input: bool) -> None:
        self.value, self.is_input = value, is_input
        self.steps: list[Link] = []
        self.batch: _Batch | None = None
        self._place, self._moving = -1, None

    def put(self, link: Link, value: Any) -> None:
        """Replace the value with the result of a link."""
        self.value = value
        self.steps.append(link)

    def advance(self, place: int) -> None:
        """Undo links from the last to `place`, whose restoration only starts."""
        if self._place == -1:
            self._place = len(self.steps)
        while self._place > place:
            is_first = self._place == len(self.steps)
            value = self.value if is_first else self.steps[self._place].restore(self._moving)
            self._place -= 1
            self._moving = self.steps[self._place].start(value)

    def restore(self) -> Tensor:
        """Return the tensor; may be called again."""
        self.advance(0)
        found: Tensor = self.steps[0].restore(self._moving)
        self._place, self._moving = -1, None
        return found


@final
class _Batch:
    """The tensors saved in one forward of a unit, by weak references, so that a freed graph leaves nothing."""

    def __init__(self, held: Sequence[Held], unit: int, previous: "weakref.ref[_Batch] | None") -> None:
        self._held, self._unit, self._previous = [weakref.ref(one) for one in held], unit, previous
        for one in held:
            one.batch = self

    def prepare(self) -> None:
        """Start the restorations that backward needs next."""
        batch, unit, is_earlier = self, self._unit, False
        for distance in (0, 1):
            if batch._previous is None or (previous := batch._previous()) is None:
                break
            # Units run in order: before the first one is an earlier forward, whose graph a rank may keep by itself.
            batch, is_earlier, unit = previous, is_earlier or previous._unit >= unit, previous._unit
            for ref in batch._held:
                # A tensor that changed in place raises when it is used, if it is.
                if (one := ref()) is not None and not (is_earlier and any(link.is_collective for link in one.steps)):
                    with suppress(ChangedInPlaceError):
                        one.advance(min(distance, len(one.steps) - 1))


@final
class Counted:
    """Counts the memory of tensors in a column during its own lifetime.

    Args:
        uses: number of counters of each storage.
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
        links: the links of each unit, by number.
        ledger: counts the bytes that stay on the device, each storage once.
        buffers: the registered buffers of each unit's modules, by number, as dictionaries. They stay on the device, and
            kernels of batch norm change them without a new version: a backward reads them as they are then.
    """

    def __init__(
        self,
        links: Mapping[int, Sequence[Link]],
        ledger: Ledger,
        buffers: Mapping[int, Sequence[Mapping[str, Tensor | None]]] = MappingProxyType({}),
    ) -> None:
        self._links, self._ledger, self._buffers = links, ledger, buffers
        ledger.add("activations", 0)
        self._uses: Counter[int] = Counter()
        self._captured: Counter[int] = Counter()
        self._last: weakref.ref[_Batch] | None = None

    def treat(self, boxes: Sequence[Box], unit: int, outputs: Any) -> None:
        """Run each link of the unit over all tensors."""
        links = self._links.get(unit, ())
        # A tensor that was changed in place after it was saved is not treated: reading it raises, as without links.
        own = {storage_of(b) for some in self._buffers.get(unit, ()) for b in some.values() if b is not None}
        sound = [box for box in boxes if version_of(box.value) == box.version]
        sound = [box for box in sound if storage_of(local_of(box.value)) not in own] if own else sound
        held = [Held(box.value, box.is_input) for box in sound]
        for link in links:
            link.treat(held, unit, outputs)
        treated = [one for one in held if one.steps]
        for box, one in zip(sound, held, strict=True):
            tensors = one.steps[-1].held_on_device(one.value) if one.steps else [one.value]
            # Another count of the same memory does not change.
            counts = [box.count, Counted(tensors, self._ledger, self._uses, "activations")]
            if box.captured:
                counts.append(Counted(box.captured, self._ledger, self._captured, CAPTURED))
                box.captured = ()
            box.count = counts
            if one.steps:
                box.value, box.treatment = one, self
        if treated:
            self._last = weakref.ref(_Batch(treated, unit, self._last))

    def restore(self, box: Box) -> Tensor:
        """Undo the links in reverse order."""
        held: Held = box.value
        found = held.restore()
        if held.batch is not None:
            held.batch.prepare()
        return found
