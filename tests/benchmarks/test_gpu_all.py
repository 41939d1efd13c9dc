"""The command for all of one GPU: here its order, its time and its file, on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_all
from benchmarks.gpu_all import Part


def run(tmp_path: Path, *names: str) -> dict[str, Any]:
    """Run parts on the CPU, and return what the file has of them."""
    output = tmp_path / "all.json"
    assert gpu_all.main(["--device", "cpu", "--only", *names, "--output", str(output)]) == 0
    found: dict[str, Any] = json.loads(output.read_text())["parts"]
    return found


@pytest.mark.rotates
def test_parts_run_in_order_and_leave_one_file(tmp_path: Path) -> None:
    parts = run(tmp_path, "optimizer", "ranks_64")
    assert [*parts] == ["ranks_64", "optimizer"]
    assert len(parts["ranks_64"]["found"]["sections"]) == 2
    assert parts["optimizer"]["found"]["optimizer"]["moved_bytes"] > 0
    assert parts["optimizer"]["found"]["sections"] == []


# The checks have a test of their own (tests/integrations/test_gpu_check.py).
@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "kind", "count"), [("ranks_8", "sections", 2), ("one_rank", "sections", 3), ("offload", "rows", 2)]
)
def test_the_other_parts_run_through_without_a_problem(name: str, kind: str, count: int, tmp_path: Path) -> None:
    found = run(tmp_path, name)[name]["found"]
    assert len(found[kind]) == count
    assert "problem" not in json.dumps(found)


def test_a_part_without_time_is_not_begun(tmp_path: Path) -> None:
    found = gpu_all.run(Part("x", "benchmarks.gpu", most_s=60.0), tmp_path / "x.json", "cuda", 29.0)
    assert (found["status"], found["wall_s"]) == (None, 0.0)
    assert not (tmp_path / "x.json").exists()
