"""Options of `zs.shard` as one flat mapping, which tests and drawn programs pass on.

Owns the step from there to arguments. It must not know what the options do.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import zeroshard as zs

__all__ = ["settled"]

FIELDS = frozenset(field.name for field in dataclasses.fields(zs.Settings))


def settled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `zs.shard`: what is a field of `zs.Settings` goes into one."""
    settings = zs.Settings(**{name: value for name, value in options.items() if name in FIELDS})
    return {**{name: value for name, value in options.items() if name not in FIELDS}, "settings": settings}
