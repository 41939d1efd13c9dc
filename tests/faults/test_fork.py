"""Processes that a rank forks: they read and write as they like and end as they like, and no rank notices."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zeroshard as zs
from tests.oracle import STAGES
from zeroshard.testing import run_ranks

from .job import loss_of, make

CHILD_S = 45.0
"""How long a child may take to end."""
LATER = 7.0


def in_child(act: Callable[[], Any]) -> int:
    """Fork, run `act` in the child, and return its exit status as the kernel has it. A hang is SIGKILL's."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return status_of(child)


def status_of(child: int) -> int:
    """Wait for a child; kill one that does not end."""
    end_s = time.monotonic() + CHILD_S
    while time.monotonic() < end_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Scribbler(Dataset[Tensor]):
    """Data that overwrites all parameters while they are read, as a bug in a data set may do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        scribble(self.model)
        return torch.tensor(float(index))


def scribble(model: nn.Module) -> None:
    """Overwrite what can be reached of parameters, masters, gradients and what the engine keeps of them."""
    for number, tensor in enumerate(reachable(model)):
        tensor.fill_(LATER + number)
        assert tensor.eq(LATER + number).all()


def reachable(model: nn.Module) -> list[Tensor]:
    """Return every tensor that a user can write to, and the shards behind them."""
    found: list[Tensor] = []
    for parameter in model.parameters():
        bucket = parameter.__dict__["_zeroshard"].bucket
        with contextlib.suppress(RuntimeError):  # its values are released here
            found.append(parameter.data)
        found.append(bucket.shard)
        found += bucket.grads.tensors()
    return [tensor.detach() for tensor in found if tensor.is_floating_point()]


def train(stage: int, shared_memory: bool, disturb: Callable[..., None] | None) -> dict[str, Tensor]:
    """Train; between the parts of each step `disturb` is called. Return the parameters."""
    model, optimizer, zero = make(stage, shared_memory=shared_memory)
    rank = dist.get_rank()
    for step in range(3):
        loss = loss_of(model, step, rank)
        if disturb is not None and step == 1:
            disturb(model, zero)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return {name: value.clone() for name, value in model.state_dict().items()}


def write_in_children(model: nn.Module, zero: zs.Zero) -> None:
    """Have children of several kinds write to the model."""
    assert in_child(lambda: scribble(model)) == 0
    with zero.gathered():
        assert in_child(lambda: scribble(model)) == 0
        # A generator of its own: a loader draws a seed from torch's, on which the dropout masks depend.
        data = Scribbler(model)
        loader = DataLoader(data, num_workers=1, multiprocessing_context="fork", generator=torch.Generator())
        assert len(list(loader)) == len(data)
    process = multiprocessing.get_context("fork").Process(target=scribble, args=(model,))
    process.start()
    process.join(CHILD_S)
    assert process.exitcode == 0
    assert in_child(lambda: grandchild_sees(model)) == 0


def grandchild_sees(model: nn.Module) -> None:
    """Write in a child; its own child starts from that, and what it writes is its own again."""
    tensor = reachable(model)[-1]
    tensor.fill_(1.0)

    def look() -> None:
        assert tensor.eq(1.0).all(), "the values of the child are gone in the grandchild"
        tensor.fill_(2.0)

    assert in_child(look) == 0
    assert tensor.eq(1.0).all()


def train_both(stage: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [(train(stage, shared, None), train(stage, shared, write_in_children)) for shared in (True, False)]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_child_writes_reaches_no_rank(stage: int) -> None:
    for runs in run_ranks(train_both, 2, stage, timeout_s=120.0):
        for alone, disturbed in runs:
            for name, value in alone.items():
                assert torch.equal(value, disturbed[name]), name


def leave(model: nn.Module, zero: zs.Zero) -> None:
    """End as a program does at its end, with all that runs at exit."""
    raise SystemExit(0)


def fail(model: nn.Module, zero: zs.Zero) -> None:
    """End with an exception that nothing catches."""
    raise ValueError("planted in a child")


def drop(model: nn.Module, zero: zs.Zero) -> None:
    """Delete what the child inherited, and go on."""
    model.__dict__.clear()
    zero.__dict__.clear()
    gc.collect()
    os._exit(0)


def use(model: nn.Module, zero: zs.Zero) -> None:
    """Communicate, in each way there is, on behalf of the parent."""
    ways: dict[str, Callable[[], Any]] = {
        "agree": lambda: zero.agree(True),
        "gathered": lambda: zero.gathered().__enter__(),
        "step": zero.optimizers[0].step,
    }
    for name, way in ways.items():
        with pytest.raises(RuntimeError, match=r"\[rank ./2\] .* forked from") as raised:
            way()
        assert not isinstance(raised.value, zs.RankMismatchError), name
    os._exit(0)


ENDS = {leave: 0, fail: 1, drop: 0, use: 0}


def outlive_children(shared_memory: bool, ends: list[Callable[..., None]]) -> list[int]:
    """Train with children that end in all ways, each in the middle of a step; return their exit statuses."""
    model, optimizer, zero = make(3, shared_memory=shared_memory)
    statuses = []
    for step, end in enumerate(ends):
        loss = loss_of(model, step, zero.mesh.rank)
        if (child := os.fork()) == 0:
            end_as_main(lambda end=end: end(model, zero))
        statuses.append(status_of(child))
        # The watchdog's next signs of life: it would find what the child told.
        time.sleep(1.0)
        assert zero._engine.comm.watchdog is not None
        assert zero._engine.comm.watchdog.cause(is_closed=False) == ""
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return statuses


def end_as_main(act: Callable[[], None]) -> None:
    """Run `act` as the main program of this process, up to the end of the interpreter."""
    status = 0
    try:
        act()
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    # As at the end of a program: what is registered for it, and the destructors of process groups and stores.
    ctypes.pythonapi.Py_Exit(status)


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_no_rank_notices_how_a_child_ends(shared_memory: bool) -> None:
    for statuses in run_ranks(outlive_children, 2, shared_memory, list(ENDS), timeout_s=200.0):
        assert statuses == list(ENDS.values())
