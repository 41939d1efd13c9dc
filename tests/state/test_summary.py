"""The table says what the handle's accounts say, unit by unit."""

import re

import pytest
import torch

import zeroshard as zs
from tests.engine import models
from tests.engine.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.testing import run_ranks


def table(stage: int, precision: str, cut: str) -> tuple[str, int, int, list[tuple[str, int, int]]]:
    """Return the table after a step, and the numbers that it must show."""
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, cut=cut, watchdog_s=WATCHDOG_S)
    models.gpt_loss(model, 0, zero.mesh.rank).backward()
    optimizer.step()
    resident = sum(n for column, n in zero.memory().resident_bytes.items() if column != "transient")
    units = [(unit.name or "(root)", len(unit.parameters), unit.numel) for unit in zero.units]
    return zero.summary(), resident, zero.traffic().predicted_step_bytes, units


def number(cell: str) -> int:
    """Read a number with thousands separators."""
    return int(cell.replace(",", ""))


def tables(precision: str, cut: str) -> list[tuple[str, int, int, list[tuple[str, int, int]]]]:
    return [table(stage, precision, cut) for stage in STAGES]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("precision", "cut"), [("fp32", "tensor"), ("bf16", "element")])
def test_the_table_adds_up(precision: str, cut: str, world: int) -> None:
    by_rank = run_ranks(tables, world, precision, cut, timeout_s=TIMEOUT_S, process_group=world > 1)
    for rank, by_stage in enumerate(by_rank):
        for stage, (text, resident, sent, units) in enumerate(by_stage):
            title, heads, *lines, total = text.splitlines()
            cells, sums = [re.split(r"\s\s+", line) for line in lines], re.split(r"\s\s+", total)
            assert title == f"[rank {rank}/{world}] stage {stage}, cut by {cut}"
            assert (
                heads.split() == "unit parameters elements dtype kept shard padding resident bytes sent bytes".split()
            )
            assert [row[:3] for row in cells] == [[n, f"{c:,}", f"{e:,}"] for n, c, e in units]
            assert {row[3] for row in cells} == {"float32" if precision == "fp32" else "bfloat16"}
            assert {row[4] for row in cells} == {"sharded" if stage == 3 and world > 1 else "whole"}
            for place in (-2, -1):
                assert sum(number(row[place]) for row in cells) == number(sums[place])
            assert (number(sums[-2]), number(sums[-1])) == (resident, sent)
            for row, (_, _, numel) in zip(cells, units, strict=True):
                assert row[6] == f"{100 * (1 - numel / (world * number(row[5]))):.1f}%"


def test_columns_are_aligned() -> None:
    model = models.build(models.GPT)
    zero = zs.shard(model, models.adamw(model))
    _, heads, *lines = zero.summary().splitlines()
    assert {len(line) for line in [heads, *lines]} == {len(heads)}
    assert zero.summary().isascii()


def test_a_model_without_parameters_has_a_table() -> None:
    zero = zs.shard(torch.nn.Sequential(torch.nn.ReLU()))
    assert [line.split()[0] for line in zero.summary().splitlines()[1:]] == ["unit", "(root)", "total"]
