"""Models that are sharded and deleted leave nothing behind: no descriptor, no thread, no mapping, no memory."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zeroshard.testing import run_ranks

from .job import loss_of, make

CYCLES = 10
SETTLED = 3
"""Cycles after which all is there that a process makes once."""
CYCLE_KIB = 64
"""Memory that a cycle may leave: keys in the store, small objects of the allocators."""


def held() -> dict[str, Any]:
    """Return what this process holds of the kernel, and its memory in KiB."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mappings = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "shared mappings": mappings.count("memfd:zeroshard"),
        "hook": sys.excepthook,
        "mappings": len(mappings.splitlines()),
        "KiB": int(status["RssAnon"].split()[0]),
    }


def shard_and_delete(stage: int, shared_memory: bool, cycles: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shard, train a step and delete again and again; return what is held in the beginning, and at the end."""
    before, run = {}, None
    hook = sys.excepthook
    for cycle in range(cycles):
        # Each is made while the one before lives, as where a name is assigned to again.
        run = make(stage, shared_memory=shared_memory)
        loss_of(run[0], cycle, dist.get_rank()).backward()
        run[1].step()
        run[1].zero_grad()
        if cycle == SETTLED:
            before = held()
        gc.collect()
    last, run = run, None
    after = {**held(), "hook": ""}
    del last
    gc.collect()
    return {**before, "hook": ""}, {**after, "is_left": sys.excepthook is not hook}


@pytest.mark.product
@pytest.mark.parametrize(("stage", "shared_memory"), [(3, True), (1, False)])
def test_nothing_is_left_of_models_that_are_gone(stage: int, shared_memory: bool) -> None:
    for before, after in run_ranks(shard_and_delete, 2, stage, shared_memory, CYCLES, timeout_s=120.0):
        assert not after.pop("is_left"), "sys.excepthook is not what it was"
        grown = {what: after[what] - before[what] for what in ("mappings", "KiB")}
        assert grown["mappings"] <= 8, (before, after)
        assert grown["KiB"] <= (CYCLES - SETTLED) * CYCLE_KIB, (before, after)
        for what in ("descriptors", "threads", "shared mappings"):
            assert after[what] <= before[what], (what, before, after)


def delete_early() -> str:
    """Rank 0 deletes its model; the other one wants to go on."""
    run = make(3, shared_memory=False)
    dist.barrier()
    if dist.get_rank() == 0:
        del run
        gc.collect()
        dist.barrier()
        return ""
    try:
        run[2].agree(True)
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "nothing was raised"


def test_a_rank_that_needs_one_that_deleted_its_model_says_so() -> None:
    _, said = run_ranks(delete_early, 2, timeout_s=60.0)
    assert "rank 0" in said and "agree" in said, said
