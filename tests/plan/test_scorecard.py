"""The planner against published runs: a sample of them, drawn by `tools/sample_published.py`, and the sums by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeroshard.evidence import scorecard as cards
from zeroshard.evidence.nanotron import Rank, blocks_of
from zeroshard.evidence.nanotron_memory import reserved_bytes
from zeroshard.evidence.scorecard import Label, Record, Scorecard, render, scorecard

SAMPLE = Path(__file__).parent / "data" / "published_sample.csv"
GIB = 2**30
SMALL = Rank(layers=2, hidden=1024, inner=4096, heads=16, vocabulary=32768, sequence=2048, batch=1, is_tied=True)


@pytest.fixture(scope="module")
def card() -> Scorecard:
    return scorecard(SAMPLE)


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
    assert sum(one.ran for one in card.labels) >= 30
    assert card.wrong_no <= 0.05


def test_most_crashes_are_told(card: Scorecard) -> None:
    crashed = [one for one in card.labels if not one.ran]
    assert len(crashed) >= 15
    # Of the whole file 86%: a run can also crash for another reason than memory.
    assert sum(not one.fits for one in crashed) / len(crashed) >= 0.75


def test_time(card: Scorecard) -> None:
    sums = card.groups[cards.TIME]
    assert sums.count >= 70
    assert sums.median <= 0.10


def test_time_of_one_node_and_of_the_largest_runs(card: Scorecard) -> None:
    sums = {name: one for name, one in card.sources.items() if name.endswith("time")}
    single = next(one for name, one in sums.items() if name.startswith("vTrain data/ground_truth_single"))
    bloom = next(one for name, one in sums.items() if name.startswith("bigscience tr11"))
    assert single.median <= 0.10
    assert bloom.median <= 0.10


def test_each_row_is_a_record_a_label_or_a_reason(card: Scorecard) -> None:
    rows = SAMPLE.read_text().splitlines()
    told = sum(not one.ran for one in card.labels)
    assert len(card.records) + told + sum(card.skipped.values()) == len(rows) - 1


def test_the_text_and_the_json_say_the_same(card: Scorecard) -> None:
    content = json.loads(card.to_json())
    assert len(content["records"]) == len(card.records)
    median = content["groups"][cards.MEMORY_DATA]["median"]
    line = next(one for one in render(card).splitlines() if one.startswith(cards.MEMORY_DATA))
    assert f"{median:.1%}" in line


def test_no_torch_is_needed() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from zeroshard.evidence.scorecard import scorecard, render\n"
        f"assert 'memory' in render(scorecard({str(SAMPLE)!r}))"
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
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column measured_metric"):
        scorecard(tmp_path / "other.csv")


# -- nanotron ---------------------------------------------------------------------------------------------------------


def test_states_of_a_rank_are_all_there() -> None:
    numel = sum(numel for _, numel in SMALL.parameters)
    # bf16 parameters, fp32 sums, masters and both states; DDP's bucket besides, where it wraps the model.
    assert reserved_bytes(SMALL) > (2 + 4 + 4 + 8) * numel
    wrapped = reserved_bytes(replace(SMALL, data=4))
    assert wrapped - reserved_bytes(SMALL) == pytest.approx(2 * numel, rel=0.15)


def test_sharded_states_take_less() -> None:
    whole, sharded = (reserved_bytes(replace(SMALL, data=8, zero=zero)) for zero in (0, 1))
    numel = sum(numel for _, numel in SMALL.parameters)
    # What is saved: 7/8 of the masters and states, and DDP's bucket; what is gathered at the end fits into the rest.
    assert whole - sharded > 0.75 * 12 * numel


def test_a_device_that_is_too_small_says_so() -> None:
    assert reserved_bytes(SMALL, device_bytes=GIB) == 0


def test_memory_grows_with_the_micro_batches_of_a_pipeline() -> None:
    first = replace(SMALL, has_head=False, micro_batches=4, is_waiting=True)
    one, four = (reserved_bytes(replace(first, in_flight=number)) for number in (1, 4))
    hidden = SMALL.sequence * SMALL.hidden * 2
    # A layer keeps its input, two norms' results, queries to values twice, the context, x2 and 16 of the MLP.
    kept = hidden * (1 + 1 + 3 + 2 + 1 + 1 + 1 + 8 + 4 + 4)
    assert four - one == pytest.approx(3 * SMALL.layers * kept, rel=0.1)


def test_layers_of_pipeline_ranks() -> None:
    # 16 layers and a head that costs as much as 4: ten halves the whole.
    layer, head = 67_108_864, 268_435_456
    assert [own for _, own in blocks_of(16, layer, head, 2)] == [10, 6]
    assert [own for _, own in blocks_of(16, layer, head, 1)] == [16]
    # The head is one block, so that the last of 16 ranks has none.
    assert 0 in [blocks for blocks, _ in blocks_of(16, layer, head, 16)]
