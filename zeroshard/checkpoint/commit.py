"""The folder of a checkpoint on its way: made, filled, completed, renamed; and old ones removed.

Owns the steps from a plan to a committed checkpoint. Each rank writes its files, rank 0 does the rest. It must not know
when ranks do so, or that there are collectives. Read `contents.py` and `manifest.py` first.

Note: names
    `.tmp-<name>-<host>-<process>-<random>` is a checkpoint on its way. Nothing reads it; the next save of the same name
    removes it if its process has ended on this host. `.old-<name>-<random>` is one that retention took away; the next
    retention in the folder removes what is left of it.
"""

import errno
import os
import platform
import re
import secrets
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.checkpoint import files
from zeroshard.checkpoint.contents import Plan
from zeroshard.checkpoint.manifest import (
    EXTRA,
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    file_name,
    make_header,
    serialize,
)
from zeroshard.checkpoint.reader import read_manifest
from zeroshard.checkpoint.writer import FileWriter, write_file
from zeroshard.core.errors import CheckpointError
from zeroshard.core.version import VERSION

__all__ = ["make_folder", "new_attempt", "publish", "remove_older", "write_manifest", "write_tensors"]

_OLD = re.compile(r"\.old-.+-[0-9a-f]{8}")


def new_attempt() -> str:
    """Return a name for an attempt; it says which process of which host is at work."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def make_folder(plan: Plan, folder: Path) -> None:
    """Make the temporary folder, where there is room and nothing would be overwritten."""
    if plan.path.exists() or plan.path.is_symlink():
        raise CheckpointError(f"{plan.path} exists, and a checkpoint is never overwritten. Choose another name.")
    for above in [*reversed(plan.path.parent.parents), plan.path.parent]:
        if not above.exists():
            files.make_folder(above)
            files.sync_folder(above.parent)
    _remove_dead(plan.path)
    if (free := files.free_bytes(plan.path.parent)) < plan.nbytes:
        raise CheckpointError(f"{plan.path.parent} has {free} free bytes, and the checkpoint needs {plan.nbytes}.")
    files.make_folder(folder)


def _remove_dead(path: Path) -> None:
    """Remove what attempts at the same checkpoint left behind whose process on this host has ended."""
    own = re.compile(rf"\.tmp-{re.escape(path.name)}-{_host()}-(\d+)-[0-9a-f]{{8}}")
    for name in files.names_in(path.parent):
        match = own.fullmatch(name)
        if match and not _is_alive(int(match[1])):
            files.remove_tree(path.parent / name)


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def write_tensors(plan: Plan, folder: Path, kind: str, rank: int, parts: Iterator[memoryview]) -> FileEntry:
    """Write this rank's file of a kind.

    Args:
        parts: the bytes of its chunks, in order, cut anywhere.
    """
    chunks = plan.chunks(kind, rank)
    with _told_if_full(plan, folder), FileWriter(folder / file_name(kind, rank, plan.world_size)) as writer:
        writer.write(memoryview(make_header(plan.specs, chunks)))
        for part in parts:
            writer.write(part)
    return writer.entry(chunks)


def write_manifest(plan: Plan, folder: Path, written: Mapping[str, FileEntry]) -> None:
    """Complete the folder: `extra.json` and, last, the manifest, which proves that every element is there once.

    Args:
        written: what all ranks wrote.
    """
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": VERSION}
    expires = plan.keep is not None
    with _told_if_full(plan, folder):
        entries = {**written, EXTRA: write_file(folder / EXTRA, plan.extra)}
        manifest = Manifest(plan.step, plan.world_size, tuple(plan.specs), plan.aliases, entries, software, expires)
        write_file(folder / MANIFEST, serialize(manifest))
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
    if path.exists():
        raise CheckpointError(f"{path} came into being meanwhile; nothing is overwritten.")
    files.rename(folder, path)
    files.sync_folder(path.parent)
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
        if manifest.expires and manifest.step <= step and set(files.names_in(folder)) == {*manifest.files, MANIFEST}:
            yield manifest.step, name
