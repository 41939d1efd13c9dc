"""How the ranks of an island agree on what an exchange takes in: from a mailbox, or from a log.

Owns the wait that the staleness asks for, and the agreement. It must not know the arithmetic (`island_exchange.py`).

Note: agreement
    Ranks bring changes each for itself, so one may have what another has not yet. In an exchange they tell each other
    what they have, over the island's own network, and take in what all have. A rank that has to wait tells so, and all
    look again; so no rank waits in a collective for longer than a moment.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Final, TypeVar, final

import numpy as np

from zeroshard.outer.island_exchange import Found, Source, Values
from zeroshard.outer.island_log import Entry, read_log, read_part
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_post import Look, Post, Start
from zeroshard.outer.mailbox_wire import MailboxError, read_secret

__all__ = ["Logged", "Mail", "logs_below", "open_mailbox"]

T = TypeVar("T")
_PROTOCOL: Final = 2
_ROUND_S: Final = 0.2
"""Between looks of several ranks, which are collectives."""
_ALONE_S: Final = 1.0


def open_mailbox(options: IslandOptions, values: Values) -> "Mail":
    """Return the mailbox at the address of the options.

    Raises:
        ValueError, OSError: the file of the secret is not right.
    """
    about = {
        "islands": options.islands,
        "ranks": values.ranks,
        "staleness": options.staleness,
        "bits": options.bits,
        "dtype": values.dtype,
        "facts": {"protocol": _PROTOCOL, "every": options.every, **values.facts},
    }
    post = Post(
        options.address,
        read_secret(options.secret_file),
        options.island,
        values.rank,
        about,
        values.numel,
        held=options.most_held,
        patience_s=options.patience_s,
    )
    return Mail(options, values, post)


@final
class Mail(Source):
    """A mailbox, for one rank of an island.

    Collective: `Values.texts` in each method that waits; every rank must call.
    """

    def __init__(self, options: IslandOptions, values: Values, post: Post) -> None:
        self._options, self._values, self._post = options, values, post
        self._launch, self._joined = "", 0

    # -- joining ------------------------------------------------------------------------------------------------------

    def enter(self, values: np.ndarray, *, anew: bool = False) -> tuple[Start, np.ndarray]:
        """See `Source`."""
        if not self._joined:
            self._launch = self._values.texts(token_hex(16))[0]
        self._joined += 1
        launch = f"{self._launch}:{self._joined}"
        return self._together(lambda: self._post.enter(launch, values, self._options.arrive_s, anew=anew))

    def begin(self) -> None:
        """See `Source`."""
        self._post.begin()

    def _together(self, action: Callable[[], T]) -> T:
        """Return what an action returns on this rank; raise on every rank if it fails on one."""
        result, failure, text = None, None, ""
        try:
            result = action()
        except (MailboxError, OSError) as error:
            failure, text = error, str(error) or type(error).__name__
        texts = self._values.texts(text)
        if failure is not None:
            raise failure
        self._raise_any(texts)
        return result  # type: ignore[return-value]

    def _raise_any(self, texts: list[str]) -> None:
        for rank, text in enumerate(texts):
            if text:
                raise MailboxError(f"[rank {rank}/{self._values.ranks}] {text}")

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def catch_up(self, since: int, step: int) -> Found:
        """See `Source`."""
        found = self._wait(lambda look: self._has_all(look, since) or not look.is_up, since)
        # With what is newer, those that were there from the start make an exchange of their own.
        return replace(found, here={name: min(last, since) for name, last in found.here.items()})

    def offer(self, version: int, message: np.ndarray, told: np.ndarray, step: int) -> None:
        """See `Source`."""
        self._post.offer(version, message)

    def settle(self, version: int, step: int) -> Found:
        """See `Source`."""

        def is_ready(look: Look) -> bool:
            # One that waits also takes what an island has put before it left.
            has_all = self._options.staleness != 0 or not look.is_up or self._has_all(look, version)
            return has_all and _is_ready(look, version, self._options)

        return self._of_version(self._wait(is_ready, version), version)

    def _of_version(self, found: Found, version: int) -> Found:
        """Return what islands that wait for each other take in: a faster one may have put its next change by now."""
        if self._options.staleness != 0:
            return found
        return replace(found, here={name: min(last, version) for name, last in found.here.items()})

    def drain(self, version: int, step: int, *, others: bool, limit_s: float) -> Found | None:
        """See `Source`."""
        own, end_s = self._options.island, time.monotonic() + limit_s

        def is_ready(look: Look) -> bool:
            is_there = self._has_news(look) if others else look.here.get(own, 0) >= version
            return is_there or look.is_full or (not look.is_up and time.monotonic() > end_s)

        if others:
            self._post.tell_done()
        found = self._wait(is_ready, version)
        if not others:
            found = self._of_version(found, version)
        # By what all ranks have in common: another answer on one of them would leave the others alone.
        has_more = any(last > self._post.taken(name) for name, last in found.here.items())
        return found if not others or found.is_gone or (found.is_up and has_more) else None

    def _has_all(self, look: Look, last: int | None = None) -> bool:
        """Return whether everything that the mailbox has is here, or all versions up to the last one."""
        listed = ((name, version) for name in look.here for version in self._post.listed(name))
        return bool(look.here) and all(
            version <= look.here[name] for name, version in listed if last is None or version <= last
        )

    def _has_news(self, look: Look) -> bool:
        """Return whether everything that the mailbox has is here, and there is something, or nothing more will come."""
        is_last = not look.missing and not look.needed
        return self._has_all(look) and (is_last or any(self._post.listed(name) for name in look.here))

    def _wait(self, is_ready: Callable[[Look], bool], version: int) -> Found:
        """Look until all ranks are ready, and return what all of them have."""
        begun_s = time.monotonic()
        while True:
            look = self._post.look()
            is_settled = is_ready(look)
            row = {"ready": is_settled or look.is_full, "settled": is_settled, "here": look.here}
            row |= {"up": look.is_up, "gone": look.is_gone}
            rows = [json.loads(text) for text in self._values.texts(json.dumps(row | {"error": look.error}))]
            self._raise_any([one["error"] for one in rows])
            is_gone = any(one["gone"] for one in rows)
            if is_gone or all(one["ready"] for one in rows):
                here = {
                    name: min(one["here"][name] for one in rows)
                    for name in rows[0]["here"]
                    if all(name in one["here"] for one in rows)
                }
                slowest = min(look.needed.values(), default=version)
                is_up = all(one["up"] for one in rows)
                is_settled = all(one["settled"] for one in rows)
                return Found(here, time.monotonic() - begun_s, max(version - slowest, 0), is_up, is_gone, is_settled)
            if row["ready"]:
                time.sleep(_ROUND_S / 20)
            else:
                self._post.wait(look, _ALONE_S if len(rows) == 1 else _ROUND_S)

    def listed(self, name: str) -> list[int]:
        """See `Source`."""
        return self._post.listed(name)

    def change(self, version: int, name: str) -> np.ndarray:
        """See `Source`."""
        return self._post.change(version, name)

    def take(self, taken: Mapping[str, int]) -> None:
        """See `Source`."""
        self._post.take(taken)

    def end(self, *, leaves: bool) -> None:
        """See `Source`."""
        if leaves:
            # The first rank that leaves ends the island for the mailbox.
            self._values.texts("")
        self._post.end(leaves=leaves and self._values.rank == 0, limit_s=5.0)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of changes and anchors that this rank has sent and received."""
        return self._post.traffic


def _is_ready(look: Look, version: int, options: IslandOptions) -> bool:
    """Return whether an exchange may go on: nobody that counts is further behind than the staleness allows."""
    if options.staleness is None or not look.is_up:
        return True
    bound = version - options.staleness
    if bound <= 0:
        return True
    return not look.missing and bool(look.needed) and min(look.needed.values()) >= bound


# -- from a log -------------------------------------------------------------------------------------------------------


@final
class Logged(Source):
    """The log of an earlier run of this island: gives the training the same changes at the same steps.

    What the island computes is compared with what it sent then, bit by bit. The last start in the log is repeated, to
    the end of the log.

    Args:
        folder: of this rank's log.

    Raises:
        MailboxError: there is no log in the folder.
    """

    def __init__(self, folder: str | Path, island: str) -> None:
        self._folder, self._island = Path(folder), island
        entries = list(read_log(self._folder))
        self._number = max((entry.number for entry in entries), default=0)
        if not self._number:
            raise MailboxError(f"{folder}: there is no log of an island.")
        mine = [entry for entry in entries if entry.number == self._number]
        self._start = mine[0].about
        if self._start["step"]:
            raise MailboxError(
                f"{folder}: the island joined again after step {self._start['step']}, and the log has no states of its "
                "optimizer: only the anchors can be computed again, with `zeroshard outer --replay`."
            )
        self._sent = {entry.about["version"]: entry.about for entry in mine if entry.what == "sent"}
        self._took = [entry for entry in mine if entry.what == "took"]
        self._due: Entry | None = None

    def enter(self, values: np.ndarray, *, anew: bool = False) -> tuple[Start, np.ndarray]:
        """See `Source`."""
        start = Start(self._start["since"], self._start["versions"], self._start.get("founds", False))
        return start, self._read("anchors", self._start["crc32"])

    def begin(self) -> None:
        """See `Source`."""

    def catch_up(self, since: int, step: int) -> Found:
        """See `Source`."""
        return self._next(step) or Found({})

    def offer(self, version: int, message: np.ndarray, told: np.ndarray, step: int) -> None:
        """Compare a change with the one that was sent."""
        about = self._sent.get(version)
        if about is None or about["step"] != step:
            raise MailboxError(f"{self._folder}: the log has no version {version} that was sent after step {step}.")
        before = self._read(f"{version}-{self._island}", about["crc32"])
        if before.tobytes() != told.tobytes():
            count = int((before != told).sum())
            raise MailboxError(
                f"{self._folder}: the change of version {version}, after step {step}, differs from that of the run in "
                f"{count:,} of {told.size:,} elements. A replay needs the same program, data, seeds and versions."
            )

    def settle(self, version: int, step: int) -> Found:
        """See `Source`."""
        return self._next(step) or Found({})

    def drain(self, version: int, step: int, *, others: bool, limit_s: float) -> Found | None:
        """See `Source`."""
        return self._next(step)

    def _next(self, step: int) -> Found | None:
        """Return what is the next to be taken in after a step; nothing if the log has none there."""
        entry = self._took[0] if self._took else None
        if entry is None or entry.about["step"] != step:
            return None
        self._due = self._took.pop(0)
        here: dict[str, int] = {}
        for version, name, _ in entry.about["changes"]:
            here[name] = max(version, here.get(name, 0))
        return Found(here, is_settled=entry.about["is_settled"])

    def listed(self, name: str) -> list[int]:
        """See `Source`."""
        assert self._due is not None
        return [version for version, other, _ in self._due.about["changes"] if other == name]

    def change(self, version: int, name: str) -> np.ndarray:
        """See `Source`."""
        assert self._due is not None
        crc32 = next(one[2] for one in self._due.about["changes"] if one[:2] == [version, name])
        return self._read(f"{version}-{name}", crc32)

    def take(self, taken: Mapping[str, int]) -> None:
        """See `Source`."""

    def end(self, *, leaves: bool) -> None:
        """See `Source`."""

    @property
    def left(self) -> int:
        """Exchanges of the log that were not repeated."""
        return len(self._took)

    def _read(self, name: str, crc32: int) -> np.ndarray:
        return read_part(self._folder, self._number, name, self._start["numel"], self._start["dtype"], crc32)


def logs_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of logs in a folder, or the folder itself."""
    yield from (
        [folder] if (folder / "log.jsonl").exists() else sorted(path.parent for path in folder.glob("*/log.jsonl"))
    )
