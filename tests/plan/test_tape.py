"""Tapes are what a trace of the same modules finds: kept bytes, peaks of both passes, operations."""

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.peaks import peak_of
from tests.plan.saved import Shape, saved_bytes
from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.shape.shapes import SHAPES, Transformer, gpt
from zeroshard.plan.shape.tape import INPUT, Exchange, Tape, coarse, instructions, most_bytes
from zeroshard.plan.shape.transformer import Kernels, Workload, tapes
from zeroshard.plan.trace.events import Phase
from zeroshard.plan.trace.tracer import trace_step

from .blocks import GPT2Block, LlamaBlock

NAMES = {"keep": "kept", "recompute": "recompute", "recompute-rest": "selective"}
SEED_BYTES = 24
"""Of the state of random numbers that flash attention keeps; tapes leave it out."""
GPT = gpt("small", 2, 128, 8)
LLAMA = Transformer(name="small", layers=2, hidden=128, heads=8, kv_heads=4, inner=256, vocabulary=512)
BATCH, SEQUENCE = 2, 64


def shape_of(model: Transformer, tensor: int = 1) -> Shape:
    return Shape(BATCH, SEQUENCE, model.hidden, model.heads, model.inner, model.kv_heads, tensor)


@pytest.mark.parametrize("treatment", NAMES)
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt2", "llama"])
def test_a_block_keeps_what_the_tables_say(model: Transformer, tensor: int, treatment: str) -> None:
    block = tapes(model, Workload(batch=BATCH, sequence=SEQUENCE, tensor=tensor))["block"]
    table = saved_bytes(model.block, shape_of(model, tensor), NAMES[treatment])
    has_attention = treatment != "recompute"
    assert instructions(block, treatment).saved_bytes == table - SEED_BYTES * has_attention


@pytest.mark.parametrize(("model", "block"), [(GPT, GPT2Block), (LLAMA, LlamaBlock)], ids=["gpt2", "llama"])
def test_the_peak_of_a_backward_is_near_that_of_a_trace(model: Transformer, block: type[nn.Module]) -> None:
    """A trace has views that are copied, and kernels of its own; a tape is within a tenth of the block's own bytes."""
    with torch.device("meta"):
        traced = block(shape_of(model)).to(torch.bfloat16)
        x = torch.empty(BATCH, SEQUENCE, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    trace = trace_step(lambda one, x: one(x).sum(), traced, [x], personality="cuda")
    before = sum(event.nbytes for event in trace.events if event.phase is Phase.BEFORE)
    weights = sum(event.nbytes for event in trace.events if event.category == "gradient" and event.nbytes > 0)
    parts = instructions(tapes(model, Workload(batch=BATCH, sequence=SEQUENCE))["block"])
    peak = parts.saved_bytes + parts.backward_bytes
    measured = peak_of(trace, Phase.FORWARD, Phase.BACKWARD).nbytes - before
    assert peak <= measured * 1.1
    assert peak >= (measured - weights) * 0.9


def test_flops_are_those_of_the_matrix_products() -> None:
    tokens, h = BATCH * SEQUENCE, LLAMA.hidden
    block = tapes(LLAMA, Workload(batch=BATCH, sequence=SEQUENCE))["block"]
    products = sum(one.forward.flops for one in block.operations if one.forward.kind == "matmul")
    weights = sum(numel for name, numel in LLAMA.block_parameters(0) if "norm" not in name)
    assert products == 2 * tokens * weights
    scores = sum(one.forward.flops for one in block.operations if one.forward.kind == "attention")
    assert scores == 2 * tokens * SEQUENCE * h
    assert sum(one.backward.flops for one in block.operations if one.forward.kind == "matmul") == 2 * products


def test_weights_of_a_tape_are_the_parameters_of_its_unit() -> None:
    for model in (GPT, LLAMA, dataclasses.replace(LLAMA, experts=4, experts_used=2, has_qk_norm=True)):
        block = tapes(model, Workload(batch=BATCH, sequence=SEQUENCE))["block"]
        biases = sum(n for name, n in model.block_parameters(0) if name.endswith(".bias") and "norm" not in name)
        numel = sum(numel for _, numel in model.block_parameters(0))
        assert sum(one.weight_bytes for one in block.operations) // 2 in (numel, numel - biases)


def test_a_second_gradient_is_added_in_place_once_the_first_is_alone() -> None:
    """x + f(x): the gradient of the sum goes on as it is, and that of f is added to it."""
    tape = Tape(100)
    y = tape.add("f", [INPUT], [100], [INPUT])
    tape.add("sum", [INPUT, y], [100], passes=True)
    made = [one for one in instructions(tape).backward if one.kind == "make"]
    assert [one.what for one in made] == ["f backward"]
    assert instructions(tape).backward_bytes == 100


def test_two_gradients_in_use_make_a_third() -> None:
    tape = Tape(100)
    y = tape.add("f", [INPUT], [100], [INPUT])
    z = tape.add("g", [y], [100], [y])
    tape.add("sum", [y, z], [100], passes=True)
    assert [one.what for one in instructions(tape).backward if one.kind == "make"] == ["g backward", "f backward"]
    w = Tape(100)
    a = w.add("f", [INPUT], [100], [INPUT])
    s = w.add("sum", [a, INPUT], [100], passes=True)
    w.add("sum again", [s, INPUT], [100], passes=True)
    makes = [one.what for one in instructions(w).backward if one.kind == "make"]
    assert makes == ["sum backward", "f backward"]  # the gradient of the last sum is that of both its inputs


def test_everything_that_is_made_is_dropped() -> None:
    for model in (GPT, LLAMA):
        for tape in tapes(
            model, Workload(batch=BATCH, sequence=SEQUENCE, tensor=2, is_sequence_parallel=True)
        ).values():
            for treatment in NAMES:
                parts = instructions(tape, treatment)
                left = most_bytes(parts.forward)[0] + most_bytes(parts.backward)[0]
                # The output is left and its gradient is dropped; the input is dropped and its gradient is left.
                assert left == 0, (tape.operations[0], treatment)


@pytest.mark.parametrize("treatment", NAMES)
def test_what_a_forward_keeps_and_what_is_above_are_its_peak(treatment: str) -> None:
    for model in (GPT, LLAMA):
        for tape in tapes(model, Workload(batch=BATCH, sequence=SEQUENCE)).values():
            parts = instructions(tape, treatment)
            assert (parts.saved_bytes, parts.saved_bytes + parts.forward_bytes) == most_bytes(parts.forward)


@pytest.mark.parametrize("treatment", NAMES)
def test_a_sum_of_instructions_keeps_bytes_and_time(treatment: str) -> None:
    for model in (GPT, LLAMA):
        for tape in tapes(model, Workload(batch=BATCH, sequence=SEQUENCE, tensor=2)).values():
            parts = instructions(tape, treatment)
            summed = coarse(parts, lambda cost: cost.flops + 1)
            assert most_bytes(summed.forward) == most_bytes(parts.forward)
            assert most_bytes(summed.backward)[0] == most_bytes(parts.backward)[0]
            for whole, few in ((parts.forward, summed.forward), (parts.backward, summed.backward)):
                flops = sum(one.cost.flops + 1 for one in whole if one.cost is not None)
                assert sum(one.seconds for one in few) == flops
                assert [one for one in few if one.kind == "exchange"] == [o for o in whole if o.kind == "exchange"]


def test_tensor_ranks_exchange_what_the_paper_counts() -> None:
    """Two all-reduces in a forward, two in a backward, each of one activation; two more where it runs again."""
    message = BATCH * SEQUENCE * GPT.hidden * 2
    block = tapes(GPT, Workload(batch=BATCH, sequence=SEQUENCE, tensor=2))["block"]
    kept, again = instructions(block), instructions(block, "recompute")

    def exchanges(parts: tuple[object, ...]) -> list[Exchange]:
        return [one.exchange for one in parts if one.kind == "exchange"]  # type: ignore[attr-defined]

    assert exchanges(kept.forward) == exchanges(kept.backward) == [Exchange("all-reduce", message)] * 2
    assert exchanges(again.backward) == [Exchange("all-reduce", message)] * 4


def test_scores_are_kept_where_attention_is_not_fused() -> None:
    plain = Workload(batch=BATCH, sequence=SEQUENCE, kernels=Kernels(attention="plain"))
    whole, fused = (tapes(GPT, load)["block"] for load in (plain, Workload(batch=BATCH, sequence=SEQUENCE)))
    scores = BATCH * GPT.heads * SEQUENCE**2
    # Softmax and what dropout left of it in two bytes, its mask in one; without the sums that flash attention keeps.
    more = instructions(whole).saved_bytes - instructions(fused).saved_bytes
    assert more == 5 * scores - 4 * BATCH * SEQUENCE * GPT.heads


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_results_of_experts_are_summed_over_the_tensor_ranks(is_sequence_parallel: bool) -> None:
    load = Workload(batch=BATCH, sequence=SEQUENCE, tensor=4, is_sequence_parallel=is_sequence_parallel)
    dense, mixed = (
        [one.exchange for one in instructions(tapes(SHAPES[name], load)["block"]).forward if one.kind == "exchange"]
        for name in ("llama-3-8b", "mixtral-8x7b")
    )
    assert mixed == dense and len(dense) == (4 if is_sequence_parallel else 2)


def test_costs_of_products_have_their_shape() -> None:
    head = tapes(LLAMA, Workload(batch=BATCH, sequence=SEQUENCE))["head"]
    (product,) = (one for one in head.operations if one.name == "head")
    assert product.forward == Cost(
        2 * BATCH * SEQUENCE * 128 * 512,
        2 * (BATCH * SEQUENCE * 128 + BATCH * SEQUENCE * 512 + 128 * 512),
        "matmul",
        BATCH * SEQUENCE,
        512,
    )
