"""Rank 0 of many on one device: collectives that move the memory they would move, on a stream of their own.

Owns the process group for comparisons of libraries on one GPU. It must not know either library. Values mean nothing:
a gather fills the other ranks' parts with copies of this rank's, a sum over ranks is this rank's part alone.

Note: as NCCL
    A collective begins when the compute stream is where it was issued, runs beside it, and a wait orders the current
    stream after it; the host never waits. A gather writes its whole result, a reduction reads its whole input, in one
    kernel each. All collectives of a process follow one another, as those of one communicator do.
"""

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["one_of_many"]

BACKEND: Final = "one-of-many"


@final
class Issued:
    """A collective that was issued."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def is_completed(self) -> bool:
        """Tell whether the device has done it."""
        return self._event is None or bool(self._event.query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True


class OneOfMany(dist.ProcessGroup):  # type: ignore[misc]
    """The communicator, by the names that all releases of torch call."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._scratch = dict[torch.dtype, Tensor]()

    @property
    def group_name(self) -> str:
        """The name by which torch knows the group, which it tells only its own groups."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _issue(self, move: Any) -> Issued:
        if self._stream is None:
            move()
            return Issued(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        beside: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        with torch.no_grad(), beside:
            move()
            return Issued(self._stream.record_event())

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Issued:
        """Fill each rank's part with this rank's."""
        return self._issue(lambda: output.view(self._size, -1).copy_(given.view(1, -1).expand(self._size, -1)))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Issued:
        """Read all parts, and leave this rank's."""

        def move() -> None:
            rows = given.view(self._size, -1)
            scratch = self._scratch.get(given.dtype)
            if scratch is None or scratch.numel() < rows.shape[1]:
                scratch = self._scratch[given.dtype] = torch.empty_like(rows[0])
            torch.sum(rows, 0, out=scratch[: rows.shape[1]])
            output.view(-1).copy_(rows[self._rank])

        return self._issue(move)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Issued:
        """Leave the tensors as they are."""
        return self._issue(lambda: None)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Issued:
        """Leave the tensors as they are."""
        return self._issue(lambda: None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Issued:
        """Fill each rank's part with this rank's."""
        return self._issue(lambda: [part.copy_(inputs[0]) for part in outputs[0]])

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND


def one_of_many() -> dist.ProcessGroup:
    """Return a communicator of all ranks of the default process group, of which this one is there."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    return dist.new_group(backend=BACKEND)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> OneOfMany:
    return OneOfMany(rank, size)
