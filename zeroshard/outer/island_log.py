"""What an island sent and took in, on disk, and the island's bits from it.

Owns the log's format and its replay, in numpy. It must not know sockets or torch. `island_source.Logged` hands the same
log to a training that repeats the run.

Note: the log of a rank
    `log.jsonl` has an object on each line: "start" (with the anchors that the island started from), "sent", "took",
    "mailbox" (whether it could be reached) and "end". The values of changes and anchors are parts (`mailbox_files.py`)
    in `parts/<start>/`, and the lines have their CRC-32. A line that a kill has cut is ignored.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_post import Start
from zeroshard.outer.mailbox_files import crc_of, make_folder, read_array, write_array
from zeroshard.outer.mailbox_order import Change, add_changes
from zeroshard.outer.mailbox_wire import MailboxError

__all__ = ["Entry", "Log", "Replayed", "read_log", "read_part", "replay"]

_LOG = logging.getLogger(__name__)
_MOST_LINE_BYTES: Final = 1 << 20


@final
class Log:
    """Writes the log of one rank.

    Args:
        folder: created if missing; the log of an earlier launch of the island is continued.
    """

    def __init__(self, folder: str | Path, options: IslandOptions, numel: int, dtype: str) -> None:
        self._folder, self._numel, self._dtype = Path(folder), numel, dtype
        self._about = {"island": options.island, "islands": options.islands, "numel": numel, "dtype": dtype}
        self._begun_s = time.monotonic()
        make_folder(self._folder)
        path = self._folder / "log.jsonl"
        if path.exists():
            _drop_cut_line(path)
        self._number = sum(entry.what == "start" for entry in read_log(self._folder))
        self._file: FileIO | None = FileIO(path, "a")  # without a buffer, which would keep what a full disk refuses

    def start(self, start: Start, anchors: np.ndarray, step: int) -> None:
        """Note that the island has joined after a step, with the anchors that it starts from."""
        self._number += 1
        crc32 = write_array(self._part("anchors"), anchors)
        about = self._about | {"founds": start.founds, "step": step, "since": start.since}
        self.note("start", **about, versions=dict(start.versions), crc32=crc32)

    def sent(self, step: int, version: int, change: np.ndarray) -> None:
        """Note a change of this island."""
        name = str(self._about["island"])
        self.note("sent", step=step, version=version, crc32=write_array(self._part(f"{version}-{name}"), change))

    def took(
        self,
        step: int,
        exchange: int,
        changes: Sequence[tuple[Change, np.ndarray]],
        anchors: np.ndarray,
        values: np.ndarray,
        settled: Any,
    ) -> None:
        """Note the changes that were taken in, in order, and the anchors and values after them.

        Args:
            exchange: the newest version of this island.
            settled: what was agreed (`island_exchange.Found`): how long the exchange waited, by how many exchanges this
                island was ahead of the slowest active one, and whether the exchange went on.
        """
        listed = []
        for (version, name), change in changes:
            path = self._part(f"{version}-{name}")
            crc32 = crc_of(change) if name == self._about["island"] and path.exists() else write_array(path, change)
            listed.append([version, name, crc32])
        self.note(
            "took",
            step=step,
            exchange=exchange,
            changes=listed,
            anchors=crc_of(anchors),
            values=crc_of(values),
            wait_s=round(settled.wait_s, 4),
            lead=settled.lead,
            is_settled=settled.is_settled,
        )

    def note(self, what: str, **about: Any) -> None:
        """Write a line.

        Raises:
            OSError: the disk refuses; a part of the line may be there.
        """
        if self._file is not None:
            seconds = round(time.monotonic() - self._begun_s, 3)
            left = memoryview((json.dumps({"what": what, "seconds": seconds} | about) + "\n").encode())
            while left:
                left = left[self._file.write(left) :]

    @property
    def place(self) -> tuple[int, int]:
        """Where the log ends: its bytes, and its starts."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size, self._number

    def go_back(self, place: tuple[int, int]) -> None:
        """Remove what was written since the log ended at a place."""
        size, self._number = place
        if self._file is not None:
            self._file.truncate(size)

    def end(self) -> None:
        """Close the log, also where the disk has no room for its last line."""
        if self._file is not None:
            place = self.place
            try:
                self.note("end")
            except OSError as error:
                _LOG.warning("%s: the log has no end: %s", self._folder, error)
                self.go_back(place)
            self._file.close()
            self._file = None

    def _part(self, name: str) -> Path:
        return part_of(self._folder, self._number, name)


def _drop_cut_line(path: Path) -> None:
    """Remove the end of a log after its last whole line: what is appended begins a line."""
    with path.open("rb+") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(whole)


def part_of(folder: Path, number: int, name: str) -> Path:
    """Return the place of a change or of anchors in a log, of a start counted from 1."""
    return folder / "parts" / str(number) / name


@final
@dataclass(frozen=True)
class Entry:
    """A line of a log.

    Args:
        number: of the start that it belongs to, from 1; 0 before any.
        about: the rest of the line.
    """

    what: str
    number: int
    about: dict[str, Any]


def read_log(folder: Path) -> Iterator[Entry]:
    """Yield the lines of a log.

    Raises:
        MailboxError: a line, other than the last one, is no JSON object.
    """
    path, number = folder / "log.jsonl", 0
    if not path.exists():
        return
    with path.open("rb") as file:
        for count, line in enumerate(file):
            try:
                about = json.loads(line)
                what = about.pop("what")
            except (ValueError, AttributeError, KeyError, RecursionError) as error:
                if line.endswith(b"\n"):
                    raise MailboxError(f"{path}: line {count + 1} is damaged.") from error
                return  # a kill cut it
            number += what == "start"
            yield Entry(what, number, about)


@final
@dataclass(frozen=True)
class Replayed:
    """What a log gives.

    Args:
        anchors: (numel,) after the last exchange.
        exchanges: that took in changes.
        changes: that were taken in.
        values: the CRC-32 of the island's values after the last exchange.
    """

    anchors: np.ndarray
    exchanges: int
    changes: int
    values: int

    @property
    def crc32(self) -> int:
        """Of the anchors."""
        return crc_of(self.anchors)


def replay(folder: str | Path) -> Replayed:
    """Compute the anchors of an island again, from its log alone, and compare them with those it had.

    Raises:
        MailboxError: the log has no start, a part is damaged, a change was taken in twice, or the bits differ.
    """
    folder, anchors, islands, dtype = Path(folder), None, 1, ""
    exchanges = count = values = 0
    taken: set[Change] = set()
    for entry in read_log(folder):
        about = entry.about
        if entry.what == "start":
            islands, dtype, taken = about["islands"], about["dtype"], set()
            anchors = read_part(folder, entry.number, "anchors", about["numel"], dtype, about["crc32"])
            before = about["versions"]
        elif entry.what == "took" and anchors is not None:
            changes = []
            for version, name, crc32 in about["changes"]:
                if (version, name) in taken or version <= before.get(name, 0):
                    raise MailboxError(f"{folder}: version {version} of '{name}' was taken in twice.")
                taken.add((version, name))
                values_of = read_part(folder, entry.number, f"{version}-{name}", len(anchors), dtype, crc32)
                changes.append(((version, name), values_of))
            add_changes(anchors, changes, islands)
            exchanges, count, values = exchanges + 1, count + len(changes), about["values"]
            if crc_of(anchors) != about["anchors"]:
                raise MailboxError(f"{folder}: after step {about['step']} the anchors differ from those of the run.")
    if anchors is None:
        raise MailboxError(f"{folder}: there is no log of an island.")
    return Replayed(anchors, exchanges, count, values)


def read_part(folder: Path, number: int, name: str, numel: int, dtype: str, crc32: int) -> np.ndarray:
    """Return the values of a change or of anchors in a log, (numel,).

    Raises:
        MailboxError: they are missing, or not those that the log speaks of.
    """
    path = part_of(folder, number, name)
    values = read_array(path, numel, dtype)
    if crc_of(values) != crc32:
        raise MailboxError(f"{path}: is not what the log says: its checksum differs.")
    return values
