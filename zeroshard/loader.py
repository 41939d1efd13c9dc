"""The position in the data, saved with a checkpoint: of any loader or sampler with a `state_dict`, and of torch's own.

Owns `Resumable`, which gives a `DataLoader` of torch a state, and the exchange of the ranks' states, which differ. It
must not know files: a checkpoint holds the states among its `extra`. Read `Resumable` first.

Note: exactly
    A loader of torch draws the seed of its sampler and of its workers when an epoch begins, and a sampler or dataset
    may shuffle then by torch's, numpy's or Python's generator. The states of the three at that moment, and the number
    of batches read since, are therefore the position. A resume draws and drops that many batches from there, and then
    gives the generators back the states that the checkpoint had: also what the dataset draws is that of an
    uninterrupted run. Between epochs there is nothing to repeat. A generator that the loader or its sampler has goes
    back to its state when the epoch began. Workers that stay for the next epoch (`persistent_workers=True`) draw no
    seed then, so a resume starts workers before it repeats such an epoch; what their datasets draw from generators of
    their own is new.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from zeroshard.checkpoint.generators import check_states, read_generators, write_generators
from zeroshard.checkpoint.values import decode, encode
from zeroshard.join.start import accepted_by_all, texts_across_ranks
from zeroshard.table.errors import CheckpointError
from zeroshard.wire.mesh import Mesh

__all__ = ["Resumable", "Stateful", "checked_position", "states_of"]

_T = TypeVar("_T")
LOADER: Final = "zeroshard.loader"
"""The key of the states among a checkpoint's `extra`, which `load` takes out again."""
_CPU: Final = torch.device("cpu")
"""Whose generators samplers and datasets draw from, beside numpy's and Python's."""


class Stateful(Protocol):
    """What has a position: torchdata's `StatefulDataLoader`, a `zs.Resumable`, or a sampler of the user's."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position: numbers, strings, lists, mappings, small tensors."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a position."""


@final
class _Epoch(int):
    """An epoch that `Resumable` gave to a sampler; an equal number that user code sets later is another object."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # a file or a worker that gets the sampler needs no class of ours


@final
class Resumable(Generic[_T]):
    """A data loader of torch that continues where a checkpoint was saved: same epoch, same batch, same order.

    Pass it to `zero.save(path, loader=...)` and `zero.load(path, loader=...)`. At the start of each epoch it calls
    `set_epoch` of the sampler, if there is one, with its own count, or with an epoch that your code has set meanwhile.
    An iteration that your code leaves early counts as an epoch from the next iteration on; a state that is saved before
    it resumes where the epoch was left. The batch size may change between the two (inside an epoch, not with an
    `IterableDataset` over several workers) and, with a `DistributedSampler`, the number of ranks: samples that were
    read are not read again, to a batch.

    A sampler or `IterableDataset` that draws when an epoch begins may use torch's, numpy's or Python's generator. A
    sampler that draws while it is read, such as one that shuffles block by block, needs a `torch.Generator` of its own
    as its attribute `generator`: a resume does not repeat what your loop draws between batches, such as dropout, so
    with torch's common generator it would read other samples.

    Args:
        loader: a `DataLoader` over a dataset with or without an index.

    ```python
    import torch, zeroshard as zs
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(6))
    loader = zs.Resumable(DataLoader(data, batch_size=2, shuffle=True))
    batches = iter(loader)
    first, position = next(batches), loader.state_dict()
    rest = list(batches)
    loader.load_state_dict(position)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(loader, rest, strict=True))
    ```
    """

    def __init__(self, loader: DataLoader[_T]) -> None:
        self.loader = loader
        self.epoch = 0
        """The number of epochs that were read; one that was left early counts from the next iteration on."""
        self._read, self._start = 0, read_generators(_CPU)
        self._own_starts = self._own_states()
        self._given = getattr(getattr(loader, "sampler", None), "epoch", None)
        self._has_begun = self._resumes = False
        self._continues = False
        """Whether the epoch under way began with the workers of the epoch before."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[_T]:
        sampler: Any = getattr(self.loader, "sampler", None)
        if not self._resumes:
            self.epoch += self._read > 0
            asked: Any = getattr(sampler, "epoch", self._given)
            is_ours = asked is self._given or (asked == self._given and not isinstance(self._given, _Epoch))
            self.epoch = self.epoch if is_ours else int(asked)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(_Epoch(self.epoch))
        self._given = getattr(sampler, "epoch", None)
        now = read_generators(_CPU)
        skipped = self._read if self._resumes else 0
        has_workers, self._has_begun = self._stays and self._has_begun, True
        if self._resumes:
            if self._continues and not has_workers:
                iter(self.loader)
            write_generators({**now, **self._start} if skipped else now, _CPU)
            for own, state in zip(_generators(self.loader), self._own_starts, strict=True):
                own.set_state(state)
        self._start, self._own_starts = read_generators(_CPU), self._own_states()
        if self._resumes and has_workers and not self._continues:
            # The seed that the workers of this epoch were started with.
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.loader.generator)
        self._continues = self._continues if self._resumes else has_workers
        self._read, self._resumes = skipped, False
        batches = iter(self.loader)
        for _ in range(skipped):
            next(batches, None)
        if skipped:
            write_generators(now, _CPU)
        for batch in batches:
            self._read += 1
            yield batch
        self.epoch, self._read = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, the batches read of it, and the generators' states when it began."""
        is_inside = self._read > 0 or self._resumes
        own = self._own_starts if is_inside else self._own_states()
        # A generator that has not moved has its state among the checkpoint's own, and each takes kilobytes of a rank.
        now = read_generators(_CPU)
        moved = [name for name, one in self._start.items() if name != "torch" and not torch.equal(one, now[name])]
        return {
            "epoch": self.epoch,
            "batches": self._read,
            "batch_size": self.loader.batch_size,
            "streams": self._streams,
            "generator": self._start["torch"].clone(),
            "others": {name: self._start[name].clone() for name in moved},
            "generators": [one.clone() for one in own],
            "continues": self._continues if is_inside else self._stays and self._has_begun,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position: the next iteration begins there.

        Raises:
            CheckpointError: the loader has other generators; or, inside an epoch, a position that its batch size or
                number of workers cannot divide: batches without a size, an `IterableDataset` over several workers.
        """
        position = self.divided(state_dict)
        self.epoch, self._read = int(position["epoch"]), int(position["batches"])
        self._start = _start_of(position)
        self._own_starts, self._resumes = list(position.get("generators", self._own_states())), True
        self._continues = bool(position.get("continues")) and self._stays

    def divided(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a position as this loader counts batches, without a change of the loader.

        Raises:
            CheckpointError: the loader cannot continue there, as in `load_state_dict`.
        """
        here = self._own_states()
        own = state_dict.get("generators", here)
        if len(own) != len(here):
            raise CheckpointError(
                f"The loader was saved with {len(own)} generator(s) of its own and its sampler's, and has {len(here)} "
                "now: pass generator= as in the run that saved, or call zero.load() without loader=."
            )
        start, known = _start_of(state_dict), read_generators(_CPU)
        try:
            check_states({**known, **start}, known)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"The loader's state of a random generator is invalid ({error}).") from error
        read, size, streams = int(state_dict["batches"]), self.loader.batch_size, self._streams
        before = state_dict.get("batch_size", size), state_dict.get("streams", streams)
        if read and (size, streams) != before:
            if not size or not before[0] or max(streams, before[1]) > 1:
                raise CheckpointError(
                    f"The loader was saved with batch_size={before[0]} in {before[1]} stream(s), and has "
                    f"batch_size={size} in {streams} now (an IterableDataset has a stream for each worker), by which "
                    "its position in the epoch cannot be divided: use the values of before, save between epochs, or "
                    "call zero.load() without loader=."
                )
            read = read * before[0] // size
        return {**state_dict, "batches": read, "batch_size": size, "streams": streams}

    def _own_states(self) -> list[torch.Tensor]:
        return [one.get_state() for one in _generators(self.loader)]

    @property
    def _streams(self) -> int:
        """How many workers read a dataset without an index, each a part of it in batches of its own; otherwise 1."""
        return max(1, self.loader.num_workers) if isinstance(self.loader.dataset, IterableDataset) else 1

    @property
    def _stays(self) -> bool:
        return bool(getattr(self.loader, "persistent_workers", False))

    def shared(self, states: list[Mapping[str, Any]], ranks: int) -> Mapping[str, Any]:
        """Return the position of each rank, from those of another number of ranks.

        Args:
            states: of all ranks that saved.
            ranks: the number of ranks now.

        Raises:
            CheckpointError: the position cannot be divided: ranks draw their samples apart from each other.
        """
        positions = {(one["epoch"], one["batches"], one["batch_size"]) for one in states}
        size: Any = self.loader.batch_size
        if (
            len(positions) > 1
            or None in (size, states[0]["batch_size"])
            or not hasattr(self.loader.sampler, "set_epoch")
        ):
            raise CheckpointError(
                f"The loader was saved by {len(states)} ranks, and there are {ranks}: use as many ranks, or a "
                "DistributedSampler, whose ranks share one order. zero.load() without loader= starts its epoch anew."
            )
        ((epoch, batches, batch_size),) = positions
        here = batches * batch_size * len(states) // (size * ranks)
        return self.divided({**states[0], "epoch": epoch, "batches": here, "batch_size": size})


def _start_of(position: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of generators when an epoch began; positions of earlier versions have torch's alone."""
    return {**position.get("others", {}), "torch": position["generator"]}


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers have, each once."""
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(one, "generator", None) for one in places)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def states_of(mesh: Mesh, loader: Stateful, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `extra` with the states of all ranks' loaders, equal on all ranks.

    Raises:
        TypeError: the loader has no state; the text says what has one.
        CheckpointError: the state has a value that a checkpoint cannot hold.
        RankMismatchError: either was raised on another rank.

    Collective: all-gathers of some bytes; every rank must call.
    """
    with accepted_by_all(mesh, "zero.save(loader=)"):
        refuse_stateless(loader, "state_dict")
        text = json.dumps(encode(dict(loader.state_dict()), "loader"))
    return {**extra, LOADER: [decode(json.loads(one), "loader") for one in texts_across_ranks(mesh, text)]}


def checked_position(mesh: Mesh, loader: Stateful | None, path: object, extra: dict[str, Any]) -> Callable[[], None]:
    """Take the states of loaders out of `extra`; return a function that gives this rank's to its loader.

    Raises:
        TypeError: the loader cannot load a state.
        CheckpointError: the checkpoint has no position, or one at which the loader cannot continue.
    """
    states = extra.pop(LOADER, None)
    if loader is None:
        return lambda: None
    refuse_stateless(loader, "load_state_dict")
    if not isinstance(states, list) or not states:
        raise CheckpointError(
            f"{path} was saved without loader=, so it has no position in the data; leave loader= out."
        )
    is_as_saved = len(states) == mesh.world_size
    if isinstance(loader, Resumable):
        position = loader.divided(states[mesh.rank]) if is_as_saved else loader.shared(states, mesh.world_size)
    elif is_as_saved:
        position = states[mesh.rank]
    else:
        raise CheckpointError(
            f"{path} has the positions of {len(states)} ranks in the data, and there are {mesh.world_size}: a "
            f"{type(loader).__name__} cannot be divided. Use as many ranks, or zero.load() without loader=."
        )
    return lambda: loader.load_state_dict(position)


def refuse_stateless(loader: object, method: str) -> None:
    """Raise TypeError for a loader without a state."""
    if not callable(getattr(loader, method, None)):
        raise TypeError(
            f"loader= takes what has state_dict() and load_state_dict(), such as a StatefulDataLoader of torchdata; "
            f"got a {type(loader).__name__}. Wrap a DataLoader of torch: zs.Resumable(loader)."
        )
