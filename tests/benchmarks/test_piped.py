"""The comparison of pipelines with torch's, tiny: the script itself, and how it chooses a cell."""

import json
from pathlib import Path

import pytest

from benchmarks import piped


@pytest.mark.rotates
@pytest.mark.timeout(400)
def test_contestants_train_alike(tmp_path: Path) -> None:
    output = tmp_path / "piped.json"
    names = ["zeroshard 1", "zeroshard 3, messages"]
    sizes = ["--case=tiny", "--rounds=2", "--warmup=1", "--micro-batches=2"]
    piped.main([*sizes, f"--output={output}", "--only", *names])
    result = json.loads(output.read_text())["contestants"]
    assert [*result] == [piped.BASE, *names]
    for one in result.values():
        assert len(one["step_s"]) == 2
        assert one["losses"] == pytest.approx(result[piped.BASE]["losses"], rel=piped.LOSS_TOLERANCE)
        assert min(one["peak_bytes"]) > 0
    # Without shared memory the ranks still have a page each, for the watchdog.
    assert min(result["zeroshard 1"]["shared_bytes"]) > 10 * max(result["zeroshard 3, messages"]["shared_bytes"])


def test_the_best_cell_is_the_fastest_that_fits_on_each_rank() -> None:
    result = {
        piped.BASE: {"step": (1.0, 1.0, 1.0), "peak": [1.0, 1.0]},
        "fast": {"step": (0.8, 0.7, 0.9), "peak": [0.9, 1.01]},
        "fits": {"step": (0.9, 0.8, 1.0), "peak": [1.0, 0.9]},
        "slow": {"step": (1.2, 1.1, 1.3), "peak": [0.5, 0.5]},
    }
    assert piped.best_of(result) == "fits"
    assert piped.best_of({piped.BASE: result[piped.BASE], "fast": result["fast"]}) is None
