"""An exception on one rank, wherever it is raised, ends all ranks within two seconds, and each says what it was."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tools.emulated import gpu
from zeroshard.checkpoint import files
from zeroshard.testing import RankFailure, run_ranks

from .job import Net, loss_of, make

LIMIT_S = 2.0
WORLD = 3


class PlantedError(Exception):
    """What one rank raises."""


class Fault:
    """Raises on one rank, once, at one place, and notes when."""

    def __init__(self, point: str, folder: Path, culprit: int) -> None:
        self._point, self._folder, self._is_mine = point, folder, dist.get_rank() == culprit

    def at(self, point: str) -> None:
        """Raise, if this is the place."""
        if self._is_mine and point == self._point:
            self._is_mine = False
            (self._folder / "raised").write_text(repr(time.monotonic()))
            raise PlantedError(f"planted at {point}")

    def hook(self, point: str) -> Callable[..., None]:
        """Return a hook that raises at a place."""
        return lambda *args, **kwargs: self.at(point)

    @contextlib.contextmanager
    def in_files(self, operation: str, point: str) -> Iterator[None]:
        """Have a file operation raise inside the context."""
        original = getattr(files, operation)

        def raising(*args: Any) -> Any:
            self.at(point)
            return original(*args)

        setattr(files, operation, raising)
        yield
        setattr(files, operation, original)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero, number: int, fault: Fault) -> None:
    """Take a step of two micro-batches, with the places of user code in it."""
    rank = zero.mesh.rank
    with zero.no_sync():
        fault.at("preparing a batch")
        loss_of(model, 2 * number, rank).backward()
        fault.at("user code under no_sync")
    loss = loss_of(model, 2 * number + 1, rank)
    loss.register_hook(fault.hook("the gradient of the loss"))
    fault.at("user code after the loss")
    loss.backward()
    fault.at("user code after backward")
    zero.grad_norm()
    fault.at("user code after a norm")
    optimizer.step()
    optimizer.zero_grad()
    fault.at("user code after a step")


def use_everything(folder: str, point: str, culprit: int, stage: int) -> None:
    """Do all that a training does, with one rank raising at one point of it. Runs on a rank."""
    fault = Fault(point, Path(folder), culprit)
    model, optimizer, zero = make(stage)
    plant(model, optimizer, fault)
    average = zero.ema(0.9)
    for number in range(2):
        step(model, optimizer, zero, number, fault)
        average.update()
    fault.at("user code after an average")
    with torch.no_grad():
        loss_of(model.eval(), 50, zero.mesh.rank)
        fault.at("user code after an evaluation")
    with average.swapped():
        fault.at("user code under an average")
    with zero.gathered(states=True):
        fault.at("user code under gathered")
    with zero.gathered(writeback=True):
        fault.at("user code under gathered(writeback=True)")
    extra = {"step": object() if point == "what is to be saved" and zero.mesh.rank == culprit else 2}
    if isinstance(extra["step"], object) and not isinstance(extra["step"], int):
        (Path(folder) / "raised").write_text(repr(time.monotonic()))
    with (
        fault.in_files("write", "writing a checkpoint"),
        fault.in_files("sync", "flushing a checkpoint"),
        fault.in_files("rename", "committing a checkpoint"),
    ):
        path = zero.save(f"{folder}/step-2", extra=extra)
    fault.at("user code after a save")
    with fault.in_files("read_at", "reading a checkpoint"):
        zero.load(path)
    dist.barrier()


def plant(model: Net, optimizer: torch.optim.Optimizer, fault: Fault) -> None:
    """Hang the places inside passes and updates."""
    model.register_forward_pre_hook(fault.hook("the beginning of the forward"))
    model.blocks[1].register_forward_pre_hook(fault.hook("the forward of a block"))
    model.blocks[1][2].register_forward_hook(fault.hook("the end of a layer"))
    model.blocks[1][0].register_full_backward_hook(fault.hook("the backward of a layer"))
    model.blocks[0][0].weight.register_hook(fault.hook("the gradient of a parameter"))
    optimizer.register_step_pre_hook(fault.hook("the beginning of an update"))
    optimizer.register_step_post_hook(fault.hook("the end of an update"))
    inner = model.blocks[2].forward
    model.blocks[2].forward = lambda x: checkpoint(recomputed, inner, x, fault, use_reentrant=False)


def recomputed(inner: Callable[..., torch.Tensor], x: torch.Tensor, fault: Fault) -> torch.Tensor:
    if torch._C._current_graph_task_id() != -1:
        fault.at("a recomputation")
    return inner(x)


POINTS = (
    "preparing a batch",
    "the beginning of the forward",
    "the forward of a block",
    "the end of a layer",
    "user code after the loss",
    "the gradient of the loss",
    "the backward of a layer",
    "a recomputation",
    "the gradient of a parameter",
    "user code under no_sync",
    "user code after backward",
    "user code after a norm",
    "the beginning of an update",
    "the end of an update",
    "user code after a step",
    "user code after an average",
    "user code under an average",
    "user code after an evaluation",
    "user code under gathered",
    "user code under gathered(writeback=True)",
    "what is to be saved",
    "writing a checkpoint",
    "flushing a checkpoint",
    "committing a checkpoint",
    "user code after a save",
    "reading a checkpoint",
)


@pytest.mark.product
@pytest.mark.parametrize("point", POINTS)
def test_all_ranks_end_with_the_cause(tmp_path: Path, point: str) -> None:
    number = POINTS.index(point)
    # Only rank 0 commits.
    culprit = 0 if point == "committing a checkpoint" else number % WORLD
    with pytest.raises(RankFailure) as failure:
        run_ranks(use_everything, WORLD, str(tmp_path), point, culprit, number % 4, timeout_s=40.0)
    seconds = time.monotonic() - float((tmp_path / "raised").read_text())
    errors = failure.value.errors
    assert set(errors) == set(range(WORLD)), failure.value
    cause = f"planted at {point}" if point != "what is to be saved" else "extra['step']"
    for rank, error in errors.items():
        assert error.type_name in ("PlantedError", "RankMismatchError", "CheckpointError"), (rank, error)
        assert cause in error.message, (rank, error.message)
    assert seconds <= LIMIT_S, f"{seconds:.1f} s"


def test_without_a_fault_nothing_is_raised(tmp_path: Path) -> None:
    assert run_ranks(use_everything, WORLD, str(tmp_path), "nowhere", 0, 3, timeout_s=40.0) == [None] * WORLD
    assert not (tmp_path / "raised").exists()


def raise_on_the_host_of_the_store(port: int) -> None:
    """Join without a launcher, so that rank 0 holds the store; it raises while the others wait. Runs on a rank."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    model, optimizer, zero = make(3)
    for number in range(3):
        if number == 2 and zero.mesh.rank == 0:
            raise PlantedError("planted where the store is")
        loss_of(model, number, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_all_ranks_end_with_the_cause_of_the_one_that_holds_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_on_the_host_of_the_store, WORLD, port, process_group=False, timeout_s=40.0)
    errors = failure.value.errors
    assert set(errors) == set(range(WORLD)), failure.value
    for error in errors.values():
        assert "planted where the store is" in error.message, error


def raise_beside_a_device(folder: str, culprit: int) -> None:
    """Train on emulated GPUs, of which one rank raises in a block: the devices of the others hang. Runs on a rank."""
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    with gpu():
        fault = Fault("the forward of a block", Path(folder), culprit)
        model, optimizer, _ = make(3, heartbeat_s=2.0)
        for number in range(4):
            if number == 2:
                model.blocks[1].register_forward_pre_hook(fault.hook("the forward of a block"))
            loss_of(model, number, rank).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("culprit", [0, 2])
def test_ranks_whose_devices_hang_end_with_the_cause(tmp_path: Path, culprit: int) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_beside_a_device, WORLD, str(tmp_path), culprit, timeout_s=40.0)
    seconds = time.monotonic() - float((tmp_path / "raised").read_text())
    errors = failure.value.errors
    assert errors.pop(culprit).type_name == "PlantedError"
    assert len(errors) == WORLD - 1
    for rank, error in errors.items():
        said = f"{error.message}{(tmp_path / f'{rank}.err').read_text()}"
        assert f"rank {culprit}: PlantedError: planted at the forward of a block" in said, (error, said)
    assert seconds <= LIMIT_S, f"{seconds:.1f} s"
