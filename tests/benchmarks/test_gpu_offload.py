"""The comparison of offload on one GPU, which has not been run on one: here the script itself, tiny, on the CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_offload


@pytest.mark.rotates
def test_the_script_runs_through_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu_offload.json"
    entrants = ["zeroshard, states and parameters", "FSDP2 CPUOffloadPolicy"]
    gpu_offload.main(["--device", "cpu", "--output", str(output), *(f"--entrant={name}" for name in entrants)])
    result = json.loads(output.read_text())
    assert [(row["entrant"], row["depth"], "problem" in row) for row in result["rows"]] == [
        (name, 2, False) for name in entrants
    ]
    assert result["compared"]["ratio"] > 0 and result["compared"]["beside"] == entrants[1]
    ours, theirs = (row["losses"] for row in result["rows"])
    assert ours == pytest.approx(theirs, rel=1e-2)
    assert all(row["host_peak_bytes"] > 0 for row in result["rows"])
    gpu_offload.main(["--device", "cpu", "--output", str(output), "--plan"])
    ours, _ = json.loads(output.read_text())["rows"]
    assert ours["planned"]["offloaded_peak_bytes"] > 0


def test_the_script_asks_for_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_offload.main(["--output", str(tmp_path / "none.json")])
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.rotates
def test_a_size_that_no_entrant_holds_is_a_row_with_its_problem(tmp_path: Path) -> None:
    row = gpu_offload.run_apart("zeroshard, states", gpu_offload.SIZES["cpu"], -1, 1.0)
    assert "GPTConfig.depth must be at least 1" in row["problem"]
    assert gpu_offload.compare([{"entrant": "FSDP2 CPUOffloadPolicy", "depth": 2, **row}]) == {
        "problem": "none of the others trained any size"
    }
