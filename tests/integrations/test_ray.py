"""Ray Train on a local cluster: a worker is killed, and the run ends with the bits of an undisturbed run."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.contract.blocks import examples
from tests.contract.source import REPOSITORY
from zeroshard.checkpoint.diff import diff
from zeroshard.testing import run_ranks

pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'zeroshard[ray]'")

TIMEOUT_S = 600
"""A cluster and two groups of workers start within 40 s, and much later on a busy machine."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # no token is written to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
CLUSTER = """
import sys
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1])
"""


def program() -> tuple[str, str]:
    """Return the function of the page with what is before it, and the start of the trainer."""
    (text,) = examples((REPOSITORY / "docs/ray.md").read_text())
    before, after = text.split("\ntrainer = ")
    return before, f"\ntrainer = {after}"


def run_undisturbed(text: str, checkpoints: str) -> None:
    """Run the function of the page without Ray. Runs on a rank."""
    import ray.train

    names: dict[str, object] = {"__name__": "page"}
    exec(compile(text, "<docs/ray.md>", "exec"), names)
    ray.train.report = lambda metrics: None
    names["train"]({"checkpoints": checkpoints})  # type: ignore[operator]


@pytest.mark.rotates
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_killed_worker_is_started_again_and_the_run_resumes(tmp_path: Path) -> None:
    text, trainer = program()
    run_ranks(run_undisturbed, 2, text, str(tmp_path / "whole"))
    killed, count = re.subn(
        r"( +)loss\.backward\(\)\n",
        r"\g<0>\1if (mesh.rank, step, first) == (1, 12, 0):\n\1    os.kill(os.getpid(), 9)\n",
        text.replace("    for step in", "    print(f'first step: {first}.')\n    for step in"),
    )
    assert count == 1
    (tmp_path / "train.py").write_text(f"{killed}{CLUSTER}{trainer}")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}
    # Names of sockets are short: those in `tmp_path` would be too long.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as sockets:
        ended = subprocess.run(
            [sys.executable, "train.py", sockets],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout
    assert set(re.findall(r"first step: (\d+)\.", ended.stdout)) == {"0", "10"}, ended.stdout
    assert "Rank 1 Error" in ended.stdout
    assert diff(tmp_path / "whole/step-20", tmp_path / "runs/checkpoints/step-20") == []
