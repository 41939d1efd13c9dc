"""P_a: each rank along the tensor axis keeps its part of the inputs of recomputed modules.

Owns the choice of inputs, and the check that they are equal on these ranks. `Axis` gathers. Read `chain.py` first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch

from zeroshard.activations.chain import Held, Link
from zeroshard.activations.values import Values, values_of
from zeroshard.table.activations import Partitioned
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import is_dense, local_of

__all__ = ["Axis", "Partition"]

Tensor = torch.Tensor

INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


@final
@dataclass(frozen=True)
class Axis:
    """The ranks along the tensor axis.

    Args:
        size: number of ranks.
        place: of this rank among them.
        rank: this rank's name, for errors.
        gather: starts an all-gather in place, and returns a function that waits for it. Arguments: the whole, with this
            rank's part; a number, equal on all ranks; the kind of traffic; a description.
    """

    size: int
    place: int
    rank: str
    gather: Callable[[Tensor, int, str, str], Callable[[], object]]


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's part of a tensor.

    Args:
        part: (ceil(numel / T),) for T ranks.
        size: size of the full tensor.
        strides: strides of the full tensor, which is dense.
        number: number of the tensor, equal on all ranks, for message tags.
    """

    part: Tensor
    size: torch.Size
    strides: tuple[int, ...]
    number: int


@final
class _Gather:
    """A gather under way, of which a freed graph leaves the messages to `dropped`.

    Args:
        full: receives all parts.
        dropped: gathers that nothing will read. Freeing the tensors of a message on its way would stop all messages
            after it.
    """

    def __init__(
        self, value: _Part, full: Tensor, wait: Callable[[], object], dropped: list[Callable[[], object]]
    ) -> None:
        self.value, self.full, self.wait, self._dropped = value, full, wait, dropped

    def __del__(self) -> None:
        self._dropped.append(self.wait)  # a second wait does nothing


@final
class Partition(Link):
    """Keeps 1/T of each input of a recomputed module, for the T ranks along the tensor axis."""

    is_collective = True

    def __init__(self, axis: Axis) -> None:
        self._axis, self._number = axis, 0
        self._dropped: list[Callable[[], object]] = []
        self._compared: set[tuple[int, int, torch.Size, torch.dtype]] = set()

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """Partition the inputs.

        Raises:
            RuntimeError: an input is already split over the ranks.
            RankMismatchError: values differ between ranks; checked for the first inputs of each shape of a unit.

        Collective: for the first inputs of a shape, an all-gather of 16 bytes along the tensor axis.
        """
        # Up to torch 2.12, an empty tensor is saved beside the inputs.
        for index, one in enumerate(one for one in held if one.is_input and one.value.numel()):
            whole = one.value
            if local_of(whole) is not whole:
                raise RuntimeError(self._explain(index, unit, f"is a DTensor with placements {whole.placements}"))
            is_cut = whole.layout is torch.strided and whole.numel() >= Partitioned.LEAST_NUMEL and is_dense(whole)
            if not is_cut or whole.element_size() not in INTEGERS:
                continue
            key = (unit, index, whole.shape, whole.dtype)
            if key not in self._compared and values_of(whole) is not Values.NEVER:
                self._compare(whole, index, unit)
                self._compared.add(key)
            numel = -(-whole.numel() // self._axis.size)
            flat = whole.as_strided((whole.numel(),), (1,))
            # The last parts may be shorter, but messages have equal lengths.
            part = flat.new_zeros(numel)
            mine = flat[self._axis.place * numel : (self._axis.place + 1) * numel]
            part[: mine.numel()] = mine
            self._number += 1
            one.put(self, _Part(part, whole.shape, whole.stride(), self._number))

    def start(self, value: Any) -> _Gather:
        """Start a gather. Collective: all-gather along the tensor axis; each rank sends (T-1) parts."""
        while self._dropped:
            self._dropped.pop()()
        full = value.part.new_empty(self._axis.size * value.part.numel())
        full.view(self._axis.size, -1)[self._axis.place] = value.part
        what = f"the gather of a partitioned input of shape {tuple(value.size)}"
        return _Gather(value, full, self._axis.gather(full, value.number, "activations", what), self._dropped)

    def restore(self, started: Any) -> Tensor:
        """Return the whole."""
        started.wait()
        whole: Tensor = started.full.as_strided(started.value.size, started.value.strides)
        return whole

    def _compare(self, whole: Tensor, index: int, unit: int) -> None:
        """Raise unless all ranks along the tensor axis have the same values."""
        bits = whole.as_strided((whole.numel(),), (1,)).view(INTEGERS[whole.element_size()])
        sums = torch.stack([bits.sum(dtype=torch.int64), bits[::3].sum(dtype=torch.int64)])
        rows = sums.new_empty(self._axis.size, 2)
        rows[self._axis.place] = sums
        self._number += 1
        self._axis.gather(rows.view(-1), self._number, "agree", "the comparison of inputs along the tensor axis")()
        if bool((rows != rows[0]).any()):
            raise RankMismatchError(self._explain(index, unit, f"of shape {tuple(whole.shape)} has other values there"))

    def _explain(self, index: int, unit: int, why: str) -> str:
        return (
            f"{self._axis.rank} activations='partition' needs inputs that are equal on all ranks along the tensor "
            f"axis, but input {index} of the recomputed module in unit {unit} {why}. Remove 'partition' for this unit "
            "(sequence parallelism already splits inputs), or use equal seeds on ranks along the tensor axis."
        )
