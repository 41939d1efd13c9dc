"""What a plan is asked with: numbers of other kinds, treatments of activations, copies, micro-batches."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import zeroshard as zs
from zeroshard.describe.rows import row_of
from zeroshard.plan.job import Options
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.machine.profiles import host_device, read_profile, write_profile
from zeroshard.plan.plan_commands import add_commands
from zeroshard.plan.shape.shapes import shape_named
from zeroshard.plan.trace.events import Trace
from zeroshard.plan.trying import candidate_of
from zeroshard.report.plans import read_sources

from .test_events_equal import Skipping

COUNTS = ("world_size", "batch", "seq", "mesh", "tensor", "micro_batches")


def planned(**asked: Any) -> zs.Plan:
    return zs.plan("gpt2", **{"world_size": 8, "seq": 256, **asked})


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, 2.0, "2", [8], float("nan")])
def test_counts_are_integers(name: str, value: object) -> None:
    said = f"{name} must be {'a DeviceMesh or a number of replicas; got' if name == 'mesh' else 'an integer, got'}"
    with pytest.raises(TypeError, match=f"^{said}"):
        planned(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive_and_named_as_they_were_asked(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0\.$"):
        planned(**{name: 0})


def test_integers_of_numpy_are_integers_and_leave_nothing_behind() -> None:
    asked = {"world_size": 6, "batch": 3, "seq": 192, "mesh": 3, "tensor": 2, "micro_batches": 3}
    first = planned(**{name: np.int64(value) for name, value in asked.items()})
    assert first.to_json() == planned(**asked).to_json()
    one: Any = np.int64(1)
    several: Any = np.array([1, 2])
    assert zs.search("gpt2", world_size=2 * one, batches=(one,), tensors=(one,)).best[2] is not None
    assert zs.search("gpt2", world_size=several, batches=(1,), tensors=(1,)).best.keys() == {1, 2}


def test_what_is_no_row_is_named() -> None:
    with pytest.raises(TypeError, match=r"residency must be a zs\.Residency or one of C1"):
        planned(residency=3)
    with pytest.raises(ValueError, match="precision must be one of"):
        planned(precision="")
    with pytest.raises(TypeError, match="sequence_parallel must be True or False"):
        planned(tensor=2, sequence_parallel="yes")
    with pytest.raises(ValueError, match="world_size: a search needs at least one value"):
        zs.search("gpt2", world_size=[])


# -- activations ------------------------------------------------------------------------------------------------------


def test_partitioned_and_offloaded_inputs_leave_the_device() -> None:
    """The paper's P_a and P_a+cpu: a part of each block's input, then nothing of it."""
    # A host that queues kernels slowly would hide the copies.
    device = dataclasses.replace(DEVICES["h100-80"], queue_s=0.0, exchange_s=0.0)
    c1, c2, c4, c5 = (planned(residency=name, tensor=4, batch=16, device=device) for name in ("C1", "C2", "C4", "C5"))
    inputs_bytes = 12 * 16 * 256 * 768 * 2  # of 12 blocks
    # At the peak the last block has its input whole, and all but one of the parts are there.
    assert c1.peak_bytes - c2.peak_bytes == pytest.approx(inputs_bytes * 3 / 4, rel=0.15)
    assert c4.peak_bytes - c5.peak_bytes == pytest.approx(inputs_bytes / 4, rel=0.15)
    assert c2.film.sent_bytes["tensor gather"] == inputs_bytes * 3 / 4
    assert c5.film.sent_bytes["copy to the host"] == c5.film.sent_bytes["copy from the host"] == inputs_bytes / 4
    assert c1.step_s < c2.step_s
    assert c4.step_s < c5.step_s


@pytest.mark.parametrize("name", ["recompute+partition", "recompute+offload", "recompute+partition+offload"])
def test_a_candidate_is_its_plan_where_inputs_are_put_away(name: str) -> None:
    options = Options(
        world_size=8, device=DEVICES["h100-80"], batch=4, sequence=256, row=row_of(3, None, name), tensor=2
    )
    plan = planned(activations=name, batch=4, tensor=2)
    assert candidate_of(shape_named("gpt2"), options).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.002)


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("offload", {}, "stayed on the device"),
        ("recompute-rest+offload", {}, "Products that are kept"),
        ("recompute+partition", {}, "Nothing is partitioned"),
        ("recompute+partition", {"tensor": 2, "sequence_parallel": True}, "Nothing is partitioned"),
        ("recompute+partition", {"tensor": 2}, ""),
        ("recompute+offload", {}, ""),
        ("compress", {}, "Compression depends on values"),
    ],
)
def test_what_is_not_planned_is_said(name: str, asked: dict[str, Any], said: str) -> None:
    notes = planned(activations=name, **asked).notes
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)


def test_segments_and_unknown_units_are_refused() -> None:
    with pytest.raises(ValueError, match="segments of several modules"):
        planned(activations="recompute-sqrt")
    with pytest.raises(ValueError, match=r"'blocks\.\*', which matches no unit of gpt2; units: transformer\.wte"):
        planned(activations={"blocks.*": "recompute"})


# -- traffic and ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 10])
def test_each_micro_batch_sends(count: int) -> None:
    once, often = (planned(stage=3, micro_batches=n).film.sent_bytes for n in (1, count))
    assert often == {kind: count * nbytes for kind, nbytes in once.items()}
    once, often = (planned(stage=2, micro_batches=n).film.sent_bytes for n in (1, count))
    assert often["shard reduce"] == count * once["shard reduce"]
    assert often["shard publish"] == once["shard publish"]


def test_copies_of_the_state_exchange_sums() -> None:
    numel, replicas = 8 * 124_439_808, 4
    sent = planned(mesh=replicas, stage=2, precision="fp32").film.sent_bytes
    shard_bytes = 4 * numel / 8 / (8 / replicas)
    assert sent["replicate all-reduce"] == pytest.approx(2 * shard_bytes * 3 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "mesh", "tensor"), [(1, 1, 1), (2, 1, 2), (4, 2, 1), (8, 2, 4), (8, 2, 2), (8, 1, 1)]
)
def test_classes_of_ranks_are_all_ranks(ranks: int, mesh: int, tensor: int) -> None:
    plan = planned(world_size=ranks, mesh=mesh, tensor=tensor)
    assert sum(one.count for one in plan.ranks) == ranks


# -- modules ----------------------------------------------------------------------------------------------------------


class Silent(nn.Linear):
    """A layer that returns nothing."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        super().forward(input)
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("model", "inputs", "error", "said"),
    [
        (nn.Linear(4, 4), torch.ones(2, 4), TypeError, r"inputs= takes .* \[x\]"),
        (nn.Linear(4, 4), ["a"], TypeError, "must contain a tensor"),
        (nn.Linear(4, 4), [torch.ones(0, 4)], ValueError, "must contain samples"),
        (nn.Linear(4, 4).requires_grad_(False), [torch.ones(2, 4)], TypeError, "No parameter of Linear that requires"),
        (Silent(4, 4), [torch.ones(2, 4)], TypeError, "No parameter of Silent that requires"),
    ],
)
def test_modules_that_cannot_be_planned(model: nn.Module, inputs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        zs.plan(model, world_size=2, inputs=inputs)


def test_tokens_are_integers_and_not_masks() -> None:
    class Masked(nn.Linear):
        def forward(self, mask: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input).masked_fill(mask, 0.0)

    plan = zs.plan(Masked(4, 4), world_size=1, inputs=[torch.zeros(8, 4, dtype=torch.bool), torch.ones(8, 4)])
    assert plan.asked.tokens_per_step == 8


@pytest.mark.parametrize("activations", ["recompute", "recompute+partition", {"blocks.*": "recompute"}])
def test_what_shard_refuses_is_refused(activations: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for ask in (
        lambda: zs.shard(model, activations=activations),
        lambda: zs.plan(model, world_size=2, inputs=[torch.ones(2, 64)], activations=activations),
    ):
        with pytest.raises(ValueError, match="activations="):
            ask()


def test_nothing_is_reduced_of_a_unit_that_is_not_used() -> None:
    """As in the engine, whose trace has no reduction of it."""
    model = Skipping()
    plan = zs.plan(model, world_size=2, stage=2, inputs=[torch.ones(2, 5)])
    assert "blocks.1" not in {tick.unit for tick in plan.film.ticks if tick.kind == "reduce"}
    assert {"blocks.0", "blocks.2"} <= {tick.unit for tick in plan.film.ticks if tick.kind == "reduce"}


def test_fused_recurrent_layers_are_noted() -> None:
    # By the processor, torch runs a recurrent layer as one of these, or as products, which are counted.
    layers = ("aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default")
    events = [SimpleNamespace(operation=name) for name in ("aten.mm.default", *layers)]
    notes = Trace(events, {}).doubts(is_cpu=True)  # type: ignore[arg-type]
    assert [note.partition(":")[0] for note in notes] == ["aten._cudnn_rnn.default", "aten.mkldnn_rnn_layer.default"]
    assert all("operations are not counted" in note for note in notes)
    assert len(zs.plan(nn.LSTM(64, 64), world_size=1, inputs=[torch.ones(2, 3, 64)]).notes) <= 1


class Transformed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(super().forward(x)).abs()


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize(
    ("layer", "device", "precision", "verdict"),
    [
        (nn.Linear, "cpu", "fp32", "fits"), (nn.Linear, "h100-80", "bf16", "fits"),
        (Transformed, "cpu", "fp32", "tight"), (Transformed, "h100-80", "fp32", "fits"),
    ],
)  # fmt: skip
def test_no_plan_fits_without_doubt_whose_kernels_take_memory_that_is_not_counted(
    layer: type[nn.Linear], device: str, precision: str, verdict: str, pipe: int
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), layer(8, 8))
    on = host_device() if device == "cpu" else device
    size = {"world_size": 2, "pipe": pipe, "micro_batches": pipe}
    plan = zs.plan(model, **size, device=on, precision=precision, inputs=[torch.ones(2, 8)])  # type: ignore[arg-type]
    assert plan.verdict == verdict
    assert ["is not counted" in note for note in plan.notes] == [True] * (verdict == "tight")


def test_no_plan_of_convolutions_in_half_precision_on_a_cpu_fits_without_doubt() -> None:
    def ask(device: Any, precision: Any) -> zs.Plan:
        inputs = [torch.ones(2, 3, 8, 8)]
        return zs.plan(nn.Conv2d(3, 4, 3), world_size=1, device=device, precision=precision, inputs=inputs)

    plan = ask(host_device(), "bf16")
    assert (plan.verdict, ["convolution in half precision" in note for note in plan.notes]) == ("tight", [True])
    for other in (ask(host_device(), "fp32"), ask("h100-80", "bf16")):
        assert (other.verdict, other.notes) == ("fits", ())


def test_memory_of_products_in_half_precision_is_noted() -> None:
    plan = zs.plan(nn.Linear(8, 8), world_size=1, device=host_device(), precision="bf16", inputs=[torch.ones(2, 8)])
    assert plan.verdict == "fits"
    assert ["product in half precision" in note for note in plan.notes] == [True]


# -- devices, shapes, files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["memory_bytes", "link_bytes_per_s", "node_ranks", "matmul_part", "hop_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), None, True])
def test_numbers_of_a_device_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^Device\.{name} must be a number above 0"):
        dataclasses.replace(DEVICES["h100-80"], **{name: value})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"node_ranks": 0.5}, "node_ranks must be a whole number, got 0.5"),
        ({"memory_bytes": 1.5}, "memory_bytes must be a whole number, got 1.5"),
        ({"matmul_part": 50}, "matmul_part must be from 1e-06 to 1, got 50"),
        ({"link_part": 1.01}, "link_part must be from 1e-06 to 1, got 1.01"),
        ({"link_bytes_per_s": 1e-300}, "link_bytes_per_s must be at least 1, got 1e-300"),
        ({"peak_flops": {"float32": 1e-300}}, "peak_flops['float32'] must be at least 1, got 1e-300"),
        ({"launch_s": 1e300}, "launch_s must be from 0 to 1e+06, got 1e+300"),
        ({"name": 5}, "name must be a text, got 5"),
    ],
)
def test_a_device_that_cannot_be_is_refused_as_a_profile_too(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^Device.{re.escape(said)}"):
        dataclasses.replace(DEVICES["h100-80"], **changed)
    path = tmp_path / "mine.json"
    write_profile(DEVICES["h100-80"], path)
    stored = json.loads(path.read_text())
    stored["device"] |= changed
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"is not a profile of `zeroshard doctor`: Device.{re.escape(said)}"):
        read_profile(path)


def test_a_whole_number_of_a_device_may_be_a_float() -> None:
    device = dataclasses.replace(DEVICES["h100-80"], memory_bytes=80e9)  # type: ignore[arg-type]
    assert (device.memory_bytes, type(device.memory_bytes)) == (80 * 10**9, int)


def test_a_slow_link_has_a_plan() -> None:
    slow = dataclasses.replace(DEVICES["h100-80"], link_bytes_per_s=1, node_bytes_per_s=1, link_part=1e-6)
    plan = zs.plan("gpt2-xl", world_size=16, device=slow, stage=3)
    assert 0 < plan.tokens_per_s < 1
    assert json.loads(json.dumps(plan.to_json(), allow_nan=False))


def test_a_device_has_a_peak_of_float32() -> None:
    with pytest.raises(ValueError, match="float32 among them"):
        dataclasses.replace(DEVICES["h100-80"], peak_flops={"bfloat16": 1e12})


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 2.5}, "layers must be an integer"),
        ({"inner": -4}, "inner must be at least 0"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"experts": 4}, "experts_used must be at least 1"),
        ({"experts": 4, "experts_used": 5}, "experts_used must be at most experts"),
        ({"experts": 4, "experts_used": 2, "dense_layers": 1}, "dense_inner must be at least 1"),
        ({"block": "bert"}, "block must be 'gpt2' or 'llama'"),
        ({"latent": (1, 2)}, "latent must be 5 widths"),
        ({"dropout": 2.0}, "dropout must be from 0"),
    ],
)
def test_sizes_of_a_shape_are_checked(sizes: dict[str, Any], said: str) -> None:
    asked = {"name": "small", "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 100, **sizes}
    with pytest.raises((ValueError, TypeError), match=rf"^Transformer\.{said}"):
        zs.Transformer(**asked)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 8, "vocab_size": 10,
}  # fmt: skip


@pytest.mark.parametrize("config", [[], None, "x", LLAMA | {"hidden_size": "x"}, LLAMA | {"vocab_size": None}])
def test_a_config_of_other_kinds_is_named(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=tmp_path.name):
        zs.plan(tmp_path, world_size=2)


@pytest.mark.parametrize("change", [{"node_ranks": 0}, {"peak_flops": None}, {"memory_bytes": "x"}, None])
def test_a_damaged_profile_is_named(change: dict[str, Any] | None, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    write_profile(DEVICES["h100-80"], path)
    assert read_profile(path).peak_flops == DEVICES["h100-80"].peak_flops
    stored = json.loads(path.read_text())
    stored["device"] = [] if change is None else stored["device"] | change
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"device\.json is "):
        read_profile(path)


@pytest.mark.parametrize("entry", ["sharding", "memory", "film"])
def test_a_damaged_plan_is_named(entry: str, tmp_path: Path) -> None:
    stored = planned().to_json()
    stored[entry] = {} if entry != "memory" else None
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"plan\.json is damaged"):
        read_sources([tmp_path / "plan.json"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--ranks", "x"], "--ranks takes numbers"),
        (["--ranks", "2,,4", "--search"], "--ranks takes numbers"),
        (["--search", "--batch", "4"], "--search has its own values of --batch"),
        (["--search", "--stage", "0"], "--search has its own values of --stage"),
        (["--reduce", "last"], "schedule='1f1b', reduce='last' are of a pipe"),
        (["--offload", "states=1,to=host,states=0.5"], "offload='states=1,to=host,states=0.5' gives a value twice"),
    ],
)
def test_the_command_says_what_it_does_not_take(asked: list[str], said: str) -> None:
    app, said_so = typer.Typer(), list[str | Exception]()
    add_commands(app, print, said_so.append, lambda *_: None)
    CliRunner().invoke(app, ["gpt2", *asked])
    assert len(said_so) == 1
    assert str(said_so[0]).startswith(said)


@pytest.mark.parametrize("model", ["some.models:make", nn.Linear(2, 2)], ids=str)
def test_a_search_takes_shapes_only(model: Any) -> None:
    with pytest.raises(TypeError, match=r"A search takes shapes only; got (some\.models:make|Linear)\."):
        zs.search(model, world_size=2)


def test_an_error_of_a_trace_is_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch's fake tensors log its traceback, too."""
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        zs.plan(nn.Linear(8, 8), world_size=1, inputs=[torch.ones(2, 5)])
    assert not caplog.records
