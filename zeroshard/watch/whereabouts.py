"""Where a process is in the user's program: for reports of what each rank does.

Owns the inspection of the main thread's stack. It must not know what functions mean.
"""

import os
import threading
from pathlib import Path
from typing import Final

import torch

from zeroshard.watch.stacks import stack_of

__all__ = ["LIBRARIES", "line_of_program"]

LIBRARIES: Final = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parents[1]),
    str(Path(os.__file__).parent),
    "<frozen ",
    "<string>",
)
"""Beginnings of file names whose frames are not the user's."""
_CALLED: Final = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent / "distributed" / "distributed_c10d"))
"""Beginnings of file names whose functions are named."""
_WRAPPERS: Final = frozenset(("call", "wrapper"))


def line_of_program() -> str:
    """Return the line of the user's program that the main thread runs, with the function that it called; "" if unknown.

    The function is one of this package or of torch.distributed, which may wait for other ranks.

    >>> from zeroshard.watch.whereabouts import line_of_program
    >>> isinstance(line_of_program(), str)
    True
    """
    called = ""
    for frame in stack_of(threading.main_thread().ident or 0):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(LIBRARIES):
            return f"{called and f'in {called}() '}at {Path(file).name}:{frame.f_lineno}"
        if file.startswith(_CALLED) and not name.startswith("_") and name not in _WRAPPERS:
            called = name
    return ""
