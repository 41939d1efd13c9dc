"""The command for all of one GPU: here its order, its time and its file, on the CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_all
from benchmarks.gpu_all import Part


@pytest.mark.rotates
def test_parts_run_in_order_and_leave_one_file(tmp_path: Path) -> None:
    output = tmp_path / "all.json"
    assert gpu_all.main(["--device", "cpu", "--only", "optimizer", "ranks_64", "--output", str(output)]) == 0
    parts = json.loads(output.read_text())["parts"]
    assert [*parts] == ["ranks_64", "optimizer"]
    assert len(parts["ranks_64"]["found"]["sections"]) == 2
    assert parts["optimizer"]["found"]["optimizer"]["moved_bytes"] > 0
    assert parts["optimizer"]["found"]["sections"] == []


def test_a_part_without_time_is_not_begun(tmp_path: Path) -> None:
    found = gpu_all.run(Part("x", "benchmarks.gpu", most_s=60.0), tmp_path / "x.json", "cuda", 29.0)
    assert (found["status"], found["wall_s"]) == (None, 0.0)
    assert not (tmp_path / "x.json").exists()
