"""Errors as texts, which ranks and other processes can hand over. It knows nothing of the package."""

from collections.abc import Callable
from typing import Any

__all__ = ["raised"]


def raised(action: Callable[[], Any]) -> str:
    """Run something that must raise; return the error's class and text."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
