"""What a step launches on the path of a device, in the steady state: counted on torch's fake process group.

The engine runs its code for NCCL as one rank of many; nothing travels. A launch is a call of an operator on tensors
that is neither a view nor an allocation; see `benchmarks/hosttime.py`.
"""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu import fake_ranks
from benchmarks.hosttime import Contestant, Counted, build, count_launches, make_batch

BLOCKS, RANKS = 32, 64
CLIP_LAUNCHES = 15
"""Of one `clip_grad_norm_`, of which torch's own functions make seven."""
STEPS = 3
"""Before the one that is counted: passes are agreed in the first."""


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def count(stage: int, precision: str = "fp32", blocks: int = BLOCKS, ranks: int = RANKS) -> Counted:
    with fake_ranks(ranks):
        running, batch = build(Contestant("zeroshard", stage, precision), blocks, clips=True), make_batch()
        for _ in range(STEPS):
            running.step(batch, lambda phase: None)
        return count_launches(running, batch)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_clip_is_a_few_launches_and_the_host_reads_none_of_them(stage: int, precision: str) -> None:
    counted = count(stage, precision)
    assert 7 < counted.launches("clip") <= CLIP_LAUNCHES, counted.by_phase["clip"]
    assert not counted.reads("clip")


@pytest.mark.parametrize("stage", range(4))
def test_the_host_reads_nothing_in_a_backward(stage: int) -> None:
    counted = count(stage)
    assert counted.launches("backward") > 20 * BLOCKS, "gradients were computed"
    assert not counted.reads("backward")


@pytest.mark.xfail(reason="the loss scale reads whether each sum is finite, as it is made", strict=True)
@pytest.mark.parametrize("stage", range(4))
def test_the_host_reads_nothing_in_a_backward_with_a_loss_scale(stage: int) -> None:
    assert not count(stage, "fp16").reads("backward")


def test_launches_of_a_clip_do_not_depend_on_ranks_or_on_parameters() -> None:
    counts = {count(3, blocks=blocks, ranks=ranks).launches("clip") for blocks, ranks in ((2, 2), (2, 512), (4, 8))}
    assert len(counts) == 1, counts


def test_reads_are_seen() -> None:
    with Counted() as counted:
        values = torch.ones(3)
        (values > 0).nonzero()
        torch.equal(values, values)
        values[0].item()
        counted.note("clip")
    assert set(counted.reads("clip")) == {"aten::nonzero", "aten::equal", "aten::_local_scalar_dense"}
    assert counted.launches("clip") == 5
