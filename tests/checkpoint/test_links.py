"""Links to folders: nothing that stands among checkpoints leads elsewhere; the way to them is the user's own."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.folders import export
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.checkpoint.verify import list_checkpoints, verify

from . import small


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a checkpoint that a link in another folder leads to."""
    return small.write(tmp_path / "outside", 3)


@pytest.fixture
def runs(tmp_path: Path, outside: Path) -> Path:
    """Return a folder with one checkpoint and a link to a newer one."""
    folder = tmp_path / "runs"
    small.write(folder, 2)
    (folder / "step-3").symlink_to(outside)
    return folder


def test_the_newest_is_not_behind_a_link(runs: Path) -> None:
    with pytest.warns(UserWarning, match=r"using .*step-2; skipped: .*runs/step-3: is a link"):
        assert zs.latest(runs) == runs / "step-2"
    (runs / "step-2").rename(runs.parent / "step-2")
    with pytest.raises(zs.CheckpointError, match=r"no checkpoint is complete:\n  .*step-3: is a link to .*outside"):
        zs.latest(runs)


def test_a_list_names_a_link(runs: Path) -> None:
    (runs / "notes").symlink_to(runs.parent)  # leads to no checkpoint
    found = {one.path.name: (one.step, one.problem) for one in list_checkpoints(runs)}
    assert found.keys() == {"step-2", "step-3"}
    assert found["step-2"] == (2, "")
    assert "step-3: is a link to" in found["step-3"][1]


COMMANDS: dict[str, Callable[[Path], object]] = {
    "load": lambda link: small.Small().zero.load(link),
    "load of the model": lambda link: small.Small().zero.load(link, model_only=True),
    "verify": verify,
    "diff": lambda link: diff(link.parent / "step-2", link),
    "diff of the first": lambda link: diff(link, link.parent / "step-2"),
    "export": lambda link: export(link, link.parent.parent / "hf"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_link_in_the_place_of_a_checkpoint_is_refused(name: str, runs: Path, outside: Path) -> None:
    with pytest.raises(zs.CheckpointError, match=rf"step-3: is a link to '{outside}', and links are not followed"):
        COMMANDS[name](runs / "step-3")


def test_a_link_in_the_place_of_tensors_is_refused(tmp_path: Path, outside: Path) -> None:
    plain = export(outside, tmp_path / "plain")
    link = tmp_path / "link"
    link.symlink_to(plain)
    one = tmp_path / "one.safetensors"
    one.symlink_to(plain / "model-00001-of-00001.safetensors")
    for source in (link, one):
        with pytest.raises(zs.CheckpointError, match=rf"{source.name}: is a link to .*, and links are not followed"):
            import_checkpoint(source, tmp_path / "new")
        with pytest.raises(zs.CheckpointError, match=rf"{source.name}: is a link to .*, and links are not followed"):
            small.Small().zero.load(source, model_only=True)


def test_nothing_is_written_over_a_link(tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "new"
    link.symlink_to(tmp_path / "nowhere")
    for write in (lambda: export(outside, link), lambda: small.Small().zero.save(link)):
        with pytest.raises(zs.CheckpointError, match="new exists, and zeroshard overwrites nothing"):
            write()


def test_the_way_to_the_checkpoints_may_be_a_link(tmp_path: Path) -> None:
    small.write(tmp_path / "disk", 2)
    (tmp_path / "runs").symlink_to("disk")
    newest = zs.latest(tmp_path / "runs")
    assert newest == tmp_path / "runs" / "step-2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small.Small().zero.load(newest).step == 2
        verify(newest)
    assert small.Small().zero.save(tmp_path / "runs" / "step-4", keep=2).exists()


def test_retention_follows_no_link(tmp_path: Path) -> None:
    trainer = small.Small()
    kept = trainer.zero.save(tmp_path / "outside" / "step-1", keep=2)
    (tmp_path / "runs").mkdir()
    for name in ("step-1", ".old-step-1-0123abcd", ".tmp-step-3-00000000-1-0123abcd"):
        (tmp_path / "runs" / name).symlink_to(kept)
    for step in (2, 3, 4):
        trainer.zero.save(tmp_path / "runs" / f"step-{step}", keep=2)
    verify(kept)
    assert (tmp_path / "runs" / "step-1").is_symlink()


def test_a_damaged_description_is_not_passed_over_silently(runs: Path) -> None:
    (runs / "step-3").unlink()
    newest = small.Small().train(4).zero.save(runs / "step-4")
    (newest / "manifest.json").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"using .*step-2; skipped: .*step-4/manifest.json: its last line"):
        assert zs.latest(runs) == runs / "step-2"
