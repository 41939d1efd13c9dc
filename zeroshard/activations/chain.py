"""The treatments of a model's activations as one: each unit has a chain of links, and a tensor goes through them.

Owns the order of links and the count of bytes. `core/saved.py` says when a forward of a unit is over; each link is a
class in a module beside this one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from zeroshard.core.saved import Box, Treatment
from zeroshard.torch_private import version_of

__all__ = ["Chained", "Held", "Link"]

Tensor = torch.Tensor


@final
class Held:
    """What is kept of one saved tensor while it goes through the links.

    Args:
        value: the tensor, and after a link took it, what this link made of it.
        is_input: whether it is an input of a module that is recomputed.
    """

    __slots__ = ("is_input", "steps", "value")

    def __init__(self, value: Any, is_input: bool) -> None:
        self.value, self.is_input = value, is_input
        self.steps: list[Link] = []

    def put(self, link: "Link", value: Any) -> None:
        """Keep what a link made of the value instead."""
        self.value = value
        self.steps.append(link)


class Link(ABC):
    """One treatment."""

    @abstractmethod
    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """Put what is to be kept of tensors in their place (`Held.put`), where there is something to gain.

        Args:
            held: what autograd saved in one forward of a unit, in order. A value that another link made of a tensor is
                a dataclass; a link that works on values of others reads the tensors in its fields.
            outputs: what that forward returned.
        """

    @abstractmethod
    def restore(self, value: Any) -> Any:
        """Return the value that `treat` found; it may be asked for again."""


@final
class Chained(Treatment):
    """The chains of all units.

    Args:
        links: of each unit, by number.
    """

    def __init__(self, links: Mapping[int, Sequence[Link]]) -> None:
        self._links = links

    def treat(self, boxes: Sequence[Box], unit: int, outputs: Any) -> None:
        """Run the links of the unit, each over all tensors."""
        links = self._links.get(unit, ())
        if not links:
            return
        # A tensor that was changed in place since it was saved stays as it is: reading it raises, as without links.
        sound = [box for box in boxes if version_of(box.value) == box.version]
        held = [Held(box.value, box.is_input) for box in sound]
        for link in links:
            link.treat(held, unit, outputs)
        for box, one in zip(sound, held, strict=True):
            if one.steps:
                box.value, box.treatment = one, self

    def restore(self, box: Box) -> Tensor:
        """Run the links backwards."""
        value = box.value.value
        for link in reversed(box.value.steps):
            value = link.restore(value)
        found: Tensor = value
        return found
