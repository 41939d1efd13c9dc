"""Where a model trains, on emulated CUDA devices: it is moved unit by unit, or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from tests.emulated import cuda

WHERE = "tests.emulated.cases"
SLACK_BYTES = 8192
"""Padding of shards, and numbers that are compared."""


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if not isinstance(why := cuda.build(), Path):
        pytest.skip(why)


def test_a_model_on_the_cpu_is_moved_unit_by_unit() -> None:
    found: dict[str, Any] = cuda.run(f"{WHERE}:moved")
    assert found["devices"] == ["cuda:0"], "buffers, too"
    shards = found["model_bytes"] // 4
    # At most the shards, one unit, and buffers; of the first unit nothing is released yet when it is whole.
    most = shards + found["unit_bytes"] + found["buffer_bytes"] + SLACK_BYTES
    assert found["units"] == 9
    assert shards < found["unit by unit"] <= most
    assert found["as a whole"] > most + found["model_bytes"] // 2, "the bound tells them apart"
    assert found["kept_bytes"] <= shards + found["buffer_bytes"] + SLACK_BYTES


@pytest.mark.rotates
def test_what_was_moved_trains_as_what_was_moved_by_hand() -> None:
    assert cuda.run(f"{WHERE}:values") == {
        "moved here": True,
        "moved here, with states": True,
        "on another device": True,
    }


def test_states_elsewhere_train_as_on_the_device() -> None:
    found: dict[str, Any] = cuda.run(f"{WHERE}:offloaded")
    assert len(found) == 24
    for case, one in found.items():
        place = case.split(",")[0]
        # Kernels of two devices round in other ways, and bf16's values are far from one another.
        assert one["error"] < (1e-5 if "fp32" in case else 2e-2), case
        known = {"device": ["cuda:0"], "parameters alone": ["cuda:0"], "a part": ["cpu", "cuda:0"]}
        wanted = known.get(place, ["cpu"])
        assert one["states"] == wanted, case
        # What the optimizer reads is where its states are, also where it is held on the device.
        assert one["gradients"] == wanted, case
        assert ("host" in one["bytes"] or "file" in one["bytes"]) is (place != "device")
        if place in ("host", "file", "gradients stay", "parameters", "parameters beside a file"):
            assert one["bytes"]["states"] == 0
            assert "the host waits once for the gradients" in one["text"]
        for column in ("parameters", "states", "padding"):  # gradients are gone after zero_grad()
            assert one["bytes"][column] == one["predicted"][column], case
        if place == "parameters":
            assert one["bytes"]["parameters"] == 0, case
        # Each copy follows what was launched before, and what computes next follows the copy, or that of gradients two
        # units before, if so many leave. With a loss scale the host waits, and looks for overflows.
        stays = place in ("device", "gradients stay", "parameters alone")
        for lane, is_used in {"back": place != "device", "out": not stays}.items():
            is_followed = is_used and not (lane == "out" and ("fp16" in case or place == "a part"))
            stream = cuda.STREAMS[lane]
            assert ([0, stream] in one["waits"], [stream, 0] in one["waits"]) == (is_used, is_followed), (case, lane)
        if not stays:  # what comes to be added to does so after it has left, and is added to once it is there
            both = cuda.STREAMS["out"], cuda.STREAMS["back"]
            assert [*both] in one["waits"], case
            assert [*both[::-1]] in one["waits"], case


@pytest.mark.rotates
def test_a_gradient_that_was_assigned_on_the_host_leaves_as_others() -> None:
    assert cuda.run(f"{WHERE}:given") == [1.0, 1.0]


@pytest.mark.rotates
def test_step_counters_of_a_fused_update_go_to_the_device() -> None:
    assert cuda.run(f"{WHERE}:counters") == ["cuda:0"]


@pytest.mark.rotates
def test_the_rank_s_device() -> None:
    assert cuda.run(f"{WHERE}:chosen") == {
        "one process": "cuda:0",
        "one process, model on cuda:1": "cuda:1",
        "set_device(1)": "cuda:1",
        "LOCAL_RANK=1": "cuda:1",
        "LOCAL_RANK=1, shown one device": "cuda:0",
        "gloo": "cpu",
        "fake": "cuda:0",
        "no device": "cpu",
    }


@pytest.mark.rotates
def test_what_cannot_train_where_it_is_is_refused_by_name() -> None:
    found: dict[str, str] = cuda.run(f"{WHERE}:refused")
    mixed = found["mixed"]
    assert mixed.startswith("ValueError: [rank 0/1] The parameters of Model are on 3 devices: ")
    for text in ("1 on cpu, 'enter.weight' first", "4 on cuda:0, 'blocks.0.up.weight' first", "2 on cuda:1", ".to("):
        assert text in mixed
    for key, backend in (("gloo", "'gloo'"), ("no backend", "None")):
        for text in (
            "ValueError: [rank 0/1] Parameter 'enter.weight' is on cuda:1",
            backend,
            "zs.init()",
            "model.cpu()",
        ):
            assert text in found[key]
    assert found["untouched"] == "cuda:1"
    assert (
        "comes too late: a process group exists, with 'cpu:gloo,cuda:gloo', of which cpu uses 'gloo'" in found["late"]
    )
    assert "for which the process group has the backend 'fake'" in found["fake"]
    assert found["partly meta"] == "cuda:0 cuda:0"
