"""What islands and strangers must not send: each refused by name, without harm to the others."""

import dataclasses
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zeroshard.outer import island_post, mailbox_wire, serve
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_source import open_mailbox
from zeroshard.outer.mailbox_files import Shelf, read_array, write_array
from zeroshard.outer.mailbox_wire import (
    MAX_FRAME_BYTES,
    PIECE_BYTES,
    Line,
    MailboxError,
    Refused,
    answer_challenge,
    parse_address,
    read_secret,
)
from zeroshard.outer.serve import Mailbox

from .islands import SECRET, Arrays, at_once, island, mailbox, options_of, same, secret_in
from .test_mailbox_exchange import wait_for

ABOUT = {"islands": 1, "ranks": 1, "staleness": None, "bits": 32, "dtype": "<f4", "facts": {}}
LIMIT_S = 5.0


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Mailbox]:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    caplog.set_level(logging.INFO)
    with mailbox(tmp_path, handshake_s=0.5, frame_s=1.0) as one:
        yield one


def dial(box: Mailbox) -> socket.socket:
    return socket.create_connection(parse_address(box.address), timeout=LIMIT_S)


def member(box: Mailbox, numel: int = 10, name: str = "a", **about: Any) -> Line:
    """Return the connection of an island that has joined, by the protocol alone."""
    line = answer_challenge(dial(box), SECRET, LIMIT_S)
    found = ask(line, do="join", island=name, launch="x:1", rank=0, numel=numel, **(ABOUT | about))
    if found["founds"]:
        put(line, np.zeros(numel, "<f4"), do="put anchors")
    return line


def ask(line: Line, body: bytes = b"", **header: Any) -> dict[str, Any]:
    line.send(header, body, limit_s=LIMIT_S)
    return dict(line.receive(limit_s=LIMIT_S)[0])


def put(line: Line, values: np.ndarray, **header: Any) -> dict[str, Any]:
    reply = ask(line, **header)
    if "send" not in reply:
        return reply
    for start in range(0, values.nbytes, PIECE_BYTES):
        line.send({"do": "piece"}, values.tobytes()[start : start + PIECE_BYTES], limit_s=LIMIT_S)
    return ask(line, do="end")


def states(box: Mailbox) -> dict[str, str]:
    with box.book.changed:
        return {name: one.state for name, one in box.book.members.items()}


def is_over(connection: socket.socket) -> bool:
    """Tell whether the mailbox has ended a connection."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def still_serves(box: Mailbox) -> bool:
    """Tell whether an island gets what it asks for."""
    line = member(box)
    version = ask(line, do="index", seen=0, wait_s=0)["islands"]["a"]
    due = max([version["since"], version.get("base", 0), *version["versions"]]) + 1
    return put(line, np.ones(10, "<f4"), do="put", version=due) == {"version": due}


# -- strangers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 200, b"\xff" * 80, b"\x80\x04\x95cposix\nsystem\n(S'true'\ntR."]
)
def test_garbage_ends_the_connection(garbage: bytes, box: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    connection = dial(box)
    connection.sendall(garbage)
    assert is_over(connection)
    assert still_serves(box)
    assert "refused a peer at 127.0.0.1" in caplog.text


def test_a_wrong_secret_is_refused_on_both_sides(
    box: Mailbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Refused, match="has another secret"):
        answer_challenge(dial(box), SECRET + b"?", LIMIT_S)
    assert still_serves(box)
    assert "refused a peer at 127.0.0.1: its secret is wrong" in caplog.text
    asked = options_of(box, tmp_path, "a")
    other = tmp_path / "other"
    other.write_bytes(b"b" * 20)
    other.chmod(0o600)
    values = Arrays(np.zeros(3, "<f4"))
    with pytest.raises(MailboxError, match=r"island 'a': the mailbox at 127.* has another secret"):
        open_mailbox(dataclasses.replace(asked, secret_file=other), values).enter(values.values)
    assert still_serves(box)


def test_a_false_mailbox_gets_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> bytes:
            connection, _ = server.accept()
            connection.sendall(b"zeroshard-mail1\n" + b"n" * 32)
            got = connection.recv(1000)
            connection.sendall(b"p" * 32)
            return got

        def call() -> None:
            with pytest.raises(Refused, match="does not know the secret"):
                answer_challenge(socket.create_connection(server.getsockname()), SECRET, LIMIT_S)

        got, _ = at_once(pretend, call)
    assert len(got) == 80
    assert SECRET not in got


def test_a_proof_cannot_be_reflected(box: Mailbox) -> None:
    """What the mailbox says to one peer does not open the mailbox for another."""
    connection = dial(box)
    greeting = connection.recv(48)
    connection.sendall(greeting[:16] + greeting[16:] + b"\0" * 32)
    assert connection.recv(100) == b"\0" * 32
    assert is_over(connection)


def test_a_peer_that_says_nothing_is_let_go(box: Mailbox) -> None:
    begun_s, connection = time.monotonic(), dial(box)
    assert is_over(connection)
    assert time.monotonic() - begun_s < 2.0


def test_strangers_do_not_keep_islands_out(box: Mailbox) -> None:
    waiting = [dial(box) for _ in range(60)]
    assert still_serves(box)
    assert len(box._strangers) <= serve._MOST_STRANGERS
    assert all(is_over(connection) for connection in waiting)


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 3, MAX_FRAME_BYTES + 1, 2**40, 2**63, 2**64 - 1])
def test_a_length_beyond_the_limit_is_not_allocated(
    length: int, box: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    line = member(box)
    line._connection.sendall(struct.pack("<Q", length))
    assert is_over(line._connection)
    assert f"announced a message of {length:,} bytes" in caplog.text
    assert still_serves(box)


def test_half_a_message_ends_at_its_deadline(box: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    line, begun_s = member(box), time.monotonic()
    line._connection.sendall(struct.pack("<Q", 1000) + b"x" * 500)
    assert is_over(line._connection)
    assert time.monotonic() - begun_s < 3.0
    assert "a whole message did not arrive within its deadline (500 of 1032 bytes)" in caplog.text
    other = member(box)
    other._connection.sendall(struct.pack("<Q", 1000) + b"x" * 500)
    other.close()
    assert still_serves(box)


def test_a_changed_or_repeated_frame_is_refused(
    box: Mailbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    send = mailbox_wire._send

    def record(connection: socket.socket, parts: Any, deadline_s: float) -> None:
        sent.append(b"".join(bytes(part) for part in parts))
        send(connection, parts, deadline_s)

    for changed in (False, True):
        line = member(box)
        with monkeypatch.context() as patch:
            patch.setattr(mailbox_wire, "_send", record)
            line.send({"do": "index", "seen": 0, "wait_s": 0}, limit_s=LIMIT_S)
        frame = bytearray(next(one for one in sent if b'"index"' in one))
        sent.clear()
        line.receive(limit_s=LIMIT_S)
        frame[20] ^= changed
        line._connection.sendall(frame)
        assert is_over(line._connection)
    assert caplog.text.count("a message is not authentic") == 2
    assert still_serves(box)


@pytest.mark.parametrize("text", [b"[" * 60_000, b"{", b"\xff", b"[]", b'{"do":NaN}', b'{"do":["put"]}', b"9" * 60_000])
def test_what_is_no_request_ends_the_connection(text: bytes, box: Mailbox) -> None:
    line = member(box)
    payload = struct.pack("<I", len(text)) + text
    length = struct.pack("<Q", len(payload))
    code = line._authenticate(line._keys[0], line._sent, length, payload)
    line._connection.sendall(length + payload + code)
    assert is_over(line._connection)
    assert still_serves(box)


def test_a_header_longer_than_its_message_is_refused(box: Mailbox) -> None:
    line = member(box)
    payload = struct.pack("<I", 2**32 - 1) + b"{}"
    length = struct.pack("<Q", len(payload))
    line._connection.sendall(length + payload + line._authenticate(line._keys[0], line._sent, length, payload))
    assert is_over(line._connection)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_an_old_version_is_refused(box: Mailbox) -> None:
    line = member(box, staleness=3, islands=2)
    for version in (1, 2):
        assert put(line, np.ones(10, "<f4"), do="put", version=version) == {"version": version}
    for version, what in ((1, "is old"), (2, "is old"), (0, "is old"), (4, "comes too early"), (2**50, "comes too")):
        reply = put(line, np.full(10, 5, "<f4"), do="put", version=version)
        assert reply["refused"] == "old"
        assert what in reply["text"]
        assert "3 is next. It was not taken." in reply["text"]
    assert put(line, np.ones(10, "<f4"), do="put", version=3) == {"version": 3}
    values = read_array(box.book.shelf.change(2, "a", 0), 10, "<f4")
    assert same(values, np.ones(10, "<f4"))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"do": "put"}, "'version'"),
        ({"do": "put", "version": -1}, "version is no number"),
        ({"do": "put", "version": True}, "version is no number"),
        ({"do": "put", "version": 2**60}, "version is no number"),
        ({"do": "take", "version": 1, "of": "../../secret"}, "island must be a name"),
        ({"do": "take", "version": 1, "of": "b"}, "there is no version 1 of island 'b'"),
        ({"do": "taken", "taken": {"../a": 1}}, "island must be a name"),
        ({"do": "taken", "taken": [1]}, "taken is no object"),
        ({"do": "taken", "taken": {"a": "1"}}, "a is no number"),
        ({"do": "index", "seen": 0, "wait_s": 1e9}, "wait_s is not in 0 to 5"),
        ({"do": "index", "seen": 0, "wait_s": "1"}, "wait_s is not in 0 to 5"),
        ({"do": "put anchors"}, "first anchors from another island"),
        ({"do": "hello", "island": "a", "launch": "y", "rank": 0, "taken": {}}, "another launch of island 'a'"),
        ({"do": "hello", "island": "c", "launch": "y", "rank": 0, "taken": {}}, "it is not known"),
        ({"do": "join", "island": "a/b", "launch": "y", "rank": 0, "numel": 1}, "island must be a name"),
        ({"do": "join", "island": "b", "launch": "y" * 99, "rank": 0, "numel": 1}, "launch is no short text"),
        ({"do": "join", "island": "b", "launch": "y", "rank": 0, "numel": 2**60} | ABOUT, "numel is no number"),
        ({"do": "join", "island": "b", "launch": "y", "rank": 7, "numel": 10} | ABOUT, "has no rank 7 of 1"),
        (
            {"do": "join", "island": "b", "launch": "y", "rank": 0, "numel": 1} | ABOUT | {"dtype": "|O"},
            "dtype is none",
        ),
        (
            {"do": "join", "island": "b", "launch": "y", "rank": 0, "numel": 1} | ABOUT | {"facts": 5},
            "facts is no small",
        ),
        (
            {"do": "join", "island": "b", "launch": "y", "rank": 0, "numel": 1} | ABOUT | {"facts": {"a": {}}},
            "the fact 'a' is no short value",
        ),
    ],
)
def test_a_wrong_request_is_refused_by_name(header: dict[str, Any], text: str, box: Mailbox) -> None:
    line = member(box)
    reply = ask(line, **header)
    assert "refused" in reply
    assert text in reply["text"]
    assert still_serves(box)


def test_requests_before_joining_are_refused(box: Mailbox) -> None:
    line = answer_challenge(dial(box), SECRET, LIMIT_S)
    for header in ({"do": "put", "version": 1}, {"do": "take anchors"}, {"do": "leave"}):
        assert ask(line, **header)["text"] == "this connection belongs to no island yet."


@pytest.mark.parametrize("values", [np.ones(9, "<f4"), np.ones(11, "<f4"), np.full(10, np.nan, "<f4")])
def test_a_change_of_another_size_or_not_finite_is_refused(values: np.ndarray, box: Mailbox) -> None:
    line = member(box)
    reply = put(line, values, do="put", version=1)
    assert reply["refused"] == "wrong"
    assert "bytes came where" in reply["text"] or "not finite" in reply["text"]
    assert not list(box.book.shelf.changes()) or box.book.next_version(box.book.members["a"]) == 1
    assert still_serves(box)


def test_a_full_mailbox_refuses_and_islands_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    with mailbox(tmp_path, most_bytes=1000) as box:
        values = [np.zeros(100, "<f4"), np.zeros(100, "<f4")]
        join = [partial(island, box, tmp_path, n, v, staleness=None) for n, v in zip("ab", values, strict=True)]
        one, other = at_once(*join)
        for _ in range(40):
            values[0] += 2
            one.exchange()
            time.sleep(0.01)
        assert "the mailbox is full: 808 bytes of changes" in caplog.text
        assert "island 'a' puts version 3 later, and goes on: " in caplog.text
        at_once(partial(one.finish, others=True), partial(other.finish, others=True))
    assert same(values[0], np.full(100, 40.0, "<f4"))
    assert same(values[1], values[0])


def test_what_is_taken_in_makes_room_for_what_is_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    with mailbox(tmp_path, most_bytes=1000) as box:
        values = [np.zeros(100, "<f4"), np.zeros(100, "<f4")]
        join = [partial(island, box, tmp_path, n, v, staleness=None) for n, v in zip("ab", values, strict=True)]
        one, other = at_once(*join)
        wait_for(lambda: one.exchange() or box.book._last("a") == 2)
        wait_for(lambda: other._source._post.look().here.get("a") == 2)
        for each in (other, one):
            each.exchange()  # the full mailbox refuses its change, and it takes in the changes of others
        wait_for(lambda: box.book.base.get("a") == 2)
        wait_for(lambda: box.book._last("b") == 1)
        one.close()
        other.close()


def test_islands_that_wait_have_room_for_the_slowest_or_do_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(island_post, "_MOST_PAUSE_S", 0.1)
    values = {name: np.zeros(100, "<f4") for name in "ab"}

    def run(name: str) -> None:
        one = island(box, tmp_path, name, values[name], staleness=1)
        for step in range(8):
            time.sleep(0.1 if (name == "a") == (step < 4) else 0)  # one is slow, then the other
            values[name] += 2
            one.after_step()
        one.finish(others=True)

    with mailbox(tmp_path, most_bytes=5 * 404 - 1) as box:
        text = "at staleness 1: the mailbox may have to hold 5 changes, 2,020 bytes, and holds 2,019. Start it with "
        with pytest.raises(MailboxError, match=text):
            run("a")
    with mailbox(tmp_path, most_bytes=5 * 404) as box:
        at_once(*(partial(run, name) for name in "ab"), limit_s=20.0)
    assert same(values["a"], np.full(100, 16.0, "<f4"))
    assert same(values["b"], values["a"])


def test_a_disk_that_refuses_is_told_to_the_island(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    line = member(box)
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        reply = put(line, np.ones(10, "<f4"), do="put", version=1)
    assert reply == {"refused": "full", "text": "the mailbox cannot write (No space left on device)."}
    assert still_serves(box)


def test_a_disk_that_refuses_the_state_adds_a_change_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    write, refused = Shelf.write_state, []

    def refuse(shelf: Shelf, state: dict[str, Any]) -> None:
        if state["base"] and len(refused) < 2:
            refused.append(state["number"])
            raise OSError(28, "No space left on device")
        write(shelf, state)

    monkeypatch.setattr(Shelf, "write_state", refuse)
    with mailbox(tmp_path) as box:
        values = np.zeros(10, "<f4")
        one = island(box, tmp_path, "a", values, 1)
        values += 2
        one.exchange()
        wait_for(lambda: box.book.base and not box.book._parts)
        late = np.zeros(10, "<f4")
        island(box, tmp_path, "b", late, 1).close()
        one.close()
    assert "changes are not added to the anchors: [Errno 28] No space left on device" in caplog.text
    assert same(late, np.full(10, 2, "<f4"))
    assert refused == [2, 2]


def test_nobody_waits_for_who_goes_while_the_disk_is_full(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [member(box, name=name, islands=2, staleness=0) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        lines[1].close()
        wait_for(lambda: states(box)["b"] == "gone")
    assert put(lines[0], np.ones(10, "<f4"), do="put", version=1) == {"version": 1}
    ask(lines[0], do="taken", taken={"a": 1})
    wait_for(lambda: box.book.base == {"a": 1})
    assert ["b", "x:1", 0, "gone"] in box.book.shelf.read_state()["members"]
    lines[0].close()
    wait_for(lambda: states(box)["a"] == "gone")


def test_a_mailbox_that_cannot_watch_ends(tmp_path: Path) -> None:
    program = "import sys\nfrom zeroshard.outer.mailbox_book import Book\nfrom zeroshard.cli import main\n"
    program += "Book.expire = lambda self: {}['x']\nmain()"
    command = [sys.executable, "-c", program, "outer", "--serve", "--address", "127.0.0.1:0"]
    command += ["--secret-file", str(secret_in(tmp_path)), "--folder", str(tmp_path / "mailbox")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode > 0
    assert "the mailbox cannot go on: KeyError: 'x'. Start it again with its folder." in done.stderr


# -- islands ----------------------------------------------------------------------------------------------------------


def test_two_islands_of_one_name_are_refused(box: Mailbox, tmp_path: Path) -> None:
    one = island(box, tmp_path, "a", np.zeros(5, "<f4"), 1)
    with pytest.raises(MailboxError, match="an island named 'a' is in the mailbox already"):
        island(box, tmp_path, "a", np.zeros(5, "<f4"), 1, arrive_s=0.3)
    one.exchange()
    one.close()
    again = island(box, tmp_path, "a", np.zeros(5, "<f4"), 1)
    again.finish()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"every": 2}, r"island 'b' has every=2, the other islands every=1"),
        ({"staleness": 4}, r"island 'b' has staleness=4, the other islands staleness=0"),
        ({"islands": 3}, r"island 'b' has islands=3, the other islands islands=2"),
        ({"facts": {"model": "other"}}, r"island 'b' has model='other', the other islands model='gpt'"),
        ({"facts": {"model": "gpt", "seeds": 1}}, r"island 'b' has seeds=1, the other islands seeds=None"),
        ({"dtype": "<f8"}, r"island 'b' has dtype='<f8', the other islands dtype='<f4'"),
        ({"numel": 6}, r"rank 0 of island 'b' keeps 6 elements, that of the other islands 5"),
        ({"ranks": 2}, r"island 'b' has ranks=2, the other islands ranks=1"),
    ],
)
def test_an_island_that_differs_is_refused(change: dict[str, Any], text: str, box: Mailbox, tmp_path: Path) -> None:
    def join(name: str, facts: Any = None, dtype: str = "<f4", numel: int = 5, ranks: int = 1, **options: Any) -> None:
        islands = options.pop("islands", 2)
        arrays = Arrays(np.zeros(numel, dtype), 0, ranks, facts or {"model": "gpt"})
        asked = options_of(box, tmp_path, name, islands, **options)
        open_mailbox(asked, arrays).enter(arrays.values)

    join("a")
    with pytest.raises(Refused, match=text):
        join("b", **change)
    join("b")


def test_a_change_that_is_not_finite_ends_the_island_that_made_it(box: Mailbox, tmp_path: Path) -> None:
    values = np.zeros(5, "<f4")
    one = island(box, tmp_path, "a", values, 1)
    values[2] = np.inf
    with pytest.raises(MailboxError, match="island 'a': its values are not finite after step 1: nothing was put"):
        one.after_step()
    one.close()
    assert not list(box.book.shelf.changes())


def test_an_absent_mailbox_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arrays = Arrays(np.zeros(5, "<f4"))
    asked = IslandOptions("a", 1, address=address, secret_file=secret_in(tmp_path), arrive_s=0.2)
    with pytest.raises(MailboxError, match=rf"the mailbox at {address} did not let it join in 0.2 s: .*refused"):
        open_mailbox(asked, arrays).enter(arrays.values)


def test_a_join_that_waits_says_for_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.outer.island_post._QUIET_S", 0.1)
    asked = IslandOptions("a", 1, address="127.0.0.1:1", secret_file=secret_in(tmp_path), arrive_s=2.0)
    arrays = Arrays(np.zeros(5, "<f4"))
    with pytest.raises(MailboxError, match="did not let it join in 2 s"):
        open_mailbox(asked, arrays).enter(arrays.values)
    told = [one.getMessage() for one in caplog.records if "does not let it join yet" in one.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("island 'a', rank 0: the mailbox at 127.0.0.1:1") and told[0].endswith(
        "It tries for 2 s."
    )


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1; got 0"),
        ({"every": 1.5}, TypeError, "every must be a whole number"),
        ({"staleness": -1}, ValueError, "staleness must be at least 0; got -1"),
        ({"staleness": True}, TypeError, "staleness must be a whole number"),
        ({"islands": 0}, ValueError, "islands must be at least 1"),
        ({"islands": 5000}, ValueError, "islands must be at most 1,024"),
        ({"island": "a b"}, ValueError, "island must be a name of 1 to 64 letters"),
        ({"island": "a" * 65}, ValueError, "island must be a name of 1 to 64 letters"),
        ({"island": ""}, ValueError, "island must be a name of 1 to 64 letters"),
        ({"address": "nowhere"}, ValueError, "address must be"),
        ({"address": "host:99999"}, ValueError, "address must be"),
        ({"secret_file": ""}, ValueError, "secret_file= is missing"),
        ({"patience_s": 0}, ValueError, "patience_s must be above 0"),
        ({"held": 0}, ValueError, "held must be at least 1"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"island": "a", "islands": 2, "address": "h:1", "secret_file": "s"} | change
    with pytest.raises(error, match=text):
        IslandOptions(**given)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(FileNotFoundError, match=r"secret does not exist. Write one with: head -c 32"):
        read_secret(path)
    path.write_bytes(b"a" * 32)
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"other users can read it. Run: chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"a" * 32
    path.write_bytes(b"short\n")
    with pytest.raises(ValueError, match="a secret has 16 to 4096 bytes; this one has 5"):
        read_secret(path)
    path.write_bytes(b"a" * 5000)
    with pytest.raises(ValueError, match="this one has 4097"):
        read_secret(path)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_folder_has_one_mailbox(tmp_path: Path) -> None:
    with mailbox(tmp_path), pytest.raises(ValueError, match=r"is in use by the mailbox of process \d+ on "):
        mailbox(tmp_path).__enter__()


def test_a_damaged_state_is_refused(tmp_path: Path, box: Mailbox) -> None:
    member(box)
    path = tmp_path / "mailbox" / "state.json"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    box.__exit__()
    path.write_bytes(data)
    with pytest.raises(MailboxError, match=r"state\.json: is damaged"):
        mailbox(tmp_path).__enter__()
    path.write_bytes(b"[" * 100)
    with pytest.raises(MailboxError, match=r"state\.json: is damaged"):
        mailbox(tmp_path).__enter__()
    Shelf(tmp_path / "mailbox").close()  # nothing holds the folder


@pytest.mark.parametrize(
    ("what", "kept"),
    [
        ("state.json", None),
        ("state.json", -1),
        ("anchors-000002/part-00000", None),
        ("anchors-000002/part-00000", -1),
        ("changes/000000000002-a/part-00000", -1),
    ],
)
def test_a_folder_that_has_lost_a_file_is_refused(what: str, kept: int | None, tmp_path: Path, box: Mailbox) -> None:
    lines = [member(box, name=name, islands=2, staleness=3) for name in "ab"]
    for version in (1, 2):
        put(lines[0], np.ones(10, "<f4"), do="put", version=version)
    for line in lines:
        ask(line, do="taken", taken={"a": 1})
    wait_for(lambda: box.book.base == {"a": 1})
    box.__exit__()
    path = tmp_path / "mailbox" / what
    data = path.read_bytes()
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(data[:kept])
    with pytest.raises(MailboxError, match=rf"{path}: (is missing|is damaged|cannot be opened|has 43 bytes)"):
        mailbox(tmp_path).__enter__()
    path.write_bytes(data)
    with mailbox(tmp_path) as again:
        assert again.book.base == {"a": 1}
        assert list(again.book._parts) == [(2, "a")]


def test_a_damaged_change_is_not_given_away(box: Mailbox) -> None:
    line = member(box, islands=2, staleness=5)
    put(line, np.ones(10, "<f4"), do="put", version=1)
    path = box.book.shelf.change(1, "a", 0)
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    reply = ask(line, do="take", version=1, of="a")
    assert reply["refused"] == "damaged"
    assert "a piece is damaged" in reply["text"]
    path.write_bytes(data[:-1])
    assert "has 43 bytes, expected 44" in ask(line, do="take", version=1, of="a")["text"]


def test_what_is_acknowledged_was_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes before the name, and the name before the answer."""
    events: list[str] = []
    rename = os.rename

    def name(source: Path, target: Path) -> None:
        events.append(f"name {Path(target).parent.name}/{Path(target).name}")
        rename(source, target)

    def flush(descriptor: int) -> None:
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('-')[0]}")

    with mailbox(tmp_path) as box:
        line = member(box, islands=2, staleness=3)
        monkeypatch.setattr("os.rename", name)
        monkeypatch.setattr("os.fsync", flush)
        assert put(line, np.ones(10, "<f4"), do="put", version=1) == {"version": 1}
        monkeypatch.undo()
    assert events[-3:] == ["flush .part", "name 000000000001-a/part-00000", "flush 000000000001"]
    assert events[:-3] == ["flush mailbox", "flush changes"]  # new folders


def test_parts_of_any_size_come_back(tmp_path: Path) -> None:
    for numel in (0, 1, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES):
        values = np.arange(numel, dtype="<f4")
        write_array(tmp_path / "part", values)
        assert same(read_array(tmp_path / "part", numel, "<f4"), values)


def test_files_are_the_owners(box: Mailbox, tmp_path: Path) -> None:
    put(member(box, islands=2, staleness=5), np.ones(10, "<f4"), do="put", version=1)
    found = [path for path in (tmp_path / "mailbox").rglob("*") if path.name != ".lock"]
    assert len(found) > 4
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "mailbox", *found)} == {0}


@pytest.mark.rotates
def test_the_command_serves_until_it_is_asked_to_end(tmp_path: Path) -> None:
    secret = secret_in(tmp_path)
    command = [sys.executable, "-m", "zeroshard", "outer", "--serve", "--address", "127.0.0.1:0"]
    command += ["--secret-file", str(secret), "--folder", str(tmp_path / "mailbox")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    answer_challenge(socket.create_connection(parse_address(address)), SECRET, LIMIT_S).close()
    process.terminate()
    told, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert told.endswith("ended\n")
    assert SECRET.decode() not in told
    done = subprocess.run([*command[:5], "--address", "x:1"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "zeroshard: --serve needs --address host:port, --secret-file FILE and --folder FOLDER.\n"


def test_no_clock_but_a_monotonic_one_is_read() -> None:
    """A clock that jumps changes nothing."""
    for path in Path(serve.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "time.time(" not in text and "datetime" not in text, path
