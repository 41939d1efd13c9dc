"""Modules with a planted fault: copies in whose code one place is changed."""

import inspect
import types
from typing import Any

__all__ = ["changed"]


def changed(module: types.ModuleType, right: str, wrong: str) -> dict[str, Any]:
    """Return the names of a copy of a module, in whose code one place is changed."""
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{right!r} is {source.count(right)} times in {module.__name__}"
    names = {"__name__": module.__name__}
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), names)
    return names
