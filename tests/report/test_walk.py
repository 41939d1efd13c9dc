"""The walk is the engine's own trace: recorded again it is the same, and its states agree with the measured bytes."""

import json

import pytest

from tools.walk import recording
from zeroshard.report.check import check_page
from zeroshard.report.walk import RECORDING, read_walk, tell_walk


def test_the_recording_is_what_the_engine_does() -> None:
    assert recording() == json.loads(RECORDING.read_text("utf-8"))


def test_each_step_is_an_event_of_the_trace() -> None:
    events = json.loads(RECORDING.read_text("utf-8"))["events"]
    steps = read_walk()["steps"]
    assert [list(step["event"].values()) for step in steps] == events
    assert 24 <= len(steps) <= 30
    for step in steps:
        assert (step["event"]["unit"] or "root unit") in step["sentence"] or step["event"]["kind"] == "step"
        assert step["sentence"][0].isupper() or step["sentence"].startswith("blocks.")
        assert step["sentence"].endswith(".")
        if step["event"]["nbytes"]:
            assert f"{step['event']['nbytes']:,} bytes of {step['event']['dtype']} sent" in step["sentence"]
    check_page({"version": 1, "kind": "run", "title": "a walk", "walk": read_walk()})


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
    """What a block's checkpoint keeps is counted when its module returns, which is one event after its release."""
    walk = read_walk()
    activations = [step["state"]["resident_bytes"][0]["activations"] for step in walk["steps"]]
    kept = [len(step["state"]["kept"]) for step in walk["steps"]]
    blocks = len(walk["units"]) - 1
    (input_bytes,) = {
        activations[place + 1] - activations[place] for place in (5, 6, 7) if kept[place] > kept[place - 1]
    } - {0}
    last_forward = max(place for place, step in enumerate(walk["steps"]) if step["event"]["phase"] == "forward")
    for place in range(1, last_forward - 2):
        assert activations[place + 1] >= input_bytes * kept[place]
        assert (activations[place + 1] == 0) == (kept[place] == 0)
    assert max(kept) == blocks
    assert activations[-1] == 0


def test_a_recording_that_misses_a_moment_is_refused() -> None:
    broken = json.loads(RECORDING.read_text("utf-8"))
    broken["measured"][2].pop()
    with pytest.raises(ValueError, match="rank 2 has 26 measured moments for 26 events; one more is due"):
        tell_walk(broken)
