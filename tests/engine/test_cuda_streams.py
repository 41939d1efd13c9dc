"""Streams of a real GPU, in order."""

import pytest
import torch

from zeroshard import devices


@pytest.mark.gpu
def test_a_stream_is_ordered_after_the_default_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    default, other = torch.cuda.default_stream(device), torch.cuda.Stream(device)
    address = devices.stream_of(device)
    torch.cuda._sleep(10**8)
    done = default.record_event()
    assert not done.query()
    with torch.cuda.stream(other):
        devices.order_after(device, address)
        after = other.record_event()
    after.synchronize()
    assert done.query()
