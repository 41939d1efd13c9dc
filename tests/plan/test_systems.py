"""Other systems as options of a plan: what they keep, what they take longer for, and the names of devices."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from zeroshard import cli
from zeroshard.plan.job import job_of_shape
from zeroshard.plan.machine.presets import DEVICES, device_named
from zeroshard.plan.margins import MEMORY, margin_of
from zeroshard.plan.named import PRECISIONS, own_units, specs_of
from zeroshard.plan.planning import make_plan
from zeroshard.plan.result import Plan
from zeroshard.plan.shape.shapes import SHAPES, shape_of
from zeroshard.plan.step.chains import chains_of
from zeroshard.plan.step.clock import Clock
from zeroshard.plan.systems import SYSTEMS
from zeroshard.report.plans import read_sources
from zeroshard.table.stages import row_of_stage
from zeroshard.torch_groups import emulated_group

GIB = 2**30


def plan(system: str = "zeroshard", **changed: object) -> Plan:
    asked = {"world_size": 8, "seq": 1024, "device": "a100"} | changed
    return make_plan("gpt2-xl", system=system, **asked)  # type: ignore[arg-type]


def test_each_system_plans_and_says_its_name() -> None:
    for name, system in SYSTEMS.items():
        if name == "nanotron":
            with pytest.raises(ValueError, match=r"kernels of nanotron are written for blocks of Llama; gpt2"):
                make_plan("gpt2", world_size=2, system=name)
            continue
        made = make_plan("gpt2", world_size=2, seq=128, system=name)
        assert made.options["system"] == name
        assert made.asked.row == row_of_stage(3 if system.stage is None else system.stage)


def test_fsdp2_keeps_masters_alone() -> None:
    ours, theirs = plan(), plan("fsdp2")
    # No rank keeps its part in the dtype of the computation beside the part of the masters.
    assert theirs.resident_bytes["parameters"] == 0
    assert theirs.resident_bytes["states"] == ours.resident_bytes["states"]
    assert theirs.film.sent_bytes == ours.film.sent_bytes


def test_systems_keep_masters_unless_they_are_asked_not_to() -> None:
    ours, theirs = plan(stage=0), plan("ddp")
    assert theirs.asked.precision == ours.asked.precision
    assert theirs.resident_bytes["states"] == ours.resident_bytes["states"]


def test_gathers_that_nothing_hides_are_waited_for() -> None:
    slow = dataclasses.replace(DEVICES["a100-80"], link_bytes_per_s=10e9)
    beside, after = (
        make_plan("gpt2-xl", world_size=8, seq=1024, device=slow, system=system)
        for system in (SYSTEMS["deepspeed-3"], dataclasses.replace(SYSTEMS["deepspeed-3"], gathers_beside=True))
    )
    assert beside.film.exposed_s > after.film.exposed_s


def test_matrices_that_are_exchanged_alone_and_again_after_recomputation() -> None:
    system = dataclasses.replace(SYSTEMS["deepspeed-3"], piece_s=1e-5)
    made = make_plan("gpt2-xl", world_size=16, seq=1024, device="a100", system=system, activations="recompute")
    span, device, width = made.asked.spans["shard"], made.asked.device, 1600
    each_s = [16e-5 + device.collective_s("gather", 2 * n * width**2, span) for n in (3, 1, 4, 4)]
    found = [one.stop_s - one.start_s for one in made.film.lanes if one[0] == "gather" and one.what.endswith(".h.7")]
    assert found == pytest.approx([sum(each_s), sum(each_s) + sum(each_s[:-1])])
    reduced = [one for one in made.film.lanes if one.lane == "reduce" and one.what.endswith(".h.7")]
    assert [one.stop_s - one.start_s for one in reduced] == pytest.approx([sum(each_s)])
    # Nothing is computed meanwhile.
    busy = [one for one in made.film.lanes if one.lane == "compute" and not one.is_exposed]
    assert not any(one.start_s < reduced[0].stop_s and one.stop_s > reduced[0].start_s for one in busy)


@pytest.mark.parametrize("ranks", [2, 16, 100])
def test_each_rank_gets_its_part_of_the_gradients_alone(ranks: int) -> None:
    specs = specs_of(own_units(shape := SHAPES["gpt2-xl"]), row_of_stage(2), PRECISIONS["bf16"], ranks)
    parts = [numel for found in chains_of(specs).values() for numel in found]
    sizes = [numel for spec in specs for bucket in spec.reduced for numel in bucket.layout.numels]
    matrices = [numel for numel in sizes if numel > 8 * shape.hidden]
    assert sum(parts) == sum(sizes) == shape.numel()
    assert max(parts) <= -(-sum(matrices) // ranks)
    # One for each gradient that begins no part beside the one before, and one for each border in a gradient.
    assert ranks <= len(parts) <= len(sizes) + 2 * ranks
    assert not chains_of(specs_of(own_units(shape), row_of_stage(1), PRECISIONS["bf16"], ranks))


def test_a_chain_fills_at_the_pace_of_each_hop() -> None:
    device = dataclasses.replace(DEVICES["a100-80"], hop_s=1e-6, node_hop_s=2e-6)
    link = device.link_bytes_per_s * device.link_part
    node = device.node_bytes_per_s * device.node_part
    for nbytes, part_bytes in ((2**20, 2**20), (64 * 2**20, 4 * 2**20)):
        took_s = device.collective_s("chain", nbytes, device.spread(24), 4 * 2**20)
        hops_s = 2 * (2e-6 + part_bytes / node) + 21 * (1e-6 + part_bytes / link)
        assert took_s == pytest.approx(hops_s + nbytes / min(link, node))


def test_chains_are_waited_for_where_ranks_keep_parts_of_gradients() -> None:
    system = dataclasses.replace(SYSTEMS["zeroshard"], chain_bytes=4 * 2**20)
    plans = [make_plan("gpt2-xl", world_size=16, seq=1024, device="a100", stage=n, system=system) for n in (1, 2)]
    beside = [make_plan("gpt2-xl", world_size=16, seq=1024, device="a100", stage=n) for n in (1, 2)]
    assert plans[0].step_s == beside[0].step_s
    (reduced,) = (one for one in plans[1].film.lanes if one.lane == "reduce" and one.what.endswith(".h.7"))
    busy = [one for one in plans[1].film.lanes if one.lane == "compute" and not one.is_exposed]
    assert not any(one.start_s < reduced.stop_s and one.stop_s > reduced.start_s for one in busy)
    assert plans[1].peak_bytes == beside[1].peak_bytes and plans[1].step_s > beside[1].step_s


def test_a_part_that_is_reduced_with_the_next_bucket_is_not_reduced_before() -> None:
    system = dataclasses.replace(SYSTEMS["zeroshard"], chain_bytes=4 * 2**20)
    made = make_plan("llama-3-8b", world_size=4, seq=2048, stage=2, device="a100", system=system)
    device, span = made.asked.device, made.asked.spans["shard"]
    parts = chains_of(job_of_shape(shape_of("llama-3-8b"), made.asked).units)
    assert [] in parts.values()  # the last rank owns the whole head, and the end of the last block
    took_s = [device.collective_s("chain", 4 * numel, span, 4 * 2**20) for some in parts.values() for numel in some]
    reduced_s = sum(one.stop_s - one.start_s for one in made.film.lanes if one.lane == "reduce")
    assert reduced_s == pytest.approx(sum(took_s))


def test_exchanges_of_tensor_ranks_hide_behind_products() -> None:
    device, span = DEVICES["h100-80"], DEVICES["h100-80"].spread(8)
    system = dataclasses.replace(SYSTEMS["megatron-lm"], splits_products=True, exchange_part=0.0, host_part=0.0)
    nbytes = 64 * 2**20
    gather_s = device.collective_s("gather", nbytes, span)
    for took_s in (3 * gather_s, gather_s / 2):
        first, then = (Clock(device, "bfloat16", {"tensor": span}, system=system) for _ in range(2))
        first.exchange("in", "gather", nbytes, "tensor")
        first.compute("product", took_s)
        then.compute("product", took_s)
        then.exchange("out", "reduce", nbytes, "tensor")
        # The part of one rank is there before, or left after, and what is longer than the product is seen.
        for clock in (first, then):
            assert clock.exposed_s == pytest.approx(gather_s - 7 / 8 * min(gather_s, took_s))
            assert clock.now_s == pytest.approx(took_s + clock.exposed_s)


def test_one_exchange_after_the_last_backward_is_exposed() -> None:
    hidden, exposed = (
        make_plan("gpt2-xl", world_size=8, seq=1024, device="a100", stage=1, system=one)
        for one in (SYSTEMS["deepspeed-1"], dataclasses.replace(SYSTEMS["deepspeed-1"], reduces_beside=True))
    )
    assert hidden.film.exposed_s > exposed.film.exposed_s
    assert hidden.peak_bytes >= exposed.peak_bytes


def test_what_a_step_publishes_arrives_beside_the_next_forward() -> None:
    awaited, beside = (
        make_plan(
            "gpt2-xl", world_size=8, seq=1024, device="a100", stage=2,
            system=dataclasses.replace(SYSTEMS["zeroshard"], publishes_beside=is_beside),
        ).film
        for is_beside in (False, True)
    )  # fmt: skip
    update = next(phase for phase in awaited.phases if phase.name == "update")
    gathers_s = [
        sum(one.stop_s - one.start_s for one in film.lanes if one.lane == "gather") for film in (awaited, beside)
    ]
    assert gathers_s[0] == pytest.approx(gathers_s[1])
    # The first units arrive before they are used, or the forward waits for these only.
    assert awaited.step_s - beside.step_s > 0.8 * gathers_s[0]
    assert update.stop_s - update.start_s > gathers_s[0]
    assert awaited.sent_bytes == beside.sent_bytes
    of = [[(one.kind, one.unit) for one in film.ticks if one.kind == "publish"] for film in (awaited, beside)]
    assert of[0] == of[1]
    # Each unit is waited for once, before its first use, and in the update by the other program.
    waits = [[(one.phase, one.unit) for one in film.ticks if one.kind == "wait"] for film in (awaited, beside)]
    assert [unit for phase, unit in waits[1] if phase == "forward"] == [
        unit for phase, unit in waits[0] if phase == "step"
    ]
    assert not [unit for phase, unit in waits[1] if phase == "step"]


def test_a_host_that_queues_slowly_bounds_a_small_step() -> None:
    eager, compiled = (
        make_plan(
            "gpt2", world_size=1, seq=128, device="h100", system=dataclasses.replace(SYSTEMS["ddp"], host_part=part)
        )
        for part in (2.0, 0.0)
    )
    assert eager.step_s > 1.5 * compiled.step_s


def test_offload_of_a_system_is_that_of_a_plan() -> None:
    made = plan("deepspeed-2-offload")
    assert made.film.elsewhere_bytes["host"] > 0
    assert made.host_bytes > plan("deepspeed-2").host_bytes


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ValueError, match=r"system must be one of zeroshard, fsdp2, .*; got 'fsdp3'\."):
        plan("fsdp3")


def test_systems_stand_beside_each_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt2", "--ranks", "4", "--device", "a100", "--system", "fsdp2, zeroshard, deepspeed-2"]
    monkeypatch.setattr(sys, "argv", ["zeroshard", *asked])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["system", "zeroshard", "fsdp2", "deepspeed-2"]


def test_a_program_beside_zeroshard_has_its_own_stage_and_offload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["--stage", "1", "--offload", "host", "--system", "fsdp2,deepspeed-2-offload", "--json"]
    monkeypatch.setattr(sys, "argv", ["zeroshard", "plan", "gpt2", "--ranks", "4", *asked])
    with pytest.raises(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    rows = [one["options"]["row"] for one in json.loads(text)]
    assert rows[1] == "stage 3"
    assert "host" in rows[0]
    assert rows[2] == plan("deepspeed-2-offload").options["row"] != rows[0]
    (tmp_path / "plans.json").write_text(text)
    names = [one["name"] for one in read_sources([tmp_path / "plans.json"])["sources"]]
    assert [name.partition(" on ")[0] for name in names] == ["gpt2", "gpt2 with fsdp2", "gpt2 with deepspeed-2-offload"]


def test_a_program_that_does_not_fit_can_be_printed() -> None:
    """The kernels of nanotron are planned without recomputation, so its plan does not suggest that."""
    made = make_plan("llama-3-8b", world_size=8, system="nanotron", device="rtx4090", stage=1)
    assert made.verdict == "no"
    assert "changes that save memory" in str(made)
    assert not [one for one in made.changes if "recompute" in one.what]


def test_a_device_without_bfloat16_is_said_to_be_guessed_in_it() -> None:
    bf16, usual, fp32 = (
        make_plan("gpt2", world_size=1, seq=128, device="v100-32", precision=one).notes
        for one in ("bf16", None, "fp32")
    )
    assert bf16 == ("v100-32 has no units for bfloat16, so the time of a step is a guess. Use fp16.",)
    assert usual == fp32 == ()


# -- devices and margins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        *(("h100", "h100-80"), ("H100-80GB-SXM", "h100-80"), ("h100-80-sxm", "h100-80"), ("NVIDIA A100", "a100-80")),
        *(("A100-40GB", "a100-40"), ("4090", "rtx4090"), ("GeForce RTX 4090", "rtx4090"), ("gb200", "gb200")),
    ],
)
def test_devices_have_the_names_that_people_use(asked: str, name: str) -> None:
    assert device_named(asked) is DEVICES[name]


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'h1000'\. Nearest: h100, h100-80"):
        device_named("h1000")


def test_a_margin_is_that_of_runs_of_the_kind() -> None:
    made = plan(stage=1, tensor=5, world_size=10)
    assert margin_of(made.asked) == MEMORY["tensor, states sharded"]
    assert f"of {margin_of(made.asked).runs} published runs of this kind (tensor, states sharded)" in str(made)
    assert made.to_json()["memory"]["error"]["runs"] == MEMORY["tensor, states sharded"].runs


def test_a_kind_without_runs_takes_the_widest_margin_and_says_so() -> None:
    made = plan(stage=3, pipe=2, micro_batches=2)
    assert "pipe, parameters sharded" not in MEMORY
    assert margin_of(made.asked).nine_tenths == max(one.nine_tenths for one in MEMORY.values())
    assert "not proven on runs of this kind (pipe, parameters sharded)" in str(made)


def test_a_mesh_splits_tokens_as_the_number_of_tensor_ranks_does() -> None:
    with emulated_group(16):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("shard", "tensor"))
        named = make_plan("llama-3-8b", world_size=16, mesh=mesh, system="megatron-lm", seq=2048)
    counted = make_plan("llama-3-8b", world_size=16, tensor=8, system="megatron-lm", seq=2048)
    assert named.asked == counted.asked
    assert counted.asked.is_sequence_parallel
