"""The text: its files, its documents, and what is taken of it."""

import hashlib
import json
import sys
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zeroshard.train.text import open_source, take


def _documents(path, column="text"):
    return list(open_source(str(path), column).documents())


def _write_lines(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), "utf-8")


def test_default_is_pythons_documentation():
    content = "".join(topics[key] for key in sorted(topics)).encode()
    source = open_source()
    assert list(source.documents()) == [content]
    assert source.sha256() == hashlib.sha256(content).hexdigest()


def test_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "text.txt"
    content = ("äöü\r\n" * 100).encode()
    path.write_bytes(content)
    assert _documents(path) == [content]
    assert open_source(str(path)).sha256() == hashlib.sha256(content).hexdigest()


def test_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/1.txt", "c.txt", "a.txt", ".hidden", ".git/x"):
        (tmp_path / name).write_text(f"<{name}>", "utf-8")
    (tmp_path / "empty.txt").touch()
    assert _documents(tmp_path) == [b"<a.txt>", b"<b/1.txt>", b"<c.txt>"]


def test_each_line_is_a_document(tmp_path):
    texts = ["one", "zwei\u2028\r\n", "", "drei"]
    _write_lines(tmp_path / "a.jsonl", *({"id": k, "text": text} for k, text in enumerate(texts)))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n  \n")
    assert _documents(tmp_path / "a.jsonl") == [text.encode() for text in texts if text]


def test_each_row_is_a_document(tmp_path):
    texts = [f"ä{k}" for k in range(10)]
    table = pa.table({"id": list(range(10)), "body": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert _documents(tmp_path / "a.parquet", "body") == [text.encode() for text in texts]


def test_kinds_of_files_mix(tmp_path):
    _write_lines(tmp_path / "1.jsonl", {"text": "a"}, {"text": "b"})
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "2.parquet")
    (tmp_path / "3.md").write_text("d", "utf-8")
    assert _documents(tmp_path) == [b"a", b"b", b"c", b"d"]


def test_missing_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path: there is no file or folder '.*/missing'"):
        open_source(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"data\.path: the folder '.*' holds no text files"):
        open_source(str(tmp_path))


def test_files_that_are_no_text_are_left_out_and_said(tmp_path):
    (tmp_path / "b.txt").write_text("text")
    for name in ("a.png", "c.bin"):
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    source = open_source(str(tmp_path))
    assert list(source.documents()) == [b"text"]
    assert source.describe_left_out() == "2 files are no text and left out, 'a.png' first"
    assert source.layout() == [(".txt", 4)]
    with pytest.raises(ValueError, match="not text in UTF-8"):
        list(open_source(str(tmp_path / "a.png")).documents())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\xff", r"a\.txt' is not text in UTF-8 \(byte 0xff at offset 4\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', r"a\.jsonl', line 2: not JSON in UTF-8: "),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl', line 1: not JSON in UTF-8: "),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            r"line 1: no key 'text', but the keys \['body', 'id'\]; set data\.column",
        ),
        ("a.jsonl", b"[1]\n", r"line 1: no key 'text', but a list; set data\.column"),
        ("a.jsonl", b'{"text": null}\n', r"line 1: 'text' must be text, got None"),
        ("a.jsonl", b'{"text": "ab\\ud800"}\n', r"line 1: 'text' has an unpaired surrogate at character 2"),
        ("a.parquet", b"PAR1 or not", r"a\.parquet' cannot be read as parquet: "),
    ],
)
def test_bad_content_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^data\.path: .*{message}"):
        _documents(tmp_path / name)


def test_bad_columns_are_named(tmp_path):
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no column 'text', but \['id', 'body'\]; set data\.column"):
        _documents(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 1: 'id' must be text, got 1"):
        _documents(tmp_path / "a.parquet", "id")


def test_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"a\.parquet' needs 'pyarrow.*pip install \"zeroshard\[data\]\""):
        _documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("cut", range(12))
def test_parts_make_up_the_whole_in_characters(cut):
    documents = [text.encode() for text in ("aä", "€", "", "b𝄞c")]
    parts = [list(take(documents, start, end)) for start, end in ((0, cut), (cut, 12))]
    assert "".join(parts[0] + parts[1]).encode() == b"".join(documents)
    assert cut - 3 <= len("".join(parts[0]).encode()) <= cut
    assert "" not in parts[0] + parts[1]
