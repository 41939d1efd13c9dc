"""Plans over a pipe: memory and idle time by place, searches, refusals. Runs are compared in `test_own_pipes.py`."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.parallel.cut import cut_model
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.planning import plan_shape
from zeroshard.plan.shape.shapes import shape_of
from zeroshard.plan.trying import candidate_of
from zeroshard.table.pipeline import RECEIVES, Kind, play, schedule_of

SHAPE = zs.Transformer(name="even", layers=8, hidden=256, heads=8, inner=1024, vocabulary=64, sequence=256)
LARGE = dataclasses.replace(SHAPE, layers=16, hidden=2048, inner=8192, heads=16, sequence=2048)
SHORT: dict[str, Any] = {"device": "a100-40", "seq": 256, "precision": "bf16"}


@pytest.mark.parametrize(
    ("schedule", "chunks", "formula"),
    [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved", 2, 3 / 19), ("naive", 1, 3 / 4)],
)
def test_places_of_equal_layers_wait_as_the_papers_say(schedule: str, chunks: int, formula: float) -> None:
    plan = zs.plan(
        LARGE, world_size=4, pipe=4, schedule=schedule, micro_batches=8, stage=0, batch=2, activations="recompute"
    )
    assert plan.asked.chunks == chunks
    # Embedding and head take a little time beside the layers, and messages travel.
    assert plan.idle == pytest.approx([formula] * 4, abs=0.015)


def kept_bytes(plan: zs.Plan) -> list[int]:
    """Return what each place has beyond what it has between steps."""
    return [one.peak_bytes - sum(one.resident_bytes.values()) for one in plan.ranks]


def test_1f1b_needs_no_more_memory_for_more_micro_batches() -> None:
    four, sixteen = (
        zs.plan(SHAPE, world_size=2, pipe=2, micro_batches=count, stage=0, batch=2, **SHORT) for count in (4, 16)
    )
    border_bytes = 2 * 256 * 256 * 2
    for few, many in zip(kept_bytes(four), kept_bytes(sixteen), strict=True):
        assert 0 <= many - few <= border_bytes + 12 * 2 * 2 * 256 * 8  # an input, and the tokens of the batch


def test_gpipe_has_what_each_recomputed_micro_batch_leaves_and_the_insides_of_one() -> None:
    options: dict[str, Any] = {"world_size": 2, "pipe": 2, "schedule": "gpipe", "stage": 0, "batch": 2, **SHORT}
    peaks = [
        zs.plan(SHAPE, micro_batches=count, activations="recompute", **options).ranks[0].peak_bytes
        for count in (4, 8, 12)
    ]
    layer_bytes = 2 * 256 * 256 * 2
    inside = zs.plan(SHAPE, micro_batches=4, **options).ranks[0].peak_bytes
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1]
    # The input of each of four layers, the output of the last one, the gradient that is sent, tokens and targets.
    assert (peaks[1] - peaks[0]) / 4 <= 7 * layer_bytes + 2 * 2 * 256 * 8
    assert inside > peaks[0]


def test_places_hold_their_layers_and_a_tied_weight_at_both_ends() -> None:
    plan = zs.plan("gpt2", world_size=4, pipe=4, micro_batches=4, stage=0, **SHORT)
    whole = zs.plan("gpt2", world_size=1, stage=0, **SHORT)
    held = [one.resident_bytes["parameters"] for one in plan.ranks]
    assert sum(held) - whole.resident_bytes["parameters"] == 50257 * 768 * 2
    assert [one.count for one in plan.ranks] == [1] * 4
    assert plan.reserved_bytes == max(one.reserved_bytes for one in plan.ranks) == plan.ranks[plan.shown].reserved_bytes


def test_reducing_with_each_micro_batch_saves_memory_and_sends_more() -> None:
    options: dict[str, Any] = {"world_size": 8, "pipe": 2, "micro_batches": 8, "stage": 3, **SHORT}
    last, each = (zs.plan("gpt2", reduce=reduce, **options) for reduce in ("last", "each"))
    assert each.peak_bytes < last.peak_bytes
    # Each is the film of its fullest place, which gathers in every micro-batch what it reduces.
    assert each.film.sent_bytes["shard reduce"] == each.film.sent_bytes["shard gather"]
    assert last.film.sent_bytes["shard reduce"] * 8 == last.film.sent_bytes["shard gather"]
    # Hidden states of all micro-batches, and the shard of the gradient of the tied weight.
    sent = 8 * 256 * 768 * 2 + 50257 * 768 * 4 // 4
    assert each.film.sent_bytes["pipe send"] == last.film.sent_bytes["pipe send"] == sent


def test_gradients_are_reduced_once_where_whole_ones_fit() -> None:
    """Of a device between the two peaks."""
    options: dict[str, Any] = {"world_size": 8, "pipe": 2, "micro_batches": 8, "stage": 2, **SHORT}
    last, each = (zs.plan("gpt2-xl", reduce=reduce, **options) for reduce in ("last", "each"))
    assert each.total_bytes < last.total_bytes
    assert zs.plan("gpt2-xl", **options).options == last.options
    small = dataclasses.replace(DEVICES["a100-40"], memory_bytes=(each.total_bytes + last.total_bytes) // 2)
    chosen = zs.plan("gpt2-xl", **options | {"device": small})
    assert chosen.options["schedule"] == "1f1b, chunks=1, reduce=each"
    assert chosen.total_bytes == each.total_bytes
    assert zs.plan("gpt2-xl", reduce="last", **options | {"device": small}).verdict == "no"


def test_a_module_is_planned_as_a_shape_of_equal_layers_is_cut() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(4)))
    options: dict[str, Any] = {"world_size": 2, "pipe": 2, "inputs": [torch.zeros(8, 64)], "stage": 0}
    plan = zs.plan(model, micro_batches=4, precision="fp32", **options)
    assert [one.resident_bytes["parameters"] for one in plan.ranks] == [2 * 64 * 64 * 4 + 2 * 4] * 2  # and stand-ins
    cut = zs.plan(model, micro_batches=4, precision="fp32", cut=["3"], **options)
    assert [one.resident_bytes["parameters"] for one in cut.ranks] == [3 * 64 * 64 * 4 + 4, 64 * 64 * 4 + 3 * 4]
    assert [name for name, _ in model.named_parameters()] == [f"{number}.0.weight" for number in range(4)]


def test_a_search_over_places_finds_what_trying_each_finds() -> None:
    sizes: dict[str, Any] = {"batches": (1,), "stages": (1,), "tensors": (1,), "activations": ("recompute",)}
    found = zs.search("gpt2-xl", world_size=4, device="a100-40", seq=1024, offload=(), prune=False, **sizes)
    tried = [
        zs.plan("gpt2-xl", world_size=4, batch=1, stage=1, activations="recompute", pipe=pipe, seq=1024,
                device="a100-40", micro_batches=4 * pipe if pipe > 1 else 1)
        for pipe in (1, 2, 4)
    ]  # fmt: skip
    assert sorted({one.options.pipe for one in found.candidates}) == [1, 2, 4]
    assert found.best[4] is not None
    assert found.best[4].tokens_per_s == max(one.tokens_per_s for one in tried if one.verdict == "fits")
    speeds = {one.options.pipe: one.tokens_per_s for one in found.candidates}
    assert [speeds[pipe] for pipe in (1, 2, 4)] == pytest.approx([one.tokens_per_s for one in tried])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_candidate_is_the_plan_of_its_options(schedule: str) -> None:
    shape = shape_of("gpt2-medium")
    plan = zs.plan(shape, world_size=8, pipe=4, schedule=schedule, micro_batches=16, stage=2, **SHORT)
    one = candidate_of(shape, plan.asked)
    assert one.step_s == pytest.approx(plan_shape(shape, plan.asked).step_s)
    assert plan.peak_bytes * 0.9 <= one.peak_bytes <= plan.peak_bytes


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_places_wait_for_first_forwards_that_wait_for_published_parameters(schedule: str, micro_batches: int) -> None:
    """Over a slow link, parameters of the last update arrive after the first forward could run."""
    options: dict[str, Any] = {"world_size": 6, "pipe": 2, "stage": 1, "reduce": "last", "seq": 1024}
    plan = zs.plan("gpt2", device="rtx4090", schedule=schedule, micro_batches=micro_batches, **options)
    assert candidate_of(shape_of("gpt2"), plan.asked).step_s == pytest.approx(plan.step_s, rel=1e-6)
    # No place is busy after the last backward of all.
    assert min(plan.idle) > 0
    more = zs.plan("gpt2", device="rtx4090", schedule=schedule, micro_batches=2 * micro_batches, **options)
    most = zs.plan("gpt2", device="rtx4090", schedule=schedule, micro_batches=3 * micro_batches, **options)
    # The wait is once a step.
    assert most.step_s - more.step_s == pytest.approx(more.step_s - plan.step_s, rel=0.01)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pipe": 4, "micro_batches": 2}, "micro_batches=2 is below the 4 places"),
        ({"pipe": 2, "micro_batches": 2, "schedule": "dualpipe"}, "schedule='dualpipe' is not one of"),
        ({"pipe": 2, "micro_batches": 2, "schedule": "forward"}, "has no backwards"),
        ({"pipe": 2, "micro_batches": 2, "chunks": 2}, "'1f1b' has one chunk"),
        ({"pipe": 2, "micro_batches": 2, "reduce": "never"}, "reduce must be 'auto', 'last' or 'each'"),
        ({"pipe": 2, "micro_batches": 2, "no_sync": True}, "reduce='last' or reduce='each'"),
        ({"pipe": 2, "micro_batches": 2, "parameters": "until-backward"}, "are not planned: plan 'sharded'"),
        ({"recompute": True}, "recompute=True is of the chunks of a pipe; without one use activations='recompute'"),
        ({"pipe": 3, "micro_batches": 3}, "pipe=3 places must divide the 8"),
        ({"pipe": 8, "micro_batches": 16, "schedule": "interleaved"}, "12 blocks, too few for a pipe of 16 chunks"),
    ],
)
def test_what_cannot_run_or_be_planned_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zs.plan("gpt2", world_size=8, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_chunks_that_run_again_keep_less_and_fill_waits(schedule: str) -> None:
    options: dict[str, Any] = {"world_size": 4, "pipe": 4, "micro_batches": 16, "schedule": schedule, "stage": 0}
    kept, again = (zs.plan(LARGE, recompute=recompute, batch=2, **options) for recompute in (False, True))
    assert again.peak_bytes < kept.peak_bytes
    training = schedule_of(schedule, 4, 16, recomputed=range(4))
    spans = play(training, {Kind.FORWARD: [1.0] * 4, Kind.RECOMPUTE: [1.0] * 4, Kind.BACKWARD: [2.0] * 4})
    end_s = max(one[-1][-1] for one in spans)
    expected = [1 - sum(stop_s - start_s for action, start_s, stop_s in one if action.kind not in RECEIVES) / end_s
                for one in spans]  # fmt: skip
    assert again.idle == pytest.approx(expected, abs=0.015)
    forwards = [phase.name for phase in again.film.phases].count("forward")
    assert forwards == 16 + sum(one.kind is Kind.RECOMPUTE for one in training.actions[again.shown])


def test_lanes_have_each_place_with_its_idle_time() -> None:
    data = zs.plan(SHAPE, world_size=2, pipe=2, micro_batches=4, stage=0, **SHORT).to_json()
    lanes = {one["name"]: one["spans"] for one in data["film"]["lanes"]}
    for place, idle in enumerate(data["time"]["idle"]):
        spans = lanes[f"place {place}, idle {idle:.0%}"]
        labels = [label for label in spans["label"] if label != "idle"]
        order = [kind.kind.name.lower() for kind in schedule_of("1f1b", 2, 4).actions[place]]
        assert labels == [name for name in order if name in ("forward", "backward")]
        waits = [
            stop - start
            for start, stop, label in zip(spans["start_s"], spans["stop_s"], spans["label"], strict=True)
            if label == "idle"
        ]
        assert sum(waits) / spans["stop_s"][-1] == pytest.approx(idle)


def test_a_plan_with_a_single_place_is_the_plan_without_a_pipe() -> None:
    one, other = (
        zs.plan("gpt2", world_size=4, stage=2, micro_batches=2, **SHORT, **more) for more in ({}, {"pipe": 1})
    )
    assert one == other


class Wide(nn.Module):
    """Blocks between an embedding, which takes no time, and a head, which takes much."""

    def __init__(self, words: int = 20_000, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for _ in range(12)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_a_cut_by_time_is_as_fast_as_the_fastest_of_all_cuts() -> None:
    with torch.device("meta"):
        model = Wide()
    options: dict[str, Any] = {
        "world_size": 2, "pipe": 2, "micro_batches": 4, "stage": 0, "device": "a100-40", "precision": "bf16",
        "inputs": [torch.zeros(8, 512, dtype=torch.long, device="meta")],
    }  # fmt: skip
    by_time, by_bytes = zs.plan(model, cut="time", **options), zs.plan(model, **options)
    all_s = {name: zs.plan(model, cut=[name], **options).step_s for name in (f"blocks.{n}" for n in range(4, 12))}
    fastest_s = min(all_s.values())
    assert by_time.step_s <= 1.02 * fastest_s < 0.98 * by_bytes.step_s
    assert by_time.idle[0] < by_bytes.idle[0]
    # The names are those that zs.pipeline takes.
    assert cut_model(model, by_time.cut, 2).starts == by_time.cut
    assert by_bytes.cut == cut_model(model, None, 2).starts


def test_a_shape_is_cut_by_time_where_that_fits() -> None:
    options: dict[str, Any] = {"world_size": 4, "pipe": 4, "micro_batches": 8, "stage": 0, **SHORT}
    wide = dataclasses.replace(LARGE, layers=12, vocabulary=100_000, is_tied=False)
    by_time, by_bytes = (zs.plan(wide, cut=cut, **options) for cut in ("time", None))
    assert by_time.step_s < by_bytes.step_s
    assert by_time.total_bytes > by_bytes.total_bytes
    room = int(1.12 * (by_bytes.total_bytes + by_time.total_bytes) / 2)  # with the margin of plans of this kind
    tight = dataclasses.replace(DEVICES["a100-40"], name="small", memory_bytes=room)
    small = zs.plan(wide, cut="time", **options | {"device": tight})
    assert small.verdict == "fits"
    assert small.total_bytes < by_time.total_bytes


def test_a_cut_that_is_no_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="cut= takes names of modules, or 'time', of a pipe; got 'bytes'"):
        zs.plan(SHAPE, world_size=2, pipe=2, micro_batches=2, cut="bytes", **SHORT)
    with pytest.raises(ValueError, match="got 'time' and pipe=1"):
        zs.plan(SHAPE, world_size=2, cut="time", **SHORT)
    with pytest.raises(TypeError, match="cut: of modules only"):
        zs.plan(SHAPE, world_size=2, pipe=2, micro_batches=2, cut=["model.layers.4"], **SHORT)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_peaks_do_not_grow_with_micro_batches_beyond_their_inputs(activations: str) -> None:
    def peaks(micro_batches: int) -> list[int]:
        options = {"world_size": 2, "device": "h100-80", "seq": 512, "stage": 1, "pipe": 2, "reduce": "last"}
        plan = zs.plan("gpt2", **options, micro_batches=micro_batches, activations=activations)  # type: ignore[arg-type]
        return [one.peak_bytes for one in plan.ranks]

    inputs = (16 - 4) * 512 * 2 * 8
    for few, many in zip(peaks(4), peaks(16), strict=True):
        assert few <= many <= few + 2 * inputs
