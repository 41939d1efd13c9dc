"""Launches of ranks: one process each on this host, a job in, a result out.

Owns processes and their environment. It must not know what a job measures. Read `launch` first.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Job

__all__ = ["launch"]

_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
_SHOWN: Final = 3000
_POLL_S: Final = 0.2


def launch(job: Job, world_size: int, environment: Mapping[str, str]) -> list[Any]:
    """Run a job on `world_size` processes and return what each rank measured, by rank.

    Args:
        environment: added to that of every rank, from its start on: the allocator's settings.

    Raises:
        RuntimeError: a rank failed; the others are ended, and the text has what the first to fail wrote last.
    """
    with tempfile.TemporaryDirectory(prefix="zeroshard-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        ranks = [_start(folder, rank, world_size, environment) for rank in range(world_size)]
        try:
            _wait(folder, ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def _start(folder: Path, rank: int, world_size: int, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    # DeepSpeed asks for an address, though the process group is there when it does.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measure", str(folder)],
            env={**os.environ, **_ENVIRONMENT, **address, **{k: str(v) for k, v in place.items()}, **environment},
            cwd=Path(__file__).parents[1],
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(folder: Path, ranks: "list[subprocess.Popen[bytes]]") -> None:
    """Return when all ranks ended well; raise when one did not."""
    while any(rank.poll() is None for rank in ranks):
        _check(folder, ranks)
        time.sleep(_POLL_S)
    _check(folder, ranks)


def _check(folder: Path, ranks: "list[subprocess.Popen[bytes]]") -> None:
    for number, rank in enumerate(ranks):
        if rank.poll():
            log = (folder / f"rank-{number}.log").read_text(errors="replace")[-_SHOWN:]
            raise RuntimeError(f"[rank {number}/{len(ranks)}] ended with status {rank.returncode}:\n{log}")
