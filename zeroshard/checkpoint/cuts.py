"""Parameters that are split over the mesh's axis "tensor": where this rank's elements lie in the whole tensor.

Owns that arithmetic, and the exchange of whole rows before they are written. It must not know files or optimizers.

Note: rows
    A tensor that is split along a dimension is a list of rows, one for each index of the dimensions before it and each
    group of the dimension (`groups_of` in torch_private.py). A row has one block of each rank along "tensor". A rank
    holds a range of its own blocks, so its elements are scattered over the whole tensor in as many pieces as rows.
    Written like that, a checkpoint would have an entry for each row. Ranks along "tensor" therefore exchange the rows
    of which they hold each block, and each writes an equal share of whole rows. The incomplete rows at both ends of a
    range, and tensors of a single row, are written without an exchange.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from zeroshard.checkpoint.values import PIECE_NUMEL, dtype_of
from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot, slot_of
from zeroshard.table.layout import Layout, plan_layout
from zeroshard.wire.comm import Tag
from zeroshard.wire.mesh import Mesh

__all__ = ["Cut", "Part", "RowExchange", "cut_of", "layouts_of", "ranks_here", "writers_of"]

Tensor = torch.Tensor
WHAT: Final = "the rows of split parameters"


Ranges = Sequence[tuple[int, int]]
"""For each place along "tensor", elements [start, stop) of the part of the rank there."""


@final
@dataclass(frozen=True)
class Cut:
    """The split of one tensor over ranks, in the order in which its elements lie in memory.

    Args:
        rows: number of rows.
        blocks: for each place along "tensor", the number of elements that the rank there has of a row.
        place: place of this rank among them.
    """

    rows: int
    blocks: tuple[int, ...]
    place: int

    @property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.blocks)

    @property
    def block(self) -> int:
        """Number of elements that this rank has of a row."""
        return self.blocks[self.place]

    @property
    def row_numel(self) -> int:
        """Number of elements of a whole row."""
        return sum(self.blocks)

    def whole_rows(self, ranges: Ranges) -> range:
        """Return the rows whose blocks lie in the ranges of all ranks, to be exchanged."""
        first = max(-(-start // block) for block, (start, _) in zip(self.blocks, ranges, strict=True))
        last = min(stop // block for block, (_, stop) in zip(self.blocks, ranges, strict=True))
        return range(first, max(first, last) if self.rows > 1 else first)

    def chunks(self, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
        """Yield who writes what of the elements in `ranges`: a place, and elements of the tensor."""
        whole = self.whole_rows(ranges)
        for place, (start, stop) in enumerate(ranges):
            block = self.blocks[place]
            if not whole:
                yield from self._pieces(place, start, stop)
                continue
            yield from self._pieces(place, start, whole.start * block)
            yield from self._pieces(place, whole.stop * block, stop)
            if own := self.share(whole, place):
                yield place, own.start * self.row_numel, own.stop * self.row_numel

    def share(self, whole: range, place: int) -> range:
        """Return the rows that a rank writes."""
        return whole[place * len(whole) // self.count : (place + 1) * len(whole) // self.count]

    def _pieces(self, place: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        block = self.blocks[place]
        while start < stop:
            row = start // block
            end, moved = min(stop, (row + 1) * block), self._moved(row, place)
            yield place, start + moved, end + moved
            start = end

    def _before(self, place: int) -> int:
        """Return the number of elements of a row in front of the block of the rank at `place`."""
        return sum(self.blocks[:place])

    def _moved(self, row: int, place: int) -> int:
        """Return how much later the elements of a block lie in the tensor than in the part of the rank at `place`."""
        return row * (self.row_numel - self.blocks[place]) + self._before(place)

    def is_block(self, start: int, stop: int) -> bool:
        """Return whether a chunk [start, stop) is a block of this rank or a part of one, and not whole rows."""
        return stop - start <= self.block

    def local(self, element: int) -> int:
        """Return the element of this rank's part that is an element of the tensor."""
        return element - self._moved(element // self.row_numel, self.place)

    def reads(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield how to read elements [start, stop) of this rank's part: some of them, and elements of the tensor.

        The elements of the tensor are either exactly those, or whole rows that contain them; at most a million of
        whole rows at a time.
        """
        at_once = PIECE_NUMEL // self.row_numel
        while start < stop:
            row = start // self.block
            if self.rows == 1 or not at_once:
                end = min(stop, (row + 1) * self.block)
                moved = self._moved(row, self.place)
                yield start, end, start + moved, end + moved
            else:
                end = min(stop, (row + at_once) * self.block)
                yield start, end, row * self.row_numel, -(-end // self.block) * self.row_numel
            start = end

    def pick(self, values: Tensor, first: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of this rank's part from what `reads` asked for.

        Args:
            first: the element of the tensor at which `values` begins.
        """
        if values.numel() == stop - start:
            return values
        before = first // self.row_numel * self.block
        return self._own(values)[start - before : stop - before]

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole tensor, flat, whose elements lie in the order of the split."""
        return self._own(whole.reshape(-1))

    def _own(self, rows: Tensor) -> Tensor:
        """Return this rank's blocks of whole rows; both flat."""
        return rows.view(-1, self.row_numel).narrow(1, self._before(self.place), self.block).reshape(-1)


def cut_of(slot: Slot, order: tuple[int, ...], mesh: Mesh) -> Cut | None:
    """Return how a parameter is split over the axis "tensor"; None if each rank has the whole.

    Args:
        order: dimensions from the slowest to the fastest in memory; empty for row-major.
    """
    whole, local = tuple(slot.shape), slot.bucket.places.shapes[slot.index]
    dims = order or range(len(whole))
    split = next((at for at, dim in enumerate(dims) if whole[dim] != local[dim]), None)
    if split is None:
        return None
    groups, ranks = slot.form.groups, mesh.tensor_ranks
    size = whole[dims[split]] // groups
    step, behind = -(-size // len(ranks)), math.prod(local[dim] for dim in dims[split + 1 :])
    blocks = tuple(min(step, size - at) * behind for at in range(0, step * len(ranks), step))
    return Cut(math.prod(whole[dim] for dim in dims[:split]) * groups, blocks, ranks.index(mesh.rank))


def layouts_of(bucket: Bucket, mesh: Mesh) -> list[Layout]:
    """Return the layout of a bucket at each place along "tensor". They differ where a dimension is split unevenly."""
    cuts = [
        (numel, cut_of(slot_of(p), (), mesh)) for numel, p in zip(bucket.layout.numels, bucket.parameters, strict=True)
    ]
    spec, found = bucket.spec, []
    for place in range(len(mesh.tensor_ranks)):
        numels = [numel if cut is None else cut.rows * cut.blocks[place] for numel, cut in cuts]
        found.append(plan_layout(numels, bucket.layout.itemsize, bucket.layout.world_size, spec.replicas))
    return found


def ranks_here(mesh: Mesh) -> list[int]:
    """Return the ranks of the mesh as all places of a pipe count them; without a pipe all ranks."""
    places = {number: rank for rank, number in enumerate(mesh.across.numbers)}
    return [places[number] for number in mesh.numbers]


def writers_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the ranks that write, those of the first replica, by their places along "tensor" and along "shard".

    All places of a pipe count them.
    """
    by_shard, here = mesh.rows("shard").tolist(), ranks_here(mesh)
    rows = [next(row for row in by_shard if rank in row) for rank in mesh.rows("tensor")[0].tolist()]
    return [tuple(here[rank] for rank in row) for row in rows]


@final
@dataclass(frozen=True)
class Part:
    """A tensor that is split, of which ranks along "tensor" exchange whole rows.

    Args:
        index: place of the tensor among all that are saved.
        ranges: the elements that these ranks write.
        values: returns elements [start, stop) of this rank's part, flat, which may lie in a file.
        dtype: their safetensors name.
    """

    index: int
    cut: Cut
    ranges: Ranges
    dtype: str
    values: Callable[[int, int], Tensor]


@final
class RowExchange:
    """The exchange of whole rows of all split tensors of a save, a piece at a time.

    Every rank along "tensor" makes all exchanges in the same order, whatever it writes of them, and also if it failed:
    the others wait for it. Use as a context manager around the writing.

    Collective: all-gathers along "tensor" of the elements of whole rows; the ranks along the axis must use the same
        parts.
    """

    def __init__(self, engine: Engine, parts: Sequence[Part]) -> None:
        self._engine = engine
        self._failure: Exception | None = None
        # Also on a rank that exchanges nothing: ranks count alike.
        self._number = engine.order.next_number()
        self._pieces = self._exchange(parts)

    def __enter__(self) -> "RowExchange":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for _ in self._pieces:
            pass
        if kind is None and self._failure is not None:
            raise self._failure

    def rows(self, index: int, numel: int) -> Iterator[Tensor]:
        """Yield the whole rows of a tensor that this rank writes, flat, in pieces of `numel` elements together."""
        while numel:
            place, piece = next(self._pieces)
            if place == index and piece.numel():
                numel -= piece.numel()
                yield piece

    def _exchange(self, parts: Sequence[Part]) -> Iterator[tuple[int, Tensor]]:
        comm, device, turn = self._engine.comm, self._engine.mesh.device, 0
        for part in parts:
            cut, whole = part.cut, part.cut.whole_rows(part.ranges)
            own, at_once = cut.share(whole, cut.place), max(1, PIECE_NUMEL // cut.row_numel)
            for first in range(whole.start, whole.stop, at_once):
                last = min(first + at_once, whole.stop)
                shape = cut.count, last - first, max(cut.blocks)
                full = torch.zeros(shape, dtype=dtype_of(part.dtype), device=device)
                try:
                    full[cut.place, :, : cut.block] = part.values(first * cut.block, last * cut.block).view(
                        -1, cut.block
                    )
                except Exception as error:  # any error: the other ranks wait for this rank's rows
                    self._failure = self._failure or error
                comm.gather(full.view(-1), Tag(self._number, turn % Tag.BUCKETS, WHAT), "state", "tensor").wait()
                turn += 1
                mine = slice(max(own.start, first) - first, max(min(own.stop, last), first) - first)
                blocks = [rows[mine, :block] for rows, block in zip(full, cut.blocks, strict=True)]
                yield part.index, torch.cat(blocks, 1).view(-1)
