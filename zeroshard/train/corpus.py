"""The corpus: a tokenized text, split once, in a file that all ranks map into memory.

Owns the split and the cache of tokens. It must not know batches, the model or the process group. Read `prepare_corpus`
first, then `open_corpus`.

Note: the cache
    One rank writes the file, all ranks read it, and later runs on the same text reuse it. Its name is a hash of all
    that determines its contents: the text, the tokenizer and the split. The writer renames the finished file into
    place, so no reader sees a part of it. Each open checks the hash of the contents, and a damaged file is rebuilt.
    While it builds the file, the writing process holds all tokens in memory.
"""

import contextlib
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

__all__ = ["Corpus", "find_split", "open_corpus", "prepare_corpus", "tokenize"]

_FORMAT: Final = 1
_FACTS: Final = frozenset(["sha256", "train_bytes", "heldout_bytes", "tokens_sha256"])
_PIECE_CHARACTERS: Final = 1 << 16
_BATCH_PIECES: Final = 256


@final
@dataclass(frozen=True)
class Corpus:
    """A tokenized text, split once: the beginning is for training, the end is held out.

    A token `end` separates documents. A document that crosses the split is cut there.

    Args:
        name: the source of the text.
        sha256: hash of the source files.
        train: (numel,), uint8, uint16 or int32, mapped from the file.
        heldout: (numel,), as `train`.
        heldout_ends: (numel,), int64: for each token, the number of bytes of held-out text up to its end.
        train_bytes: bytes of the training text, in UTF-8.
        heldout_bytes: bytes of the held-out text, in UTF-8.
        tokens_sha256: hash of the three tensors. It also depends on what is read of the source files.
    """

    name: str
    sha256: str
    train: Tensor
    heldout: Tensor
    heldout_ends: Tensor
    train_bytes: int
    heldout_bytes: int
    tokens_sha256: str

    def check_length(self, context: int) -> None:
        """Raise ValueError if a part is too short for one window of `context` tokens."""
        train, heldout, nbytes = self.train.numel(), self.heldout.numel(), self.train_bytes + self.heldout_bytes
        if min(train, heldout) <= context:
            raise ValueError(
                f"data.path: {self.name!r} has {nbytes} bytes: {train} tokens for training and {heldout} held out. "
                f"With model.context={context}, each part needs at least {context + 1} tokens; provide more "
                "text, or set a smaller context"
            )


def find_split(source: Source, heldout_fraction: float) -> tuple[int, int]:
    """Return the offset, in bytes, at which the held-out text starts, and the offset at which it ends."""
    total = sum(len(document) for document in source.documents())
    return total - round(total * heldout_fraction), total


def prepare_corpus(source: Source, tokenizer: Tokenizer, *, heldout_fraction: float, folder: Path) -> str:
    """Ensure that the cache contains the corpus.

    Args:
        source: the text.
        tokenizer: converts the text into tokens.
        heldout_fraction: fraction of the bytes, at the end, that training batches never read.
        folder: folder of the cache; created if missing.

    Returns:
        The key for `open_corpus`: 64 hexadecimal digits.

    Raises:
        ValueError: the text cannot be read, or changes meanwhile.
        ImportError: the library that reads the text is missing.
    """
    sha256 = source.sha256()
    parts = [_FORMAT, sha256, source.layout(), source.column, tokenizer.sha256, heldout_fraction]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    if _read(_path(folder, key), source.name) is None:
        folder.mkdir(parents=True, exist_ok=True)
        made = _make(source, tokenizer, heldout_fraction, sha256)
        if source.sha256() != sha256:
            raise ValueError(f"{source.name} changed while it was tokenized. Run again once its files are complete.")
        _write(_path(folder, key), made)
    return key


def open_corpus(folder: Path, key: str, name: str) -> Corpus:
    """Map a corpus of the cache into memory; `name` is the name of the text.

    Raises:
        ValueError: the file is missing or damaged.
    """
    corpus = _read(_path(folder, key), name)
    if corpus is None:
        raise ValueError(
            f"data.cache: rank 0 has just written {str(_path(folder, key))!r}, but this rank finds it missing or "
            "damaged; choose a folder that all ranks share"
        )
    return corpus


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.safetensors"


def _make(source: Source, tokenizer: Tokenizer, heldout_fraction: float, sha256: str) -> Corpus:
    """Tokenize a text and split it."""
    cut, total = find_split(source, heldout_fraction)
    train, _, train_bytes = tokenize(take(source.documents(), 0, cut), tokenizer)
    heldout, ends, heldout_bytes = tokenize(take(source.documents(), cut, total), tokenizer)
    made = _hash([train, heldout, ends])
    return Corpus(source.name, sha256, train, heldout, ends, train_bytes, heldout_bytes, made)


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> tuple[Tensor, Tensor, int]:
    """Tokenize documents and concatenate their tokens.

    Returns:
        The tokens, in the smallest dtype that holds them; for each token, the number of bytes of text up to its end;
        the number of bytes of the text.
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
    """Cut long documents at ends of lines, to bound tokenizers' memory; yield (piece, whether a document starts)."""
    for document in documents:
        start = 0
        while start < len(document):
            end = start + _PIECE_CHARACTERS
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end
            yield document[start:end], start == 0
            start = end


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Group pieces into the batches that a tokenizer processes at once."""
    batch = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _BATCH_PIECES:
            yield batch
            batch = []
    yield batch


def _write(path: Path, corpus: Corpus) -> None:
    """Write a corpus atomically, with the permissions that the umask leaves."""
    tensors = {"train": corpus.train, "heldout": corpus.heldout, "heldout_ends": corpus.heldout_ends}
    facts = {
        "sha256": corpus.sha256,
        "train_bytes": str(corpus.train_bytes),
        "heldout_bytes": str(corpus.heldout_bytes),
        "tokens_sha256": corpus.tokens_sha256,
    }
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        with unfinished.open("xb") as made:
            mode = os.fstat(made.fileno()).st_mode
        safetensors.torch.save_file(tensors, unfinished, facts)  # makes another file, for its owner alone
        with contextlib.suppress(OSError):  # some file systems have no permissions
            os.chmod(unfinished, mode)
        os.replace(unfinished, path)
    except safetensors.SafetensorError as error:  # such as a full disk
        raise OSError(f"data.cache: {path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path, name: str) -> Corpus | None:
    """Map a corpus into memory; None if the file is missing or damaged."""
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
    sizes = int(facts["train_bytes"]), int(facts["heldout_bytes"])
    return Corpus(name, facts["sha256"], train, heldout, ends, *sizes, facts["tokens_sha256"])


def _hash(tensors: Iterable[Tensor]) -> str:
    """Return the hash of the concatenated bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
