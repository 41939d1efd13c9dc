"""The walk is the engine's own trace: recorded again it is the same, and its states agree with the measured bytes."""

import json

import pytest

from tools.walk import CONTEXT, DEPTH, recording
from zeroshard.report.check import check_page
from zeroshard.report.walk import RECORDING, read_walk, tell_walk
from zeroshard.train.models.gpt import GPTConfig

HEAD_WIDTH = 32


def test_the_recording_is_what_the_engine_does() -> None:
    assert recording() == json.loads(RECORDING.read_text("utf-8"))


def test_each_step_is_an_event_of_the_trace() -> None:
    events = json.loads(RECORDING.read_text("utf-8"))["events"]
    steps = read_walk()["steps"]
    assert [list(step["event"].values()) for step in steps] == events
    assert 20 <= len(steps) <= 30
    for step in steps:
        assert (step["event"]["unit"] or "root unit") in step["sentence"] or step["event"]["kind"] == "step"
        assert step["sentence"][0].isupper() or step["sentence"].startswith("blocks.")
        assert step["sentence"].endswith(".")
        if step["event"]["nbytes"]:
            assert f"{step['event']['nbytes']:,} bytes of {step['event']['dtype']} sent" in step["sentence"]
    check_page({"version": 2, "title": "a walk", "walk": read_walk()})


def test_states_agree_with_the_bytes_that_were_measured() -> None:
    walk = read_walk()
    shard = {unit["name"]: unit["shard_numel"] for unit in walk["units"]}
    start = walk["start"]["resident_bytes"]
    for step in walk["steps"]:
        state = step["state"]
        for rank, nbytes in enumerate(state["resident_bytes"]):
            whole = sum(2 * walk["ranks"] * shard[name] for name in state["whole"])
            held = sum(4 * shard[name] for name in state["reduced"])
            assert nbytes["transient"] - start[rank]["transient"] == whole
            # Padding lies in the shard of the last rank.
            assert nbytes["gradients"] == held or rank == walk["ranks"] - 1
            assert held - 4 * 64 * len(shard) <= nbytes["gradients"] <= held
            for column in ("parameters", "states"):
                assert nbytes[column] == start[rank][column]
    assert walk["steps"][-1]["state"]["whole"] == walk["steps"][-1]["state"]["kept"] == []
    assert sorted(walk["steps"][-1]["state"]["reduced"]) == sorted(shard)


def test_kept_inputs_agree_with_the_bytes_that_were_measured() -> None:
    """What a block keeps is counted when its module has returned, and no more once its backward has taken it."""
    walk = read_walk()
    width, of_rotation, of_targets = GPTConfig(DEPTH).width, 2 * CONTEXT * HEAD_WIDTH // 2 * 4, CONTEXT * 8 + 8
    steps = walk["steps"]
    backward = next(place for place, step in enumerate(steps) if step["event"]["phase"] == "backward")
    found = []
    for place, step in enumerate(steps):
        kept = len(step["state"]["kept"])
        if place < backward and kept:
            kept -= 1  # the hook that releases a block, and gathers the next one, runs before the block has returned
        of_blocks = 2 * CONTEXT * width * kept + of_rotation * bool(kept)  # bf16 inputs, and what all blocks share
        activations = step["state"]["resident_bytes"][0]["activations"]
        found.append(activations - of_blocks)
    last_block = max(
        place
        for place, step in enumerate(steps[:backward])
        if step["event"]["unit"] and step["event"]["kind"] == "release"
    )
    first_reduce = next(place for place, step in enumerate(steps) if step["event"]["kind"] == "reduce")
    # Outside the blocks nothing is kept before the head runs, and the targets alone from its backward to the end.
    assert set(found[: last_block + 1]) == {0}
    assert min(found[last_block + 1 : first_reduce]) > of_targets
    assert set(found[first_reduce:-3]) == {of_targets}
    assert set(found[-3:]) == {0}


def test_a_recording_that_misses_a_moment_is_refused() -> None:
    broken = json.loads(RECORDING.read_text("utf-8"))
    broken["measured"][2].pop()
    with pytest.raises(ValueError, match="rank 2 has 22 measurements for 22 events; expected one more"):
        tell_walk(broken)
