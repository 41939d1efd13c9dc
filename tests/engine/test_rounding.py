"""Masters in bfloat16, rounded at random: unbiased, the same on any ranks, and small updates are not lost."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.core.dtypes import round_at_random
from zeroshard.testing import run_ranks

STOCHASTIC = zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
NEAREST = zs.Precision(param=torch.bfloat16, master=torch.bfloat16)


def test_rounding_is_right_on_average_and_finds_neighbours_only() -> None:
    # One eighth of the way from 1 to the next bfloat16, 1 + 2**-7.
    count, wide = 200_000, 1 + 2**-10
    rounded = round_at_random(torch.full((count,), wide), 0, seed=5).float()
    assert rounded.unique().tolist() == [1.0, 1 + 2**-7]
    # Five standard deviations of a mean of independent draws.
    assert rounded.mean().item() == pytest.approx(wide, abs=5 * 2**-7 * (1 / 8 * 7 / 8 / count) ** 0.5)


def test_rounding_leaves_what_bfloat16_holds() -> None:
    values = torch.cat([torch.randn(1000).bfloat16().float(), torch.tensor([0.0, torch.inf, -torch.inf, 3e38])])
    kept = values[:-1]
    assert torch.equal(round_at_random(kept, 0, seed=1).float(), kept)
    assert round_at_random(torch.tensor([torch.nan]), 0, seed=1).isnan().all()


def test_an_element_is_rounded_alike_wherever_it_is_cut() -> None:
    values = torch.randn(1000)
    parts = [round_at_random(values[:333], 0, seed=3), round_at_random(values[333:], 333, seed=3)]
    assert torch.equal(torch.cat(parts), round_at_random(values, 0, seed=3))
    assert not torch.equal(round_at_random(values, 0, seed=4), round_at_random(values, 0, seed=3))


def train(precision: zs.Precision, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, int], dict[str, int]]:
    """Train on the same batch on every rank; a sum of equal gradients over 1, 2 or 4 ranks is exact."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    zero = zs.shard(
        model, optimizer, stage=stage, precision=precision, units=[nn.Linear], settings=zs.Settings(watchdog_s=5)
    )
    x = torch.randn(8, 16)
    for _ in range(20):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = zero.memory()
    with zero.gathered():
        return {n: p.detach().clone() for n, p in model.named_parameters()}, memory.peak_bytes, memory.predicted_bytes


def all_stages(precision: zs.Precision) -> list[tuple[dict[str, torch.Tensor], dict[str, int], dict[str, int]]]:
    return [train(precision, stage) for stage in range(4)]


def test_stages_and_ranks_round_alike() -> None:
    results = [run_ranks(all_stages, world_size, STOCHASTIC)[0] for world_size in (1, 2, 4)]
    expected = results[0][0][0]
    for result in results:
        for parameters, measured, predicted in result:
            assert {name: torch.equal(parameters[name], value) for name, value in expected.items()} == dict.fromkeys(
                expected, True
            )
            assert measured == predicted


def test_small_updates_are_not_lost() -> None:
    torch.manual_seed(0)
    start = {name: p.detach().bfloat16() for name, p in nn.Sequential(nn.Linear(16, 16, bias=False)).named_parameters()}
    moved = {}
    for name, precision in (("stochastic", STOCHASTIC), ("nearest", NEAREST)):
        parameters = run_ranks(train, 1, precision, 3)[0][0]
        moved[name] = (parameters["0.weight"] != start["0.weight"]).float().mean().item()
    # An update of 1e-4 is below half a unit in the last place of most weights, which are up to 1/4.
    assert moved["stochastic"] > 2 * moved["nearest"]


def after_a_failed_step() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer, precision=STOCHASTIC, settings=zs.Settings(watchdog_s=5))
    model(torch.full((1, 8), torch.nan)).sum().backward()
    with pytest.raises(RuntimeError, match="not finite; nothing was changed"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with zero.gathered():
        assert model.weight.isfinite().all()
        assert model.weight.dtype == torch.bfloat16
    assert dist.get_world_size() == 2


def test_a_failed_step_leaves_masters_narrow() -> None:
    run_ranks(after_a_failed_step, 2)


def resumed(path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for has_stopped in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        zero = zs.shard(model, optimizer, precision=STOCHASTIC, settings=zs.Settings(watchdog_s=5))
        x = torch.randn(4, 16)
        for step in range(6):
            if has_stopped and step == 3:
                zero.load(path)
            if not has_stopped and step == 3:
                zero.save(path)
            if not has_stopped or step >= 3:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with zero.gathered():
            found.append(model.weight.detach().clone())
    return [(found[0], found[1])]


def test_a_resumed_run_draws_the_same_chances(tmp_path: Path) -> None:
    for [(straight, again)] in run_ranks(resumed, 2, str(tmp_path / "step-3")):
        assert torch.equal(straight, again)


def test_other_masters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs master=torch\.bfloat16; got master=None"):
        zs.Precision(param=torch.bfloat16, rounding="stochastic")
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic'; got 'up'"):
        zs.Precision(rounding="up")
