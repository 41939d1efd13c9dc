"""Streams, captures and autograd's threads, on emulated CUDA devices."""

import re
from pathlib import Path

import pytest

from tests.emulated import cuda

WHERE = "tests.emulated.cases"


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if not isinstance(why := cuda.build(), Path):
        pytest.skip(why)


def test_a_pass_stays_on_one_stream_and_follows_the_last_one() -> None:
    found = cuda.run(f"{WHERE}:streams")
    assert found["one stream"] == []
    assert found["forward on another"] == [[0, 7]]
    # Autograd runs the backward on the forward's stream; it ends, and the step follows, on the caller's.
    assert found["backward and step"] == [[0, 7], [7, 0]]
    assert re.search(r"RuntimeError: \[rank 0/4\] the forward of 'blocks.1' runs on another", found["inside, stage 3"])
    # Where parameters are resident the forward has no hooks; the first gradient from the other stream tells.
    assert re.search(r"RuntimeError: \[rank 0/4\] a part of the backward runs on another", found["inside, stage 2"])


def test_a_read_on_another_stream_leaves_the_wait_on_that_of_the_step() -> None:
    found = cuda.run(f"{WHERE}:reads")
    assert found["in the step"] == []
    assert found["gathers were waited for on"] == [0]
    # Each unit that arrived is before what the other stream reads of it.
    assert found["streams"]
    assert {tuple(pair) for pair in found["streams"]} == {(0, 7)}


@pytest.mark.rotates
def test_capture_of_a_cuda_graph_is_refused_by_name() -> None:
    found = cuda.run(f"{WHERE}:captures")
    assert found.pop("gathered") == "nothing was raised", "parameters keep their places there"
    assert {key: text.split(" inside the capture")[0] for key, text in found.items()} == {
        "forward": "RuntimeError: [rank 0/1] the forward of Model",
        "backward": "RuntimeError: [rank 0/1] the backward",
        "step": "RuntimeError: [rank 0/1] optimizer.step()",
    }


@pytest.mark.rotates
def test_modules_compiled_to_cuda_graphs_are_refused_by_name() -> None:
    found = cuda.run(f"{WHERE}:compiled")
    assert found.pop("without graphs") == "nothing was raised"
    assert {key: text.split(" is compiled to CUDA graphs")[0] for key, text in found.items()} == {
        "a block, before": "ValueError: 'blocks.1'",
        "the model, before": "ValueError: 'OptimizedModule'",
        "a layer, before": "ValueError: 'blocks.1.up'",
        "a layer, after": "ValueError: 'blocks.0.up'",
        "the model, after": "ValueError: Model",
    }


@pytest.mark.rotates
def test_threads_of_autograd_enter_the_engine_one_at_a_time() -> None:
    found = cuda.run(f"{WHERE}:threads")
    assert found["open"]["callers"] == found["locked"]["callers"] == 2, "the device's thread, and the caller's"
    assert found["open"]["meetings"] == 2, "without the lock they meet"
    assert found["locked"] == {"callers": 2, "meetings": 1, "outcome": "nothing was raised"}
