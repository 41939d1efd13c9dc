"""Threads beside the training: a read of released parameters is refused there, and the training goes on."""

import threading

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from zeroshard.testing import run_ranks


def beside(run: object, *arguments: object) -> None:
    """Run a function on a thread of its own, to its end."""
    thread = threading.Thread(target=run, args=arguments)  # type: ignore[arg-type]
    thread.start()
    thread.join()


class Watched(models.Stack):
    """Has a thread read the last block's parameters, which are released, in the forward of the first one."""

    is_watched = False

    def forward(self, x: Tensor) -> Tensor:
        self.found: list[str] = []
        if self.is_watched:
            handle = self.blocks[0].up.register_forward_hook(lambda *_: beside(self.read))
        out = super().forward(x)
        if self.is_watched:
            handle.remove()
        return out

    def read(self) -> None:
        try:
            self.blocks[-1].up.weight.sum().item()
        except RuntimeError as error:
            self.found.append(str(error))


def train(is_watched: bool, is_shared: bool) -> tuple[list[str], float]:
    """Train at stage 3; return what the thread was told in the last step, and the loss."""
    model = models.build(Watched)
    optimizer = models.adamw(model)
    settings = zs.Settings(shared_memory=is_shared)
    zs.shard(model, optimizer, stage=3, units=[models.Block], settings=settings)
    model.is_watched = is_watched
    for step in range(4):
        loss = models.stack_loss(model, step, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.found, loss.item()


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_thread_that_reads_in_a_forward_is_refused(is_shared: bool) -> None:
    expected = run_ranks(train, 2, False, is_shared)
    for (told, loss), (_, wanted) in zip(run_ranks(train, 2, True, is_shared), expected, strict=True):
        assert ["sharded and released here" in one for one in told] == [True]
        assert loss == wanted


class Threaded(nn.Module):
    """Runs each of its branches on a thread of its own, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, is_threaded: bool) -> Tensor:
        found: list[Tensor] = []
        for branch in self.branches:
            if is_threaded:
                beside(lambda branch=branch: found.append(branch(x)))
            else:
                found.append(branch(x))
        return torch.stack(found).sum()


def losses(is_threaded: bool) -> list[float]:
    torch.manual_seed(0)
    model = Threaded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=3, units=[nn.Linear])
    found = []
    for _ in range(4):
        loss = model(torch.ones(2, 4), is_threaded)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_forward_may_run_modules_on_threads() -> None:
    assert run_ranks(losses, 2, True) == run_ranks(losses, 2, False)
