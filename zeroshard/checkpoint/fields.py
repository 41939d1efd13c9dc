"""Values of a parsed file, with checked access by type.

Owns the checks of types and ranges, and their messages. It must not know what the values mean.
"""

import reprlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, Final

from zeroshard.table.errors import CheckpointError

__all__ = ["MAX_INTEGER", "Value", "quoted", "shown"]

MAX_INTEGER: Final = 2**63 - 1


def shown(value: Any) -> str:
    """Return the beginning of a value for a message, in little time and memory however large and deep it is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxstring, short.maxlong = 2, 6, 3, 60, 40
    # Of a larger object `reprlib` would sort all keys.
    is_large = isinstance(value, dict) and len(value) > short.maxdict
    return f"an object of {len(value)} keys" if is_large else short.repr(value)


def quoted(name: str) -> str:
    """Return a name for a message: at most 80 characters, and none that a terminal obeys."""
    return f"'{name[:80]}'" if name[:80].isprintable() else ascii(name[:80])


@dataclass(slots=True)
class Value:
    """A value from a file, and where it came from: each method returns it as one type or raises."""

    value: Any
    where: str

    def fail(self, expected: str) -> CheckpointError:
        """Return the error with the expected type and the beginning of the value."""
        return CheckpointError(f"{self.where}: expected {expected}, got {shown(self.value)}.")

    def integer(self, most: int = MAX_INTEGER) -> int:
        """Return an integer from 0 to `most`."""
        if type(self.value) is not int or not 0 <= self.value <= most:
            raise self.fail(f"an integer from 0 to {most}")
        return self.value

    def boolean(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str):
            raise self.fail("a text")
        return self.value

    def items(self) -> "Iterator[Value]":
        """Yield the items of a list."""
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return (Value(item, self.where) for item in self.value)

    def integers(self, most: int = MAX_INTEGER) -> list[int]:
        """Return a list of integers from 0 to `most`."""
        # Without a `Value` for each: there may be hundreds of thousands.
        if not isinstance(self.value, list) or not all(type(n) is int and 0 <= n <= most for n in self.value):
            raise self.fail(f"a list of integers from 0 to {most}")
        return self.value

    def strings(self) -> list[str]:
        """Return a list of texts."""
        if not isinstance(self.value, list) or not all(type(item) is str for item in self.value):
            raise self.fail("a list of texts")
        return self.value

    def texts(self) -> dict[str, str]:
        """Return an object of texts."""
        if not isinstance(self.value, dict) or not all(isinstance(item, str) for item in self.value.values()):
            raise self.fail("an object of texts")
        return self.value

    def keys(self) -> Set[str]:
        """Return the keys of an object."""
        return self._mapping().keys()

    def entries(self) -> "Iterator[tuple[str, Value]]":
        """Yield the keys and values of an object."""
        return ((key, self.get(key)) for key in self._mapping())

    def get(self, key: str) -> "Value":
        """Return the value of a key, which must be there."""
        if key not in (mapping := self._mapping()):
            raise self.fail(f"an object with '{key}'")
        return Value(mapping[key], f"{self.where}, '{key[:80]}'")

    def has_keys(self, *keys: str) -> None:
        """Raise unless an object has these keys and no other."""
        if self.keys() != set(keys):
            raise self.fail(f"an object with {', '.join(keys)} and nothing else")

    def _mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.fail("an object")
        return self.value
