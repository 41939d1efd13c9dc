"""Three rotations of the products' cases are all cases, and what a rotation leaves out is counted as such."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.planted import BUGS

from . import conftest
from .rotation import NAMED, ROTATIONS, RUNNING, share, split, third, turn_of

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
    (tmp_path / "conftest.py").write_text(f"from {conftest.__name__} import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = product\n rotates\n gpu\n")
    (tmp_path / "test_generated.py").write_text(PRODUCTS)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "test_generated.py")


def test_rotations_are_everything_together(products: str) -> None:
    items = collected(products)
    everything = names_of(items)
    assert len(everything) == 12 + 1 + 3 + 2 + 1 + 6 + 1
    assert split(items, "all") == (items, [])
    always = ["::test_of_one_case", "::test_table", "::test_alone"]
    pairs, runs, slow = [], [], []
    for rotation in ("0", "1", "2"):
        kept, left_out = map(names_of, split(items, rotation))
        assert sorted(kept + left_out) == sorted(everything)
        assert kept == [name for name in everything if name in kept]
        # A third of the table has all its rows and columns.
        cases = [re.findall(r"\d+", name) for name in kept if "::test_product[" in name]
        assert {stage for stage, _ in cases} == set("0123") and {world for _, world in cases} == set("012")
        rotating = [name for name in kept if not any(text in name for text in always)]
        assert len(kept) == len(rotating) + 1 + 3 + 1
        pairs.append([name for name in rotating if "::test_pair" in name])
        runs.append([name for name in rotating if "::test_product" in name])
        slow.append([name for name in rotating if "::test_slow" in name])
    # Each of the twelve cases has one rotation.
    assert sorted(map(len, runs)) == [4, 4, 4] and len(set().union(*runs)) == 12
    # Of two cases each rotation has one.
    assert sorted(map(len, pairs)) == [1, 1, 1] and len(set().union(*pairs)) == 2
    assert sorted(map(len, slow)) == [2, 2, 3] and len(set().union(*slow)) == 7


def test_a_product_of_this_suite_rotates() -> None:
    items = collected(str(Path(__file__).parent / "engine" / "test_parity.py"))
    everything, one, two, three = (names_of(split(items, rotation)[0]) for rotation in ("all", "0", "1", "2"))
    assert {*one, *two, *three} == set(everything)
    assert max(len(one), len(two), len(three)) < 0.6 * len(everything)
    planted = {bug.test.rpartition("/")[2] for bug in BUGS if bug.test.startswith("tests/engine/test_parity.py::")}
    assert planted and planted <= {*one} & {*two} & {*three}


@pytest.mark.rotates
def test_a_case_that_is_named_or_chosen_keeps_its_place(products: str) -> None:
    assert len(collected(f"{products}::test_product[1-1]", "--rotation", "0")) == 1
    whole = names_of(split(collected(products), "2")[0])
    some = names_of(collected(products, "--rotation", "2", "-k", "test_product"))
    assert some == [name for name in whole if "::test_product[" in name]
    assert 0 < len(some) < 12


def test_a_rotation_has_all_rows_and_columns_of_a_product() -> None:
    for rows, columns, rotation in itertools.product(range(3, 10), range(3, 10), range(3)):
        cases = [case for case in range(rows * columns) if turn_of(case, [columns, rows]) == rotation]
        assert {case // columns for case in cases} == set(range(rows)), (rows, columns, rotation)
        assert {case % columns for case in cases} == set(range(columns)), (rows, columns, rotation)


@pytest.mark.rotates
def test_a_loop_has_its_first_value_and_a_third_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, count in itertools.product(["tests/a.py::one", "tests/a.py::two", "tests/a.py::three[1]"], range(12)):
        monkeypatch.setattr(RUNNING, "case", case)
        parts = []
        for rotation in ROTATIONS:
            monkeypatch.setattr(RUNNING, "rotation", rotation)
            parts.append(third(range(count)))
            assert parts[-1] == sorted(parts[-1]) and parts[-1][:1] == [*range(count)][:1]
            assert share(9.0) == (9.0 if rotation == "all" else 3.0)
        one, two, three, everything = parts
        assert everything == [*range(count)] == sorted({*one, *two, *three})
        # Of what is not the first, each value is in one rotation.
        assert len(one) + len(two) + len(three) == count + 2 * (count > 0)


def test_what_finds_a_planted_bug_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNNING, "rotation", "1")
    for named in NAMED:
        for case in (named, f"{named}[2]") if "[" not in named and "::" in named else (named,):
            monkeypatch.setattr(RUNNING, "case", case)
            assert third(range(9)) == [*range(9)] and share(9.0) == 9.0


def test_a_test_is_told_what_runs(request: pytest.FixtureRequest) -> None:
    assert (RUNNING.rotation, RUNNING.case) == (request.config.option.rotation, request.node.nodeid)


@pytest.mark.rotates
def test_workers_report_what_is_left_out_as_deselected(products: str) -> None:
    command = [sys.executable, "-m", "pytest", products, "--rotation", "1", "-n", "2", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert "rotation 1 of 0, 1, 2" in done.stdout
    assert "13 passed, 13 deselected" in done.stdout, done.stdout
