"""What a result depends on besides the code: machine, versions, commit and command, as every result file has them.

Owns the fields of result files that all benchmarks share, and how such a file is written. It names no host and no path.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["available_bytes", "circumstances", "hash_of", "put_table", "room_of", "write_result"]

PACKAGE = Path(__file__).parents[1] / "zeroshard"


def circumstances(module: str, packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """Return machine, versions, commit, hashes of the code, the command (of `python -m module`) and the date."""
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
        "code": _code(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file: indented, each list of numbers on one line."""
    text = json.dumps(result, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n")


def put_table(text: str, name: str, table: str) -> str:
    """Return a page with a table between its marks, whose blank lines stay."""
    place = re.compile(rf"(<!-- table: {name} -->\n+).*?(\n+<!-- end -->)", re.DOTALL)
    if not place.search(text):
        raise SystemExit(
            f"The page has no lines '<!-- table: {name} -->' and '<!-- end -->', between which the table goes."
        )
    return place.sub(lambda match: f"{match[1]}{table}{match[2]}", text)


def room_of(path: Path) -> str:
    """Return the room of a file of the package, by its path in there; "" for a file that lies in none."""
    return path.parts[0] if len(path.parts) > 1 else ""


def hash_of(texts: Mapping[str, bytes]) -> str:
    """Return a hash of files, by path: equal for equal names and bytes, in any order and wherever the package lies."""
    found = hashlib.sha256()
    for path, text in sorted(texts.items()):
        found.update(f"{Path(path).name} {len(text)} ".encode() + text)
    return found.hexdigest()[:12]


def _code() -> dict[str, str]:
    """Return a hash of each room of the package, so that a result can tell whether what it measured has changed."""
    rooms: dict[str, dict[str, bytes]] = {}
    for path in PACKAGE.rglob("*.py"):
        if room := room_of(path.relative_to(PACKAGE)):
            rooms.setdefault(room, {})[str(path)] = path.read_bytes()
    return {room: hash_of(texts) for room, texts in sorted(rooms.items())}


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
