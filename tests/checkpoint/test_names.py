"""Names in somebody else's checkpoint: they are shown, and neither steer a terminal nor look like other lines."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.cli import main
from zeroshard.table.errors import printable
from zeroshard.testing import run_ranks

from . import small

# Clears the screen, rings, turns text around, begins a line, is half of a character, is markup of rich.
EVIL = "\x1b[2J\x07\u202e\r\nzeroshard: whole\x9b31m\udcff[bold]:warning:\u2028"
HALF = "\udcff"
SHOWN = r"\x1b[2J\x07\u202e\r\nzeroshard: whole\x9b31m\udcff[bold]:warning:\u2028"


def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    """Run a command; return what it wrote."""
    monkeypatch.setattr(sys, "argv", ["zeroshard", "checkpoint", *map(str, arguments)])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")]), (out, err)
    return out, err


def test_escapes_stay_readable() -> None:
    assert printable(EVIL, keeps="") == SHOWN
    assert printable("plain ä 漢\n") == "plain ä 漢\n"


def test_commands_show_names_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small.write(tmp_path)
    evil = path.rename(tmp_path / f"step-2{EVIL}")
    (tmp_path / f"link{EVIL}").symlink_to(evil)
    out, _ = ran(monkeypatch, capsys, "ls", tmp_path)
    assert [line.startswith(("link", "step-2")) and SHOWN in line for line in out.splitlines()] == [True, True]
    assert ran(monkeypatch, capsys, "verify", evil)[0].startswith(f"{tmp_path}/step-2{SHOWN}: whole; step 2")
    hf = tmp_path / f"hf{EVIL}"
    assert ran(monkeypatch, capsys, "export", evil, hf)[0] == f"{tmp_path}/hf{SHOWN}: written\n"
    _, err = ran(monkeypatch, capsys, "export", evil, hf)
    assert err.count("\n") == 1
    assert err.startswith(f"zeroshard: {tmp_path}/hf{SHOWN} exists")
    _, err = ran(monkeypatch, capsys, "verify", tmp_path / f"none{EVIL}")
    assert err.startswith(f"zeroshard: {tmp_path}/none{SHOWN}: is not a checkpoint")


def test_commands_show_names_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Names of tensors are UTF-8, which has no half characters, and may have a slash, which names of files have not.
    name, shown = (text.replace(r"\udcff", "").replace("\udcff", "") + "[/x]" for text in (EVIL, SHOWN))
    for number, names in enumerate([[name, "a"], ["a"]]):
        save_file({one: torch.zeros(2) for one in names}, tmp_path / f"{number}.safetensors")
        import_checkpoint(tmp_path / f"{number}.safetensors", tmp_path / f"step-{number}")
    out, _ = ran(monkeypatch, capsys, "diff", tmp_path / "step-0", tmp_path / "step-1")
    assert out == f"{shown}: only in the first\n"
    model = nn.Linear(2, 1, bias=False)
    with pytest.raises(zs.CheckpointError) as caught:
        zs.shard(model).load(tmp_path / "step-0")
    text = str(caught.value)
    assert all(line.isprintable() for line in text.split("\n"))
    assert r"\x1b[2J\x07\u202e" in text


def test_a_warning_shows_names(tmp_path: Path) -> None:
    small.write(tmp_path, 1)
    evil = small.write(tmp_path, 2).rename(tmp_path / f"step-2{EVIL}")
    (evil / "extra.json").write_bytes(b"x" * (evil / "extra.json").stat().st_size)
    with pytest.warns(UserWarning, match="using .*step-1") as caught:
        assert zs.latest(tmp_path) == tmp_path / "step-1"
    text = str(caught[0].message)
    assert r"\x1b[2J" in text
    assert all(line.isprintable() for line in text.split("\n"))


def saved_and_read(folder: str) -> list[str]:
    """Save, load and be refused under a name that is not UTF-8; return the errors."""
    trainer, found = small.Small().train(1), list[str]()
    for asynchronous in (False, True):
        path = f"{folder}/step-{int(asynchronous)}{HALF}"
        trainer.zero.save(path, asynchronous=asynchronous)
        trainer.zero.wait()
        trainer.zero.load(path)
        with pytest.raises(zs.CheckpointError) as caught:
            trainer.zero.save(path)
        found.append(str(caught.value))
    return found


def test_a_name_that_is_not_utf8_is_one_of_any(tmp_path: Path) -> None:
    for errors in run_ranks(saved_and_read, 2, str(tmp_path)):
        assert [f"step-{place}" in text and "exist" in text for place, text in enumerate(errors)] == [True, True]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["LATEST", f"step-0{HALF}", f"step-1{HALF}"]
    assert (tmp_path / "LATEST").read_bytes() == b"step-1\xff\n"
    assert zs.latest(tmp_path) == tmp_path / f"step-1{HALF}"
