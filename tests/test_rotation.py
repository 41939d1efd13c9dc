"""All rotations together are all cases, and what a rotation leaves out is counted as such."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.planted import BUGS
from tools.seconds import seconds_in, seconds_of_tests

from . import conftest, rotation
from .rotation import NAMED, RUNNING, TURNS, share, split, third, turn_of

ROOT = Path(__file__).parents[1]
PRODUCTS = """
import pytest

@pytest.mark.product
@pytest.mark.parametrize("world", range(3))
@pytest.mark.parametrize("stage", range(4))
def test_product(stage, world): pass

@pytest.mark.product
@pytest.mark.parametrize(("seed", "kind"), [(7, "x")])
def test_of_one_case(seed, kind): pass

@pytest.mark.parametrize("text", ["a", "b", "c"])
def test_table(text): pass

@pytest.mark.product
@pytest.mark.parametrize("world", range(2))
def test_pair(world): pass

@pytest.mark.rotates
def test_slow(): pass

@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(6))
def test_slow_cases(seed): pass

def test_alone(): pass

def test_costly(): pass
"""


def collected(path: str, *arguments: str) -> list[pytest.Item]:
    """Return all tests of a path, as pytest collects them."""

    class Seen:
        items: Sequence[pytest.Item] = ()

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.items = session.items

    seen = Seen()
    options = ("--collect-only", "-qqq", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib")
    assert pytest.main([*options, path, *arguments], plugins=[seen]) == pytest.ExitCode.OK
    return [*seen.items]


def names_of(items: Sequence[pytest.Item]) -> list[str]:
    return [item.nodeid.rpartition("/")[2] for item in items]


@pytest.fixture
def products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a file with products and with tests that are none; return its path."""
    hooks = [name for name in vars(conftest) if name.startswith("pytest_")]
    (tmp_path / "conftest.py").write_text(f"from {conftest.__name__} import {', '.join(hooks)}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = product\n rotates\n gpu\n")
    (tmp_path / "test_generated.py").write_text(PRODUCTS)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "test_generated.py")


def test_rotations_are_everything_together(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    items = collected(products)
    everything = names_of(items)
    assert len(everything) == 12 + 1 + 3 + 2 + 1 + 6 + 1 + 1
    assert split(items, "all") == (items, [])
    costly = next(item.nodeid for item in items if item.nodeid.endswith("::test_costly"))
    monkeypatch.setattr(rotation, "COSTLY", {costly})
    always = ["::test_table", "::test_alone"]
    parts = []
    for number in map(str, range(TURNS)):
        kept, left_out = map(names_of, split(items, number))
        assert sorted(kept + left_out) == sorted(everything)
        assert kept == [name for name in everything if name in kept]
        parts.append([name for name in kept if not any(text in name for text in always)])
        assert len(kept) == len(parts[-1]) + 3 + 1
        assert len([name for name in kept if "::test_product[" in name]) in (1, 2)
    # Each case that rotates has one rotation.
    together = [name for part in parts for name in part]
    assert len(together) == len({*together}) == 12 + 1 + 2 + 1 + 6 + 1
    common = names_of(split(items, "common")[0])
    assert common == [name for name in everything if any(text in name for text in always)]


def test_a_product_of_this_suite_rotates() -> None:
    items = collected(str(Path(__file__).parent / "engine" / "test_parity.py"))
    *parts, everything = (names_of(split(items, number)[0]) for number in (*map(str, range(TURNS)), "all"))
    assert set().union(*parts) == set(everything)
    assert max(map(len, parts)) < 0.4 * len(everything)
    planted = {bug.test.rpartition("/")[2] for bug in BUGS if bug.test.startswith("tests/engine/test_parity.py::")}
    common = set(everything).intersection(*parts)
    assert planted and planted <= common == {*names_of(split(items, "common")[0])}


def test_tests_that_rotate_together_have_one_rotation(products: str) -> None:
    mark = pytest.mark.rotates(together=True)
    items = collected(products, "-k", "test_slow or test_pair")
    assert len(items) == 1 + 6 + 2
    for item in items:
        item.add_marker(mark, append=False)
    sizes = [len(split(items, str(turn))[0]) for turn in range(TURNS)]
    assert sorted(sizes) == [0] * (TURNS - 1) + [9]


def test_a_number_of_commits_is_a_rotation_whose_loops_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for number in (4, 4 + TURNS, 4 + 2 * TURNS):
        monkeypatch.setattr(RUNNING, "rotation", str(number))
        monkeypatch.setattr(RUNNING, "case", "tests/a.py::one")
        assert turn_of(str(number)) == 4
        seen |= {*third(range(9))}
    assert seen == {*range(9)}


@pytest.mark.rotates
def test_a_chosen_case_keeps_its_place(products: str) -> None:
    whole = names_of(split(collected(products), "2")[0])
    some = names_of(collected(products, "--rotation", "2", "-k", "test_product"))
    assert some == [name for name in whole if "::test_product[" in name]
    assert 0 < len(some) < 12


def test_a_rotation_has_all_values_of_a_parameter() -> None:
    for turn, columns in itertools.product(range(TURNS), range(2, TURNS)):
        cases = range(turn, TURNS * columns, TURNS)
        assert {case % columns for case in cases} == set(range(columns))


@pytest.mark.rotates
def test_a_loop_has_its_first_value_and_a_third_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, count in itertools.product(["tests/a.py::one", "tests/a.py::two", "tests/a.py::three[1]"], range(12)):
        monkeypatch.setattr(RUNNING, "case", case)
        parts = []
        for number in ("0", "1", "2", "all"):
            monkeypatch.setattr(RUNNING, "rotation", number)
            parts.append(third(range(count)))
            assert parts[-1] == sorted(parts[-1]) and parts[-1][:1] == [*range(count)][:1]
            assert share(9.0) == (9.0 if number == "all" else 3.0)
        one, two, three, everything = parts
        assert everything == [*range(count)] == sorted({*one, *two, *three})
        # Of what is not the first, each value is in one of three rotations that follow each other.
        assert len(one) + len(two) + len(three) == count + 2 * (count > 0)


def test_what_finds_a_planted_bug_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNNING, "rotation", "1")
    for named in NAMED:
        for case in (named, f"{named}[2]") if "[" not in named and "::" in named else (named,):
            monkeypatch.setattr(RUNNING, "case", case)
            assert third(range(9)) == [*range(9)] and share(9.0) == 9.0


def test_a_test_is_told_what_runs(request: pytest.FixtureRequest) -> None:
    assert (RUNNING.rotation, RUNNING.case) == (request.config.option.rotation, request.node.nodeid)


def test_seconds_are_those_of_setup_call_and_teardown() -> None:
    log = """
    1.50s call     tests/a.py::test_one[1-a]
    0.50s setup    tests/a.py::test_one[1-a]
    1.00s call     tests/a.py::test_one[2 of b]
    0.25s teardown tests/b.py::test_two
    FAILED tests/b.py::test_two - 3.00s call
    """
    assert seconds_in([log]) == {"tests/a.py::test_one": 1.5, "tests/b.py::test_two": 0.2}
    quicker = "1.00s call     tests/a.py::test_one[1-a]"
    assert seconds_in([log, quicker]) == {"tests/a.py::test_one": 1.0, "tests/b.py::test_two": 0.2}


def test_the_seconds_are_of_tests_that_there_are() -> None:
    gone = [name for name in seconds_of_tests() if not has_test(*name.split("::"))]
    assert len(gone) < 0.1 * len(seconds_of_tests()), gone  # renamed ones run always, until the file is written anew


def has_test(path: str, name: str) -> bool:
    """Tell whether a file defines a test."""
    return (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.rotates
def test_workers_report_what_is_left_out_as_deselected(products: str) -> None:
    command = [sys.executable, "-m", "pytest", products, "--rotation", "1", "-n", "2", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert f"rotation 1 of 0 to {TURNS - 1}" in done.stdout
    assert "8 passed, 19 deselected" in done.stdout, done.stdout
