"""A failing program made smaller, as long as it fails in the same way."""

from .ranks import Task, Verdict

__all__ = ["shrink"]


def shrink(task: Task, verdict: Verdict) -> tuple[Task, Verdict]:
    """Return the smallest task found that fails as `task` did."""
    return task, verdict
