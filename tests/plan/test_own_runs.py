"""Own runs on the CPU beside their plans: resident bytes are exact, peaks of torch's allocator within 2%."""

import dataclasses

import pytest
import torch

import zeroshard as zs
from benchmarks.predicted import COLUMNS, WIDE, Case, compare, measure, predict
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
