"""Which value of a pipeline's step was the first that is not finite, for the error that the update raises.

Owns this search. A place cannot tell from its gradients: a NaN of one place reaches all of them. So each message is
looked at where it arrives, and each loss where it is made; the host reads the result only for an error. It must not
know how updates are prevented: `core/guard.py` does that.

Note: the first value
    A value spoils those that are computed from it. Within a micro-batch, inputs of chunks come first, then the loss,
    then gradients, which go back; of two micro-batches either may be named.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from zeroshard.parallel.mail import Mail
from zeroshard.table.pipeline import Kind, Schedule
from zeroshard.wire.mesh import Mesh

__all__ = ["Finite"]

INFINITY: Final = float("inf")


@final
class Finite:
    """The search in the steps of one rank.

    Args:
        mesh: the ranks of this place.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule) -> None:
        self._mesh, self._schedule = mesh, schedule
        self._norms = dict[int, Tensor]()
        """The largest magnitude of each value of this step, by its place in the order of the note."""
        self._orders = dict[tuple[int, ...], Tensor]()
        """These places on the device: a copy to it would be a wait in each step."""
        self._found: Tensor | None = None
        self._is_over = True

    def begin(self) -> None:
        """Forget the values of a step that failed."""
        self._norms = {}

    def note(self, kind: Kind, chunk: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Look at the input of a chunk, at the gradient of its output, or, with `FORWARD`, at the loss."""
        chunks = self._schedule.all_chunks
        turn = {Kind.RECEIVE_INPUT: chunk, Kind.FORWARD: chunks}.get(kind, 2 * chunks - chunk)
        # The largest magnitude propagates NaN, and has no temporary memory of the size of the tensor.
        looked = [one.detach() for one in tensors if one.is_floating_point() and one.numel()]
        norms = [torch.linalg.vector_norm(one, INFINITY).double() for one in looked]
        if norms:
            norm = norms[0] if len(norms) == 1 else torch.stack(norms).amax()
            self._norms[turn * self._schedule.micro_batches + micro_batch] = norm

    def first(self) -> Tensor:
        """Return (): the place of this rank's first value that is not finite, infinity if all are."""
        norms, self._norms, device = self._norms, {}, self._mesh.device
        if not norms:
            return torch.full((), INFINITY, dtype=torch.float64, device=device)
        order = tuple(norms)
        if order not in self._orders:
            self._orders[order] = torch.tensor(order, dtype=torch.float64, device=device)
        return self._orders[order].masked_fill(torch.stack([*norms.values()]) < INFINITY, INFINITY).amin()

    def keep(self, found: Tensor, *, is_last: bool) -> None:
        """Keep the results of `first` on all ranks, until the first step of the next accumulation.

        Args:
            is_last: whether an update may follow.
        """
        self._found = found if self._found is None or self._is_over else torch.minimum(self._found, found)
        self._is_over = is_last

    def told(self) -> str:
        """Return a sentence about the first value of the last steps; "" before the first. The host waits for it."""
        places = [] if self._found is None else self._found.tolist()
        if not places:
            return ""
        if min(places) == INFINITY:
            return "All messages between places were finite: it came from a backward at the place of this parameter. "
        turn, micro_batch = divmod(int(min(places)), self._schedule.micro_batches)
        rank, chunks, across = places.index(min(places)), self._schedule.all_chunks, self._mesh.across
        if turn == chunks:
            what = f"the loss of micro-batch {micro_batch}"
        else:
            kind = Kind.RECEIVE_INPUT if turn < chunks else Kind.RECEIVE_GRADIENT
            chunk = turn if turn < chunks else 2 * chunks - turn
            what = Mail.name(kind, chunk, micro_batch, self._schedule.places)
        where = dataclasses.replace(across, rank=rank)
        return f"The first value of the step that was not finite was {what}, seen by {where}. "
