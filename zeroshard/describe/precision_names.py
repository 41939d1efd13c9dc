"""The names of precisions, and the refusal of a name that is none.

Owns the names of `precision=`. Imports no torch, because plans of shapes read the same argument; `precision.py` has the
dtypes that a name stands for.
"""

from collections.abc import Collection
from types import MappingProxyType

__all__ = ["NAMES", "precision_name", "refusal_of_precision"]

NAMES = ("fp32", "bf16", "fp16")
DTYPES = MappingProxyType({"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"})
"""Precisions by the names of dtypes."""


def precision_name(asked: object, names: Collection[str] = NAMES) -> str | None:
    """Return the name of a precision that is given by name or as a dtype; None for any other value.

    Args:
        names: the accepted names.

    Raises:
        ValueError: no precision has this name.
    """
    name = DTYPES.get(str(asked).removeprefix("torch."), asked)
    if not isinstance(name, str):
        return None
    if name not in names:
        raise refusal_of_precision(asked)
    return name


def refusal_of_precision(asked: object) -> ValueError:
    """Return the error for a value that is no precision."""
    return ValueError(f"precision must be one of {', '.join(NAMES)} or a zs.Precision; got {asked!r}.")
