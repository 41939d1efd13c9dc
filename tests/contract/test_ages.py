"""Published results say how much of the code that they measured has changed since."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.machine import circumstances, hash_of, room_of
from tools import ages

from .source import REPOSITORY


def has_history() -> bool:
    """Tell whether git knows the commits of the results."""
    one = next(iter(ages.results().values()))
    return ages.changed_lines("step-gpt-30m-2x1.json", {**one, "code": {}}) is not None


needs_history = pytest.mark.skipif(not has_history(), reason="a checkout without the commits that were measured")


@needs_history
def test_the_list_of_old_results_is_that_of_today() -> None:
    text = ages.PAGE.read_text()
    assert ages.filled(text) == text, "python -m tools.ages --write"


@needs_history
def test_each_result_has_hashes_of_the_code() -> None:
    lacking = [name for name, one in ages.results().items() if not one.get("code")]
    assert [name for name in lacking if ages.note(name) or ages.changed_lines(name, ages.results()[name])] == [], (
        "python -m tools.ages --fill"
    )


def test_what_is_measured_today_is_not_old() -> None:
    about = circumstances("tests")
    assert ages.changed_lines("step.json", about) == 0
    assert {"core", "wire", "plan"} <= about["code"].keys()
    for name in ages.SPEAKS_OF:
        assert {*ages.rooms_of(f"{name}.json")} <= about["code"].keys()


@needs_history
def test_a_room_that_changed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    old = json.loads((ages.RESULTS / "domains.json").read_text())
    whole = ages.changed_lines("domains.json", {**old, "code": {}})
    assert whole is not None and whole > 0
    monkeypatch.setattr(ages, "LIMIT_LINES", whole - 1)
    assert f"over {whole - 1:,} lines" in ages.note("domains.json")
    assert "[domains.json]" in ages.listed()
    monkeypatch.setattr(ages, "LIMIT_LINES", whole)
    assert ages.note("domains.json") == ""


def test_a_hash_is_that_of_names_and_bytes_alone() -> None:
    one = {"a/x.py": b"1", "a/y.py": b"2"}
    assert hash_of(one) == hash_of({"/elsewhere/y.py": b"2", "/elsewhere/x.py": b"1"})
    assert len({hash_of(one), hash_of({**one, "a/y.py": b"3"}), hash_of({"a/x.py": b"1", "a/z.py": b"2"})}) == 3
    assert room_of(Path("core/unit.py")) == "core" and room_of(Path("handle.py")) == ""


@needs_history
def test_moved_files_count_with_what_changed_in_them() -> None:
    log = subprocess.run(
        ["git", "log", "--diff-filter=R", "-M", "--format=%H", "-1", "--", "zeroshard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ages.changed_lines("step.json", {"commit": f"{log.stdout.strip()}~1"}) is not None
