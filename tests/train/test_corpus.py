"""The corpus: its split, its documents, its cache."""

import os

import pytest
import torch

from zeroshard.train import corpus as module
from zeroshard.train.corpus import open_corpus, prepare_corpus
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer

END = ByteTokenizer.end


def _corpus(folder, path="", tokenizer=None, heldout_fraction=0.1):
    source = open_source(str(path))
    key = prepare_corpus(source, tokenizer or load_tokenizer(), heldout_fraction=heldout_fraction, folder=folder)
    return open_corpus(folder, key, source.name)


def _bytes(tokens):
    return bytes(tokens.tolist())


def _cached(folder):
    (path,) = folder.iterdir()
    return path


def test_default_text_is_split_by_bytes(tmp_path):
    corpus = _corpus(tmp_path)
    (content,) = open_source().documents()
    assert _bytes(corpus.train) + _bytes(corpus.heldout) == content
    assert corpus.heldout.numel() == corpus.heldout_bytes == round(len(content) * 0.1)
    assert corpus.train.numel() == corpus.train_bytes
    assert torch.equal(corpus.heldout_ends, torch.arange(1, corpus.heldout_bytes + 1))
    assert (corpus.name, corpus.sha256) == ("pydoc_data.topics", open_source().sha256())
    assert corpus.train.dtype == torch.uint8


def test_split_moves_to_the_beginning_of_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("aä" * 10, "utf-8")
    corpus = _corpus(tmp_path / "cache", tmp_path / "a.txt", heldout_fraction=10 / 30)
    assert _bytes(corpus.train).decode() == "aä" * 6 + "a"
    assert _bytes(corpus.heldout).decode() == "ä" + "aä" * 3
    assert (corpus.train_bytes, corpus.heldout_bytes) == (19, 11)


def test_an_end_stands_between_documents(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for k, text in enumerate(["abcd", "efgh", "ijkl", "mnop"]):
        (texts / f"{k}.txt").write_text(text, "utf-8")
    corpus = _corpus(tmp_path / "cache", texts, heldout_fraction=6 / 16)
    assert corpus.train.tolist() == [*b"abcd", END, *b"efgh", END, *b"ij"]
    assert corpus.heldout.tolist() == [*b"kl", END, *b"mnop"]
    assert corpus.heldout_ends.tolist() == [1, 2, 2, 3, 4, 5, 6]
    assert (corpus.train_bytes, corpus.heldout_bytes) == (10, 6)


def test_learned_tokens_stand_for_every_byte(tmp_path, monkeypatch):
    (content,) = open_source().documents()
    tokenizer = train_tokenizer([content.decode()[:50_000]], 400, tmp_path / "tokens.json")
    whole = _corpus(tmp_path / "a", tokenizer=tokenizer)
    text = tokenizer.decode(whole.train.tolist()) + tokenizer.decode(whole.heldout.tolist())
    assert text.encode() == content
    assert int(whole.heldout_ends[-1]) == whole.heldout_bytes == round(len(content) * 0.1)
    assert whole.heldout.numel() < whole.heldout_bytes / 1.5
    assert whole.train.dtype == torch.uint16
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(module, "_BATCH_PIECES", 7)
    pieces = _corpus(tmp_path / "b", tokenizer=tokenizer)
    assert tokenizer.decode(pieces.train.tolist()) + tokenizer.decode(pieces.heldout.tolist()) == text
    assert int(pieces.heldout_ends[-1]) == whole.heldout_bytes
    assert not set(pieces.train.tolist()) & {tokenizer.end}


def test_cache_is_used_again_and_keyed_by_all_that_matters(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("0123456789" * 10, "utf-8")
    first = _corpus(cache, path)
    made = _cached(cache).stat().st_mtime_ns
    assert torch.equal(_corpus(cache, path).train, first.train)
    assert _cached(cache).stat().st_mtime_ns == made
    tokenizer = train_tokenizer(["0123456789"], 258, tmp_path / "tokens.json")
    _corpus(cache, path, tokenizer)
    _corpus(cache, path, heldout_fraction=0.2)
    path.rename(path.with_suffix(".text"))
    _corpus(cache, path.with_suffix(".text"))
    path.with_suffix(".text").write_text("0123456789" * 11, "utf-8")
    _corpus(cache, path.with_suffix(".text"))
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_damaged_cache_is_made_anew_and_never_read(damage, tmp_path):
    first = _corpus(tmp_path)
    path = _cached(tmp_path)
    content = bytearray(path.read_bytes())
    tokens = first.train.clone()
    del first
    path.unlink()  # the file that was mapped stays as it was
    content[-1] ^= 1
    path.write_bytes({"flipped": content, "cut": content[:-100], "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"data\.cache: .*'.*safetensors', but this rank finds it missing or damaged"):
        open_corpus(tmp_path, path.stem, "a text")
    assert torch.equal(_corpus(tmp_path).train, tokens)
    assert _cached(tmp_path) == path


def test_a_text_that_changes_meanwhile_is_refused_and_not_cached(tmp_path, monkeypatch):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("0123456789" * 10, "utf-8")
    make = module._make

    def append(*asked):
        with path.open("a", encoding="utf-8") as file:
            file.write("more")
        return make(*asked)

    monkeypatch.setattr(module, "_make", append)
    with pytest.raises(ValueError, match=r"a\.txt changed while it was tokenized\. Run again"):
        _corpus(cache, path)
    assert list(cache.iterdir()) == []


def test_tokens_are_mapped_not_read(tmp_path):
    corpus = _corpus(tmp_path)
    with open("/proc/self/maps") as maps:
        assert any(str(_cached(tmp_path)) in line for line in maps)
    assert corpus.train.numel()


def test_what_fails_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(module.os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        _corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "context", "message"),
    [
        ("", 4, r"has 0 bytes: 0 tokens for training and 0 held out. .* at least 5 tokens"),
        (
            "0123456789" * 5,
            5,
            r"has 50 bytes: 45 tokens for training and 5 held out. With model\.context=5, ",
        ),
    ],
)
def test_too_little_text_is_named(content, context, message, tmp_path):
    (tmp_path / "a.txt").write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        _corpus(tmp_path / "cache", tmp_path / "a.txt").check_length(context)
    _corpus(tmp_path / "default").check_length(context)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_cache_has_the_permissions_that_the_umask_leaves(tmp_path, umask, mode):
    (tmp_path / "cache").mkdir()
    before = os.umask(umask)
    try:
        _corpus(tmp_path / "cache")
    finally:
        os.umask(before)
    assert _cached(tmp_path / "cache").stat().st_mode & 0o777 == mode


def test_a_full_disk_is_named_and_leaves_no_part(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise module.safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module.safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"data\.cache: .* cannot be written: .*No space left"):
        _corpus(tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []
