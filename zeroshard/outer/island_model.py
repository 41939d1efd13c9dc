"""The shards of a model that zeroshard sharded, as the flat arrays that islands exchange.

Owns the way from masters to arrays and back, and what islands must have in common. It must not know the mailbox. Read
`whole/average.py` first, which does alike for averages.

Note: what is exchanged
    The values that the optimizer updates: masters where there are any, else parameters, of all trainable parameters, as
    this rank keeps them. At stage 0 every rank keeps all, so every rank exchanges all. States of the optimizer, buffers
    of modules and the loss scale stay the island's own. Formats below fp32 are exchanged in fp32: what rounding to the
    format drops is a part of the next change.
Note: what islands have in common
    An exchange adds arrays element by element, so a rank has the same elements in the same order on all islands. Equal
    numbers of them do not say so: units, frozen parameters and formats of other sizes may cut the model otherwise.
"""

import platform
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.core.version import VERSION
from zeroshard.join.start import texts_across_ranks
from zeroshard.outer.island_exchange import Island, Source, Values
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_source import open_mailbox
from zeroshard.whole.masters import follow_masters

__all__ = ["ModelShards", "join_islands"]

Tensor = torch.Tensor
PIECE_NUMEL: Final = 1 << 22
"""Elements that are copied at a time."""
_SHOWN: Final = 3
"""Slices that errors name."""
_SHOWN_LENGTH: Final = 400


@final
class ModelShards(Values):
    """One rank's slices of the trainable parameters of a sharded model.

    Args:
        engine: of the model's handle.
        optimizers: the model's, whose classes must be equal on all islands.
        facts: more that must be equal, such as the policy of seeds.

    Raises:
        ValueError: the model has no trainable parameters, or its parameters are not floating-point numbers.

    Collective: `texts`; every rank must call.
    """

    def __init__(
        self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer] = (), facts: Mapping[str, Any] | None = None
    ) -> None:
        self._engine, mesh = engine, engine.mesh
        self._buckets: list[Bucket] = [bucket for unit in engine.units for bucket in unit.reducible()]
        engine.learn()
        shards = self.read_shards()
        if not self._buckets or not all(one.is_floating_point() for one in shards):
            raise ValueError(f"{mesh} islands exchange trainable parameters of floating-point numbers; there are none.")
        is_wide = any(one.dtype == torch.float64 for one in shards)
        super().__init__(
            mesh.rank,
            mesh.world_size,
            sum(one.numel() for one in shards),
            "<f8" if is_wide else "<f4",
            {
                "model": self._describe(),
                "optimizers": ", ".join(type(one).__name__ for one in optimizers),
                "zeroshard": VERSION,
                "torch": str(torch.__version__),
                "byte order": platform.machine(),
                **(facts or {}),
            },
        )
        self.facts["shards"] = self._describe_shards()

    def _describe(self) -> str:
        """Return the model's names, shapes and dtypes as a count and a checksum."""
        slots = sorted((slot for unit in self._engine.units for slot in unit.slots), key=lambda slot: slot.name)
        text = ";".join(f"{slot.name}{tuple(slot.shape)}{slot.bucket.dtypes.master}" for slot in slots)
        return f"{len(slots)} parameters, CRC-32 {zlib.crc32(text.encode()):08x}"

    def _describe_shards(self) -> str:
        """Return which elements each rank keeps, in their order, as the first ones and a checksum."""
        found = []
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                start, stop = (end - bucket.layout.offsets[index] for end in bucket.master_range(index))
                found += [f"{slot_of(parameter).name}[{start}:{stop}]"] if stop > start else []
        ranks = self.texts(";".join(found))
        shown = ", ".join(ranks[0].split(";")[:_SHOWN])[:_SHOWN_LENGTH]
        return f"{shown}, ... on rank 0, CRC-32 {zlib.crc32(str(ranks).encode()):08x}"

    def read_shards(self) -> list[Tensor]:
        """Return this rank's slices of the values that the optimizer updates, 1-d each, not copied."""
        found = [b.master(index) for b in self._buckets for index in range(len(b.parameters))]
        return [one.detach() for one in found if one.numel()]

    @torch.no_grad()
    def write_shards(self, values: Sequence[Tensor]) -> None:
        """Replace the slices by others of the same sizes, and the parameters by them.

        Raises:
            RuntimeError: called inside a pass or `gathered()`.

        Collective: at stages 1 and 2, an all-gather of parameters; every rank must call.
        """
        self._engine.await_published()  # other ranks are reading the shards
        for shard, other in zip(self.read_shards(), values, strict=True):
            for start in range(0, shard.numel(), PIECE_NUMEL):
                shard[start : start + PIECE_NUMEL].copy_(other[start : start + PIECE_NUMEL])
        follow_masters(self._engine)

    def read(self) -> np.ndarray:
        """See `Values`."""
        self._engine.learn()
        values, start = np.empty(self.numel, self.dtype), 0
        target = torch.from_numpy(values)
        for shard in self.read_shards():
            for first in range(0, shard.numel(), PIECE_NUMEL):
                piece = shard[first : first + PIECE_NUMEL]
                target[start + first : start + first + piece.numel()].copy_(piece)
            start += shard.numel()
        return values

    def write(self, values: np.ndarray) -> None:
        """See `Values`."""
        flat = torch.from_numpy(values)
        self.write_shards(flat.split([one.numel() for one in self.read_shards()]))

    def texts(self, text: str) -> list[str]:
        """See `Values`."""
        return [text] if self.ranks == 1 else texts_across_ranks(self._engine.mesh, text)


def join_islands(
    engine: Engine,
    options: IslandOptions,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    facts: Mapping[str, Any] | None = None,
    source: Source | None = None,
) -> Island:
    """Make the ranks of a sharded model an island, and return it: call its `after_step()` after each step.

    Args:
        engine: of the model's handle.
        source: instead of the mailbox, for a replay: an `island_source.Logged`.

    Raises:
        MailboxError: the mailbox cannot be reached, or refuses this island.
        ValueError: an argument is out of range.

    Collective: all-gathers of short texts, and of parameters at stages 1 and 2; every rank must call.
    """
    shards = ModelShards(engine, optimizers, facts)
    return Island(options, shards, source or open_mailbox(options, shards))
