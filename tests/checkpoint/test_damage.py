"""No damage goes unseen: every bit, every length, every file. The error names the file; memory stays as it was."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard.checkpoint.verify import latest, verify

from . import small

GENERATORS_FROM = 1200
"""Bytes of the small checkpoint's second file that are header and states, rounded up."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "step-2"))


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir())


def test_every_flipped_bit_is_seen(checkpoint: Path) -> None:
    verify(checkpoint)
    flips = 0
    for path in files_of(checkpoint):
        data = path.read_bytes()
        descriptor = os.open(path, os.O_WRONLY)
        for place, byte in enumerate(data):
            # The random generators are most of the bytes; of these a few bits, so that the test takes seconds.
            is_sampled = path.name.startswith("optim") and place > GENERATORS_FROM
            for bit in range(place % 61 == 0) if is_sampled else range(8):
                os.pwrite(descriptor, bytes([byte ^ 1 << bit]), place)
                with pytest.raises(zs.CheckpointError) as caught:
                    verify(checkpoint)
                assert str(path) in str(caught.value), (path, place, bit)
                flips += 1
            os.pwrite(descriptor, bytes([byte]), place)
        os.close(descriptor)
    verify(checkpoint)
    assert flips > 20_000


def test_every_truncation_is_seen(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        data = path.read_bytes()
        lengths = [n for n in range(len(data)) if n < GENERATORS_FROM or n % 13 == 0]
        for length in lengths:
            os.truncate(path, length)
            with pytest.raises(zs.CheckpointError) as caught:
                verify(checkpoint)
            assert str(path) in str(caught.value), (path, length)
            with path.open("r+b") as file:
                file.seek(length)
                file.write(data[length:])
    verify(checkpoint)


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_file_that_is_not_the_one_written_is_seen(
    fault: Callable[[Path, Path], None], pristine: Path, tmp_path: Path
) -> None:
    # The other has the same names and sizes, and is of another run.
    other = small.Small(5).train(2).zero.save(tmp_path / "other" / "step-2", {"steps": 7})
    for path in files_of(pristine):
        checkpoint = Path(shutil.copytree(pristine, tmp_path / f"{path.name}-step-2"))
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


def test_swapped_and_copied_files_are_seen(pristine: Path, tmp_path: Path) -> None:
    names = [path.name for path in files_of(pristine)]
    for number, (one, other) in enumerate([(a, b) for a in names for b in names if a < b]):
        checkpoint = Path(shutil.copytree(pristine, tmp_path / f"{number}"))
        shutil.copy(pristine / one, checkpoint / other)
        shutil.copy(pristine / other, checkpoint / one)
        with pytest.raises(zs.CheckpointError):
            verify(checkpoint)
    checkpoint = Path(shutil.copytree(pristine, tmp_path / "copied"))
    shutil.copy(checkpoint / names[-1], checkpoint / "params-00002-of-00002.safetensors")
    with pytest.raises(zs.CheckpointError, match=r"params-00002-of-00002.* is not of this checkpoint"):
        verify(checkpoint)


def test_a_damaged_load_changes_nothing(checkpoint: Path) -> None:
    draw = random.Random(0)
    trainer = small.Small(1).train(1)
    before = trainer.state()
    for path in files_of(checkpoint) * 12:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        with small.changed(path, bytes(data)), pytest.raises(zs.CheckpointError, match=path.name):
            trainer.zero.load(checkpoint)
        assert trainer.state() == before
    trainer.zero.load(checkpoint)
    assert trainer.state() != before


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    older, newer = small.write(tmp_path, 9), small.write(tmp_path, 10)
    assert latest(tmp_path) == newer
    # LATEST is for people: its damage is harmless.
    (tmp_path / "LATEST").write_bytes(b"step-9\n\xff")
    (tmp_path / ".tmp-step-11-x").mkdir()
    assert latest(tmp_path) == newer
    with (newer / "extra.json").open("r+b") as file:
        file.write(b"!")
    with pytest.warns(UserWarning, match="step-9 is taken, because a newer one is damaged: .*extra.json"):
        assert latest(tmp_path) == older
    (older / "manifest.json").write_bytes(b"")
    with pytest.raises(zs.CheckpointError, match="no checkpoint is whole"):
        latest(tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    before = {file.name: file.read_bytes() for file in files_of(path)}
    with pytest.raises(zs.CheckpointError, match="exists, and a checkpoint is never overwritten"):
        small.Small(3).zero.save(path)
    assert {file.name: file.read_bytes() for file in files_of(path)} == before
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-2"]
