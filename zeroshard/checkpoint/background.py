"""A save in the background: memory is copied once, and a thread of each rank writes the copy during training.

Owns the copy, the thread, and the receipts by which ranks report to rank 0 without a collective. Read `commit.py`
first.

Note: receipts
    A thread cannot take part in collectives, because ranks would issue them in different orders. So each rank writes a
    receipt to the folder, with sizes and checksums or its error; the thread of rank 0 waits for all receipts, completes
    the folder and renames it. The main threads agree on the outcome later (`save.py`), or at exit by a check whether
    the checkpoint exists.
"""

import atexit
import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final, final

import torch

from zeroshard import devices
from zeroshard.checkpoint import files, strict
from zeroshard.checkpoint.commit import publish, remove_older, write_manifest, write_tensors
from zeroshard.checkpoint.contents import ADVICE, COMMITTED, LOOK, Plan
from zeroshard.checkpoint.cuts import RowExchange
from zeroshard.checkpoint.manifest import FileEntry
from zeroshard.checkpoint.reader import read_text
from zeroshard.checkpoint.together import describe
from zeroshard.checkpoint.values import bytes_of
from zeroshard.checkpoint.writer import write_file
from zeroshard.table.errors import CheckpointError
from zeroshard.torch_private import bytes_in
from zeroshard.watch.process import end_with

__all__ = ["BackgroundSave", "Snapshot", "Status"]

POLL_S: Final = 0.02
PATIENCE_S: Final = 20.0
"""Seconds that a rank at exit waits for ranks of other hosts without visible progress."""

PIECE_BYTES: Final = 64 << 20
"""Bytes written between two checks for a cancelled save."""


@final
class Snapshot:
    """Reused host memory for this rank's data, so that only the first save touches fresh pages."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, plan: Plan, rows: RowExchange) -> dict[str, memoryview]:
        """Copy the values that this rank writes; return them by file.

        Args:
            rows: the exchange of this save.
        """
        mesh = plan.mesh.across
        nbytes = sum(map(plan.nbytes_of, plan.files_of(mesh.rank)))
        if self._memory.numel() < nbytes:
            self._memory = _host_memory(nbytes, pinned=mesh.device.type == "cuda")
        end, taken = 0, {}
        for name in plan.files_of(mesh.rank):
            start = end
            for value in plan.values(name, rows):
                self._memory[end : end + value.nbytes].copy_(bytes_in(value))
                end += value.nbytes
            taken[name] = bytes_of(self._memory[start:end])
        return taken


def _host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return host memory, (nbytes,) uint8."""
    if pinned:
        return devices.pinned((nbytes,), torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages, if available, reduce the time of the first copy to a third.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Status(IntEnum):
    """The progress of a save on this rank; on rank 0, of all ranks."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


@final
class BackgroundSave:
    """One save in the background, which starts in the constructor.

    Args:
        taken: the values that this rank writes, by file; unchanged until `status` changes.
        is_alive: tells whether the process of another rank may still run.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        rank: int,
        taken: Mapping[str, memoryview],
        is_alive: Callable[[int], bool],
    ) -> None:
        self.path, self.failure = plan.path, ""
        self._plan, self._folder, self._rank, self._taken = plan, folder, rank, taken
        self._is_alive = is_alive
        self._is_given_up, self._is_leaving = threading.Event(), threading.Event()
        self._doing, self._advice = "writing tensors", ADVICE
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"saving {plan.path.name}", daemon=True)
        atexit.register(self._leave)
        self._thread.start()

    @property
    def status(self) -> Status:
        """The progress of the save."""
        if self._thread.is_alive():
            return Status.RUNNING
        return Status.FAILED if self.failure else Status.DONE

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until this rank's part is done."""
        self._thread.join(timeout_s)

    def give_up(self) -> None:
        """End this rank's part, because another rank's failed."""
        self._is_given_up.set()
        self._thread.join()

    def remove(self) -> None:
        """Remove the folder of a failed save, once no rank writes to it."""
        if self._rank == 0:
            files.remove_tree(self._folder)

    def close(self) -> None:
        """Cancel the exit handler: all ranks know the outcome."""
        atexit.unregister(self._leave)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            entries = {}
            for name in self._taken:
                entries[name] = write_tensors(self._plan, self._folder, name, self._parts(name))
            if self._rank:
                self._leave_receipt({name: [entry.nbytes, list(entry.crc32)] for name, entry in entries.items()})
            else:
                self._complete(entries)
        except _GivenUp:
            return
        except _OtherRankFailed as error:
            self.failure = str(error)
        except Exception as error:  # any error: the main threads must report it
            self.failure = f"{self._doing} failed on rank {self._rank}: {describe(error)} {self._advice}"
            if self._rank:
                self._report()

    def _parts(self, name: str) -> Iterator[memoryview]:
        taken = self._taken[name]
        for start in range(0, len(taken), PIECE_BYTES):
            if self._is_given_up.is_set():
                raise _GivenUp
            yield taken[start : start + PIECE_BYTES]

    def _leave_receipt(self, content: object) -> None:
        receipt = self._receipt(self._rank)
        part = receipt.with_suffix(".part")
        write_file(part, strict.seal(strict.dumps(content, receipt.name)))
        files.rename(part, receipt)

    def _report(self) -> None:
        """Report the failure to rank 0, if possible, after removing this rank's files to free space."""
        for name in self._taken:
            with contextlib.suppress(OSError):
                files.remove(self._folder / name)
        with contextlib.suppress(OSError):
            self._leave_receipt(self.failure)

    def _receipt(self, rank: int) -> Path:
        return self._folder / f"receipt-{rank + 1:05}"

    def _complete(self, entries: dict[str, FileEntry]) -> None:
        """Wait for the other ranks, and commit the checkpoint."""
        self._doing = "waiting for the other ranks"
        for rank in range(1, self._plan.world_size):
            entries |= self._await_receipt(rank)
        self._doing = "writing the manifest"
        for rank in range(1, self._plan.world_size):
            files.remove(self._receipt(rank))
        write_manifest(self._plan, self._folder, entries)
        self._doing, self._advice = "committing", LOOK
        publish(self._plan.path, self._folder)
        if self._plan.keep is not None:
            self._doing, self._advice = "removing older checkpoints", COMMITTED
            remove_older(self._plan, self._plan.keep)

    def _await_receipt(self, rank: int) -> dict[str, FileEntry]:
        receipt = self._receipt(rank)
        self._await(receipt, rank)
        content = strict.loads(strict.unseal(read_text(receipt), str(receipt)), str(receipt))
        if isinstance(content, str):
            raise _OtherRankFailed(content)
        return {name: FileEntry(*content[name]) for name in self._plan.files_of(rank)}

    # -- in either ----------------------------------------------------------------------------------------------------

    def _await(self, path: Path, rank: int) -> None:
        """Wait for a file of another rank while its process lives; at exit, only while the folder grows."""
        seen, since_s = -1, time.monotonic()
        while not path.exists():
            if self._is_given_up.wait(POLL_S):
                raise _GivenUp
            try:
                nbytes = files.bytes_in(self._folder)
            except FileNotFoundError as error:
                if path.exists():
                    return
                raise CheckpointError(f"{self._folder} no longer exists, so rank 0 has given up.") from error
            # In this order: the file may be the last act of the process.
            if not self._is_alive(rank) and not path.exists():
                raise CheckpointError(f"{path} did not appear, and the process of rank {rank} has ended.")
            if nbytes != seen or not self._is_leaving.is_set():
                seen, since_s = nbytes, time.monotonic()
            elif time.monotonic() - since_s > PATIENCE_S:
                raise CheckpointError(f"{path} did not appear, and nothing was written for {PATIENCE_S:g} s.")

    def _leave(self) -> None:
        """Wait for the outcome at exit; a failure ends the process with status 1."""
        if os.getpid() != self._process:
            return
        self._is_leaving.set()
        self._thread.join()
        if self._rank and not self.failure:
            try:
                self._await(self.path, 0)
            except CheckpointError as error:
                self.failure = f"waiting for rank 0 failed on rank {self._rank}: {error} {ADVICE}"
        if self.failure:
            self.remove()
            end_with(CheckpointError(f"The save of {self.path}: {self.failure}"))


class _OtherRankFailed(Exception):
    """Another rank's failure, with its text."""


class _GivenUp(Exception):
    """The ranks know of a failure already."""
