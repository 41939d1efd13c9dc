"""Updates of what lies in files: read, updated and written in pieces of one size, one after the other.

Owns the pieces of an update and their buffers. It must not know passes. Read `optim/pieces.py` (what a piece is) and
`store/disk.py` first.

Note: a piece
    The masters of a bucket and each of its states are arrays with the same places, and a piece is the same stretch of
    all of them, whatever parameters begin and end in it: each part of a parameter is an entry of its own for the
    optimizer's body. That is right where an element's update depends on that element alone, so other optimizers are
    refused. Per-parameter scalars, such as step counts, are copied for each piece; the values after the last piece are
    kept.
Note: three sets of buffers
    While a piece is updated, the next one is read and the one before is written. A set is filled again when the piece
    that used it was written, so memory does not grow with a model.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.slices import plain_part
from zeroshard.core.slot import slot_of
from zeroshard.describe.offload import written_bytes
from zeroshard.optim.pieces import Piece, Resident
from zeroshard.store.disk import BLOCK_BYTES, buffer_of
from zeroshard.store.stored import StoredTensor
from zeroshard.store.stores import FileStore
from zeroshard.update.optimizer import is_cut
from zeroshard.update.sources import Lent, Source

__all__ = ["Files", "Streams"]

Tensor = torch.Tensor
Key = tuple[Hashable, torch.dtype]
"""A state's name and dtype."""

SETS: Final = 3
PARAMETERS: Final = "parameters"
"""The buffers of new values of parameters; buffers of states are named by tuples."""


@final
class Files:
    """What ranks must write to their files in an update: all of them, or it is an error on all."""

    def __init__(self, engine: Engine, store: FileStore) -> None:
        self._engine, self.disk, self.staging_bytes = engine, store.disk, store.place.staging_bytes

    @contextmanager
    def written(self) -> Iterator[None]:
        """Raise on exit, on every rank, if the file of one failed.

        Collective: an all-reduce of 8 bytes on exit; every rank must call.
        """
        try:
            yield
            self._follow()
        except RuntimeError:
            if not self.disk.failure:
                raise
        failure, comm = self.disk.failure, self._engine.comm
        if not comm.agree([int(not failure)], "whether states in files were updated")[0]:
            texts = comm.texts(str(failure), "what failed")
            rank = next(rank for rank, text in enumerate(texts) if text)
            self.disk.failure = f"rank {comm.mesh.numbers[rank]}: {texts[rank]}"  # the same text on all ranks
            self.disk.check()

    def _follow(self) -> None:
        """Write parameters in the file whose masters are on the device."""
        for bucket in (one for unit in self._engine.units for one in unit.buckets if one.has_states):
            bucket.follow_in_file()


@final
class Streams(Source):
    """Updates of what lies in a file, and at once of the rest.

    Args:
        per_element: states that the optimizer keeps for each element.
    """

    def __init__(self, files: Files, optimizer: torch.optim.Optimizer, per_element: int) -> None:
        self.files, self.optimizer, self.disk = files, optimizer, files.disk
        self._set_bytes, self._per_element = files.staging_bytes // SETS, per_element
        self._sets: list[dict[Hashable, Tensor]] = [{} for _ in range(SETS)]
        self._count = 0
        """Chunks so far, which take the sets of buffers in turn."""
        self.moving: set[Future[Any]] = set()
        """Reads and writes under way."""

    @contextmanager
    def update(self) -> Iterator[Iterable[Piece]]:
        """See `Source`."""
        wait(self.moving)  # after an exception, whose pieces nobody closed
        self.moving.clear()
        self.check()
        with self.files.written():
            yield self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        """Yield first what is in memory, then the rest in the order of units."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        here, by_bucket = [list[Tensor]() for _ in groups], dict[Bucket, list[tuple[int, Tensor]]]()
        for number, master in ((number, master) for number, group in enumerate(groups) for master in group):
            if (bucket := slot_of(master).bucket).spec.is_updated_in_pieces and master.numel():
                by_bucket.setdefault(bucket, []).append((number, master))
            else:
                here[number].append(master)
        if any(here):
            yield Resident(here)
        for bucket in sorted(by_bucket, key=lambda one: one.number):
            yield from self._chunks(bucket, by_bucket[bucket])

    def _chunks(self, bucket: Bucket, entries: Sequence[tuple[int, Tensor]]) -> Iterator[Piece]:
        """Yield the stretches of a bucket's arrays with a gradient, each as long as a set of buffers."""
        each_bytes = bucket.dtypes.master.itemsize * (1 + self._per_element) + written_bytes(bucket.spec)
        step = max(BLOCK_BYTES, self._set_bytes // each_bytes // BLOCK_BYTES * BLOCK_BYTES)
        first, stop = bucket.spec.states
        for start in range(0, stop - first, step):
            end = min(start + step, stop - first)
            parts = []
            for number, master in entries:
                a, b = (place - first for place in bucket.master_range(slot_of(master).index))
                if max(a, start) < min(b, end):
                    parts.append(_Part(number, master, a, b, max(a, start), min(b, end)))
            if any(slot_of(part.master).has_grad for part in parts):
                yield Chunk(self, bucket, (start, end), parts, self._count % SETS)
                self._count += 1

    def buffer(self, number: int, key: Hashable, nbytes: int) -> Tensor:
        """Return a buffer of a set, for masters, a state or parameters, with any content."""
        made = self._sets[number].get(key)
        if made is None or made.numel() < nbytes:
            made = self._sets[number][key] = buffer_of(nbytes)
        return made

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for one in self._sets for buffer in one.values())


@final
class _Part(NamedTuple):
    """The part of a slice in a chunk.

    Args:
        group: the index of the slice's group.
        first, last: the elements [first, last) of the bucket's arrays that the slice stands for.
        start, stop: those of them in the chunk.
    """

    group: int
    master: Tensor
    first: int
    last: int
    start: int
    stop: int


@final
class Chunk(Piece):
    """A stretch of a bucket's arrays.

    Args:
        bounds: elements [start, stop) of them.
        number: of the set of buffers.
    """

    def __init__(
        self, streams: Streams, bucket: Bucket, bounds: tuple[int, int], parts: Sequence[_Part], number: int
    ) -> None:
        self._streams, self._bucket, self._parts, self._number = streams, bucket, parts, number
        self._start, self._stop = bounds
        self._values: dict[Key | None, Tensor] = {}
        """The stretch in memory: of masters (None) and of states."""
        self._lent: list[tuple[_Part, Lent]] = []
        self._moving: list[Future[Any]] = []

    def start(self) -> None:
        """Begin to read masters, and the states that there are."""
        keys: dict[Key, None] = {}
        for part in self._parts:
            state = self._streams.optimizer.state.get(part.master, {})
            keys |= {(key, value.dtype): None for key, value in state.items() if is_cut(key, value, part.master)}
        for key in (None, *keys):
            self._move(key, writes=False)

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        self._wait()
        groups: list[list[Tensor]] = [[] for _ in self._streams.optimizer.param_groups]
        state = self._streams.optimizer.state
        for part in self._parts:
            if not (slot := slot_of(part.master)).has_grad:
                continue
            here = slice(part.start - self._start, part.stop - self._start)
            grad = plain_part(slot)[part.start - part.first : part.stop - part.first]
            one = Lent(part.master, self._values[None][here], grad)
            if before := state.get(part.master):
                state[one.entry] = {key: self._part_of(key, value, part.master, here) for key, value in before.items()}
            groups[part.group].append(one.begin())
            self._lent.append((part, one))
        return groups

    def _part_of(self, key: str, value: Any, master: Tensor, here: slice) -> Any:
        """Return a state of a slice for its part in this chunk: its elements, or a copy of what it is once."""
        if is_cut(key, value, master):
            return self._values[key, value.dtype][here]
        return value.clone() if isinstance(value, Tensor) else value

    def finish(self) -> None:
        """Round the masters into the parameters, and begin to write what was updated."""
        for part, one in self._lent:
            one.end()
            kept = self._keep(part, one.entry)
            if part.stop == part.last and kept:
                self._streams.optimizer.state[part.master] = kept
        self._lent = []
        masters = self._values[None]
        target = self._bucket.follow_part(self._start, masters)
        for key in self._values:
            self._move(key, writes=True)
        if target is not None:
            assert isinstance(target, StoredTensor), "a part in the file"
            buffer = self._streams.buffer(self._number, PARAMETERS, target.nbytes)
            buffer[: target.nbytes].view(target.dtype).copy_(masters)
            self._submit(target, target.array.put, target.start, target.start + len(target), buffer, writes=True)

    def _keep(self, part: _Part, entry: Tensor) -> dict[str, Any]:
        """Take what the optimizer has left as states of an entry; return the states of its slice."""
        slot, here = slot_of(part.master), slice(part.start - self._start, part.stop - self._start)
        kept = {}
        for key, value in self._streams.optimizer.state.pop(entry, {}).items():
            kept[key] = value
            if is_cut(key, value, part.master, entry):
                known = (key, value.dtype)
                if known not in self._values:
                    # New to this optimizer's parameters; those of another in between may have it.
                    self._move(known, writes=False)
                    self._wait()
                if (place := self._values[known][here]).data_ptr() != value.data_ptr():
                    place.copy_(value)
                kept[key] = slot.bucket.room(slot.index, key, value.dtype)
        return kept

    def close(self) -> None:
        """Wait until it is written."""
        self._wait()
        self._values = {}

    def _move(self, key: Key | None, *, writes: bool) -> None:
        """Begin to read or write the stretch of masters, or of a state."""
        values = self._bucket.array(*(key or ()))
        assert isinstance(values, StoredTensor), "what lies in memory is no piece"
        numel, dtype = self._stop - self._start, values.dtype
        buffer = self._streams.buffer(self._number, key, numel * dtype.itemsize)
        self._values[key] = buffer[: numel * dtype.itemsize].view(dtype)
        self._submit(self._values[key], values.array.move, self._start, self._stop, buffer, writes=writes)

    def _submit(self, values: Tensor, move: Any, start: int, stop: int, buffer: Tensor, *, writes: bool) -> None:
        self._bucket.tell("write" if writes else "read", values.nbytes)
        future = self._streams.files.disk.submit(move, start, stop, buffer, writes)
        self._streams.moving.add(future)
        self._moving.append(future)

    def _wait(self) -> None:
        moving, self._moving = self._moving, []
        wait(moving)
        self._streams.moving.difference_update(moving)
        for move in moving:
            move.result()
