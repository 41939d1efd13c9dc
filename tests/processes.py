"""What the operating system says of a process, read from /proc."""

from __future__ import annotations

from pathlib import Path


def state_of(process: int | str) -> str | None:
    """Return the letter of a process's state ("R", "S", "T", "Z", ...), or None if there is no such process.

    A process that ends between the opening of its file and the reading raises ProcessLookupError.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(process: int | str) -> bool:
    """Tell whether a process exists and is no zombie."""
    return state_of(process) not in (None, "Z")


def is_stopped(process: int | str) -> bool:
    """Tell whether a process is stopped by a signal."""
    return state_of(process) == "T"
