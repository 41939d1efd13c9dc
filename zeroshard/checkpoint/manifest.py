"""What a checkpoint says about itself: tensors, the ranges of them that each file holds, checksums.

Owns the format: names of files, the manifest's text, the layout of a tensor file. It opens nothing; `reader.py` does.
A manifest that was parsed is consistent: names stay inside the folder, sizes add up, every element is there once.

Note: the folder
    step-00001000/
      params-00001-of-00004.safetensors   parameters (their master values) and buffers
      optim-00001-of-00004.safetensors    the optimizers' states, and the random generators of the rank
      extra.json                          what the program gave to save, hyper-parameters, versions
      manifest.json                       written last; its last line is the checksum of all before it
    A tensor file is in the safetensors format. It holds flat ranges: the key "<name>@<start>" has elements
    `[start, start + n)` of the tensor, as it lies in memory. `order` lists the dimensions from the slowest to the
    fastest where that is not row-major. Nothing of the number of ranks, of a stage or of padding is stored, so any run
    reads what any other wrote: it looks for the ranges that meet its own.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Final

from zeroshard.checkpoint import strict
from zeroshard.core.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "Chunk",
    "EXTRA",
    "FORMAT",
    "FileEntry",
    "ITEM_BYTES",
    "LATEST",
    "MANIFEST",
    "Manifest",
    "Spec",
    "VERSION",
    "file_name",
    "is_own_name",
    "make_header",
    "parse",
    "seal",
    "serialize",
    "unseal",
]

FORMAT: Final = "zeroshard checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
EXTRA: Final = "extra.json"
LATEST: Final = "LATEST"
BLOCK_BYTES: Final = 4 << 20
"""Bytes that one checksum covers."""

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

KINDS: Final = ("model", "state", "rng")
_FILE_NAME = re.compile(r"(params|optim)-(\d{5})-of-(\d{5})\.safetensors")
_LAST_LINE = re.compile(rb"\n\{\"crc32\":(\d{1,10})\}\n")
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor: what it is, and how its elements are counted.

    Args:
        kind: "model" (parameter or buffer), "state" or "rng".
        name: the parameter's, or "<optimizer>/<key>/<parameter>", or "rng/<rank>/<generator>".
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
class FileEntry:
    """One file: its size, the checksum of each `BLOCK_BYTES` of it, and what it holds, in order."""

    nbytes: int
    crc32: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description of itself.

    Args:
        aliases: other names of tied parameters, each with the name under which it is stored; None where it was made of
            files that do not say.
        software: versions that wrote it, for people.
        expires: whether retention may remove it once newer ones are there.
    """

    step: int
    world_size: int
    tensors: tuple[Spec, ...]
    aliases: Mapping[str, str] | None
    files: Mapping[str, FileEntry]
    software: Mapping[str, str] = field(default_factory=dict)
    expires: bool = False

    def place_of(self, file: str) -> list[tuple[Chunk, int]]:
        """Return the chunks of a file with the offset of each in bytes."""
        entry = self.files[file]
        offset = len(make_header(self.tensors, entry.chunks))
        placed = []
        for chunk in entry.chunks:
            placed.append((chunk, offset))
            offset += (chunk.stop - chunk.start) * self.tensors[chunk.tensor].item_bytes
        return placed


def file_name(kind: str, rank: int, world_size: int) -> str:
    """Return the name of the file in which a rank writes tensors of a kind."""
    return f"{'params' if kind == 'model' else 'optim'}-{rank + 1:05}-of-{world_size:05}.safetensors"


def is_own_name(name: str) -> bool:
    """Tell whether a file of this name would belong to some checkpoint."""
    return name in (EXTRA, MANIFEST) or _FILE_NAME.fullmatch(name) is not None


def make_header(tensors: Sequence[Spec], chunks: Sequence[Chunk]) -> bytes:
    """Return the beginning of a safetensors file: the length of the table, and the table."""
    # As texts, not as objects, which would take several times the memory: the manifest may be hostile.
    entries, offset = [], 0
    for chunk in chunks:
        spec, numel = tensors[chunk.tensor], chunk.stop - chunk.start
        end, key = offset + numel * spec.item_bytes, f"{spec.name}@{chunk.start}"
        value = f'{{"data_offsets":[{offset},{end}],"dtype":"{spec.dtype}","shape":[{numel}]}}'
        entries.append((key, f"{json.dumps(key)}:{value}"))
        offset = end
    text = f"{{{','.join(entry for _, entry in sorted(entries))}}}".encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# -- text -------------------------------------------------------------------------------------------------------------


def serialize(manifest: Manifest) -> bytes:
    """Return the manifest's text, its checksum included.

    Raises:
        CheckpointError: it would not be read back: chunks that leave gaps, names that are there twice.
    """
    tensors = [
        [spec.kind, spec.name, spec.dtype, list(spec.shape), *([list(spec.order)] if spec.order else [])]
        for spec in manifest.tensors
    ]
    files = {
        name: {
            "bytes": entry.nbytes,
            "chunks": [[chunk.tensor, chunk.start, chunk.stop] for chunk in entry.chunks],
            "crc32": list(entry.crc32),
        }
        for name, entry in manifest.files.items()
    }
    text = strict.dumps(
        {
            "aliases": None if manifest.aliases is None else dict(manifest.aliases),
            "expires": manifest.expires,
            "files": files,
            "format": FORMAT,
            "software": dict(manifest.software),
            "step": manifest.step,
            "tensors": tensors,
            "version": VERSION,
            "world_size": manifest.world_size,
        },
        MANIFEST,
    )
    data = seal(text)
    parse(data, MANIFEST)
    return data


def seal(text: bytes) -> bytes:
    """Return a text with its checksum as the last line."""
    return text + b'\n{"crc32":%d}\n' % zlib.crc32(text)


def parse(data: bytes, where: str) -> Manifest:
    """Return the manifest of a text.

    Args:
        where: the file's name, for messages.

    Raises:
        CheckpointError: the text is damaged, of another format, or contradicts itself.
    """
    value = _Value(strict.loads(unseal(data, where), where), where)
    if value.get("format").value != FORMAT:
        raise CheckpointError(f"{where}: is no manifest of a {FORMAT}.")
    if (version := value.get("version").integer()) != VERSION:
        raise CheckpointError(f"{where}: is of format version {version}; this zeroshard reads version {VERSION}.")
    value.has_keys("aliases", "expires", "files", "format", "software", "step", "tensors", "version", "world_size")
    world_size = value.get("world_size").integer()
    _check_files(value.get("files").keys(), world_size, where)
    manifest = Manifest(
        value.get("step").integer(),
        world_size,
        tuple(_parse_spec(item) for item in value.get("tensors").items()),
        _parse_aliases(value.get("aliases")),
        {name: _parse_file(name, item) for name, item in value.get("files").entries()},
        value.get("software").texts(),
        value.get("expires").boolean(),
    )
    _check_names(manifest, where)
    _check_cover(manifest, where)
    _check_sizes(manifest, where)
    return manifest


def unseal(data: bytes, where: str) -> bytes:
    """Return the text that was sealed.

    Raises:
        CheckpointError: it is damaged.
    """
    end = data.rfind(b"\n", 0, -1)
    match = _LAST_LINE.fullmatch(data, max(end, 0))
    if match is None:
        raise CheckpointError(f"{where}: its last line is no checksum, so the file is cut short or damaged.")
    text, expected = data[:end], int(match[1])
    if data != seal(text):
        raise CheckpointError(f"{where}: is damaged: its checksum is {zlib.crc32(text)}, expected {expected}.")
    return text


@dataclass(slots=True)
class _Value:
    """A value from a file, and where it came from: each method returns it as one type or raises."""

    value: Any
    where: str

    def fail(self, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: expected {expected}, got {str(self.value)[:80]!r}.")

    def integer(self, most: int = _MAX_INTEGER) -> int:
        if type(self.value) is not int or not 0 <= self.value <= most:
            raise self.fail(f"an integer from 0 to {most}")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fail("a text")
        return self.value

    def items(self) -> "Iterator[_Value]":
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return (_Value(item, self.where) for item in self.value)

    def integers(self, most: int = _MAX_INTEGER) -> tuple[int, ...]:
        # Without a `_Value` for each: there may be hundreds of thousands.
        if not isinstance(self.value, list) or not all(type(n) is int and 0 <= n <= most for n in self.value):
            raise self.fail(f"a list of integers from 0 to {most}")
        return tuple(self.value)

    def texts(self) -> dict[str, str]:
        if not isinstance(self.value, dict) or not all(isinstance(item, str) for item in self.value.values()):
            raise self.fail("an object of texts")
        return self.value

    def keys(self) -> Set[str]:
        return self._mapping().keys()

    def entries(self) -> "Iterator[tuple[str, _Value]]":
        return ((key, self.get(key)) for key in self._mapping())

    def get(self, key: str) -> "_Value":
        if key not in (mapping := self._mapping()):
            raise self.fail(f"an object with '{key}'")
        return _Value(mapping[key], f"{self.where}, '{key[:80]}'")

    def has_keys(self, *keys: str) -> None:
        if self.keys() != set(keys):
            raise self.fail(f"an object with {', '.join(keys)} and nothing else")

    def _mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.fail("an object")
        return self.value


def _parse_spec(value: _Value) -> Spec:
    items = list(value.items())
    if len(items) not in (4, 5):
        raise value.fail("a tensor's [kind, name, dtype, shape] or these and its order")
    kind, name, dtype = (item.text() for item in items[:3])
    if kind not in KINDS or dtype not in ITEM_BYTES:
        raise value.fail(f"a kind of {', '.join(KINDS)} and a dtype of {', '.join(ITEM_BYTES)}")
    shape = items[3].integers()
    order = items[4].integers() if len(items) == 5 else ()
    if (order and sorted(order) != list(range(len(shape)))) or len(shape) > 64:
        raise value.fail(f"an order of {len(shape)} dimensions (at most 64)")
    spec = Spec(kind, name, dtype, shape, order)
    if prod(max(1, n) for n in shape) * spec.item_bytes > _MAX_INTEGER:
        raise value.fail("a tensor of less than 2^63 bytes")
    return spec


def _parse_aliases(value: _Value) -> dict[str, str] | None:
    return None if value.value is None else value.texts()


def _parse_file(name: str, value: _Value) -> FileEntry:
    value.has_keys("bytes", "chunks", "crc32")
    chunks = []
    for item in value.get("chunks").items():
        numbers = item.integers()
        if len(numbers) != 3:
            raise item.fail("a chunk's [tensor, start, stop]")
        chunks.append(Chunk(*numbers))
    return FileEntry(value.get("bytes").integer(), value.get("crc32").integers(2**32 - 1), tuple(chunks))


def _check_files(names: Set[str], world_size: int, where: str) -> None:
    """Raise unless these are the files of that many ranks: a name never leads elsewhere."""
    expected = {EXTRA} | {
        file_name(kind, rank, world_size) for kind in ("model", "state") for rank in range(min(world_size, len(names)))
    }
    for name in sorted(names ^ expected):
        what = "names a file that does not belong" if name in names else "does not name a file that belongs"
        raise CheckpointError(f"{where}: {what} to a checkpoint of {world_size} ranks: {name[:200]!r}.")
    if world_size < 1:
        raise CheckpointError(f"{where}: says that {world_size} ranks wrote it.")


def _check_names(manifest: Manifest, where: str) -> None:
    """Raise where a tensor has no name of its own."""
    names = [(spec.kind == "model", spec.name) for spec in manifest.tensors]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{where}: a tensor is listed twice.")
    stored = {name for is_model, name in names if is_model}
    for alias, name in (manifest.aliases or {}).items():
        if name not in stored or alias in stored:
            raise CheckpointError(f"{where}: '{alias[:80]}' can not be another name of '{name[:80]}'.")


def _check_cover(manifest: Manifest, where: str) -> None:
    """Raise unless every element of every tensor is in exactly one file, of its kind."""
    found: list[list[tuple[int, int]]] = [[] for _ in manifest.tensors]
    for name, entry in manifest.files.items():
        for chunk in entry.chunks:
            if chunk.tensor >= len(manifest.tensors):
                raise CheckpointError(f"{where}: {name} holds tensor {chunk.tensor} of {len(manifest.tensors)}.")
            if (manifest.tensors[chunk.tensor].kind == "model") != name.startswith("params") or name == EXTRA:
                raise CheckpointError(f"{where}: {name} holds '{manifest.tensors[chunk.tensor].name}' of another kind.")
            found[chunk.tensor].append((chunk.start, chunk.stop))
    for spec, ranges in zip(manifest.tensors, found, strict=True):
        end = 0
        for start, stop in sorted(ranges):
            if start != end or stop <= start:
                what = "twice" if start < end else "in no file"
                raise CheckpointError(
                    f"{where}: elements {min(start, end)} to {max(start, end)} of '{spec.name}' are {what}."
                )
            end = stop
        if end != spec.numel:
            raise CheckpointError(f"{where}: '{spec.name}' has {spec.numel} elements, and its chunks have {end}.")


def _check_sizes(manifest: Manifest, where: str) -> None:
    """Raise where a file's size does not follow from what it holds."""
    for name, entry in manifest.files.items():
        blocks = -(-entry.nbytes // BLOCK_BYTES)
        if len(entry.crc32) != blocks:
            raise CheckpointError(f"{where}: {name} has {blocks} blocks and {len(entry.crc32)} checksums.")
        if name == EXTRA:
            continue
        nbytes = len(make_header(manifest.tensors, entry.chunks))
        nbytes += sum((c.stop - c.start) * manifest.tensors[c.tensor].item_bytes for c in entry.chunks)
        if nbytes != entry.nbytes:
            raise CheckpointError(f"{where}: {name} should have {nbytes} bytes, and has {entry.nbytes}.")
