"""Optional dependencies: imported on use, with an error that names the extra to install.

Owns that error. It must not know what the libraries do.
"""

import importlib
from typing import Any

__all__ = ["need"]


def need(name: str, extra: str, purpose: str) -> Any:
    """Import an optional dependency.

    Args:
        name: name of the module.
        extra: the extra of zeroshard that installs it.
        purpose: the operation that needs the module; the message starts with it.

    Returns:
        The module.

    Raises:
        ImportError: the module is not installed; the message gives the command that installs it.

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
