"""What a pipeline does in each step, counted where it acts: passes, micro-batches in flight, messages, sums."""

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.rotation import third
from zeroshard.core.flights import Flights
from zeroshard.parallel.cut import cut_model
from zeroshard.table.pipeline import schedule_of
from zeroshard.testing import run_ranks

TIMEOUT_S = 300
WATCHDOG_S = 60.0
DATA, MICRO, STEPS, DEPTH, ROWS = 2, 8, 3, 8, 4
HEADER_BYTES = 24
"""Told before the first message of a chunk in a step: checksums of shapes and of what is trained, and a length of 0."""
Case = tuple[str, int, str, str | None]
"""A schedule, a stage, when gradients are reduced, a cell of the parameters."""


class Alive:
    """Counts forwards, backwards, and the graphs of a place's micro-batches that are alive."""

    def __init__(self) -> None:
        self.graphs = weakref.WeakSet[Any]()
        self.most = 0
        self.counts: Counter[str] = Counter()


class Mark(torch.autograd.Function):
    """Changes nothing; its node lives as long as the graph around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: Alive) -> Tensor:
        ctx.alive = alive
        alive.graphs.add(ctx)
        alive.counts["forward"] += 1
        alive.most = max(alive.most, len(alive.graphs))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.alive.counts["backward"] += 1
        return grad, None


class Marked(models.Block):
    """A block that marks the graph around it."""

    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self.alive = alive

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Mark.apply(x, self.alive))


def run(places: int, cases: list[Case]) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (places, DATA), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, reduce, cell in cases:
        torch.manual_seed(7)
        alive, model, chunks = Alive(), models.Stack(depth=DEPTH), 2 if schedule == "interleaved" else 1
        for index in range(0, DEPTH, DEPTH // (places * chunks)):  # one block of each chunk
            model.blocks[index] = Marked(alive)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=False)
        options = {"stage": stage, "reduce": reduce, "settings": settings, "loss": F.mse_loss, "parameters": cell}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, schedule=schedule, **options)
        units = [unit.name for unit in pipe.zero.units if unit.parameters]
        steps = []
        for step in range(STEPS):
            before, alive.counts, alive.most = Counter(pipe.zero.traffic().sent_bytes), Counter(), 0
            data = pipe.zero.mesh.rank
            inputs = torch.cat([models.features(step, data, micro) for micro in range(MICRO)])
            targets = torch.cat([models.targets(step, data, micro) for micro in range(MICRO)])
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            sent = Counter(pipe.zero.traffic().sent_bytes) - before
            last = max(event.step for event in pipe.zero.trace.events)
            events = Counter((event.kind, event.unit) for event in pipe.zero.trace.step_events(last))
            steps.append((alive.counts, alive.most, sent["pipe"], {f"{k} {u}": n for (k, u), n in events.items()}))
        found.append({"steps": steps, "units": units})
        pipe.zero.detach()
    return found


def expected_bytes(schedule: str, places: int, place: int) -> int:
    """Return the bytes of messages that a rank sends in a step after the first."""
    chunks = 2 if schedule == "interleaved" else 1
    own, count = range(place, places * chunks, places), places * chunks
    activation = 4 * ROWS * models.WIDTH
    forth = sum(MICRO * activation + HEADER_BYTES for chunk in own if chunk < count - 1)
    return forth + sum(MICRO * activation for chunk in own if chunk > 0)


CASES = [
    (schedule, stage, reduce, cell)
    for number, schedule in enumerate(("naive", "gpipe", "1f1b", "interleaved"))
    for stage, cell in ((1, None), (3, None), (3, "until-backward"))
    for reduce in (("last", "each")[(number + stage + (cell is None)) % 2],)
]


@pytest.mark.parametrize("places", [2])
def test_each_step_does_what_its_schedule_says(places: int) -> None:
    cases = third(CASES)
    for rank, found in enumerate(run_ranks(run, places * DATA, places, cases, timeout_s=TIMEOUT_S)):
        place = rank // DATA
        for case, actual in zip(cases, found, strict=True):
            schedule, stage, reduce, cell = case
            chunks = 2 if schedule == "interleaved" else 1
            live = schedule_of(schedule, places, MICRO, chunks).live(place)
            for step, (counts, most, sent, events) in enumerate(actual["steps"]):
                assert counts == {"forward": MICRO * chunks, "backward": MICRO * chunks}, (case, step)
                assert most == live, (case, step, most)
                for unit in actual["units"]:
                    gathers = (2 * MICRO if cell is None else MICRO) if stage == 3 else 1
                    if schedule == "interleaved" and cell is not None:
                        gathers = 2 * MICRO  # the backward of one chunk also releases what the other one keeps
                    made = events.get(f"gather {unit}" if stage == 3 else f"publish {unit}", 0)
                    # Of a unit that stays whole, the forward of one micro-batch may serve the next.
                    least = 1 if cell == "until-backward" else gathers
                    assert least <= made <= gathers or not step, (case, step, unit, events)
                    assert events[f"reduce {unit}"] == (1 if reduce == "last" else MICRO), (case, step, unit, events)
                if step:
                    assert sent == expected_bytes(schedule, places, place), (case, step)


def test_a_message_that_is_left_out_is_counted() -> None:
    assert expected_bytes("1f1b", 2, 0) - expected_bytes("1f1b", 2, 1) == HEADER_BYTES
    message = 4 * ROWS * models.WIDTH
    assert expected_bytes("interleaved", 2, 0) == 3 * MICRO * message + 2 * HEADER_BYTES


class Words(nn.Module):
    """An embedding that is larger than all blocks after it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 8)
        self.blocks = nn.ModuleList(models.Block() for _ in range(4))


def test_what_stands_before_the_first_block_counts_where_a_pipe_is_cut() -> None:
    assert cut_model(Words(), None, 2).starts == ("blocks.1",)


def test_a_backward_takes_back_all_flights_whose_outputs_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.core.flights.graph_task", lambda: 7)
    units: Any = [SimpleNamespace(number=number, calls=0) for number in range(3)]
    flights, arrivals = Flights(units), []
    for used in ([0], [1, 2], [2]):
        arrivals.append(flights.arrival())
        flights.use(used)
        flights.set_apart("part", range(3))
    assert not flights.used and not any(unit.calls for unit in units)
    for arrive in arrivals[:2]:
        arrive()
    assert flights.kind_of(7) == ("part", range(3))
    assert (flights.used, [unit.calls for unit in units]) == ({0, 1, 2}, [1, 1, 1])
    arrivals[2]()  # reached while the backward runs
    assert [unit.calls for unit in units] == [1, 1, 2]
