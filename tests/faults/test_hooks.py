"""What a process has once, whatever the number of models: hooks come with the first handle and go with the last."""

import atexit
import gc
import os
import sys
from typing import Any

import pytest

from zeroshard.testing import run_ranks
from zeroshard.watch.last_words import ErrorHook

from .job import loss_of, make

HANDLES = 3


def hooks() -> tuple[Any, int]:
    """Return the hook of errors, and the number of functions that run at exit."""
    return sys.excepthook, atexit._ncallbacks()


def make_and_delete(shared_memory: bool, first: bool) -> list[str]:
    """Make several handles, delete them in one of two orders, and return what was wrong."""
    wrong, before = list[str](), hooks()
    runs = [make(3, shared_memory=shared_memory)]
    installed = hooks()
    if installed[0] is before[0]:
        wrong.append("no hook was installed with the first handle")
    runs += [make(stage, shared_memory=shared_memory) for stage in range(1, HANDLES)]
    if hooks() != installed:
        wrong.append(f"a later handle installed more: {hooks()}, not {installed}")
    while runs:
        loss_of(runs[-1][0], 0, 0).backward()
        runs[-1][1].step()
        del runs[0 if first else -1]
        gc.collect()
        if runs and hooks() != installed:
            wrong.append(f"{len(runs)} handles are left: {hooks()}, not {installed}")
    # weakref.finalize registers one function for the whole process, and keeps it.
    if hooks()[0] is not before[0] or hooks()[1] > before[1] + 1:
        wrong.append(f"no handle is left: {hooks()}, not {before}")
    again = hooks()
    runs = [make(2, shared_memory=shared_memory)]
    runs.clear()
    gc.collect()
    if hooks() != again:
        wrong.append(f"another handle left something behind: {hooks()}, not {again}")
    return wrong


def test_hooks_are_installed_once_and_undone_with_the_last_handle() -> None:
    for shared_memory, first in ((True, True), (False, False)):
        assert run_ranks(make_and_delete, 2, shared_memory, first, timeout_s=60.0) == [[], []]


class Heard:
    """The ranks of a model, told of errors."""

    def __init__(self, process: int) -> None:
        self.rank, self.process, self.told = 0, process, list[str]()

    def detail(self, error: BaseException) -> str:
        return "a detail"

    def blame(self, rank: int, why: str) -> None:
        self.told.append(why)

    def stay(self) -> None:
        self.told.append("stayed")


def test_an_error_is_told_by_the_process_of_a_model_and_by_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    own, parents = Heard(os.getpid()), Heard(os.getppid())
    hook = ErrorHook.of(own)
    assert ErrorHook.of(parents) is hook
    error = ValueError("of a kind")
    hook(ValueError, error, None)
    assert own.told == ["ValueError: of a kind\na detail", "stayed"]
    assert parents.told == []
