"""Damage of every kind to a small checkpoint, each required to be seen, and counted.

Owns what is tried. `test_damage.py` tries what takes seconds of it, `tools/damage.py` everything.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard.checkpoint.verify import verify

from . import small

GENERATORS_FROM = 1200
"""Bytes of the small checkpoint's second file that are header and states, rounded up."""


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir())


def require_refusal(checkpoint: Path, named: Path, what: object) -> None:
    """Require an error that names a path."""
    with pytest.raises(zs.CheckpointError) as caught:
        verify(checkpoint)
    assert str(named) in str(caught.value), (named, what)


def flip_bits(checkpoint: Path, every: int = 1) -> int:
    """Flip one bit after the other and return how many.

    Args:
        every: of the random generators, which are most of the bytes, one bit of so many bytes; 1 for all bits.
    """
    flips = 0
    for path in files_of(checkpoint):
        data = path.read_bytes()
        descriptor = os.open(path, os.O_WRONLY)
        for place, byte in enumerate(data):
            is_sampled = every > 1 and path.name.startswith("optim") and place > GENERATORS_FROM
            for bit in range(place % every == 0) if is_sampled else range(8):
                os.pwrite(descriptor, bytes([byte ^ 1 << bit]), place)
                require_refusal(checkpoint, path, (place, bit))
                flips += 1
            os.pwrite(descriptor, bytes([byte]), place)
        os.close(descriptor)
    verify(checkpoint)
    return flips


def truncate(checkpoint: Path, every: int = 1) -> int:
    """Cut each file at one length after the other and return how many.

    Args:
        every: beyond the first bytes, one length of so many; 1 for all lengths.
    """
    cuts = 0
    for path in files_of(checkpoint):
        data = path.read_bytes()
        for length in range(len(data)):
            if length < GENERATORS_FROM or length % every == 0:
                os.truncate(path, length)
                require_refusal(checkpoint, path, length)
                with path.open("r+b") as file:
                    file.seek(length)
                    file.write(data[length:])
                cuts += 1
    verify(checkpoint)
    return cuts


def remove(path: Path, other: Path) -> None:
    path.unlink()


def grow(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_stale(path: Path, other: Path) -> None:
    shutil.copy(other / path.name, path)


def replace_by_link(path: Path, other: Path) -> None:
    path.rename(path.parent / "moved")
    path.symlink_to("moved")


def replace_by_pipe(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS = [remove, grow, replace_by_stale, replace_by_link, replace_by_pipe, replace_by_folder]


def replace_files(fault: Callable[[Path, Path], None], pristine: Path, folder: Path) -> int:
    """Do something to each file in turn, load, and require that nothing has changed; return how many files."""
    # The other has the same names and sizes, and is of another run.
    other = small.Small(5).train(2).zero.save(folder / "other" / "step-2", {"steps": 7})
    for path in files_of(pristine):
        checkpoint = Path(shutil.copytree(pristine, folder / f"{path.name}-step-2"))
        fault(checkpoint / path.name, other)
        trainer = small.Small(1).train(1)
        before = trainer.state()
        with pytest.raises(zs.CheckpointError) as caught:
            trainer.zero.load(checkpoint)
        # A manifest that is gone, or another's, shows in the folder or in the first file that does not fit it.
        named = checkpoint if path.name == "manifest.json" else checkpoint / path.name
        assert str(named) in str(caught.value)
        assert "Nothing in memory was changed." in str(caught.value)
        assert trainer.state() == before
    return len(files_of(pristine))


def swap_files(pristine: Path, folder: Path) -> int:
    """Swap the contents of each two files and return how many pairs."""
    names = [path.name for path in files_of(pristine)]
    pairs = [(one, other) for one in names for other in names if one < other]
    for one, other in pairs:
        checkpoint = Path(shutil.copytree(pristine, folder / f"{one}-{other}"))
        shutil.copy(pristine / one, checkpoint / other)
        shutil.copy(pristine / other, checkpoint / one)
        require_refusal(checkpoint, checkpoint, (one, other))
    return len(pairs)
