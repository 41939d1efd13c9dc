"""Retries of a full device by step: where they end, where they stay, and their price."""

import dataclasses

import pytest

from zeroshard.plan.machine.allocator import Action, Event
from zeroshard.plan.machine.hardware import CLEARED_S_PER_BYTE, DRIVER_CALL_S
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.machine.retries import NO_RETRIES, Retries, play_steps

MIB = 2**20
V100 = DEVICES["v100-32"]
DEVICE_BYTES = 40 * MIB


def held(count: int, num_bytes: int, step: int, stream: int = 0) -> list[Event]:
    """Return the calls of a part of a step that holds some allocations at a time, and frees them."""
    keys = [(step, num_bytes, stream, number) for number in range(count)]
    return [*(Event(key, num_bytes, stream) for key in keys), *(Event(key, 0, 0, Action.FREE) for key in keys)]


def test_a_step_that_repeats_finds_its_layout() -> None:
    # 24 MiB, then 30 MiB: the first step returns the former for the latter, which serves both from then on.
    found = play_steps(([*held(1, 24 * MIB, n), *held(1, 30 * MIB, n)] for n in range(4)), DEVICE_BYTES, V100)
    assert found == Retries((1, 0, 0, 0), reserved_bytes=30 * MIB)
    assert found.steady == 0
    assert str(found) == "retries: 1 in the first steps, 0 in a steady step"


def test_parts_that_share_no_segment_return_memory_in_each_step() -> None:
    # 30 MiB in small segments, then 30 MiB in one: each part returns what the other has, in each step.
    steps = [[*held(30, MIB, n), *held(1, 30 * MIB, n)] for n in range(4)]
    found = play_steps(steps, DEVICE_BYTES, V100)
    assert found.by_step == (1, 2, 2, 2) and found.is_served
    # The small part finds 10 MiB of room, and then has all 30 MiB returned; the large part has 15 segments returned.
    calls, taken_bytes = (1 + 10) + (15 + 1), 20 * MIB + 30 * MIB
    price_s = 2 * V100.launch_s + calls * DRIVER_CALL_S + taken_bytes * CLEARED_S_PER_BYTE
    assert found.steady_s == pytest.approx(price_s)
    # Two streams share no segment either.
    streams = [[*held(1, 30 * MIB, n, 1), *held(1, 30 * MIB, n, 2)] for n in range(3)]
    assert play_steps(streams, DEVICE_BYTES, V100).by_step == (1, 2, 2)
    assert play_steps(streams, 60 * MIB, V100).by_step == (0, 0, 0)


def test_a_step_without_memory_ends_the_play() -> None:
    steps = [held(1, 30 * MIB, 0), [Event("kept", 12 * MIB), *held(1, 30 * MIB, 1)], held(1, MIB, 2)]
    found = play_steps(steps, DEVICE_BYTES, V100)
    assert found == Retries((0, 1), is_served=False)
    assert (found.steady, found.steady_s) == (0, 0.0)
    assert str(found) == "out of memory in step 2 (retries: 1): free memory is fragmented"


def test_no_step_has_no_retry() -> None:
    assert play_steps([], DEVICE_BYTES, V100) == NO_RETRIES
    assert NO_RETRIES.steady == 0


def test_a_retry_costs_more_for_more_memory() -> None:
    assert V100.retry_s(0, 0) == V100.launch_s
    # A gibibyte in one segment, taken and returned: published as 31 ms (github.com/vortex-data/vortex/pull/7831).
    assert V100.retry_s(2, 2**30) == pytest.approx(31e-3, rel=0.3)
    slower = dataclasses.replace(V100, launch_s=1e-3)
    assert slower.retry_s(0, 0) == 1e-3
