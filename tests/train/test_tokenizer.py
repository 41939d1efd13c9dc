"""Tokenizers: there and back, the bytes that tokens stand for, and what cannot be loaded."""

import sys

import pytest
import transformers

from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import load_tokenizer, train_tokenizer

TEXTS = ["The first line.\n\n  Then ünïcödé, 漢字 and 𝄞.\n", "<|endoftext|> is text", "", " x"]


def _learn(folder, vocabulary=300):
    texts = [document.decode() for document in open_source().documents()]
    return train_tokenizer([text[:50_000] for text in texts], vocabulary, folder / "tokens.json")


def _make_folder(folder, **special):
    """Write a Hugging Face tokenizer."""
    _learn(folder)
    hf = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokens.json"), **special)
    hf.save_pretrained(folder / "hf")
    return str(folder / "hf")


def _make(kind, folder):
    if kind == "bytes":
        return load_tokenizer()
    if kind == "file":
        _learn(folder)
        return load_tokenizer(str(folder / "tokens.json"))
    return load_tokenizer(_make_folder(folder, eos_token="<|endoftext|>"))


@pytest.mark.parametrize("kind", ["bytes", "file", "folder"])
def test_there_and_back(kind, tmp_path):
    tokenizer = _make(kind, tmp_path)
    encoded = tokenizer.encode(TEXTS)
    for text, (tokens, ends) in zip(TEXTS, encoded, strict=True):
        assert tokenizer.decode(tokens.tolist()) == text
        assert tokens.size == ends.size
        assert all(0 <= token < tokenizer.vocabulary for token in tokens)
        assert tokenizer.end not in tokens
        assert ends.tolist() == sorted(ends.tolist())
        assert (ends[-1] if text else 0) == len(text.encode())
    assert 0 <= tokenizer.end < tokenizer.vocabulary
    assert encoded[2][0].size == 0


def test_ends_of_tokens_are_where_their_text_ends(tmp_path):
    tokenizer = _make("file", tmp_path)
    text = "def documentation(of_this): # ä"
    [(tokens, ends)] = tokenizer.encode([text])
    assert tokens.size < len(text)
    whole = [k for k in range(tokens.size) if "�" not in tokenizer.decode(tokens[: k + 1].tolist())]
    assert len(whole) >= tokens.size - 2
    for k in whole:
        assert ends[k] == len(tokenizer.decode(tokens[: k + 1].tolist()).encode())


def test_learned_tokenizer_is_what_was_asked_for(tmp_path):
    tokenizer = _learn(tmp_path, 320)
    assert tokenizer.vocabulary == 320
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]
    again = load_tokenizer(str(tmp_path / "tokens.json"))
    assert (again.sha256, again.end) == (tokenizer.sha256, tokenizer.end)
    assert _learn(tmp_path, 321).sha256 != tokenizer.sha256


def test_what_cannot_be_learned_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--vocab: 256 tokens; .* make 257 at least"):
        train_tokenizer(["text"], 256, tmp_path / "x")
    with pytest.raises(ValueError, match=r"--vocab: the text yields only 2\d\d of 400 tokens"):
        train_tokenizer(["text"], 400, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer: there is no file or folder '/nowhere'; make one with"):
        load_tokenizer("/nowhere")
    with pytest.raises(ValueError, match=r"data\.tokenizer: .* has no tokenizer of transformers"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"hf' has no eos_token"):
        load_tokenizer(_make_folder(tmp_path))
    path = tmp_path / "tokens.json"
    path.write_text(path.read_text("utf-8").replace("<|endoftext|>", "<end>"), "utf-8")
    with pytest.raises(ValueError, match=r"tokens\.json' has no token '<\|endoftext\|>'"):
        load_tokenizer(str(path))
    path.write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=r"tokens\.json' is not a file of the tokenizers library"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(("name", "extra"), [("tokenizers", "data"), ("transformers", "transformers")])
def test_missing_extra_is_named(name, extra, tmp_path, monkeypatch):
    path = tmp_path / "tokens.json" if extra == "data" else tmp_path
    (tmp_path / "tokens.json").touch()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"data\.tokenizer=.* needs '{name}'; .*\"zeroshard\[{extra}\]\""):
        load_tokenizer(str(path))
