"""The planner against published runs: a sample of them, drawn by `tools/sample_published.py`, and the sums by hand."""

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroshard.evidence import scorecard as cards
from zeroshard.evidence.rows import run_of
from zeroshard.evidence.scorecard import Label, Record, Scorecard, render, scorecard
from zeroshard.evidence.sources import Source, read_sources
from zeroshard.plan import pipes, planning, trying
from zeroshard.plan.places import layers_of
from zeroshard.plan.planning import make_plan
from zeroshard.plan.result import Plan
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.systems import SYSTEMS

SAMPLE = Path(__file__).parent / "data" / "published_sample.csv"
OWN = {
    "source": "my blog", "model": "llama-1.34B", "layers": "16", "hidden": "2048", "heads": "32", "vocab": "131072",
    "seq": "4096", "params_b": "1.34", "gpu": "H100-80GB", "n_gpus": "8", "dp": "8", "tp": "1", "pp": "1",
    "zero_stage": "3", "micro_batch": "2", "global_batch": "32", "recompute": "none",
    "measured_metric": "gpu_mem_peak_rank0", "value": "50.2", "unit": "GiB",
}  # fmt: skip
"""A row of a source that no table has."""
SMALL = Transformer(
    name="small", layers=2, hidden=1024, inner=4096, heads=16, vocabulary=32768, sequence=2048, is_tied=True
)


def few(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the runs that crashed, the memory of data or tensor parallelism alone, and a third of the others."""
    apart = [
        one
        for one in rows
        if (one["measured_metric"] == "status" and one["value"] != "ok")
        or (one["measured_metric"] == "gpu_mem_peak_rank0" and one["pp"] == "1")
    ]
    return apart + [one for one in rows if one not in apart][::3]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Scorecard:
    rows = few(cards._read(SAMPLE))
    path = tmp_path_factory.mktemp("published") / "few.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return scorecard(path)


# -- the sample -------------------------------------------------------------------------------------------------------


def test_memory_of_data_parallel_runs(card: Scorecard) -> None:
    sums = card.groups[cards.MEMORY_DATA]
    assert sums.count >= 8
    assert sums.median <= 0.03
    assert sums.within_10 >= 0.9


def test_memory_of_tensor_parallel_runs(card: Scorecard) -> None:
    sums = card.groups[cards.MEMORY_TENSOR]
    assert sums.count >= 8
    assert sums.median <= 0.05
    assert sums.within_15 >= 0.9  # of the whole file fewer: some ran with a slow host, see nanotron_memory.py


def test_no_for_few_runs_that_ran(card: Scorecard) -> None:
    assert sum(one.ran for one in card.labels) >= 20
    assert card.wrong_no <= 0.05


def test_most_crashes_are_told(card: Scorecard) -> None:
    crashed = [one for one in card.labels if not one.ran]
    assert len(crashed) >= 15
    # Of the whole file 86%: a run can also crash for another reason than memory.
    assert sum(not one.fits for one in crashed) / len(crashed) >= 0.75


def test_time(card: Scorecard) -> None:
    sums = card.groups[cards.TIME]
    assert sums.count >= 20
    assert sums.median <= 0.12  # of the whole file 8.5%


def test_each_row_is_a_record_a_label_or_a_reason(card: Scorecard) -> None:
    rows = few(cards._read(SAMPLE))
    told = sum(not one.ran for one in card.labels)
    assert len(card.records) + told + sum(card.skipped.values()) == len(rows)


def test_the_text_and_the_json_say_the_same(card: Scorecard) -> None:
    content = json.loads(card.to_json())
    assert len(content["records"]) == len(card.records)
    median = content["groups"][cards.MEMORY_DATA]["median"]
    line = next(one for one in render(card).splitlines() if one.startswith(cards.MEMORY_DATA))
    assert f"{median:.1%}" in line


def test_no_torch_is_needed(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:3]))
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from zeroshard.evidence.scorecard import scorecard, render\n"
        f"assert render(scorecard({str(tmp_path / 'one.csv')!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- sums by hand -----------------------------------------------------------------------------------------------------


def record(predicted: float, measured: float, *, group: str = cards.TIME) -> Record:
    return Record("a source", group, "a run", "iteration_time", "ms", predicted, measured, is_held_out=False)


def test_sums_are_of_absolute_errors() -> None:
    card = Scorecard([record(90, 100), record(112, 100), record(100, 100), record(200, 100)], [], {}, {})
    sums = card.groups[cards.TIME]
    assert (sums.count, round(sums.median, 6), round(sums.p90, 6)) == (4, 0.11, 1.0)
    assert (sums.within_10, sums.within_15) == (0.5, 0.75)


def test_accuracy_is_the_mean_of_both_classes() -> None:
    labels = [Label("", "", ran=True, fits=True)] * 9 + [Label("", "", ran=True, fits=False)]
    labels += [Label("", "", ran=False, fits=False), Label("", "", ran=False, fits=True)]
    card = Scorecard([], labels, {}, {})
    assert card.balanced_accuracy == pytest.approx((0.9 + 0.5) / 2)
    assert card.wrong_no == pytest.approx(0.1)
    assert len(card.misses) == 2


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.csv is not a readable file"):
        scorecard(tmp_path / "nothing.csv")
    (tmp_path / "bytes.csv").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match=r"bytes\.csv is not a readable file"):
        scorecard(tmp_path / "bytes.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv has no column source, model, .*, unit; cells may be empty"):
        scorecard(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text(",".join(OWN) + "\n")
    with pytest.raises(ValueError, match=r"empty\.csv has no rows"):
        scorecard(tmp_path / "empty.csv")


def test_a_file_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """It begins with a mark of its encoding, has spaces around names, and rows with more or fewer cells."""
    cells = ",".join(OWN.values())
    short = ",".join([*OWN.values()][:-2])
    (tmp_path / "sheet.csv").write_text(
        f"{', '.join(OWN)}\n{cells},,\n{short}\n{cells.replace('4096', '4,096')}\n", encoding="utf-8-sig"
    )
    found = scorecard(tmp_path / "sheet.csv")
    assert [one.source for one in found.records] == ["my blog"]
    assert found.skipped == {
        "value '' is not a number such as 4096, 4,096 or 0.5": 1,
        "n_gpus 'H100-80GB' is not a number such as 4096, 4,096 or 0.5": 1,
    }


# -- the film ---------------------------------------------------------------------------------------------------------


def test_each_number_is_that_of_a_film(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant another film: each row that is planned must change with it, so none has a model of its own."""
    rows = [one for one in cards._read(SAMPLE) if one["measured_metric"] != "status"]
    by_kind = {(one["source"][:20], one["measured_metric"], one["pp"] == "1", one["tp"] == "1"): one for one in rows}
    kept = {"row": 0}
    plans = [one for one in by_kind.values() if isinstance(cards._planned(one), tuple)]
    assert len(plans) >= 12

    def other(*arguments: object, **named: object) -> object:
        kept["row"] += 1
        raise MadeError

    for module in (pipes, trying):
        monkeypatch.setattr(module, "make_film", other)
    monkeypatch.setattr(planning, "make_films", other)
    cards.step_s.cache_clear()
    cards.place_of.cache_clear()
    for row in plans:
        with pytest.raises(MadeError):
            cards._planned(row)
    assert kept["row"] == len(plans)


class MadeError(Exception):
    """A film was made."""


def test_a_file_of_systems_comes_first(tmp_path: Path) -> None:
    row = next(one for one in cards._read(SAMPLE) if one["source"].startswith("mosaicml"))
    (tmp_path / "systems.json").write_text(json.dumps([{"source": "mosaicml", "system": "fsdp2"}]))
    (record,) = cards._planned(row, read_sources(tmp_path / "systems.json"))
    assert isinstance(record, Record)
    assert (record.system, record.is_assumed) == ("fsdp2", False)
    (tmp_path / "wrong.json").write_text(json.dumps([{"source": "mosaicml", "system": "fsdp9"}]))
    with pytest.raises(ValueError, match=r"system must be one of zeroshard, fsdp2"):
        read_sources(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"options": {"products": "flot8"}}, "products must be one of '', 'float32', .*; got 'flot8'"),
        ({"options": {"is_sequence_parallel": "no"}}, "is_sequence_parallel must be of type bool; got 'no'"),
        ({"options": {"cut": "foo"}}, r"cut must be of type Literal\['bytes', 'even', 'compute'\]; got 'foo'"),
        ({"options": {"offload": "hosst"}}, "options or device: .*'hosst'"),
        ({"options": {"stage": 9}}, "stage must be one of None, 0, 1, 2, 3; got 9"),
        ({"options": {"stage": "1"}}, r"stage must be of type int \| None; got '1'"),
        ({"options": {"precision": "bf17"}}, "precision must be one of '', 'fp32'.*; got 'bf17'"),
        ({"options": {"host_part": float("nan")}}, "host_part must be of type float; got nan"),
        ({"options": {"bucket_bytes": -5}}, "bucket_bytes must be at least -1; got -5"),
        ({"options": {"blocked_s": [0.1]}}, r"blocked_s must be of type tuple\[float, float\]"),
        ({"options": {"speed": 1}}, "options are name, stage, .*; got speed"),
        ({"options": {"kernels": {"foo": 1}}}, "kernels are attention, .*; got foo"),
        ({"options": {"kernels": {"fused_gate": "no"}}}, "kernels: fused_gate must be of type bool; got 'no'"),
        ({"columns": {"foo": "1"}}, "columns are source, model, .*; got foo"),
        ({"columns": {"micro_batch": 4}}, "columns must be of type"),
        ({"device": {"foo": 1}}, "options or device: .*'foo'"),
        ({"device": {"memory_bytes": "80"}}, "device must be of type"),
    ],
)
def test_a_wrong_value_in_a_file_of_systems_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "systems.json").write_text(json.dumps([{"source": "my blog", "system": "fsdp2"} | changed]))
    with pytest.raises(ValueError, match=f"^my blog: .*{message}"):
        read_sources(tmp_path / "systems.json")


def test_a_list_in_a_file_of_systems_is_a_tuple(tmp_path: Path) -> None:
    options = {"blocked_s": [0.1, 2], "kernels": {"fused_gate": True}}
    (tmp_path / "systems.json").write_text(
        json.dumps([{"source": "my blog", "system": "fsdp2", "options": options}]), encoding="utf-8-sig"
    )
    system = run_of(OWN, read_sources(tmp_path / "systems.json")).options.system
    assert (system.blocked_s, system.kernels.fused_gate) == ((0.1, 2), True)


@pytest.mark.parametrize("system", ["deepspeed-2-offload", "deepspeed-3-offload"])
def test_the_offload_of_a_system_is_planned(system: str) -> None:
    row = OWN | {"zero_stage": ""}
    run = run_of(row, [Source("my blog", system)])
    plan = make_plan(run.shape, world_size=8, device="h100-80", seq=4096, batch=2, micro_batches=2, system=system)
    record, without = (
        cards._compared(row, run_of(row, [Source("my blog", name)]))[0]
        for name in (system, system.removesuffix("-offload"))
    )
    assert isinstance(record, Record)
    assert isinstance(without, Record)
    assert record.predicted == plan.reserved_bytes / 2**30 < without.predicted
    assert cards.step_s(run) == pytest.approx(plan.step_s)


def test_one_rank_offloads_parameters_too() -> None:
    run = run_of(OWN | {"dp": "1", "n_gpus": "1"}, [Source("my blog", "deepspeed-3-offload")])
    plan = make_plan(
        run.shape, world_size=1, device="h100-80", seq=4096, batch=2, micro_batches=16, system="deepspeed-3-offload"
    )
    assert not run.refused
    assert cards.place_of(run, 0).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize(
    ("changed", "system"),
    [
        ({"zero_stage": "3"}, "fsdp2"),
        ({"zero_stage": "2"}, "deepspeed-2"),
        ({"zero_stage": "1"}, "deepspeed-1"),
        ({"zero_stage": ""}, "ddp"),
        ({"zero_stage": "1", "tp": "2", "dp": "4"}, "megatron-lm"),
    ],
)
def test_an_unknown_source_gets_a_system_from_its_columns(changed: dict[str, str], system: str) -> None:
    row = next(one for one in cards._read(SAMPLE) if one["source"].startswith("mosaicml"))
    run = run_of({**row, "source": "someone's blog", "dp": "8", "n_gpus": "8", "tp": "1", "pp": "1", **changed})
    assert (run.options.system.name, run.is_assumed) == (system, True)


@pytest.mark.parametrize(("batch", "micro_batches"), [("64", 4), ("16", 1), ("", 1)])
def test_a_batch_of_all_ranks_is_divided_over_them(batch: str, micro_batches: int) -> None:
    row = next(one for one in cards._read(SAMPLE) if one["source"].startswith("mosaicml"))
    changed = {"global_batch": batch, "micro_batch": "2", "dp": "8", "n_gpus": "8", "tp": "1", "pp": "1"}
    options = run_of({**row, **changed}).options
    assert (options.batch, options.micro_batches) == (2, micro_batches)


@pytest.mark.parametrize(
    ("model", "layers", "hidden", "billions", "recomputed"),
    [("llama2-13B", 40, 5120, 13.0, 13), ("llama2-34B", 48, 8192, 33.7, 48), ("llama2-70B", 80, 8192, 69.0, 80)],
)
def test_llama_2_with_selective_recomputation(
    model: str, layers: int, hidden: int, billions: float, recomputed: int
) -> None:
    row = dict.fromkeys(next(csv.DictReader(SAMPLE.open())), "")
    sizes = {"layers": layers, "hidden": hidden, "vocab": 32000, "seq": 4096, "dp": 128, "micro_batch": 2}
    row |= {key: str(value) for key, value in sizes.items()}
    row |= {"source": "foundation-model-stack/fms-fsdp README", "gpu": "A100-80GB-SXM", "zero_stage": "3"}
    run = run_of(row | {"model": model, "recompute": "selective", "measured_metric": "mfu"})
    assert run.shape.numel() == pytest.approx(1e9 * billions, rel=0.01)
    cell = run.options.row.activations
    assert sum(cell.of_unit(f"model.layers.{layer}") != () for layer in range(layers)) == recomputed


@pytest.mark.parametrize(
    ("changed", "axes"),
    [
        ({"dp": ""}, (8, 1, 1)),
        ({"dp": "", "n_gpus": "64", "tp": "4", "pp": "2"}, (8, 4, 2)),
        ({"n_gpus": "", "dp": "16"}, (16, 1, 1)),
        ({"n_gpus": "16", "source": "my blog BF16 CP2 VP1"}, (8, 1, 1)),
    ],
)
def test_ranks_of_data_that_a_row_leaves_out(changed: dict[str, str], axes: tuple[int, int, int]) -> None:
    options = run_of(OWN | changed).options
    assert (options.shard_ranks * options.replicas, options.tensor, options.pipe) == axes


@pytest.mark.parametrize(("heads", "tensor", "found"), [("", 8, 96), ("", 4, 108), ("144", 8, 144), ("", 5, 108)])
def test_heads_that_a_row_leaves_out_are_some_that_tensor_ranks_divide(heads: str, tensor: int, found: int) -> None:
    sizes = {"model": "gpt-196B", "layers": "84", "hidden": "13824", "vocab": "250000", "params_b": "196"}
    run = run_of(OWN | sizes | {"heads": heads, "tp": str(tensor), "dp": "1", "n_gpus": str(tensor)})
    assert run.shape.heads == found
    assert bool(run.refused) == (tensor == 5)  # no number of heads of this width has five equal parts


def test_a_row_whose_numbers_of_devices_differ_says_so() -> None:
    assert cards._planned(OWN | {"n_gpus": "64"}) == "n_gpus is 64, but dp, tp and pp make 8 of them"
    assert cards._planned(OWN | {"n_gpus": "64", "dp": "", "tp": "3"}) == (
        "n_gpus is 64, but dp, tp and pp make 63 of them"
    )


@pytest.mark.parametrize(
    ("metric", "units"),
    [("gpu_mem_peak_rank0", {"GiB": 1, "MiB": 1024, "GB": 1.073741824}), ("iteration_time", {"s": 1, "ms": 1000})],
)
def test_predictions_have_the_unit_of_the_row(metric: str, units: dict[str, float]) -> None:
    found = [cards._planned(OWN | {"measured_metric": metric, "unit": unit}) for unit in units]
    values = [one[0].predicted for one in found if isinstance(one, tuple) and isinstance(one[0], Record)]
    assert [one / values[0] for one in values] == pytest.approx([*units.values()])


def test_an_unknown_unit_is_not_scored() -> None:
    reason = "the unit 'h' of iteration_time is none of ms, s"
    assert cards._planned(OWN | {"measured_metric": "iteration_time", "unit": "h"}) == reason
    assert cards._planned(OWN | {"measured_metric": "speed"}) == "the metric speed is not planned"


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"recompute": "None"}, {}),
        ({"recompute": "Full"}, {"recompute": "full"}),
        ({"seq": " 4,096", "zero_stage": "3.0", "hidden": "2048.0"}, {}),
    ],
)
def test_cells_in_other_spellings_are_the_same_run(
    changed: dict[str, str], same: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "one.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*OWN])
        writer.writeheader()
        writer.writerow(OWN | changed)
    (row,) = cards._read(path)
    assert run_of(row) == run_of(OWN | same)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"recompute": "off"}, "recompute 'off' is none of none, full, selective"),
        ({"zero_stage": "stage 3"}, "zero_stage 'stage 3' is none of 0, 1, 2, 3"),
        ({"zero_stage": "7"}, "zero_stage '7' is none of"),
        ({"zero_stage": "-hsdp"}, "zero_stage '-hsdp' is none of"),
        ({"value": "1e999"}, "value '1e999' is not a number"),
        ({"params_b": "0"}, "params_b of llama-1.34B is 0, but the shape of its columns has 1.26 billion"),
        ({"seq": "4k"}, "seq '4k' is not a number"),
        ({"vocab": "128k"}, "vocab '128k' is not a number"),
        ({"heads": "3,2"}, "heads '3,2' is not a number"),
        ({"micro_batch": "0"}, "micro_batch '0' is not a whole number above 0"),
        ({"layers": "1.5"}, "layers '1.5' is not a whole number above 0"),
        ({"value": "nan"}, "value 'nan' is not a number"),
        ({"value": ""}, "value '' is not a number"),
        ({"measured_metric": "status", "value": "fine"}, "status 'fine' is none of ok, crash_or_oom"),
        ({"model": "Mistral-7B"}, "no shape is known for the model 'Mistral-7B'"),
        ({"layers": "26"}, "params_b of llama-1.34B is 1.34, but the shape of its columns has 1.71 billion"),
    ],
)
def test_a_cell_that_cannot_be_read_is_a_reason(changed: dict[str, str], reason: str) -> None:
    found = cards._planned(OWN | changed)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_a_run_that_ended_well_is_told_in_any_case() -> None:
    found = [cards._planned(OWN | {"measured_metric": "status", "value": value}) for value in ("OK", "OOM")]
    assert [one[0].ran for one in found if isinstance(one, tuple) and isinstance(one[0], Label)] == [True, False]


def test_a_row_without_a_batch_says_so() -> None:
    row = next(one for one in cards._read(SAMPLE) if one["source"].startswith("mosaicml"))
    assert cards._planned({**row, "micro_batch": ""}) == "the row has no micro_batch"


# -- nanotron ---------------------------------------------------------------------------------------------------------


def nanotron(**changed: Any) -> Plan:
    asked = {"world_size": 1, "stage": 0, "seq": 2048, "device": "h100", "system": "nanotron", "batch": 1} | changed
    return make_plan(SMALL, **asked)


def test_states_of_a_rank_are_all_there() -> None:
    numel = SMALL.numel()
    # bf16 parameters, fp32 sums, masters and both states; DDP's bucket besides, where it wraps the model.
    assert nanotron().reserved_bytes > (2 + 4 + 4 + 8) * numel
    wrapped = nanotron(world_size=4).reserved_bytes
    assert wrapped - nanotron().reserved_bytes == pytest.approx(2 * numel, rel=0.15)


def test_sharded_states_take_less() -> None:
    whole, sharded = (nanotron(world_size=8, stage=stage).reserved_bytes for stage in (0, 1))
    # What is saved: 7/8 of the masters and states, and DDP's bucket; what is gathered at the end fits into the rest.
    assert whole - sharded > 0.75 * 12 * SMALL.numel()


def test_tensors_of_collectives_wait_for_the_device() -> None:
    ahead, waiting = SYSTEMS["nanotron"], dataclasses.replace(SYSTEMS["nanotron"], runs_ahead=0)
    wide = dataclasses.replace(SMALL, layers=6, hidden=4096, inner=14336, heads=32, sequence=4096)
    one, other = (
        make_plan(wide, world_size=8, tensor=8, stage=0, seq=4096, device="h100", system=system)
        for system in (ahead, waiting)
    )
    assert one.peak_bytes > other.peak_bytes


def test_memory_grows_with_the_micro_batches_of_a_pipeline() -> None:
    big = dataclasses.replace(SMALL, layers=8)
    asked = {"world_size": 4, "stage": 0, "seq": 2048, "device": "h100", "system": "nanotron", "pipe": 4}
    plan = make_plan(big, micro_batches=4, **asked)
    # The first place has four micro-batches in flight, the last one its logits.
    assert plan.ranks[0].reserved_bytes > plan.ranks[1].reserved_bytes


def test_layers_of_pipeline_ranks() -> None:
    # 16 layers and a head that costs as much as 4: ten halves the whole.
    shape = dataclasses.replace(SMALL, layers=16, hidden=2048, inner=8192, vocabulary=131072, heads=32)
    halves = layers_of(shape, 2, "compute")
    assert [len(one) for one in halves] == [11, 7]  # with the embedding, and with the head
    assert halves[0][0] == -1
    assert halves[1][-1] == 16
    with pytest.raises(ValueError, match="16 places exceed the 16 layers and the head"):
        layers_of(shape, 16, "compute")
