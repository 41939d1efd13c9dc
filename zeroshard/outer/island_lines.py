"""The connections of one rank to the mailbox, opened again when they end, and the transfer of whole arrays over them.

Owns requests and replies. It must not know when something is put or taken (`island_post.py`).
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np

from zeroshard.outer.mailbox_files import pieces_of
from zeroshard.outer.mailbox_wire import Line, MailboxError, PeerError, Refused, answer_challenge, parse_address

__all__ = ["Lines"]

_CONNECT_S: Final = 10.0
_FRAME_S: Final = 60.0


@final
class Lines:
    """Connections, one for each use: a thread that puts does not wait for one that brings.

    Args:
        address: "host:port" of the mailbox.
        island: its name.
        hello: returns what the mailbox is told first on a connection other than the one that joins.
        hear: is called for each piece that arrives.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        island: str,
        rank: int,
        hello: Callable[[], Mapping[str, Any]],
        hear: Callable[[], None],
    ) -> None:
        self.address, self._secret, self._hello, self._hear = address, secret, hello, hear
        self._host, self._port = parse_address(address)
        self._name, self._rank = island, rank
        self._lock, self._lines = threading.Lock(), dict[str, Line]()
        self.sent_bytes = self.received_bytes = 0
        """Of changes and anchors, without frames."""

    @contextmanager
    def use(self, what: str) -> Iterator[Line]:
        """Yield the connection for a use: "join", "put" or "bring". After an error that is no refusal it is closed.

        Raises:
            Refused: the mailbox does not know this island, or has another secret.
            PeerError: the mailbox cannot be reached.
        """
        try:
            with self._lock:
                line = self._lines.get(what)
            if line is None:
                line = self._open()
                with self._lock:
                    self._lines[what] = line
                if what != "join":
                    self.ask(line, {"do": "hello", **self._hello()})
            yield line
        except Refused as error:
            if error.kind in ("gone", "secret", "damaged"):
                self.close(what)
            raise
        except PeerError:
            self.close(what)
            raise

    def _open(self) -> Line:
        try:
            connection = socket.create_connection((self._host, self._port), timeout=_CONNECT_S)
        except OSError as error:
            raise PeerError(f"{self.address} cannot be reached ({error.strerror or error}).") from error
        try:
            return answer_challenge(connection, self._secret, _CONNECT_S)
        except MailboxError as error:
            connection.close()
            if isinstance(error, Refused):
                raise Refused(error.kind, f"island '{self._name}': the mailbox at {self.address}: {error}") from None
            raise

    def close(self, what: str) -> None:
        """End a connection; a thread that waits for it gets a `PeerError`."""
        with self._lock:
            line = self._lines.pop(what, None)
        if line is not None:
            line.close()

    def hand_over(self, what: str, to: str) -> None:
        """Use a connection for something else from now on, so that the mailbox sees no gap."""
        with self._lock:
            line = self._lines.pop(what, None)
            if line is not None and to not in self._lines:
                self._lines[to], line = line, None
        if line is not None:
            line.close()

    def close_all(self) -> None:
        """End all connections."""
        for what in ("join", "put", "bring"):
            self.close(what)

    def ask(self, line: Line, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            Refused: the mailbox refuses.
        """
        line.send(header, limit_s=_FRAME_S)
        return self._reply(line)[0]

    def _reply(self, line: Line) -> tuple[dict[str, Any], memoryview]:
        header, body = line.receive(limit_s=_FRAME_S)
        if "refused" in header:
            raise Refused(str(header["refused"]), f"[island '{self._name}', rank {self._rank}] {header.get('text')}")
        return header, body

    def send(self, line: Line, header: Mapping[str, Any], message: np.ndarray, piece_bytes: int) -> None:
        """Put a part, in pieces; it is on the mailbox's disk when this returns."""
        if self.ask(line, header).get("has"):
            return
        for piece in pieces_of(message, piece_bytes):
            line.send({"do": "piece"}, piece, limit_s=_FRAME_S)
            self.sent_bytes += len(piece)
        self.ask(line, {"do": "end"})

    def receive(self, line: Line, header: Mapping[str, Any], nbytes: int) -> np.ndarray:
        """Ask for a part, and return it, (nbytes,) of bytes."""
        line.send(header, limit_s=_FRAME_S)
        message, start = np.empty(nbytes, np.uint8), 0
        data = message.data
        while True:
            reply, piece = self._reply(line)
            if "end" in reply:
                break
            if start + len(piece) > len(data):
                raise PeerError("more bytes came than a part has.")
            data[start : start + len(piece)] = piece
            start += len(piece)
            self._hear()
        self.received_bytes += start
        if start != len(data):
            raise PeerError(f"{start:,} bytes came where a part has {len(data):,}.")
        return message
