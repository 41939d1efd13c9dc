"""`zeroshard outer --serve`: the mailbox, a small process in which islands leave changes for each other.

Owns the sockets and the threads. What is asked is decided in `mailbox_book.py`; frames are those of `mailbox_wire.py`.
It imports numpy, and no torch.

Note: threads
    A thread accepts, one belongs to each connection, and one adds changes to the anchors and looks who is gone. Peers
    that have not authenticated themselves are few, have a deadline, and the oldest of them makes room for the next one,
    so that strangers do not keep islands out.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, final

from zeroshard.outer.mailbox_book import Book
from zeroshard.outer.mailbox_codec import check_bits
from zeroshard.outer.mailbox_facts import Facts, Member
from zeroshard.outer.mailbox_files import PartReader, PartWriter, Shelf
from zeroshard.outer.mailbox_fold import fold
from zeroshard.outer.mailbox_order import DTYPES, check_name
from zeroshard.outer.mailbox_wire import Line, MailboxError, PeerError, Refused, accept_peer, parse_address

__all__ = ["Mailbox"]

_LOG = logging.getLogger(__name__)
_MOST_STRANGERS: Final = 16
_MOST_LINES: Final = 1024
_MOST_NUMEL: Final = 1 << 44
_MOST_VERSION: Final = 1 << 52
_MOST_RANKS: Final = 1 << 16
_MOST_FACTS: Final = 64
_LONGEST_WAIT_S: Final = 5.0

Header = dict[str, Any]


@final
class Mailbox:
    """A mailbox that serves in threads of this process, inside the context.

    Args:
        address: "host:port"; port 0 takes a free one.
        secret: known to the islands, too; see `read_secret`.
        folder: for anchors and changes; a mailbox that was killed continues from it.
        gone_s: after so many seconds of silence an island is gone, and nobody waits for it.
        most_bytes: of changes on the disk.
        handshake_s: for a peer to authenticate itself.
        frame_s: for one message to travel.

    Raises:
        ValueError: on entry: another process has the folder, or the address is none.
        OSError: on entry: the address cannot be used.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from zeroshard.outer.serve import Mailbox
    >>> with tempfile.TemporaryDirectory() as folder, Mailbox("127.0.0.1:0", b"0" * 16, Path(folder)) as mailbox:
    ...     assert mailbox.address.startswith("127.0.0.1:")
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        folder: Path,
        *,
        gone_s: float = 10.0,
        most_bytes: int = 1 << 40,
        handshake_s: float = 5.0,
        frame_s: float = 60.0,
    ) -> None:
        self._host, self._port = parse_address(address)
        self._secret, self._folder = secret, folder
        self._gone_s, self._most_bytes = gone_s, most_bytes
        self._handshake_s, self._frame_s = handshake_s, frame_s
        self._strangers: list[socket.socket] = []
        self._lines: set[socket.socket] = set()
        self._lock, self._folding, self._is_over = threading.Lock(), threading.Lock(), threading.Event()
        self._problem: Exception | None = None

    def __enter__(self) -> Self:
        shelf = Shelf(self._folder)
        try:
            self.book = Book(shelf, gone_s=self._gone_s, most_bytes=self._most_bytes)
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._socket = socket.create_server((self._host, self._port), family=family, backlog=128)
        except BaseException:
            shelf.close()
            raise
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where it listens."""
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._accept, self._keep)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for connection in (*self._strangers, *self._lines):
                _shut(connection)
        with self.book.changed:
            self.book.count += 1
            self.book.changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.book.shelf.close()

    def wait(self) -> None:
        """Serve until the context ends.

        Raises:
            MailboxError: a thread of the mailbox has failed.
        """
        self._is_over.wait()
        self.check()

    def check(self) -> None:
        """Raise MailboxError if the thread that watches islands has failed: then nobody is ever gone."""
        if (error := self._problem) is not None:
            raise MailboxError(
                f"the mailbox cannot go on: {type(error).__name__}: {error}. Start it again with its folder."
            ) from error

    # -- threads ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if not self._is_over.wait(0.05):  # out of descriptors, until peers have left
                    _LOG.debug("accept: %s", error)
                continue
            with self._lock:
                self._strangers.append(connection)
                oldest = self._strangers.pop(0) if len(self._strangers) > _MOST_STRANGERS else None
                is_full = len(self._lines) >= _MOST_LINES
            if oldest is not None or is_full:
                _shut(connection if is_full else oldest)
            if is_full:
                with self._lock:
                    self._strangers.remove(connection)
                continue
            threading.Thread(target=self._meet, args=(connection, peer[0]), daemon=True).start()

    def _meet(self, connection: socket.socket, host: str) -> None:
        """Authenticate a peer, and serve it until its connection ends."""
        try:
            line = accept_peer(connection, self._secret, self._handshake_s)
        except PeerError as error:
            _LOG.warning("refused a peer at %s: %s", host, error)
            return
        else:
            with self._lock:
                self._lines.add(connection)
                if connection in self._strangers:
                    self._strangers.remove(connection)
            _Service(self, line, host).run()
        finally:
            with self._lock:
                self._lines.discard(connection)
                if connection in self._strangers:
                    self._strangers.remove(connection)
            _shut(connection)

    def _keep(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._problem = error
            self._is_over.set()

    def _watch(self) -> None:
        """Add changes that all have taken in to the anchors, and look who is gone."""
        while not self._is_over.is_set():
            try:
                for name in self.book.expire():
                    _LOG.warning(
                        "island '%s' is gone: no word from it for %g s; nobody waits for it", name, self._gone_s
                    )
                with self._folding:
                    while not self._is_over.is_set() and (due := self.book.plan_fold()) is not None:
                        fold(self.book, due)
            except (OSError, MailboxError) as error:
                _LOG.error("changes are not added to the anchors: %s", error)
                self._is_over.wait(1.0)
            with self.book.changed:
                if not self._is_over.is_set():
                    self.book.changed.wait(min(self._gone_s / 4, 0.5))

    def join(self, *arguments: Any, **options: Any) -> Header:
        """Let an island join while the anchors do not change."""
        with self._folding:
            return self.book.join(*arguments, **options)

    @property
    def frame_s(self) -> float:
        """Seconds that one message may take."""
        return self._frame_s

    @property
    def idle_s(self) -> float:
        """Seconds after which a silent connection is closed."""
        return max(60.0, 2 * self._gone_s)


@final
class _Service:
    """One authenticated connection."""

    def __init__(self, mailbox: Mailbox, line: Line, host: str) -> None:
        self._mailbox, self._book, self._line, self._host = mailbox, mailbox.book, line, host
        self._member: Member | None = None
        self._name = self._launch = ""
        self._rank = -1

    def run(self) -> None:
        """Answer requests until the connection ends."""
        try:
            while True:
                header, body = self._line.receive(limit_s=self._mailbox.frame_s, idle_s=self._mailbox.idle_s)
                self._answer(header, body)
        except PeerError as error:
            who = f"island '{self._name}', rank {self._rank}, at {self._host}" if self._name else self._host
            _LOG.info("connection of %s: %s", who, error)
        finally:
            if self._member is not None:
                self._book.attach(self._member, -1)

    def _answer(self, header: Header, body: memoryview) -> None:
        what = header.get("do")
        action = _ACTIONS.get(what) if isinstance(what, str) else None
        if action is None:
            raise PeerError(f"it asks for {str(what)[:40]!r}, which the mailbox does not do.")
        try:
            reply = action(self, header)
        except Refused as error:
            level = logging.INFO if error.kind in ("gone", "wait") else logging.WARNING
            _LOG.log(level, "refused island '%s', rank %d, at %s: %s", self._name, self._rank, self._host, error)
            reply = {"refused": error.kind, "text": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            text = f"a request {what!r} is not right: {error}"
            _LOG.warning("refused island '%s', rank %d, at %s: %s", self._name, self._rank, self._host, text)
            reply = {"refused": "wrong", "text": text}
        except OSError as error:
            _LOG.error("the disk refuses: %s", error)
            reply = {"refused": "full", "text": f"the mailbox cannot write ({error.strerror or error})."}
        except MailboxError as error:
            if isinstance(error, PeerError):
                raise
            _LOG.error("%s", error)
            reply = {"refused": "damaged", "text": str(error)}
        self._line.send(reply, limit_s=self._mailbox.frame_s)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _join(self, header: Header) -> Header:
        name, launch, rank = self._about(header)
        facts, numel = _facts_of(header), _number(header, "numel", _MOST_NUMEL)
        training = _short(header.get("training", ""), "training")
        reply = self._mailbox.join(name, launch, rank, numel, facts, training, anew=header.get("anew") is True)
        self._attach(self._book.hello(name, launch, rank, None), rank)
        _LOG.info("island '%s', rank %d, joined behind version %d", name, rank, reply["since"])
        return reply

    def _hello(self, header: Header) -> Header:
        name, launch, rank = self._about(header)
        self._attach(self._book.hello(name, launch, rank, _versions_of(header)), rank)
        return {}

    def _about(self, header: Header) -> tuple[str, str, int]:
        launch = _short(header["launch"], "launch")
        return check_name(header["island"]), launch, _number(header, "rank", _MOST_RANKS)

    def _attach(self, member: Member, rank: int) -> None:
        if self._member is not None:
            self._book.attach(self._member, -1)
        self._member, self._name, self._launch, self._rank = member, member.name, member.launch, rank
        self._book.attach(member, 1)

    def _put(self, header: Header) -> Header:
        self._check()
        version = _number(header, "version", _MOST_VERSION)
        writer = self._book.begin(self._name, self._launch, self._rank, version)
        if writer is None:
            return {"has": True}
        try:
            self._fill(writer)
            self._book.commit(self._name, self._launch, self._rank, version, writer)
        finally:
            writer.close()
            self._book.end(self._rank)
        return {"version": version}

    def _put_anchors(self, header: Header) -> Header:
        self._check()
        writer = self._book.begin_anchors(self._name, self._launch, self._rank)
        try:
            self._fill(writer)
            self._book.commit_anchors(self._name, self._launch, self._rank, writer)
        finally:
            writer.close()
        return {}

    def _fill(self, writer: PartWriter) -> None:
        """Ask for pieces, and write them. After a piece that is refused the others are read and dropped."""
        limit_s, error = self._mailbox.frame_s, None
        self._line.send({"send": True}, limit_s=limit_s)
        while True:
            header, piece = self._line.receive(limit_s=limit_s)
            if header.get("do") != "piece":
                break
            try:
                if error is None:
                    writer.add(piece)
            except (ValueError, OSError) as caught:
                error = caught
            self._book.attach(self._attached(), 0)
        if header.get("do") != "end":
            raise PeerError("a change was not finished.")
        if error is not None:
            raise error
        writer.flush()

    def _take_change(self, header: Header) -> Header:
        self._check()
        version = _number(header, "version", _MOST_VERSION)
        self._stream(self._book.open_change(version, check_name(header["of"]), self._rank))
        return {"end": True}

    def _take_anchors(self, header: Header) -> Header:
        self._check()
        number, versions, reader = self._book.open_anchors(self._rank)
        self._stream(reader)
        return {"end": True, "number": number, "versions": versions}

    def _stream(self, reader: PartReader) -> None:
        try:
            for piece in reader:
                self._line.send({"piece": True}, piece, limit_s=self._mailbox.frame_s)
                self._book.attach(self._attached(), 0)
        finally:
            reader.close()

    def _index(self, header: Header) -> Header:
        self._check()
        wait_s = header["wait_s"]
        if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise ValueError(f"wait_s is not in 0 to {_LONGEST_WAIT_S:g}")
        return self._book.index(self._name, self._launch, _number(header, "seen", _MOST_VERSION), wait_s)

    def _taken(self, header: Header) -> Header:
        self._check()
        self._book.take(self._name, self._launch, self._rank, _versions_of(header))
        return {}

    def _done(self, header: Header) -> Header:
        self._check()
        self._book.leave(self._name, self._launch, takes=True)
        return {}

    def _leave(self, header: Header) -> Header:
        self._check()
        self._book.leave(self._name, self._launch, takes=False)
        _LOG.info("island '%s' has left", self._name)
        return {}

    def _check(self) -> None:
        if self._member is None:
            raise Refused("gone", "this connection belongs to no island yet.")

    def _attached(self) -> Member:
        assert self._member is not None
        return self._member


_ACTIONS: Final[Mapping[str, Callable[[_Service, Header], Header]]] = MappingProxyType(
    {
        "join": _Service._join,
        "hello": _Service._hello,
        "put": _Service._put,
        "put anchors": _Service._put_anchors,
        "take": _Service._take_change,
        "take anchors": _Service._take_anchors,
        "index": _Service._index,
        "taken": _Service._taken,
        "done": _Service._done,
        "leave": _Service._leave,
    }
)


def _number(header: Header, key: str, most: int) -> int:
    value = header[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{key} is no number from 0 to {most}")
    return value


def _short(text: object, what: str) -> str:
    if not isinstance(text, str) or len(text) > 80:
        raise ValueError(f"{what} is no short text")
    return text


def _versions_of(header: Header) -> dict[str, int]:
    taken = header["taken"]
    if not isinstance(taken, dict):
        raise ValueError("taken is no object")
    return {check_name(name): _number(taken, name, _MOST_VERSION) for name in taken}


def _facts_of(header: Header) -> Facts:
    others = header["facts"]
    if not isinstance(others, dict) or len(others) > _MOST_FACTS:
        raise ValueError("facts is no small object")
    for key, value in others.items():
        if len(key) > 80 or not (value is None or isinstance(value, (str, int, float))) or len(str(value)) > 500:
            raise ValueError(f"the fact {key[:80]!r} is no short value")
    if header["dtype"] not in DTYPES:
        raise ValueError(f"dtype is none of {', '.join(DTYPES)}")
    staleness = None if header["staleness"] is None else _number(header, "staleness", _MOST_VERSION)
    islands, ranks = _number(header, "islands", 1024), _number(header, "ranks", _MOST_RANKS)
    if not islands or not ranks:
        raise ValueError("islands and ranks are at least 1")
    return Facts(islands, ranks, staleness, check_bits(header["bits"]), header["dtype"], dict(others))


def _shut(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
