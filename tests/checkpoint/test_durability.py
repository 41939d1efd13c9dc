"""What a cut of power would leave: nothing is committed, or removed, before what it rests on is on the disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroshard.checkpoint import files

from . import small


class Disk:
    """Follows file operations, and knows what of them would survive a cut of power.

    Bytes survive once their file is flushed; names, and what they are names of, once their folder is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed = 0
        self.removed = 0
        self._paths: dict[int, Path] = {}
        self._unflushed: set[Path] = set()
        self._changed: set[Path] = set()
        for name in ("create", "write", "sync", "rename", "sync_folder", "make_folder", "remove_tree", "remove"):
            monkeypatch.setattr(files, name, self._watched(getattr(files, name), getattr(self, f"_{name}")))

    def require_flushed(self, folder: Path) -> None:
        """Require that everything in a folder, and its names, would survive."""
        lost = sorted(path.name for path in self._unflushed if path.is_relative_to(folder))
        assert lost == [], f"{folder.name}: bytes of these may be lost"
        names = sorted(path.name for path in self._changed if path.is_relative_to(folder))
        assert names == [], f"{folder.name}: names in these may be lost"

    def _watched(self, original: Callable[..., Any], follow: Callable[..., None]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            result = original(*args)
            follow(result, *args)
            return result

        return operation

    def _create(self, descriptor: int, path: Path, *mode: int | None) -> None:
        self._paths[descriptor] = path
        self._unflushed.add(path)
        self._changed.add(path.parent)

    def _write(self, count: int, descriptor: int, data: memoryview) -> None:
        self._unflushed.add(self._paths[descriptor])

    def _sync(self, _: None, descriptor: int) -> None:
        self._unflushed.discard(self._paths[descriptor])

    def _make_folder(self, _: None, path: Path, *mode: int | None) -> None:
        self._changed.add(path.parent)

    def _remove(self, _: None, path: Path) -> None:
        self._changed.add(path.parent)

    def _sync_folder(self, _: None, path: Path) -> None:
        self._changed.discard(path)

    def _rename(self, _: None, source: Path, target: Path) -> None:
        if target.is_dir() and not target.name.startswith("."):
            self.require_flushed(source)
            self.committed += 1
        elif not target.is_dir():
            assert source not in self._unflushed, f"{source.name}: a name is given to bytes that may be lost"
        self._changed |= {source.parent, target.parent}

    def _remove_tree(self, _: None, path: Path) -> None:
        assert path.parent not in self._changed, f"{path.name}: its files go while its name may come back"
        self.removed += 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cut_of_power_leaves_whole_checkpoints(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    trainer = small.Small()
    for step in range(1, 6):
        path = trainer.train(1).zero.save(tmp_path / f"step-{step}", asynchronous=asynchronous, keep=2)
        trainer.zero.wait()
        assert disk.committed == step
        disk.require_flushed(path)
        newest = f".old-step-{step - 2}"
        assert not [name for name in os.listdir(tmp_path) if name.startswith(newest)]
    assert disk.removed == 3


def test_a_commit_is_on_the_disk_when_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a step that a program was told of could be gone, and retention's removals with it kept."""
    operations: list[tuple[str, Path]] = []
    for name in ("rename", "sync_folder"):
        original = getattr(files, name)

        def watched(*paths: Path, name: str = name, original: Callable[..., None] = original) -> None:
            original(*paths)
            operations.append((name, paths[-1]))

        monkeypatch.setattr(files, name, watched)
    path = small.write(tmp_path)
    commit = operations.index(("rename", path))
    assert operations[commit + 1] == ("sync_folder", tmp_path)
