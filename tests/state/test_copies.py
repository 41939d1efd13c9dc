"""Copies that several ranks hold: one bit that differs on one rank is found, and named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.faults.job import loss_of, make
from zeroshard.core.slot import slot_of
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.whole.copies import sum_bits

WORLD = 4
CULPRIT = 2


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last element."""
    tensor.detach().reshape(-1).view(torch.uint8)[-tensor.itemsize] ^= 1


def check(stage: int, where: str, options: dict[str, Any]) -> int:
    """Train, break a bit on one rank, and compare; return the bytes that the last comparison sent. Runs on a rank."""
    model, optimizer, zero = make(stage, **options)
    for step in range(2):
        loss_of(model, step, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = zero.traffic().sent_bytes.get("agree", 0)
        zero.check_copies()
        sent = zero.traffic().sent_bytes.get("agree", 0) - before
    bucket = slot_of(model.blocks[1][0].weight).bucket
    if dist.get_rank() == CULPRIT and where == "parameter":
        flip(model.blocks[1][0].weight.data)
    elif dist.get_rank() == CULPRIT and where == "shard":
        flip(bucket.shard)
    elif dist.get_rank() == CULPRIT and where == "master":
        flip(next(master for master in optimizer.param_groups[0]["params"] if master.numel()))
    elif dist.get_rank() == CULPRIT and where == "state":
        flip(next(state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].numel()))
    zero.check_copies()
    return sent


@pytest.mark.product
@pytest.mark.parametrize(
    ("stage", "where", "options", "text"),
    [
        (0, "parameter", {}, "parameter 'blocks.1.0.weight'"),
        (1, "parameter", {}, "parameter 'blocks.1.0.weight'"),
        (2, "parameter", {"precision": "bf16"}, "parameter 'blocks.1.0.weight'"),
        (0, "state", {}, "exp_avg of '"),
        (0, "master", {"precision": "bf16"}, "the master values of '"),
        (3, "shard", {"mesh": 2, "precision": "bf16"}, "the shard of blocks.1"),
        (3, "state", {"mesh": 2}, "exp_avg of '"),
        (1, "state", {"mesh": 2, "precision": "bf16"}, "exp_avg of '"),
    ],
)
def test_one_bit_on_one_rank_is_found(stage: int, where: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(check, WORLD, stage, where, options)
    for rank in range(WORLD):
        error = failure.value.errors[rank]
        assert error.type_name == zs.RankMismatchError.__name__, error
        place = f": replicate {rank // 2}, shard {rank % 2}" if "mesh" in options else ""
        assert f"[rank {rank}/{WORLD}{place}] The copies of {text}" in error.message
        sums = [line.split(": ")[1] for line in error.message.splitlines() if line.startswith("  rank ")]
        assert len(sums) == WORLD
        assert sums.count(sums[CULPRIT]) == 1, error.message


class Small(nn.Module):
    """Parameters of several elements, of one and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale + self.empty.sum()


def check_files(name: str, stage: int, breaks: bool, folder: str, options: dict[str, Any]) -> str:
    """Train with states in files, and return the error of the comparison. Runs on a rank."""
    torch.manual_seed(0)
    model = Small()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer, stage=stage, offload=zs.Offload(to=folder), **options)
    for step in range(2):
        zero.check_copies()
        model(torch.full((2, 5), 1.0 + zero.mesh.rank + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if breaks and zero.mesh.rank == 0:
        next(s["exp_avg"] for s in optimizer.state.values() if s["exp_avg"].numel() == 35)[-1:].add_(1.0)
    try:
        zero.check_copies()
    except zs.RankMismatchError as error:
        return str(error)
    return ""


def check_all(cases: list[Any]) -> list[str]:
    return [check_files(*case) for case in cases]


def test_states_in_files_are_compared(tmp_path: Path) -> None:
    names, folder = ("AdamW", "ASGD", "Rprop", "NAdam"), str(tmp_path)
    options = ({}, {"precision": "bf16"}, {"settings": zs.Settings(shared_memory=False)})
    cases = [(name, stage, False, folder, one) for name in names for stage in (0, 2) for one in options]
    cases.append(("AdamW", 0, True, folder, {}))
    for case, errors in zip(cases, zip(*run_ranks(check_all, 2, cases, timeout_s=60.0), strict=True), strict=True):
        assert [bool(error) for error in errors] == [case[2]] * 2, (case, errors)
        assert not case[2] or all("exp_avg of 'first.weight' are no longer equal" in error for error in errors)


@pytest.mark.product
@pytest.mark.parametrize(
    ("stage", "options", "sends"), [(0, {}, True), (2, {}, True), (3, {}, False), (3, {"mesh": 2}, True)]
)
def test_equal_copies_pass_and_where_there_are_none_nothing_is_sent(
    stage: int, options: dict[str, Any], sends: bool
) -> None:
    assert [sent > 0 for sent in run_ranks(check, WORLD, stage, "nowhere", options)] == [sends] * WORLD


def drop_a_state() -> None:
    """Let one rank hold a state less. Runs on a rank."""
    model, optimizer, zero = make(0)
    loss_of(model, 0, zero.mesh.rank).backward()
    optimizer.step()
    if zero.mesh.rank == 1:
        optimizer.state.popitem()
    zero.check_copies()


def test_a_rank_that_holds_fewer_states_is_an_error_on_all() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(drop_a_state, 2)
    for error in failure.value.errors.values():
        assert error.type_name == zs.RankMismatchError.__name__, error
        assert "rank 0: the comparison of " in error.message and "rank 1: the comparison of " in error.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128])
def test_every_bit_changes_the_sum(dtype: torch.dtype) -> None:
    stored = torch.arange(12).to(dtype)
    # Odd in length, in its place in memory, and in strides.
    for value in (stored[:5], stored[1:8], stored.view(3, 4).t()[:3]):
        before, raw = sum_bits(value), value.untyped_storage()
        first, last = value.storage_offset(), value.storage_offset() + value.numel()
        places = {int(place) for place in torch.arange(12).as_strided(value.shape, value.stride(), first).flatten()}
        assert len(places) == last - first
        for place in range(12 * dtype.itemsize):
            for bit in range(8):
                raw[place] ^= 1 << bit
                assert (sum_bits(value) != before) == (place // dtype.itemsize in places)
                raw[place] ^= 1 << bit
