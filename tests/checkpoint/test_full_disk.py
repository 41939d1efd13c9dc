"""A disk that is full, or fills up during a save: all ranks are told how much is free, and what was there loads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .full_disk import DISK_BYTES, PAGE_BYTES

ROOT = Path(__file__).parents[2]
NAMESPACES = ["unshare", "--map-root-user", "--mount"]


def has_namespaces() -> bool:
    """Tell whether this machine lets a process mount a disk that only its children see."""
    try:
        return subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.product
@pytest.mark.skipif(not has_namespaces(), reason="needs unshare, and the kernel's leave to mount in a namespace")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_on_all_ranks(tmp_path: Path, asynchronous: bool) -> None:
    command = [*NAMESPACES, sys.executable, "-m", "tests.checkpoint.full_disk", str(tmp_path), str(asynchronous)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    texts, others = json.loads(run.stdout)
    assert texts == others
    first, before, during, last = texts
    assert (first, last) == ("", "")
    found = re.search(rf"{tmp_path} has (\d+) free bytes, and the checkpoint needs (\d+)\.", before)
    assert found, before
    assert int(found[1]) <= PAGE_BYTES < int(found[2]) < DISK_BYTES
    text = r"No space left on device: (\d+) bytes are free, and the checkpoint needs (\d+): '(.*)'"
    meanwhile = re.search(text, during)
    assert meanwhile, during
    assert int(meanwhile[1]) <= PAGE_BYTES and meanwhile[2] == found[2]
    assert meanwhile[3].startswith(f"{tmp_path}/.tmp-step-2-")
