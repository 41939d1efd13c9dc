"""One step as a film: its events balance, its peak and its lanes are right, its traffic is the paper's."""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from zeroshard.describe.offload import Offload, row_with
from zeroshard.describe.parameters import row_with_parameters
from zeroshard.describe.rows import row_of
from zeroshard.plan.job import Options, job_of_shape
from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.named import OPTIMIZERS, specs_of, updates_of
from zeroshard.plan.shape.shapes import Transformer, gpt
from zeroshard.plan.shape.tape import Tape, instructions
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.script import Call
from zeroshard.plan.step.simulate import make_film, make_films
from zeroshard.table.bytes import predict
from zeroshard.table.spec import Formats
from zeroshard.table.stages import row_of_stage
from zeroshard.table.wires import Messages, Native, Silence, Wire

GPT = gpt("small", 4, 256, 8, vocabulary=512, sequence=128)
LLAMA = Transformer(name="small", layers=4, hidden=256, heads=8, kv_heads=4, inner=512, vocabulary=512)
TIED = dataclasses.replace(LLAMA, is_tied=True)
FP32 = Formats(*["float32"] * 5)
H100 = DEVICES["h100-80"]


def options(stage: int = 3, **rest: object) -> Options:
    asked = {"world_size": 4, "device": H100, "batch": 2, "sequence": 128, "row": row_of_stage(stage), **rest}
    return Options(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("activations", [None, "recompute", "recompute-rest"])
def test_a_step_ends_with_what_it_began_with(model: Transformer, stage: int, activations: str | None) -> None:
    job = job_of_shape(model, options(row=row_of(stage, None, activations)))
    film = make_film(job)
    left = sum(one.nbytes for one in film.events)
    # Pooled buffers stay; nothing else does.
    sums = Counter[str]()
    for one in film.events:
        sums[one.column] += one.nbytes
    assert {column for column, nbytes in sums.items() if nbytes} <= {"transient"}
    assert left == sums["transient"] >= 0
    assert all(nbytes >= 0 for nbytes in film.live)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resident_and_transient_bytes_are_those_of_the_table(stage: int, ranks: int) -> None:
    """`table/bytes.py` predicts for the engine, which tests hold against measurements; the film comes to the same."""
    job = job_of_shape(GPT, options(stage, world_size=ranks, precision="fp32"))
    film = make_film(job)
    told = predict(job.units, job.updates, job.wire)
    resident = film.resident_bytes
    assert resident["parameters"] == told["parameters"]
    assert resident["states"] == told["states"]
    held = {"gradients": 0, "padding": resident["padding"]}
    for one in film.events:
        if one.nbytes > 0 and one.column in held:
            held[one.column] += one.nbytes
    assert held["gradients"] == told["gradients"]
    assert held["padding"] == told["padding"]


@pytest.mark.parametrize(
    "kept", ["sharded", "until-backward", "until-step", {"u[135]": "until-backward", "u2": "replicated"}]
)
@pytest.mark.parametrize("wire", [Native(), Messages()])
def test_transient_bytes_are_those_of_the_table_for_plain_units(wire: Wire, kept: Any) -> None:
    """Each unit used once, without activations: what is whole, lands and travels is what the engine expects."""
    parameters = {"": (("a", 64),), **{f"u{n}": (("w", 1 << 16), ("b", 256)) for n in range(6)}}
    units = specs_of(parameters, row_with_parameters(row_of_stage(3), kept), FP32, 4)
    tape = Tape(0)
    tape.add("f", [], [4], weight_bytes=4)
    parts = instructions(tape)
    spans = {"shard": Span(4, 4)}
    calls = [Call(unit.number, parts) for unit in units[1:]]
    updates = [updates_of(units, OPTIMIZERS["sgd"])]
    film = make_film(Job(units, calls, updates, wire, H100, "float32", spans), is_settled=True)
    most = now = film.resident_bytes["transient"]
    for one in film.events:
        now += one.nbytes * (one.column == "transient")
        most = max(most, now)
    assert most == predict(units, updates, wire)["transient"]


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_what_stays_until_the_step_is_gathered_once_and_released_before_the_update(micro_batches: int) -> None:
    row = row_with_parameters(row_of_stage(3), "until-step")
    film = make_film(job_of_shape(LLAMA, options(row=row, micro_batches=micro_batches)))
    assert (
        film.sent_bytes["shard gather"] == make_film(job_of_shape(LLAMA, options(row=row))).sent_bytes["shard gather"]
    )
    whole = Counter[str]()
    for one in film.events:
        whole[one.unit] += one.nbytes * (one.what == "whole parameters")
    assert not any(whole.values())


@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_is_that_of_the_paper(stage: int, factor: int) -> None:
    """2, 2, 2 and 3 times the parameters, times (N - 1) / N, padding aside; a backward gathers no norm and no head."""
    job = job_of_shape(LLAMA, options(stage, precision="fp32"))
    sent = sum(make_film(job).sent_bytes.values())
    ends = sum(unit.numel for unit in job.units if unit.name in ("", "lm_head"))
    expected = (factor * LLAMA.numel() - ends * (stage == 3)) * 4 * 3 / 4
    assert expected <= sent <= 1.01 * expected


def slowed(**rates: float) -> Device:
    return dataclasses.replace(H100, hop_s=0.0, node_hop_s=0.0, half_bytes=0.0, launch_s=0.0, **rates)


def test_communication_that_is_fast_is_hidden() -> None:
    fast = slowed(link_bytes_per_s=1e18, node_bytes_per_s=1e18)
    film = make_film(job_of_shape(LLAMA, options(device=fast)))
    assert film.exposed_s < 1e-6 * film.step_s
    alone = make_film(job_of_shape(LLAMA, options(device=fast, world_size=1)))
    assert film.step_s - film.update_s == pytest.approx(alone.step_s - alone.update_s, rel=1e-3)


def test_communication_that_is_slow_takes_as_long_as_it_takes() -> None:
    slow = slowed(link_bytes_per_s=1e6, node_bytes_per_s=1e6)
    job = job_of_shape(LLAMA, options(device=slow, precision="fp32"))
    film = make_film(job)
    # The parameters travel twice, the gradients once, on lanes of their own: in the backward both at the same time.
    once_s = sum(slow.collective_s("gather", unit.full_bytes, job.spans["shard"]) for unit in job.units)
    assert film.exposed_s == pytest.approx(film.step_s, rel=0.01)
    assert 2 * once_s <= film.step_s <= 3.2 * once_s


def test_lanes_do_not_overlap_and_exposed_time_is_their_sum() -> None:
    film = make_film(job_of_shape(LLAMA, options()))
    for lane in {one.lane for one in film.lanes}:
        spans = sorted((one.start_s, one.stop_s) for one in film.lanes if one.lane == lane)
        assert all(stop <= start + 1e-12 for (_, stop), (start, _) in itertools.pairwise(spans))
    exposed_s = sum(one.stop_s - one.start_s for one in film.lanes if one.is_exposed)
    assert exposed_s == pytest.approx(film.exposed_s)
    computing_s = sum(one.stop_s - one.start_s for one in film.lanes if one.lane == "compute")
    assert computing_s == pytest.approx(film.step_s)


def test_the_first_step_makes_the_states() -> None:
    job = job_of_shape(LLAMA, options())
    first, steady = make_films(job)[0], make_film(job)
    assert first.resident_bytes["states"] < steady.resident_bytes["states"]
    assert sum(one.nbytes for one in first.events if one.column == "states") == (
        steady.resident_bytes["states"] - first.resident_bytes["states"]
    )


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_stay_are_held_once(stage: int) -> None:
    job = dataclasses.replace(job_of_shape(GPT, options(stage)), keeps_gradients=True)
    film, settled = make_film(job), make_film(job, is_settled=True)
    assert settled.resident_bytes["gradients"] == film.resident_bytes["gradients"] > 0
    for one in (film, settled):
        assert [event for event in one.events if event.column == "gradients"] == []


def test_micro_batches_take_time_and_no_memory() -> None:
    jobs = [job_of_shape(LLAMA, options(1, micro_batches=count)) for count in (1, 2, 5)]
    one, two, five = (make_film(job, is_settled=True) for job in jobs)
    assert two.peak[0] == five.peak[0]
    each_s = two.step_s - one.step_s
    assert five.step_s == pytest.approx(one.step_s + 4 * each_s, rel=0.05)
    assert one.peak[0] <= two.peak[0]


@pytest.mark.parametrize(
    ("model", "wte"), [(GPT, "transformer.wte"), (TIED, "model.embed_tokens")], ids=["gpt2", "llama"]
)
def test_a_tied_embedding_is_gathered_once_a_step_and_reduced_last(model: Transformer, wte: str) -> None:
    film = make_film(job_of_shape(model, options()))
    ticks = [(one.kind, one.unit) for one in film.ticks]
    # A backward finds the unit of the head gathered, and ends with that of the embedding.
    assert ticks.count(("gather", wte)) == ticks.count(("release", wte)) == 1
    reduced = [unit for kind, unit in ticks if kind == "reduce"]
    assert reduced.count(wte) == 1 and reduced[-2:] == [wte, ""]
    assert ticks.index(("release", wte)) > ticks.index(("reduce", wte))
    # Its elements have memory from its gather to its release.
    whole = [one.nbytes for one in film.events if one.what == "whole parameters" and one.unit == wte]
    assert len(whole) == 2 and sum(whole) == 0


def test_a_rank_alone_sends_nothing() -> None:
    film = make_film(dataclasses.replace(job_of_shape(LLAMA, options(world_size=1)), wire=Silence()))
    assert film.sent_bytes == {}
    assert film.exposed_s == 0


def test_recomputation_trades_memory_for_time() -> None:
    films = [
        make_film(job_of_shape(LLAMA, options(row=row_of(3, None, how))))
        for how in ("keep", "recompute-rest", "recompute")
    ]
    peaks, times = [film.peak[0] for film in films], [film.step_s for film in films]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    assert len(set(peaks)) == len(set(times)) == 3


def test_what_is_live_at_the_peak_adds_up_to_it() -> None:
    film = make_film(job_of_shape(LLAMA, options()))
    nbytes, place = film.peak
    assert sum(one.nbytes for one in film.live_at(place)) == nbytes == max(film.live)
    assert film.peak_phase in ("forward", "backward", "update")


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    device = slowed()
    product = Cost(flops=1e15, kind="matmul")
    assert device.kernel_s(product, "bfloat16") == pytest.approx(
        1e15 / (989e12 * device.matmul_part * device.sustained_part)
    )
    copy = Cost(moved_bytes=3.35e12)
    assert device.kernel_s(copy, "bfloat16") == pytest.approx(1 / device.memory_part)
    # A result of one tile occupies one multiprocessor of many; a library splits the sum over half of them.
    small = Cost(flops=1e12, kind="matmul", rows=128, columns=256)
    assert device.kernel_s(small, "bfloat16") == pytest.approx(
        2 * 1e12 / (989e12 * device.matmul_part * device.sustained_part)
    )


def test_a_gather_begins_when_offloaded_parameters_are_there() -> None:
    offload = Offload(parameters=1.0)
    row = row_with(row_of_stage(3), offload, is_alone=False)
    film = make_film(job_of_shape(GPT, options(row=row, offload=offload)))
    brought: dict[str, list[float]] = {}
    for one in film.lanes:
        if one.lane == "back" and one.what.startswith("parameters of "):
            name = one.what.removeprefix("parameters of ")
            brought.setdefault("" if name == "the root" else name, []).append(one.stop_s)
    gathers = [one for one in film.lanes if one.lane == "gather"]
    assert len(gathers) == sum(map(len, brought.values())) > GPT.layers
    for gather in gathers:
        assert gather.start_s >= brought[gather.what].pop(0)
