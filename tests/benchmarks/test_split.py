"""The comparison with FSDP2 on split layers, tiny: the script itself, and what it compares."""

import json
from pathlib import Path

import pytest

from benchmarks import split
from zeroshard.testing import run_ranks


@pytest.mark.rotates
def test_contestants_train_alike(tmp_path: Path) -> None:
    output = tmp_path / "split.json"
    sizes = ["--depth=2", "--context=32", "--vocabulary=256", "--rounds=2", "--samples=1"]
    split.main([*sizes, f"--output={output}"])
    result = json.loads(output.read_text())
    for name in split.CONTESTANTS:
        assert len(result[name]["step_s"]) == 2
        assert result[name]["losses"] == pytest.approx(result[split.BASE]["losses"], rel=split.LOSS_TOLERANCE)
        assert result[name]["peak_bytes"] > 0


def test_a_start_takes_its_part_and_one_unit() -> None:
    for peak, part, unit in run_ranks(split.start, 2, "tiny", timeout_s=60.0):
        assert part < peak <= part + unit
