"""Status pages in shared memory: one for each rank, readable by all ranks of its host.

Owns the pages, where their parts are, and the detection of ranks that share a host. It must not know what they mean.
`watch/watchdog.py` writes the pages; one rank of each host talks to the store for all of them.

Note: which ranks share a host
    Ranks share a host if they can open each other's pages through /proc, and use the same network namespace: a rank in
    a separate namespace can lose its network alone, which shared memory does not show. If one of the ranks cannot open
    a page, each of them counts as a separate host.
"""

import mmap
import os
import secrets
import select
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from torch.distributed import Store

__all__ = ["Pages", "numbers_of", "words_of"]

TEXT_BYTES: Final = 2040
"""Bytes of one text. A page has two places for it, so that a reader never sees a partial text."""
PAGE_BYTES: Final = 8 + 2 * (TEXT_BYTES + 2)


@final
class Pages:
    """The pages of this rank and of the other ranks of its host.

    Args:
        store: the store of all ranks.
        text: the first text of this rank.

    Collective: two exchanges over the store; every rank must call.
    """

    def __init__(self, store: Store, rank: int, world_size: int, text: str) -> None:
        self._rank = rank
        self._pages: dict[int, mmap.mmap] = {}
        self._ends: dict[int, select.poll] = {}
        card, secret = "", secrets.token_hex(8)
        with suppress(OSError, AttributeError):  # not on this system, or limits of this process do not allow it
            descriptor = os.memfd_create("zeroshard-status", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, mmap.PAGESIZE * 2)
            os.pwrite(descriptor, secret.encode(), PAGE_BYTES)
            self._pages[rank] = mmap.mmap(descriptor, mmap.PAGESIZE * 2)
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            card = f"{boot} {os.readlink('/proc/self/ns/net')} {os.getpid()} {descriptor} {secret}"
        if not card:
            self._pages[rank] = mmap.mmap(-1, mmap.PAGESIZE * 2)
        self.write(text)
        cards = _exchange(store, "card", rank, world_size, card)
        seen = [other for other, theirs in enumerate(cards) if other == rank or self._open(other, theirs, card)]
        told = [tuple(map(int, one.split())) for one in _exchange(store, "sees", rank, world_size, _words(seen))]
        self.hosts: tuple[tuple[int, ...], ...] = _hosts_of(told)
        """The ranks of each host, in the order of their first ranks."""
        self.near: tuple[int, ...] = next(ranks for ranks in self.hosts if rank in ranks)
        """The ranks of this host."""

    def _open(self, other: int, theirs: str, card: str) -> bool:
        """Map the page of another rank; return False if it is on another host or cannot be opened."""
        if not card or theirs.split()[:2] != card.split()[:2]:
            return False
        _, _, pid, number, secret = theirs.split()
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.pread(descriptor, len(secret), PAGE_BYTES) != secret.encode():
                    return False  # the same number in another container
                self._pages[other] = mmap.mmap(descriptor, mmap.PAGESIZE * 2, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            end = os.pidfd_open(int(pid))
        except OSError:
            return False
        weakref.finalize(self, os.close, end)
        self._ends[other] = select.poll()
        self._ends[other].register(end, select.POLLIN)
        return True

    def write(self, text: str) -> None:
        """Publish a text to the other ranks of this host."""
        page, data = self._pages[self._rank], text.encode()[:TEXT_BYTES]
        half = 1 - page[0]
        first = 8 + half * (TEXT_BYTES + 2)
        page[first : first + 2 + len(data)] = len(data).to_bytes(2, "little") + data
        page[0] = half

    def read(self, rank: int) -> str:
        """Return the last text of a rank of this host."""
        page = self._pages[rank]
        first = 8 + page[0] * (TEXT_BYTES + 2)
        count = int.from_bytes(page[first : first + 2], "little")
        return page[first + 2 : first + 2 + count].decode(errors="replace")

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank exists; it may be stopped. True for ranks of other hosts."""
        return rank not in self._ends or not self._ends[rank].poll(0)


def words_of(published: str) -> str:
    """Return what a rank does, as its page tells."""
    return published.split("\n", 3)[-1]


def numbers_of(published: str) -> list[str]:
    """Return the numbers of a page: whether a cause is known, last answer of the store, wait, pace."""
    return published.split("\n", 2)[1].split(" ")


def _exchange(store: Store, key: str, rank: int, world_size: int, text: str) -> list[str]:
    store.set(f"{key}/{rank}", text or "-")
    return [one.decode() for one in store.multi_get([f"{key}/{other}" for other in range(world_size)])]


def _words(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _hosts_of(seen: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host from the views of all ranks; ranks with different views are separate hosts."""
    hosts = [ranks if all(seen[other] == ranks for other in ranks) else (rank,) for rank, ranks in enumerate(seen)]
    return tuple(dict.fromkeys(hosts))
