"""Own runs on the CPU beside their plans: resident bytes are exact, peaks of torch's allocator within 2%."""

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import record_function

import zeroshard as zs
from benchmarks.peaks import measure_peak
from benchmarks.predicted import COLUMNS, WIDE, Case, compare, measure, predict
from zeroshard.plan import planning
from zeroshard.plan.step.simulate import make_films
from zeroshard.testing import run_ranks
from zeroshard.train.models.gpt import GPT, Block, GPTConfig

SMALL = Case(depth=4, context=128, batch=2)
CASES = [
    {"stage": 0, "ranks": 1},
    {"stage": 0, "ranks": 2, "shared_memory": False},
    {"stage": 0, "ranks": 2, "activations": "recompute-rest"},
    {"stage": 1, "ranks": 2, "activations": "recompute", "shared_memory": False},
    {"stage": 1, "ranks": 3},
    {"stage": 2, "ranks": 2, "micro_batches": 2, "shared_memory": False},
    {"stage": 2, "ranks": 4, "activations": "recompute"},
    {"stage": 3, "ranks": 2},
    {"stage": 3, "ranks": 2, "activations": "recompute-sqrt", "shared_memory": False},
    {"stage": 3, "ranks": 3, "activations": "offload", "shared_memory": False},
    {"stage": 3, "ranks": 2, "activations": "compress-int8+offload"},
    {"stage": 0, "ranks": 1, "activations": "recompute+compress-bf16"},
    {"stage": 0, "ranks": 1, "activations": "recompute-rest+offload"},
    {"stage": 0, "ranks": 1, "activations": zs.Offloaded(0.5)},
    {"stage": 2, "ranks": 1, "activations": "compress"},
    {"stage": 3, "ranks": 4, "tensor": 2},
    {"stage": 3, "ranks": 4, "tensor": 2, "activations": "recompute+partition", "shared_memory": False},
    {"stage": 0, "ranks": 4, "tensor": 2, "replicas": 2, "activations": "recompute", "shared_memory": False},
    {"stage": 0, "ranks": 4, "replicas": 2, "shared_memory": False},
    {"stage": 2, "ranks": 4, "replicas": 2, "micro_batches": 2},
    {"stage": 3, "ranks": 4, "replicas": 2, "shared_memory": False},
    {"stage": 3, "ranks": 4, "replicas": 2, "micro_batches": 2, "shared_memory": False},
    {"stage": 0, "ranks": 1, "offloaded": 0.3},
    {"stage": 2, "ranks": 2, "offloaded": 1.0, "place": "file", "micro_batches": 2, "shared_memory": False},
    {"stage": 3, "ranks": 3, "offloaded": 0.3, "precision": "bf16", "shared_memory": False},
    {"stage": 3, "ranks": 1, "offloaded": 1.0, "brought": 1.0, "place": "file"},
    {"stage": 3, "ranks": 2, "offloaded": 1.0, "brought": 0.5, "place": "file", "shared_memory": False},
    {"stage": 3, "ranks": 2, "offloaded": 0.3, "brought": 1.0, "precision": "bf16", "shared_memory": False},
    {"stage": 1, "ranks": 2, "optimizer": "muon", "shared_memory": False},
    {"stage": 3, "ranks": 2, "optimizer": "adafactor", "shared_memory": False},
    {"stage": 2, "ranks": 2, "tensor": 2, "is_sequence_parallel": True, "shared_memory": False},
]


@pytest.mark.product
@pytest.mark.parametrize("options", CASES, ids=lambda options: str(dataclasses.replace(SMALL, **options)))
def test_a_run_takes_what_its_plan_says(options: dict[str, object]) -> None:
    for predicted, measured in compare(dataclasses.replace(SMALL, **options)):  # type: ignore[arg-type]
        assert measured.resident_bytes == predicted.resident_bytes
        assert abs(predicted.peak_bytes / measured.peak_bytes - 1) <= 0.02


@pytest.mark.parametrize("options", [{"activations": "recompute"}, {"optimizer": "muon"}], ids=str)
def test_in_a_first_step_ranks_agree_on_each_gather_and_the_pool_keeps_what_it_left(options: dict[str, str]) -> None:
    for predicted, measured in compare(Case(3, 2, shared_memory=False, **options)):  # type: ignore[arg-type]
        assert abs(predicted.first_bytes / measured.first_bytes - 1) <= 0.01
        assert measured.resident_bytes == predicted.resident_bytes


def test_partial_sums_of_more_than_two_ranks_are_made_once_the_messages_are_there() -> None:
    """By then the backward's own memory is gone, so that they are no part of its peak."""
    for predicted, measured in compare(dataclasses.replace(SMALL, ranks=3, shared_memory=False, context=16, batch=1)):
        assert abs(predicted.peak_bytes / measured.peak_bytes - 1) <= 0.001


@pytest.mark.skipif("transformers OPTForCausalLM" not in WIDE, reason="transformers is not installed")
def test_what_a_loss_outside_the_model_keeps_ends_with_its_backward() -> None:
    model = {"model": "transformers OPTForCausalLM", "trained": "adapters", "activations": "recompute"}
    for predicted, measured in compare(Case(1, 2, **model)):  # type: ignore[arg-type]
        assert abs(predicted.peak_bytes / measured.peak_bytes - 1) <= 0.02


def test_compression_without_a_word_about_values_is_bounded_and_said() -> None:
    case = dataclasses.replace(SMALL, stage=0, ranks=1, activations="compress")
    with torch.device("meta"):
        model = GPT(GPTConfig(case.depth, case.context))
    options = {"world_size": 1, "device": CPU, "inputs": [torch.zeros(2, 128, dtype=torch.int64)] * 2, "stage": 0}
    plan = zs.plan(model, **options, activations="compress", units=[Block], precision="fp32")  # type: ignore[arg-type]
    assert ["zeros=" in note for note in plan.notes] == [True]
    (measured,) = measure(case)
    assert measured.peak_bytes < plan.allocated_bytes
    assert not zs.plan(model, **options, activations="compress", zeros=0.5, precision="fp32").notes  # type: ignore[arg-type]


CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)


def test_what_ranks_of_a_host_map_is_not_the_allocator_s() -> None:
    mapped = dataclasses.replace(SMALL, stage=3)
    sent = dataclasses.replace(mapped, shared_memory=False)
    by_memory, by_messages = predict(mapped)[0], predict(sent)[0]
    held = {column: by_memory.resident_bytes[column] for column in COLUMNS if column != "transient"}
    assert held == {column: by_messages.resident_bytes[column] for column in COLUMNS if column != "transient"}
    assert by_messages.allocated_bytes - by_memory.allocated_bytes >= held["parameters"] // 2
    assert by_memory.peak_bytes < by_messages.peak_bytes


def pooled(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose inputs, of 2.3 MiB, are larger than what it keeps of them."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, width))
    return model, torch.optim.AdamW(model.parameters())


def most_bytes(width: int, micro_batches: int) -> int:
    """Return the peak of torch's allocator in a third step of a loop over batches. Runs in a process of its own."""

    def train(steps: int = 3) -> None:
        model, optimizer = pooled(width)
        zs.shard(model, optimizer, stage=0)
        for step in range(steps):
            with record_function(f"step {step}"):
                for _ in range(micro_batches):
                    x = torch.zeros(4, 3, 224, 224)
                    model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        del model, optimizer, x
        gc.collect()

    train(1)
    return max(one.live_bytes for one in measure_peak(train).blocks if "step 2" in one.operations)


@pytest.mark.parametrize(("width", "micro_batches", "phase"), [(4096, 2, "update"), (64, 1, "forward")])
def test_a_loop_holds_each_batch_until_it_has_the_next(width: int, micro_batches: int, phase: str) -> None:
    plan = zs.plan(
        *pooled(width)[:1], world_size=1, device=CPU, stage=0, precision="fp32", inputs=[torch.zeros(4, 3, 224, 224)],
        micro_batches=micro_batches,
    )  # fmt: skip
    assert plan.film.peak_phase == phase
    (measured_bytes,) = run_ranks(most_bytes, 1, width, micro_batches)
    assert plan.ranks[0].allocator_bytes == pytest.approx(measured_bytes, rel=1e-3)


def test_a_loop_holds_the_batch_of_a_pipe_through_the_update() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    film = zs.plan(model, world_size=2, pipe=2, micro_batches=3, device=CPU, inputs=[torch.zeros(8, 4)]).film
    numbers = [place for place, one in enumerate(film.events) if one.what == "inputs"]
    assert [film.events[place].nbytes for place in numbers] == [384, 384, -384, -384]
    assert film.events[numbers[-1]].at_s == film.step_s


class Halves(nn.Module):
    """One unit: its second half alone may have states, or gradients, or the largest parameter."""

    def __init__(self, kind: str, width: int = 512) -> None:
        super().__init__()
        self.kind, parts = kind, 4 if kind == "one large parameter" else 1
        self.first = nn.ParameterList(torch.zeros(4 * width // parts, width) for _ in range(parts))
        self.second = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind != "no gradients":
            x = x + sum(one.mean(0) for one in self.first)
        return self.second(x).sum()  # type: ignore[no-any-return]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        first, second = [*self.first], [*self.second.parameters()]
        if self.kind in ("states of the first", "states of the second"):
            sgd, adamw = (second, first) if self.kind == "states of the first" else (first, second)
            return [torch.optim.SGD(sgd, lr=0.1), torch.optim.AdamW(adamw)]
        return [torch.optim.AdamW([*first, *second])]


HALVES = ("states of the first", "states of the second", "no gradients", "one large parameter")


def most_of_halves(kind: str) -> tuple[dict[str, int], int]:
    """Return what is resident, and the peak of torch's allocator in a third step. Runs on a rank."""
    held = dict[str, int]()

    def train(steps: int = 3) -> None:
        model = Halves(kind)
        optimizers = model.optimizers()
        zero = zs.shard(model, optimizers, stage=1, settings=zs.Settings(shared_memory=False))
        for step in range(steps):
            with record_function(f"step {step}"):
                model(torch.ones(2, 512)).backward()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
        held.update(zero.memory().resident_bytes)
        del model, optimizers, zero, one
        gc.collect()

    train(1)
    peak_bytes = max(one.live_bytes for one in measure_peak(train).blocks if "step 2" in one.operations)
    return {column: held[column] for column in COLUMNS}, peak_bytes


def plan_of_halves(kind: str, ranks: int = 2, width: int = 512, **options: Any) -> zs.Plan:
    with torch.device("meta"):
        model = Halves(kind, width)
    return zs.plan(
        nn.Sequential(model) if "units" in options else model,
        world_size=ranks, stage=1, precision="fp32", inputs=[torch.ones(2, width)],
        optimizer=model.optimizers(), shared_memory=False, **{"device": CPU, **options},
    )  # fmt: skip


@pytest.mark.product
@pytest.mark.parametrize("kind", HALVES)
def test_ranks_whose_updates_differ_have_peaks_of_their_own(kind: str) -> None:
    plan = plan_of_halves(kind)
    for one, (held, peak_bytes) in zip(plan.ranks, run_ranks(most_of_halves, 2, kind), strict=True):
        assert {column: one.resident_bytes[column] for column in COLUMNS} == held
        assert one.allocator_bytes == pytest.approx(peak_bytes, rel=0.01)
        assert one.peak_bytes >= sum(one.resident_bytes.values())
    peaks = [one.peak_bytes for one in plan.ranks]
    assert max(peaks) > 1.05 * min(peaks)
    assert plan.shown == peaks.index(max(peaks)) == (kind != "states of the first")
    assert plan.film.peak[0] == plan.peak_bytes and plan.film.resident_bytes == plan.resident_bytes


def test_a_plan_is_of_its_fullest_rank() -> None:
    plan = plan_of_halves("states of the second", width=19456, device="a100-40", units=[Halves])
    first, second = plan.ranks
    assert first.reserved_bytes + plan.outside_bytes < plan.asked.device.memory_bytes < plan.total_bytes
    assert plan.verdict == "no" and plan.total_bytes == second.reserved_bytes + plan.outside_bytes
    assert plan.total_parts["states"] == second.resident_bytes["states"] == 32 * 19456**2
    assert sum(plan.total_parts.values()) == plan.total_bytes
    assert ("states", 32 * 19456**2) in [(column, nbytes) for column, _, _, nbytes in plan.live]


def test_of_many_ranks_those_that_keep_the_same_are_one_class() -> None:
    plan = plan_of_halves("states of the second", ranks=64, device="h100")
    assert [(one.name, one.count) for one in plan.ranks] == [
        ("rank 0", 1), ("32 ranks like rank 32", 32), ("31 ranks like rank 1", 31),
    ]  # fmt: skip
    assert plan.shown == 1
    assert sum(one.count * one.resident_bytes["states"] for one in plan.ranks) == 2 * 4 * 4 * 512 * 512


def test_ranks_that_differ_by_padding_share_one_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = list[int]()
    monkeypatch.setattr(planning, "make_films", lambda job: simulated.append(1) or make_films(job))
    for optimizer, ranks in (("adamw", 1000), ("adamw8bit", 8), ("lion", 8)):
        plan = planning.make_plan("gpt2", world_size=ranks, stage=3, optimizer=optimizer, seq=256)
        assert len(plan.ranks) == 3 and plan.shown == 0
    assert len(simulated) == 3
