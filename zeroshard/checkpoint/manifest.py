"""The manifest of a checkpoint: tensors, their ranges in each file, checksums.

Owns the words of the format: names of files, of tensors and of states, and the layout of a tensor file. `index.py` owns
its text. It opens nothing; `reader.py` does. A manifest that was parsed is consistent: names stay inside the folder,
sizes add up, every element is there once.

Note: the folder
    step-00001000/
      params-00001-of-00004.safetensors   parameters (their master values) and buffers
      optim-00001-of-00004.safetensors    the optimizers' states, and the random generators of the rank
      extra.json                          what the program gave to save, hyper-parameters, versions
      index-00001-of-00003.json           the rest of a long index; most checkpoints have none
      manifest.json                       written last; its last line is the checksum of all before it
    A tensor file is in the safetensors format. It holds flat ranges: the key "<name>@<start>" has elements
    `[start, start + n)` of the tensor, as it lies in memory. `order` lists the dimensions from the slowest to the
    fastest where that is not row-major. A rank whose table would be long writes several files of a kind. Nothing of the
    number of ranks, of a ZeRO stage or of padding is stored, so any run reads what any other wrote: it looks for the
    ranges that meet its own.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from zeroshard.checkpoint.fields import quoted
from zeroshard.checkpoint.ranges import ENTRY_BYTES, Chunk, Chunks, Spec
from zeroshard.table.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "EXTRA",
    "FORMAT",
    "FileEntry",
    "ISLANDS",
    "LATEST",
    "MANIFEST",
    "Manifest",
    "PARTS",
    "VERSION",
    "check_consistent",
    "check_files",
    "file_name",
    "index_name",
    "is_model_only",
    "is_own_name",
    "join_state",
    "split_state",
    "spread",
    "tensor_files",
]

FORMAT: Final = "zeroshard checkpoint"
VERSION: Final = 2
MANIFEST: Final = "manifest.json"
EXTRA: Final = "extra.json"
LATEST: Final = "LATEST"
ISLANDS: Final = "islands"
"""The folder of the other islands in a checkpoint of the first one."""
PARTS: Final = "outer/parts"
"""The checksums of the manifests in that folder, in the first island's part."""
BLOCK_BYTES: Final = 4 << 20
"""Bytes that one checksum covers."""

TABLE_BYTES: Final = 8 << 20
"""A tensor file whose table would be longer is followed by another one."""

_FILE_NAME = re.compile(r"(params|optim)-(\d{5})-of-(\d{5})(?:-([2-9]|[1-9]\d{1,4}))?\.safetensors")
_INDEX_NAME = re.compile(r"index-\d{5}-of-\d{5}\.json")


@dataclass(frozen=True)
class FileEntry:
    """One file: its size, and the checksum of each `BLOCK_BYTES` of it."""

    nbytes: int
    crc32: Sequence[int]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description of itself.

    Args:
        aliases: other names of tied parameters, each with the name under which it is stored; None where it was made of
            files that do not say.
        files: every file but the manifest and the parts of its index.
        software: versions that wrote it, for people.
        expires: whether retention may remove the checkpoint when newer ones exist.
        parts: names of the files with the rest of the index.
    """

    step: int
    world_size: int
    tensors: tuple[Spec, ...]
    aliases: Mapping[str, str] | None
    files: Mapping[str, FileEntry]
    chunks: Chunks
    software: Mapping[str, str] = field(default_factory=dict)
    expires: bool = False
    parts: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """The name of each file in the folder."""
        return {MANIFEST, *self.files, *self.parts}

    @property
    def is_model_only(self) -> bool:
        """Whether it was saved with `model_only`; other saves have generators, and imports the optimizers' states."""
        return is_model_only(self.tensors)

    def place_of(self, file: str) -> list[tuple[Chunk, int]]:
        """Return the chunks of a file with the offset of each in bytes."""
        if file == EXTRA:
            return []
        chunks, place = self.chunks, tensor_files(self.files).index(file)
        header, found = int(chunks.header_bytes[place]), chunks.of_file(place)
        columns = (c[found].tolist() for c in (chunks.tensor, chunks.start, chunks.stop, chunks.offset))
        return [(Chunk(*chunk), header + offset) for *chunk, offset in zip(*columns, strict=True)]


# -- names ------------------------------------------------------------------------------------------------------------


def file_name(kind: str, rank: int, world_size: int, part: int = 0) -> str:
    """Return the name of a file in which a rank writes tensors of a kind.

    Args:
        part: counts the files of this kind and rank, of which there is most often one.
    """
    further = f"-{part + 1}" if part else ""
    return f"{'params' if kind == 'model' else 'optim'}-{rank + 1:05}-of-{world_size:05}{further}.safetensors"


def index_name(part: int, parts: int) -> str:
    """Return the name of a file with a part of the index."""
    return f"index-{part + 1:05}-of-{parts:05}.json"


def is_own_name(name: str) -> bool:
    """Return whether a checkpoint could have a file of this name."""
    return name in (EXTRA, MANIFEST) or any(pattern.fullmatch(name) for pattern in (_FILE_NAME, _INDEX_NAME))


def is_model_only(tensors: Iterable[Spec]) -> bool:
    """Return whether these are the tensors of a checkpoint that no training resumes from."""
    return all(spec.kind == "model" for spec in tensors)


def tensor_files(names: Mapping[str, object]) -> list[str]:
    """Return the names of the tensor files in the order in which chunks count them."""
    return sorted(name for name in names if name != EXTRA)


def spread(
    chunks: Iterable[tuple[int, str, int, int, int]], kinds: Sequence[str], world_size: int
) -> tuple[dict[tuple[str, int], list[str]], tuple[list[Any], ...]]:
    """Put chunks into files, most often one of each kind and rank: none gets a table longer than `TABLE_BYTES`.

    Args:
        chunks: the rank that writes each, the tensor's name, its place, start and stop; ordered by place and start.
        kinds: of each tensor.

    Returns:
        The files of each kind ("model" or "state") and rank; and of each chunk the file, the tensor, start and stop.
    """
    files = {(kind, r): [file_name(kind, r, world_size)] for kind in ("model", "state") for r in range(world_size)}
    table_bytes: Counter[tuple[str, int]] = Counter()
    columns: tuple[list[Any], ...] = ([], [], [], [])
    for rank, name, place, start, stop in chunks:
        one = "model" if kinds[place] == "model" else "state", rank
        entry_bytes = len(encode_basestring_ascii(name)) + ENTRY_BYTES
        if table_bytes[one] and table_bytes[one] + entry_bytes > TABLE_BYTES:
            files[one].append(file_name(*one, world_size, len(files[one])))
            table_bytes[one] = 0
        table_bytes[one] += entry_bytes
        for column, value in zip(columns, (files[one][-1], place, start, stop), strict=True):
            column.append(value)
    return files, columns


def join_state(optimizer: int, key: Any, parameter: str) -> str:
    """Return the name of a state, "<optimizer>/<key>/<parameter>", from which all three follow.

    A key that is not a string, or has a slash or a leading tilde, becomes a tilde and its JSON, with slashes escaped.
    """
    is_plain = isinstance(key, str) and "/" not in key and not key.startswith("~")
    text = key if is_plain else "~" + json.dumps(key, allow_nan=False).replace("/", "\\u002f")
    return f"{optimizer}/{text}/{parameter}"


def split_state(name: str) -> tuple[int, Any, str]:
    """Return the optimizer, the key and the parameter that a name was made of.

    Raises:
        ValueError: it was made of none.
    """
    number, text, parameter = name.split("/", 2)
    key: Any = json.loads(text[1:]) if text.startswith("~") else text
    is_key = key is None or isinstance(key, (bool, int, float, str))
    if not number.isdecimal() or not is_key or join_state(int(number), key, parameter) != name:
        raise ValueError(f"{name!a:.80} is not a name of a state")
    return int(number), key, parameter


# -- consistency ------------------------------------------------------------------------------------------------------


def check_files(names: Set[str], world_size: int, where: str) -> None:
    """Raise unless these are the files of that many ranks: a name never leads elsewhere."""
    expected = {EXTRA} | {
        file_name(kind, rank, world_size) for kind in ("model", "state") for rank in range(min(world_size, len(names)))
    }
    for name in names:
        if (match := _FILE_NAME.fullmatch(name)) and match[4]:
            kind, part = "model" if match[1] == "params" else "state", int(match[4]) - 2
            if file_name(kind, int(match[2]) - 1, int(match[3]), part) in names:
                expected.add(name)
    for name in sorted(names ^ expected):
        what = "names a file that does not belong" if name in names else "does not name a file that belongs"
        raise CheckpointError(f"{where}: {what} to a checkpoint of {world_size} ranks: {quoted(name)}.")
    if world_size < 1:
        raise CheckpointError(f"{where}: says that {world_size} ranks wrote it.")


def check_consistent(manifest: Manifest, where: str) -> None:
    """Raise where a tensor has no name of its own, or a file's size does not follow from what it holds."""
    stored = {spec.name for spec in manifest.tensors if spec.kind == "model"}
    others = {spec.name for spec in manifest.tensors if spec.kind != "model"}
    if len(stored) + len(others) != len(manifest.tensors):
        raise CheckpointError(f"{where}: a tensor is listed twice.")
    for alias, name in (manifest.aliases or {}).items():
        if name not in stored or alias in stored:
            raise CheckpointError(f"{where}: {quoted(alias)} cannot be another name of {quoted(name)}.")
    sizes = (manifest.chunks.header_bytes + manifest.chunks.data_bytes).tolist()
    for name, nbytes in zip(tensor_files(manifest.files), sizes, strict=True):
        if nbytes != manifest.files[name].nbytes:
            raise CheckpointError(f"{where}: {name} should have {nbytes} bytes, and has {manifest.files[name].nbytes}.")
    for name, entry in manifest.files.items():
        if len(entry.crc32) != (blocks := -(-entry.nbytes // BLOCK_BYTES)):
            raise CheckpointError(f"{where}: {name} has {blocks} blocks and {len(entry.crc32)} checksums.")
