"""The table says what the handle's accounts say, unit by unit."""

import re
import warnings
from unittest import mock

import pytest
import torch

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.account import summary
from zeroshard.testing import run_ranks


def table(stage: int, precision: str) -> tuple[str, int, int, list[tuple[str, int, int]]]:
    """Return the table after a step, and the numbers that it must show."""
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    models.gpt_loss(model, 0, zero.mesh.rank).backward()
    optimizer.step()
    resident = sum(n for column, n in zero.memory().resident_bytes.items() if column != "transient")
    units = [(unit.name or "(root)", len(unit.parameters), unit.numel) for unit in zero.units]
    return zero.summary(), resident, zero.traffic().predicted_step_bytes, units


def number(cell: str) -> int:
    """Read a number with thousands separators."""
    return int(cell.replace(",", ""))


def tables(precision: str) -> list[tuple[str, int, int, list[tuple[str, int, int]]]]:
    return [table(stage, precision) for stage in STAGES]


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_table_adds_up(precision: str, world: int) -> None:
    by_rank = run_ranks(tables, world, precision, timeout_s=TIMEOUT_S, process_group=world > 1)
    for rank, by_stage in enumerate(by_rank):
        for stage, (text, resident, sent, units) in enumerate(by_stage):
            title, heads, *lines, total = [line for line in text.splitlines() if not line.startswith("whole at once")]
            cells, sums = [re.split(r"\s\s+", line) for line in lines], re.split(r"\s\s+", total)
            assert title == f"[rank {rank}/{world}] stage {stage}"
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


class Wide(torch.nn.Module):
    """A model that is mostly one layer or, with `parts`, a module of several layers that runs as a whole."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(64, 1 << 14, bias=False) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = x + layer(x)[..., :64]
        return self.last(x)


def judged(parts: int, units: list[str] | None) -> tuple[list[str], str, str]:
    """Return the warnings of `shard`, the last line of the summary, and how the handle is shown."""
    model = Wide(parts)
    smaller = mock.patch.object(summary, "WARNED_BYTES", 1 << 20)
    with smaller, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero = zs.shard(model, stage=3, units=units, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        text = str(zero)
    return [str(one.message) for one in caught], text.splitlines()[-1], repr(zero)


@pytest.mark.parametrize(
    ("parts", "units", "remedy"),
    [
        (2, None, "These are single layers, which units= cannot divide"),
        (2, ["Wide"], "Name smaller units, such as units=['Linear', 'ModuleList']"),
    ],
)
def test_a_model_that_is_mostly_whole_is_warned_about(parts: int, units: list[str] | None, remedy: str) -> None:
    (texts, line, _), (others, _, shown) = run_ranks(judged, 2, parts, units, timeout_s=TIMEOUT_S)
    assert others == []  # one rank warns for all
    (text,) = texts
    assert text.startswith("[rank 0/2] 100% of the parameters are whole at once while the model runs, ")
    assert text.split("runs, ")[1].startswith("8.0 MiB of 8.0 MiB (")
    assert remedy in text
    assert line.startswith("whole at once: 100.0% of the gathered bytes (")
    assert line.endswith("; more than half, so name smaller units with units=")
    assert shown == f"Zero([rank 1/2] stage 3, {3 if units is None else 1} units, 2,105,472 parameters)"


class Iterated(models.Stack):
    """A stack of sequences that are iterated over, so that no unit of theirs is called."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(models.Block(), models.Block()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head([x := block(x) for one in [[self.stem], *self.blocks] for block in one][-1])


def last_lines() -> list[str]:
    """Return the last line of the summary before and after a forward."""
    model = models.build(Iterated)
    zero = zs.shard(model, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    before = str(zero)
    models.stack_loss(model, 0, 0).backward()
    return [text.splitlines()[-1] for text in (before, str(zero))]


def test_units_that_are_read_and_never_called_are_told() -> None:
    before, after = run_ranks(last_lines, 2, timeout_s=TIMEOUT_S)[0]
    assert "read outside" not in before
    assert "blocks.0 read outside its modules, blocks.1 read outside its modules" in after


def test_a_model_without_parameters_has_a_table() -> None:
    zero = zs.shard(torch.nn.Sequential(torch.nn.ReLU()))
    assert [line.split()[0] for line in zero.summary().splitlines()[1:]] == ["unit", "(root)", "total"]
