"""Checkpoints from somebody who means harm: refused by name, quickly, in little memory, and nothing is executed."""

import contextlib
import functools
import json
import os
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
from zeroshard.checkpoint import strict
from zeroshard.checkpoint.folders import FolderReader
from zeroshard.checkpoint.ranges import Spec, arrange
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


def of_first_type(place: int, value: Any) -> Callable[[Json], None]:
    """Return a change of the kind, dtype, shape or order of the first tensor."""
    return put("index", "types", 0, place, value=value)


def files_within_limits(manifest: Json) -> None:
    manifest["files"] |= {f"{n}": 0 for n in range(30_000)}


def aliases_within_limits(manifest: Json) -> None:
    manifest["aliases"] = {f"a{n}": "weight" for n in range(120_000)} | {"a": "nothing"}


def million_tensors(manifest: Json) -> None:
    manifest["index"]["names"] = [f"t{n}" for n in range(1_000_000)]
    manifest["index"]["type_of"] = [0] * 1_000_000


def header_within_limits(manifest: Json) -> None:
    """List tensors that are all there, in a file that is too small for them."""
    index = manifest["index"]
    index["types"].append(["model", "F32", [1], []])
    index["names"] += [f"t{n}" for n in range(28_000)]
    index["type_of"] += [len(index["types"]) - 1] * 28_000
    index["stops"] += [1] * 28_000
    index["files"] += [index["files"][0]] * 28_000


def share_a_name(manifest: Json) -> None:
    """Give a state and a generator one name."""
    index = manifest["index"]
    kinds = [index["types"][type_][0] for type_ in index["type_of"]]
    index["names"][kinds.index("rng")] = index["names"][kinds.index("state")]


def long_name_in_many_chunks(manifest: Json) -> None:
    """Give a tensor a name of a megabyte and 1,000 chunks, in a file that seems to have their table."""
    index = manifest["index"]
    index["names"][0] = "x" * (1 << 20)
    index["types"].append(["model", "F32", [1000], []])
    index["type_of"][0] = len(index["types"]) - 1
    index["stops"][:1] = range(1, 1001)
    index["files"][:1] = [index["files"][0]] * 1000
    manifest["files"][PARAMS] = 1050 << 20
    place = sorted(manifest["files"]).index(PARAMS)
    index["crc32"][place : place + 1] = [0] * 263


def consistent_terabytes(manifest: Json) -> None:
    """Say that a tensor has 2^40 elements, with sizes and chunks to match."""
    of_first_type(2, [2**40])(manifest)
    manifest["index"]["stops"][0] = 2**40
    manifest["files"][PARAMS] += 4 * 2**40 - 8


MANIFESTS: dict[str, Callable[[Json], Any]] = {
    "a list": lambda manifest: [],
    "a number": lambda manifest: 7,
    "nothing in it": lambda manifest: {},
    "another format": put("format", value="zip"),
    "version 1": put("version", value=1),
    "version 3": put("version", value=3),
    "version true": put("version", value=True),
    "version 2.0": put("version", value=2.0),
    "negative step": put("step", value=-1),
    "huge step": put("step", value=HUGE),
    "step as text": put("step", value="1"),
    "step true": put("step", value=True),
    "step null": put("step", value=None),
    "no step": drop("step"),
    "a large value where a number belongs": put("step", value=[[0] * 300_000]),
    "a deep value where a number belongs": put("step", value=json.loads("[" * 900 + "]" * 900)),
    "something else": put("else", value=1),
    "ranks without files": put("world_size", value=5),
    "a billion ranks": put("world_size", value=10**18),
    "no rank": put("world_size", value=0),
    "ranks as text": put("world_size", value="1"),
    "versions of numbers": put("software", value={"torch": 2}),
    "expires as number": put("expires", value=1),
    "no files": drop("files"),
    "files as list": put("files", value=[PARAMS]),
    "a file as list": put("files", PARAMS, value=[]),
    "a file as object": put("files", PARAMS, value={"link": "/etc/passwd"}),
    "file above": rename_file("../outside.safetensors"),
    "absolute file": rename_file("/etc/passwd"),
    "file below": rename_file(f"x/{PARAMS}"),
    "file with NUL": rename_file("params\0"),
    "file of another rank": rename_file("params-00002-of-00001.safetensors"),
    "file of a further part": rename_file("params-00001-of-00001-2.safetensors"),
    "file of part 1": rename_file("params-00001-of-00001-1.safetensors"),
    "empty name": rename_file(""),
    "huge file": put("files", PARAMS, value=HUGE - 1),
    "file beyond 63 bits": put("files", PARAMS, value=HUGE),
    "negative size": put("files", PARAMS, value=-5),
    "fractional size": put("files", PARAMS, value=1.5),
    "size off by one": lambda m: put("files", PARAMS, value=m["files"][PARAMS] + 1)(m),
    "files within limits": files_within_limits,
    "alias of nothing": put("aliases", value={"a": "nothing"}),
    "alias of itself": put("aliases", value={"weight": "weight"}),
    "alias as number": put("aliases", value={"a": 1}),
    "alias of a stored name": put("aliases", value={"bias": "weight"}),
    "aliases as list": put("aliases", value=["a"]),
    "aliases within limits": aliases_within_limits,
    "no index": drop("index"),
    "index as list": put("index", value=[]),
    "a column more": put("index", "else", value=[]),
    "no names": put("index", "names", value=[]),
    "names twice": repeat(2, "names", "type_of"),
    "a name as number": put("index", "names", 0, value=3),
    "half of a surrogate pair": put("index", "names", 0, value="\ud800"),
    "a name of another": put("index", "names", 0, value="bias"),
    "a state and a generator of one name": share_a_name,
    "a long name in many chunks": long_name_in_many_chunks,
    "a type of none": put("index", "type_of", 0, value=99),
    "a negative type": put("index", "type_of", 0, value=-1),
    "a type of three": lambda m: m["index"]["types"][0].pop() and None,
    "a type of two": put("index", "types", 0, value=["model", "F32"]),
    "a type as object": put("index", "types", 0, value={"kind": "model"}),
    "no kind": of_first_type(0, "code"),
    "another kind": of_first_type(0, "state"),
    "no dtype": of_first_type(1, "OBJECT"),
    "other dtype": of_first_type(1, "F64"),
    "dtype as list": of_first_type(1, []),
    "overflowing shape": of_first_type(2, [2**31, 2**31, 2**31]),
    "a shape of 2^63 bytes": of_first_type(2, [2**40, 2**40]),
    "shape hidden by zero": of_first_type(2, [2**62, 2**62, 0]),
    "negative shape": of_first_type(2, [-2]),
    "fractional shape": of_first_type(2, [2.0]),
    "shape as text": of_first_type(2, "2"),
    "65 dimensions": of_first_type(2, [1] * 64 + [2]),
    "a thousand dimensions": of_first_type(2, [1] * 1000 + [2]),
    "terabytes": consistent_terabytes,
    "order of other dimensions": of_first_type(3, [1, 2, 3]),
    "order twice": of_first_type(3, [0, 0]),
    "negative order": of_first_type(3, [-1, 0]),
    "a file of none": put("index", "files", 0, value=99),
    "a file of another kind": put("index", "files", 0, value=0),
    "a negative file": put("index", "files", 0, value=-1),
    "a stop beyond": put("index", "stops", 0, value=3),
    "a stop before": put("index", "stops", 0, value=1),
    "a stop of nothing": put("index", "stops", 0, value=0),
    "a negative stop": put("index", "stops", 0, value=-2),
    "a fractional stop": put("index", "stops", 0, value=1.5),
    "stops as text": put("index", "stops", value="12"),
    "stops missing": shorten("stops"),
    "a chunk more": extend("stops", "files"),
    "chunks missing": shorten("stops", "files"),
    "no checksums": put("index", "crc32", value=[]),
    "checksums missing": shorten("crc32"),
    "checksums more": repeat(2, "crc32"),
    "wide checksum": put("index", "crc32", 0, value=2**32),
    "wrong checksum": put("index", "crc32", 0, value=0),
    "checksum as text": put("index", "crc32", 0, value="0"),
    "negative checksum": put("index", "crc32", 0, value=-1),
    "checksums within limits": repeat(150_000, "crc32"),
    "tensors within limits": repeat(15_000, "names", "type_of"),
    "chunks within limits": repeat(30_000, "stops", "files"),
    "header within limits": header_within_limits,
    "a million tensors": million_tensors,
    "a million chunks": repeat(100_000, "stops", "files"),
    "a part that is not there": put("parts", value=[[5, 1]]),
    "a part of nothing": put("parts", value=[[]]),
    "a part of 2^62 bytes": put("parts", value=[[2**62, 1]]),
    "parts within limits": put("parts", value=[[5, 1]] * 100_000),
    "parts as object": put("parts", value={}),
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


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused(name: str, checkpoint: Path) -> None:
    small.rewrite(checkpoint / "manifest.json", MANIFESTS[name])
    refuse(lambda: verify(checkpoint), checkpoint)


@pytest.mark.parametrize(("starts", "text"), [((0, 1), "1 to 2 of 'w' are twice"), ((0, 3), "2 to 3 of 'w' are in no")])
def test_elements_in_two_places_are_named(starts: tuple[int, int], text: str) -> None:
    """Manifests cannot say so; a save that would write them is refused."""
    columns = [0, 0], [0, 0], starts, [2, 4]
    with pytest.raises(zs.CheckpointError, match=f"elements {text}"):
        arrange([Spec("model", "w", "F32", (4,), ())], [PARAMS], columns, "the plan")


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


# What these texts say could be a manifest's, which would be refused for other reasons as well.
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": {"b": 1, "b": 1}}', "duplicate key 'b'"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"[1e999]", "1e999 is out of range"),
    ],
)
def test_json_is_strict(text: bytes, why: str) -> None:
    with pytest.raises(zs.CheckpointError, match=f"a file: is not strict JSON .{why}"):
        strict.loads(text, "a file")


def plant_extra(checkpoint: Path, text: bytes) -> None:
    """Replace extra.json, with a manifest to match."""
    (checkpoint / "extra.json").write_bytes(text)
    blocks = [text[start : start + (4 << 20)] for start in range(0, len(text), 4 << 20)]
    crc32 = [zlib.crc32(block) for block in blocks]

    def change(manifest: Json) -> None:
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
    "a parameter beyond": put("optimizers", 0, "groups", 0, "params", 0, value=99),
    "a negative parameter": put("optimizers", 0, "groups", 0, "params", 0, value=-1),
    "parameters as object": put("optimizers", 0, "groups", 0, "params", value={}),
    "states of a stranger": put("optimizers", 0, "stateful", value=[99]),
    "states of a parameter twice": put("optimizers", 0, "stateful", value=[0, 0]),
    "states as object": put("optimizers", 0, "states", value={"stranger": {}}),
    "a state of two": put("optimizers", 0, "states", 0, value=["step", None]),
    "a state twice": lambda e: e["optimizers"][0]["states"].append(e["optimizers"][0]["states"][0]),
    "a state of a parameter beyond": put("optimizers", 0, "states", 0, 1, value=[9]),
    "values of another number": put("optimizers", 0, "states", 0, 2, value=[1]),
    "a stack as text": put("optimizers", 0, "states", 0, 2, value={"stacked": "1"}),
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
def test_hostile_values_are_refused(name: str, checkpoint: Path) -> None:
    value = json.loads((checkpoint / "extra.json").read_bytes())
    returned = EXTRAS[name](value)
    plant_extra(checkpoint, json.dumps(value if returned is None else returned).encode())
    trainer = small.Small(1)
    refuse(lambda: trainer.zero.load(checkpoint), checkpoint / "extra.json")


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


def test_a_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    """Transformers takes the file, and not the index; which one is out of date nobody can tell."""
    names = ["model.safetensors", "model-00001-of-00001.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(tensor_file(GOOD))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[1]}}))
    refuse(lambda: FolderReader(tmp_path), tmp_path)
    assert FolderReader(tmp_path / names[0]).specs.keys() == {"a"}
    index.write_text(json.dumps({"weight_map": {"a": names[0]}}))
    assert FolderReader(tmp_path).specs.keys() == {"a"}


def test_how_many_there_are() -> None:
    """The page that promises it says how many; each is another file, or other contents."""
    count = len(MANIFESTS) + 2 * len(TEXTS) + len(EXTRAS) + len(GENERATORS) + len(FILES) * len(PLACES)
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


def test_files_have_the_permissions_that_the_umask_leaves(pristine: Path) -> None:
    os.umask(mask := os.umask(0))
    assert {path.stat().st_mode & 0o777 for path in pristine.iterdir()} == {0o666 & ~mask}
    assert pristine.stat().st_mode & 0o777 == 0o777 & ~mask
