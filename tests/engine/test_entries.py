"""What code writes to the optimizer's entries outside its steps: parameters follow before the next forward."""

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_ranks

WORLD = 2
WAYS = {"data": 0.5, "assign": 0.5, "written": 0.5, "foreach": 0.9, "hook": 0.9}
"""How entries are written, and by what they are multiplied or averaged."""


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of three units besides the root, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def entries_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry for group in optimizer.param_groups for entry in group["params"]]


@torch.no_grad()
def write(optimizer: torch.optim.Optimizer, slow: list[torch.Tensor], way: str) -> None:
    """Write to the entries, as Lookahead or a decay by hand does."""
    entries, much = entries_of(optimizer), WAYS[way]
    slow[:] = slow or [entry.detach().clone() for entry in entries]
    if way == "foreach":
        torch._foreach_mul_(entries, much)
    for entry, before in zip(entries, slow, strict=True) if much == 0.5 else ():
        before.lerp_(entry.data if way == "data" else entry, much)
        if way == "assign":
            entry.data = before.clone()
        else:
            (entry.data if way == "data" else entry).copy_(before)


def decay(optimizer: Any, *_: Any) -> None:
    for entry in entries_of(optimizer):
        entry.data.mul_(WAYS["hook"])


def train(way: str, options: dict[str, Any] | None) -> list[float]:
    """Return what the forward after each step computes; `options` are those of `zs.shard`, None in one process."""
    model, optimizer = make()
    rank = None if options is None else zs.shard(model, optimizer, units=[nn.Linear], **options).mesh.rank
    if way == "hook":
        optimizer.register_step_post_hook(decay)
    generator, slow, found = torch.Generator().manual_seed(1), list[torch.Tensor](), list[float]()
    for _ in range(4):
        inputs = torch.randn(WORLD, 4, 8, generator=generator)
        model(inputs if rank is None else inputs[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        write(optimizer, slow, way)
        with torch.no_grad():
            found.append(model(torch.ones(8)).sum().item())
    return found


MESSAGES = zs.Settings(shared_memory=False)
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, messages": {"stage": 2, "settings": MESSAGES},
    "stage 3": {"stage": 3},
    "stage 0, bf16": {"stage": 0, "precision": "bf16"},
    "stage 2, bf16": {"stage": 2, "precision": "bf16", "settings": MESSAGES},
    "stage 3, bf16": {"stage": 3, "precision": "bf16"},
    "stage 2, host": {"stage": 2, "offload": zs.Offload(states=1.0)},
    "stage 3, host, bf16": {"stage": 3, "precision": "bf16", "offload": zs.Offload(states=1.0)},
}


def train_all(place: str) -> dict[str, list[float]]:
    """Train with each way of writing."""
    return {way: train(way, PLACES[place]) for way in WAYS}


@functools.cache
def alone(way: str) -> list[float]:
    """Return what one process without zeroshard computes."""
    return train(way, None)


@pytest.mark.parametrize("place", PLACES)
def test_parameters_follow_entries(place: str) -> None:
    """As in one process, whose entries are the parameters; bf16 rounds to 8 bits."""
    rtol, atol = (3e-2, 1e-2) if "bf16" in place else (1e-4, 1e-6)
    for found in run_ranks(train_all, WORLD, place):
        for way, values in found.items():
            torch.testing.assert_close(values, alone(way), rtol=rtol, atol=atol)


def write_between(rank: int, where: str) -> str:
    """Write between a forward and its backward, before a `state_dict`, or on one rank; return the error."""
    model, optimizer = make()
    zero = zs.shard(model, optimizer, stage=1)
    loss = model(torch.ones(2, 8)).square().mean()
    if where != "one rank" or zero.mesh.rank == rank:
        entries_of(optimizer)[0].data.mul_(2)
    try:
        if where == "backward":
            loss.backward()
        elif where == "state_dict":
            model.state_dict()
        else:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    except (RuntimeError, zs.RankMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("where", ["backward", "state_dict"])
def test_what_parameters_do_not_follow_yet_is_refused(where: str) -> None:
    for text in run_ranks(write_between, WORLD, 0, where):
        assert "after code has written to the optimizer's entries" in text


def test_a_write_on_one_rank_ends_in_an_error_on_all() -> None:
    for text in run_ranks(write_between, WORLD, 1, "one rank"):
        assert "RankMismatchError" in text


def read_after(what: str, folder: str) -> None:
    """Assign to entries, and read whole parameters in another way than by a forward."""
    model, optimizer = make()
    zero = zs.shard(model, optimizer, stage=1)
    average = zero.ema(0.5)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    for entry in entries_of(optimizer):
        entry.data = torch.full_like(entry, 0.25)
    if what == "save":
        zero.save(folder)
        entries_of(optimizer)[0].data.zero_()
        zero.load(folder)
    elif what == "average":
        with average.swapped():
            pass
    elif what == "moves":
        zero.offload_states()
        zero.reload_states()
    elif what == "step":
        optimizer.zero_grad()
        optimizer.step()
    if what == "detach":
        zero.detach()
    else:
        model(torch.ones(2, 8))
        assert torch.equal(next(model.parameters()), torch.full((16, 8), 0.25))
    with zero.gathered() if what != "detach" else nullcontext():
        assert all(torch.equal(one, torch.full_like(one, 0.25)) for one in model.parameters())


@pytest.mark.parametrize("what", ["save", "average", "moves", "step", "detach"])
def test_assigned_values_are_those_of_what_reads_masters(what: str, tmp_path: Path) -> None:
    run_ranks(read_after, WORLD, what, str(tmp_path / "step-1"))


def test_entries_in_a_file_say_where_values_are(tmp_path: Path) -> None:
    model, optimizer = make()
    zs.shard(model, optimizer, stage=1, offload=str(tmp_path))
    entry = entries_of(optimizer)[0]
    with pytest.raises(RuntimeError, match=r"'0\.weight' and its neighbours are in a file.*gathered\(writeback=True\)"):
        entry.data.mul_(2)
    with pytest.raises(RuntimeError, match="are in a file"):
        entry.data = torch.zeros_like(entry)
    assert entry.norm().isnan()


def test_entries_stay_in_their_bucket() -> None:
    model, optimizer = make()
    zs.shard(model, optimizer, stage=1)
    with pytest.raises(RuntimeError, match=r"set_\(\) of the optimizer's slice of '0\.weight'.*entry\.data = values"):
        entries_of(optimizer)[0].set_(torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"'0\.weight' must have shape \(128,\) here; got \(16, 8\)"):
        entries_of(optimizer)[0].data = torch.zeros(16, 8)


def call_rank_0_alone() -> None:
    """Write to entries that are the parameters, and evaluate on one rank, as with DistributedDataParallel."""
    model, optimizer = make()
    zero = zs.shard(model, optimizer, stage=0)
    entries_of(optimizer)[0].data.mul_(2)
    if zero.mesh.rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


def test_entries_that_are_the_parameters_need_no_other_rank() -> None:
    run_ranks(call_rank_0_alone, WORLD)
