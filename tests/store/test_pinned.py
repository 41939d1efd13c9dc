"""Pinned memory: of exact sizes, used again once no copy is under way, and as many bytes as plans say."""

import gc
from typing import Any, final
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeroshard as zs
from tools.emulated_copies import Bus, late_bus
from zeroshard import devices
from zeroshard.devices import Pinned
from zeroshard.testing import run_ranks

STEPS = 4


@final
class Mark:
    """An event that is over when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


@final
class Device:
    """What `Pinned` asks of CUDA's runtime, and the events of its streams.

    Args:
        code: the result of pinning; 0 is success.
    """

    def __init__(self, code: int = 0, *, is_idle: bool = True) -> None:
        self.code, self.is_idle = code, is_idle
        self.marks: list[Mark] = []
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.given_back: list[int] = []

    def mark_all(self) -> list[Mark]:
        self.marks.append(made := Mark())
        made.is_over = self.is_idle
        return [made]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if any(address < start + size and start < address + nbytes for start, size in self.pinned.items()):
            return 712  # as CUDA: the memory is pinned already
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.given_back.append(self.pinned.pop(address))
        return 0

    def memory(self) -> Pinned:
        return Pinned(self, lambda: self.mark_all())  # type: ignore[arg-type]


def test_memory_has_the_size_that_was_asked_for() -> None:
    device = Device()
    pinned = device.memory()
    made = [pinned.take((nbytes,), torch.uint8) for nbytes in (1_000_001, 3_000_000, 1_000_001)]
    assert [one.numel() for one in made] == [1_000_001, 3_000_000, 1_000_001]
    assert {one.data_ptr(): one.nbytes for one in made} == device.pinned
    assert pinned.nbytes == 5_000_002
    assert pinned.take((3, 100_001), torch.float64).shape == (3, 100_001)


def test_memory_is_used_again_once_nothing_refers_to_it_and_copies_are_over() -> None:
    device = Device(is_idle=False)
    pinned = device.memory()
    first = pinned.take((2_000_000,), torch.uint8)
    view, address = first[5:].view(-1, 5), first.data_ptr()
    del first
    other = pinned.take((2_000_000,), torch.uint8)
    assert other.data_ptr() != address, "a view is in use"
    assert device.marks == []
    del view
    third = pinned.take((2_000_000,), torch.uint8)
    assert third.data_ptr() != address, "a copy may be under way"
    (mark,) = device.marks
    mark.is_over = True
    again = pinned.take((2_000_000,), torch.uint8)
    assert again.data_ptr() == address
    assert pinned.nbytes == sum(device.pinned.values()) == 6_000_000
    assert device.given_back == []


def test_unused_memory_of_other_sizes_is_given_back_before_more_is_pinned() -> None:
    device = Device()
    pinned = device.memory()
    made = [pinned.take((nbytes,), torch.uint8) for nbytes in (1_500_000, 2_500_000)]
    made.pop()
    made.append(pinned.take((1_700_000,), torch.uint8))
    assert device.given_back == [2_500_000]
    assert pinned.nbytes == sum(device.pinned.values()) == 3_200_000
    device.is_idle = False
    made.pop()
    pinned.take((1_800_000,), torch.uint8)
    assert device.given_back == [2_500_000], "a copy may be under way"


def test_memory_that_cannot_be_pinned_is_an_error_with_a_remedy() -> None:
    device = Device(code=2)
    pinned = device.memory()
    with pytest.raises(MemoryError, match=r"2,000,000 bytes of host memory cannot be pinned \(CUDA error 2\); 0 are"):
        pinned.take((2_000_000,), torch.uint8)
    assert pinned.nbytes == 0
    device.code = 0
    assert pinned.take((2_000_000,), torch.uint8).numel() == pinned.nbytes


@pytest.mark.parametrize("where", ["cudaHostRegister", "mark_all", "cudaHostUnregister"])
def test_an_interruption_leaves_no_memory_pinned_that_is_not_there(where: str) -> None:
    device = Device()
    pinned = device.memory()
    made = [pinned.take((nbytes,), torch.uint8) for nbytes in (4_194_304, 8_388_608)]
    made.clear()
    plain = getattr(device, where)

    def interrupted(*args: Any) -> Any:
        plain(*args)
        raise KeyboardInterrupt

    setattr(device, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pinned.take((2_097_152,), torch.uint8)
    setattr(device, where, plain)
    again = [pinned.take((nbytes,), torch.uint8) for nbytes in (2_097_152, 4_194_304, 8_388_608) * 2]
    assert {one.data_ptr() for one in again} <= device.pinned.keys()


def count(stage: int) -> tuple[list[int], int]:
    """Return the bytes pinned after each step, and those of gradients on the host."""
    pinned = Device(is_idle=False).memory()
    bus, sizes = Bus(eagerness=0.3), list[int]()
    with late_bus(bus), patch.object(devices, "pinned", pinned.take), patch.object(devices, "EXACT_BYTES", 1):
        model = nn.Sequential(*(nn.Linear(30 + each, 31 + each) for each in range(5)))
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zs.shard(model, optimizer, stage=stage, offload="host")
        for _ in range(STEPS):
            model(torch.ones(3, 30)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            bus.check()
            bus.issued.clear()  # the emulated copies that are over still hold what they copied
            bus.kept.clear()
            gc.collect()
            sizes.append(pinned.nbytes)
        buckets = {id(slot.bucket): slot.bucket for slot in zero._engine.slots.values()}
        return sizes, sum(sum(one.spec.held_gradient_bytes) for one in buckets.values())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_on_the_host_pin_what_they_need_once(stage: int) -> None:
    for sizes, gradient_bytes in run_ranks(count, 1, stage, process_group=False):
        assert sizes == [gradient_bytes] * STEPS


@pytest.mark.gpu
def test_a_device_copies_to_such_memory_beside_the_host() -> None:
    memory = devices.pinned((3 << 20,), torch.uint8)
    assert memory.is_pinned()
    values = torch.arange(3 << 20, dtype=torch.uint8, device="cuda")
    memory.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, values.cpu())
