"""Rank 0 alone evaluates, and the others wait for it elsewhere: a warning and errors say where each rank is."""

import os
import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.testing import run_ranks

from .job import loss_of, make

HEARTBEAT_S, WATCHDOG_S = 2.0, 12.0


def evaluate_on_rank_0(folder: str) -> str:
    """Take a step, evaluate on rank 0 only, and take the mean; return the error. Runs on a rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=WATCHDOG_S))
    model, optimizer, zero = make(3, watchdog_s=WATCHDOG_S, heartbeat_s=HEARTBEAT_S)
    rank = zero.mesh.rank
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    loss_of(model, 0, rank).backward()
    optimizer.step()
    loss = torch.zeros(())
    try:
        if rank == 0:
            with torch.no_grad():
                loss = loss_of(model, 1, rank)
        zs.mean_across_ranks(loss)
    except zs.RankMismatchError as error:
        return str(error)
    return "nothing was raised"


def test_each_rank_learns_where_the_others_are(tmp_path: Path) -> None:
    errors = run_ranks(evaluate_on_rank_0, 2, str(tmp_path), process_group=False, timeout_s=60.0)
    warned = (tmp_path / "0.err").read_text()
    for text in (*errors, warned):
        assert re.search(
            r"rank 0: (waits|gave up waiting) for the beginning of a no-grad forward(, now .*at job\.py:\d+)? \(", text
        ), text
        place = rf"other ranks in mean_across_ranks\(\) at {Path(__file__).name}:\d+ \("
        assert re.search(rf"rank 1: (waits|gave up waiting) for {place}", text), text
    assert re.search(r"rank 0: waits for the beginning of a no-grad forward, now .*at job\.py:\d+ \(", warned), warned
    assert "rank 1 has waited for " in warned or "rank 0 has waited for " in warned, warned
    assert f"of watchdog_s={WATCHDOG_S:g}" in warned, warned
    assert not (tmp_path / "1.err").read_text()


def pause_in_the_program(folder: str) -> str:
    """Rank 1 waits in its own code for a message; return what rank 0 says of it. Runs on a rank."""
    model, optimizer, zero = make(3, watchdog_s=4.0, heartbeat_s=HEARTBEAT_S)
    loss_of(model, 0, zero.mesh.rank).backward()
    optimizer.step()
    if zero.mesh.rank == 1:
        while not Path(folder, "over").exists():
            dist.barrier()
        return ""
    try:
        loss_of(model, 1, 0)
    except zs.RankMismatchError as error:
        Path(folder, "over").touch()
        dist.barrier()
        return str(error)
    return "nothing was raised"


def test_a_rank_in_user_code_is_told_with_its_line(tmp_path: Path) -> None:
    said = run_ranks(pause_in_the_program, 2, str(tmp_path), timeout_s=40.0)[0]
    place = f"now in barrier() at {Path(__file__).name}:"
    assert f"rank 1: in user code since step 0 of optimizer 0 (AdamW, lr [0.01]), {place}" in said, said
