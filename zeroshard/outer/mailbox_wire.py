"""Authenticated frames between an island and the mailbox: the handshake, the limits and the deadlines.

Owns the bytes on the socket, for both sides. It must not know what a message means (`serve.py`, `island_post.py`), and
imports the standard library alone.

Note: what a peer may cost
    Before a peer has proved that it knows the secret, every message has a constant size, below 100 bytes, and the whole
    handshake has one deadline. Afterwards a frame says its length first, which is compared with `MAX_FRAME_BYTES`
    before anything is allocated. Nothing that is received is unpickled: a frame is a short JSON object and bytes.

Note: the handshake
    The secret is never sent. Each side draws a nonce of 32 bytes, and proves with an HMAC of both nonces, under a label
    of its own, that it knows the secret; a proof cannot be reflected. The island proves first. The two keys of the
    connection, one for each direction, are HMACs as well. The code of a frame covers a counter, so that a recorded
    frame is refused when it is sent again, in this connection or another.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

__all__ = [
    "Line",
    "MAX_FRAME_BYTES",
    "MAX_HEADER_BYTES",
    "MailboxError",
    "PIECE_BYTES",
    "PeerError",
    "Refused",
    "accept_peer",
    "answer_challenge",
    "parse_address",
    "read_secret",
]

PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece, in which changes and anchors travel and lie on disk; the last one is shorter."""

MAX_HEADER_BYTES: Final = 64 << 10
MAX_FRAME_BYTES: Final = 4 + MAX_HEADER_BYTES + PIECE_BYTES

_GREETING: Final = b"zeroshard-mail1\n"
_REFUSAL: Final = b"\0" * 32
_NONCE_BYTES: Final = 32
_CODE_BYTES: Final = 32
_LEAST_SECRET_BYTES: Final = 16
_MOST_SECRET_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<I")


class MailboxError(RuntimeError):
    """The mailbox cannot be reached, or did not do what was asked; the text says which."""


class PeerError(MailboxError):
    """The other end of a connection sent what no island or mailbox sends, or nothing within its deadline."""


class Refused(MailboxError):
    """The mailbox understood a request and refused it.

    Args:
        kind: "gone", "old", "full", "taken", "differs", "wait" or "wrong", for the code that asked.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port".

    Raises:
        ValueError: the text is no such address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f'address must be "host:port", such as "10.0.0.1:29400"; got {address!r}.')
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_secret(path: str | Path) -> bytes:
    """Return the secret in a file, without white space at its ends.

    Raises:
        ValueError: other users can read the file, or the secret has fewer than 16 or more than 4,096 bytes.
        OSError: the file cannot be read.
    """
    make = f"Write one with: head -c 32 /dev/urandom | base64 > {path}"
    if not Path(path).exists():
        raise FileNotFoundError(f"secret_file {path} does not exist. {make}; chmod 600 {path}")
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ValueError(f"secret_file {path}: other users can read it. Run: chmod 600 {path}")
        secret = file.read(_MOST_SECRET_BYTES + 1).strip()
    if not _LEAST_SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES:
        raise ValueError(
            f"secret_file {path}: a secret has {_LEAST_SECRET_BYTES} to {_MOST_SECRET_BYTES} bytes; this one has "
            f"{len(secret)}. {make}"
        )
    return secret


# -- the handshake ----------------------------------------------------------------------------------------------------


def accept_peer(connection: socket.socket, secret: bytes, limit_s: float) -> "Line":
    """Authenticate a peer that has connected to the mailbox, and be authenticated by it.

    Raises:
        PeerError: it does not know the secret, speaks something else, or was too slow.
    """
    deadline_s, own = time.monotonic() + limit_s, secrets.token_bytes(_NONCE_BYTES)
    _send(connection, (_GREETING + own,), deadline_s)
    reply = bytearray(len(_GREETING) + _NONCE_BYTES + _CODE_BYTES)
    _receive(connection, memoryview(reply), deadline_s, "its greeting")
    greeting, rest = bytes(reply[: len(_GREETING)]), bytes(reply[len(_GREETING) :])
    nonces, proof = own + rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
    if greeting != _GREETING:
        raise PeerError("it does not speak the mailbox's protocol.")
    if not hmac.compare_digest(proof, _code(secret, b"island", nonces)):
        _send(connection, (_REFUSAL,), deadline_s)
        raise PeerError("its secret is wrong.")
    _send(connection, (_code(secret, b"mailbox", nonces),), deadline_s)
    return Line(connection, _code(secret, b"to island", nonces), _code(secret, b"to mailbox", nonces))


def answer_challenge(connection: socket.socket, secret: bytes, limit_s: float) -> "Line":
    """Authenticate this island at the mailbox, and the mailbox here.

    Raises:
        Refused: the secrets differ.
        PeerError: the other end is no mailbox, or was too slow.
    """
    deadline_s, own = time.monotonic() + limit_s, secrets.token_bytes(_NONCE_BYTES)
    challenge = bytearray(len(_GREETING) + _NONCE_BYTES)
    _receive(connection, memoryview(challenge), deadline_s, "its greeting")
    if bytes(challenge[: len(_GREETING)]) != _GREETING:
        raise PeerError("it does not speak the mailbox's protocol.")
    nonces = bytes(challenge[len(_GREETING) :]) + own
    _send(connection, (_GREETING + own + _code(secret, b"island", nonces),), deadline_s)
    proof = bytearray(_CODE_BYTES)
    _receive(connection, memoryview(proof), deadline_s, "its proof")
    if bytes(proof) == _REFUSAL:
        raise Refused("secret", "it has another secret. Give both the same secret_file.")
    if not hmac.compare_digest(bytes(proof), _code(secret, b"mailbox", nonces)):
        raise Refused("secret", "it does not know the secret of this island, so nothing was sent to it.")
    return Line(connection, _code(secret, b"to mailbox", nonces), _code(secret, b"to island", nonces))


def _code(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + data, "sha256")


# -- frames -----------------------------------------------------------------------------------------------------------


@final
class Line:
    """A connection whose frames are authenticated, in both directions.

    Args:
        send_key: authenticates what this side sends.
        receive_key: authenticates what the other side sends.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._connection, self._keys = connection, (send_key, receive_key)
        self._sent = self._received = 0
        self._buffer = bytearray(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: Mapping[str, Any], body: bytes | memoryview = b"", *, limit_s: float) -> None:
        """Send one frame, at most `limit_s` seconds.

        Raises:
            PeerError: the deadline passed, or the connection ended.
        """
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER_BYTES or len(body) > PIECE_BYTES:
            raise ValueError(f"a frame of {len(text):,} + {len(body):,} bytes is above the protocol's limits.")
        payload = _HEADER.pack(len(text)) + text
        length = _LENGTH.pack(len(payload) + len(body))
        code = self._authenticate(self._keys[0], self._sent, length, payload, body)
        self._sent += 1
        _send(self._connection, (length + payload, body, code), time.monotonic() + limit_s)

    def receive(self, *, limit_s: float, idle_s: float | None = None) -> tuple[dict[str, Any], memoryview]:
        """Return the JSON object and the bytes of one frame; the bytes are valid until the next call.

        Args:
            limit_s: for the whole frame, from its first byte.
            idle_s: until the first byte; `limit_s` by default.

        Raises:
            PeerError: the frame is too long, not authentic or no frame, a deadline passed, or the connection ended.
        """
        first = bytearray(_LENGTH.size)
        begin_s = time.monotonic()
        view = memoryview(first)
        _receive(self._connection, view[:1], begin_s + (limit_s if idle_s is None else idle_s), "a message")
        deadline_s = time.monotonic() + limit_s
        _receive(self._connection, view[1:], deadline_s, "a whole message")
        (length,) = _LENGTH.unpack(first)
        if not _HEADER.size <= length <= MAX_FRAME_BYTES:
            raise PeerError(f"it announced a message of {length:,} bytes; one has 4 to {MAX_FRAME_BYTES:,}.")
        if len(self._buffer) < length + _CODE_BYTES:
            self._buffer = bytearray(length + _CODE_BYTES)
        frame = memoryview(self._buffer)[: length + _CODE_BYTES]
        _receive(self._connection, frame, deadline_s, "a whole message")
        payload, code = frame[:length], bytes(frame[length:])
        if not hmac.compare_digest(code, self._authenticate(self._keys[1], self._received, bytes(first), payload)):
            raise PeerError("a message is not authentic: it was changed, repeated or sent by somebody else.")
        self._received += 1
        (size,) = _HEADER.unpack_from(payload)
        if size > min(MAX_HEADER_BYTES, length - _HEADER.size):
            raise PeerError(f"the header of a message of {length:,} bytes claims {size:,} bytes.")
        return _parse(bytes(payload[_HEADER.size : _HEADER.size + size])), payload[_HEADER.size + size :]

    def close(self) -> None:
        """End the connection; a thread that waits for it gets a `PeerError`."""
        with contextlib.suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @staticmethod
    def _authenticate(key: bytes, number: int, *parts: bytes | memoryview) -> bytes:
        code = hmac.new(key, _LENGTH.pack(number), "sha256")
        for part in parts:
            code.update(part)
        return code.digest()


def _parse(text: bytes) -> dict[str, Any]:
    """Return a JSON object; its length is bounded, and so is what it may cost."""
    try:
        value = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a message is not JSON ({str(error)[:100]}).") from error
    if not isinstance(value, dict):
        raise PeerError("a message is not a JSON object.")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _send(connection: socket.socket, parts: tuple[bytes | memoryview, ...], deadline_s: float) -> None:
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                left = left[connection.send(left) :]
                if left and time.monotonic() > deadline_s:
                    raise TimeoutError
    except TimeoutError:
        raise PeerError("it did not take a message within its deadline.") from None
    except OSError as error:
        raise PeerError(f"the connection ended ({error.strerror or error}).") from error


def _receive(connection: socket.socket, target: memoryview, deadline_s: float, what: str) -> None:
    done = 0
    try:
        while done < len(target):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            count = connection.recv_into(target[done:])
            if not count:
                raise PeerError(f"the connection ended before {what} had arrived ({done} of {len(target)} bytes).")
            done += count
    except TimeoutError:
        raise PeerError(f"{what} did not arrive within its deadline ({done} of {len(target)} bytes).") from None
    except OSError as error:
        raise PeerError(f"the connection ended ({error.strerror or error}).") from error
