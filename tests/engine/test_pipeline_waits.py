"""How long a place of a pipe waits for others, as `Pipeline.idle` says."""

import time

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.parallel.waits import Waits
from zeroshard.testing import run_ranks

SLEEP_S = 0.02
RANKS = 2


class Slow(nn.Module):
    """A layer that computes for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return self.linear(inputs)


def idle_parts(schedule: str) -> tuple[float | None, float | None]:
    """Return what a handle says before its first step, and after its third."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pipe", "shard"))
    model = nn.Sequential(Slow(), Slow())
    pipe = zs.pipeline(
        model, mesh=mesh, micro_batches=8, schedule=schedule, cut=["1"], loss=nn.functional.mse_loss, stage=0
    )
    before = pipe.idle
    for _ in range(3):
        pipe.step(torch.ones(8, 4), torch.zeros(8, 4))
        model.zero_grad()
    return before, pipe.idle


def test_a_place_waits_longer_where_micro_batches_follow_each_other() -> None:
    """By the formulas: a half with "naive", and a ninth with eight micro-batches in flight."""
    naive, gpipe = (run_ranks(idle_parts, RANKS, schedule) for schedule in ("naive", "gpipe"))
    assert {before for before, _ in [*naive, *gpipe]} == {None}
    for (_, long), (_, short) in zip(naive, gpipe, strict=True):
        assert long is not None
        assert short is not None
        assert 0 < short < long < 1


def test_waits_are_a_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 11.0, 13.0, 15.0, 15.5, 20.0, 30.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    waits = Waits(torch.device("cpu"))
    assert waits.part() is None
    waits.begin()
    for _ in range(2):
        with waits.waiting():
            pass
    assert waits.part() is None
    waits.end()
    assert waits.part() == (2.0 + 0.5) / 10.0
    waits.begin()
    assert waits.part() is None


class Recorded:
    """Stands for an event of a stream."""

    moments = iter(range(0, 1000, 7))

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert (device.type, enable_timing) == ("cuda", True)
        self.is_over = False

    def record(self) -> None:
        self.at_ms = next(self.moments)

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, stop: "Recorded") -> float:
        assert stop.is_over
        return float(stop.at_ms - self.at_ms)


def test_on_a_device_events_of_the_stream_are_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Recorded)
    waits = Waits(torch.device("cuda"))
    waits.begin()
    with waits.waiting():
        pass
    waits.end()
    assert waits.part() == 7 / 21
