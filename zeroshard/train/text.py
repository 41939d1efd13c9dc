"""Documents: the source of the text, its division into documents, and ranges of it.

Owns reading, and the errors about unreadable files. It must not know tokens, batches or ranks. Read `open_source`
first, then `Source.documents`.

Note: what a document is
    A document is a text file, a line of a `.jsonl` file, or a row of a `.parquet` file, of which one column is read.
    Empty documents are skipped. The text is the concatenation of all documents, in the order of files, lines and rows;
    sizes and the split count its bytes in UTF-8.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from zeroshard.train.extras import need
from zeroshard.train.inputs import open_input

__all__ = ["DEFAULT_NAME", "Source", "open_source", "take"]

DEFAULT_NAME: Final = "pydoc_data.topics"
_SETTING: Final = "data.path"
_MAX_LINE_BYTES: Final = 1 << 28
_LOOKED_BYTES: Final = 1 << 13
_LINES: Final = ".jsonl"
_ROWS: Final = ".parquet"


@final
@dataclass(frozen=True)
class Source:
    """A text that can be read more than once.

    Args:
        name: the path of the text.
        files: in order; () for the documentation topics in CPython's `pydoc_data`, which need no download.
        column: the column of the text in files with columns.
        left_out: files of a folder that are no text, such as pictures.
    """

    name: str
    files: tuple[Path, ...]
    column: str
    left_out: tuple[Path, ...] = ()

    def describe_left_out(self) -> str:
        """Return how many files of a folder are not read, and which is the first; empty for none."""
        if not self.left_out:
            return ""
        count = len(self.left_out)
        return (
            f"{count} {'file is' if count == 1 else 'files are'} no text and left out, {self.left_out[0].name!r} first"
        )

    def documents(self) -> Iterator[bytes]:
        """Yield the documents, in order, each as UTF-8.

        Raises:
            ValueError: the contents of a file do not match its suffix.
            ImportError: a file is parquet, and pyarrow is missing.
        """
        if not self.files:
            yield _documentation_topics()
        for file in self.files:
            read = {_LINES: _read_lines, _ROWS: _read_rows}.get(file.suffix, _read_text)
            yield from (document for document in read(file, self.column) if document)

    def sha256(self) -> str:
        """Return the hash of the concatenated bytes of all files."""
        digest = hashlib.sha256(b"" if self.files else _documentation_topics())
        for path in self.files:
            with open_input(path, _SETTING) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def layout(self) -> list[tuple[str, int]]:
        """Return each file's suffix and size in bytes, which with the bytes determine the documents."""
        return [(file.suffix, file.stat().st_size) for file in self.files]


def open_source(path: str = "", column: str = "text") -> Source:
    """Find the files of a text.

    Args:
        path: a file, or a folder whose files are read in the order of their relative paths, without hidden files, and
            without files that begin as no text does, such as pictures; empty for CPython's documentation topics.
        column: the column of the text in `.jsonl` and `.parquet` files.

    Raises:
        ValueError: the path does not exist, the folder is empty, or an entry is not a regular file, such as a pipe or a
            link to a folder.

    >>> from zeroshard.train.text import open_source
    >>> next(open_source().documents())[:11]
    b'The "assert'
    """
    if not path:
        return Source(DEFAULT_NAME, (), column)
    root = Path(path)
    if not root.exists():
        raise ValueError(f"data.path: there is no file or folder {path!r}; give a text file or a folder of text files")
    if not root.is_dir():
        open_input(root, _SETTING).close()
        return Source(path, (root,), column)
    entries = sorted(entry for entry in root.rglob("*") if not _is_hidden(entry.relative_to(root)))
    files = tuple(entry for entry in entries if entry.is_symlink() or not entry.is_dir())
    for file in files:
        if file.is_dir():
            raise ValueError(f"data.path: {str(file)!r} is a link to a folder; remove it, or put the folder there")
        open_input(file, _SETTING).close()  # an unreadable file would be skipped silently
    left_out = tuple(file for file in files if file.suffix not in (_LINES, _ROWS) and _is_binary(file))
    files = tuple(file for file in files if file not in frozenset(left_out))
    if not files:
        raise ValueError(f"data.path: the folder {path!r} holds no text files; put text files into it")
    return Source(path, files, column, left_out)


def take(documents: Iterable[bytes], start: int, end: int) -> Iterator[str]:
    """Yield the text between two offsets; a document is cut at an offset, before a character.

    Args:
        documents: the whole text.
        start: offset in bytes.
        end: offset in bytes.

    >>> from zeroshard.train.text import take
    >>> list(take([b"abc", b"def", b"ghi"], 2, 5))
    ['c', 'de']
    """
    offset = 0
    for document in documents:
        if offset >= end:
            return
        first, last = _boundary(document, start - offset), _boundary(document, end - offset)
        offset += len(document)
        if first < last:
            yield document[first:last].decode()


def _boundary(content: bytes, offset: int) -> int:
    """Clamp an offset to the content, and move it back to the start of a character."""
    offset = max(0, min(offset, len(content)))
    while offset < len(content) and content[offset] & 0xC0 == 0x80:
        offset -= 1
    return offset


def _documentation_topics() -> bytes:
    """Return CPython's documentation topics, concatenated in the order of their keys."""
    from pydoc_data.topics import topics

    return "".join(topics[key] for key in sorted(topics)).encode()


def _read_text(file: Path, column: str) -> Iterator[bytes]:
    """Yield the one document of a UTF-8 text file."""
    nbytes, memory_bytes = file.stat().st_size, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory_bytes:
        raise ValueError(
            f"data.path: {str(file)!r} has {nbytes} bytes and is read as one document, which does not fit into the "
            f"{memory_bytes} bytes of memory of this host; write its documents as lines of a .jsonl file"
        )
    with open_input(file, _SETTING) as opened:
        content = opened.read()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.path: {str(file)!r} is not text in UTF-8 (byte 0x{content[error.start]:02x} at offset "
            f"{error.start}); convert it to UTF-8, or remove it from the folder"
        ) from None
    yield content


def _read_lines(file: Path, column: str) -> Iterator[bytes]:
    """Yield the documents of a file with one JSON object per line; blank lines are skipped."""
    with open_input(file, _SETTING) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(
                    f"data.path: {str(file)!r}, line {number}: has more than {_MAX_LINE_BYTES} bytes; write one JSON "
                    "object per line"
                )
            if line.strip():
                yield _read_object(line, column, f"{str(file)!r}, line {number}")


def _read_object(line: bytes, column: str, place: str) -> bytes:
    """Return the text of one line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data.path: {place}: not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict) or column not in value:
        found = f"the keys {sorted(value)!s:.200}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise ValueError(f"data.path: {place}: no key {column!r}, but {found}; set data.column to the key of the text")
    return _encode(value[column], column, place)


def _read_rows(file: Path, column: str) -> Iterator[bytes]:
    """Yield the documents of a parquet file from one column, one batch of rows at a time."""
    parquet = need("pyarrow.parquet", "data", f"data.path: reading {str(file)!r}")
    arrow = need("pyarrow", "data", f"data.path: reading {str(file)!r}")
    try:
        table = parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            raise ValueError(
                f"data.path: {str(file)!r} has no column {column!r}, but {table.schema_arrow.names!s:.200}; set "
                "data.column to the column of the text"
            )
        batches = (batch.column(0).to_pylist() for batch in table.iter_batches(columns=[column]))
        for number, value in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield _encode(value, column, f"{str(file)!r}, row {number}")
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.path: {str(file)!r} cannot be read as parquet: {error}") from None


def _encode(value: object, column: str, place: str) -> bytes:
    """Return a value as UTF-8."""
    if not isinstance(value, str):
        found = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else f"{value!r:.60}"
        raise ValueError(f"data.path: {place}: {column!r} must be text, got {found}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"data.path: {place}: {column!r} has an unpaired surrogate at character {error.start} and is not valid text"
        ) from None


def _is_binary(file: Path) -> bool:
    """Return whether a file begins with a zero byte among its first ones, which no text in UTF-8 has."""
    with open_input(file, _SETTING) as opened:
        return b"\0" in opened.read(_LOOKED_BYTES)


def _is_hidden(relative: Path) -> bool:
    """Return whether the name of a file, or of one of its folders, starts with a dot."""
    return any(part.startswith(".") for part in relative.parts)
