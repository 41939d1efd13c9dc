"""What is recorded for a loss of power: saves, a retention, an import, an export; and how the next run starts.

Owns the scenarios of `test_powerloss.py` and `tools/powerloss.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zeroshard as zs
from zeroshard.checkpoint.folders import FolderReader, export
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.checkpoint.verify import list_checkpoints, verify
from zeroshard.testing import run_ranks

from . import small
from .powerloss import Moment, Operation, Recorder, merged

TIMEOUT_S = 60.0
RUNS = "runs"


@dataclass(frozen=True)
class Scenario:
    """Something that writes, and what must go on after it.

    Args:
        record: runs on a rank, writes below a folder, and returns the operations.
        ranks: how many.
        start: starts the next run on what was left, and requires that it goes on.
    """

    record: Callable[[str], list[Operation]]
    ranks: int
    start: Callable[[Path, Moment], None]

    def operations(self, folder: Path) -> list[Operation]:
        """Return what all ranks did below `folder`, which is made."""
        folder.mkdir()
        return merged(run_ranks(self.record, self.ranks, str(folder), timeout_s=TIMEOUT_S))


def save_at_once(folder: str) -> list[Operation]:
    """Save four times, and keep two."""
    return _save(folder, asynchronous=False, keeps=(2, 2, 2, 2))


def save_in_the_background(folder: str) -> list[Operation]:
    """Save four times in the background, and keep two."""
    return _save(folder, asynchronous=True, keeps=(2, 2, 2, 2))


def remove_several(folder: str) -> list[Operation]:
    """Save three times, and a fourth time with two of the older ones to be removed at once."""
    return _save(folder, asynchronous=False, keeps=(9, 9, 9, 2))


def _save(folder: str, *, asynchronous: bool, keeps: tuple[int, ...]) -> list[Operation]:
    trainer = small.Small()
    with Recorder(Path(folder)) as recorder:
        for step, keep in enumerate(keeps, start=1):
            path = Path(folder, RUNS, f"step-{step}")
            trainer.train(1).zero.save(path, asynchronous=asynchronous, keep=keep)
            trainer.zero.wait()
            if trainer.zero.mesh.rank == 0:
                recorder.note("returned", f"{RUNS}/{path.name}")
    return recorder.operations


def go_on(root: Path, moment: Moment) -> None:
    """Require that the newest whole checkpoint is found, that the interrupted save can be made, and one after it."""
    runs = root / RUNS
    visible = sorted(path.name for path in runs.glob("step-*")) if runs.exists() else []
    assert [one.problem for one in list_checkpoints(runs)] == [""] * len(visible) if visible else True
    newest = zs.latest(runs)
    assert (newest.name if newest else None) == (visible[-1] if visible else None)
    trainer = small.Small(7)
    loaded = trainer.zero.load(newest).step if newest else 0
    for step in (loaded + 1, loaded + 2):
        path = trainer.zero.save(runs / f"step-{step}", step=step, keep=2)
        assert zs.latest(runs) == path
        # What the interrupted save of this name left is gone, and so is what retention had begun to remove.
        assert not (left := left_behind(path)), f"left behind: {left}, of {sorted(moment.right)}; there were {visible}"
    assert len(list_checkpoints(runs)) == 2


def left_behind(path: Path) -> list[str]:
    """Return what an attempt at `path`, or a retention, left; a folder whose process lives is not theirs to remove."""
    own = re.compile(rf"\.tmp-{re.escape(path.name)}-[0-9a-f]{{8}}-(\d+)-[0-9a-f]{{8}}")
    found = []
    for name in sorted(one.name for one in path.parent.iterdir()):
        match = own.fullmatch(name)
        # The process that made it has ended; on a busy machine another one may have its number by now.
        if name.startswith(".old-") or (match and not Path("/proc", match[1]).exists()):
            found.append(name)
    return found


def import_once(folder: str) -> list[Operation]:
    """Import a folder of tensors."""
    source = _tensors(Path(folder))
    with Recorder(Path(folder)) as recorder:
        import_checkpoint(source, Path(folder, RUNS, "step-0"))
        recorder.note("returned", f"{RUNS}/step-0")
    return recorder.operations


def export_once(folder: str) -> list[Operation]:
    """Export a checkpoint, over several files."""
    source = small.write(Path(f"{folder}-source"))
    with Recorder(Path(folder)) as recorder:
        export(source, Path(folder, RUNS, "hf"), file_bytes=1)
        recorder.note("returned", f"{RUNS}/hf")
    return recorder.operations


def _tensors(folder: Path) -> Path:
    return export(small.write(Path(f"{folder}-source")), Path(f"{folder}-source", "tensors"))


def import_again(root: Path, moment: Moment) -> None:
    """Require that what is there is whole, or that the same command makes it."""
    target = root / RUNS / "step-0"
    if not target.exists():
        import_checkpoint(root.parent / "tensors", target)
        assert not (left := left_behind(target)), f"left behind: {left}"
    verify(target)


def export_again(root: Path, moment: Moment) -> None:
    """Require that what is there is whole, or that the same command makes it."""
    target = root / RUNS / "hf"
    if not target.exists():
        export(root.parent / "checkpoint", target, file_bytes=1)
        assert not (left := left_behind(target)), f"left behind: {left}"
    assert FolderReader(target).specs.keys() == {"bias", "count", "weight"}


SCENARIOS = {
    "save": Scenario(save_at_once, 2, go_on),
    "save in the background": Scenario(save_in_the_background, 2, go_on),
    "retention": Scenario(remove_several, 1, go_on),
    "import": Scenario(import_once, 1, import_again),
    "export": Scenario(export_once, 1, export_again),
}


def prepare(place: Path) -> Path:
    """Make what the next import and export start from; return the folder for outcomes."""
    checkpoint = small.write(place, 2).rename(place / "checkpoint")
    export(checkpoint, place / "tensors")
    return place / "outcome"
