"""What a result depends on besides the code: machine, versions, commit and command, as every result file has them.

Owns the fields of result files that all benchmarks share, and how such a file is written. It names no host and no path.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["available_bytes", "circumstances", "write_result"]


def circumstances(module: str, packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """Return the machine, the versions, the commit, the command (of `python -m module`) and the date."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "machine": {
            "cpu": cpu or platform.machine(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "kernel": platform.release().split("-")[0],
            "libc": " ".join(platform.libc_ver()),
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "commit": _commit(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file: indented, each list of numbers on one line."""
    text = json.dumps(result, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n")


def available_bytes() -> int:
    """Return the memory that new processes can have without swapping, as the kernel estimates it."""
    line = next(line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of the code, and whether the package was changed since; "unknown" outside a repository."""
    try:
        return _git("rev-parse", "HEAD") + (" with changes" if _git("status", "--porcelain", "zeroshard") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[1]
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
