"""The steps of a checkpoint's folder: creation, writing, completion and renaming; and the removal of old ones.

Owns the steps from a plan to a committed checkpoint. Each rank writes its files, rank 0 does the rest. It must not know
when ranks do so, or that there are collectives. Read `attempt.py`, `contents.py` and `manifest.py` first.

Note: names
    `.old-<name>-<random>` is a checkpoint that retention is removing; the next retention in the folder removes its
    remaining files.
"""

import errno
import os
import platform
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from zeroshard.checkpoint import files
from zeroshard.checkpoint.attempt import begin, commit
from zeroshard.checkpoint.contents import Plan
from zeroshard.checkpoint.index import serialize
from zeroshard.checkpoint.manifest import (
    BLOCK_BYTES,
    EXTRA,
    ISLANDS,
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    is_model_only,
)
from zeroshard.checkpoint.ranges import Spec, make_header
from zeroshard.checkpoint.reader import read_manifest
from zeroshard.checkpoint.writer import FileWriter, write_file
from zeroshard.core.version import VERSION
from zeroshard.table.errors import CheckpointError, printable

__all__ = ["check_limits", "make_folder", "publish", "remove_older", "write_manifest", "write_tensors"]

_OLD = re.compile(r"\.old-.+-[0-9a-f]{8}")
_NUMBER = re.compile(r"[-+]?(\d[\d.]*(e[-+]?\d+)?|\b(nan|inf)\b)", re.IGNORECASE)


def make_folder(plan: Plan, folder: Path) -> None:
    """Create the temporary folder, if the disk has space and nothing would be overwritten."""
    begin(plan.path)
    if (free := files.free_bytes(plan.path.parent)) < plan.nbytes:
        raise CheckpointError(
            f"{plan.path.parent} has {free} free bytes, and the checkpoint needs {plan.nbytes}. Free space first."
        )
    files.make_folder(folder, plan.mode)


def check_limits(plan: Plan) -> None:
    """Raise, before tensors are written, unless the manifest of this plan is within the limits of a reader.

    Raises:
        CheckpointError: names or hyper-parameters exceed a limit.
    """
    chunks = plan.chunks
    sizes = dict(zip(plan.files, (chunks.header_bytes + chunks.data_bytes).tolist(), strict=True))
    sizes[EXTRA] = len(plan.extra)
    # The longest possible checksums: the true ones need at most as many bytes.
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
    with _told_if_full(plan, folder), FileWriter(folder / name, plan.mode) as writer:
        for piece in make_header(plan.specs, plan.chunks, plan.files.index(name)):
            writer.write(memoryview(piece))
        for part in parts:
            writer.write(part)
    return writer.entry()


def write_manifest(plan: Plan, folder: Path, written: Mapping[str, FileEntry]) -> None:
    """Complete the folder: write `extra.json` and, last, the manifest, which contains every element exactly once.

    Args:
        written: the files of all ranks.
    """
    with _told_if_full(plan, folder):
        entries = {**written, EXTRA: write_file(folder / EXTRA, plan.extra, plan.mode)}
        for name, text in serialize(_manifest_of(plan, entries)).items():
            write_file(folder / name, text, plan.mode)
        files.sync_folder(folder)


@contextmanager
def _told_if_full(plan: Plan, folder: Path) -> Iterator[None]:
    """Add the free and needed bytes to the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"{error.strerror}: {files.free_bytes(folder)} bytes are free, and the checkpoint needs {plan.nbytes}"
        raise OSError(error.errno, text, error.filename) from error


def publish(path: Path, folder: Path) -> None:
    """Commit a complete folder as a checkpoint, atomically, and write its name to LATEST, or warn."""
    commit(folder, path)
    temporary, hint = path.parent / f".tmp-{LATEST}-{secrets.token_hex(4)}", path.parent / LATEST
    try:
        write_file(temporary, os.fsencode(f"{path.name}\n"))
        files.rename(temporary, hint)
    except OSError as error:
        # Nothing reads the hint, and the checkpoint is there: ranks that raised would save it again.
        with suppress(OSError):
            files.remove(temporary)
        text = f"zero.save() committed {path}, but could not write its name to {hint}, a hint for people: {error}"
        warnings.warn(printable(text), stacklevel=2)


def remove_older(plan: Plan, keep: int) -> None:
    """Remove expiring checkpoints that are older than this one, except the newest.

    Only complete folders with a checkpoint's own files and nothing else are removed. Those of the model alone count
    apart: no training resumes from them. So do those of another model, which has tensors of other names or shapes, or
    names that differ in more than numbers (generator-20 and critic-20).

    Args:
        plan: of the newest checkpoint, which is committed.
        keep: the number of checkpoints to keep, including this one.
    """
    path = plan.path
    for _, name in sorted(_expiring(plan), reverse=True)[keep - 1 :]:
        files.rename(path.parent / name, path.parent / f".old-{name}-{secrets.token_hex(4)}")
    # The rename must reach the disk before files are removed: else a power cut could leave an incomplete checkpoint.
    files.sync_folder(path.parent)
    for name in files.names_in(path.parent):
        if _OLD.fullmatch(name):
            files.remove_tree(path.parent / name)


def _expiring(plan: Plan) -> Iterator[tuple[int, str]]:
    """Yield step and name of each checkpoint beside that of `plan` that may be removed."""
    path, kind, tensors = plan.path, is_model_only(plan.specs), _model_of(plan.specs)
    for name in files.names_in(path.parent):
        folder = path.parent / name
        if name.startswith(".") or name == path.name or _stem(name) != _stem(path.name):
            continue
        if folder.is_symlink() or not (folder / MANIFEST).is_file():
            continue
        try:
            manifest, _ = read_manifest(folder)
        except CheckpointError:
            continue
        is_older = manifest.expires and manifest.step <= plan.step
        is_alike = manifest.is_model_only == kind and _model_of(manifest.tensors) == tensors
        if is_older and is_alike and set(files.names_in(folder)) - {ISLANDS} == manifest.names:
            yield manifest.step, name


def _stem(name: str) -> str:
    """Return what the names of one model's checkpoints have in common."""
    return _NUMBER.sub("", name)


def _model_of(specs: Iterable[Spec]) -> set[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of a model's tensors; training may go on in another dtype."""
    return {(spec.name, spec.shape) for spec in specs if spec.kind == "model"}
