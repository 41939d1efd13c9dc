"""Tensors, their ranges in files, and the headers of tensor files.

Owns the arithmetic of the format, in columns of numbers: a checkpoint may have a million tensors. It must not know
ranks, or how any of it is written down. Read `manifest.py` ("the folder") first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zeroshard.checkpoint.fields import MAX_INTEGER, Value, quoted
from zeroshard.table.errors import CheckpointError

__all__ = [
    "Chunk",
    "Chunks",
    "ENTRY_BYTES",
    "ITEM_BYTES",
    "MAX_HEADER_BYTES",
    "Spec",
    "Type",
    "arrange",
    "make_header",
    "parse_type",
]

MAX_HEADER_BYTES: Final = 16 << 20
"""Longest table of a tensor file that is read; other readers of safetensors stop at 100 MB."""

ITEM_BYTES: Final = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "I64": 8,
        "U64": 8,
        "F64": 8,
        "C64": 8,
    }
)
"""Bytes of one element, by the safetensors name of its dtype."""

KINDS: Final = ("model", "state", "rng", "outer")
MAX_DIMS: Final = 64
Column = NDArray[np.int64]
Type = tuple[str, str, tuple[int, ...], tuple[int, ...]]
"""Kind, dtype, shape and order, which many tensors have in common."""


_POWERS: Final = tuple(10**n for n in range(1, 19))
_MAX_FILE_BYTES: Final = 2**62
_ENTRY: Final = '{}@{}":{{"data_offsets":[{},{}],"dtype":"{}","shape":[{}]}}'
_ENTRY_MARKS: Final = 45
ENTRY_BYTES: Final = _ENTRY_MARKS + 4 * 19 + 9
"""Most bytes of a tensor in a file's table, beside its name: four numbers, and the longest dtype."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor: what it is, and how its elements are counted.

    Args:
        kind: "model" (parameter or buffer), "state", "rng", or "outer" (what an island has besides; `islands.py`).
        name: the parameter's, or of a state what `join_state` returns, or "rng/<rank>/<generator>".
        dtype: its safetensors name.
        order: dimensions from the slowest to the fastest in memory; empty where that is row-major.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of tensor `tensor` (its place in the manifest)."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunks:
    """Every chunk of every file, as columns, (chunks,) int64, ordered by tensor and by element.

    Args:
        file: place of the file among `tensor_files`.
        offset: where the chunk begins in its file's data, in bytes.
        first: (tensors + 1,), chunks [first[t], first[t + 1]) are of tensor t.
        header_bytes: (files,), what stands before the data of each file.
        data_bytes: (files,).
    """

    tensor: Column
    start: Column
    stop: Column
    file: Column
    offset: Column
    first: Column
    header_bytes: Column
    data_bytes: Column

    def of_file(self, place: int) -> Column:
        """Return which chunks are in a file, in the order in which they lie there."""
        found = np.flatnonzero(self.file == place)
        return found[np.argsort(self.offset[found], kind="stable")]


def arrange(tensors: Sequence[Spec], files: Sequence[str], columns: Sequence[Sequence[int]], where: str) -> Chunks:
    """Return where each chunk lies.

    Args:
        files: the tensor files, sorted.
        columns: of each chunk its file, tensor, start and stop; of one file in the order in which they lie there.

    Raises:
        CheckpointError: an element is not in exactly one file of its kind, or a file's table would be too long.
    """
    file, tensor, start, stop = (np.asarray(column, dtype=np.int64) for column in columns)
    if tensor.size and int(tensor.max()) >= len(tensors):
        raise CheckpointError(f"{where}: a file holds tensor {int(tensor.max())} of {len(tensors)}.")
    is_model = np.array([spec.kind == "model" for spec in tensors], dtype=bool)
    holds_model = np.array([name.startswith("params") for name in files], dtype=bool)
    if (wrong := np.flatnonzero(is_model[tensor] != holds_model[file])).size:
        name = quoted(tensors[int(tensor[wrong[0]])].name)
        raise CheckpointError(f"{where}: {files[int(file[wrong[0]])]} holds {name} of another kind.")
    order = np.lexsort((start, tensor))
    _check_cover(tensors, tensor[order], start[order], stop[order], where)
    item_bytes = np.array([spec.item_bytes for spec in tensors], dtype=np.int64)
    numel = stop - start
    nbytes = numel * item_bytes[tensor]
    by_file = np.argsort(file, kind="stable")
    data_bytes = np.bincount(file, weights=nbytes, minlength=len(files))
    if data_bytes.size and data_bytes.max() >= _MAX_FILE_BYTES:
        raise CheckpointError(f"{where}: {files[int(data_bytes.argmax())]} would have 2^62 bytes or more.")
    # The sum over all files may wrap around; the differences within one file are right all the same.
    ends = np.cumsum(nbytes[by_file])
    firsts = np.searchsorted(file[by_file], np.arange(len(files)))
    before = np.concatenate(([0], ends))[firsts]
    offset = np.empty_like(nbytes)
    offset[by_file] = ends - nbytes[by_file] - before[file[by_file]]
    names = np.array([len(encode_basestring_ascii(spec.name)) - 1 for spec in tensors], dtype=np.int64)
    dtypes = np.array([len(spec.dtype) for spec in tensors], dtype=np.int64)
    entry = names[tensor] + dtypes[tensor] + _ENTRY_MARKS + sum(map(_digits, (start, offset, offset + nbytes, numel)))
    header = 1 + np.bincount(file, weights=entry + 1, minlength=len(files)).astype(np.int64)
    header = np.maximum(header, 2)
    header += -header % 8 + 8
    if header.size and header.max() > MAX_HEADER_BYTES:
        name, most = files[int(header.argmax())], int(header.max())
        raise CheckpointError(
            f"{where}: the table of {name} would have {most} bytes; at most {MAX_HEADER_BYTES} are read."
        )
    first = np.searchsorted(tensor[order], np.arange(len(tensors) + 1))
    exact = np.zeros(len(files), dtype=np.int64)
    np.add.at(exact, file, nbytes)
    return Chunks(tensor[order], start[order], stop[order], file[order], offset[order], first, header, exact)


def _digits(numbers: Column) -> Column:
    """Return how many decimal digits numbers have."""
    return np.searchsorted(np.array(_POWERS, dtype=np.int64), numbers, side="right") + 1


def _check_cover(tensors: Sequence[Spec], tensor: Column, start: Column, stop: Column, where: str) -> None:
    """Raise unless every element of every tensor is in exactly one chunk; they are sorted."""
    expected = np.zeros_like(start)
    expected[1:] = np.where(tensor[1:] == tensor[:-1], stop[:-1], 0)
    is_wrong = (start != expected) | (stop <= start)
    if (found := np.flatnonzero(is_wrong)).size:
        first, end = int(start[found[0]]), int(expected[found[0]])
        name = quoted(tensors[int(tensor[found[0]])].name)
        what = "twice" if first < end else "in no file"
        raise CheckpointError(f"{where}: elements {min(first, end)} to {max(first, end)} of {name} are {what}.")
    ends = np.zeros(len(tensors), dtype=np.int64)
    is_last = np.concatenate((tensor[1:] != tensor[:-1], [True]))[: len(tensor)]
    ends[tensor[is_last]] = stop[is_last]
    numels = np.array([spec.numel for spec in tensors], dtype=np.int64)
    if (found := np.flatnonzero(ends != numels)).size:
        place = int(found[0])
        raise CheckpointError(
            f"{where}: {quoted(tensors[place].name)} has {int(numels[place])} elements, and its chunks have "
            f"{int(ends[place])}."
        )


def parse_type(value: Value, kind: Value, dtype: Value, shape: Value, order: Value | None = None) -> Type:
    """Return kind, dtype, shape and order of a tensor.

    Raises:
        CheckpointError: the description is invalid.
    """
    if kind.text() not in KINDS or dtype.text() not in ITEM_BYTES:
        raise value.fail(f"a kind of {', '.join(KINDS)} and a dtype of {', '.join(ITEM_BYTES)}")
    sizes, dims = tuple(shape.integers()), tuple(order.integers()) if order is not None else ()
    if len(sizes) > MAX_DIMS or (dims and sorted(dims) != list(range(len(sizes)))):
        raise value.fail(f"an order of {len(sizes)} dimensions (at most {MAX_DIMS})")
    if prod(max(1, n) for n in sizes) * ITEM_BYTES[dtype.text()] > MAX_INTEGER:
        raise value.fail("a tensor of less than 2^63 bytes")
    return kind.text(), dtype.text(), sizes, dims


def make_header(tensors: Sequence[Spec], chunks: Chunks, place: int) -> Iterator[bytes]:
    """Yield the beginning of a safetensors file in pieces: the length of the table, and the table."""
    found, nbytes = chunks.of_file(place), int(chunks.header_bytes[place])
    # In pieces, of which each is made when it is due: the whole would take several times the memory.
    yield (nbytes - 8).to_bytes(8, "little")
    tensor, start = chunks.tensor[found].tolist(), chunks.start[found].tolist()
    keys = [f"{tensors[t].name}@{first}" for t, first in zip(tensor, start, strict=True)]
    done, mark = 0, "{"
    for several in np.array_split(sorted(range(len(keys)), key=keys.__getitem__), len(keys) // 256 + 1):
        text = ""
        for place in several.tolist():
            spec, chunk = tensors[tensor[place]], found[place]
            offset, numel = int(chunks.offset[chunk]), int(chunks.stop[chunk]) - start[place]
            name = encode_basestring_ascii(spec.name)[:-1]
            end = offset + numel * spec.item_bytes
            text += mark + _ENTRY.format(name, start[place], offset, end, spec.dtype, numel)
            mark = ","
        done += len(text)
        yield text.encode()
    end = "}" if mark == "," else "{}"
    yield end.encode() + b" " * (nbytes - 8 - done - len(end))
