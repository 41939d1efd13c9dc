"""Reading a checkpoint's files, with every byte checked against the manifest before it is handed out.

Owns the way from a folder to verified bytes. It must not know torch or what tensors are for. Read `manifest.py` first.

Note: once
    A checksum costs as much as reading three times. A reader therefore records the blocks that it has checked, and
    does not check them again. Each file must stay the same, with the same size and times of change, from its first
    opening until after the last read; otherwise the reader raises.
"""

import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import final

from zeroshard.checkpoint import files, strict
from zeroshard.checkpoint.dcp_layout import METADATA
from zeroshard.checkpoint.index import parse
from zeroshard.checkpoint.manifest import (
    BLOCK_BYTES,
    EXTRA,
    MANIFEST,
    Manifest,
    is_own_name,
    tensor_files,
)
from zeroshard.checkpoint.ranges import Spec, make_header
from zeroshard.table.errors import CheckpointError

__all__ = ["CheckpointReader", "Source", "clue_of", "opened", "path_of", "read_exactly", "read_manifest", "read_text"]

KEPT_BLOCKS = 4
"""Blocks of 4 MiB that a reader keeps: its whole memory, beside what it hands out."""


def path_of(value: object, what: str) -> Path:
    """Return an argument as a path.

    Args:
        what: the call and its argument, as in "zs.latest(folder)".

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{what} takes a path, such as 'runs/a' or a pathlib.Path; got {value!r}.")
    return Path(value)


class Source(ABC):
    """Tensors in files, of which any range of elements can be read.

    Args:
        specs: the parameters and buffers, by name.
        aliases: the other names of tied ones, each with its name in `specs`; None where the files do not say.
        digest: a checksum of the manifest or headers; equal if two ranks read the same files.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], aliases: Mapping[str, str] | None, digest: int) -> None:
        self.path, self.specs, self.aliases, self.digest = path, specs, aliases, digest

    def specs_for(self, aliases: Mapping[str, str]) -> Mapping[str, Spec]:
        """Return the tensors by the names of a model with these ties.

        Files that do not say what is tied may hold a tied parameter under any of its names, which stands for its first.
        """
        if self.aliases is not None:
            return self.specs
        stands = {first: self.specs[alias] for alias, first in aliases.items() if alias in self.specs}
        return {**stands, **self.specs}

    @abstractmethod
    def fill(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements of a tensor from `start` on, counted as they lie in memory there.

        Raises:
            CheckpointError: the file is missing or damaged.
        """

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Return elements [start, stop) of a tensor; see `fill`."""
        data = bytearray((stop - start) * self.specs[name].item_bytes)
        self.fill(name, start, memoryview(data))
        return data


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file and close it; any failure in between names the file."""
    descriptor = files.open_file(path)
    try:
        yield descriptor
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    finally:
        files.close(descriptor)


def read_exactly(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from a place in a file.

    Raises:
        CheckpointError: the file ends before.
    """
    done = 0
    while done < len(buffer):
        count = files.read_at(descriptor, buffer[done:], offset + done)
        if not count:
            raise CheckpointError(f"{path}: ends at byte {offset + done}; {offset + len(buffer)} were expected.")
        done += count


def read_text(path: Path, expected: int | None = None) -> bytes:
    """Return a whole file of JSON.

    Args:
        expected: its size in bytes, where that is known.

    Raises:
        CheckpointError: it is larger than such files are, or of another size.
    """
    with opened(path) as descriptor:
        nbytes = files.size_of(descriptor)
        if expected is not None and nbytes != expected:
            raise CheckpointError(f"{path}: has {nbytes} bytes, expected {expected}.")
        if nbytes > strict.MAX_BYTES:
            raise CheckpointError(f"{path}: has {nbytes} bytes; at most {strict.MAX_BYTES} are read.")
        data = bytearray(nbytes)
        read_exactly(descriptor, memoryview(data), 0, path)
    return bytes(data)


def read_manifest(folder: Path) -> tuple[Manifest, int]:
    """Return the manifest of a checkpoint, and the checksum of its text.

    Raises:
        CheckpointError: there is none, it is damaged, or the folder is a link.
    """
    files.refuse_link(folder)
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        if clue := clue_of(folder):
            why = clue
        elif folder.is_dir():
            why = f"it has no {MANIFEST}, so it was never finished, or has lost it"
        else:
            why = (
                "it is a file. One that torch.save() wrote is read by `with zero.gathered(writeback=True):` and "
                "model.load_state_dict(torch.load(path)) inside it, on every rank; weights in safetensors by "
                "zero.load(path, model_only=True)"
            )
        raise CheckpointError(f"{folder}: is not a checkpoint: {why}.")
    data = read_text(path)
    return parse(data, str(path), lambda name, nbytes: read_text(folder / name, nbytes)), zlib.crc32(data)


def clue_of(folder: Path) -> str:
    """Say what a folder without a manifest is, and what reads it, where the names in it tell; else ""."""
    if not folder.exists():
        return "the folder does not exist"
    if (folder / METADATA).exists():
        return (
            f"it is a folder of torch.distributed.checkpoint (it has a file {METADATA}), which `zeroshard checkpoint "
            "import` reads"
        )
    names = files.names_in(folder) if folder.is_dir() else []
    within = [name for name in names if any((folder / name / one).exists() for one in (MANIFEST, METADATA))]
    return f"name one of the {len(within)} checkpoints that it has, such as {within[-1]}" if within else ""


@final
class _ByName(Mapping[str, Spec]):
    """Tensors by name, without a second table of them; `places` are those in the manifest."""

    def __init__(self, places: dict[str, int], tensors: Sequence[Spec]) -> None:
        self.places, self._tensors = places, tensors

    def __getitem__(self, name: str) -> Spec:
        return self._tensors[self.places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@final
class CheckpointReader(Source):
    """A checkpoint whose manifest was read and agrees with the names, sizes and headers in its folder."""

    def __init__(self, folder: Path) -> None:
        self.manifest, digest = read_manifest(folder)
        tensors = self.manifest.tensors
        specs = _ByName({one.name: place for place, one in enumerate(tensors) if one.kind == "model"}, tensors)
        super().__init__(folder, specs, self.manifest.aliases, digest)
        self._specs = specs
        self.states = _ByName({one.name: place for place, one in enumerate(tensors) if one.kind != "model"}, tensors)
        """The optimizers' states and the generators, by name."""
        self._names = tensor_files(self.manifest.files)
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._checked: set[tuple[str, int]] = set()
        self._identities: dict[str, tuple[int, ...]] = {}
        self._check_folder()

    def _check_folder(self) -> None:
        own = self.manifest.names
        if stranger := next((n for n in files.names_in(self.path) if is_own_name(n) and n not in own), None):
            raise CheckpointError(f"{self.path / stranger}: is not of this checkpoint; its manifest does not name it.")
        for name, entry in self.manifest.files.items():
            with opened(self.path / name) as descriptor:
                self._identities[name] = files.identity_of(descriptor)
                if (nbytes := files.size_of(descriptor)) != entry.nbytes:
                    raise CheckpointError(f"{self.path / name}: has {nbytes} bytes, expected {entry.nbytes}.")
                if name != EXTRA:
                    self._check_header(descriptor, name)

    def _check_header(self, descriptor: int, name: str) -> None:
        offset = 0
        place = self._names.index(name)
        for piece in make_header(self.manifest.tensors, self.manifest.chunks, place):
            found = bytearray(len(piece))
            read_exactly(descriptor, memoryview(found), offset, self.path / name)
            if found != piece:
                raise CheckpointError(f"{self.path / name}: its header is not what the manifest says.")
            offset += len(piece)

    def fill(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements of a parameter or buffer; see `Source`."""
        self._fill_elements(self._specs.places[name], start, buffer)

    def fill_state(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements of an optimizer's state or of a generator; see `fill`."""
        self._fill_elements(self.states.places[name], start, buffer)

    def read_state(self, name: str, start: int, stop: int) -> bytearray:
        """Return elements [start, stop) of a state or generator."""
        data = bytearray((stop - start) * self.states[name].item_bytes)
        self.fill_state(name, start, memoryview(data))
        return data

    def read_extra(self) -> bytes:
        """Return the text of `extra.json`."""
        nbytes = self.manifest.files[EXTRA].nbytes
        if nbytes > strict.MAX_BYTES:
            raise CheckpointError(f"{self.path / EXTRA}: has {nbytes} bytes; at most {strict.MAX_BYTES} are read.")
        data = bytearray(nbytes)
        self._fill_bytes(EXTRA, 0, memoryview(data))
        return bytes(data)

    def verify(
        self,
        share: int = 0,
        shares: int = 1,
        on_bytes: Callable[[int], None] | None = None,
        but: frozenset[str] = frozenset(),
    ) -> None:
        """Check every block of every file, or one of several equal shares of them.

        Args:
            on_bytes: called with the bytes checked since its last call.
            but: kinds of tensors; blocks that hold nothing else are left to those who read them.

        Raises:
            CheckpointError: a block is damaged; the text names the file.
        """
        blocks = [(name, block) for name in self.manifest.files for block in self._blocks_beside(name, but)]
        self._check(blocks[share::shares], on_bytes)

    def verify_range(self, name: str, start: int, stop: int, *, is_state: bool = False) -> None:
        """Check the blocks that elements [start, stop) of a tensor lie in; see `verify`."""
        by_name = self.states if is_state else self._specs
        for file, offset, first, last in self._parts(by_name.places[name], start, stop):
            blocks = _blocks_of(offset, offset + (last - first) * by_name[name].item_bytes)
            self._check([(file, block) for block in blocks], None)

    def _blocks_beside(self, name: str, but: frozenset[str]) -> Iterable[int]:
        """Return the blocks of a file that hold anything but tensors of some kinds."""
        if not but:
            return range(len(self.manifest.files[name].crc32))
        found: set[int] = set()
        for chunk, offset in self.manifest.place_of(name):
            spec = self.manifest.tensors[chunk.tensor]
            if spec.kind not in but:
                found.update(_blocks_of(offset, offset + (chunk.stop - chunk.start) * spec.item_bytes))
        return sorted(found)

    def _check(self, blocks: Sequence[tuple[str, int]], on_bytes: Callable[[int], None] | None) -> None:
        """Check blocks that are not checked yet, one file after the other."""
        for name, of_file in groupby((one for one in blocks if one not in self._checked), key=lambda one: one[0]):
            buffer = memoryview(bytearray(min(BLOCK_BYTES, self.manifest.files[name].nbytes)))
            with self._open(name) as descriptor:
                for _, block in of_file:
                    nbytes = len(self._read_block(descriptor, name, block, buffer))
                    if on_bytes is not None:
                        on_bytes(nbytes)

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a file, and raise afterwards if it is not, or no longer, the one that was there at first."""
        with opened(self.path / name) as descriptor:
            yield descriptor
            if files.identity_of(descriptor) != self._identities[name]:
                raise CheckpointError(f"{self.path / name}: was changed or replaced while it was read.")

    def _fill_elements(self, tensor: int, start: int, buffer: memoryview) -> None:
        size = self.manifest.tensors[tensor].item_bytes
        for name, offset, first, last in self._parts(tensor, start, start + len(buffer) // size):
            self._fill_bytes(name, offset, buffer[(first - start) * size : (last - start) * size])

    def _parts(self, tensor: int, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield where elements [start, stop) of a tensor are: a file, an offset in bytes, the first and last there."""
        chunks, size = self.manifest.chunks, self.manifest.tensors[tensor].item_bytes
        for place in range(*chunks.first[tensor : tensor + 2].tolist()):
            begin, file = int(chunks.start[place]), int(chunks.file[place])
            first, last = max(start, begin), min(stop, int(chunks.stop[place]))
            if first < last:
                offset = int(chunks.header_bytes[file] + chunks.offset[place])
                yield self._names[file], offset + (first - begin) * size, first, last

    def _fill_bytes(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with checked bytes of a file."""
        end = offset + len(buffer)
        blocks = _blocks_of(offset, end)
        if all((name, block) in self._checked and (name, block) not in self._blocks for block in blocks):
            with self._open(name) as descriptor:
                read_exactly(descriptor, buffer, offset, self.path / name)
            return
        for block in blocks:
            base = block * BLOCK_BYTES
            first, last = max(offset, base), min(end, base + self._block_bytes(name, block))
            part = buffer[first - offset : last - offset]
            if len(part) == self._block_bytes(name, block):
                with self._open(name) as descriptor:
                    self._read_block(descriptor, name, block, part)
            else:
                part[:] = self._keep_block(name, block)[first - base : last - base]

    def _block_bytes(self, name: str, block: int) -> int:
        return min(BLOCK_BYTES, self.manifest.files[name].nbytes - block * BLOCK_BYTES)

    def _keep_block(self, name: str, block: int) -> memoryview:
        """Return a block; the last few are kept, since neighbouring tensors are read one after the other."""
        if (name, block) not in self._blocks:
            if len(self._blocks) == KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            buffer = memoryview(bytearray(min(BLOCK_BYTES, self.manifest.files[name].nbytes)))
            with self._open(name) as descriptor:
                self._blocks[name, block] = self._read_block(descriptor, name, block, buffer)
        self._blocks.move_to_end((name, block))
        return self._blocks[name, block]

    def _read_block(self, descriptor: int, name: str, block: int, buffer: memoryview) -> memoryview:
        entry = self.manifest.files[name]
        content = buffer[: self._block_bytes(name, block)]
        read_exactly(descriptor, content, block * BLOCK_BYTES, self.path / name)
        if (found := zlib.crc32(content)) != entry.crc32[block]:
            raise CheckpointError(
                f"{self.path / name}: bytes from {block * BLOCK_BYTES} are damaged: their checksum is {found}, "
                f"expected {entry.crc32[block]}."
            )
        self._checked.add((name, block))
        return content


def _blocks_of(first: int, last: int) -> range:
    """Return the blocks in which bytes [first, last) of a file lie."""
    return range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES) if last > first else 0)
