"""Verification and listing of checkpoints, and the search for the newest.

Without torch. Owns the queries that need only files. Read `reader.py` first.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from zeroshard.checkpoint import files
from zeroshard.checkpoint.manifest import ISLANDS, PARTS, Manifest, is_own_name
from zeroshard.checkpoint.reader import CheckpointReader, path_of, read_manifest
from zeroshard.table.errors import CheckpointError, printable

__all__ = ["Listed", "latest", "list_below", "list_checkpoints", "other_islands", "part_of", "verify"]


def verify(path: str | Path, on_bytes: Callable[[int, int], None] | None = None) -> Manifest:
    """Read a checkpoint completely, with the parts of all islands, and verify its checksums.

    Args:
        path: the folder of the checkpoint.
        on_bytes: called after each block with (checked bytes, total bytes).

    Returns: the manifest of the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged; the text names the file.
    """
    reader = CheckpointReader(Path(path))
    total, done = sum(entry.nbytes for entry in reader.manifest.files.values()), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_bytes is not None:
            on_bytes(done, total)

    reader.verify(on_bytes=count)
    for island in other_islands(reader):
        part_of(reader, island).verify()
    return reader.manifest


def part_of(reader: CheckpointReader, island: int) -> CheckpointReader:
    """Open the part of another island than the first one, which the reader has.

    Raises:
        CheckpointError: it is missing or damaged, or was not saved together with that of the first island.
    """
    part = CheckpointReader(reader.path / ISLANDS / str(island))
    if PARTS in reader.states and _digests(reader)[island - 1 : island] != [part.digest]:
        raise CheckpointError(f"{part.path}: was not saved together with {reader.path}: it is of another checkpoint.")
    return part


def _digests(reader: CheckpointReader) -> list[int]:
    """Return the checksums of the manifests of the other islands' parts."""
    spec = reader.states[PARTS]
    if spec.dtype != "I64":
        raise CheckpointError(f"{reader.path}: '{PARTS}' is {spec.dtype}.")
    return memoryview(reader.read_state(PARTS, 0, spec.numel)).cast("q").tolist()


def other_islands(reader: CheckpointReader) -> Iterable[int]:
    """Return the numbers of the islands that have parts; checkpoints of earlier versions do not say how many."""
    if PARTS in reader.states:
        return range(1, len(_digests(reader)) + 1)
    others = reader.path / ISLANDS
    return [int(name) for name in files.names_in(others) if name.isdecimal()] if others.is_dir() else ()


@dataclass(frozen=True)
class Listed:
    """A folder with a checkpoint, or what is left of one. `problem` is empty if its manifest is valid."""

    path: Path
    step: int
    world_size: int
    tensors: int
    nbytes: int
    problem: str
    is_model_only: bool = False


def list_checkpoints(folder: str | Path) -> list[Listed]:
    """Return the committed checkpoints in a folder, lowest step first, without reading data or following links.

    Args:
        folder: the folder that contains checkpoints.

    Returns: for each checkpoint, its `path`, `step`, `world_size`, `tensors`, `nbytes`, `problem`, which is empty if
        its manifest is valid, and `is_model_only`.

    Raises:
        CheckpointError: the folder does not exist, or is a file or a checkpoint itself.

    ```python
    import tempfile, torch, zeroshard as zs

    zero = zs.shard(torch.nn.Linear(4, 1))
    with tempfile.TemporaryDirectory() as folder:
        zero.save(f"{folder}/step-3")
        assert [one.step for one in zs.list_checkpoints(folder)] == [3]
    ```
    """
    root = path_of(folder, "zs.list_checkpoints(folder)")
    if not root.is_dir():
        raise CheckpointError(f"{root}: {'this is a file' if root.exists() else 'the folder does not exist'}.")
    if (own := _look(root)) is not None and not own.problem:
        raise CheckpointError(f"{root}: this is a checkpoint. Load it, or give the folder that it is in.")
    found = [_look(root / name) for name in files.names_in(root) if not name.startswith(".")]
    return sorted((one for one in found if one is not None), key=lambda one: (one.step, one.path.name))


def list_below(folder: str | Path) -> list[Listed]:
    """Return the checkpoints at a path and in the folders below it, without hidden folders and links.

    Raises:
        CheckpointError: the folder does not exist.
    """
    root = Path(folder)
    if (own := _look(root)) is not None:
        return [own]
    found = list_checkpoints(root)
    listed = {one.path for one in found}
    for name in files.names_in(root):
        below = root / name
        if below not in listed and below.is_dir() and not below.is_symlink() and not name.startswith("."):
            found += list_below(below)
    return found


def _look(path: Path) -> Listed | None:
    """Return what a path holds; None if it is no checkpoint and shows no remains of one."""
    is_lost = path.is_symlink() and not path.exists()
    if not is_lost and not (path.is_dir() and any(map(is_own_name, files.names_in(path)))):
        return None
    try:
        manifest, _ = read_manifest(path)
    except CheckpointError as error:
        return Listed(path, -1, 0, 0, 0, str(error))
    nbytes = sum(entry.nbytes for entry in manifest.files.values())
    size = manifest.world_size, len(manifest.tensors), nbytes
    return Listed(path, manifest.step, *size, "", manifest.is_model_only)


def latest(folder: str | Path) -> Path | None:
    """Return the verified checkpoint with the highest step in a folder; None without checkpoints.

    Damaged checkpoints and links are skipped with a warning. One that was saved with `model_only`, from which no
    training resumes, is returned only if no other is complete. The file LATEST is only for people. Give each model of a
    job a folder of its own: the newest is looked for among the checkpoints of all.

    Args:
        folder: the folder that contains checkpoints.

    Raises:
        CheckpointError: checkpoints exist, but none is complete, or the folder is a file or a checkpoint itself;
            starting from the beginning would be a surprise.

    ```python
    import tempfile, torch, zeroshard as zs

    model = torch.nn.Linear(4, 1)
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        assert zs.latest(folder) is None
        zero.save(f"{folder}/step-1")
        assert zs.latest(folder).name == "step-1"
    ```
    """
    root = path_of(folder, "zs.latest(folder)")
    if not root.exists() and not root.is_symlink():
        return None
    found = list_checkpoints(folder)
    # The step of a checkpoint with an unreadable manifest is unknown: it may have been the newest.
    problems = [one.problem for one in found if one.problem]
    valid = [one for one in found if not one.problem]
    for one in sorted(valid, key=lambda one: (not one.is_model_only, one.step, one.path.name), reverse=True):
        try:
            verify(one.path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            for problem in problems:
                warnings.warn(printable(f"using {one.path}; skipped: {problem}"), stacklevel=2)
            return one.path
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{folder}: no checkpoint is complete:\n{listed}\nRestore one, or start in another folder."
        )
    return None
