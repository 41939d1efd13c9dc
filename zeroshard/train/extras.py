"""Libraries that are extras: imported where they are used, and named where they are missing.

Owns that one message. Must not know what the libraries do.
"""

import importlib
from typing import Any

__all__ = ["need"]


def need(name: str, extra: str, purpose: str) -> Any:
    """Import a library that only some runs need.

    Args:
        name: of the module.
        extra: of zeroshard, that installs it.
        purpose: what cannot be done without it; the message begins with it.

    Returns:
        The module.

    Raises:
        ImportError: it is not installed; the message says what is to be installed.

    >>> from zeroshard.train.extras import need
    >>> need("json", "data", "reading").loads("[1]")
    [1]
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{purpose} needs {error.name!r}; install it with: pip install "zeroshard[{extra}]"'
        ) from None
