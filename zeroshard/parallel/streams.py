"""Random numbers of a model that torch splits over the axis "tensor": which stream a layer draws from.

Owns the switch of the device's default generator between two streams. It must not know transports or parameters.

Note: streams
    Activations that ranks along "tensor" have alike need equal random numbers on these ranks, such as dropout masks:
    all draw from one stream, the state of the default generator, which user code must seed alike. Activations that are
    split over the ranks need other numbers on each rank. So where the output of a split layer is split (between a
    column-wise and a row-wise layer, or in a sequence-parallel region), the generator has a stream of the rank, until a
    split layer has an output that is alike, or the model's forward ends. A rank's stream begins with a hash of the
    common stream, the layer and the rank's place. Therefore checkpoints that hold the common stream hold all streams,
    and a recomputation, which torch begins in the state of the forward, draws the numbers of the forward. Each region
    moves the common stream, on a rank whose part is empty and draws nothing, too. After a forward in which no rank drew
    a number, the common stream is as it was before (`alike.py`).
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.hooks import Eager
from zeroshard.setup.graphs import LOOKS
from zeroshard.torch_private import graph_task, has_split, is_called_by_compiled, is_compiled
from zeroshard.tree import find

__all__ = ["Begin", "Follow", "Streams", "Watch", "is_output_split"]

Tensor = torch.Tensor

MARK: Final = 0x5A5EED << 40
"""What the seeds of the ranks' streams begin with; a generator tells the seed of its stream."""
HASH_BYTES: Final = 5
EDGE_BYTES: Final = 96
"""Bytes at both ends of a generator's state: its seed, its position, and words that change when it wraps around."""


@final
class Streams:
    """The streams of one rank: the common one, and its own.

    Args:
        generator: the default generator of the rank's device.
        place: the rank's place along "tensor".
        rank: the rank's name, for errors.
    """

    def __init__(self, generator: torch.Generator, place: int, rank: str) -> None:
        self.generator, self._place, self.rank = generator, place, rank
        self.is_open = False
        """Whether the model's forward runs; outside, layers that user code calls by themselves switch nothing."""
        self._common: dict[int, Tensor] = {}
        """By the seed of a stream of the rank: the state of the common stream meanwhile."""
        self._first = self._seen = generator.get_state()
        self._draws = self._draws_before = 0

    def begin(self) -> None:
        """Begin a forward of the model with the common stream, also after an exception in the last forward."""
        if _seed_of(self.generator.get_state()) in self._common:
            self.leave("the last forward")
        self._common.clear()
        self._draws_before, self._first = self.look(), self._seen
        self.is_open = True

    def end(self) -> None:
        """End a forward of the model with the common stream."""
        self.is_open = False
        self.leave("the model")

    def look(self) -> int:
        """Return how many looks have found that numbers were drawn since the last look, or switch of streams."""
        now = self.generator.get_state()
        self._draws += not torch.equal(now, self._seen)
        self._seen = now
        return self._draws

    @property
    def has_drawn(self) -> bool:
        """Whether numbers were drawn since `begin`, by this rank."""
        return self.look() > self._draws_before

    def take_back(self) -> None:
        """Return to the state of `begin`, if no rank has drawn."""
        self.generator.set_state(self._first)
        self._seen = self._first

    def enter(self, number: int) -> None:
        """Draw from a stream of the rank from here on, after the layer of this number."""
        self.look()
        state = self._seen
        if _is_own(_seed_of(state)) or not (self.is_open or graph_task() != -1):
            return
        edges = torch.cat([state[:EDGE_BYTES], state[-EDGE_BYTES:]]).numpy().tobytes()
        digest = hashlib.blake2b(edges, digest_size=HASH_BYTES, key=f"{number} {self._place}".encode()).digest()
        seed = MARK | int.from_bytes(digest, "big")
        self.generator.manual_seed(seed)
        self._common[seed], self._seen = state, self.generator.get_state()

    def leave(self, name: str) -> None:
        """Draw from the common stream from here on, after the layer of this name.

        Raises:
            RuntimeError: a recomputation began where activations are split, and its stream is not known.
        """
        self.look()
        if not _is_own(seed := _seed_of(self._seen)):
            return
        if seed not in self._common:
            raise RuntimeError(
                f"{self.rank} A recomputation that includes '{name}' began after the layer that splits its "
                "activations over the axis 'tensor', so the random numbers that follow are not known. Let "
                "torch.utils.checkpoint begin before the column-wise layer, for example with the whole block."
            )
        self.generator.set_state(self._common.pop(seed))
        # Otherwise the next region would begin with the same stream. All ranks move: each knows only its own draws.
        torch.rand((), device=self.generator.device, generator=self.generator)
        self._seen = self.generator.get_state()


def _seed_of(state: Tensor) -> int:
    """Return the seed that a generator's state began with."""
    return int(state[:8].view(torch.int64))


def _is_own(seed: int) -> bool:
    return seed >> (8 * HASH_BYTES) == MARK >> (8 * HASH_BYTES)


@final
class Begin(Eager):
    """Before the model's forward."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def _run(self, *args: Any) -> None:
        self._streams.begin()


@final
class Follow(Eager):
    """After a layer with parameters that torch splits, or replicates, over the axis: switches to the output's stream.

    Compiled code has one stream, which `Compiled` guards.

    Args:
        number: of the layer, equal on all ranks.
    """

    def __init__(self, streams: Streams, number: int, name: str) -> None:
        super().__init__()
        self._streams, self._number, self._name = streams, number, name

    def __call__(self, *args: Any) -> None:
        """Run it, if not compiled."""
        if not torch.compiler.is_compiling():
            self._call(*args)

    def _run(self, module: nn.Module, args: Any, output: Any) -> None:
        is_split = is_output_split(module, args, output)
        if is_split:
            self._streams.enter(self._number)
        elif is_split is not None:
            self._streams.leave(self._name)


@final
class Compiled(Eager):
    """Around a compiled module with split layers: raises if it draws random numbers, the same for parts that differ."""

    def __init__(self, streams: Streams, name: str) -> None:
        super().__init__()
        self._streams, self._name = streams, name
        self._before = streams.look()

    def _run(self, module: nn.Module, args: Any, *output: Any) -> None:
        draws = self._streams.look()
        if not output:
            self._before = draws
        elif draws > self._before:
            raise RuntimeError(
                f"{self._streams.rank} '{self._name}' is compiled, has layers that are split over the axis 'tensor', "
                "and drew random numbers, which would be equal for the different activations of these ranks, such as "
                "masks of dropout. Set its dropout to 0, or do not compile it."
            )


@final
class Watch(Eager):
    """Before the model's first forwards: puts a `Compiled` around compiled modules that have split layers."""

    def __init__(self, streams: Streams, keep: Callable[[RemovableHandle], Any]) -> None:
        super().__init__()
        self._streams, self._keep, self._left = streams, keep, LOOKS
        self._known = set[str]()

    def _run(self, module: nn.Module, args: Any) -> None:
        if not self._left:
            return
        self._left -= 1
        for name, one in module.named_modules():
            is_new = name not in self._known and (is_compiled(one) or (one is module and is_called_by_compiled()))
            if is_new and has_split(map(type, one.parameters())):
                self._known.add(name)
                hook = Compiled(self._streams, name or type(one).__name__)
                self._keep(one.register_forward_pre_hook(hook, prepend=True))
                self._keep(one.register_forward_hook(hook))


def is_output_split(module: nn.Module, args: Any, output: Any) -> bool | None:
    """Return whether ranks along the axis have different parts of a layer's output; None if it cannot be told.

    A DTensor says so. A plain output is a part if it has fewer elements than the layer makes of its whole input.
    """
    outputs, inputs = find(output, Tensor), find(args, Tensor)
    if not outputs or not inputs:
        return None
    out, given = outputs[0], inputs[0]
    if has_split([type(out)]):
        return not all(one.is_replicate() for one in out.placements)  # type: ignore[attr-defined]
    if isinstance(width := getattr(module, "out_features", None), int):
        return out.numel() < given.numel() // max(1, given.shape[-1]) * width
    if isinstance(width := getattr(module, "embedding_dim", None), int):
        return out.numel() < given.numel() * width
    # The shape of a DTensor is that of the whole; such layers, as norms, change no shape.
    return out.numel() < given.numel() if has_split([type(given)]) else None
