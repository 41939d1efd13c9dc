"""At stage 3 root and last unit stay from a forward to its backward, and code outside passes cannot read them."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, Sharded
from zeroshard.testing import run_ranks

READS = {
    "a penalty": lambda p: p.pow(2).sum(),
    "an alias": lambda p: p.detach(),
    "numpy": lambda p: p.detach().numpy(),
    "a write": lambda p: p.data.mul_(2),
}


def read_between(settings: dict[str, Any], parts: Sequence[str]) -> tuple[list[str], list[float]]:
    """Return what reads of parts of the model say between forward and backward, and the losses."""
    run = Sharded(3, settings)
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=list(model.blocks))
    said, losses = [], []
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        for part in parts:
            parameter = next(model.get_submodule(part).parameters())
            for read in READS.values():
                with pytest.raises(RuntimeError) as found:
                    read(parameter)
                said.append(str(found.value))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return said, losses


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_reads_between_forward_and_backward_raise(shared_memory: bool) -> None:
    # What they return would outlive the memory that the backward releases.
    settings = {"shared_memory": shared_memory}
    alone = run_ranks(read_between, 2, settings, [], timeout_s=TIMEOUT_S)
    parts = ["head", "blocks.2", "blocks.0"]
    for rank, (said, losses) in enumerate(run_ranks(read_between, 2, settings, parts, timeout_s=TIMEOUT_S)):
        assert len(said) == 3 * 3 * len(READS)
        assert all("is sharded and released here" in text for text in said)
        assert losses == alone[rank][1]


def frozen() -> int:
    model = models.build(models.Stack).requires_grad_(False)
    zero = zs.shard(model, stage=3, units=list(model.blocks))
    for step in range(3):
        model(models.features(step, zero.mesh.rank))
    return zero.memory().resident_bytes["transient"]


def test_a_model_that_is_not_trained_keeps_nothing() -> None:
    assert run_ranks(frozen, 2, timeout_s=TIMEOUT_S) == [0, 0]


class MiddleLast(models.Stack):
    """A stack that registers its middle block last, as a U-Net may."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        blocks = [*self.blocks]
        self.blocks = nn.ModuleList((blocks[0], blocks[2], blocks[3]))
        head, self.middle = self.head, blocks[1]
        del self.head
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.blocks[0], self.middle, self.blocks[1], self.blocks[2]):
            x = block(x)
        return self.head(x)


def peaks(kind: type[nn.Module]) -> tuple[int, int, list[str]]:
    """Return the transient peak and its prediction, and the events of a forward and the begin of a backward."""
    run = Sharded(3, {"shared_memory": False})
    model = models.build(kind)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[models.Block])
    zero = run.zeros[0]
    for step in range(4):
        models.stack_loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = zero.memory()
    events = [f"{event.kind} {event.unit}" for event in zero.trace.step_events(3)]
    assert events == [f"{event.kind} {event.unit}" for event in zero.trace.predicted()]
    return memory.peak_bytes["transient"], memory.predicted_bytes["transient"], events


def test_a_unit_stays_only_if_a_forward_gathers_it_last() -> None:
    for peak, predicted, events in run_ranks(peaks, 2, MiddleLast, timeout_s=TIMEOUT_S):
        assert peak <= predicted
        assert events.count("gather middle") == events.count("release middle") == 2
        assert events.count("gather ") == 1
    for peak, predicted, events in run_ranks(peaks, 2, models.Stack, timeout_s=TIMEOUT_S):
        assert peak <= predicted
        assert events.count("gather blocks.2") == 1
