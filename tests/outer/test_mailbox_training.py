"""Launches of real training that exchange through a mailbox: against one process, and repeated from their logs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.outer.island_log import replay
from zeroshard.outer.island_model import join_islands
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_source import Logged
from zeroshard.testing import run_ranks

from .islands import at_once, mailbox, secret_in

EVERY, STEPS = 3, 9


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(island: str, rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * ord(island) + 10 * step + rank))


def train_island(options: IslandOptions, stage: int, precision: str, log: str | None) -> dict[str, torch.Tensor]:
    """Train an island and return its weights; with `log`, repeat the run from that log. Runs on each rank."""
    zs.init()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision)
    rank = zero.mesh.rank
    source = None if log is None else Logged(Path(log) / f"{options.island}-{rank}", options.island)
    island = join_islands(zero._engine, options, optimizers=zero.optimizers, source=source)
    for step in range(STEPS):
        model(batch(options.island, rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        island.after_step()
    island.finish(others=True)
    if source is not None:
        assert source.left == 0
    zero.check_copies()
    with zero.gathered():
        return {name: value.clone() for name, value in model.state_dict().items()}


def launch(options: IslandOptions, ranks: int, stage: int, precision: str = "fp32", log: str | None = None) -> Any:
    found, *others = run_ranks(train_island, ranks, options, stage, precision, log, process_group=ranks > 1)
    assert all(torch.equal(found[name], other[name]) for other in others for name in found)
    return found


def plain(ranks: int) -> dict[str, torch.Tensor]:
    """The oracle: two copies in one process, whose changes are added in the order of islands."""
    models = {name: make_model() for name in "ab"}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=0.01) for name, model in models.items()}
    anchors = [parameter.detach().clone() for parameter in models["a"].parameters()]
    for step in range(STEPS):
        for name, model in models.items():
            for rank in range(ranks):
                (model(batch(name, rank, step)).square().mean() / ranks).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for anchor, first, second in zip(anchors, *(m.parameters() for m in models.values()), strict=True):
                    anchor += ((first - anchor) + (second - anchor)) * 0.5
                    first.copy_(anchor)
                    second.copy_(anchor)
    return models["a"].state_dict()


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_waiting_islands_have_the_bits_of_one_process(ranks: int, stage: int, tmp_path: Path) -> None:
    with mailbox(tmp_path) as box:
        asked = partial(IslandOptions, islands=2, every=EVERY, address=box.address, secret_file=secret_in(tmp_path))
        first, second = at_once(*(partial(launch, asked(name), ranks, stage) for name in "ab"))
    expected = plain(ranks)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        if ranks == 1:
            assert torch.equal(first[name], value)
        else:
            torch.testing.assert_close(first[name], value, rtol=0, atol=1e-6)


def test_islands_that_do_not_wait_are_repeated_from_their_logs_bit_for_bit(tmp_path: Path) -> None:
    with mailbox(tmp_path) as box:
        asked = partial(
            IslandOptions,
            islands=2,
            every=1,
            staleness=None,
            address=box.address,
            secret_file=secret_in(tmp_path),
            log=tmp_path / "log",
        )
        runs = at_once(*(partial(launch, asked(name), 2, 3, "bf16") for name in "ab"))
    assert all(replay(tmp_path / "log" / f"{name}-{rank}").changes > 0 for name in "ab" for rank in (0, 1))
    again = launch(
        IslandOptions("a", 2, 1, None, box.address, tmp_path / "secret"), 2, 3, "bf16", str(tmp_path / "log")
    )
    assert all(torch.equal(runs[0][name], again[name]) for name in again)
