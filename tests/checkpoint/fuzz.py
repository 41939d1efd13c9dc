"""A fuzzer of what a checkpoint and a folder of safetensors say of themselves, guided by coverage.

Owns inputs, their mutation and their judgement; `tools/fuzz.py` runs it for long, `test_fuzz.py` for seconds. An input
is a few files. Its texts are changed as trees, or as bytes, and sizes and checksums are then made to fit, so that
changes get past them. An input that reaches lines in an order that none before did is kept and changed further. A
library was not taken: libFuzzer (atheris) owns the process, has no build for every Python that is supported, and knows
neither the processor's time nor the memory of one input.
"""

import base64
import copy
import ctypes
import itertools
import json
import random
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.checkpoint import index
from zeroshard.checkpoint.folders import FolderReader
from zeroshard.checkpoint.verify import verify

from . import small

LIMIT_S, LIMIT_BYTES = 1.0, 64 << 20
MOST_SPOTS = 100_000
"""Places of a tree that a change may be drawn from."""
GROWN_BYTES = 20 << 20
"""More than any text that is read may have."""
TRACED_BYTES = 32 << 10
"""Larger inputs are judged, and not traced, which would take seconds."""

UNEXPECTED = re.compile(r"failed on rank 0: [A-Z]\w+: ")
CODE = str(Path(zs.__file__).parent / "checkpoint")
PLACE = "step-2"
NUMBERS = [0, 1, -1, 2, 63, 64, 65, 255, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**400]
WORDS = [
    "model",
    "state",
    "rng",
    "F32",
    "U8",
    "BOOL",
    "C64",
    "$tensor",
    "$counter",
    "$items",
    "$tuple",
    "$float",
    "nan",
    "",
    "~",
    "/",
]
WORDS += ["weight", "0/exp_avg/weight", "a" * 300, "\U0001f600", "\u4e2d", "\ud800", "\0", "..", "../a", "extra.json"]
WIDE = "\U0001f600".encode()
OTHERS: list[Any] = [None, True, False, 0.5, 1e308, [], {}, [[]], {"": 0}, {"$tuple": []}, {"$items": [[1, 2]]}]

Files = dict[str, bytes]


@dataclass
class Counts:
    """What a run came to."""

    inputs: int = 0
    accepted: int = 0
    edges: int = 0
    kept: int = 0
    slowest_s: float = 0.0
    largest_bytes: int = 0
    findings: list[str] = field(default_factory=list)


def seeds(folder: Path) -> list[Files]:
    """Return inputs that are right: an index in one file, an index in parts, a folder of safetensors."""
    with pytest.MonkeyPatch.context() as patch:
        plain = small.write(folder / "plain")
        patch.setattr(index, "PART_COST", 500)
        patch.setattr(index, "VALUES", 2)
        parts = small.write(folder / "parts")
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    tensors = {"model.safetensors": len(text).to_bytes(8, "little") + text + b"\0" * 8}
    listed = json.dumps({"weight_map": {"a": "model.safetensors"}, "metadata": {}}).encode()
    made = [{path.name: path.read_bytes() for path in sorted(one.iterdir())} for one in (plain, parts)]
    return [*made, tensors, tensors | {"model.safetensors.index.json": listed}]


def edges_into(seen: set[tuple[str, int, int]], code: str) -> Callable[[FrameType, str, Any], Any]:
    """Return a function for `sys.settrace` that adds to `seen` each pair of lines that follow each other in `code`."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(code):
            return None
        name, last = frame.f_code.co_filename, frame.f_lineno

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            seen.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return local

        return local

    return trace


class Fuzzer:
    """Makes inputs, and judges each. The same seed makes the same inputs.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.counts, self._draw, self._folder = Counts(), random.Random(seed), folder
        self._seen: set[tuple[str, int, int]] = set()
        self._trace = edges_into(self._seen, CODE)
        self._pool = seeds(folder / "seeds")
        self._trainer = small.Small(0).train(2)
        for files in self._pool:
            if problem := self.judge(files):
                raise AssertionError(f"a seed is refused: {problem}")

    def run(self, seconds: float, findings: Path | None = None) -> Counts:
        """Try inputs for so long; write those that are judged wrong, as files that `replay` takes."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            files = self.mutated(self._draw.choice(self._pool))
            if problem := self.judge(files):
                place = f"finding-{len(self.counts.findings)}.json"
                if findings is not None:
                    findings.mkdir(parents=True, exist_ok=True)
                    (findings / place).write_bytes(packed(files))
                self.counts.findings.append(f"{place} (input {self.counts.inputs}): {problem}")
        return self.counts

    # -- judgement ----------------------------------------------------------------------------------------------------

    def judge_file(self, data: bytes) -> str:
        """Judge a finding."""
        return self.judge(unpacked(data))

    def judge(self, files: Files) -> str:
        """Return what is wrong with how an input is treated; nothing where it is right."""
        self.counts.inputs += 1
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            path = Path(name, PLACE)
            path.mkdir()
            for file, data in files.items():
                (path / file).write_bytes(data)
            problem = self._measured(path)
            if not problem and sum(map(len, files.values())) < TRACED_BYTES:
                before = len(self._seen)
                sys.settrace(self._trace)
                try:
                    problem = self._treat(path)
                finally:
                    sys.settrace(None)
                if len(self._seen) > before:
                    self._pool.append(files)
        self.counts.edges, self.counts.kept = len(self._seen), len(self._pool)
        return problem

    def _measured(self, path: Path) -> str:
        ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps from before would hide what is taken
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, begin_s = memory_bytes("VmRSS"), time.process_time()
        problem = self._treat(path)
        seconds, nbytes = time.process_time() - begin_s, memory_bytes("VmHWM") - before
        self.counts.slowest_s = max(self.counts.slowest_s, seconds)
        self.counts.largest_bytes = max(self.counts.largest_bytes, nbytes)
        if not problem and seconds > LIMIT_S:
            problem = f"took {seconds:.1f} s of the processor"
        return problem or (f"took {nbytes / 2**20:.0f} MiB" if nbytes > LIMIT_BYTES else "")

    def _treat(self, path: Path) -> str:
        """Read an input as whoever was given it."""
        is_checkpoint = (path / "manifest.json").exists()
        try:
            if is_checkpoint:
                verify(path)
                self._trainer.zero.load(path)
            else:
                reader = FolderReader(path)
                for name, spec in reader.specs.items():
                    assert len(reader.read(name, 0, spec.numel)) == spec.numel * spec.item_bytes
        except zs.CheckpointError as error:
            # Where ranks act together, whatever one raises becomes this error; its own class then stands there.
            if UNEXPECTED.search(str(error)):
                return str(error)
            if str(path) not in str(error):
                return f"the error names no file: {error}"
            return f"memory was changed: {error}" if "Memory is partly changed" in str(error) else ""
        except Exception as error:  # whatever it is: nothing else may come out
            return f"{type(error).__name__}: {error}"
        self.counts.accepted += 1
        return ""

    # -- mutation -----------------------------------------------------------------------------------------------------

    def mutated(self, files: Files) -> Files:
        """Return an input with some changes, whose sizes and checksums mostly fit."""
        files, draw = dict(files), self._draw
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            name = draw.choice([name for name in files if name.endswith(".json") or "manifest.json" not in files])
            start, text, end = cut(name, files[name])
            files[name] = joined(name, start, self._changed(text), end)
        return fitted(files) if draw.random() < 0.95 else files

    def _changed(self, text: bytes) -> bytes:
        draw = self._draw
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            return self._garbled(text)
        if draw.random() < 0.15:
            return self._garbled(text)
        for _ in range(draw.choice([1, 1, 2, 3])):
            tree = self._changed_tree(tree)
        ascii_only = draw.random() < 0.9
        try:
            return json.dumps(tree, ensure_ascii=ascii_only, separators=(",", ":")).encode(errors="surrogatepass")
        except (ValueError, RecursionError):
            return text

    def _garbled(self, text: bytes) -> bytes:
        draw, data = self._draw, bytearray(text)
        place, stop = draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)
        kind = draw.randrange(6)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[min(place, stop) : max(place, stop)]
        elif kind == 2:
            piece = bytes(data[min(place, stop) : max(place, stop)][:64])
            data[place:place] = piece * draw.choice([1, 2, 1000, 60_000])
        elif kind == 3:
            data[place:place] = draw.choice([b"[" * 2000, b'{"a":' * 2000, b"-", b"1e999", b"NaN", b"\xff", WIDE])
        elif kind == 4:
            data = bytearray(b"{" + b",".join(b'"a%d":1' % n for n in range(200_000)) + b',"a0":2}')
        else:
            data[place:place] = draw.choice([b"\\ud83d\\ude00", b"\\ud800", b"\\u0000", b"\0", b'"', b"9" * 5000])
        return bytes(data)

    def _changed_tree(self, tree: Any) -> Any:
        draw = self._draw
        spots = list(itertools.islice(walk(tree), MOST_SPOTS))
        if not spots:
            return copy.deepcopy(draw.choice(OTHERS))
        holder, key = draw.choice(spots)
        value, kind = holder[key], draw.randrange(12)
        if kind <= 2 and type(value) is int:
            holder[key] = value + draw.choice([-2, -1, 1, 2, value, 2**32, -value])
        elif kind <= 4:
            holder[key] = copy.deepcopy(draw.choice(draw.choice([NUMBERS, WORDS, OTHERS])))
        elif kind == 5:
            del holder[key]
        elif kind == 6 and isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(value)))
        elif kind == 7:
            other, place = draw.choice(spots)
            holder[key] = json.loads(json.dumps(other[place]))
        elif kind == 8 and isinstance(value, str):
            # Now and then as long as a text may be, or wide.
            start, count = draw.choice(["\U0001f600", "", "\\"]), draw.choice([2, 50, 5000])
            holder[key] = start + value * _times(count, json.dumps(value))
        elif kind == 9 and isinstance(holder, list) and draw.random() < 0.3:
            holder[key:key] = _repeated(value, draw.choice([10, 1000, 100_000]))
        elif kind == 10 and isinstance(holder, dict):
            holder[draw.choice([*WORDS, *holder])] = value
        elif kind == 11 and draw.random() < 0.2:
            holder[key] = json.loads(json.dumps(self._grown()))  # no two places of a tree are one object
        else:
            holder[key] = [value]
        return tree

    def _grown(self) -> Any:
        """Return a value that is hard on whoever reads it without a limit."""
        draw = self._draw
        many = draw.choice([100, 3000, 50_000])
        return draw.choice(
            [
                lambda: {"$items": [[n * (2**61 - 1), 0] for n in range(many)]},
                lambda: {"$items": [[n << 40, 0] for n in range(many)]},
                lambda: {"$tensor": {"data": "", "dtype": "U8", "shape": [0] * draw.choice([1, 70, many])}},
                lambda: [{"$tensor": {"data": "AA==", "dtype": "U8", "shape": [1]}}] * min(many, 20_000),
                lambda: {"stacked": [{"$tensor": {"data": "AAAA" * many, "dtype": "U8", "shape": [3 * many]}}]},
                lambda: {str(n): n for n in range(many)},
                lambda: [[n] for n in range(many)],
                lambda: [f"t{n}" for n in range(many)],
                lambda: ["model", "F32", [1] * 64, list(range(64))],
                lambda: json.loads("[" * 300 + "]" * 300),
                lambda: "\U0001f600" * many,
                lambda: [10**300] * (many // 10),
                lambda: [0.1] * many,
            ]
        )()


def _repeated(value: Any, count: int) -> list[Any]:
    """Return copies of a value: places that are one object would all change with one of them."""
    text = json.dumps(value)
    copies: list[Any] = json.loads(f"[{','.join([text] * _times(count, text))}]")
    return copies


def _times(count: int, text: str) -> int:
    """Return how often a value with this JSON may be repeated: inputs that are kept would else grow without an end."""
    return min(count, GROWN_BYTES // (1 + len(text)))


def walk(tree: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the places of a tree: what holds each, and its key. Of a long list some."""
    if isinstance(tree, dict):
        places: list[Any] = list(tree)[:200]
    elif isinstance(tree, list):
        places = list(range(len(tree)))[:200]
    else:
        return
    for place in places:
        yield tree, place
        if depth < 12:
            yield from walk(tree[place], depth + 1)


# -- files ------------------------------------------------------------------------------------------------------------


def cut(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what stands before the JSON of a file, the JSON, and what follows."""
    if name == "manifest.json":
        return b"", data.rpartition(b"\n{")[0], b""
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(data[:8], "little")
        return data[:8], data[8:end], data[end:]
    return b"", data, b""


def joined(name: str, start: bytes, text: bytes, end: bytes) -> bytes:
    """Return a file of such parts, with the checksum or the length that belongs to it."""
    if name == "manifest.json":
        return text + b'\n{"crc32":%d}\n' % zlib.crc32(text)
    return (len(text).to_bytes(8, "little") if start else b"") + text + end


def fitted(files: Files) -> Files:
    """Return an input whose manifest says what sizes and checksums its texts have."""
    if "manifest.json" not in files:
        return files
    try:
        manifest = json.loads(cut("manifest.json", files["manifest.json"])[1])
        extra = files["extra.json"]
        crc32 = [zlib.crc32(extra[start : start + (4 << 20)]) for start in range(0, len(extra), 4 << 20)]
        manifest["files"]["extra.json"] = len(extra)
        if manifest["index"]["crc32"]:
            manifest["index"]["crc32"][:1] = crc32
        if manifest.get("parts"):
            texts = [files[name] for name in sorted(files) if name.startswith("index-")]
            manifest["parts"] = [[len(text), zlib.crc32(text)] for text in texts]
        text = json.dumps(manifest, separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return files
    return files | {"manifest.json": joined("manifest.json", b"", text, b"")}


def packed(files: Files) -> bytes:
    """Return an input as one file."""
    return json.dumps({name: base64.b64encode(zlib.compress(data)).decode() for name, data in files.items()}).encode()


def unpacked(data: bytes) -> Files:
    """Return what was packed."""
    return {name: zlib.decompress(base64.b64decode(text)) for name, text in json.loads(data).items()}


def memory_bytes(what: str) -> int:
    """Return a line of this process's status in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) << 10
