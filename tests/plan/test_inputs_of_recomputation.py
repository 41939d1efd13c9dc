"""What is kept of a recomputed module's input: the whole, a tensor rank's part (P_a), or nothing here (P_a+cpu)."""

from dataclasses import replace

import pytest

from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.named import OPTIMIZERS, PRECISIONS, specs_of, updates_of
from zeroshard.plan.shape.shapes import gpt
from zeroshard.plan.shape.tape import GIVEN, Instruction, Parts, instructions
from zeroshard.plan.shape.transformer import Kernels, Workload, tapes
from zeroshard.plan.step.film import Film
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.script import Call
from zeroshard.plan.step.simulate import make_film
from zeroshard.table.stages import STAGES
from zeroshard.table.wires import Native

MODEL = gpt("small", 2, 256, 4, vocabulary=512, sequence=64)
RANKS = 4
LOAD = Workload(batch=2, sequence=64, tensor=RANKS, kernels=Kernels(attention="plain"))
INPUT_BYTES = 2 * 64 * 256 * 2


def block(parts: int = 1, *, is_offloaded: bool = False, load: Workload = LOAD) -> Parts:
    return instructions(tapes(MODEL, load)["block"], "recompute", input_parts=parts, is_input_offloaded=is_offloaded)


def exchanged(run: tuple[Instruction, ...], kind: str) -> list[int]:
    return [one.exchange.nbytes for one in run if one.exchange is not None and one.exchange.kind == kind]


def test_a_rank_keeps_its_part_of_the_input() -> None:
    # What a forward leaves is its output, in place of its input, and what it keeps.
    assert block().saved_bytes == INPUT_BYTES
    assert block(RANKS).saved_bytes == INPUT_BYTES // RANKS
    assert block(RANKS, is_offloaded=True).saved_bytes == 0
    assert block(1, is_offloaded=True).saved_bytes == 0


def test_the_input_is_gathered_once_before_recomputation() -> None:
    plain, split = block(), block(RANKS)
    assert exchanged(split.backward, "gather") == [INPUT_BYTES]
    assert exchanged(plain.backward, "gather") == exchanged(split.forward, "gather") == []
    assert [len(exchanged(half, "all-reduce")) for half in (split.forward, split.backward)] == [2, 4]
    first_kernel = next(place for place, one in enumerate(split.backward) if one.kind == "run")
    assert any(one.exchange is not None for one in split.backward[:first_kernel])


def test_parts_on_the_host_are_copied_there_and_back() -> None:
    moved = block(RANKS, is_offloaded=True)
    copies = [[one.nbytes for one in half if one.kind == "copy"] for half in (moved.forward, moved.backward)]
    assert copies == [[INPUT_BYTES // RANKS]] * 2


@pytest.mark.parametrize(("parts", "is_offloaded"), [(1, False), (RANKS, False), (RANKS, True), (1, True)])
def test_a_step_gives_back_all_that_it_takes(parts: int, is_offloaded: bool) -> None:
    run = block(parts, is_offloaded=is_offloaded)
    live, left = {0: INPUT_BYTES}, list[dict[int, int]]()
    for half in (run.forward, run.backward):
        for one in half:
            if one.kind == "make":
                assert one.tensor not in live
                live[one.tensor] = one.nbytes
            elif one.kind == "drop":
                assert live.pop(one.tensor) == one.nbytes
        left.append(dict(live))
        # The output is the next module's, whose gradient the backward is given.
        live = {number: nbytes for number, nbytes in live.items() if number != run.output} | {GIVEN: INPUT_BYTES}
    assert left[0][run.output] == INPUT_BYTES
    (handed,) = [one.tensor for one in run.backward if one.kind == "hand"]
    assert left[1] == {handed: INPUT_BYTES}


def film(parts: int, *, is_offloaded: bool = False, keeps_gradients: bool = False) -> Film:
    # A host that queues kernels slowly would hide the copies.
    device = replace(DEVICES["v100-32"], node_ranks=16, queue_s=0.0, exchange_s=0.0)
    units = specs_of({"": (("weight", 10_000),)}, STAGES[1], PRECISIONS["paper"], 2)
    calls = [Call(0, instructions(tapes(MODEL, LOAD)["embedding"]))]
    calls += [Call(0, block(parts, is_offloaded=is_offloaded))] * 2
    calls.append(Call(0, instructions(tapes(MODEL, LOAD)["head"])))
    spans = {"shard": device.spread(2, RANKS), "tensor": device.spread(RANKS)}
    return make_film(
        Job(units, calls, [updates_of(units, OPTIMIZERS["adam"])], Native(), device, "float16", spans,
            keeps_gradients=keeps_gradients)
    )  # fmt: skip


def test_copies_to_the_host_take_time_and_are_counted() -> None:
    here, there = film(RANKS), film(RANKS, is_offloaded=True)
    assert there.sent_bytes["copy to the host"] == there.sent_bytes["copy from the host"] == 2 * INPUT_BYTES // RANKS
    assert there.step_s > here.step_s
    assert there.sent_bytes["tensor gather"] == here.sent_bytes["tensor gather"] > 0


def test_gradients_that_stay_are_there_when_a_step_begins() -> None:
    gone, kept = film(RANKS), film(RANKS, keeps_gradients=True)
    assert gone.resident_bytes["gradients"] == 0
    assert kept.resident_bytes["gradients"] == 20_000
    assert sum(one.nbytes for one in kept.events if one.column == "gradients") == 0


# -- kernels of 2019 --------------------------------------------------------------------------------------------------


def test_stepwise_attention_keeps_what_plain_attention_keeps() -> None:
    plain, stepwise = (
        instructions(tapes(MODEL, replace(LOAD, kernels=kernels))["block"])
        for kernels in (Kernels(attention="plain"), Kernels(attention="stepwise"))
    )
    assert stepwise.saved_bytes == plain.saved_bytes
    moved = [sum(one.cost.moved_bytes for one in run.forward if one.cost) for run in (plain, stepwise)]
    scores_bytes, width_bytes = 2 * 64 * 64 * 2, INPUT_BYTES // RANKS
    # Scale, mask and shift read and write the scores, and three copies are made; products read one part, not all three.
    assert moved[1] - moved[0] == 6 * scores_bytes + (6 - 1 - 2) * width_bytes


def test_biases_apart_are_kernels_and_keep_nothing() -> None:
    joined = instructions(tapes(MODEL, LOAD)["block"])
    apart = instructions(tapes(MODEL, replace(LOAD, kernels=Kernels(attention="plain", fused_bias=False)))["block"])
    assert apart.saved_bytes == joined.saved_bytes
    kernels = [[one.what for one in run.forward if one.kind == "run"] for run in (joined, apart)]
    assert [names.count("bias") for names in kernels] == [0, 4]
