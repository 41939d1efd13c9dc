"""JSON without surprises: no duplicate keys, no NaN, no infinity, bounded size, depth and memory.

Owns text to values and back, and the checksum that may stand behind a text. It must not know what the values mean. A
limit is checked before the work that it limits, so that a hostile file costs neither time nor memory.
"""

import json
import re
import zlib
from typing import Any, Final, NoReturn

from zeroshard.table.errors import CheckpointError

__all__ = ["MAX_BYTES", "MAX_PARSED_BYTES", "cost_of", "dumps", "loads", "seal", "unseal"]

MAX_BYTES: Final = 16 << 20
"""Largest JSON text."""

MAX_PARSED_BYTES: Final = 28 << 20
"""Most memory that the values of a text may take, by an estimate."""

_BYTES_OF: Final = ((b",", 40), (b'"', 30), (b"[", 80), (b"{", 240))
"""What CPython spends on what a mark stands for: a value, half a text, a list, an object."""

_WIDE = re.compile(rb"[\xf0-\xff]|\\u[dD][89abAB]")
_LAST_LINE = re.compile(rb"\n\{\"crc32\":(\d{1,10})\}\n")


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
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not strict JSON ({str(error)[:200]}).") from error


def cost_of(data: bytes) -> int:
    """Return about how much memory the values of a text take, in bytes.

    CPython gives each character of a text the bytes of its widest one, so a single emoji makes a long text four times
    as large; and the whole file is one text while it is read.
    """
    is_narrow = data.isascii() and b"\\u" not in data
    wide = 1 if is_narrow else 4 if _WIDE.search(data) else 2
    return wide * len(data) + sum(nbytes * data.count(mark) for mark, nbytes in _BYTES_OF)


def _check_limits(data: bytes, where: str) -> None:
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{where}: {len(data)} bytes of JSON; at most {MAX_BYTES} are read.")
    if (nbytes := cost_of(data)) > MAX_PARSED_BYTES:
        raise CheckpointError(
            f"{where}: its values would need about {nbytes} bytes of memory; the limit is {MAX_PARSED_BYTES} bytes."
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        # Without a second table, which would take as much memory as this one.
        key = next(key for key, _ in pairs if value.pop(key, pairs) is pairs)
        raise ValueError(f"duplicate key {key[:80]!a}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is out of range")
    return value


# -- checksums --------------------------------------------------------------------------------------------------------


def seal(text: bytes) -> bytes:
    """Return a text with its checksum as the last line."""
    return text + b'\n{"crc32":%d}\n' % zlib.crc32(text)


def unseal(data: bytes, where: str) -> bytes:
    """Return the text that was sealed.

    Raises:
        CheckpointError: it is damaged.
    """
    end = data.rfind(b"\n", 0, -1)
    match = _LAST_LINE.fullmatch(data, max(end, 0))
    if match is None:
        raise CheckpointError(f"{where}: its last line is not a checksum, so the file is truncated or damaged.")
    text, expected = data[:end], int(match[1])
    if data != seal(text):
        raise CheckpointError(f"{where}: is damaged: its checksum is {zlib.crc32(text)}, expected {expected}.")
    return text
