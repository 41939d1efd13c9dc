"""What a number is in memory and in a message, in bytes: dtypes, and codecs that gradients are sent in.

Owns sizes alone. `wire/codec.py` encodes and decodes; predictions and transports read the sizes here.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

__all__ = ["CODECS", "Message", "itemsize", "message_of", "wire_bytes"]

Message = tuple[int, str]
"""A flat tensor: elements, and their dtype by torch's name."""

CODECS: Mapping[str, Callable[[int], Message]] = MappingProxyType({})
"""The codecs besides dtypes, by name: each returns the message for a number of elements."""


def message_of(codec: str, numel: int) -> Message:
    """Return the message for `numel` elements.

    Args:
        codec: the name of a dtype, whose messages are the elements themselves, or of an entry in `CODECS`.
    """
    return CODECS[codec](numel) if codec in CODECS else (numel, codec)


def wire_bytes(codec: str, numel: int) -> int:
    """Return the bytes of the message for `numel` elements."""
    count, dtype = message_of(codec, numel)
    return count * itemsize(dtype)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
