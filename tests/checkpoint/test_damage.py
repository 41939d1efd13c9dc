"""No damage goes unseen: every bit, every length, every file. The error names the file; memory stays as it was."""

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard.checkpoint.verify import latest, verify

from . import small
from .damage import FAULTS, GENERATORS_FROM, files_of, flip_bits, replace_files, swap_files, truncate
from .faulty import Failing


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "step-2"))


@pytest.mark.rotates
def test_every_flipped_bit_is_seen(checkpoint: Path) -> None:
    verify(checkpoint)
    assert flip_bits(checkpoint, every=122) > 10_000


def test_every_truncation_is_seen(checkpoint: Path) -> None:
    assert truncate(checkpoint, every=13) > 3_000


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_file_that_is_not_the_one_written_is_seen(
    fault: Callable[[Path, Path], None], pristine: Path, tmp_path: Path
) -> None:
    assert replace_files(fault, pristine, tmp_path) == 4


def test_swapped_and_copied_files_are_seen(pristine: Path, tmp_path: Path) -> None:
    assert swap_files(pristine, tmp_path) == 6
    checkpoint = Path(shutil.copytree(pristine, tmp_path / "copied"))
    shutil.copy(files_of(checkpoint)[-1], checkpoint / "params-00002-of-00002.safetensors")
    with pytest.raises(zs.CheckpointError, match=r"params-00002-of-00002.* is not of this checkpoint"):
        verify(checkpoint)


def test_a_damaged_load_changes_nothing(checkpoint: Path) -> None:
    draw = random.Random(0)
    trainer = small.Small(1).train(1)
    before = trainer.state()
    for path in files_of(checkpoint) * 12:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        text = f"(?s){re.escape(path.name)}.* Nothing in memory was changed"
        with small.changed(path, bytes(data)), pytest.raises(zs.CheckpointError, match=text):
            trainer.zero.load(checkpoint)
        assert trainer.state() == before
    trainer.zero.load(checkpoint)
    assert trainer.state() != before


@pytest.mark.parametrize("how", ["in place", "by another"])
@pytest.mark.parametrize("name", ["params-00001-of-00001.safetensors", "optim-00001-of-00001.safetensors"])
def test_a_file_that_changes_during_a_load_is_noticed(name: str, how: str, pristine: Path, tmp_path: Path) -> None:
    """Before any of its operations: what is loaded is what was checked, or there is an error."""
    saved = small.Small(1)
    saved.zero.load(pristine)
    expected, refused = saved.state(), []
    for number in range(1, 200):
        checkpoint = Path(shutil.copytree(pristine, tmp_path / f"{number}"))
        data = bytearray((checkpoint / name).read_bytes())
        data[GENERATORS_FROM // 2 if name.startswith("optim") else -1] ^= 1

        def change(
            operation: str, args: tuple[object, ...], path: Path = checkpoint / name, data: bytes = data
        ) -> None:
            if how == "by another":
                path.with_name("another").write_bytes(data)
                path.with_name("another").rename(path)
            else:
                path.write_bytes(data)

        trainer, text = small.Small(1), ""
        with Failing(number, change) as failing:
            try:
                trainer.zero.load(checkpoint)
            except zs.CheckpointError as error:
                text = str(error)
        if text:
            assert str(checkpoint / name) in text
            refused.append("Memory is partly changed" in text)
        else:
            assert trainer.state() == expected, f"operation {number}, {failing.name}"
        if failing.count < number:
            break
    # The generators are looked at first, and the block that they lie in, which is all of that file, is kept.
    assert set(refused) == ({False, True} if name.startswith("params") else {False})


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
    with pytest.warns(UserWarning, match="using .*step-9; skipped: .*extra.json"):
        assert latest(tmp_path) == older
    (older / "manifest.json").write_bytes(b"")
    with pytest.raises(zs.CheckpointError, match="no checkpoint is complete"):
        latest(tmp_path)


def lose_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def link_manifest(checkpoint: Path) -> None:
    lose_manifest(checkpoint)
    (checkpoint / "manifest.json").symlink_to("gone")


def link_checkpoint(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to("gone")


@pytest.mark.parametrize("lose", [lose_manifest, link_manifest, link_checkpoint])
def test_the_remains_of_a_checkpoint_are_seen(lose: Callable[[Path], None], tmp_path: Path) -> None:
    older, newer = small.write(tmp_path, 9), small.write(tmp_path, 10)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.png").touch()  # no remains
    lose(newer)
    with pytest.warns(UserWarning, match="using .*step-9; skipped: .*step-10") as told:
        assert latest(tmp_path) == older
    assert len(told) == 1
    lose(older)
    with pytest.raises(zs.CheckpointError, match="no checkpoint is complete"):
        latest(tmp_path)


def test_a_folder_of_checkpoints_that_is_gone_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("unmounted")
    with pytest.raises(zs.CheckpointError, match="runs: the folder does not exist"):
        latest(tmp_path / "runs")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    before = {file.name: file.read_bytes() for file in files_of(path)}
    with pytest.raises(zs.CheckpointError, match="exists, and zeroshard overwrites nothing"):
        small.Small(3).zero.save(path)
    assert {file.name: file.read_bytes() for file in files_of(path)} == before
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-2"]
