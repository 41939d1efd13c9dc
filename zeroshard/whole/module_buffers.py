"""Buffers of modules that forwards change, such as the statistics of batch norms: equal on all ranks after a step.

Owns the choice of the buffers that are sent, and their message. It must not know passes. Read `core/followed.py` first.

Note: DistributedDataParallel's values, earlier
    DistributedDataParallel broadcasts all buffers before a forward that follows a training forward outside `no_sync()`.
    Here only changed buffers are sent, and as early as at the step, so that evaluation, checkpoints and `gathered()`
    find equal values and send nothing. They are written before a forward or a step, never inside a backward, which may
    read them; statistics that a forward with gradients has read in evaluation mode, and its backward may read, at the
    step.
Note: which buffers
    A change is another object or another version. The kernels of batch norms leave versions alone, so the buffers of a
    module that has statistics count as changed if it is, or was at a forward, in training mode, or if one of them has
    another version. A module with other names for its statistics is found at the end of its first backward in training
    mode, where values are compared. The vote at the end of each backward has the digest of this rank's changes: if all
    digests are equal, so are the changes; otherwise ranks compare them one by one. The values are sent at the step, or
    at the next forward, which then reads the vote. Between two forwards without a backward there is no vote, so ranks
    meet for one, except after a step that sent nothing: then the values follow at the next step. What user code changes
    between a backward and the step follows at the next step.
"""

import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import nn

from zeroshard.core.followed import Followed, OwnBuffers
from zeroshard.core.votes import Votes
from zeroshard.setup.request import Described
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import bytes_in, foreach_copy_, is_lazy, local_of, version_of
from zeroshard.wire.comm import Comm, unexpanded

__all__ = ["follow_buffers"]

Tensor = torch.Tensor
Place = tuple[str, nn.Module, str]
Preserve = Callable[[Sequence[Tensor]], None]
STATISTICS = "running_mean"
"""The buffer of a module whose kernels change buffers without counting versions."""
NEUTRAL = 1 << 40
"""More than any number of a rank."""
WHAT = "the buffers that forwards changed"
TRAINED = "a training forward of a model with buffers (every rank makes one, or none; eval() and no_sync() are free)"
"""Where a rank waits for others after a forward that some may not have made."""


def follow_buffers(described: Described, comm: Comm, votes: Votes, preserve: Preserve) -> Followed:
    """Return what ranks do with the buffers of a model."""
    how, ranks = described.settings.buffers, len(described.mesh.data_ranks)
    places = [] if how == "own" or ranks == 1 else [*_places_of(described.model, described.ignored)]
    return Following(comm, votes, preserve, places, is_mean=how == "mean") if places else OwnBuffers()


def _places_of(model: nn.Module, ignored: Collection[int]) -> Iterator[Place]:
    """Yield name, module and key of each buffer, without those of modules all of whose parameters are ignored."""
    apart: set[nn.Module] = set()
    for module in model.modules():
        own = [*module.parameters()]
        if own and all(id(parameter) in ignored for parameter in own):
            apart.update(module.modules())
    for path, module in model.named_modules():
        for key in module._buffers if module not in apart else ():
            yield f"{path}.{key}" if path else key, module, key


@final
class Following:
    """The buffers of all ranks follow those of the first rank of the data-parallel axes.

    Args:
        preserve: called before buffers are written.
        places: name, module and key of each buffer.
        is_mean: whether floating-point buffers follow the mean over these ranks.
    """

    def __init__(self, comm: Comm, votes: Votes, preserve: Preserve, places: Sequence[Place], *, is_mean: bool) -> None:
        self._comm, self._votes, self._preserve, self._places, self._is_mean = comm, votes, preserve, places, is_mean
        parts = comm.mesh.tensor_ranks
        self._part, self._parts = parts.index(comm.mesh.rank), len(parts)
        self._seen: list[tuple[Callable[[], Tensor | None], int]] = [self._look(place) for place in range(len(places))]
        """A weak reference to each buffer, and its version, when ranks had equal values."""
        self._silent = {place for place, (_, module, _) in enumerate(places) if STATISTICS in module._buffers}
        """Buffers that training changes without another version."""
        self._modules = {module for _, module, _ in places}
        self._trained: set[nn.Module] = set()
        """Modules with buffers that were in training mode at a forward since ranks had equal values."""
        self._read: set[nn.Module] = set()
        """Modules with buffers that were in evaluation mode at a forward with gradients since the last step."""
        self._first = {
            place: one.detach().clone()
            for place in range(len(places))
            if place not in self._silent
            and (one := self._buffer(place)) is not None
            and one.dim() == 1
            and one.is_floating_point()
        }
        """Values of what may be statistics under other names, until a module has trained, or a change was counted."""
        self._changed: frozenset[int] = frozenset()
        """What the last digest was computed from."""
        self._left: dict[int, Tensor] = {}
        """Values for buffers that backwards may still read: the statistics of norms in `_read`."""
        self._agreed: frozenset[int] = frozenset()
        """Buffers that votes have named since ranks had equal values; equal on all ranks, as what follows."""
        self._is_due = False
        """Whether a forward may have changed buffers since ranks had equal values."""
        self._is_told = False
        """Whether a vote has the digest of these changes."""
        self._is_calm = False
        """Whether the last step found no change."""

    def digest(self, *, is_followed: bool) -> int:
        """See `Followed`."""
        self._changed = frozenset(self._find_changed() if is_followed else ())
        if is_followed:
            self._is_due = self._is_told = True
        return zlib.crc32(repr([(place, self._shape(place)) for place in sorted(self._changed)]).encode())

    def numbers(self) -> list[int]:
        """See `Followed`."""
        found = []
        for place in range(len(self._places)):
            shape = zlib.crc32(repr(self._shape(place)).encode())
            found += [-int(place in self._changed), shape, -shape]
        # Ranks along the tensor axis may have parts of other shapes.
        rest = [NEUTRAL] * len(found)
        return [number for part in range(self._parts) for number in (found if part == self._part else rest)]

    def agree(self, least: Sequence[int]) -> None:
        """See `Followed`.

        Raises:
            RankMismatchError: a persistent buffer has other shapes on other ranks; every rank raises.
        """
        changed, unequal = set(self._changed if not least else ()), set[int]()
        for at in range(0, len(least), 3):
            if least[at] < 0:
                place = at // 3 % len(self._places)
                (changed if least[at + 1] == -least[at + 2] else unequal).add(place)
        self._agreed |= changed - unequal
        # A cache that follows the inputs of its rank stays the rank's own.
        self._accept(unequal)
        for place in sorted(unequal):
            name, module, key = self._places[place]
            if key not in module._non_persistent_buffers_set:
                self._raise_unequal(name, place)

    def begin_forward(self, *, is_followed: bool) -> None:
        """See `Followed`."""
        if self._is_due and (self._is_told or not self._is_calm):
            self._follow(f"a forward after {TRAINED}")
        self._note_modes()
        if torch.is_grad_enabled():
            self._read.update(module for module in self._modules if not module.training)
        if is_followed:
            self._is_due, self._is_told = True, False

    def settle(self) -> None:
        """See `Followed`."""
        if self._is_due and (self._is_told or not self._is_calm):
            self._is_calm = not self._follow(f"a step after {TRAINED}")
        self._write_left()

    def _follow(self, place: str) -> bool:
        """Take the values of the first rank, and return whether there were changes.

        Collective: without a backward since the changes, an all-reduce of 40 bytes; for each kind of device with
            changes a broadcast, or an all-gather for means.
        """
        if not self._is_told:
            told = self._votes.meet(place, self.digest(is_followed=True))
            self.agree([] if told.least == told.greatest else self._comm.agree(self.numbers(), WHAT))
        self._votes.read()
        changed, self._agreed, self._is_due, self._is_told = sorted(self._agreed), frozenset(), False, False
        buffers = [(place, one) for place in changed if (one := self._buffer(place)) is not None]
        for is_on_host in (False, True):
            here = [(place, one) for place, one in buffers if (one.device.type == "cpu") is is_on_host]
            # A wider dtype first, so that each buffer is aligned in the message.
            here.sort(key=lambda pair: -pair[1].itemsize)
            for is_mean in (False, True):
                chosen = [pair for pair in here if (self._is_mean and pair[1].is_floating_point()) is is_mean]
                if chosen:
                    self._send(chosen, is_mean=is_mean)
        self._accept(changed)
        self._trained.clear()
        return bool(changed)

    def _send(self, buffers: Sequence[tuple[int, Tensor]], *, is_mean: bool) -> None:
        mesh = self._comm.mesh
        with torch.no_grad():
            if is_mean:
                rows = self._collect(_pack(buffers))
                # Each in memory of its own, where values of each dtype are aligned.
                self._write(buffers, [rows[rank].clone() for rank in mesh.data_ranks])
            elif mesh.rank == mesh.data_ranks[0]:
                self._comm.broadcast(_pack(buffers), WHAT, "buffers", is_part=True)
            else:
                nbytes = sum(one.nbytes for _, one in buffers)
                message = torch.empty(nbytes, dtype=torch.uint8, device=buffers[0][1].device)
                self._comm.broadcast(message, WHAT, "buffers", is_part=True)
                self._write(buffers, [message])

    def _collect(self, message: Tensor) -> Tensor:
        if self._parts > 1:
            # All ranks collect, and other places of the tensor axis may have parts of other sizes.
            longest = -self._comm.agree([-message.numel()], WHAT)[0]
            message = torch.cat([message, message.new_zeros(longest - message.numel())])
        return self._comm.collect(message, WHAT, "buffers")

    def _write(self, buffers: Sequence[tuple[int, Tensor]], rows: Sequence[Tensor]) -> None:
        """Write the mean of some ranks' messages to buffers, by dtype for few launches; keep those that must wait."""
        self._preserve([one for _, one in buffers])
        start, by_dtype = 0, dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]()
        for place, one in buffers:
            values = [row[start : start + one.nbytes].view(one.dtype).view(one.shape) for row in rows]
            start += one.nbytes
            source = unexpanded(values[0] if len(rows) == 1 else _mean(values), one.stride())
            self._left.pop(place, None)
            if place in self._silent and (module := self._places[place][1]) in self._read and not module.training:
                self._left[place] = source.clone()
                continue
            # No backward reads the statistics of other norms: they need no new version.
            target = unexpanded(one.data if place in self._silent else one, one.stride())
            if is_lazy(target):
                target.copy_(source)
                continue
            targets, sources = by_dtype.setdefault(one.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        for targets, sources in by_dtype.values():
            foreach_copy_(targets, sources)

    def _write_left(self) -> None:
        """Write what waited for the step, except to what has changed since."""
        for place, values in self._left.items():
            one = self._buffer(place)
            if one is not None and not self._is_counted(place) and self._places[place][1] not in self._trained:
                self._preserve([one])
                with torch.no_grad():
                    unexpanded(one, one.stride()).copy_(values)
                self._accept([place])
        self._left.clear()
        self._read.clear()

    def _note_modes(self) -> None:
        self._trained.update(module for module in self._modules if module.training)

    def _find_changed(self) -> Iterator[int]:
        self._note_modes()
        self._compare_values()
        counted = {place for place in range(len(self._places)) if self._is_counted(place)}
        changing = self._trained | {self._places[place][1] for place in counted}
        for place, (_, module, _) in enumerate(self._places):
            is_silent = place in self._silent and module in changing
            if place in counted or (is_silent and self._buffer(place) is not None):
                yield place

    def _is_counted(self, place: int) -> bool:
        """Return whether a buffer is another object, or has another version, than when ranks had equal values."""
        now, (seen, version) = self._buffer(place), self._seen[place]
        return now is not None and (now is not seen() or _version(now) != version)

    def _compare_values(self) -> None:
        """Find buffers that changed without another version. The host waits for the device, once for each buffer."""
        for place in [place for place in self._first if self._places[place][1] in self._trained]:
            now, first = self._buffer(place), self._first.pop(place)
            if now is not None and not self._is_counted(place) and not torch.equal(now, first):
                self._silent.add(place)

    def _accept(self, places: Iterable[int]) -> None:
        """Note that ranks have equal values of these buffers."""
        for place in places:
            self._seen[place] = self._look(place)
            self._first.pop(place, None)

    def _look(self, place: int) -> tuple[Callable[[], Tensor | None], int]:
        found = self._buffer(place)
        return (lambda: None, 0) if found is None else (weakref.ref(found), _version(found))

    def _buffer(self, place: int) -> Tensor | None:
        _, module, key = self._places[place]
        found = module._buffers.get(key)
        return None if found is None else local_of(found)

    def _shape(self, place: int) -> tuple[object, ...]:
        found = self._buffer(place)
        if found is None:
            return ()
        is_expanded = any(size > 1 and not stride for size, stride in zip(found.shape, found.stride(), strict=True))
        return tuple(found.shape), f"{found.dtype}{', expanded' * is_expanded}", found.device.type

    def _raise_unequal(self, name: str, place: int) -> None:
        lines = self._comm.mesh.lines(self._comm.texts(str(self._shape(place)), "the shape of a buffer"))
        raise RankMismatchError(
            f"{self._comm.mesh} The buffer '{name}' has other shapes on other ranks, so it cannot take the values of "
            f"the first rank:\n{lines}\nGive it one shape, register it with persistent=False if each rank computes its "
            "own, or keep all buffers apart: zs.Settings(buffers='own')."
        )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _pack(buffers: Sequence[tuple[int, Tensor]]) -> Tensor:
    return torch.cat([bytes_in(one) for _, one in buffers])


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Return the mean, summed in the order of ranks, in fp32 or better."""
    dtype = values[0].dtype
    total = values[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for one in values[1:]:
        total += one
    return (total / len(values)).to(dtype)
