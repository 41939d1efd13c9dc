"""Forwards of chunks that run twice: without a graph, and with one before the backward.

Owns what the second forward must find as the first found it (random numbers, buffers, training modes), and the
comparison of their results. It must not know schedules or messages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from zeroshard.activations.recompute import are_alike, sums_of
from zeroshard.activations.surroundings import Kept, Surroundings
from zeroshard.core.engine import Engine
from zeroshard.devices import generator_of

__all__ = ["Again", "First"]


@final
@dataclass
class First:
    """What a first forward leaves for the second."""

    kept: Kept | None
    states: Sequence[Tensor]
    """The states of the default generators before the forward."""
    sums: Tensor | None = None
    """Sums and norms of its results."""
    again: Tensor | None = None
    """The same of the second forward."""


@final
class Again:
    """The forwards of one model that run twice.

    Args:
        chunks: of this place.
    """

    def __init__(self, engine: Engine, model: nn.Module, chunks: Iterable[int]) -> None:
        self._text = what = f"{engine.mesh} A forward of {type(model).__name__}"
        # The first forward of each chunk finds what a chunk changes.
        self._surroundings = {chunk: Surroundings(model, what, engine.saved.kept) for chunk in chunks}
        self._generators = [*{torch.default_generator, generator_of(engine.mesh.device)}]

    @torch.no_grad()
    def first(self, chunk: int, run: Callable[[], tuple[Tensor, ...]]) -> tuple[First, tuple[Tensor, ...]]:
        """Run a forward of a chunk without a graph; return what the second one needs, and the results."""
        surroundings, states = self._surroundings[chunk], [one.get_state() for one in self._generators]
        kept = surroundings.keep()
        outputs = run()
        surroundings.note(kept)
        return First(kept, states, sums_of(outputs)), outputs

    @contextmanager
    def restored(self, first: First) -> Iterator[None]:
        """Give the second forward what the first one found; afterwards everything is as before."""
        now, kept = [one.get_state() for one in self._generators], first.kept
        assert kept is not None
        self._draw_from(first.states)
        try:
            with kept.restored():
                yield
        finally:
            self._draw_from(now)
            first.kept = None

    def _draw_from(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def compare(self, first: First) -> None:
        """Raise unless the second forward gave the results of the first; after both, since the host waits.

        Raises:
            RuntimeError: they differ.
        """
        if first.sums is not None and first.again is not None and not are_alike(first.sums, first.again):
            raise RuntimeError(
                f"{self._text} gave other results when it ran again for its backward, so gradients would be wrong: it "
                "reads state that changed in between, such as an attribute, a counter, or random numbers from outside "
                "torch, or torch computes it otherwise without gradients (nn.LSTM, nn.TransformerEncoderLayer in "
                "eval()). Pass recompute=False."
            )
