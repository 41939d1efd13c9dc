"""Updates of what lies in files: read, updated and written in pieces of one size, one after the other.

Owns the pieces of an update and their buffers. It must not know passes. Read `update/pieces.py` (what a piece is) and
`store/disk.py` first.

Note: a piece
    The masters of a bucket and each of its states are arrays with the same places, and a piece is the same stretch of
    all of them, whatever parameters begin and end in it: each part of a parameter is an entry of its own for the
    optimizer's body. That is right where an element's update depends on that element alone, so other optimizers are
    refused. Numbers that a state keeps once for a parameter, such as the count of steps, are copied for each piece of
    it, and what the last piece leaves is kept.
Note: three sets of buffers
    While a piece is updated, the next one is read and the one before is written. A set is filled again when the piece
    that used it was written, so memory does not grow with a model.
"""

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.gradient import part_of
from zeroshard.core.slot import slot_of
from zeroshard.describe.offload import written_bytes
from zeroshard.store.disk import BLOCK_BYTES, Disk, buffer_of
from zeroshard.store.stored import StoredTensor
from zeroshard.update.optimizer import ShardedOptimizer, is_cut
from zeroshard.update.pieces import Piece, Resident, keep_change

__all__ = ["Streams"]

Tensor = torch.Tensor
Key = tuple[Hashable, torch.dtype]
"""A state's name and dtype."""

SETS: Final = 3
PARAMETERS: Final = "parameters"
"""The buffers of new values of parameters; buffers of states are named by tuples."""


@final
class Streams:
    """What brings entries from a file: `ShardedOptimizer.source`.

    Args:
        per_element: states that the optimizer keeps for each element.
        staging_bytes: of all buffers together.
    """

    def __init__(self, engine: Engine, disk: Disk, per_element: int, staging_bytes: int) -> None:
        self._engine, self.disk = engine, disk
        self._set_bytes = staging_bytes // SETS
        self._per_element = per_element
        self._sets: list[dict[Hashable, Tensor]] = [{} for _ in range(SETS)]
        self._count = 0
        self.moving: set[Future[Any]] = set()
        """Reads and writes under way."""

    def begin(self) -> None:
        """See `Source`: pieces are read one ahead."""

    def check(self) -> None:
        """See `Source`."""
        self.disk.check()

    def pieces(self, sharded: ShardedOptimizer) -> Iterator[Piece]:
        """Yield first what is in memory, then the rest in the order of units."""
        wait(self.moving)  # after an exception, whose pieces nobody closed
        self.moving.clear()
        self.disk.check()
        groups = [group["params"] for group in sharded.optimizer.param_groups]
        here = [[master for master in group if not _is_filed(master)] for group in groups]
        if any(here):
            yield Resident(here)
        by_bucket: dict[Bucket, dict[int, tuple[int, Tensor]]] = {}
        for number, group in enumerate(groups):
            for master in group:
                if _is_filed(master):
                    slot = slot_of(master)
                    by_bucket.setdefault(slot.bucket, {})[slot.index] = number, master
        for bucket in sorted(by_bucket, key=lambda one: one.number):
            yield from self._of_bucket(sharded, bucket, by_bucket[bucket])

    def _of_bucket(self, sharded: ShardedOptimizer, bucket: Bucket, entries: dict[int, Any]) -> Iterator[Piece]:
        each_bytes = bucket.dtypes.master.itemsize * (1 + self._per_element) + written_bytes(bucket.spec)
        step = self._set_bytes // each_bytes // BLOCK_BYTES * BLOCK_BYTES
        first, stop = bucket.spec.states
        for start in range(0, stop - first, step := max(BLOCK_BYTES, step)):
            end = min(start + step, stop - first)
            parts = []
            for index, (number, master) in entries.items():
                a, b = (place - first for place in bucket.master_range(index))
                if max(a, start) < min(b, end):
                    parts.append(_Part(number, master, a, b, max(a, start), min(b, end)))
            if any(slot_of(part.master).has_grad for part in parts):
                yield Chunk(self, sharded, bucket, (start, end), parts, self._count % SETS)
                self._count += 1

    def buffer(self, number: int, key: Hashable, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer of a set for a state, or for masters, with any content."""
        made, nbytes = self._sets[number].get(key), numel * dtype.itemsize
        if made is None or made.numel() < nbytes:
            made = self._sets[number][key] = buffer_of(nbytes)
        return made

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for one in self._sets for buffer in one.values())

    @property
    def has_failed(self) -> bool:
        """See `Source`."""
        return bool(self.disk.failure)

    def agree(self, sharded: ShardedOptimizer) -> None:
        """See `Source`."""
        self._follow_here()
        failure, comm = self.disk.failure, self._engine.comm
        if comm.agree([int(not failure)], "whether states in files were updated")[0]:
            return
        sharded.put_back()
        texts = comm.texts(str(failure), "what failed")
        rank = next(rank for rank, text in enumerate(texts) if text)
        self.disk.failure = f"rank {rank}: {texts[rank]}"  # the same text on all ranks
        self.disk.check()

    def _follow_here(self) -> None:
        """Write parameters in the file whose masters are on the device."""
        # The groups of the optimizer are empty between the pieces and the end of the step.
        for bucket in (one for unit in self._engine.units for one in unit.buckets if one.has_states):
            try:
                bucket.follow_in_file()
            except RuntimeError:
                if not self.disk.failure:  # all ranks raise the failure of a disk
                    raise


@final
class _Part:
    """A part of a parameter in a piece: elements [start, stop) of the bucket's arrays, of the slice [first, last)."""

    def __init__(self, group: int, master: Tensor, first: int, last: int, start: int, stop: int) -> None:
        self.group, self.master, self.first, self.last, self.start, self.stop = group, master, first, last, start, stop


@final
class Chunk(Piece):
    """A stretch of a bucket's arrays.

    Args:
        bounds: elements [start, stop) of them.
        number: of the set of buffers.
    """

    def __init__(
        self,
        streams: Streams,
        sharded: ShardedOptimizer,
        bucket: Bucket,
        bounds: tuple[int, int],
        parts: Sequence[_Part],
        number: int,
    ) -> None:
        self._streams, self._sharded, self._bucket, self._parts = streams, sharded, bucket, parts
        (self._start, self._stop), self._number = bounds, number
        self._values: dict[Key | None, Tensor] = {}
        """The stretch in memory: of masters (None) and of states."""
        self._entries: list[tuple[_Part, Tensor, Tensor, Tensor]] = []
        """Parts, their entries, the held gradients and those that entries were given."""
        self._moving: list[Future[Any]] = []

    def start(self) -> None:
        """Begin to read masters, and the states that there are."""
        keys: dict[Key, None] = {}
        for part in self._parts:
            state = self._sharded.optimizer.state.get(part.master, {})
            keys |= {(key, value.dtype): None for key, value in state.items() if is_cut(key, value, part.master)}
        for key in (None, *keys):
            self._move(key, writes=False)

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        self._wait()
        groups: list[list[Tensor]] = [[] for _ in self._sharded.optimizer.param_groups]
        state = self._sharded.optimizer.state
        for part in self._parts:
            if not (slot := slot_of(part.master)).has_grad:
                continue
            here = slice(part.start - self._start, part.stop - self._start)
            entry = torch.nn.Parameter(self._values[None][here])
            grad = part_of(slot).as_subclass(torch.Tensor)[part.start - part.first : part.stop - part.first]
            entry.grad = given = grad.to(entry.device, entry.dtype)
            if before := state.get(part.master):
                state[entry] = {
                    key: self._values[key, value.dtype][here]
                    if is_cut(key, value, part.master)
                    else value.clone()
                    if isinstance(value, Tensor)
                    else value
                    for key, value in before.items()
                }
            groups[part.group].append(entry)
            self._entries.append((part, entry, grad, given))
        return groups

    def finish(self) -> None:
        """Round the masters into the parameters, and begin to write what was updated."""
        state = self._sharded.optimizer.state
        for part, entry, held, given in self._entries:
            keep_change(held, given, entry.grad)
            here, slot = slice(part.start - self._start, part.stop - self._start), slot_of(part.master)
            kept = {}
            for key, value in state.pop(entry, {}).items():
                kept[key] = value
                if is_cut(key, value, entry):
                    known = (key, value.dtype)
                    if known not in self._values:
                        # New to this optimizer's parameters; those of another in between may have it.
                        self._move(known, writes=False)
                        self._wait()
                    if (place := self._values[known][here]).data_ptr() != value.data_ptr():
                        place.copy_(value)
                    kept[key] = slot.bucket.room(slot.index, key, value.dtype)
            if part.stop == part.last and kept:
                state[part.master] = kept
        self._entries = []
        stored = self._bucket.follow_part(self._start, self._values[None])
        for key in self._values:
            self._move(key, writes=True)
        if stored is not None:
            self._write(stored, self._values[None])

    def close(self) -> None:
        """Wait until it is written."""
        self._wait()
        self._values = {}

    def _memory(self, key: Key | None) -> Tensor:
        dtype = self._bucket.dtypes.master if key is None else key[1]
        numel = self._stop - self._start
        buffer = self._streams.buffer(self._number, key, numel, dtype)
        return buffer[: numel * dtype.itemsize].view(dtype)

    def _move(self, key: Key | None, *, writes: bool) -> None:
        values = self._bucket.array(*(key or ()))
        assert isinstance(values, StoredTensor), "what lies in memory is no piece"
        if not writes:
            self._values[key] = self._memory(key)
        dtype = self._values[key].dtype
        buffer = self._streams.buffer(self._number, key, self._stop - self._start, dtype)
        move = self._streams.disk.submit(values.array.move, self._start, self._stop, buffer, writes)
        self._streams.moving.add(move)
        self._moving.append(move)

    def _write(self, part: Tensor, values: Tensor) -> None:
        """Begin to write new values of parameters in the file."""
        assert isinstance(part, StoredTensor), "a part in the file"
        buffer = self._streams.buffer(self._number, PARAMETERS, len(part), part.dtype)
        buffer[: part.nbytes].view(part.dtype).copy_(values)
        move = self._streams.disk.submit(part.array.put, part.start, part.start + len(part), buffer, True)
        self._streams.moving.add(move)
        self._moving.append(move)

    def _wait(self) -> None:
        moving, self._moving = self._moving, []
        wait(moving)
        self._streams.moving.difference_update(moving)
        for move in moving:
            move.result()


def _is_filed(master: Tensor) -> bool:
    return slot_of(master).bucket.spec.row.states.is_in_file and master.numel() > 0
