"""The exchange at a step: matrices go to their owners, which update them whole, and the new values come back.

Owns the pieces of an update (`core/update.py`) that need whole tensors. It must not know which optimizers do, nor when
a step may be made. Read `table/owners.py` (who updates what) and "Note: the exchange" first.

Note: the exchange
    Gradients, masters and parameters are cut anywhere, and stay so. At a step the ranks of one copy send the owner of
    a matrix their slices of its gradient, as it is held, and of its master values. There the user's optimizer updates
    a tensor of the parameter's shape and strides, with states that live on the owner alone. Ranks send the gradients
    and values of the next round (`Round`) before they update the present one, and the new values go back while the
    next one is updated, so at most three rounds are in memory. Where every rank updates all, nothing is sent: its
    entries get the parameter's shape for the time of the update.
    Between steps groups hold slices, in the user's order, and the states of a matrix are those of its owner's slice,
    which may have no element.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.gradient import part_of
from zeroshard.core.slot import Slot, slot_of
from zeroshard.core.update import Piece, Resident
from zeroshard.optim.whole import Whole
from zeroshard.table.owners import Round, plan_owners, plan_rounds
from zeroshard.torch_private import NoSubclasses, foreach_copy_
from zeroshard.wire.comm import Pending, Tag

__all__ = ["Exchange"]

Tensor = torch.Tensor
ROUTES, LIVE_ROUNDS = 3, 3
"""Messages of a round that have tags of their own, and rounds that are in memory at most."""
KEPT_PLANS = 16
"""Sets of parameters with gradients that rounds are kept for."""


@final
class Exchange:
    """The matrices that one optimizer updates whole, and their owners.

    Args:
        whole: what the optimizer needs.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, whole: Whole) -> None:
        self._engine, self._optimizer, self._whole = engine, optimizer, whole
        self.loads = [0.0] * engine.mesh.shard_size
        """Of each rank of a copy: the cost of what it updates."""
        self.digest = 0
        """Of the owners chosen so far, which all ranks choose for themselves."""
        self._rounds: dict[tuple[int, ...], list[Round]] = {}
        self._lent: list[tuple[Tensor, Tensor, Tensor]] = []
        """Slices, the entries that hold their states now, and where the entries' values go."""

    def plan(self, groups: Sequence[dict[str, Any]]) -> None:
        """Choose owners for parameters in new groups; those in others keep theirs, with their states."""
        is_whole = self._optimizer.defaults.get("whole", True)
        slots = [slot_of(p) for group in groups if group.get("whole", is_whole) for p in group["params"]]
        slots = [slot for slot in slots if self._whole.takes(_shape_of(slot))]
        costs = [float(self._whole.cost(_shape_of(slot))) * slot.parameter.requires_grad for slot in slots]
        for slot, cost in zip(slots, costs, strict=True):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"The cost of '{slot.name}' {_shape_of(slot)} must be a number from 0 on; got {cost}.")
        numels = [math.prod(_shape_of(slot)) for slot in slots]
        owners = plan_owners(costs, numels, len(self.loads), self.loads)
        for slot, owner, cost in zip(slots, owners, costs, strict=True):
            slot.updater = owner
            self.loads[owner] += cost
        self.digest = zlib.crc32(repr(owners).encode(), self.digest)

    def pieces(self) -> Iterator[Piece]:
        """Return the parts of an update, in the order of all ranks; made while groups hold their entries."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        plain = [[master for master in entries if slot_of(master).updater is None] for entries in groups]
        placed = [(place, m) for place, entries in enumerate(groups) for m in entries if slot_of(m).updater is not None]
        here, away = list[tuple[int, Tensor]](), dict[tuple[torch.dtype, torch.dtype], list[tuple[int, Tensor]]]()
        for place, master in placed:
            if (slot := slot_of(master)).has_grad:
                dtypes = slot.bucket.dtypes.grad, master.dtype
                (here if slot.bucket.spec.updates_all else away.setdefault(dtypes, [])).append((place, master))
        made: list[Piece] = [Resident(plain)] if any(plain) else []
        if here:
            made.append(_Shaped(self, len(groups), here))
        for entries in away.values():
            slots = [slot_of(master) for _, master in entries]
            key = tuple(slot.place for slot in slots)
            if (rounds := self._rounds.get(key)) is None:
                if len(self._rounds) == KEPT_PLANS:
                    self._rounds.clear()
                owners = [slot.updater or 0 for slot in slots]
                rounds = self._rounds[key] = plan_rounds(
                    owners, [slot.bucket.layout.parts(slot.index) for slot in slots]
                )
            made += [_Routed(self, self._engine, len(groups), entries, one, n) for n, one in enumerate(rounds)]
        return iter(made)

    def lend(self, master: Tensor, values: Tensor, grad: Tensor) -> Tensor:
        """Return what the optimizer updates in the place of a slice: a tensor of the parameter's shape.

        Args:
            values: flat, all of the parameter's master values; changed in place.
            grad: flat, of any dtype.
        """
        places, index = slot_of(master).bucket.places, slot_of(master).index
        shape, strides = places.shapes[index], places.strides[index]
        entry = torch.nn.Parameter(values.as_strided(shape, strides, values.storage_offset()))
        grad = grad.to(values.dtype)
        entry.grad = grad.as_strided(shape, strides, grad.storage_offset())
        state = self._optimizer.state
        if master in state:
            state[entry] = state.pop(master)
        self._lent.append((master, entry, values))
        return entry

    def take_back(self) -> None:
        """Give slices their states back, and leave the new values where the old ones were."""
        lent, self._lent, state = self._lent, [], self._optimizer.state
        for master, entry, values in lent:
            if entry in state:
                state[master] = state.pop(entry)
            if entry.data_ptr() != values.data_ptr():  # an optimizer may replace `.data`
                slot = slot_of(master)
                values.copy_(_flat(entry, slot.bucket.places.strides[slot.index]))


def _shape_of(slot: Slot) -> tuple[int, ...]:
    return slot.bucket.places.shapes[slot.index]


def _flat(entry: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the elements of an entry in the order of a parameter's memory, which user code may have replaced."""
    held = entry.detach()
    if held.stride() != strides:
        held = torch.empty_strided(held.shape, strides, dtype=held.dtype, device=held.device).copy_(held)
    return held.as_strided((held.numel(),), (1,), held.storage_offset())


@final
class _Shaped(Piece):
    """Parameters that this rank updates as all others do; they need their shape alone."""

    def __init__(self, exchange: Exchange, count: int, masters: Sequence[tuple[int, Tensor]]) -> None:
        self._exchange, self._count, self._masters = exchange, count, masters

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        groups = [list[Tensor]() for _ in range(self._count)]
        with NoSubclasses():
            for place, master in self._masters:
                groups[place].append(self._exchange.lend(master, master.detach(), part_of(slot_of(master)).detach()))
        return groups

    def finish(self) -> None:
        """See `Piece`."""
        self._exchange.take_back()


@final
class _Routed(Piece):
    """One round: this rank sends its slices, updates what it owns of them, and gets the others' new values.

    Args:
        count: of groups.
        masters: all that are exchanged in this step, each with the place of its group.
        number: of the round.
    """

    def __init__(
        self,
        exchange: Exchange,
        engine: Engine,
        count: int,
        masters: Sequence[tuple[int, Tensor]],
        plan: Round,
        number: int,
    ) -> None:
        self._exchange, self._engine, self._count, self._plan, self._round = exchange, engine, count, plan, number
        self._rank = engine.mesh.shard_rank
        self._given = [masters[one] for bundle in plan.bundles for one in bundle]
        self._owned = [masters[one] for one in plan.bundles[self._rank]]
        self._there = [[row[one] for row in plan.counts] for one in range(len(plan.bundles))]
        """The counts of the way back."""
        self._buffers: list[Tensor] = []
        """Of the slices and the whole gradients, then of the slices and the whole values."""
        self._joint: list[Tensor] = []
        """The values of the matrices that this rank owns, flat."""

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        # Buffers are known by their addresses, and nothing has none.
        self._buffers.append(buffer := self._engine.comm.pool.take(max(1, numel), dtype, self._engine.mesh.device))
        return buffer[:numel]

    def _route(self, given: Tensor, taken: Tensor, counts: list[list[int]], which: int, what: str) -> Pending:
        number = self._engine.order.next_number()
        tag = Tag(number, self._round % LIVE_ROUNDS * ROUTES + which, f"{what}, round {self._round} of an update")
        return self._engine.comm.route(given, taken, counts, tag, "update")

    def start(self) -> None:
        """See `Piece`."""
        masters = [master for _, master in self._given]
        given, owned = self._plan.given_numel(self._rank), self._plan.owned_numel(self._rank)
        self._parts = [master.detach() for master in masters]
        grads = [part_of(slot_of(master)) for master in masters]
        self._grads = self._take(given, slot_of(masters[0]).bucket.dtypes.grad), self._take(owned, grads[0].dtype)
        self._values = self._take(given, masters[0].dtype), self._take(owned, masters[0].dtype)
        with torch.no_grad(), NoSubclasses():
            torch.cat(grads, out=self._grads[0])
            torch.cat(self._parts, out=self._values[0])
        self._pending = [
            self._route(*self._grads, self._plan.counts, 0, "gradients to their owners"),
            self._route(*self._values, self._plan.counts, 1, "values to their owners"),
        ]

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        for one in self._pending:
            one.wait()
        pool, groups = self._engine.comm.pool, [list[Tensor]() for _ in range(self._count)]
        pool.give(self._buffers[0])
        pairs = zip(self._joined(self._values[1]), self._joined(self._grads[1]), strict=True)
        for (place, master), (values, grad) in zip(self._owned, pairs, strict=True):
            groups[place].append(self._exchange.lend(master, values, grad))
            self._joint.append(values)
        return groups

    def _joined(self, taken: Tensor) -> list[Tensor]:
        """Return each matrix that this rank owns, flat, of what came rank by rank; one alone is there as it is."""
        pieces = self._split(taken)
        return [taken] if len(pieces) == 1 else [torch.cat(one) for one in pieces]

    def _split(self, taken: Tensor) -> list[list[Tensor]]:
        """Return the parts of each matrix that this rank owns, by rank."""
        parts = [self._plan.parts[one] for one in self._plan.bundles[self._rank]]
        sizes = [one[rank] for rank in range(len(self._there)) for one in parts]
        cuts = taken.split_with_sizes(sizes)
        return [[*cuts[place :: len(parts)]] for place in range(len(parts))]

    def finish(self) -> None:
        """See `Piece`."""
        self._exchange.take_back()
        pool, taken = self._engine.comm.pool, self._values[1]
        pool.give(self._buffers[1])
        for pieces, values in zip(self._split(taken), self._joint, strict=True):
            if values is not taken:
                foreach_copy_(pieces, [*values.split_with_sizes([one.numel() for one in pieces])])
        self._joint = []
        self._pending = [self._route(taken, self._values[0], self._there, 2, "new values from their owners")]

    def close(self) -> None:
        """See `Piece`."""
        self._pending[0].wait()
        with torch.no_grad(), NoSubclasses():
            foreach_copy_(self._parts, [*self._values[0].split_with_sizes([part.numel() for part in self._parts])])
        for buffer in self._buffers[2:]:
            self._engine.comm.pool.give(buffer)
