"""`torchrun --max-restarts`: a run whose ranks are killed three times ends with the bits of an undisturbed run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard as zs
from tests.contract.blocks import examples, run_block
from zeroshard.checkpoint.diff import diff
from zeroshard.testing import run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.launch import name_launcher
from zeroshard.train.loop import train
from zeroshard.train.metrics import Reporters

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400
"""Four starts of torch on two ranks take half a minute, and much longer on a busy machine."""
TRAIN = [
    "model.depth=1",
    "model.context=32",
    "train.batch=4",
    "train.steps=20",
    "train.eval_every=0",
    "train.eval_bytes=200",
    "run.sample_bytes=4",
    "checkpoint.every_steps=4",
]
IN_SAVES = """
import os, sys
from pathlib import Path

KILLS = {"0": ("1", "step-00000004"), "1": ("0", "step-00000012"), "2": ("1", "step-00000016")}
rank, name = KILLS.get(os.environ.get("TORCHELASTIC_RESTART_COUNT"), (None, None))


def kill(event, values):
    if event == "open" and name in str(values[0]):
        if rank == "1" and name == "step-00000016":
            (file,) = Path("runs/run/step-00000012").glob("params-00002-*")
            os.truncate(file, file.stat().st_size - 1)
        os.kill(os.getpid(), 9)


if rank is not None and rank == os.environ.get("RANK"):
    sys.addaudithook(kill)
"""
"""Kills a rank of each start, by restart, when it opens a file of a checkpoint; the last also damages the one before.

The file `sitecustomize.py` is run by each Python before its program.
"""
IN_STEPS = {0: (1, 2), 1: (0, 8), 2: (1, 17)}
"""By restart, the rank that is killed, and its step: before the first checkpoint, after the first, after the third."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def run_torchrun(folder: Path, *command: str) -> str:
    """Run a command on two ranks that torchrun may restart three times; return what is written."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, *torchrun, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            written, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.terminate()  # it then ends its ranks
    assert process.returncode == 0, written
    assert written.count("failed (exitcode: -9)") == 3, written
    return written


def run_undisturbed(folder: str) -> None:
    """Make the run of the main job at once. Runs on a rank."""
    train(load_config(overrides=[*TRAIN, f"run.folder={folder}", "run.name=run", "run.ranks=2"]), Reporters([]))


@pytest.mark.rotates
def test_the_main_job_resumes(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole" / "run", tmp_path / "runs" / "run"
    run_ranks(run_undisturbed, 2, str(whole.parent), process_group=False)
    (tmp_path / "sitecustomize.py").write_text(IN_SAVES)
    log = run_torchrun(tmp_path, "-m", "zeroshard", "train", *TRAIN, "--name", "run", "--fresh")
    assert re.findall(r"after step (\d+) of 20, from its checkpoint", log) == ["8", "8"]
    assert "step-00000012 is damaged; moved to" in log
    found, expected = zs.latest(run), zs.latest(whole)
    assert found is not None and expected is not None
    assert [one for one in diff(expected, found) if one.name != "extra.json"] == []
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (whole, run))
    for key in ("steps", "sample", "final_train_loss", "final_heldout_loss"):
        assert first[key] == second[key], key
    assert second["resumed_at"] == [8]


def run_loop(program: str, folder: str) -> None:
    """Run the loop of the page in a folder. Runs on a rank."""
    os.chdir(folder)
    run_block(program, "reliability.md")


@pytest.mark.rotates
def test_the_loop_of_the_page_resumes(tmp_path: Path) -> None:
    (program,) = [one for one in examples((ROOT / "docs/reliability.md").read_text()) if "zs.latest" in one]
    (tmp_path / "whole").mkdir()
    run_ranks(run_loop, 2, program, str(tmp_path / "whole"), process_group=False)
    killed, count = re.subn(
        r"( +)loss\.backward\(\)\n",
        r"\g<0>\1if KILLS.get(int(os.environ['TORCHELASTIC_RESTART_COUNT'])) == (mesh.rank, step):\n"
        r"\1    os.kill(os.getpid(), 9)\n",
        program,
    )
    assert count == 1
    killed = killed.replace("for step in", "print(f'first step: {first}.')\nfor step in")
    # Restarted, rank 0 comes late: the other rank then finds what the killed ranks have left in torchrun's store.
    late = "if os.environ['TORCHELASTIC_RESTART_COUNT'] > '0' == os.environ['RANK']:\n    time.sleep(0.5)\n"
    (tmp_path / "loop.py").write_text(f"import os, time\nKILLS = {IN_STEPS}\n{late}{killed}")
    log = run_torchrun(tmp_path, "loop.py")
    assert re.findall(r"first step: (\d+)\.", log) == [step for step in ("0", "0", "5", "15") for _ in range(2)]
    assert diff(tmp_path / "whole/runs/restarts/step-20", tmp_path / "runs/restarts/step-20") == []


def test_only_torchrun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert name_launcher() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert name_launcher().startswith(f"process {os.getppid()} on ")
