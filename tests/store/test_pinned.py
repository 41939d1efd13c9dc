"""Pinned memory: of exact sizes, used again after the device's work, and as many bytes as plans say."""

import gc
from types import SimpleNamespace
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
class Cuda:
    """What `Pinned` asks of `torch.cuda`.

    Args:
        code: the result of pinning; 0 is success.
    """

    def __init__(self, code: int = 0) -> None:
        self.code, self.waits = code, 0
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.given_back: list[int] = []

    def synchronize(self) -> None:
        self.waits += 1

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.pinned, "pinned twice"
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def _unregister(self, address: int) -> int:
        self.given_back.append(self.pinned.pop(address))
        return 0


def test_memory_has_the_size_that_was_asked_for() -> None:
    cuda = Cuda()
    pinned = Pinned(cuda)
    made = [pinned.take((nbytes,), torch.uint8) for nbytes in (1_000_001, 3_000_000, 1_000_001)]
    assert [one.numel() for one in made] == [1_000_001, 3_000_000, 1_000_001]
    assert {one.data_ptr(): one.nbytes for one in made} == cuda.pinned
    assert pinned.nbytes == 5_000_002
    assert cuda.waits == 0


def test_memory_is_used_again_once_nothing_refers_to_it_and_the_device_is_done() -> None:
    cuda = Cuda()
    pinned = Pinned(cuda)
    first = pinned.take((2_000_000,), torch.uint8)
    view, address = first[5:].view(-1, 5), first.data_ptr()
    del first
    other = pinned.take((2_000_000,), torch.uint8)
    assert other.data_ptr() != address, "a view is in use"
    assert cuda.waits == 0
    del view
    again = pinned.take((2_000_000,), torch.uint8)
    assert again.data_ptr() == address
    assert cuda.waits == 1, "a copy from a stream may be under way"
    assert pinned.nbytes == sum(cuda.pinned.values()) == 4_000_000
    assert cuda.given_back == []


def test_unused_memory_of_other_sizes_is_given_back_before_more_is_pinned() -> None:
    cuda = Cuda()
    pinned = Pinned(cuda)
    made = [pinned.take((nbytes,), torch.uint8) for nbytes in (1_500_000, 2_500_000)]
    made.pop()
    pinned.take((1_700_000,), torch.uint8)
    assert cuda.given_back == [2_500_000]
    assert cuda.waits == 1
    assert pinned.nbytes == sum(cuda.pinned.values()) == 3_200_000


def test_memory_that_cannot_be_pinned_is_an_error_with_a_remedy() -> None:
    pinned = Pinned(Cuda(code=2))
    with pytest.raises(MemoryError, match=r"2,000,000 bytes of host memory cannot be pinned \(CUDA error 2\); 0 are"):
        pinned.take((2_000_000,), torch.uint8)
    assert pinned.nbytes == 0


def count(stage: int) -> tuple[list[int], int, list[int]]:
    """Return the bytes pinned after each step, those of gradients on the host, and the steps that waited."""
    cuda = Cuda()
    pinned = Pinned(cuda)

    bus, sizes, waits = Bus(eagerness=0.3), list[int](), list[int]()
    with late_bus(bus), patch.object(devices, "pinned", pinned.take):
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
            waits.append(cuda.waits)
        buckets = {id(slot.bucket): slot.bucket for slot in zero._engine.slots.values()}
        return sizes, sum(sum(one.spec.held_gradient_bytes) for one in buckets.values()), waits


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_on_the_host_pin_what_they_need_once(stage: int) -> None:
    for sizes, gradient_bytes, waits in run_ranks(count, 1, stage, process_group=False):
        assert sizes == [gradient_bytes] * STEPS
        assert waits == [0] * STEPS


@pytest.mark.gpu
def test_a_device_copies_to_such_memory_beside_the_host() -> None:
    memory = devices.pinned((3 << 20,), torch.uint8)
    assert memory.is_pinned()
    values = torch.arange(3 << 20, dtype=torch.uint8, device="cuda")
    memory.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, values.cpu())
