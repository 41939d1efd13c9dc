"""The folder of a checkpoint on its way: made, filled, completed, renamed; and old ones removed.

Owns the steps from a plan to a committed checkpoint. Each rank writes its files, rank 0 does the rest. It must not know
when ranks do so, or that there are collectives. Read `attempt.py`, `contents.py` and `manifest.py` first.

Note: names
    `.old-<name>-<random>` is a checkpoint that retention took away; the next retention in the folder removes what is
    left of it.
"""

import errno
import platform
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.checkpoint import files
from zeroshard.checkpoint.attempt import begin, commit
from zeroshard.checkpoint.contents import Plan
from zeroshard.checkpoint.index import serialize
from zeroshard.checkpoint.manifest import (
    BLOCK_BYTES,
    EXTRA,
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
)
from zeroshard.checkpoint.ranges import make_header
from zeroshard.checkpoint.reader import read_manifest
from zeroshard.checkpoint.writer import FileWriter, write_file
from zeroshard.core.version import VERSION
from zeroshard.table.errors import CheckpointError

__all__ = ["check_limits", "make_folder", "publish", "remove_older", "write_manifest", "write_tensors"]

_OLD = re.compile(r"\.old-.+-[0-9a-f]{8}")


def make_folder(plan: Plan, folder: Path) -> None:
    """Make the temporary folder, where there is room and nothing would be overwritten."""
    begin(plan.path)
    if (free := files.free_bytes(plan.path.parent)) < plan.nbytes:
        raise CheckpointError(f"{plan.path.parent} has {free} free bytes, and the checkpoint needs {plan.nbytes}.")
    files.make_folder(folder)


def check_limits(plan: Plan) -> None:
    """Raise unless a manifest of this plan would be read: before tensors are written, which may take long.

    Raises:
        CheckpointError: it would not; names or hyper-parameters are beyond a limit.
    """
    chunks = plan.chunks
    sizes = dict(zip(plan.files, (chunks.header_bytes + chunks.data_bytes).tolist(), strict=True))
    sizes[EXTRA] = len(plan.extra)
    # The longest checksums there are: the true ones take as many bytes or fewer.
    crc32 = 2**32 - 1
    entries = {name: FileEntry(nbytes, [crc32] * -(-nbytes // BLOCK_BYTES)) for name, nbytes in sizes.items()}
    serialize(_manifest_of(plan, entries))


def _manifest_of(plan: Plan, entries: Mapping[str, FileEntry]) -> Manifest:
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": VERSION}
    expires = plan.keep is not None
    specs = tuple(plan.specs)
    return Manifest(plan.step, plan.world_size, specs, plan.aliases, entries, plan.chunks, software, expires)


def write_tensors(plan: Plan, folder: Path, name: str, parts: Iterator[memoryview]) -> FileEntry:
    """Write one of this rank's files.

    Args:
        parts: the bytes of its chunks, in order, cut anywhere.
    """
    with _told_if_full(plan, folder), FileWriter(folder / name) as writer:
        for piece in make_header(plan.specs, plan.chunks, plan.files.index(name)):
            writer.write(memoryview(piece))
        for part in parts:
            writer.write(part)
    return writer.entry()


def write_manifest(plan: Plan, folder: Path, written: Mapping[str, FileEntry]) -> None:
    """Complete the folder: `extra.json` and, last, the manifest, which proves that every element is there once.

    Args:
        written: what all ranks wrote.
    """
    with _told_if_full(plan, folder):
        entries = {**written, EXTRA: write_file(folder / EXTRA, plan.extra)}
        for name, text in serialize(_manifest_of(plan, entries)).items():
            write_file(folder / name, text)
        files.sync_folder(folder)


@contextmanager
def _told_if_full(plan: Plan, folder: Path) -> Iterator[None]:
    """Add to the error of a full disk how much is free and how much is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"{error.strerror}: {files.free_bytes(folder)} bytes are free, and the checkpoint needs {plan.nbytes}"
        raise OSError(error.errno, text, error.filename) from error


def publish(path: Path, folder: Path) -> None:
    """Make a complete folder a checkpoint, in one step, and have LATEST name it."""
    commit(folder, path)
    temporary = path.parent / f".tmp-{LATEST}-{secrets.token_hex(4)}"
    write_file(temporary, f"{path.name}\n".encode())
    files.rename(temporary, path.parent / LATEST)


def remove_older(path: Path, step: int, keep: int) -> None:
    """Remove checkpoints that expire and are older than this one, but for the newest.

    Only whole folders are removed that hold a checkpoint's own files and nothing else.

    Args:
        path: the newest, which is committed.
        keep: how many stay, this one included.
    """
    older = sorted(_expiring(path, step), reverse=True)
    for _, name in older[keep - 1 :]:
        files.rename(path.parent / name, path.parent / f".old-{name}-{secrets.token_hex(4)}")
    # A name must be gone for good before files are: a power cut would else leave a checkpoint with holes.
    files.sync_folder(path.parent)
    for name in files.names_in(path.parent):
        if _OLD.fullmatch(name):
            files.remove_tree(path.parent / name)


def _expiring(path: Path, step: int) -> Iterator[tuple[int, str]]:
    """Yield step and name of each checkpoint beside `path` that may be removed."""
    for name in files.names_in(path.parent):
        folder = path.parent / name
        if name.startswith(".") or name == path.name or folder.is_symlink() or not (folder / MANIFEST).is_file():
            continue
        try:
            manifest, _ = read_manifest(folder)
        except CheckpointError:
            continue
        if manifest.expires and manifest.step <= step and set(files.names_in(folder)) == manifest.names:
            yield manifest.step, name
