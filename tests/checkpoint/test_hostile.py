"""Checkpoints from somebody who means harm: refused by name, quickly, in little memory, and nothing is executed."""

import json
import os
import shutil
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.checkpoint.exchange import FolderReader
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from . import small

LIMIT_S, LIMIT_BYTES = 1.0, 64 << 20
HUGE = 2**63
PARAMS = "params-00001-of-00001.safetensors"
OPTIM = "optim-00001-of-00001.safetensors"

Json = dict[str, Any]


def put(*path: Any, value: Any) -> Callable[[Json], None]:
    """Return a change that puts a value at a path of keys."""

    def change(manifest: Json) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def rename_file(name: str) -> Callable[[Json], None]:
    """Return a change that gives the first tensor file another name."""

    def change(manifest: Json) -> None:
        manifest["files"][name] = manifest["files"].pop(PARAMS)

    return change


def drop(key: str) -> Callable[[Json], None]:
    return lambda manifest: manifest.pop(key) and None


def duplicate_tensor(manifest: Json) -> None:
    manifest["tensors"].append(manifest["tensors"][0])


def million_tensors(manifest: Json) -> None:
    manifest["tensors"] = [["model", f"t{n}", "F32", [1]] for n in range(1_000_000)]


def million_chunks(manifest: Json) -> None:
    manifest["files"][PARAMS]["chunks"] = [[0, n, n + 1] for n in range(300_000)]


def consistent_terabytes(manifest: Json) -> None:
    """Say that a tensor has 2^40 elements, with sizes and chunks to match."""
    manifest["tensors"][0][3] = [2**40]
    manifest["files"][PARAMS]["chunks"][0][2] = 2**40
    manifest["files"][PARAMS]["bytes"] += 4 * 2**40 - 8


MANIFESTS: dict[str, Callable[[Json], Any]] = {
    "a list": lambda manifest: [],
    "a number": lambda manifest: 7,
    "nothing in it": lambda manifest: {},
    "another format": put("format", value="zip"),
    "version 2": put("version", value=2),
    "version true": put("version", value=True),
    "version 1.0": put("version", value=1.0),
    "negative step": put("step", value=-1),
    "huge step": put("step", value=HUGE),
    "step as text": put("step", value="1"),
    "no step": drop("step"),
    "no files": drop("files"),
    "no tensors": drop("tensors"),
    "something else": put("else", value=1),
    "ranks without files": put("world_size", value=5),
    "a billion ranks": put("world_size", value=10**18),
    "no rank": put("world_size", value=0),
    "file above": rename_file("../outside.safetensors"),
    "absolute file": rename_file("/etc/passwd"),
    "file below": rename_file(f"x/{PARAMS}"),
    "file with NUL": rename_file("params\0"),
    "file of another rank": rename_file("params-00002-of-00001.safetensors"),
    "empty name": rename_file(""),
    "huge file": put("files", PARAMS, "bytes", value=HUGE - 1),
    "file beyond 63 bits": put("files", PARAMS, "bytes", value=HUGE),
    "negative size": put("files", PARAMS, "bytes", value=-5),
    "fractional size": put("files", PARAMS, "bytes", value=1.5),
    "size off by one": lambda m: put("files", PARAMS, "bytes", value=m["files"][PARAMS]["bytes"] + 1)(m),
    "no checksums": put("files", PARAMS, "crc32", value=[]),
    "wide checksum": put("files", PARAMS, "crc32", value=[2**32]),
    "wrong checksum": put("files", PARAMS, "crc32", value=[0]),
    "checksum as text": put("files", PARAMS, "crc32", value=["0"]),
    "extra with chunks": put("files", "extra.json", "chunks", value=[[0, 0, 2]]),
    "chunk of two": put("files", PARAMS, "chunks", 0, value=[0, 0]),
    "chunk of no tensor": put("files", PARAMS, "chunks", 0, value=[10**6, 0, 2]),
    "chunk backwards": put("files", PARAMS, "chunks", 0, value=[0, 2, 0]),
    "chunk beyond": put("files", PARAMS, "chunks", 0, value=[0, 0, 3]),
    "chunk twice": lambda m: m["files"][PARAMS]["chunks"].append(m["files"][PARAMS]["chunks"][0]),
    "overlap": lambda m: m["files"][PARAMS]["chunks"].append([0, 1, 2]),
    "gap": put("files", PARAMS, "chunks", 0, value=[0, 1, 2]),
    "chunk missing": lambda m: m["files"][PARAMS]["chunks"].pop() and None,
    "chunk of another kind": lambda m: m["files"][OPTIM]["chunks"].append([0, 0, 2]),
    "a million chunks": million_chunks,
    "a million tensors": million_tensors,
    "tensor twice": duplicate_tensor,
    "overflowing shape": put("tensors", 0, 3, value=[2**31, 2**31, 2**31]),
    "shape hidden by zero": put("tensors", 0, 3, value=[2**62, 2**62, 0]),
    "negative shape": put("tensors", 0, 3, value=[-2]),
    "fractional shape": put("tensors", 0, 3, value=[2.0]),
    "shape as text": put("tensors", 0, 3, value="2"),
    "a thousand dimensions": put("tensors", 0, 3, value=[1] * 1000 + [2]),
    "other dtype": put("tensors", 0, 2, value="F64"),
    "no dtype": put("tensors", 0, 2, value="OBJECT"),
    "no kind": put("tensors", 0, 0, value="code"),
    "name as number": put("tensors", 0, 1, value=3),
    "order of other dimensions": lambda m: m["tensors"][0].append([1, 2, 3]),
    "order twice": lambda m: m["tensors"][0].append([0, 0]),
    "alias of nothing": put("aliases", value={"a": "nothing"}),
    "alias of itself": put("aliases", value={"weight": "weight"}),
    "alias as number": put("aliases", value={"a": 1}),
    "terabytes": consistent_terabytes,
}


def refuse(load: Callable[[], object], path: Path) -> str:
    """Require a refusal that names the path, in time (of the processor: others use it, too) and in memory."""
    start_s = time.process_time()
    with pytest.raises(zs.CheckpointError) as caught:
        load()
    assert time.process_time() - start_s < LIMIT_S
    assert str(path) in str(caught.value)
    tracemalloc.start()
    try:
        with pytest.raises(zs.CheckpointError):
            load()
        assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "step-2"))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused(name: str, checkpoint: Path) -> None:
    small.rewrite(checkpoint / "manifest.json", MANIFESTS[name])
    refuse(lambda: verify(checkpoint), checkpoint)


def test_an_unchanged_manifest_is_not_refused(checkpoint: Path) -> None:
    small.rewrite(checkpoint / "manifest.json", lambda manifest: None)
    verify(checkpoint)


TEXTS = {
    "NaN": b'{"format": NaN}',
    "infinity": b'{"format": -Infinity}',
    "overflow": b'{"step": 1e999}',
    "duplicate key": b'{"step": 1, "step": 2}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "many": b"[" + b"[]," * 3_000_000 + b"[]]",
    "large": b'["' + b"x" * (17 << 20) + b'"]',
    "long number": b'{"step": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "empty": b"",
    "two values": b"{} {}",
    "comment": b"{} // no",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("file", ["manifest.json", "extra.json"])
def test_hostile_json_is_refused(name: str, file: str, checkpoint: Path) -> None:
    if file == "manifest.json":
        small.seal(checkpoint / file, TEXTS[name])
    else:
        plant_extra(checkpoint, TEXTS[name])
    trainer = small.Small(1)
    refuse(lambda: trainer.zero.load(checkpoint), checkpoint / file)


def plant_extra(checkpoint: Path, text: bytes) -> None:
    """Replace extra.json, with a manifest to match."""
    (checkpoint / "extra.json").write_bytes(text)
    blocks = [text[start : start + (4 << 20)] for start in range(0, len(text), 4 << 20)]
    entry = {"bytes": len(text), "chunks": [], "crc32": [zlib.crc32(block) for block in blocks]}
    small.rewrite(checkpoint / "manifest.json", put("files", "extra.json", value=entry))


EXTRAS: dict[str, Callable[[Json], Any]] = {
    "a list": lambda extra: [],
    "more keys": put("more", value=1),
    "extra as list": put("extra", value=[]),
    "optimizers as object": put("optimizers", value={}),
    "another optimizer": put("optimizers", 0, "class", value="os.system"),
    "another group": put("optimizers", 0, "groups", 0, "params", value=["weight"]),
    "lr as text": put("optimizers", 0, "groups", 0, "options", "lr", value="__import__('os')"),
    "betas as number": put("optimizers", 0, "groups", 0, "options", "betas", value=3),
    "state of a stranger": put("optimizers", 0, "states", value={"stranger": {}}),
    "state as list": put("optimizers", 0, "states", value=[]),
    "unknown word": put("extra", value={"a": {"$pickle": "gASVJAAAAA=="}}),
    "two words": put("extra", value={"a": {"$float": "inf", "$tuple": []}}),
    "bad float": put("extra", value={"a": {"$float": "1"}}),
    "bad items": put("extra", value={"a": {"$items": [[[], 1]]}}),
    "items of one": put("extra", value={"a": {"$items": [[1]]}}),
    "bad tensor": put("extra", value={"a": {"$tensor": {"data": "!!", "dtype": "F32", "shape": [1]}}}),
    "short tensor": put("extra", value={"a": {"$tensor": {"data": "AAAA", "dtype": "F32", "shape": [1]}}}),
    "huge tensor": put("extra", value={"a": {"$tensor": {"data": "AAAAAA==", "dtype": "F32", "shape": [2**62]}}}),
    "object tensor": put("extra", value={"a": {"$tensor": {"data": "", "dtype": "object", "shape": [0]}}}),
    "loss scale as text": put("loss_scale", value="65536"),
    "loss scale in parts": put("loss_scale", value=[1.0, 2]),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_hostile_values_are_refused(name: str, checkpoint: Path) -> None:
    value = json.loads((checkpoint / "extra.json").read_bytes())
    returned = EXTRAS[name](value)
    plant_extra(checkpoint, json.dumps(value if returned is None else returned).encode())
    trainer = small.Small(1)
    refuse(
        lambda: trainer.zero.load(checkpoint),
        checkpoint / "extra.json" if name != "state of a stranger" else checkpoint,
    )


def test_a_sparse_terabyte_is_refused(checkpoint: Path) -> None:
    os.truncate(checkpoint / PARAMS, 2**40)
    assert "expected" in refuse(lambda: verify(checkpoint), checkpoint / PARAMS)
    os.truncate(checkpoint / "manifest.json", 2**40)
    assert "at most" in refuse(lambda: verify(checkpoint), checkpoint / "manifest.json")


# -- folders of safetensors ---------------------------------------------------------------------------------------


def tensor_file(table: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    """Return a safetensors file of a header and data."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
TENSOR_FILES = {
    "empty": b"",
    "short": b"\0\0\0",
    "huge header": tensor_file(GOOD, length=2**63),
    "long header": tensor_file(GOOD, length=100),
    "list": tensor_file([]),
    "no offsets": tensor_file({"a": {"dtype": "F32", "shape": [2]}}),
    "duplicate": tensor_file(b'{"a":1,"a":2}'),
    "beyond": tensor_file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "negative": tensor_file({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}),
    "overlap": tensor_file({k: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for k in "ab"}),
    "gap": tensor_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
    "more data": tensor_file(GOOD, b"\0" * 9),
    "overflow": tensor_file({"a": {"dtype": "F32", "shape": [2**62, 4, 2**62], "data_offsets": [0, 8]}}),
    "unknown dtype": tensor_file({"a": {"dtype": "X", "shape": [2], "data_offsets": [0, 8]}}),
    "dtype as list": tensor_file({"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}),
    "text in shape": tensor_file({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}),
}


@pytest.mark.parametrize("name", TENSOR_FILES)
def test_a_hostile_tensor_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(TENSOR_FILES[name])
    refuse(lambda: FolderReader(tmp_path), path)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/a.safetensors", ".hidden.safetensors", "a.bin", "x/y.safetensors"]
)
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "a.safetensors").write_bytes(tensor_file(GOOD))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refuse(lambda: FolderReader(folder), index)


# -- what a load touches ------------------------------------------------------------------------------------------


def audited_load(path: str) -> tuple[list[str], list[str]]:
    """Load under an audit hook; return what was unpickled, executed or started, and what was opened."""
    trainer = small.Small(1)
    events: list[str] = []
    opened: list[str] = []
    is_on = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not is_on:
            return
        if event == "open":
            opened.append(str(args[0]))
        elif event.startswith(
            ("pickle.", "exec", "compile", "import", "marshal.", "os.system", "subprocess.", "socket.")
        ):
            events.append(f"{event} {args[:1]}")

    trainer.zero.load(Path(path))  # once without looking, so that torch has imported what it imports lazily
    sys.addaudithook(hook)
    is_on = True
    trainer.zero.load(Path(path))
    is_on = False
    return events, opened


def test_a_load_executes_nothing_and_opens_nothing_else(checkpoint: Path) -> None:
    (events, opened) = run_ranks(audited_load, 1, str(checkpoint), process_group=False)[0]
    assert events == []
    assert {Path(path).parent for path in opened} == {checkpoint}
    assert {Path(path).name for path in opened} == set(os.listdir(checkpoint))


def test_files_are_their_owners_alone(pristine: Path) -> None:
    assert {oct(path.stat().st_mode & 0o777) for path in pristine.iterdir()} == {"0o600"}
    assert oct(pristine.stat().st_mode & 0o777) == "0o700"
