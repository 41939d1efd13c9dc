"""Ten seconds of the fuzzer, what it found before, and bugs that it must find."""

import json
from pathlib import Path

import pytest

from zeroshard.checkpoint import strict, values

from .fuzz import Fuzzer, fitted, packed, seeds, unpacked

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
SECONDS = 6.0


@pytest.mark.timeout(300)
def test_no_input_is_treated_wrong(tmp_path: Path) -> None:
    counts = Fuzzer(tmp_path, 1).run(SECONDS, tmp_path / "findings")
    assert counts.findings == []
    assert counts.inputs > 30
    assert counts.edges > 500


def test_what_was_found_before_is_treated_right(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, 1)
    assert CORPUS
    assert {path.name: fuzzer.judge(unpacked(path.read_bytes())) for path in CORPUS} == {
        path.name: "" for path in CORPUS
    }


def test_inputs_are_kept_as_they_are(tmp_path: Path) -> None:
    for files in seeds(tmp_path):
        assert unpacked(packed(files)) == files


def test_the_same_seed_makes_the_same_inputs(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        fuzzer = Fuzzer(tmp_path / name, 7)
        files = {"manifest.json": b'{"a":[1,2,"x"]}\n{"crc32":1}\n', "extra.json": b"{}"}
        made.append([fuzzer.mutated(files) for _ in range(50)])
    assert made[0] == made[1]


@pytest.mark.rotates
def test_bugs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit that it rests on, an input is judged wrong: for its time, its memory, or its exception."""
    fuzzer = Fuzzer(tmp_path, 1)
    plain = next(files for files in seeds(tmp_path / "again") if "manifest.json" in files)

    def judge(extra: object) -> str:
        value = json.loads(plain["extra.json"]) | {"extra": {"a": extra}}
        return fuzzer.judge(fitted(plain | {"extra.json": json.dumps(value).encode()}))

    alike = {"$items": [[n * (2**61 - 1), 0] for n in range(30_000)]}
    large = "a" * (14 << 20) + "\U0001f600"
    many = {"$tensor": {"data": "AA==", "dtype": "U8", "shape": [2**70]}}
    assert [judge(alike), judge(large), judge(many)] == ["", "", ""]
    monkeypatch.setattr(values, "MAX_ALIKE", 1 << 30)
    assert "of the processor" in judge(alike)
    monkeypatch.setattr(strict, "MAX_PARSED_BYTES", 1 << 30)
    assert "MiB" in judge(large)
    monkeypatch.setattr(values, "_decode_tensor", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in judge(many)
