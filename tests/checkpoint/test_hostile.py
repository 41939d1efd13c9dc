"""Checkpoints from somebody who means harm: refused by name, quickly, in little memory, and nothing is executed."""

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import struct
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.checkpoint.folders import FolderReader
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


def tensors_within_limits(manifest: Json) -> None:
    manifest["tensors"] = [["model", f"t{n}", "F32", [1]] for n in range(40_000)]


def chunks_within_limits(manifest: Json) -> None:
    manifest["files"][PARAMS]["chunks"] = [[0, n, n + 1] for n in range(120_000)]


def checksums_within_limits(manifest: Json) -> None:
    manifest["files"][PARAMS]["crc32"] = [0] * 500_000


def files_within_limits(manifest: Json) -> None:
    manifest["files"] |= {f"{n}": {"bytes": 0, "chunks": [], "crc32": []} for n in range(30_000)}


def aliases_within_limits(manifest: Json) -> None:
    manifest["aliases"] = {f"a{n}": "weight" for n in range(120_000)} | {"a": "nothing"}


def header_within_limits(manifest: Json) -> None:
    """List tensors that are all there, in a file that is too small for them."""
    first = len(manifest["tensors"])
    manifest["tensors"] += [["model", f"t{n}", "F32", [1]] for n in range(28_000)]
    manifest["files"][PARAMS]["chunks"] += [[first + n, 0, 1] for n in range(28_000)]


def share_a_name(manifest: Json) -> None:
    """Give a state and a generator one name."""
    place = next(n for n, (kind, *_) in enumerate(manifest["tensors"]) if kind == "rng")
    manifest["tensors"][place][1] = next(name for kind, name, *_ in manifest["tensors"] if kind == "state")


def long_name_in_many_chunks(manifest: Json) -> None:
    """Give a tensor a name of a megabyte and 1,000 chunks, in a file that seems to have their table."""
    manifest["tensors"][0][1] = "x" * (1 << 20)
    manifest["tensors"][0][3] = [1000]
    manifest["files"][PARAMS]["chunks"][:1] = [[0, n, n + 1] for n in range(1000)]
    manifest["files"][PARAMS]["bytes"] = 1050 << 20
    manifest["files"][PARAMS]["crc32"] = [0] * 263


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
    "version 3": put("version", value=3),
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
    "alias of a stored name": put("aliases", value={"bias": "weight"}),
    "aliases as list": put("aliases", value=["a"]),
    "terabytes": consistent_terabytes,
    "a long name in many chunks": long_name_in_many_chunks,
    "a large value where a number belongs": put("step", value=[[0] * 300_000]),
    "a deep value where a number belongs": put("step", value=json.loads("[" * 900 + "]" * 900)),
    "tensors within limits": tensors_within_limits,
    "chunks within limits": chunks_within_limits,
    "checksums within limits": checksums_within_limits,
    "files within limits": files_within_limits,
    "aliases within limits": aliases_within_limits,
    "header within limits": header_within_limits,
    "a state and a generator of one name": share_a_name,
    "step true": put("step", value=True),
    "step null": put("step", value=None),
    "ranks as text": put("world_size", value="1"),
    "files as list": put("files", value=[PARAMS]),
    "a file as list": put("files", PARAMS, value=[]),
    "a file with more keys": put("files", PARAMS, "link", value="/etc/passwd"),
    "chunk as text": put("files", PARAMS, "chunks", 0, value="0"),
    "chunk from a negative place": put("files", PARAMS, "chunks", 0, 1, value=-2),
    "chunk of a negative tensor": put("files", PARAMS, "chunks", 0, 0, value=-1),
    "fractional chunk": put("files", PARAMS, "chunks", 0, 2, value=1.5),
    "negative checksum": put("files", PARAMS, "crc32", value=[-1]),
    "tensor as object": put("tensors", 0, value={"name": "weight"}),
    "tensor of two parts": put("tensors", 0, value=["model", "weight"]),
    "dtype as list": put("tensors", 0, 2, value=[]),
    "65 dimensions": put("tensors", 0, 3, value=[1] * 64 + [2]),
    "negative order": lambda m: m["tensors"][0].append([-1, 0]),
    "versions of numbers": put("software", value={"torch": 2}),
    "expires as number": put("expires", value=1),
}


@functools.cache
def audited() -> list[str]:
    """Return the list to which the path of each file is added that this process opens from now on."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    return opened


def refuse(load: Callable[[], object], path: Path) -> str:
    """Require a refusal that names the path and opens nothing outside its folder, in time and in memory.

    The time is that of the processor, and the shortest of three: others use it, and its caches, too.
    """
    taken_s = []
    while not taken_s or (taken_s[-1] >= LIMIT_S and len(taken_s) < 3):
        start_s = time.process_time()
        with pytest.raises(zs.CheckpointError) as caught:
            load()
        taken_s.append(time.process_time() - start_s)
    assert min(taken_s) < LIMIT_S
    assert str(path) in str(caught.value)
    opened = audited()
    opened.clear()
    tracemalloc.start()
    try:
        with pytest.raises(zs.CheckpointError):
            load()
        assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
    finally:
        tracemalloc.stop()
    folder = path if path.suffix == "" else path.parent
    assert [name for name in opened if Path(name).parent != folder] == []
    return str(caught.value)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "step-2"))


@pytest.fixture
def old_checkpoint(checkpoint: Path) -> Path:
    """Of format version 1."""
    return small.downgrade(checkpoint)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused(name: str, old_checkpoint: Path) -> None:
    small.rewrite(old_checkpoint / "manifest.json", MANIFESTS[name])
    refuse(lambda: verify(old_checkpoint), old_checkpoint)


@pytest.mark.parametrize("name", ["overlap", "chunk twice"])
def test_elements_in_two_places_are_named(name: str, old_checkpoint: Path) -> None:
    """They are refused for what they are, whatever a file's size says."""
    small.rewrite(old_checkpoint / "manifest.json", MANIFESTS[name])
    assert re.search(r"elements \d to \d of '\w+' are twice", refuse(lambda: verify(old_checkpoint), old_checkpoint))


def test_an_unchanged_manifest_is_not_refused(old_checkpoint: Path) -> None:
    small.rewrite(old_checkpoint / "manifest.json", lambda manifest: None)
    verify(old_checkpoint)


def repeat(times: int, *columns: str) -> Callable[[Json], None]:
    """Return a change that repeats the values of columns."""

    def change(manifest: Json) -> None:
        for column in columns:
            manifest["index"][column] *= times

    return change


def extend(*columns: str) -> Callable[[Json], None]:
    return lambda manifest: [manifest["index"][column].append(1) for column in columns] and None


def shorten(*columns: str) -> Callable[[Json], None]:
    return lambda manifest: [manifest["index"][column].pop() for column in columns] and None


INDEXES: dict[str, Callable[[Json], Any]] = {
    "version 1": put("version", value=1),
    "version 3": put("version", value=3),
    "no index": drop("index"),
    "index as list": put("index", value=[]),
    "a column more": put("index", "else", value=[]),
    "no names": put("index", "names", value=[]),
    "names twice": repeat(2, "names", "type_of"),
    "a name as number": put("index", "names", 0, value=3),
    "half of a surrogate pair": put("index", "names", 0, value="\ud800"),
    "a name of another": put("index", "names", 0, value="bias"),
    "a type of none": put("index", "type_of", 0, value=99),
    "a negative type": put("index", "type_of", 0, value=-1),
    "a type of no kind": put("index", "types", 0, 0, value="code"),
    "a type of no dtype": put("index", "types", 0, 1, value="OBJECT"),
    "a type of three": lambda m: m["index"]["types"][0].pop() and None,
    "a type of 2^63 bytes": put("index", "types", 0, 2, value=[2**40, 2**40]),
    "a type of another order": put("index", "types", 0, 3, value=[0, 0]),
    "another kind": put("index", "types", 0, 0, value="state"),
    "a file of none": put("index", "files", 0, value=99),
    "a file of another kind": put("index", "files", 0, value=0),
    "a stop beyond": put("index", "stops", 0, value=3),
    "a stop before": put("index", "stops", 0, value=1),
    "a stop of nothing": put("index", "stops", 0, value=0),
    "stops missing": shorten("stops"),
    "a chunk more": extend("stops", "files"),
    "chunks missing": shorten("stops", "files"),
    "checksums missing": shorten("crc32"),
    "checksums more": repeat(2, "crc32"),
    "checksums within limits": repeat(150_000, "crc32"),
    "tensors within limits": repeat(15_000, "names", "type_of"),
    "chunks within limits": repeat(30_000, "stops", "files"),
    "a huge file": put("files", PARAMS, value=HUGE - 1),
    "a file of a further part": rename_file("params-00001-of-00001-2.safetensors"),
    "a file of part 1": rename_file("params-00001-of-00001-1.safetensors"),
    "a file above": rename_file("../outside.safetensors"),
    "a part that is not there": put("parts", value=[[5, 1]]),
    "a part of nothing": put("parts", value=[[]]),
    "a part of 2^62 bytes": put("parts", value=[[2**62, 1]]),
    "parts within limits": put("parts", value=[[5, 1]] * 100_000),
    "parts as object": put("parts", value={}),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused(name: str, checkpoint: Path) -> None:
    small.rewrite(checkpoint / "manifest.json", INDEXES[name])
    refuse(lambda: verify(checkpoint), checkpoint)


TEXTS = {
    "NaN": b'{"format": NaN}',
    "infinity": b'{"format": -Infinity}',
    "overflow": b'{"step": 1e999}',
    "duplicate key": b'{"step": 1, "step": 2}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "many": b"[" + b"[]," * 3_000_000 + b"[]]",
    "within limits": b"[" + b'{"a":[]},' * 60_000 + b"{}]",
    "large": b'["' + b"x" * (17 << 20) + b'"]',
    "long number": b'{"step": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "empty": b"",
    "two values": b"{} {}",
    "comment": b"{} // no",
    "duplicate key in a list": b'[{"a":0},{' + b",".join(b'"%d":0' % n for n in range(150_000)) + b',"149999":0}]',
    "wide": b'["' + b"x" * (15 << 20) + "\U0001f600".encode() + b'"]',
    "wide by an escape": b'["' + b"x" * (15 << 20) + rb"\ud83d\ude00" + b'"]',
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
    crc32 = [zlib.crc32(block) for block in blocks]

    def change(manifest: Json) -> None:
        if manifest["version"] == 1:
            manifest["files"]["extra.json"] = {"bytes": len(text), "chunks": [], "crc32": crc32}
        else:
            manifest["files"]["extra.json"] = len(text)
            manifest["index"]["crc32"][:1] = crc32

    small.rewrite(checkpoint / "manifest.json", change)


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
    "loss scale of zero": put("loss_scale", value=[0.0, 1, []]),
    "negative loss scale": put("loss_scale", value=[-2.0, 1, []]),
    "loss scale that is no number": put("loss_scale", value=[{"$float": "nan"}, 1, []]),
    "loss scale that was infinite": put("loss_scale", value=[1.0, 1, [{"$float": "inf"}]]),
    "steps before the first": put("loss_scale", value=[1.0, -1, []]),
    "parameters among options": put("optimizers", 0, "groups", 0, "options", "params", value=["weight"]),
    "negative steps": put("optimizers", 0, "steps", value=-1),
    "steps beyond 63 bits": put("optimizers", 0, "steps", value=HUGE),
    "steps as text": put("optimizers", 0, "steps", value="1"),
    "groups as object": put("optimizers", 0, "groups", value={}),
    "a group as list": put("optimizers", 0, "groups", 0, value=[]),
    "a group more": lambda e: e["optimizers"][0]["groups"].append(e["optimizers"][0]["groups"][0]),
    "an optimizer more": lambda e: e["optimizers"].append(e["optimizers"][0]),
    "negative size": put("extra", value={"a": {"$tensor": {"data": "AAAAAA==", "dtype": "F32", "shape": [-1]}}}),
    "nested beyond depth": lambda e: put("extra", value={"a": json.loads("[" * 200 + "]" * 200)})(e),
    "tensor without dtype": put("extra", value={"a": {"$tensor": {"data": "", "shape": [0]}}}),
    "tensor as list": put("extra", value={"a": {"$tensor": []}}),
    "a size beyond 64 bits": put("extra", value={"a": {"$tensor": {"data": "", "dtype": "U8", "shape": [2**70]}}}),
    "a million sizes": put("extra", value={"a": {"$tensor": {"data": "AA==", "dtype": "U8", "shape": [1] * 10**5}}}),
    "keys that hash alike": put("extra", value={"a": {"$items": [[n * (2**61 - 1), 0] for n in range(50_000)]}}),
    "a key twice": put("extra", value={"a": {"$items": [[1, 0], [1.0, 0]]}}),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_hostile_values_are_refused(name: str, old_checkpoint: Path) -> None:
    value = json.loads((old_checkpoint / "extra.json").read_bytes())
    returned = EXTRAS[name](value)
    plant_extra(old_checkpoint, json.dumps(value if returned is None else returned).encode())
    trainer = small.Small(1)
    refuse(
        lambda: trainer.zero.load(old_checkpoint),
        old_checkpoint / "extra.json" if name != "state of a stranger" else old_checkpoint,
    )


def edit_numpy(state: bytearray, place: int) -> None:
    struct.pack_into("<i", state, 4 * 624, place)


def edit_python(state: bytearray, place: int) -> None:
    struct.pack_into("<I", state, 4 * 624, place)


# Numpy itself takes any place in its words, torch some, and then they read what lies behind.
GENERATORS: dict[str, tuple[str, Callable[[bytearray], None]]] = {
    "numpy behind its words": ("numpy", lambda state: edit_numpy(state, 625)),
    "numpy far behind its words": ("numpy", lambda state: edit_numpy(state, 2**31 - 1)),
    "numpy before its words": ("numpy", lambda state: edit_numpy(state, -1)),
    "Python behind its words": ("python", lambda state: edit_python(state, 625)),
    "Python far behind its words": ("python", lambda state: edit_python(state, 2**32 - 1)),
    "torch behind its words": ("torch", lambda state: struct.pack_into("<iiQ", state, 8, 1, 1, 625)),
    "torch far behind its words": ("torch", lambda state: struct.pack_into("<iiQ", state, 8, 1, 1, 2**40)),
    "torch with words to come behind them": ("torch", lambda state: struct.pack_into("<iiQ", state, 8, 624, 1, 624)),
    "torch without words": ("torch", lambda state: struct.pack_into("<i", state, 8, -1)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_hostile_generator_is_refused(name: str, checkpoint: Path) -> None:
    generator, change = GENERATORS[name]
    manifest = verify(checkpoint)
    places = manifest.place_of(OPTIM)
    chunk, offset = next(p for p in places if manifest.tensors[p[0].tensor].name == f"rng/0/{generator}")
    data = bytearray((checkpoint / OPTIM).read_bytes())
    state = data[offset : offset + chunk.stop]
    change(state)
    data[offset : offset + chunk.stop] = state
    (checkpoint / OPTIM).write_bytes(data)
    small.rewrite(checkpoint / "manifest.json", put("index", "crc32", 1, value=zlib.crc32(data)))
    verify(checkpoint)
    trainer = small.Small(1)
    before = trainer.state()
    assert "Nothing in memory was changed." in refuse(lambda: trainer.zero.load(checkpoint), checkpoint)
    assert trainer.state() == before


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_outside(path: Path) -> None:
    path.symlink_to(path.parent.with_name("outside"))


def be_a_socket(path: Path) -> None:
    # A socket's name may be too short for the path.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


def be_a_sparse_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


FILES: dict[str, Callable[[Path], object]] = {
    "link to a device": link_to_a_device,
    "link outside": link_outside,
    "link to itself": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "socket": be_a_socket,
    "folder": Path.mkdir,
    "sparse terabyte": be_a_sparse_terabyte,
}
PLACES = ["manifest.json", "extra.json", PARAMS, OPTIM]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_a_checkpoint_is_refused(name: str, place: str, checkpoint: Path) -> None:
    # What was there goes outside, so that nothing but the way to it is wrong.
    (checkpoint / place).rename(checkpoint.with_name("outside"))
    FILES[name](checkpoint / place)
    refuse(lambda: verify(checkpoint), checkpoint / place)


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


INDEXED = ["../a.safetensors", "/a.safetensors", ".hidden.safetensors", "a.bin", "x/y.safetensors"]


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "a.safetensors").write_bytes(tensor_file(GOOD))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refuse(lambda: FolderReader(folder), index)


def test_how_many_there_are() -> None:
    """The page that promises it says how many; each is another file, or other contents."""
    count = len(MANIFESTS) + len(INDEXES) + 2 * len(TEXTS) + len(EXTRAS) + len(GENERATORS) + len(FILES) * len(PLACES)
    count += len(TENSOR_FILES) + len(INDEXED)
    assert count >= 150
    assert f"{count} of them" in (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()


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
