"""JSON without surprises: no duplicate keys, no NaN, no infinity, bounded size and count.

Owns text to values and back. It must not know what the values mean. A limit is checked before the work that it limits,
so that a hostile file costs neither time nor memory.
"""

import json
from typing import Any, Final, NoReturn

from zeroshard.core.errors import CheckpointError

__all__ = ["MAX_BYTES", "MAX_PARSED_BYTES", "dumps", "loads"]

MAX_BYTES: Final = 16 << 20
"""Largest JSON text."""

MAX_PARSED_BYTES: Final = 28 << 20
"""Most memory that the values of a text may take, by an estimate: the manifest of some 40,000 tensors, or of 2 TiB."""

_BYTES_OF: Final = ((b",", 40), (b'"', 30), (b"[", 80), (b"{", 240))
"""What CPython spends on what a mark stands for: a value, half a text, a list, an object."""


def dumps(value: Any, where: str) -> bytes:
    """Return canonical JSON: sorted keys, no blanks, so that equal values are equal bytes.

    Raises:
        CheckpointError: the text would be beyond what `loads` reads.
    """
    data = json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()
    _check_limits(data, where)
    return data


def loads(data: bytes, where: str) -> Any:
    """Return the value of a JSON text.

    Args:
        where: the file's name, for messages.

    Raises:
        CheckpointError: the text is not strict JSON, or beyond a limit.
    """
    _check_limits(data, where)
    try:
        return json.loads(
            data,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not strict JSON ({error}).") from error


def _check_limits(data: bytes, where: str) -> None:
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{where}: {len(data)} bytes of JSON; at most {MAX_BYTES} are read.")
    parsed_bytes = len(data) + sum(nbytes * data.count(mark) for mark, nbytes in _BYTES_OF)
    if parsed_bytes > MAX_PARSED_BYTES:
        raise CheckpointError(
            f"{where}: its values would take some {parsed_bytes} bytes of memory; at most {MAX_PARSED_BYTES} are spent."
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:80]!r} is there twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is out of range")
    return value
