"""Tokens: the conversion of text into numbers, and of numbers into text.

Owns the tokenizers: bytes, without a library, and trained ones, from a file of `zeroshard tokenizer` or a local Hugging
Face folder. It must not know the source of the text. Read `Tokenizer` first, then `load_tokenizer`.

Note: text is text
    No part of a text becomes a special token, even if it looks like one, and no special tokens are added around it. The
    only special token in use is `end`, between two documents.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt

from zeroshard.train.extras import need
from zeroshard.train.inputs import check_entries, open_input

__all__ = ["ByteTokenizer", "Ints", "LearnedTokenizer", "Tokenizer", "load_tokenizer", "train_tokenizer"]

Ints = npt.NDArray[np.int64]

_END: Final = "<|endoftext|>"
_BYTES: Final = 256


class Tokenizer(Protocol):
    """Converts text into tokens and back.

    Args:
        name: a readable name.
        sha256: hash of everything that determines the tokens of a text.
        vocabulary: number of tokens, including `end`.
        end: the token between two documents.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102
    @property
    def vocabulary(self) -> int: ...  # noqa: D102
    @property
    def end(self) -> int: ...  # noqa: D102

    def encode(self, texts: Sequence[str]) -> list[tuple[Ints, Ints]]:
        """Return, for each text, its tokens, (numel,), and for each token the number of bytes up to its end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""


@final
class ByteTokenizer:
    """Each byte of UTF-8 is a token. 0xff does not occur in UTF-8, and marks the end of a document.

    >>> from zeroshard.train.tokenizer import ByteTokenizer
    >>> ByteTokenizer().decode([104, 105])
    'hi'
    """

    name: Final = "bytes"
    sha256: Final = hashlib.sha256(b"bytes").hexdigest()
    vocabulary: Final = _BYTES
    end: Final = 0xFF

    def encode(self, texts: Sequence[str]) -> list[tuple[Ints, Ints]]:
        """Return each text's bytes."""
        contents = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
        return [(content, np.arange(1, content.size + 1)) for content in contents]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; invalid tokens, from models with more tokens, become the replacement character."""
        return bytes(min(token, self.end) for token in tokens).decode(errors="replace")


@final
class LearnedTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        name: path of the tokenizer.
        backend: a `tokenizers.Tokenizer`.
        end: the token between two documents.
    """

    def __init__(self, name: str, backend: Any, end: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self._backend = backend
        self.name, self.end = name, end
        self.vocabulary: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.sha256 = hashlib.sha256(f"{end} {backend.to_str()}".encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[tuple[Ints, Ints]]:
        """Return each text's tokens; a character split over several tokens counts with the first of them."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, dtype=np.int64), _byte_ends(text, encoding.offsets))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._backend.decode(list(tokens)))


def load_tokenizer(path: str = "") -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a file that `zeroshard tokenizer` wrote, or a folder with a Hugging Face tokenizer; empty for bytes.

    Raises:
        ValueError: the path does not exist, is not a tokenizer, or has no token for the end of a document.
        ImportError: the library of this tokenizer is missing.

    >>> from zeroshard.train.tokenizer import load_tokenizer
    >>> load_tokenizer().vocabulary
    256
    """
    if not path:
        return ByteTokenizer()
    if Path(path).is_dir():
        return _load_folder(path)
    if Path(path).exists():
        return _load_file(path)
    raise ValueError(
        f"data.tokenizer: there is no file or folder {path!r}; make one with: zeroshard tokenizer DATA --out {path}"
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int, out: Path) -> Tokenizer:
    """Train a byte-level byte-pair encoding, and write it atomically.

    Args:
        texts: the training texts.
        vocabulary: number of tokens: 256 bytes, the end of a document, and trained tokens.
        out: a file, in the format of the `tokenizers` library.

    Raises:
        ValueError: the vocabulary is too small, or the text is too short for it.
        ImportError: tokenizers is missing.

    Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016, section 3.2.
    """
    if vocabulary <= _BYTES:
        raise ValueError(f"--vocab must be at least {_BYTES + 1} (bytes and the end of a document), got {vocabulary}")
    tokenizers = need("tokenizers", "data", "learning a tokenizer")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < vocabulary:
        raise ValueError(
            f"--vocab: the text yields only {backend.get_vocab_size()} of {vocabulary} tokens; provide more text, or "
            "set a smaller --vocab"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    backend.save(str(unfinished))
    os.replace(unfinished, out)
    return _load_file(str(out))


def _load_file(path: str) -> LearnedTokenizer:
    tokenizers = need("tokenizers", "data", f"data.tokenizer={path}")
    open_input(path, "data.tokenizer").close()
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises no more specific type
        raise ValueError(f"data.tokenizer: {path!r} is not a file of the tokenizers library: {error}") from None
    end = backend.token_to_id(_END)
    if end is None:
        raise ValueError(
            f"data.tokenizer: {path!r} has no token {_END!r}; make it with `zeroshard tokenizer`, or give a "
            "folder with a configuration that names the end-of-document token"
        )
    return LearnedTokenizer(path, backend, end)


def _load_folder(path: str) -> LearnedTokenizer:
    transformers = need("transformers", "transformers", f"data.tokenizer={path}")
    check_entries(path, "data.tokenizer")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # malformed files raise KeyError, TypeError, RecursionError and others
        raise ValueError(f"data.tokenizer: {path!r} has no tokenizer of transformers: {error}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"data.tokenizer: {path!r} has a {type(loaded).__name__}, which is not based on the tokenizers library; "
            "convert it to a tokenizer.json"
        )
    if loaded.eos_token_id is None:
        raise ValueError(f"data.tokenizer: {path!r} has no eos_token, which must end a document; set it there")
    return LearnedTokenizer(path, backend, loaded.eos_token_id)


def _byte_ends(text: str, offsets: Sequence[tuple[int, int]]) -> Ints:
    """Return, for each token, the number of bytes of text up to its end, from the characters that it covers."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(bytes_before[np.array(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]])
    ends[-1:] = bytes_before[-1]  # characters that a tokenizer drops at the end of a text still count as text
    return ends
