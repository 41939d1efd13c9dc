"""One exchange of a fragment between islands under way: messages, and the mean that arrives.

Owns the messages. It must not know when an exchange begins or ends. Read `formula.py` first.

Note: messages
    Between two islands, and where changes are rounded to few bits, every rank sends its message to each of its
    counterparts on the other islands (an all-gather), and each adds all of them in the order of islands. If there are
    more islands and changes are not rounded, each adds up a part, and the sums are gathered: fewer bytes, and the same
    bits where the transport adds in rank order. A vote goes with the messages: which step, and which exchange.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from zeroshard.outer import formula
from zeroshard.outer.fragments import Fragment
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.spec import BLOCK_NUMEL
from zeroshard.wire.comm import Channel, Comm, Pending, Tag, Vote

__all__ = ["Arrived", "Exchange", "is_finite"]

Tensor = torch.Tensor


@final
class Exchange:
    """The exchange of one fragment; creating it begins it.

    Args:
        comm: connects this rank with its counterparts, in the order of islands.
        number: counts the exchanges; equal on all islands.
        step: the step at which it begins; equal on all islands.

    Collective: every rank of all islands must create it. Each sends its message to the others: `codec.nbytes` of the
        fragment, or twice the fragment's bytes times (islands - 1) / islands.
    """

    def __init__(self, comm: Comm, fragment: Fragment, number: int, step: int) -> None:
        self.fragment, self.step, self._comm = fragment, step, comm
        self.what = f"exchange {number} between islands, of {fragment}, begun at step {step}"
        self._mean: Tensor | None = None
        # Votes are minima: a number and its negative say whether all are equal.
        numbers = [number for one in (step, fragment.number) for number in (one, -one)]
        self._vote: Vote = comm.post(numbers, self.what, Channel.OTHERS)
        tag = Tag(number, fragment.number, self.what)
        is_summed = comm.mesh.world_size > 2 and fragment.codec.is_summable
        self._finish: Callable[[], Tensor] | None = self._sum(tag) if is_summed else self._gather(tag)

    def _sum(self, tag: Tag) -> Callable[[], Tensor]:
        comm, numel = self._comm, self.fragment.numel
        islands = comm.mesh.world_size
        # Each island adds up an equal part.
        full = torch.zeros(-(-numel // islands) * islands, dtype=self.fragment.dtype, device=comm.mesh.device)
        full[:numel] = self.fragment.change()
        own = full.view(islands, -1)[comm.mesh.rank]
        pending = comm.reduce(full, own, self.fragment.codec, 1.0 / islands, tag)

        def finish() -> Tensor:
            pending.wait()
            comm.gather(full, tag).wait()
            return full[:numel]

        return finish

    def _gather(self, tag: Tag) -> Callable[[], Tensor]:
        fragment, mesh = self.fragment, self._comm.mesh
        change, numel = fragment.change(), fragment.codec.message_numel(fragment.numel)
        rows = torch.empty(mesh.world_size, numel, dtype=fragment.codec.dtype, device=mesh.device)
        formula.encoded(change, fragment.lost, fragment.codec, rows[mesh.rank])
        pending: Pending = self._comm.gather(rows.view(-1), tag)

        def finish() -> Tensor:
            pending.wait()
            mean = torch.empty(fragment.numel, dtype=fragment.dtype, device=rows.device)
            formula.mean_of(rows.unbind(), fragment.codec, len(rows), mean)
            return mean

        return finish

    def mean(self) -> Tensor:
        """Wait for the messages, drop them, and return (numel,): the mean change, equal on all islands.

        Raises:
            RankMismatchError: islands are at different exchanges.
        """
        if self._finish is not None:
            low = self._vote.read()
            if low[0] != -low[1] or low[2] != -low[3]:
                texts = self._comm.texts(self.what, "the exchanges of all islands")
                raise RankMismatchError(
                    f"{self._comm.mesh} Islands are at different exchanges:\n{self._comm.mesh.lines(texts)}\nEach "
                    "island must make the same number of steps between exchanges, and all call zero.finish() at the "
                    "same step."
                )
            self._mean, self._finish = self._finish().to(self.fragment.anchor.device), None
        assert self._mean is not None, "the messages are there"
        return self._mean


@final
@dataclass(frozen=True)
class Arrived:
    """An exchange that has begun before a checkpoint was saved, with its result.

    Args:
        what: description for errors.
        result: (numel,), the mean change.
    """

    fragment: Fragment
    step: int
    what: str
    result: Tensor

    def mean(self) -> Tensor:
        """See `Exchange`."""
        return self.result


def is_finite(values: Tensor) -> bool:
    """Return whether all elements of (n,) are finite, by a sum, which takes one pass and no memory; reads the device.

    The sum may overflow: if it is not finite, the elements are checked, some at a time.
    """
    return bool(values.sum().isfinite()) or all(bool(block.isfinite().all()) for block in values.split(BLOCK_NUMEL))
