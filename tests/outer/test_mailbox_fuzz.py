"""Seconds of the mailbox's fuzzer, and bugs that it must find."""

import struct
from pathlib import Path

import pytest

from zeroshard.outer import mailbox_wire, serve
from zeroshard.outer.mailbox_wire import Line

from .fuzz import Fuzzer, seeds, text_of

SECONDS = 4.0


def test_no_peer_is_treated_wrong(tmp_path: Path) -> None:
    counts = Fuzzer(tmp_path, 1).run(SECONDS, tmp_path / "findings")
    assert counts.findings == []
    assert counts.inputs > 20
    assert counts.edges > 200


def test_bugs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit or a check that it rests on, an input is judged wrong."""
    fuzzer = Fuzzer(tmp_path, 1)
    announced = [["hello"], ["raw", text_of(struct.pack("<Q", 200 << 20) + b"x" * 40)]]
    odd = [["hello"], ["frame", {"do": ["put"]}, ""]]
    join = seeds()[1][1]
    stolen = [["hello"], ["frame", join[1] | {"island": "good"}, ""], ["wait"]]
    assert [fuzzer.judge(one) for one in (announced, odd, stolen)] == ["", "", ""]
    with monkeypatch.context() as patch:
        patch.setattr(mailbox_wire, "MAX_FRAME_BYTES", 1 << 40)
        patch.setattr(Line, "_authenticate", staticmethod(lambda *parts: b"\0" * 32))
        assert "MiB" in fuzzer.judge(announced)
    about = serve._Service._about
    with monkeypatch.context() as patch:
        patch.setattr(
            serve._Service, "_about", lambda self, header: about(self, header) if header["launch"] != "x:1" else 1 // 0
        )
        assert "ZeroDivisionError" in fuzzer.judge(stolen)
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.outer.mailbox_book.Book._is_alive", lambda self, member: False)
        patch.setattr("zeroshard.outer.mailbox_book.Book.expire", lambda self: [])
        assert "another island is not served" in fuzzer.judge(stolen)
