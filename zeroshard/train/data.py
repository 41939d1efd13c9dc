"""The text: where it comes from, how it is split, and which bytes each step reads.

Owns the corpus and the order of the data. Must not know the model, the engine or the process group: rank and world size
are plain arguments. Read `load_corpus` first, then `training_batch`.

Note: data order
    The global batch of a step is a pure function of the seed and the step, and a rank reads its contiguous part. So a
    run sees the same data in the same order at any rank count, any accumulation and any stage, and any step can be
    repeated without those before it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

__all__ = ["Corpus", "IGNORED", "VOCABULARY", "heldout_batches", "load_corpus", "training_batch"]

VOCABULARY: Final = 256
IGNORED: Final = -1


@final
@dataclass(frozen=True)
class Corpus:
    """A text as bytes, split once: its beginning is trained on, its end is held out.

    Args:
        name: where the text came from.
        sha256: of the whole text, both parts.
        train: (numel,), uint8.
        heldout: (numel,), uint8.
    """

    name: str
    sha256: str
    train: Tensor
    heldout: Tensor


def load_corpus(path: str = "", *, context: int, heldout_fraction: float = 0.1) -> Corpus:
    """Read the text and hold out its last part.

    Args:
        path: a text file, or a folder whose files are joined in the order of their relative paths (hidden ones are left
            out); empty for the documentation topics inside CPython's own `pydoc_data`, which need no download.
        context: bytes of a window; both parts must be longer.
        heldout_fraction: share of the bytes, at the end, that no training batch reads.

    Raises:
        ValueError: the path does not exist, holds no text, or holds too little of it.
    """
    if not path:
        return _split("pydoc_data.topics", _documentation_topics(), context, heldout_fraction)
    return _split(path, _read_bytes(Path(path)), context, heldout_fraction)


def training_batch(
    text: Tensor, *, seed: int, step: int, batch: int, context: int, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Return a rank's part of the global batch of one step: windows at random places, and the bytes that follow.

    Args:
        text: (numel,), uint8.
        seed: chooses the order of the data.
        step: counts from 0.
        batch: windows of the global batch, divisible by `world_size`.
        context: bytes of a window.
        rank: the part to return.
        world_size: the number of parts.

    Returns:
        Inputs and targets, each (batch / world_size, context), int64; a target is the byte after its input.
    """
    per_rank = batch // world_size
    draw = np.random.default_rng([seed, step])
    starts = draw.integers(0, text.numel() - context, size=batch)[rank * per_rank : (rank + 1) * per_rank]
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def heldout_batches(
    text: Tensor, *, batch: int, context: int, limit_bytes: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's part of the held-out text, in windows side by side: each byte but the first is a target once.

    Every rank yields equally many batches of one shape, as the collectives inside a forward pass need it. What is
    missing at the end is padded with zeros, whose targets are `IGNORED`.

    Args:
        text: (numel,), uint8.
        batch: windows of a batch, on each rank.
        context: bytes of a window.
        limit_bytes: score no more than this many bytes, the first ones; 0 for all.
        rank: the part to return.
        world_size: the number of parts.

    Yields:
        Inputs and targets, each (batch, context), int64.
    """
    scored_bytes = min(text.numel() - 1, limit_bytes or text.numel())
    per_round = batch * context * world_size
    padded = -(-scored_bytes // per_round) * per_round
    inputs = torch.zeros(padded, dtype=torch.long)
    targets = torch.full((padded,), IGNORED, dtype=torch.long)
    inputs[:scored_bytes] = text[:scored_bytes]
    targets[:scored_bytes] = text[1 : scored_bytes + 1]
    shape = (padded // per_round, world_size, batch, context)
    yield from zip(inputs.view(shape)[:, rank], targets.view(shape)[:, rank], strict=True)


def _documentation_topics() -> bytes:
    """Return CPython's documentation topics, joined in the order of their keys."""
    from pydoc_data.topics import topics

    return "".join(topics[key] for key in sorted(topics)).encode()


def _read_bytes(path: Path) -> bytes:
    """Return the bytes of a file, or of all the files of a folder."""
    if not path.exists():
        raise ValueError(
            f"data.path: there is no file or folder {str(path)!r}; give a text file or a folder of text files"
        )
    if path.is_file():
        return _read_text(path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    if not files:
        raise ValueError(f"data.path: the folder {str(path)!r} holds no files; put text files into it")
    return b"".join(_read_text(file) for file in files)


def _read_text(file: Path) -> bytes:
    """Return the bytes of a file that is text in UTF-8."""
    content = file.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.path: {str(file)!r} is not text in UTF-8 (byte 0x{content[error.start]:02x} at offset "
            f"{error.start}); convert it, or take it out of the folder"
        ) from None
    return content


def _is_hidden(relative: Path) -> bool:
    """Tell whether a file, or a folder it is in, has a name that begins with a dot."""
    return any(part.startswith(".") for part in relative.parts)


def _split(name: str, content: bytes, context: int, heldout_fraction: float) -> Corpus:
    """Split the text into what is trained on and what is held out."""
    text = torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))
    cut = text.numel() - round(text.numel() * heldout_fraction)
    if min(cut, text.numel() - cut) <= context:
        raise ValueError(
            f"data.path: {name!r} holds {text.numel()} bytes, {cut} to train on and {text.numel() - cut} held out; "
            f"with model.context={context} each part needs at least {context + 1}: give more text, or a smaller context"
        )
    return Corpus(name, hashlib.sha256(content).hexdigest(), text[:cut], text[cut:])
