"""Folders of whole safetensors files, as Hugging Face writes and reads them: export to one, reading of one.

Owns that layout: `model-00001-of-00002.safetensors` and so on, with `model.safetensors.index.json`. Without torch. Read
`manifest.py` and `reader.py` first. Such folders carry no checksums: reading checks headers and sizes, not contents.
"""

import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np

from zeroshard.checkpoint import files, strict
from zeroshard.checkpoint.adapter import TRAINED, adapter_names, is_adapted
from zeroshard.checkpoint.attempt import new_folder
from zeroshard.checkpoint.dcp_layout import METADATA
from zeroshard.checkpoint.fields import Value
from zeroshard.checkpoint.fit import check_fit
from zeroshard.checkpoint.manifest import EXTRA, MANIFEST
from zeroshard.checkpoint.ranges import ITEM_BYTES, Spec
from zeroshard.checkpoint.reader import CheckpointReader, Source, clue_of, opened, read_exactly, read_text
from zeroshard.checkpoint.verify import verify
from zeroshard.checkpoint.writer import FileWriter, write_file
from zeroshard.table.errors import CheckpointError

__all__ = ["BIN", "FolderReader", "INDEX_END", "check_index", "copy_rows", "export", "files_of", "is_tensor_folder"]

SINGLE = "model.safetensors"
INDEX_END = ".index.json"
INDEX = f"{SINGLE}{INDEX_END}"
BIN = "pytorch_model.bin"
CONFIG = "config.json"
BESIDE = "export"
"""The folder beside a checkpoint whose files exports copy; docs/checkpoints.md has its name."""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILE_BYTES = 5 * 10**9
"""Largest file of an export, except for a single larger tensor."""

PIECE_NUMEL = 1 << 20


def export(
    source: str | Path, target: str | Path, *, config: str | Path | None = None, file_bytes: int = FILE_BYTES
) -> Path:
    """Write the parameters and buffers of a checkpoint as a folder that `from_pretrained` reads.

    Every byte of the checkpoint is verified first. Tied parameters are stored once, under their first name. Of a model
    with a LoRA adapter of peft, the adapter alone is written, as a folder that `PeftModel.from_pretrained` reads. Else
    files of a folder `export` beside the checkpoint are copied: configuration and tokenizer, of `zeroshard train`.

    Args:
        target: a folder that does not exist yet.
        config: the model's `config.json`, which transformers needs, to be copied beside the tensors; transformers must
            then be installed, and names and shapes are compared with its model. Of a LoRA adapter its
            `adapter_config.json`.
        file_bytes: tensors are spread over files of about this size.

    Raises:
        CheckpointError: the checkpoint is damaged, the folder exists, or the tensors are not those that the
            configuration describes.
    """
    verify(source)
    reader, path = CheckpointReader(Path(source)), Path(target)
    text = None if config is None else read_text(Path(os.path.realpath(config)))  # the way to it may be a link
    described = None if text is None else _parse_config(text, Path(str(config)))
    if is_adapted(reader.specs):
        kept = Path(os.path.abspath(source)).parent / BESIDE / ADAPTER_CONFIG
        if described is None and kept.is_file():
            text = read_text(kept)
            described = _parse_config(text, kept)
        names = adapter_names(str(reader.path), reader.specs, _trained_in(reader), described)
        with new_folder(path) as folder:
            _write_whole(folder / ADAPTER, [reader.specs[name] for name in names], reader, names)
            write_file(folder / ADAPTER_CONFIG, text or b"")
        return path
    if described is not None and config is not None:
        if "peft_type" in described:
            raise CheckpointError(f"{config}: describes an adapter of peft, but {source} holds none.")
        shapes = {name: spec.shape for name, spec in reader.specs.items()}
        check_fit(str(reader.path), shapes, reader.aliases or (), Path(os.path.realpath(config)))
    with new_folder(path) as folder:
        shares = list(_shares(reader.specs, file_bytes))
        homes: dict[str, str] = {}
        for number, share in enumerate(shares):
            name = f"model-{number + 1:05}-of-{len(shares):05}.safetensors"
            homes.update(dict.fromkeys((spec.name for spec in share), name))
            _write_whole(folder / name, share, reader)
        total = sum(spec.numel * spec.item_bytes for spec in reader.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        write_file(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
        if text is not None:
            write_file(folder / CONFIG, text)
        _copy_beside(Path(os.path.abspath(source)).parent / BESIDE, folder)
    return path


def _trained_in(reader: CheckpointReader) -> set[str]:
    """Return the parameters that were trained, by what a checkpoint says of them; it warns if that is nothing."""
    content = Value(strict.loads(reader.read_extra(), where := str(reader.path / EXTRA)), where)
    trained = {spec.name.split("/", 2)[-1] for spec in reader.states.values() if spec.kind == "state"}
    if (extra := content.get("extra")).keys() & {TRAINED}:
        return trained | {*extra.get(TRAINED).strings()}
    # Checkpoints of earlier versions have the parameters of optimizers, and which of them have states.
    names = [spec.name for spec in reader.manifest.tensors]
    optimizers = list(content.get("optimizers").items())
    for one in optimizers:
        stateful = one.get("stateful")
        several = [group.get("params") for group in one.get("groups").items()] if not stateful.value else [stateful]
        trained |= {names[place] for places in several for place in places.integers(len(names) - 1)}
    if not optimizers:
        warnings.warn(
            f"{where}: does not say which parameters were trained, as it was imported, or saved with model_only=True "
            "by an earlier version. The export holds the adapter alone.",
            stacklevel=3,
        )
    return trained


def _copy_beside(beside: Path, folder: Path) -> None:
    """Copy the files of a folder, if it exists, except those that the export already has."""
    for name in sorted({*files.names_in(beside)} - {*files.names_in(folder)}) if beside.is_dir() else ():
        with opened(beside / name) as descriptor, FileWriter(folder / name) as writer:
            nbytes = files.size_of(descriptor)
            for start in range(0, nbytes, PIECE_NUMEL):
                buffer = memoryview(bytearray(min(PIECE_NUMEL, nbytes - start)))
                read_exactly(descriptor, buffer, start, beside / name)
                writer.write(buffer)


def _parse_config(text: bytes, path: Path) -> dict[str, Any]:
    value = strict.loads(text, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object with the configuration of a model.")
    return value


def _shares(specs: Mapping[str, Spec], file_bytes: int) -> Iterator[list[Spec]]:
    """Yield the tensors of one file after the other."""
    share: list[Spec] = []
    nbytes = 0
    for spec in specs.values():
        if share and nbytes + spec.numel * spec.item_bytes > file_bytes:
            yield share
            share, nbytes = [], 0
        share.append(spec)
        nbytes += spec.numel * spec.item_bytes
    yield share


def _write_whole(
    path: Path, specs: list[Spec], reader: CheckpointReader, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write whole tensors as one file, some of them under other names."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.numel * spec.item_bytes
        table[names.get(spec.name, spec.name)] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with FileWriter(path) as writer:
        writer.write(memoryview(len(text).to_bytes(8, "little") + text))
        for spec in specs:
            if spec.order:
                writer.write(memoryview(_in_rows(spec, reader.read(spec.name, 0, spec.numel))))
                continue
            copy_rows(reader, spec, writer)


def copy_rows(reader: Source, spec: Spec, writer: FileWriter) -> None:
    """Write the elements of a tensor as they lie in the source."""
    for start in range(0, spec.numel, PIECE_NUMEL):
        data = memoryview(bytearray(min(PIECE_NUMEL, spec.numel - start) * spec.item_bytes))
        reader.fill(spec.name, start, data)
        writer.write(data)


def _in_rows(spec: Spec, data: bytearray) -> bytes:
    """Return a tensor's bytes in row-major order."""
    items = np.frombuffer(data, dtype=np.dtype((np.void, spec.item_bytes)))
    stored = items.reshape([spec.shape[dim] for dim in spec.order])
    return stored.transpose([spec.order.index(dim) for dim in range(len(spec.shape))]).tobytes()


# -- reading ----------------------------------------------------------------------------------------------------------


@final
class FolderReader(Source):
    """The tensors of a folder of safetensors files, or of one file.

    Raises:
        CheckpointError: an index or a header is invalid.
    """

    def __init__(self, path: str | Path) -> None:
        self._homes: dict[str, tuple[Path, int]] = {}
        specs: dict[str, Spec] = {}
        for file in files_of(Path(path), SINGLE):
            for name, (spec, offset) in _read_header(file).items():
                if name in specs:
                    raise CheckpointError(f"{file}: '{name}' is also in {self._homes[name][0].name}.")
                specs[name], self._homes[name] = spec, (file, offset)
        digest = zlib.crc32(repr(sorted(self._homes.items())).encode())
        super().__init__(Path(path), specs, None, digest)
        check_index(Path(path), SINGLE, {name: home[0].name for name, home in self._homes.items()})

    def fill(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements of a tensor; see `Source`."""
        file, offset = self._homes[name]
        with opened(file) as descriptor:
            read_exactly(descriptor, buffer, offset + start * self.specs[name].item_bytes, file)


def is_tensor_folder(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder of such files that is not a checkpoint."""
    return path.is_file() or (not (path / MANIFEST).exists() and any((path / n).exists() for n in (INDEX, SINGLE)))


def files_of(path: Path, single: str) -> list[Path]:
    """Return the files of a folder, which an index lists where there are several; or the file itself.

    Args:
        single: the name of the one file of a folder without an index.

    Raises:
        CheckpointError: there is neither, or both with different files, or a name that leads out of the folder.
    """
    files.refuse_link(path)
    if path.is_file():
        return [path]
    index = path / f"{single}{INDEX_END}"
    if index.exists():
        names = set(_read_index(index).values())
        for name in names:
            if "/" in name or "\\" in name or name.startswith(".") or not name.endswith(Path(single).suffix):
                raise CheckpointError(
                    f"{index}: {name[:200]!r} is not the name of a {Path(single).suffix} file in this folder."
                )
        if (path / single).exists() and single not in names:
            raise CheckpointError(
                f"{path}: holds {single}, and {index.name}, which lists other files; their weights may differ. Remove "
                f"those that are out of date, or pass {path / single} for that file."
            )
        return [path / name for name in sorted(names)]
    if (path / single).exists():
        return [path / single]
    clue = clue_of(path)
    raise CheckpointError(f"{path}: holds neither {index.name}, {single} nor {METADATA}{clue and f'; {clue}'}.")


def _read_index(path: Path) -> dict[str, str]:
    value = strict.loads(read_text(path), str(path))
    homes = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise CheckpointError(f"{path}: has no weight_map from tensors to files.")
    return homes


def check_index(path: Path, single: str, homes: Mapping[str, str]) -> None:
    """Raise unless the index of a folder, if it has one, says of each tensor the file in which it is."""
    index = path / f"{single}{INDEX_END}"
    if path.is_dir() and index.exists():
        listed = _read_index(index)
        wrong = sorted(set(listed.items()) ^ set(homes.items()))
        if wrong:
            raise CheckpointError(f"{index}: '{wrong[0][0]}' is not in {wrong[0][1]}.")


def _read_header(path: Path) -> dict[str, tuple[Spec, int]]:
    """Return each tensor of a safetensors file with its offset; all bytes of the file are accounted for."""
    with opened(path) as descriptor:
        nbytes, start = files.size_of(descriptor), bytearray(8)
        read_exactly(descriptor, memoryview(start), 0, path)
        length = int.from_bytes(start, "little")
        if length > min(strict.MAX_BYTES, nbytes - 8):
            raise CheckpointError(f"{path}: has a header of {length} bytes, but the file has {nbytes} bytes.")
        text = bytearray(length)
        read_exactly(descriptor, memoryview(text), 8, path)
    table = strict.loads(bytes(text), str(path))
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object.")
    found = {name: _parse_entry(path, name, entry) for name, entry in table.items() if name != "__metadata__"}
    end = 0
    for spec, offset in sorted(found.values(), key=lambda pair: (pair[1], pair[0].numel)):
        if offset != end:
            raise CheckpointError(f"{path}: '{spec.name}' begins at byte {offset}, expected {end}.")
        end = offset + spec.numel * spec.item_bytes
    if 8 + length + end != nbytes:
        raise CheckpointError(f"{path}: has {nbytes} bytes; its header describes {8 + length + end}.")
    return {name: (spec, 8 + length + offset) for name, (spec, offset) in found.items()}


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[Spec, int]:
    where = f"{path}: '{name[:80]}'"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} is of dtype {str(dtype)[:20]!r}; known are {', '.join(ITEM_BYTES)}.")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(f"{where} has an invalid shape or invalid offsets: {str(numbers)[:80]}.")
    spec = Spec("model", name, dtype, tuple(shape))
    if len(shape) > 64 or len(offsets) != 2 or offsets[1] - offsets[0] != spec.numel * spec.item_bytes:
        raise CheckpointError(f"{where} of shape {shape[:64]} does not fill bytes {offsets}.")
    return spec, offsets[0]
