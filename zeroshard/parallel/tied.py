"""Parameters that several places of a pipe have, such as a tied embedding: the sum of their gradients.

Owns the exchange of these gradients before each step, and the comparison of values after user code. The places have
equal values and states from the start, and make equal updates from equal sums, so nothing else is exchanged. Each such
parameter is a unit of its own (`plan_units`), so its shards are cut alike at each place. Norms count it once
(`norms_over` in `parallel/pipe.py`).
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from zeroshard.core.engine import Engine
from zeroshard.core.slices import plain_part
from zeroshard.core.slot import slot_of
from zeroshard.table.errors import RankMismatchError
from zeroshard.whole.copies import sum_bits
from zeroshard.wire.comm import Pending, Tag

__all__ = ["Tied"]

BUCKET = Tag.BUCKETS - 2
"""In tags, beyond those of activations."""


@final
class Tied:
    """The parameters of one place that other places have, too.

    Args:
        shared: for each, the ranks of the places that have it, in the order of the pipe, this rank among them.
    """

    def __init__(self, engine: Engine, shared: Mapping[nn.Parameter, Sequence[int]]) -> None:
        self._engine: Engine = weakref.proxy(engine)  # it has this object
        self._count, self._has_added = 0, False
        self._all = shared

    @property
    def _shared(self) -> list[tuple[nn.Parameter, Sequence[int]]]:
        """Those that are trained now: user code may freeze and unfreeze them, alike at all places."""
        return [(one, ranks) for one, ranks in self._all.items() if one.requires_grad]

    @property
    def are_any(self) -> bool:
        """Whether there are such parameters, with gradients."""
        return bool(self._shared)

    def check_dropped(self) -> None:
        """Raise if gradients that were added up would be added up again.

        Raises:
            RuntimeError: neither an optimizer step nor `zero_grad()` has dropped them.
        """
        if self._has_added and any(one.grad is not None and self._part(one).any() for one, _ in self._shared):
            name = slot_of(self._shared[0][0]).name
            raise RuntimeError(
                f"{self._engine.mesh} The last pipe.step() added up the gradients of '{name}' over the places of the "
                "pipe, and they are still there: another step would count them twice. Call optimizer.zero_grad() "
                "before it, or pass last=False to all calls of pipe.step() but the last one of an accumulation."
            )
        self._has_added = False

    def missing(self) -> str:
        """Return why gradients cannot be added up; "" if they can."""
        lacking = [slot_of(one).name for one, _ in self._shared if one.grad is None]
        if not lacking:
            return ""
        return (
            f"'{lacking[0]}' is tied over places of the pipe, and no loss of this step reached it at this place: each "
            "place must use a tied parameter in every step"
        )

    def add_up(self) -> None:
        """Replace each gradient by its sum over the places, in their order.

        Collective: each place sends its shard of the gradient to the others.
        """
        self._has_added = True
        for parameter, ranks in self._shared:
            own = self._part(parameter)
            first, *others = self._of_places(own, ranks, f"the gradient of '{slot_of(parameter).name}'")
            own.copy_(first)
            for one in others:
                own.add_(one)

    def check(self, what: str) -> None:
        """Raise on every rank of the mesh unless all places have equal values.

        Raises:
            RankMismatchError: with the first parameter that differs.

        Collective: each place sends 8 bytes for each parameter to the others; a vote of all places.
        """
        unlike = ""
        for parameter, ranks in self._all.items():
            slot = slot_of(parameter)
            part = slot.bucket.shard[slice(*slot.bucket.layout.parts(*slot.bucket.spec.shard)[slot.index])]
            sums = self._of_places(sum_bits(part).to(part.device), ranks, f"'{slot.name}'")
            unlike = unlike or slot.name * any(int(one) != int(sums[0]) for one in sums)
        mesh = self._engine.mesh
        if not self._engine.order.votes.span(f"{what}: tied parameters", int(not unlike)):
            name = f"'{unlike}', which is" if unlike else "A parameter, which the errors there name, and which is"
            raise RankMismatchError(
                f"{mesh} After {what}: {name} tied over places of the pipe, differs between them. Rank 0 of gathered() "
                "is the first rank of each place: change a tied parameter alike on the first rank of each."
            )

    def _of_places(self, own: Tensor, ranks: Sequence[int], what: str) -> list[Tensor]:
        """Return a tensor of each of some ranks, this one among them, in their order."""
        comm, pending = self._engine.comm.across, list[Pending]()
        me = comm.mesh.rank
        found = {rank: own.clone() if rank == me else torch.empty_like(own) for rank in ranks}
        self._count += 1
        tag = Tag(self._count, BUCKET, f"{what} at another place of the pipe")
        for rank in [one for one in ranks if one != me]:
            # Of two ranks one begins with the send: NCCL's messages wait for the one before.
            for sends in (me < rank, me > rank):
                pending.append(comm.send(found[me], rank, tag) if sends else comm.receive(found[rank], rank, tag))
        for one in pending:
            one.wait()
        return [*found.values()]

    @staticmethod
    def _part(parameter: nn.Parameter) -> Tensor:
        """Return this rank's elements of the gradient, as a plain tensor."""
        return plain_part(slot_of(parameter))
