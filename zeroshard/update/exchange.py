"""The exchange at a step: ranks send matrices to their owners, which update whole matrices and return new values.

Owns the pieces of an update (`optim/pieces.py`) that need whole tensors. It must not know which optimizers need them,
or when a step may run. Read `table/owners.py` (which rank updates which matrix) and "Note: the exchange" first.

Note: the exchange
    Shards cut gradients, masters and parameters at any element. At a step, the ranks of one replica send their slices
    of a matrix's gradient, in the dtype of held gradients, and of its master values to the owner of the matrix. The
    owner runs the user's optimizer on a tensor of the parameter's shape and strides; only the owner has its states.
    Ranks send the gradients and values of the next round (`Round`) before they update the current round, and return
    the new values during the update of the next round, so at most three rounds are in memory. Where every rank updates
    all parameters, ranks send nothing: entries get the parameter's shape during the update, which torch's own call
    makes, as in plain training.
    An owner that changes or drops a gradient does so to its copy, which nobody sends back: kept gradients are those
    from before the update, unless every rank updates all parameters. Muon and Adafactor change no gradients.
    Between steps, groups hold slices, in the user's order. The states of a matrix belong to its owner's slice, which
    may have no elements.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.gradient import part_of
from zeroshard.core.slot import Slot, slot_of
from zeroshard.optim.pieces import Piece
from zeroshard.optim.whole import Whole
from zeroshard.table.owners import Round, plan_owners, plan_rounds
from zeroshard.torch_private import NoSubclasses, foreach_copy_
from zeroshard.update.sources import Lent, Source
from zeroshard.update.streamed import Files
from zeroshard.wire.comm import Pending, Tag

__all__ = ["Exchange"]

Tensor = torch.Tensor
Placed = list[tuple[int, Tensor]]
"""Slices, each with the index of its group."""
ROUTES, LIVE_ROUNDS = 3, 3
"""Messages of a round, each with its own tag; and the largest number of rounds in memory."""
KEPT_PLANS = 16
"""Number of sets of parameters with gradients whose rounds are cached."""


@final
class Exchange(Source):
    """The matrices that one optimizer updates whole, and their owners.

    Args:
        whole: the requirements of the optimizer.
        files: the file of parameters between uses; None if they are in memory.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, whole: Whole, files: Files | None) -> None:
        self.engine, self.optimizer, self._whole, self._files = engine, optimizer, whole, files
        self.disk = None if files is None else files.disk
        self.loads: list[float] = [0.0] * engine.mesh.shard_size
        self._digest = 0
        """CRC-32 of the owners chosen so far; each rank computes the same choice."""
        self._rounds: dict[tuple[int, ...], list[Round]] = {}
        self._lent: list[Lent] = []
        """The entries of the piece that is updated, which hold the states of their slices."""

    def plan(self, groups: Sequence[dict[str, Any]]) -> None:
        """Choose owners for parameters in new groups; others, and those of a removed group, keep owners and states."""
        is_whole = self.optimizer.defaults.get("whole", True)
        found = [slot_of(p) for group in groups if group.get("whole", is_whole) for p in group["params"]]
        slots = [slot for slot in found if slot.updater is None and self._whole.takes(_shape_of(slot))]
        costs = [float(self._whole.cost(_shape_of(slot))) * slot.parameter.requires_grad for slot in slots]
        owners = plan_owners(costs, [slot.shape.numel() for slot in slots], len(self.loads), self.loads)
        for slot, owner, cost in zip(slots, owners, costs, strict=True):
            slot.updater = owner
            self.loads[owner] += cost
        self._digest = zlib.crc32(repr(owners).encode(), self._digest)
        self.choice = f" with owners {self._digest:08x}"

    @contextmanager
    def update(self) -> Iterator[Iterable[Piece] | Piece]:
        """See `Source`."""
        with nullcontext() if self._files is None else self._files.written():
            try:
                yield self._pieces()
            except BaseException:
                self.take_back()
                raise

    def _pieces(self) -> list[Piece] | Piece:
        groups = [group["params"] for group in self.optimizer.param_groups]
        here, away = Placed(), dict[tuple[torch.dtype, torch.dtype], Placed]()
        for place, master in ((place, master) for place, entries in enumerate(groups) for master in entries):
            if (slot := slot_of(master)).updater is None or slot.bucket.spec.updates_all:
                here.append((place, master))
            elif _is_updated(slot):
                dtypes = slot.bucket.dtypes.grad, master.dtype
                away.setdefault(dtypes, Placed()).append((place, master))
        shaped = _Shaped(self, here)
        if not away and self._files is None:
            return shaped
        made: list[Piece] = [shaped] if here else []
        for masters in away.values():
            made += [_Routed(self, masters, turn, number) for number, turn in enumerate(self._turns(masters))]
        return made

    def _turns(self, masters: Placed) -> list[Round]:
        slots = [slot_of(master) for _, master in masters]
        if (key := tuple(slot.place for slot in slots)) not in self._rounds:
            if len(self._rounds) == KEPT_PLANS:
                self._rounds.clear()
            parts = [slot.bucket.layout.numels_by_rank(slot.index) for slot in slots]
            self._rounds[key] = plan_rounds([slot.updater or 0 for slot in slots], parts)
        return self._rounds[key]

    def lend(self, lent: Iterable[tuple[int, Tensor, Tensor, Tensor | None]]) -> list[list[Tensor]]:
        """Return the entries that replace slices in groups: tensors of the parameters' shapes, with their states.

        Args:
            lent: for each parameter, the index of its group, the slice, and two flat tensors: all its master values,
                and its gradient, of any dtype, on any device, or None. Both are changed in place. A slice that has no
                owner stays.
        """
        groups, state = [list[Tensor]() for _ in self.optimizer.param_groups], self.optimizer.state
        for place, master, *flat in lent:
            if slot_of(master).updater is None:
                groups[place].append(master)
                continue
            places, index = slot_of(master).bucket.places, slot_of(master).index
            form = places.shapes[index], places.strides[index]
            values, grad = (one if one is None else one.as_strided(*form, one.storage_offset()) for one in flat)
            assert values is not None
            one = Lent(master, values, grad)
            groups[place].append(one.begin())
            if master in state:
                state[one.entry] = _moved(state.pop(master), one.entry.device)
            self._lent.append(one)
        return groups

    def take_back(self) -> list[Tensor]:
        """Return states to slices, and keep the new values; return the slices whose gradients were dropped."""
        lent, self._lent, state = self._lent, [], self.optimizer.state
        for one in lent:
            if one.entry in state:
                state[one.master] = _moved(state.pop(one.entry), one.master.device)
            one.end()
        return [one.master for one in lent if one.has_dropped]


def _shape_of(slot: Slot) -> tuple[int, ...]:
    return slot.bucket.places.shapes[slot.index]


def _is_updated(slot: Slot) -> bool:
    """Return whether a parameter has something to update; Adafactor and Muon of torch divide by its elements."""
    return slot.has_grad and slot.shape.numel() > 0


def _gradient_of(master: Tensor) -> Tensor | None:
    """Return the gradient of a parameter that this rank updates whole, if it is updated."""
    slot = slot_of(master)
    return part_of(slot).detach() if slot.updater is not None and _is_updated(slot) else None


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the states of a matrix to a device; counters stay, since kernels read them on the host."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            state[key] = value.to(device)
    return state


@final
class _Shaped(Piece):
    """Parameters that every rank updates, which need only their shape, and slices that stay what they are."""

    def __init__(self, exchange: Exchange, masters: Placed) -> None:
        self._exchange, self._masters = exchange, masters

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        with NoSubclasses():
            return self._exchange.lend((place, m, m.detach(), _gradient_of(m)) for place, m in self._masters)

    def finish(self) -> None:
        """See `Piece`."""
        for master in self._exchange.take_back():
            master.grad = None


@final
class _Routed(Piece):
    """One round: this rank sends its slices, updates the matrices that it owns, and receives the other new values.

    Args:
        masters: all slices exchanged in this step, each with the index of its group.
        number: the number of the round.
    """

    def __init__(self, exchange: Exchange, masters: Placed, turn: Round, number: int) -> None:
        self._exchange, self._engine, self._turn, self._number = exchange, exchange.engine, turn, number
        self._rank = self._engine.mesh.shard_rank
        self._given = [masters[one] for bundle in turn.bundles for one in bundle]
        self._owned = [masters[one] for one in turn.bundles[self._rank]]
        self._buffers: list[Tensor] = []
        """Buffers of slices of gradients and whole gradients; then the same for values."""
        self._joint: list[Tensor] = []
        """The flat values of the matrices that this rank owns."""

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        # The workspace identifies buffers by address, and an empty tensor has no address.
        self._buffers.append(buffer := self._engine.comm.pool.take(max(1, numel), dtype, self._engine.mesh.device))
        return buffer[:numel]

    def _route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], which: int, what: str) -> Pending:
        number = self._engine.order.next_number()
        tag = Tag(number, self._number % LIVE_ROUNDS * ROUTES + which, f"{what}, round {self._number} of an update")
        return self._engine.comm.route(given, taken, counts, tag, "update")

    def start(self) -> None:
        """See `Piece`."""
        masters, turn, given = [master for _, master in self._given], self._turn, self._turn.given_numel(self._rank)
        self._parts, owned = [master.detach() for master in masters], turn.owned_numel(self._rank)
        grads = [part_of(slot_of(master)) for master in masters]
        self._grads = self._take(given, grads[0].dtype), self._take(owned, grads[0].dtype)
        self._values = self._take(given, masters[0].dtype), self._take(owned, masters[0].dtype)
        with torch.no_grad(), NoSubclasses():
            # Not torch.cat: offloaded slices are on another device than the buffer.
            foreach_copy_(self._cut(self._grads[0]), grads)
            foreach_copy_(self._cut(self._values[0]), self._parts)
        self._pending = [
            self._route(*self._grads, turn.counts, 0, "gradients to their owners"),
            self._route(*self._values, turn.counts, 1, "values to their owners"),
        ]

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        for one in self._pending:
            one.wait()
        self._engine.comm.pool.give(self._buffers[0])
        self._joint = self._joined(self._values[1])
        whole = zip(self._owned, self._joint, self._joined(self._grads[1]), strict=True)
        return self._exchange.lend((*placed, values, grad) for placed, values, grad in whole)

    def _cut(self, given: Tensor) -> list[Tensor]:
        """Return the place in a buffer of each slice that this rank sends."""
        return [*given.split_with_sizes([part.numel() for part in self._parts])]

    def _joined(self, taken: Tensor) -> list[Tensor]:
        """Return each matrix that this rank owns, flat, of what came rank by rank; one alone is there as it is."""
        pieces = self._split(taken)
        return [taken] if len(pieces) == 1 else [torch.cat(one) for one in pieces]

    def _split(self, taken: Tensor) -> list[list[Tensor]]:
        """Return the parts of each matrix that this rank owns, by rank."""
        parts = [self._turn.parts[one] for one in self._turn.bundles[self._rank]]
        cuts = taken.split_with_sizes([one[rank] for rank in range(len(self._turn.bundles)) for one in parts])
        return [[*cuts[place :: len(parts)]] for place in range(len(parts))]

    def finish(self) -> None:
        """See `Piece`."""
        self._exchange.take_back()
        self._engine.comm.pool.give(self._buffers[1])
        taken = self._values[1]
        for pieces, values in zip(self._split(taken), self._joint, strict=True):
            if values is not taken:
                foreach_copy_(pieces, [*values.split_with_sizes([one.numel() for one in pieces])])
        self._joint, there = [], [*zip(*self._turn.counts, strict=True)]
        self._pending = [self._route(taken, self._values[0], there, 2, "new values from their owners")]

    def close(self) -> None:
        """See `Piece`."""
        self._pending[0].wait()
        with torch.no_grad(), NoSubclasses():
            foreach_copy_(self._parts, self._cut(self._values[0]))
        for buffer in self._buffers[2:]:
            self._engine.comm.pool.give(buffer)
