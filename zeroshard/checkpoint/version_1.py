"""Manifests of format version 1, without parts: the description of each tensor, and the chunks of each file.

Owns only reading; no code writes them. Read `manifest.py` and `fields.py` first.
"""

from array import array

from zeroshard.checkpoint.fields import Value
from zeroshard.checkpoint.manifest import (
    EXTRA,
    FileEntry,
    Manifest,
    check_consistent,
    check_files,
    tensor_files,
)
from zeroshard.checkpoint.ranges import Spec, arrange, parse_type
from zeroshard.table.errors import CheckpointError

__all__ = ["parse"]


def parse(value: Value) -> Manifest:
    """Return the manifest of a parsed text.

    Raises:
        CheckpointError: the text is inconsistent.
    """
    where = value.where
    value.has_keys("aliases", "expires", "files", "format", "software", "step", "tensors", "version", "world_size")
    world_size = value.get("world_size").integer()
    check_files(value.get("files").keys(), world_size, where)
    tensors = tuple(_parse_spec(item) for item in value.get("tensors").items())
    entries, columns = {}, tuple(array("q") for _ in range(4))
    places = {name: place for place, name in enumerate(tensor_files(value.get("files").value))}
    for name, item in value.get("files").entries():
        item.has_keys("bytes", "chunks", "crc32")
        checksums = array("I", item.get("crc32").integers(2**32 - 1))
        entries[name] = FileEntry(item.get("bytes").integer(), checksums)
        for chunk in item.get("chunks").items():
            numbers = chunk.integers()
            if len(numbers) != 3:
                raise chunk.fail("a chunk's [tensor, start, stop]")
            if name == EXTRA:
                raise CheckpointError(f"{where}: {EXTRA} holds a tensor.")
            for column, number in zip(columns, (places[name], *numbers), strict=True):
                column.append(number)
    manifest = Manifest(
        value.get("step").integer(),
        world_size,
        tensors,
        None if value.get("aliases").value is None else value.get("aliases").texts(),
        entries,
        arrange(tensors, list(places), columns, where),
        value.get("software").texts(),
        value.get("expires").boolean(),
        version=1,
    )
    check_consistent(manifest, where)
    return manifest


def _parse_spec(value: Value) -> Spec:
    items = list(value.items())
    if len(items) not in (4, 5):
        raise value.fail("a tensor's [kind, name, dtype, shape] or these and its order")
    kind, name, *rest = items
    kind_, dtype, shape, order = parse_type(value, kind, *rest)
    return Spec(kind_, name.text(), dtype, shape, order)
