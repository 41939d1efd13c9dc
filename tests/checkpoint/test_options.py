"""Options of a save, and what it has besides: the model alone, states of modules, the position in the data."""

import copy
import os
import pickle
import random
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)

import zeroshard as zs
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from . import small


def bits(path: Path) -> set[int]:
    """Return the permission bits of the files in a folder."""
    return {stat.S_IMODE(one.stat().st_mode) for one in path.iterdir()}


@pytest.mark.parametrize(
    ("umask", "mode", "of_files", "of_folder"),
    [
        (0o022, None, 0o644, 0o755),
        (0o077, None, 0o600, 0o700),
        (0o022, 0o600, 0o600, 0o700),
        (0o077, 0o640, 0o640, 0o750),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_may_read(
    umask: int, mode: int | None, of_files: int, of_folder: int, asynchronous: bool, tmp_path: Path
) -> None:
    trainer = small.Small()
    before = os.umask(umask)
    try:
        path = trainer.zero.save(tmp_path / "step-1", mode=mode, asynchronous=asynchronous)
        trainer.zero.wait()
    finally:
        os.umask(before)
    assert (bits(path), stat.S_IMODE(path.stat().st_mode)) == ({of_files}, of_folder)


@pytest.mark.parametrize("mode", [0o400, 0o1777, -1])
def test_a_mode_without_its_owner_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(zs.CheckpointError, match="mode takes permission bits"):
        small.Small().zero.save(tmp_path / "step-1", mode=mode)
    assert list(tmp_path.iterdir()) == []


def test_the_model_alone(tmp_path: Path) -> None:
    trainer, other = small.Small(1).train(3), small.Small()
    whole, path = trainer.zero.save(tmp_path / "whole"), trainer.zero.save(tmp_path / "best", {"a": 1}, model_only=True)
    verify(path)
    sizes = [sum(one.stat().st_size for one in folder.iterdir()) for folder in (path, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    with pytest.raises(zs.CheckpointError, match="model_only=True"):
        other.zero.load(path)
    assert other.zero.load(path, model_only=True).extra == {"a": 1}
    with trainer.zero.gathered():
        expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with other.zero.gathered():
        assert all(torch.equal(value, expected[name]) for name, value in other.model.state_dict().items())


class Scaled(torch.nn.Linear):
    """Has a parameter without dimensions, besides."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.gain = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a step on data that does not depend on the dtype."""
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


PURE = zs.Precision(param=torch.bfloat16, master=torch.bfloat16)
MAKERS: list[Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
]


@pytest.mark.parametrize("make", MAKERS, ids=["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("is_narrowed", [True, False])
def test_states_are_cast_with_their_parameters(make: Any, is_narrowed: bool, tmp_path: Path) -> None:
    """Into a fresh optimizer, as torch's load_state_dict casts them; counters keep their dtype."""
    dtypes, precisions = [torch.float32, torch.bfloat16], ["fp32", PURE]
    first, second = (0, 1) if is_narrowed else (1, 0)
    source, model = Scaled(), Scaled()
    plain = Scaled().to(dtypes[second])
    before, after, expected = (make(one.parameters()) for one in (source, model, plain))
    saved, loaded = (
        zs.shard(one, optimizer, precision=precisions[place])
        for one, optimizer, place in ((source, before, first), (model, after, second))
    )
    step_of(source, before)
    loaded.load(saved.save(tmp_path / "step-1"), cast=True)
    with saved.gathered(states=True):
        expected.load_state_dict(before.state_dict())
    with loaded.gathered(states=True):
        found, wanted = after.state_dict()["state"], expected.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for place, state in wanted.items():
        assert {key: value.dtype for key, value in state.items()} == {k: v.dtype for k, v in found[place].items()}
        assert all(torch.equal(value, found[place][key]) for key, value in state.items())
    step_of(model, after)


class Counting(torch.optim.SGD):
    """Counts its steps in a state of no parameter and in its groups."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state["all"]
        for one in (state, *self.param_groups):
            one["count"] = one.get("count", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_has_made_since_goes(tmp_path: Path) -> None:
    model = small.Small.plain(0)
    optimizer = Counting(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer)
    paths = []
    for step in range(3):
        paths.append(zero.save(tmp_path / f"step-{step}"))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for step in (1, 0, 2):
        zero.load(paths[step])
        assert dict(optimizer.state.get("all", {})) == ({"count": step} if step else {})
        assert optimizer.param_groups[0].get("count", 0) == step
    assert optimizer.param_groups[0]["lr"] == 0.1


def with_a_late_group(folder: Path | None) -> list[torch.Tensor]:
    """Save, train a second group, remove it, load, and train it again; without a folder, in plain torch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    zero = zs.shard(model, optimizer) if folder is not None else None

    def train(*, late: bool) -> None:
        if late:
            model[1].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[1].parameters()]})
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train(late=False)
    saved = None if zero else copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    path = zero.save(folder / "step-1") if zero and folder else None
    train(late=True)
    del optimizer.param_groups[1]
    if zero and path:
        zero.load(path)
    elif saved:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    train(late=True)
    if zero:
        zero.detach()
    return [*model.parameters(), *(optimizer.state[p]["momentum_buffer"] for p in model.parameters())]


def test_states_of_a_removed_group_go(tmp_path: Path) -> None:
    for found, expected in zip(with_a_late_group(tmp_path), with_a_late_group(None), strict=True):
        assert torch.equal(found, expected)


class Seeing(torch.nn.Linear):
    """Counts its forwards in extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: Any = torch.tensor([0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def seeing(first: type[torch.nn.Module] = Seeing) -> tuple[torch.nn.Sequential, zs.Zero]:
    model = torch.nn.Sequential(first(), torch.nn.Linear(4, 1))
    return model, zs.shard(model, torch.optim.SGD(model.parameters()), stage=3)


def see(folder: str) -> tuple[list[int], str]:
    """Save after three forwards; return the counts of two loads, and the error of ranks that differ."""
    (model, zero), found = seeing(), list[int]()
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    for model_only in (False, True):
        path = zero.save(f"{folder}/{model_only}", {"a": 1}, model_only=model_only)
        other, another = seeing()
        assert another.load(path, model_only=model_only).extra == {"a": 1}
        found.append(other[0].seen.item())
    model[0].seen = zero.mesh.rank
    with pytest.raises(zs.CheckpointError) as caught:
        zero.save(f"{folder}/differ")
    return found, str(caught.value)


def test_extra_states_of_modules_come_back(tmp_path: Path) -> None:
    for counts, error in run_ranks(see, 2, str(tmp_path)):
        assert counts == [3, 3]
        assert "differ between ranks, but a checkpoint holds one value, also of what a module returns" in error
    model, zero = seeing()
    zero.load(tmp_path / "True", model_only=True)
    assert model[0].seen == 3


def test_extra_states_of_other_modules_are_refused(tmp_path: Path) -> None:
    (_, zero), (_, other) = seeing(), seeing(lambda: torch.nn.Linear(4, 4))
    zero.save(tmp_path / "step-1")
    with pytest.raises(
        zs.CheckpointError, match=r"only one of them has a module '0' with get_extra_state\(\).*Nothing"
    ):
        other.load(tmp_path / "step-1")
    zero.load(other.save(tmp_path / "step-2"))  # as checkpoints from before they had such states


def test_an_extra_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model, zero = seeing()
    model[0].seen = model
    with pytest.raises(zs.CheckpointError, match=r"get_extra_state\(\) of module '0' \(Seeing\)\['seen'\] is a "):
        zero.save(tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


DATA = TensorDataset(torch.arange(24))


def read(loader: zs.Resumable, count: int) -> list[list[int]]:
    """Read batches, over ends of epochs."""
    found: list[list[int]] = []
    while len(found) < count:
        for (batch,) in loader:
            found.append(batch.tolist())
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize(("workers", "count"), [(0, 5), (1, 5), (0, 8)])
def test_batches_continue_where_they_were_saved(workers: int, count: int, tmp_path: Path) -> None:
    def make() -> zs.Resumable:
        return zs.Resumable(DataLoader(DATA, batch_size=3, shuffle=True, num_workers=workers))

    torch.manual_seed(3)
    zero, loader = zs.shard(torch.nn.Linear(2, 2)), make()
    batches = iter(loader)
    for _ in range(count):
        next(batches)
    if count == len(loader):
        assert list(batches) == []  # the epoch has ended
    path = zero.save(tmp_path / "step-5", {"mine": 1}, loader=loader)
    expected = [batch[0].tolist() for batch in batches] + read(loader, 4)
    torch.manual_seed(9)
    again = make()
    assert zero.load(path, loader=again).extra == {"mine": 1}
    assert read(again, len(expected)) == expected
    assert again.epoch == 1
    assert zero.load(path).extra == {"mine": 1}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "its own generator": lambda: DataLoader(DATA, 3, shuffle=True, generator=seeded()),
    "a generator of its sampler": lambda: DataLoader(DATA, 3, sampler=RandomSampler(DATA, generator=seeded())),
    "batches": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), batch_size=3, drop_last=False)
    ),
    "workers that stay": lambda: DataLoader(DATA, 3, shuffle=True, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_each_epoch_continues(kind: str, tmp_path: Path) -> None:
    def start(seed: int) -> tuple[zs.Zero, zs.Resumable]:
        torch.manual_seed(seed)
        return zs.shard(torch.nn.Linear(2, 2)), zs.Resumable(LOADERS[kind]())

    expected = read(start(3)[1], 24)
    for count in (3, 8, 11, 16, 21):
        zero, loader = start(3)
        assert read(loader, count) == expected[:count]
        path = zero.save(tmp_path / f"step-{count}", loader=loader)
        zero, loader = start(9)
        zero.load(path, loader=loader)
        again = zero.save(tmp_path / f"again-{count}", loader=loader)  # before anything is read
        zero, loader = start(10)
        zero.load(again, loader=loader)
        assert read(loader, 24 - count) == expected[count:], count
        zero.load(path, loader=loader)  # back, in one process
        assert read(loader, 24 - count) == expected[count:], count


def by_numpy() -> list[int]:
    return np.random.permutation(len(DATA)).tolist()


def by_python() -> list[int]:
    return random.sample(range(len(DATA)), len(DATA))


class Shuffled(Sampler[int]):
    """The numbers of `DATA`, shuffled when an epoch begins."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class Streamed(Shuffled, IterableDataset[int]):
    """The same numbers as data without an index."""


class Blocks(Sampler[int]):
    """The numbers of `DATA`, shuffled block by block from a generator of the sampler while they are read."""

    def __init__(self) -> None:
        self.generator = seeded()

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(DATA), 4):
            yield from (start + torch.randperm(4, generator=self.generator)).tolist()


DRAWING: dict[str, Callable[[], DataLoader]] = {
    "sampler, numpy": lambda: DataLoader(DATA, 3, sampler=Shuffled(by_numpy)),
    "sampler, Python": lambda: DataLoader(DATA, 3, sampler=Shuffled(by_python)),
    "stream, numpy": lambda: DataLoader(Streamed(by_numpy), 3),
    "stream, Python": lambda: DataLoader(Streamed(by_python), 3),
    "block by block": lambda: DataLoader(DATA, 3, sampler=Blocks()),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_an_order_of_any_generator_continues(kind: str, tmp_path: Path) -> None:
    """The loop draws between batches as dropout and augmentations do, and the resumed one draws the same."""

    def walk(loader: zs.Resumable, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            for batch in loader:
                numbers = batch if isinstance(batch, torch.Tensor) else batch[0]
                drawn = torch.rand(()).item(), np.random.rand(), random.random()
                found.append((numbers.tolist(), drawn))
                if len(found) == count:
                    break
        return found

    def start(seed: int) -> tuple[zs.Zero, zs.Resumable]:
        zero = zs.shard(torch.nn.Linear(2, 2))
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return zero, zs.Resumable(DRAWING[kind]())

    expected = walk(start(3)[1], 14)
    for count in (3, 11):
        zero, loader = start(3)
        assert walk(loader, count) == expected[:count]
        path = zero.save(tmp_path / f"step-{count}", loader=loader)
        zero, loader = start(9)
        zero.load(path, loader=loader)
        assert walk(loader, 14 - count) == expected[count:]


def test_a_position_has_the_generators_that_have_moved() -> None:
    """It is text of each rank in one file of bounded size."""
    loader = zs.Resumable(DataLoader(range(8), batch_size=2, shuffle=True))
    next(iter(loader))
    assert loader.state_dict()["others"] == {}
    random.random()
    assert [*loader.state_dict()["others"]] == ["python"]


def test_a_position_without_other_generators_continues() -> None:
    """Positions that earlier versions saved have torch's generator alone."""
    first, second = (zs.Resumable(DataLoader(DATA, 3, shuffle=True)) for _ in range(2))
    batches = iter(first)
    next(batches)
    position = first.state_dict()
    del position["others"]
    expected = [batch.tolist() for (batch,) in batches]
    second.load_state_dict(position)
    assert [batch.tolist() for (batch,) in second] == expected


def test_a_generator_that_is_gone_is_refused(tmp_path: Path) -> None:
    zero = zs.shard(torch.nn.Linear(2, 2))
    path = zero.save(tmp_path / "a", loader=zs.Resumable(LOADERS["its own generator"]()))
    with pytest.raises(
        zs.CheckpointError, match=r"saved with 1 generator\(s\) of its own and its sampler's, and has 0"
    ):
        zero.load(path, loader=zs.Resumable(DataLoader(DATA, 3, shuffle=True)))


def part(folder: str, loads: bool) -> list[list[int]]:
    """Read five batches and save, or load and read the rest of the epoch."""
    mesh = zs.init(seed=1)
    zero = zs.shard(torch.nn.Linear(2, 2))
    sampler: DistributedSampler[object] = DistributedSampler(DATA, mesh.world_size, mesh.rank, seed=4)
    loader = zs.Resumable(DataLoader(DATA, batch_size=2, sampler=sampler))
    if loads:
        zero.load(f"{folder}/step-1", loader=loader)
        return [batch.tolist() for (batch,) in loader]
    batches = iter(loader)
    found = [next(batches)[0].tolist() for _ in range(3)]
    zero.save(f"{folder}/step-1", loader=loader)
    return found


def test_other_ranks_read_what_is_left(tmp_path: Path) -> None:
    first = run_ranks(part, 2, str(tmp_path), False)
    for ranks in (1, 2):
        rest = run_ranks(part, ranks, str(tmp_path), True)
        numbers = sorted(number for of_rank in (*first, *rest) for batch in of_rank for number in batch)
        assert numbers == list(range(24))


def test_what_has_no_position_is_refused(tmp_path: Path) -> None:
    zero = zs.shard(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"zs.Resumable\(loader\)"):
        zero.save(tmp_path / "a", loader=DataLoader(DATA))  # type: ignore[arg-type]
    path = zero.save(tmp_path / "b")
    with pytest.raises(zs.CheckpointError, match="saved without loader="):
        zero.load(path, loader=zs.Resumable(DataLoader(DATA)))


class Refusing:
    """A position that one rank cannot load."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        if self.refuses:
            raise OSError("my data is gone")


def load_refused(folder: str) -> list[tuple[str, bool]]:
    """Load with loaders that one rank refuses; return each error, and whether anything has changed."""
    mesh = zs.init(seed=1)
    model = torch.nn.Linear(2, 1)
    zero, whole = zs.shard(model), zs.Resumable(DataLoader(DATA, 2, shuffle=True))
    next(iter(whole))
    zero.save(f"{folder}/step-1")
    zero.save(f"{folder}/step-2", loader=whole)
    zero.save(f"{folder}/step-3", loader=Refusing(refuses=False))
    with zero.gathered(writeback=True), torch.no_grad():
        model.weight.fill_(3.0)
    found = []
    kinds = {
        "step-1": zs.Resumable(DataLoader(DATA, 2)),
        "step-2": zs.Resumable(LOADERS["its own generator"]() if mesh.rank else DataLoader(DATA, 2)),
        "step-3": Refusing(refuses=mesh.rank == 1),
    }
    for name, loader in kinds.items():
        torch.rand(3)
        before = torch.get_rng_state()
        with pytest.raises(zs.CheckpointError) as caught:
            zero.load(f"{folder}/{name}", loader=loader)
        with zero.gathered():
            is_same = torch.equal(before, torch.get_rng_state()) and bool((model.weight == 3.0).all())
        found.append((str(caught.value), not is_same))
    return found


def test_a_position_that_one_rank_refuses_changes_none(tmp_path: Path) -> None:
    """All ranks raise the error of the one; only what another program's loader says is known when all is read."""
    for (without, no), (generators, nor), (late, yes) in run_ranks(load_refused, 2, str(tmp_path)):
        assert (no, nor, yes) == (False, False, True)
        assert "saved without loader=" in without
        assert "failed on rank 1: The loader was saved with 0 generator(s)" in generators
        assert all("Nothing in memory was changed" in text for text in (without, generators))
        assert "OSError: my data is gone" in late
        assert "Memory is partly changed" in late


def test_a_state_that_no_generator_has_is_refused() -> None:
    """With such a state numpy would read beyond its words."""
    loader = zs.Resumable(DataLoader(DATA, 2))
    np.random.rand()  # a generator that has not moved has no state here
    position = loader.state_dict()
    position["others"]["numpy"][-16:-12] = 127
    for others in (position["others"], {"numpy": torch.ones(3)}, {"other": torch.ones(3)}, {"python": None}):
        with pytest.raises(zs.CheckpointError, match="state of a random generator is invalid"):
            loader.load_state_dict({**position, "others": others})


@pytest.mark.parametrize(("saved", "now", "here"), [(1, 2, 3), (2, 4, 3), (4, 2, 12), (3, 1, 18)])
def test_other_ranks_share_what_all_have_read(saved: int, now: int, here: int) -> None:
    states = [{"epoch": 2, "batches": 6, "batch_size": 2, "generator": torch.get_rng_state()}] * saved
    loader = zs.Resumable(DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, now, 0)))
    loader.load_state_dict(loader.shared(states, now))
    assert (loader.epoch, loader.state_dict()["batches"]) == (2, here)


def test_each_epoch_has_its_own_order() -> None:
    def sampler() -> DistributedSampler[object]:
        return DistributedSampler(DATA, 2, 1, seed=4)

    own, plain = sampler(), sampler()
    expected = []
    for epoch in range(2):
        plain.set_epoch(epoch)
        expected += [batch.tolist() for (batch,) in DataLoader(DATA, batch_size=3, sampler=plain)]
    assert read(zs.Resumable(DataLoader(DATA, batch_size=3, sampler=own)), len(expected)) == expected


@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2)])
def test_another_batch_size_reads_what_is_left(before: int, now: int) -> None:
    first = zs.Resumable(DataLoader(DATA, batch_size=before, shuffle=True))
    found = read(first, 8 // before)
    second = zs.Resumable(DataLoader(DATA, batch_size=now, shuffle=True))
    second.load_state_dict(first.state_dict())
    found += read(second, 16 // now)
    assert sorted(number for batch in found for number in batch) == list(range(24))
    with pytest.raises(zs.CheckpointError, match=rf"batch_size={now} in 1 stream\(s\), and has batch_size=None"):
        zs.Resumable(DataLoader(DATA, batch_size=None)).load_state_dict(second.state_dict())


class Parts(IterableDataset[int]):
    """Numbers that the workers divide among themselves."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(24)) if worker is None else iter(range(worker.id, 24, worker.num_workers))


@pytest.mark.parametrize(("before", "now"), [((3, 2), (2, 2)), ((3, 2), (3, 1)), ((3, 0), (3, 2))])
def test_streams_of_workers_cannot_be_divided(before: tuple[int, int], now: tuple[int, int]) -> None:
    def make(size: int, workers: int) -> zs.Resumable[torch.Tensor]:
        return zs.Resumable(DataLoader(Parts(), size, num_workers=workers))

    first = make(*before)
    batches = iter(first)
    next(batches)
    position = first.state_dict()
    text = rf"saved with batch_size=3 in {before[1] or 1} stream\(s\), and has batch_size={now[0]} in {now[1]} now"
    with pytest.raises(zs.CheckpointError, match=text):
        make(*now).load_state_dict(position)
    same, another = make(*before), make(*now)
    same.load_state_dict(position)
    assert [one.tolist() for one in same] == [one.tolist() for one in batches]
    another.load_state_dict(first.state_dict())  # between epochs there is nothing to divide
    assert sorted(torch.cat(list(another)).tolist()) == list(range(24))


def test_one_stream_is_divided() -> None:
    first, second = (zs.Resumable(DataLoader(Parts(), size, num_workers=n)) for size, n in ((6, 0), (2, 1)))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert torch.cat(list(second)).tolist() == list(range(6, 24))


@pytest.mark.parametrize("is_set", [False, True])
def test_an_epoch_that_is_left_early_counts(is_set: bool) -> None:
    """Each epoch is drawn anew, and an epoch that the loop has set itself is kept."""

    def epochs(loader: Iterable[Any], sampler: DistributedSampler[object], *, sets: bool) -> list[list[int]]:
        found = []
        for epoch in (0, 1, 5):
            if sets:
                sampler.set_epoch(epoch if is_set else len(found))
            found.append([number for _, (batch,) in zip(range(3), loader, strict=False) for number in batch.tolist()])
        return found

    own, plain = (DistributedSampler[object](DATA, 2, 1, seed=4) for _ in range(2))
    expected = epochs(DataLoader(DATA, batch_size=3, sampler=plain), plain, sets=True)
    assert epochs(zs.Resumable(DataLoader(DATA, batch_size=3, sampler=own)), own, sets=is_set) == expected
    assert len({tuple(one) for one in expected}) == 3


class Drawn(DistributedSampler[object]):
    """A sampler that seeds torch's generator, and Python's, with the epoch itself."""

    def __iter__(self) -> Iterator[Any]:
        torch_order = torch.randperm(4, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        order = random.Random(self.epoch).sample(range(4, 8), 4)
        return iter([*torch_order, *order])


@pytest.mark.parametrize("kind", [DistributedSampler, Drawn])
@pytest.mark.parametrize("asked", [(0, 0, 0), (0, 0, 1), (2, 2, 300, 300)])
def test_an_epoch_that_is_set_again_is_read_again(kind: type[DistributedSampler[object]], asked: Sequence[int]) -> None:
    def read_all(loader: Iterable[Any], sampler: DistributedSampler[object]) -> list[list[int]]:
        found = []
        for epoch in asked:
            sampler.set_epoch(epoch)
            found += [batch.tolist() for (batch,) in loader]
        return found

    own, plain = kind(DATA, 1, 0, seed=4), kind(DATA, 1, 0, seed=4)
    expected = read_all(DataLoader(DATA, batch_size=8, sampler=plain), plain)
    assert read_all(zs.Resumable(DataLoader(DATA, batch_size=8, sampler=own)), own) == expected


def test_the_epoch_of_a_sampler_leaves_as_an_integer(tmp_path: Path) -> None:
    """A file or a process that gets the sampler's epoch needs nothing of zeroshard."""
    sampler = DistributedSampler[object](DATA, 1, 0)
    list(zs.Resumable(DataLoader(DATA, sampler=sampler)))
    copied: Any = pickle.loads(pickle.dumps(sampler))
    zero = zs.shard(torch.nn.Linear(2, 2))
    saved = zero.load(zero.save(tmp_path / "a", {"epoch": sampler.epoch})).extra["epoch"]
    for one in (copied.epoch, saved, sampler.epoch + 1 - 1):
        assert (type(one), one) == (int, 0)
