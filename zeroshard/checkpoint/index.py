"""The text of a manifest: its head, and the index of tensors in one part or several.

Owns format version 2, and the choice of the reader for a version. Read `manifest.py` first.

Note: the index
    The index has six columns. "names" has the tensors; "type_of" has, for each tensor, an index into "types", which has
    `[kind, dtype, shape, order]`. "files" and "stops" have, for each chunk in the order of tensors, the index of its
    file and the element after its last. A chunk begins at the end of the previous chunk, and a tensor ends with the
    chunk that reaches its last element, so the format cannot express gaps and overlaps. Files have chunks in this
    order. "crc32" has the checksums of all files, by name. `manifest.json` has the first values of each column, and
    the sizes and checksums of the files `index-<part>-of-<parts>.json`, which have the next values. Each part is within
    the limits of `strict.py`; the total may exceed them.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from zeroshard.checkpoint import strict
from zeroshard.checkpoint.fields import MAX_INTEGER, Value
from zeroshard.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    MANIFEST,
    VERSION,
    FileEntry,
    Manifest,
    check_consistent,
    check_files,
    index_name,
    tensor_files,
)
from zeroshard.checkpoint.ranges import Chunks, Spec, Type, arrange, parse_type
from zeroshard.table.errors import CheckpointError

__all__ = ["parse", "serialize"]

COLUMNS: Final = ("crc32", "files", "names", "stops", "type_of", "types")
PART_COST: Final = 14 << 20
"""Memory limit for the values of a part, by the estimate of `strict.py`: half of the reader's limit."""

VALUES: Final = 4096
"""Number of values of a column that are added to a part at a time."""

MAX_PARTS: Final = 9999


def serialize(manifest: Manifest) -> dict[str, bytes]:
    """Return the texts of `manifest.json` and of the parts of its index, by name.

    Raises:
        CheckpointError: the texts could not be read back: chunks leave gaps, names are duplicate or invalid in
            safetensors, or a limit is exceeded.
    """
    parts = list(_cut(_columns_of(manifest)))
    rest = [strict.dumps(part, f"the index of {MANIFEST}") for part in parts[1:]]
    names = [index_name(place, len(rest)) for place in range(len(rest))]
    head = {
        "aliases": None if manifest.aliases is None else dict(manifest.aliases),
        "expires": manifest.expires,
        "files": {name: entry.nbytes for name, entry in manifest.files.items()},
        "format": FORMAT,
        "index": parts[0],
        "parts": [[len(text), zlib.crc32(text)] for text in rest],
        "software": dict(manifest.software),
        "step": manifest.step,
        "version": VERSION,
        "world_size": manifest.world_size,
    }
    texts = dict(zip(names, rest, strict=True))
    data = strict.seal(strict.dumps(head, MANIFEST))
    read = parse(data, MANIFEST, lambda name, _: texts[name])
    if (read.chunks.offset != manifest.chunks.offset).any():
        raise CheckpointError(f"{MANIFEST}: chunks are not in their files in the order of tensors.")
    return texts | {MANIFEST: data}


def _columns_of(manifest: Manifest) -> dict[str, list[Any]]:
    types: dict[Type, int] = {}
    type_of = [
        types.setdefault((spec.kind, spec.dtype, spec.shape, spec.order), len(types)) for spec in manifest.tensors
    ]
    return {
        "crc32": [crc32 for name in sorted(manifest.files) for crc32 in manifest.files[name].crc32],
        "files": manifest.chunks.file.tolist(),
        "names": [spec.name for spec in manifest.tensors],
        "stops": manifest.chunks.stop.tolist(),
        "type_of": type_of,
        "types": [[kind, dtype, list(shape), list(order)] for kind, dtype, shape, order in types],
    }


def _cut(columns: Mapping[str, list[Any]]) -> Iterator[dict[str, list[Any]]]:
    """Yield the parts: the next values of each column, up to the limit of a part."""
    part: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    cost = 0
    for name, values in columns.items():
        for start in range(0, len(values), VALUES):
            several = values[start : start + VALUES]
            more = strict.cost_of(strict.dumps(several, f"the column '{name}' of {MANIFEST}"))
            if cost and cost + more > PART_COST:
                yield part
                part, cost = {name: [] for name in COLUMNS}, 0
            part[name] += several
            cost += more
    yield part


def parse(data: bytes, where: str, read_part: Callable[[str, int], bytes]) -> Manifest:
    """Return the manifest of a text.

    Args:
        where: the file's name, for messages.
        read_part: returns the text of a part of the index, by its name and size in bytes.

    Raises:
        CheckpointError: the text is damaged, of another format, or contradicts itself.
    """
    value = Value(strict.loads(strict.unseal(data, where), where), where)
    if value.get("format").value != FORMAT:
        raise CheckpointError(f"{where}: is not a manifest of a {FORMAT}.")
    if (version := value.get("version").integer()) != VERSION:
        raise CheckpointError(f"{where}: is of format version {version}; this zeroshard reads version {VERSION}.")
    value.has_keys(
        *("aliases", "expires", "files", "format", "index", "parts", "software", "step", "version", "world_size")
    )
    world_size = value.get("world_size").integer()
    check_files(value.get("files").keys(), world_size, where)
    index, parts = _Index(), []
    index.add(value.get("index"))
    for part in value.get("parts").items():
        parts.append(part.integers())
        if len(parts[-1]) != 2 or len(parts) > MAX_PARTS:
            raise part.fail(f"a part's [bytes, checksum], for at most {MAX_PARTS}")
    for place, (nbytes, crc32) in enumerate(parts):
        name = index_name(place, len(parts))
        text, path = read_part(name, nbytes), f"{where.removesuffix(MANIFEST)}{name}"
        if len(text) != nbytes or zlib.crc32(text) != crc32:
            raise CheckpointError(f"{path}: is damaged: its contents differ from {MANIFEST}.")
        index.add(Value(strict.loads(text, path), path))
    sizes = {name: nbytes.integer() for name, nbytes in value.get("files").entries()}
    tensors = index.tensors(where)
    manifest = Manifest(
        value.get("step").integer(),
        world_size,
        tensors,
        None if value.get("aliases").value is None else value.get("aliases").texts(),
        index.entries(sizes, where),
        index.chunks(tensors, tensor_files(sizes), where),
        value.get("software").texts(),
        value.get("expires").boolean(),
        tuple(index_name(place, len(parts)) for place in range(len(parts))),
    )
    check_consistent(manifest, where)
    return manifest


class _Index:
    """The columns read so far; numbers use 4 or 8 bytes each."""

    def __init__(self) -> None:
        self._numbers = {"crc32": array("I"), "files": array("q"), "stops": array("q"), "type_of": array("q")}
        self._names: list[str] = []
        self._types: list[Type] = []

    def add(self, part: Value) -> None:
        """Append the next values of each column."""
        part.has_keys(*COLUMNS)
        for name, numbers in self._numbers.items():
            numbers.extend(part.get(name).integers(2**32 - 1 if name == "crc32" else MAX_INTEGER))
        self._names += part.get("names").strings()
        self._types += [_parse_type(item) for item in part.get("types").items()]

    def tensors(self, where: str) -> tuple[Spec, ...]:
        """Return the tensors.

        Raises:
            CheckpointError: a type or a name is invalid.
        """
        type_of = self._numbers["type_of"]
        if len(type_of) != len(self._names) or max(type_of, default=-1) >= len(self._types):
            raise CheckpointError(f"{where}: {len(self._names)} tensors are not each of a type of {len(self._types)}.")
        found = []
        for name, place in zip(self._names, type_of, strict=True):
            kind, dtype, shape, order = self._types[place]
            found.append(Spec(kind, name, dtype, shape, order))
            if not name.isascii() and not _is_unicode(name):
                raise CheckpointError(f"{where}: {name!a:.80} has half of a surrogate pair, which UTF-8 cannot hold.")
        return tuple(found)

    def entries(self, sizes: Mapping[str, int], where: str) -> dict[str, FileEntry]:
        """Return the files, each with its checksums."""
        crc32, start, found = self._numbers["crc32"], 0, {}
        for name in sorted(sizes):
            stop = start + -(-sizes[name] // BLOCK_BYTES)
            found[name] = FileEntry(sizes[name], crc32[start : min(stop, len(crc32))])
            start = stop
        if start != len(crc32):
            raise CheckpointError(f"{where}: files have {start} blocks and {len(crc32)} checksums.")
        return found

    def chunks(self, tensors: Sequence[Spec], files: Sequence[str], where: str) -> Chunks:
        """Return the location of each chunk."""
        places, stops = self._numbers["files"], self._numbers["stops"]
        if len(places) != len(stops) or max(places, default=-1) >= len(files):
            raise CheckpointError(f"{where}: {len(stops)} chunks are not each in one of {len(files)} files.")
        tensor, start = array("q"), array("q")
        left = ((place, numel) for place, spec in enumerate(tensors) if (numel := spec.numel))
        end = numel = 0
        for stop in stops:
            if end == numel:
                end, (place, numel) = 0, next(left, (-1, 0))
            if not end < stop <= numel:
                raise CheckpointError(f"{where}: a chunk has elements {end} to {stop} of tensor {place} of {numel}.")
            tensor.append(place)
            start.append(end)
            end = stop
        if end != numel or next(left, None) is not None:
            raise CheckpointError(f"{where}: the chunks end before the tensors do.")
        return arrange(tensors, files, (places, tensor, start, stops), where)


def _parse_type(value: Value) -> Type:
    items = list(value.items())
    if len(items) != 4:
        raise value.fail("a type's [kind, dtype, shape, order]")
    return parse_type(value, *items)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
