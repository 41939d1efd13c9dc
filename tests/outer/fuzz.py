"""A fuzzer of what peers send to a mailbox, guided by coverage.

Owns inputs, their mutation and their judgement; `tools/fuzz.py` runs it for long, `test_mailbox_fuzz.py` for seconds.
An input is what one connection does: raw bytes, the handshake, frames with right codes and any content. Some inputs
know the secret, so that they get past it. An input is right if it costs little, raises nothing in the mailbox, loads no
pickle, opens nothing outside the folder, and leaves the values of another island as they are.
"""

import base64
import contextlib
import copy
import ctypes
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.fuzz import LIMIT_BYTES, LIMIT_S, NUMBERS, OTHERS, Counts, edges_into, memory_bytes, walk
from zeroshard.outer import serve
from zeroshard.outer.mailbox_wire import Line, MailboxError, answer_challenge, parse_address

from .islands import SECRET, mailbox

Script = list[list[Any]]
"""Actions: ["raw", base64], ["hello"], which is the handshake, ["frame", header, base64], ["wait"] for a reply."""

CODE = str(Path(serve.__file__).parent)
WORDS = ["a", "good", "good:1", "x:1", "", "../a", "a" * 65, "\ud800", "\0", "put", "piece", "end", "join", "<f4", "|O"]
GOOD_NUMEL = 100


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def seeds() -> list[Script]:
    """Return inputs that are right."""
    about = {"islands": 2, "ranks": 1, "staleness": 2, "bits": 32, "dtype": "<f4", "facts": {"model": "m"}}
    join = {"do": "join", "island": "a", "launch": "x:1", "rank": 0, "numel": GOOD_NUMEL} | about
    hello = {"do": "hello", "island": "a", "launch": "x:1", "rank": 0, "taken": {"good": 0}}
    change = text_of(np.ones(GOOD_NUMEL, "<f4").tobytes())

    def asked(*headers: dict[str, Any]) -> Script:
        return [part for header in headers for part in (["frame", header, ""], ["wait"])]

    put = [["frame", {"do": "put", "version": 1}, ""], ["wait"], ["frame", {"do": "piece"}, change]]
    return [
        [["raw", text_of(b"zeroshard-mail1\n" + b"n" * 64)]],
        [["hello"], *asked(join, {"do": "index", "seen": 0, "wait_s": 0})],
        [["hello"], *asked(join), *put, *asked({"do": "end"})],
        [["hello"], *asked(join, {"do": "take anchors"}, {"do": "take", "version": 1, "of": "good"})],
        [["hello"], *asked(join, hello, {"do": "taken", "taken": {"good": 1}}, {"do": "done"}, {"do": "leave"})],
        [["hello"], *asked(join, {"do": "put anchors"}), ["frame", {"do": "piece"}, change], *asked({"do": "end"})],
        [["hello"], ["raw", text_of(struct.pack("<Q", 2**40) + b"x" * 40)]],
    ]


class Fuzzer:
    """Makes inputs, and judges each. The same seed makes the same inputs, if their answers are the same.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.counts, self._draw, self._folder = Counts(), random.Random(seed), folder
        self._seen: set[tuple[str, int, int]] = set()
        self._trace = edges_into(self._seen, CODE)
        self._pool, self._problems = seeds(), list[str]()
        self._is_watching = self._is_answered = False
        sys.addaudithook(self._audit)
        for script in seeds():
            if problem := self.judge(script):
                raise AssertionError(f"a seed is refused: {problem}")

    def run(self, seconds: float, findings: Path | None = None) -> Counts:
        """Try inputs for so long; write those that are judged wrong, as files that `judge_file` takes."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            script = self.mutated(self._draw.choice(self._pool))
            if problem := self.judge(script):
                place = f"finding-{len(self.counts.findings)}.json"
                if findings is not None:
                    findings.mkdir(parents=True, exist_ok=True)
                    (findings / place).write_text(json.dumps(script))
                self.counts.findings.append(f"{place} (input {self.counts.inputs}): {problem}")
        return self.counts

    def judge_file(self, data: bytes) -> str:
        """Judge a finding."""
        return self.judge(json.loads(data))

    # -- judgement ----------------------------------------------------------------------------------------------------

    def judge(self, script: Script) -> str:
        """Return what is wrong with how an input is treated; nothing where it is right."""
        self.counts.inputs += 1
        self._problems.clear()
        self._is_answered = False
        with (
            self._quick_disk(),
            tempfile.TemporaryDirectory(dir=self._folder) as name,
            mailbox(Path(name), gone_s=1e6, handshake_s=1.0, frame_s=0.3) as box,
            self._good(box) as line,
        ):
            before, kept = self._values(box), len(self._seen)
            problem = self._measured(box, script)
            threading.settrace(self._trace)
            try:
                self._play(box, script)
            finally:
                threading.settrace(None)  # type: ignore[arg-type]
            problem = problem or self._after(box, line, before)
        if len(self._seen) > kept and len(json.dumps(script)) < 1 << 20:
            self._pool.append(script)
        self.counts.accepted += self._is_answered
        self.counts.edges, self.counts.kept = len(self._seen), len(self._pool)
        return problem or "; ".join(self._problems)

    def _measured(self, box: serve.Mailbox, script: Script) -> str:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, begin_s = memory_bytes("VmRSS"), time.process_time()
        self._play(box, script)
        seconds, nbytes = time.process_time() - begin_s, memory_bytes("VmHWM") - before
        self.counts.slowest_s = max(self.counts.slowest_s, seconds)
        self.counts.largest_bytes = max(self.counts.largest_bytes, nbytes)
        if seconds > LIMIT_S:
            return f"took {seconds:.1f} s of the processor"
        return f"took {nbytes / 2**20:.0f} MiB" if nbytes > LIMIT_BYTES else ""

    @contextlib.contextmanager
    def _good(self, box: serve.Mailbox) -> Iterator[Line]:
        """Yield the connection of an island that has put something, and is right."""
        line = answer_challenge(socket.create_connection(parse_address(box.address)), SECRET, 5.0)
        header = {"do": "join", "island": "good", "launch": "hidden:1", "rank": 0, "numel": GOOD_NUMEL}
        about = {"islands": 2, "ranks": 1, "staleness": 2, "bits": 32, "dtype": "<f4", "facts": {"model": "m"}}
        values = np.arange(GOOD_NUMEL, dtype="<f4").tobytes()
        for one, body in (
            (header | about, b""),
            ({"do": "put anchors"}, b""),
            ({"do": "piece"}, values),
            ({"do": "end"}, b""),
            ({"do": "put", "version": 1}, b""),
            ({"do": "piece"}, values),
            ({"do": "end"}, b""),
        ):
            line.send(one, body, limit_s=5.0)
            if one["do"] != "piece":
                assert "refused" not in line.receive(limit_s=5.0)[0]
        hook, threading.excepthook = threading.excepthook, self._note
        self._is_watching = True
        try:
            yield line
        finally:
            self._is_watching, threading.excepthook = False, hook
            line.close()

    def _values(self, box: serve.Mailbox) -> list[bytes]:
        return [box.book.shelf.change(1, "good", 0).read_bytes(), box.book.shelf.anchors(1, 0).read_bytes()]

    def _after(self, box: serve.Mailbox, line: Line, before: list[bytes]) -> str:
        """Say what an input has done to another island."""
        try:
            line.send({"do": "index", "seen": 0, "wait_s": 0}, limit_s=2.0)
            good = line.receive(limit_s=2.0)[0]["islands"]["good"]
            if good != {"state": "active", "since": 0, "versions": [1]} or self._values(box) != before:
                return f"it changed another island: {good}"
        except (MailboxError, OSError, KeyError) as error:
            return f"another island is not served: {error}"
        return ""

    def _play(self, box: serve.Mailbox, script: Script) -> None:
        """Do what an input says, until the mailbox ends the connection."""
        connection = socket.create_connection(parse_address(box.address), timeout=2.0)
        line = None
        try:
            for action in script:
                if action[0] == "hello" and line is None:
                    line = answer_challenge(connection, SECRET, 1.0)
                elif action[0] == "frame" and line is not None:
                    self._send(line, action[1], base64.b64decode(action[2]))
                elif action[0] == "wait" and line is not None:
                    self._is_answered |= "refused" not in line.receive(limit_s=0.1)[0]
                elif action[0] == "raw":
                    connection.sendall(base64.b64decode(action[1]))
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(2.0)
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            self._problems.append("the mailbox neither answers nor ends the connection")
        except (OSError, MailboxError):
            pass  # the mailbox has ended it
        finally:
            connection.close()

    @staticmethod
    def _send(line: Line, header: Any, body: bytes) -> None:
        """Send a frame with a right code and any content."""
        text = header.encode(errors="surrogatepass") if isinstance(header, str) else json.dumps(header).encode()
        payload = struct.pack("<I", len(text)) + text + body
        length = struct.pack("<Q", len(payload))
        code = line._authenticate(line._keys[0], line._sent, length, payload)
        line._sent += 1
        line._connection.sendall(length + payload + code)

    def _note(self, about: threading.ExceptHookArgs) -> None:
        self._problems.append(f"a thread raised {about.exc_type.__name__}: {about.exc_value}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_watching:
            return
        if event in ("pickle.find_class", "os.system", "subprocess.Popen", "marshal.loads"):
            self._problems.append(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], str) and "/" in arguments[0]:
            place = arguments[0]
            is_known = place.startswith((str(self._folder), "/proc/self", sys.prefix, sys.base_prefix, CODE))
            if not is_known and threading.current_thread() is not threading.main_thread():
                self._problems.append(f"a thread opened {place}")

    @contextlib.contextmanager
    def _quick_disk(self) -> Iterator[None]:
        from zeroshard.outer import mailbox_files

        real = mailbox_files.os.fsync
        mailbox_files.os.fsync = lambda descriptor: None
        try:
            yield
        finally:
            mailbox_files.os.fsync = real

    # -- mutation -----------------------------------------------------------------------------------------------------

    def mutated(self, script: Script) -> Script:
        """Return an input with some changes."""
        draw, script = self._draw, copy.deepcopy(script)
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            place = draw.randrange(len(script))
            kind = draw.randrange(10)
            if kind == 0:
                del script[place]
            elif kind == 1:
                script.insert(place, copy.deepcopy(draw.choice(draw.choice(self._pool))))
            elif kind == 2:
                script[place:place] = [copy.deepcopy(script[place]) for _ in range(draw.choice([1, 2, 50]))]
            elif kind == 3:
                script = script[: place + 1] + copy.deepcopy(draw.choice(self._pool))[place:]
            elif script[place][0] == "frame":
                self._change_frame(script[place])
            elif script[place][0] == "raw":
                script[place][1] = text_of(self._garbled(base64.b64decode(script[place][1])))
            else:
                script.insert(place, ["raw", text_of(self._garbled(b"\0" * 20))])
            if not script:
                script = [["hello"]]
        return script

    def _change_frame(self, frame: list[Any]) -> None:
        draw, kind = self._draw, self._draw.randrange(8)
        if kind == 0:
            frame[2] = text_of(self._garbled(base64.b64decode(frame[2])))
        elif kind == 1:
            frame[2] = text_of(bytes(draw.choice([1, 399, 401, 1 << 20, (1 << 20) + (1 << 16)])))
        elif kind == 2 or isinstance(frame[1], str):
            text = frame[1] if isinstance(frame[1], str) else json.dumps(frame[1])
            grown = draw.choice(
                ["[" * 60_000, '{"a":' * 9_000, "NaN", "1e999", "9" * 5000, "\ud800", '"', "\0", "[1,2]"]
            )
            cut = draw.randrange(len(text) + 1)
            frame[1] = draw.choice([text[:cut], text[:cut] + grown + text[cut:], grown])
        else:
            spots = list(walk(frame[1]))
            if not spots:
                frame[1] = {"do": draw.choice(WORDS)}
                return
            holder, key = draw.choice(spots)
            pick = draw.randrange(6)
            if pick <= 2:
                holder[key] = copy.deepcopy(draw.choice(draw.choice([NUMBERS, WORDS, OTHERS])))
            elif pick == 3:
                del holder[key]
            elif pick == 4 and isinstance(holder, dict):
                holder[draw.choice([*WORDS, *holder])] = holder[key]
            elif isinstance(holder, dict):
                many = draw.choice([10, 3000])
                holder[key] = draw.choice([{f"i{n}": n for n in range(many)}, list(range(many)), "a" * many, 2**60])

    def _garbled(self, data: bytes) -> bytes:
        draw, changed = self._draw, bytearray(data)
        place, kind = draw.randrange(len(changed) + 1), draw.randrange(4)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed[place:place] = draw.randbytes(draw.choice([1, 8, 100, 70_000]))
        else:
            changed[place:place] = struct.pack("<Q", draw.choice([0, 2**20, 2**32, 2**40, 2**63, 2**64 - 1]))
        return bytes(changed)
