"""The corpus: a text as tokens, split once, kept in a file that all ranks map into memory.

Owns the split and the cache of tokens. Must not know batches, the model or the process group. Read `prepare_corpus`
first, then `open_corpus`.

Note: the cache
    One rank makes the file, all read it, and later runs on the same text find it. Its name is a hash of everything that
    decides what is in it: the text, the tokenizer, the split. It is written beside its place and then renamed, so
    others find the whole of it or nothing; its own hash is checked each time it is opened, and a damaged one is made
    anew. While it is made, its tokens are in the memory of that one process.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from zeroshard.train.text import Source, take
from zeroshard.train.tokenizer import Tokenizer

__all__ = ["Corpus", "find_split", "open_corpus", "prepare_corpus"]

_FORMAT: Final = 1
_FACTS: Final = frozenset(["sha256", "train_bytes", "heldout_bytes", "tokens_sha256"])
_PIECE_CHARACTERS: Final = 1 << 16
_BATCH_PIECES: Final = 256


@final
@dataclass(frozen=True)
class Corpus:
    """A text as tokens, split once: its beginning is trained on, its end is held out.

    A token `end` stands between any two documents. What is in the middle of a document at the split is cut there.

    Args:
        name: where the text comes from.
        sha256: of the files that the text comes from.
        train: (numel,), uint8, uint16 or int32, mapped from the file.
        heldout: (numel,), as `train`.
        heldout_ends: (numel,), int64: how many bytes of the held-out text end with each token.
        train_bytes: of the text that is trained on, in UTF-8.
        heldout_bytes: of the text that is held out.
    """

    name: str
    sha256: str
    train: Tensor
    heldout: Tensor
    heldout_ends: Tensor
    train_bytes: int
    heldout_bytes: int

    def check_length(self, context: int) -> None:
        """Raise ValueError where a part is too short for one window of `context` tokens."""
        train, heldout, nbytes = self.train.numel(), self.heldout.numel(), self.train_bytes + self.heldout_bytes
        if min(train, heldout) <= context:
            raise ValueError(
                f"data.path: {self.name!r} holds {nbytes} bytes, which are {train} tokens to train on and {heldout} "
                f"held out; with model.context={context} each part needs at least {context + 1}: give more text, or a "
                "smaller context"
            )


def find_split(source: Source, heldout_fraction: float) -> tuple[int, int]:
    """Return the offset, in bytes, from which on a text is held out, and the one at which it ends."""
    total = sum(len(document) for document in source.documents())
    return total - round(total * heldout_fraction), total


def prepare_corpus(source: Source, tokenizer: Tokenizer, *, heldout_fraction: float, folder: Path) -> str:
    """Make sure that the cache has the corpus.

    Args:
        source: the text.
        tokenizer: what makes tokens of it.
        heldout_fraction: share of the bytes, at the end, that no training batch reads.
        folder: of the cache; made if it is not there.

    Returns:
        The key by which `open_corpus` finds it: 64 hexadecimal digits.

    Raises:
        ValueError: the text cannot be read.
        ImportError: what reads it is missing.
    """
    sha256 = source.sha256()
    parts = [_FORMAT, sha256, source.layout(), source.column, tokenizer.sha256, heldout_fraction]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    if _read(_path(folder, key), source.name) is None:
        folder.mkdir(parents=True, exist_ok=True)
        _write(_path(folder, key), _make(source, tokenizer, heldout_fraction, sha256))
    return key


def open_corpus(folder: Path, key: str, name: str) -> Corpus:
    """Map a corpus that is in the cache; `name` is the text's.

    Raises:
        ValueError: it is not there, or is damaged.
    """
    corpus = _read(_path(folder, key), name)
    if corpus is None:
        raise ValueError(
            f"data.cache: {str(_path(folder, key))!r}, which rank 0 has just written, is not there or is damaged; the "
            "folder must be one that all ranks see"
        )
    return corpus


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.safetensors"


def _make(source: Source, tokenizer: Tokenizer, heldout_fraction: float, sha256: str) -> Corpus:
    """Make the tokens of a text."""
    cut, total = find_split(source, heldout_fraction)
    train, _, train_bytes = _tokenize(take(source.documents(), 0, cut), tokenizer)
    heldout, ends, heldout_bytes = _tokenize(take(source.documents(), cut, total), tokenizer)
    return Corpus(source.name, sha256, train, heldout, ends, train_bytes, heldout_bytes)


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> tuple[Tensor, Tensor, int]:
    """Lay the tokens of documents side by side.

    Returns:
        The tokens, in the smallest dtype that holds them; for each how many bytes of the text end with it; the bytes of
        the text.
    """
    dtype = next(d for d in (np.uint8, np.uint16, np.int32) if tokenizer.vocabulary - 1 <= np.iinfo(d).max)
    tokens, ends, nbytes = [np.empty(0, dtype)], [np.empty(0, np.int64)], 0
    for batch in _batches(_pieces(documents)):
        for (text, is_first), (piece, piece_ends) in zip(batch, tokenizer.encode([p[0] for p in batch]), strict=True):
            if is_first and nbytes:
                tokens.append(np.array([tokenizer.end], dtype))
                ends.append(np.array([nbytes]))
            tokens.append(piece.astype(dtype))
            ends.append(nbytes + piece_ends)
            nbytes += len(text.encode())
    return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(ends)), nbytes


def _pieces(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut long documents behind an end of line, so that tokenizers need little memory; tell which pieces begin one."""
    for document in documents:
        start = 0
        while start < len(document):
            end = start + _PIECE_CHARACTERS
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end
            yield document[start:end], start == 0
            start = end


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Collect pieces: a tokenizer works on those of a batch at a time."""
    batch = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _BATCH_PIECES:
            yield batch
            batch = []
    yield batch


def _write(path: Path, corpus: Corpus) -> None:
    """Write a corpus, whole or not at all."""
    tensors = {"train": corpus.train, "heldout": corpus.heldout, "heldout_ends": corpus.heldout_ends}
    facts = {
        "sha256": corpus.sha256,
        "train_bytes": str(corpus.train_bytes),
        "heldout_bytes": str(corpus.heldout_bytes),
        "tokens_sha256": _hash(tensors.values()),
    }
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        safetensors.torch.save_file(tensors, unfinished, facts)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path, name: str) -> Corpus | None:
    """Map a corpus; None where there is none, or a damaged one."""
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            train, heldout, ends = (file.get_tensor(key) for key in ("train", "heldout", "heldout_ends"))
    except safetensors.SafetensorError:
        return None
    if not facts.keys() >= _FACTS or _hash([train, heldout, ends]) != facts["tokens_sha256"]:
        return None
    return Corpus(name, facts["sha256"], train, heldout, ends, int(facts["train_bytes"]), int(facts["heldout_bytes"]))


def _hash(tensors: Iterable[Tensor]) -> str:
    """Return the hash of the tensors' bytes, side by side."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
