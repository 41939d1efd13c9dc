"""Files that a user names and that are no plain files of a sensible size: one error that names them, and no wait."""

import json
import os
import socket
import sys
from contextlib import chdir

import pytest
import transformers

import zeroshard as zs
from zeroshard.checkpoint.folders import export
from zeroshard.cli import main
from zeroshard.train import text as text_module
from zeroshard.train.config import load_config
from zeroshard.train.inputs import read_input
from zeroshard.train.metrics import _lines_until
from zeroshard.train.models.hf import check_hf, load_hf
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import load_tokenizer

from ..checkpoint import small

DEEP = 100_000


def _socket(path):
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


ODD = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a broken link": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_named(kind, tmp_path):
    """In each place where a file is named: none waits for a pipe, or reads a device that never ends."""
    path = tmp_path / "odd"
    ODD[kind](path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "good.txt").write_text("text", "utf-8")
    ODD[kind](folder / "odd")
    model = tmp_path / "model"
    model.mkdir()
    ODD[kind](model / "config.json")
    checkpoint = small.write(tmp_path)
    places = {
        "--config": lambda: load_config(path),
        "data.path": lambda: open_source(str(path)),
        "data.path of a folder": lambda: open_source(str(folder)),
        "data.tokenizer": lambda: load_tokenizer(str(path)),
        "data.tokenizer of a folder": lambda: load_tokenizer(str(model)),
        "model.source": lambda: check_hf(str(model), context=8, vocabulary=8),
        "export": lambda: export(checkpoint, tmp_path / "hf", config=path),
    }
    for place, use in places.items():
        with pytest.raises((ValueError, zs.CheckpointError)) as caught:
            use()
        # The place that a link leads to is named where it is what is opened.
        names = {"an endless device": "/dev/zero", "a broken link": "nothing"}
        name = {"model.source": "model", "data.tokenizer of a folder": "config.json"}.get(place, "odd")
        assert (names.get(kind, name) if place == "export" else name) in str(caught.value), place
    assert not (tmp_path / "hf").exists()


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^--config: '.*' is a folder, but must be a regular file"):
        load_config(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "linked").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"^data.path: '.*linked' is a link to a folder; remove it"):
        open_source(str(tmp_path / "texts"))


def test_values_in_values_in_values_are_named(tmp_path):
    config = tmp_path / "deep.toml"
    for content in (
        "[train]\nsteps = " + "[" * 20_000,
        "x = " + "{a=" * 10_000,
        "[train]\nsteps" + ".a" * 2_000 + "=1",
    ):
        config.write_text(content, "utf-8")
        with pytest.raises(ValueError, match=r"too deep|Cannot|Invalid|not TOML"):
            load_config(config)
    with pytest.raises(ValueError, match=r"train\.steps='\[\[\["):
        load_config(overrides=["train.steps=" + "[" * DEEP])
    lines = tmp_path / "deep.jsonl"
    for content in ('{"text": ' + "[" * DEEP + "]" * DEEP + "}", "[" * DEEP, '{"text": ' + "[" * 900 + "]" * 900 + "}"):
        lines.write_text(content, "utf-8")
        with pytest.raises(ValueError, match=r"^data\.path: .*deep\.jsonl', line 1"):
            list(open_source(str(lines)).documents())
    metrics = tmp_path / "metrics.jsonl"
    good = json.dumps({"kind": "step", "step": 1}) + "\n"
    for bad in ("[" * DEEP, "[1]", "3", '{"step": "1"}', "{}"):
        metrics.write_text(f"{good}{bad}\n{good}", "utf-8")
        assert _lines_until(metrics, 5) == [good]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_hostile_folder_of_a_model_is_named(name, tmp_path):
    transformers.GPT2Config(vocab_size=256, n_positions=8, n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    for content in (b"[" * DEEP, b"[]", b'{"model_type": 3}', b"\xff\xfe", b"", b'{"a":' * 5000 + b"1" + b"}" * 5000):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"^data\.tokenizer: '.*' has no tokenizer of transformers"):
            load_tokenizer(str(tmp_path))
        if name == "config.json":
            with pytest.raises(ValueError, match=r"^model\.source: '.*' holds no model of transformers"):
                check_hf(str(tmp_path), context=8, vocabulary=256)
        if name == "tokenizer.json":
            with pytest.raises(ValueError, match=r"^data\.tokenizer: '.*' is not a file of the tokenizers library"):
                load_tokenizer(str(tmp_path / name))


def test_weights_that_do_not_fit_are_refused_not_drawn(tmp_path):
    config = transformers.GPT2Config(vocab_size=256, n_positions=8, n_embd=8, n_layer=2, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    def load() -> None:
        language = load_hf(str(tmp_path), context=8, vocabulary=256)
        zs.shard(language.module, weights=language.weights)

    load()
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"transformer.h.1.", b"transformer.x.1."))
    with pytest.raises(ValueError, match=r"has no 'transformer\.h\.1\.ln_1\.weight' \(8,\)"):
        load()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        load()


def test_encodings_and_sizes(tmp_path, monkeypatch):
    config = tmp_path / "c.toml"
    config.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_config(config).train.steps == 3
    config.write_bytes(b"")
    assert load_config(config) == load_config()
    for content in (b"[train]\nsteps = 3 # \xff", "[train]\nsteps = 3".encode("utf-16")):
        config.write_bytes(content)
        with pytest.raises(ValueError, match=r"^--config: '.*' is not TOML"):
            load_config(config)
    config.write_bytes(b"#" * (1 << 17))
    with pytest.raises(ValueError, match=r"^--config: '.*' has more than 65536 bytes"):
        load_config(config)
    assert read_input(config, "x", 1 << 17) == b"#" * (1 << 17)
    lines = tmp_path / "l.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b"}')
    assert list(open_source(str(lines)).documents()) == [b"a", b"b"]
    monkeypatch.setattr(text_module, "_MAX_LINE_BYTES", 10)
    with pytest.raises(ValueError, match=r"^data\.path: .*l\.jsonl', line 1: has more than 10 bytes"):
        list(open_source(str(lines)).documents())
    huge = tmp_path / "huge.txt"
    huge.touch()
    os.truncate(huge, 1 << 42)
    with pytest.raises(ValueError, match=r"^data\.path: .*huge\.txt' has 4398046511104 bytes and is read as one"):
        list(open_source(str(huge)).documents())


def test_the_command_line_says_it_in_one_line(tmp_path, monkeypatch, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = tmp_path / "text.txt"
    text.write_text("a text " * 300, "utf-8")
    (tmp_path / "out").mkdir()
    for arguments, message in (
        (["train", "--config", str(pipe)], "zeroshard: --config: "),
        (["train", "--data", str(pipe)], "zeroshard: data.path: "),
        (["train", f"data.tokenizer={pipe}"], "zeroshard: data.tokenizer: "),
        (["tokenizer", str(text), "--vocab", "258", "--out", str(tmp_path / "out")], "zeroshard: [Errno"),
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["zeroshard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        written = capsys.readouterr()
        assert end.value.code == 2
        assert written.err.startswith(message)
        assert written.err.count("\n") == 1
