"""More parameters than one text describes: an index in parts, several files of a rank, and limits before tensors."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import index, manifest
from zeroshard.checkpoint.described import pack, unpack
from zeroshard.checkpoint.ranges import Spec, arrange, make_header
from zeroshard.checkpoint.strict import cost_of, dumps, loads

from . import small
from .many import measure, names_of


def test_an_index_in_parts(tmp_path: Path) -> None:
    """18,432 parameters with AdamW, the mixture of experts that was refused; `many.py` measures 200,000 of 64 ranks."""
    found = measure(tmp_path, 18_432, 8)
    assert found["parts"] >= 1
    assert found["save_s"] < 20
    assert found["verify_s"] < 8
    assert found["memory_bytes"] < 400e6


def test_small_parts_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column is cut, and a rank writes several files: it loads, and with one file wrong it does not."""
    monkeypatch.setattr(index, "PART_COST", 500)
    monkeypatch.setattr(index, "VALUES", 2)
    monkeypatch.setattr(manifest, "TABLE_BYTES", 300)
    path = small.write(tmp_path)
    monkeypatch.undo()
    names = sorted(os.listdir(path))
    assert len([name for name in names if name.startswith("index-")]) > 5
    assert "optim-00001-of-00001-3.safetensors" in names
    one, other = small.Small(0).train(2), small.Small(1)
    other.zero.load(path)
    assert other.state() == one.state()
    for name in names:
        for content in (None, (path / name).read_bytes() + b" ", b"x" * (path / name).stat().st_size):
            data = (path / name).read_bytes()
            (path / name).unlink()
            if content is not None:
                (path / name).write_bytes(content)
            with pytest.raises(zs.CheckpointError):
                other.zero.load(path)
            (path / name).write_bytes(data)
    other.zero.load(path)


def test_counters_of_many_parameters_fit(tmp_path: Path) -> None:
    """What extra.json says of 200,000 parameters with a step counter each is within the limits of one text."""
    names = names_of(1024, 66)[:200_000]
    steps = torch.arange(200_000.0)
    states = {name: {"step": steps[place]} for place, name in enumerate(names)}
    groups = [{"options": {"lr": 0.1}, "params": names[:7]}, {"options": {"lr": 0.2}, "params": names[7:]}]
    described = [{"class": "AdamW", "groups": groups, "states": states, "steps": 3}]
    text = dumps(pack(described, {name: place for place, name in enumerate(names)}), "extra.json")
    assert cost_of(text) < 14 << 20
    (read,) = unpack(loads(text, "extra.json"), names, "extra.json")
    assert read["groups"] == groups
    assert list(read["states"]) == names
    for place in (0, 6, 7, 199_999):
        assert read["states"][names[place]] == {"step": steps[place]}


def test_a_limit_is_told_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("x" * (17 << 20), nn.Parameter(torch.zeros(1)))
    zero = zs.shard(model)
    with pytest.raises(zs.CheckpointError, match=r"at most \d+ are read.*Nothing was committed"):
        zero.save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("numel", [1, 9, 10, 99, 100, 1000])
def test_headers_are_as_long_as_planned(numel: int) -> None:
    """Where a number gets a digit more, as at powers of ten."""
    tensors = [Spec("model", f"weight.{number}", "U8", (numel,)) for number in range(12)]
    columns = [[0] * 12, [*range(12)], [0] * 12, [numel] * 12]
    chunks = arrange(tensors, ["params-0.safetensors"], columns, "a test")
    header = b"".join(make_header(tensors, chunks, 0))
    assert len(header) == int(chunks.header_bytes[0])
    table = json.loads(header[8:])
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert [table[f"weight.{number}@0"]["data_offsets"] for number in range(12)] == [
        [number * numel, (number + 1) * numel] for number in range(12)
    ]
