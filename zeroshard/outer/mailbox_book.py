"""What the mailbox knows: islands, the versions that they put, and what each of them has taken in.

Owns every decision: who may join, put or take, which changes may be added to the anchors and removed, and who is gone.
It must not know sockets. Read `mailbox_order.py` (the sum) and `mailbox_files.py` (the files) first.

Note: versions
    A version is the number of an exchange. An island puts its versions one after the other; a version is there when all
    ranks of the island have put their parts of it, and nobody is told of it before. An island that joins continues
    behind the newest version of any island (`since`), so versions of different islands can be compared, and nobody
    waits for versions that it never puts.
Note: the horizon
    A change stays on disk until each island that is active has taken it in; then it is added to the anchors, in the
    order in which islands add, and removed. So who joins gets anchors, the versions in them, and everything newer.
    An island that is gone or has left holds nothing back: if it comes back, it starts from the anchors.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from zeroshard.outer.mailbox_facts import ACTIVE, DONE, GONE, HERE, LEFT, Facts, Member
from zeroshard.outer.mailbox_files import PartReader, PartWriter, Shelf, check_part, stored_bytes
from zeroshard.outer.mailbox_order import Change, Fold, Versions, in_order, name_order
from zeroshard.outer.mailbox_wire import Refused

__all__ = ["Book"]

_MOST_ISLANDS: Final = 1024
_CLOSED_S: Final = 1.0
"""After so many seconds without a connection an island is gone."""


@final
class Book:
    """The state of a mailbox, under one lock.

    Args:
        gone_s: after so many seconds of silence an island is gone.
        most_bytes: of changes on the disk; one that would exceed them is refused.
        clock: in seconds, monotonic.
    """

    def __init__(
        self, shelf: Shelf, *, gone_s: float, most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shelf, self.changed = shelf, threading.Condition(threading.RLock())
        self._gone_s, self._most_bytes, self._clock = gone_s, most_bytes, clock
        self.count = 0
        """Grows with each change that an island may wait for."""
        self.facts: Facts | None = None
        self.members: dict[str, Member] = {}
        self.number, self.base = 1, Versions()
        """The number of the anchors, and the versions in them."""
        self._numels: dict[int, int] = {}
        self._founder = self._training = ""
        self._anchored: set[int] = set()
        self._parts: dict[Change, set[int]] = {}
        self._reserved = 0
        self._restore()

    # -- joining ------------------------------------------------------------------------------------------------------

    def join(
        self, name: str, launch: str, rank: int, numel: int, facts: Facts, training: str = "", *, anew: bool = False
    ) -> dict[str, Any]:
        """Let a rank of an island join, or join again, and return where it starts.

        Args:
            training: that of which the island has values, as an earlier reply named it; "" if it has none.
            anew: the island founded the mailbox, and puts other first anchors instead.

        Raises:
            Refused: the island differs from the others, another launch has its name, it would lose what it has learned,
                or it is too late for other first anchors.
        """
        with self.changed:
            self._check_facts(name, facts)
            if self.is_anchored and training and self._training not in ("", training):
                raise Refused(
                    "differs",
                    f"an island that began anew has founded this mailbox, and '{name}' would lose what it learned in "
                    "the former one. Stop all islands. Then start the mailbox with its former folder; or with an empty "
                    f"one, and '{name}' first, from its last checkpoint.",
                )
            if not 0 <= rank < facts.ranks:
                raise Refused("differs", f"island '{name}' has no rank {rank} of {facts.ranks}.")
            if self._numels.get(rank, numel) != numel:
                raise Refused(
                    "differs",
                    f"rank {rank} of island '{name}' keeps {numel:,} elements, that of the other islands "
                    f"{self._numels[rank]:,}: islands have the same model, number of ranks and sharding.",
                )
            others = sum(self._is_alive(one) for one in self.members.values() if one.name != name)
            numels = {**self._numels, rank: numel}.values()
            if text := facts.lack_of_room(max(facts.islands, 1 + others), numels, self._most_bytes):
                raise Refused("differs", text)
            member = self.members.get(name)
            if member is None or member.launch != launch:
                if anew:
                    self._drop_founding(name)
                member = self._admit(name, launch, member)
            self._numels[rank] = numel
            self._hear(member)
            return {
                "since": member.since,
                "number": self.number,
                "versions": dict(self.base),
                "last": self._last(name),
                "founds": not self.is_anchored and self._found(member, training),
                "training": self._training,
                "is_anchored": self.is_anchored,
            }

    def _check_facts(self, name: str, facts: Facts) -> None:
        if self.facts is None or (not self.is_anchored and not any(map(self._is_alive, self.members.values()))):
            self.facts, self.members, self._numels, self._anchored = facts, {}, {}, set()
            self._save()
        elif text := self.facts.difference(facts, name):
            raise Refused("differs", text)

    def _admit(self, name: str, launch: str, before: Member | None) -> Member:
        assert self.facts is not None
        is_other = before is not None and before.launch.split(":")[0] != launch.split(":")[0]
        if before is not None and is_other and before.lines and self._is_alive(before):
            raise Refused(
                "taken",
                f"an island named '{name}' is in the mailbox already: each launch needs a name of its own. After a "
                f"crash, the name is free when its connections have ended, or after {self._gone_s:g} s.",
            )
        if before is None and len(self.members) >= _MOST_ISLANDS:
            raise Refused("full", f"the mailbox has {_MOST_ISLANDS} islands.")
        is_first = before is None and len(self.members) < self.facts.islands and self.facts.staleness is not None
        member = Member(name, launch, 0 if is_first else self._newest())
        member.taken = {rank: dict(self.base) for rank in range(self.facts.ranks)}
        self.members[name] = member
        self._save()
        # Parts of a version that is not whole: the launch that would have completed it is over. Its number is not used
        # again, because `since` is not below it.
        for change in [one for one in self._parts if one[1] == name and not self._is_whole(one)]:
            self._drop(change)
        self._tell()
        return member

    def _newest(self) -> int:
        versions = [version for version, _ in self._parts]
        return max([0, *versions, *self.base.values(), *(one.since for one in self.members.values())])

    def _found(self, member: Member, training: str) -> bool:
        """Return whether an island is to put the first anchors."""
        own, founder = f"{member.name} {member.launch}", self.members.get(self._founder.partition(" ")[0])
        if founder is not None and founder.state == ACTIVE and founder is not member:
            return False
        if self._founder != own:
            self._founder, self._anchored = own, set()
            self._training = training or member.launch
        return True

    def _drop_founding(self, name: str) -> None:
        """Drop the first anchors, and let the islands that have them join again: their founder puts others."""
        if self._founder.partition(" ")[0] != name or self._parts or self.base:
            raise Refused(
                "old",
                f"island '{name}' founded the mailbox, and changes were put before its values were replaced, so these "
                "cannot become the anchors. Stop all islands, start the mailbox with an empty folder, and start "
                f"'{name}' alone until it has loaded its checkpoint.",
            )
        self._anchored = set()
        for member in self.members.values():
            member.state = GONE if member.state in HERE else member.state
        self._save()
        self.shelf.drop_anchors(besides=0)

    def hello(self, name: str, launch: str, rank: int, taken: Mapping[str, int] | None) -> Member:
        """Return the island of a rank that connects again.

        Raises:
            Refused: the island is not in the mailbox, or was taken for gone.
        """
        with self.changed:
            member = self._member(name, launch)
            if taken is not None:
                self._note(member, rank, taken)
            self._hear(member)
            return member

    def _member(self, name: str, launch: str) -> Member:
        member = self.members.get(name)
        if member is None or member.launch != launch:
            raise Refused("gone", f"another launch of island '{name}' has joined." if member else "it is not known.")
        if member.state not in HERE:
            raise Refused("gone", f"island '{name}' counts as {member.state}; it joins again from the anchors.")
        return member

    # -- putting ------------------------------------------------------------------------------------------------------

    def next_version(self, member: Member) -> int:
        """Return the version that an island puts next."""
        with self.changed:
            return max(member.since, self._last(member.name)) + 1

    def begin(self, name: str, launch: str, rank: int, version: int) -> PartWriter | None:
        """Return where a rank of an island writes its change; None if the mailbox has it already.

        Raises:
            Refused: the version is old or comes too early, the mailbox is full, or the island is gone.
        """
        with self.changed:
            member = self._member(name, launch)
            assert self.facts is not None
            if version != (due := self.next_version(member)):
                what = "is old" if version < due else "comes too early"
                raise Refused("old", f"version {version} of island '{name}' {what}: {due} is next. It was not taken.")
            if rank in self._parts.get((version, name), ()):
                return None
            form, nbytes = self.facts.form, self.change_bytes(rank)
            if self._stored() + self._reserved + self.facts.stored_bytes(self._numel(rank)) > self._most_bytes:
                raise Refused(
                    "full",
                    f"the mailbox is full: {self._stored():,} bytes of changes that not all islands have taken in, of "
                    f"{self._most_bytes:,}. Islands that are slow or stopped hold them; see --most-gib.",
                )
            self._reserved += nbytes
        try:
            return PartWriter(self.shelf.change(version, name, rank), nbytes, form)
        except OSError:
            self.end(rank)
            raise

    def end(self, rank: int) -> None:
        """Give back what `begin` reserved."""
        with self.changed:
            self._reserved -= self.change_bytes(rank)

    def commit(self, name: str, launch: str, rank: int, version: int, writer: PartWriter) -> None:
        """Put a change in its place: it is on the disk when this returns.

        Raises:
            Refused: the island is gone, or joined again meanwhile.
            ValueError: pieces are missing.
            OSError: the disk refuses.
        """
        with self.changed:
            member = self._member(name, launch)
            if rank in self._parts.get((version, name), ()):
                return
            if version != self.next_version(member):
                raise Refused("old", f"version {version} of island '{name}' is old.")
            writer.place()
            self._parts.setdefault((version, name), set()).add(rank)
            if self._is_whole((version, name)):
                self._tell()

    def begin_anchors(self, name: str, launch: str, rank: int) -> PartWriter:
        """Return where the island that founds the mailbox writes a rank's part of the first anchors.

        Raises:
            Refused: another island founds it, or it is founded.
        """
        with self.changed:
            self._member(name, launch)
            if self.is_anchored or self._founder != f"{name} {launch}":
                raise Refused("old", "the mailbox has its first anchors from another island.")
            assert self.facts is not None
            return PartWriter(self.shelf.anchors(1, rank), self.nbytes(rank), self.facts.form.plain)

    def commit_anchors(self, name: str, launch: str, rank: int, writer: PartWriter) -> None:
        """Put a rank's part of the first anchors in its place."""
        with self.changed:
            self._member(name, launch)
            if self.is_anchored or self._founder != f"{name} {launch}":
                raise Refused("old", "the mailbox has its first anchors from another island.")
            writer.place()
            self._anchored.add(rank)
            self._save()
            self._tell()

    @property
    def is_anchored(self) -> bool:
        """Whether the first anchors are there, of all ranks."""
        return self.facts is not None and len(self._anchored) == self.facts.ranks

    # -- taking -------------------------------------------------------------------------------------------------------

    def open_change(self, version: int, name: str, rank: int) -> PartReader:
        """Open a rank's part of a change that is whole.

        Raises:
            Refused: it is not there, or not any more.
        """
        with self.changed:
            if (version, name) not in self._parts or not self._is_whole((version, name)):
                raise Refused("old", f"there is no version {version} of island '{name}'.")
            assert self.facts is not None
            path, nbytes = self.shelf.change(version, name, rank), self.change_bytes(rank)
            return PartReader(path, nbytes, self.facts.form.piece_bytes)

    def open_anchors(self, rank: int) -> tuple[int, Versions, PartReader]:
        """Open a rank's part of the anchors; also return their number and the versions in them.

        Raises:
            Refused: there are none yet.
        """
        with self.changed:
            if not self.is_anchored:
                raise Refused("wait", "the first anchors are not there yet.")
            return self.number, dict(self.base), PartReader(self.shelf.anchors(self.number, rank), self.nbytes(rank))

    def take(self, name: str, launch: str, rank: int, taken: Mapping[str, int]) -> None:
        """Note what a rank has taken in."""
        with self.changed:
            member = self._member(name, launch)
            self._note(member, rank, taken)
            self.changed.notify_all()

    def _note(self, member: Member, rank: int, taken: Mapping[str, int]) -> None:
        if rank not in member.taken:
            raise Refused("wrong", f"island '{member.name}' has no rank {rank}.")
        member.taken[rank].update({name: version for name, version in taken.items() if name in self.members})

    def index(self, name: str, launch: str, seen: int, wait_s: float) -> dict[str, Any]:
        """Return all islands and their versions, at the next change after number `seen`, or after `wait_s`."""
        with self.changed:
            self._hear(self._member(name, launch))
            self.changed.wait_for(lambda: self.count != seen, min(wait_s, self._gone_s / 4))
            self._hear(self._member(name, launch))
            assert self.facts is not None
            islands: dict[str, Any] = {
                one.name: {"state": one.state, "since": one.since, "versions": []} for one in self.members.values()
            }
            for version, other in in_order(change for change in self._parts if self._is_whole(change)):
                islands[other]["versions"].append(version)
            for other, version in self.base.items():
                islands[other]["base"] = version
            missing = max(self.facts.islands - len(self.members), 0)
            return {"count": self.count, "islands": islands, "missing": missing}

    # -- who is there -------------------------------------------------------------------------------------------------

    def attach(self, member: Member, count: int) -> None:
        """Count connections of an island that begin (1) or end (-1)."""
        with self.changed:
            member.lines += count
            self._hear(member)

    def leave(self, name: str, launch: str, *, takes: bool) -> None:
        """Note that an island puts nothing more, and nobody waits for it; with `takes` it still takes changes in."""
        with self.changed:
            self._member(name, launch).state = DONE if takes else LEFT
            self._save()
            self._tell()

    def expire(self) -> list[str]:
        """Return the islands that are gone since the last call: silent for too long, or without connections."""
        with self.changed:
            found = [one for one in self.members.values() if one.state in HERE and not self._is_alive(one)]
            for member in found:
                member.state = GONE
            if found:
                self._tell()
                with contextlib.suppress(OSError):  # it matters after a change is removed, and a fold writes it, too
                    self._save()
            return [one.name for one in found]

    def _is_alive(self, member: Member) -> bool:
        silent_s = self._clock() - member.heard_s
        return member.state in HERE and silent_s < (self._gone_s if member.lines else min(self._gone_s, _CLOSED_S))

    def _hear(self, member: Member) -> None:
        member.heard_s = self._clock()

    # -- the horizon --------------------------------------------------------------------------------------------------

    def plan_fold(self) -> Fold | None:
        """Return the changes that all have taken in, which become a part of the anchors; None without any."""
        with self.changed:
            if self.facts is None or not self.is_anchored:
                return None
            if self.facts.staleness is not None and len(self.members) < self.facts.islands:
                return None  # who has not come yet takes every change
            holders = [taken for one in self.members.values() if one.state in HERE for taken in one.taken.values()]
            horizon = {
                name: min((taken.get(name, 0) for taken in holders), default=self._last(name)) for name in self.members
            }
            changes = in_order(
                (version, name)
                for version, name in self._parts
                if self.base.get(name, 0) < version <= horizon.get(name, 0) and self._is_whole((version, name))
            )
            if not changes:
                return None
            return Fold(tuple(changes), {**self.base, **{name: version for version, name in changes}})

    def finish_fold(self, fold: Fold) -> None:
        """Make the next anchors, which are on the disk, the valid ones, and remove what they contain.

        Raises:
            OSError: the disk refuses; the anchors and the versions in them are those from before.
        """
        with self.changed:
            before = self.number, self.base
            self.number, self.base = self.number + 1, fold.versions
            try:
                self._save()
            except OSError:
                self.number, self.base = before
                raise
            for change in fold.changes:
                self._drop(change)
            self.shelf.drop_anchors(besides=self.number)
            self._tell()

    # -- files --------------------------------------------------------------------------------------------------------

    def nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's part of the anchors."""
        assert self.facts is not None
        return self.facts.form.plain.nbytes(self._numel(rank))

    def change_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's part of a change."""
        assert self.facts is not None
        return self.facts.form.nbytes(self._numel(rank))

    def _numel(self, rank: int) -> int:
        if rank not in self._numels:
            raise Refused("wrong", f"there is no rank {rank}.")
        return self._numels[rank]

    def _is_whole(self, change: Change) -> bool:
        return self.facts is not None and len(self._parts[change]) == self.facts.ranks

    def _last(self, name: str) -> int:
        """Return the newest whole version of an island."""
        versions = [version for version, other in self._parts if other == name and self._is_whole((version, other))]
        return max([self.base.get(name, 0), *versions])

    def _stored(self) -> int:
        assert self.facts is not None
        return sum(self.facts.stored_bytes(self._numel(rank)) for ranks in self._parts.values() for rank in ranks)

    def _drop(self, change: Change) -> None:
        del self._parts[change]
        self.shelf.drop_change(*change)

    def _tell(self) -> None:
        self.count += 1
        self.changed.notify_all()

    def _save(self) -> None:
        assert self.facts is not None
        members = sorted(self.members.values(), key=lambda one: name_order(one.name))
        self.shelf.write_state(
            {
                "facts": vars(self.facts) | {"others": dict(self.facts.others)},
                "members": [[one.name, one.launch, one.since, one.state] for one in members],
                "number": self.number,
                "is_anchored": self.is_anchored,
                "base": self.base,
                "numels": {str(rank): numel for rank, numel in self._numels.items()},
                "founder": self._founder,
                "training": self._training,
            }
        )

    def _restore(self) -> None:
        """Continue from the files.

        Raises:
            MailboxError: a file that the mailbox has acknowledged is missing or of another size.
        """
        state = self.shelf.read_state()
        if state is None:
            return
        self.facts = Facts(**state["facts"])
        self.number, self.base, self._founder = state["number"], state["base"], state["founder"]
        self._training = state.get("training", "")
        self._numels = {int(rank): numel for rank, numel in state["numels"].items()}
        for name, launch, since, what in state["members"]:
            member = Member(name, launch, since, what, {rank: dict(self.base) for rank in range(self.facts.ranks)})
            # They have as long to come back as silent ones.
            member.heard_s = self._clock() + self._gone_s - min(self._gone_s, _CLOSED_S)
            self.members[name] = member
        parts = self.shelf.parts_of_anchors(self.number)
        self._anchored = {n for n in parts if n in self._numels and parts[n] == stored_bytes(self.nbytes(n))}
        for rank in range(self.facts.ranks) if state.get("is_anchored", self.number > 1) else ():
            check_part(self.shelf.anchors(self.number, rank), self.nbytes(rank))
        self.shelf.drop_anchors(besides=self.number)
        for version, name, parts in self.shelf.changes():
            known = self.members.get(name)
            is_late = known is not None and len(parts) < self.facts.ranks and version <= known.since
            is_over = known is None or version <= self.base.get(name, 0) or is_late
            if is_over or not parts or not self.is_anchored:
                self.shelf.drop_change(version, name)
                continue
            for rank in parts:
                check_part(self.shelf.change(version, name, rank), self.change_bytes(rank), self.facts.form.piece_bytes)
            self._parts[version, name] = set(parts)
