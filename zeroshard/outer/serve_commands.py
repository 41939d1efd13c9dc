"""`zeroshard outer`: the mailbox of islands, and the replay of an island's log.

Owns the arguments. It prints through functions of `cli.py`, and imports typer and the mailbox only when used, which
works without torch.
"""

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from zeroshard.table.sizes import GIB

if TYPE_CHECKING:
    import typer

    from zeroshard.outer.serve import Mailbox

__all__ = ["add_commands"]


def add_commands(app: "typer.Typer", show: Callable[[str], None], fail: Callable[[str | Exception], None]) -> None:
    """Add `outer` to the command line.

    Args:
        show: prints a line, at once.
        fail: exits with a message about an error of the user.
    """
    import typer

    def outer(
        serve: Annotated[bool, typer.Option("--serve", help="Serve the mailbox of islands, until SIGTERM.")] = False,
        address: Annotated[str, typer.Option(help="Where it listens: host:port; port 0 takes a free one.")] = "",
        secret_file: Annotated[Path | None, typer.Option(help="File with the secret that islands have, too.")] = None,
        folder: Annotated[Path | None, typer.Option(help="For anchors and changes; an existing one continues.")] = None,
        gone: Annotated[float, typer.Option(help="Seconds of silence after which nobody waits for an island.")] = 10.0,
        most_gib: Annotated[float, typer.Option(help="GiB of changes on the disk; more are refused.")] = 100.0,
        log: Annotated[
            Path | None, typer.Option("--replay", help="Log of an island: compute its anchors again.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="File for the anchors, of raw values, with --replay.")] = None,
    ) -> None:
        """Serve the mailbox of islands that train without a barrier, or replay an island's log (docs/mailbox.md)."""
        from zeroshard.outer.mailbox_wire import MailboxError, read_secret
        from zeroshard.outer.serve import Mailbox

        try:
            if serve == (log is not None):
                raise ValueError(
                    "outer takes either --serve, with --address, --secret-file and --folder, or --replay LOG."
                )
            if log is not None:
                _replay(log, out, show)
                return
            if not address or secret_file is None or folder is None:
                raise ValueError("--serve needs --address host:port, --secret-file FILE and --folder FOLDER.")
            if not gone > 0 or not most_gib > 0:
                raise ValueError("--gone and --most-gib must be above 0.")
            most_bytes = int(most_gib * GIB)
            _serve(Mailbox(address, read_secret(secret_file), folder, gone_s=gone, most_bytes=most_bytes), show)
        except (ValueError, OSError, MailboxError) as error:
            fail(error)

    app.command()(outer)


def _serve(mailbox: "Mailbox", show: Callable[[str], None]) -> None:
    """Serve until a signal asks for the end. Whatever was acknowledged is on the disk already."""
    ends = signal.SIGTERM, signal.SIGINT
    # Waited for, not handled: a handler cannot safely set an event for which its own thread is about to wait. Threads
    # that begin later have this mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    handler = _Shown(show)
    logger = logging.getLogger("zeroshard.outer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with mailbox:
        show(f"listening on {mailbox.address}")
        while signal.sigtimedwait(ends, 1.0) is None:
            mailbox.check()
    show("ended")


def _replay(log: Path, out: Path | None, show: Callable[[str], None]) -> None:
    from zeroshard.outer.island_log import replay
    from zeroshard.outer.island_source import logs_below

    folders = list(logs_below(log))
    if not folders:
        raise ValueError(f"--replay: {log} has no log.jsonl, and no folder in it has.")
    if out is not None and len(folders) > 1:
        raise ValueError(f"--out takes one rank's anchors; {log} has {len(folders)} logs.")
    for folder in folders:
        found = replay(folder)
        show(
            f"{folder.name}: {found.exchanges} exchanges took in {found.changes} changes; the anchors are those of the "
            f"run, bit for bit: {found.anchors.size:,} elements, CRC-32 {found.crc32:08x}"
        )
        if out is not None:
            found.anchors.tofile(out)


class _Shown(logging.Handler):
    """Shows log records as lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._show(f"{record.levelname.lower()}: {record.getMessage()}")
