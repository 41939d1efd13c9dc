"""Faults at one place of a pipeline, at each kind of action: every rank names the place and the micro-batch.

After an exception in user code, or with values that are no number, training goes on, and the next step is right. A rank
that is lost, by a signal or by an exception between computations, ends all ranks.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.rotation import third
from zeroshard.parallel.finite import Finite
from zeroshard.table.pipeline import Action, Kind, schedule_of
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.wire.mesh import Mesh

from .actions import watch_actions

TIMEOUT_S = 300
WATCHDOG_S = 60.0
PLACES, DATA, MICRO, DEPTH = 2, 2, 4, 8


class Fault:
    """Strikes on one rank in the forward or the backward of a block, or in a message, at one micro-batch of a step.

    Args:
        what: "raise", or "nan" for values that are no number.
        where: "loss", or the name of a kind of action.
    """

    def __init__(self, what: str, rank: int, where: str, micro_batch: int) -> None:
        self.what, self.rank, self.where, self.micro_batch = what, rank, where, micro_batch
        self.is_armed, self.count = False, 0

    def strike(self, rank: int, value: Tensor) -> Tensor:
        if self.is_armed and rank == self.rank:
            self.count += 1
            if self.count == self.micro_batch + 1:
                if self.what == "nan":
                    return value * float("nan")
                raise ArithmeticError(f"planted in the {self.where}")
        return value

    def hang(self, block: nn.Module, rank: int) -> None:
        if self.where == "forward":
            block.register_forward_hook(lambda module, args, output: self.strike(rank, output))
        elif self.where == "backward":

            def watch(module: nn.Module, args: Any, output: Tensor) -> None:
                if output.requires_grad:
                    output.register_hook(lambda grad: self.strike(rank, grad))

            block.register_forward_hook(watch)

    def spoil(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Change a message."""
        if self.is_armed and torch.distributed.get_rank() == self.rank and name_of(action.kind) == self.where:
            for tensor in tensors if action.micro_batch == self.micro_batch else ():
                tensor.data.fill_(float("nan"))  # no change that autograd sees


def name_of(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")


def batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    rows = range(MICRO)
    return (
        torch.cat([models.features(step, data, micro) for micro in rows]),
        torch.cat([models.targets(step, data, micro) for micro in rows]),
    )


def run(what: str, cases: list[tuple[str, int, str, int, str, int]]) -> list[Any]:
    mesh, found = init_device_mesh("cpu", (PLACES, DATA), mesh_dim_names=("pipe", "shard")), []
    faults: list[Fault] = []
    watch_actions(lambda action: None, lambda action, tensors: faults[-1].spoil(action, tensors))
    for schedule, stage, reduce, rank, where, micro_batch in cases:
        fault = Fault(what, rank, where, micro_batch)
        faults.append(fault)
        torch.manual_seed(7)
        model = models.Stack(depth=DEPTH)
        number = torch.distributed.get_rank()
        for place, block in ((0, model.blocks[1]), (1, model.blocks[6])):
            if rank // DATA == place:
                fault.hang(block, number)

        def loss(output: Tensor, target: Tensor, fault: Fault = fault, number: int = number) -> Tensor:
            loss = F.mse_loss(output, target)
            return fault.strike(number, loss) if fault.where == "loss" else loss

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = zs.Settings(watchdog_s=WATCHDOG_S)
        options = {"stage": stage, "settings": settings, "reduce": reduce, "loss": loss}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, schedule=schedule, **options)
        told, losses = [], []
        for step, is_armed in enumerate((True, False, True, False, False)):
            fault.is_armed, fault.count = is_armed, 0
            try:
                loss_of_step = pipe.step(*batch(step, pipe.zero.mesh.rank)).item()
                optimizer.step()
                losses.append(loss_of_step)
            except (ArithmeticError, RuntimeError) as error:
                told.append((type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))))
                assert what == "nan" or all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()
        pipe.zero.detach()
        found.append((told, losses, {name: p.detach() for name, p in model.named_parameters()}))
    return found


def plain() -> tuple[list[float], nn.Module]:
    torch.manual_seed(7)
    model, losses = models.Stack(depth=DEPTH), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 3, 4):
        total = sum(models.stack_loss(model, step, data, micro) for data in range(DATA) for micro in range(MICRO))
        loss = total / (DATA * MICRO)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


CASES = [
    (schedule, stage, reduce, rank, where, micro_batch)
    for number, (schedule, where) in enumerate(
        (schedule, where)
        for schedule in ("naive", "gpipe", "1f1b", "interleaved")
        for where in ("forward", "backward", "loss")
    )
    for stage in (number % 4, (number + 2) % 4)
    for reduce in (("last", "each")[(number + stage) % 2],)
    for rank, micro_batch in (((1, 0), (2, 1), (3, 3))[(number + stage) % 3],)
    if where != "loss" or rank >= DATA
]


def test_an_exception_at_one_place_is_one_error_on_all_ranks() -> None:
    losses, model = plain()
    expected = dict(model.named_parameters())
    cases = third(CASES)
    for rank, found in enumerate(run_ranks(run, PLACES * DATA, "raise", cases, timeout_s=TIMEOUT_S)):
        for case, (told, actual, parameters) in zip(cases, found, strict=True):
            assert len(told) == 2, (case, told)
            for kind, text, notes in told:
                if rank == case[3]:
                    assert (kind, text) == ("ArithmeticError", f"planted in the {case[4]}"), (case, text)
                    assert f"Micro-batch {case[5]}" in notes, (case, notes)
                else:
                    assert kind == "RankMismatchError", (case, kind, text)
                    assert f"[rank {case[3]}/4: pipe {case[3] // DATA}, shard {case[3] % DATA}]" in text, (case, text)
                    assert f"ArithmeticError: planted in the {case[4]}" in text, (case, text)
            assert actual == pytest.approx(losses, rel=1e-5), case
            for name, value in parameters.items():
                assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (case, name)


# -- values that are no number ----------------------------------------------------------------------------------------


SITES = (
    (0, Kind.FORWARD, "the activation of micro-batch {} from pipe 0"),
    (0, Kind.SEND_OUTPUT, "the activation of micro-batch {} from pipe 0"),
    (1, Kind.RECEIVE_INPUT, "the activation of micro-batch {} from pipe 0"),
    (1, Kind.FORWARD, "the loss of micro-batch {}"),
    (1, Kind.BACKWARD, "the gradient of micro-batch {} from pipe 1"),
    (1, Kind.SEND_GRADIENT, "the gradient of micro-batch {} from pipe 1"),
    (0, Kind.RECEIVE_GRADIENT, "the gradient of micro-batch {} from pipe 1"),
    (0, Kind.BACKWARD, ""),
)
"""Each kind of action at each place that has it, and the first value that it makes not finite."""
SPOILED = [
    (schedule, number % 4, ("last", "each")[number % 2], place * DATA + (number + shift) % 2, name_of(kind), number % 4)
    for shift, schedule in enumerate(("naive", "gpipe", "1f1b", "1f1b"))
    for number, (place, kind, _) in enumerate(SITES, shift)
]


def test_a_value_that_is_no_number_changes_nothing_and_its_place_is_named() -> None:
    losses, model = plain()
    expected, cases = dict(model.named_parameters()), third(SPOILED)
    texts = {(place, name_of(kind)): text for place, kind, text in SITES}
    for rank, found in enumerate(run_ranks(run, PLACES * DATA, "nan", cases, timeout_s=TIMEOUT_S)):
        for case, (told, actual, parameters) in zip(cases, found, strict=True):
            _, _, _, culprit, where, micro_batch = case
            assert len(told) == 2, (case, told)
            for kind, text, _ in told:
                assert kind == "RuntimeError", (case, kind, text)
                assert text.startswith(f"[rank {rank}/4: pipe {rank // DATA}, shard {rank % DATA}] The gradient of '")
                assert "is not finite; nothing was changed on any rank." in text, (case, text)
                if first := texts[culprit // DATA, where].format(micro_batch):
                    assert f"The first value of the step that was not finite was {first}, seen by [rank " in text, case
                    assert f"shard {culprit % DATA}]. " in text, (case, text)
                else:
                    # Of the backward of the first chunk only gradients of parameters come.
                    assert re.search(r"The gradient of '(stem|blocks\.[01])\.", text), (case, text)
                    assert "it came from a backward at the place of this parameter." in text, (case, text)
            assert actual == pytest.approx(losses, rel=1e-5), case
            for name, value in parameters.items():
                assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (case, name)


def overflow(stage: int) -> list[Any]:
    """Train in fp16; the loss of one rank is NaN in the second step. Runs on a rank."""
    mesh, fault = init_device_mesh("cpu", (PLACES, DATA), mesh_dim_names=("pipe", "shard")), Fault("nan", 3, "loss", 1)
    torch.manual_seed(7)
    model, number = models.Stack(depth=DEPTH), torch.distributed.get_rank()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return fault.strike(number, F.mse_loss(output.float(), target))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"stage": stage, "settings": zs.Settings(watchdog_s=WATCHDOG_S), "precision": "fp16", "loss": loss}
    pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, **options)
    scales, changes = [], []
    for step in range(3):
        fault.is_armed, fault.count = step == 1, 0
        with pipe.zero.gathered():
            before = [p.detach().clone() for p in model.parameters()]
        pipe.step(*batch(step, pipe.zero.mesh.rank))
        optimizer.step()
        optimizer.zero_grad()
        with pipe.zero.gathered():
            changes.append(not all(map(torch.equal, before, model.parameters())))
        scales.append(pipe.zero.loss_scale)
    return [scales, changes]


@pytest.mark.parametrize("stage", [1])
def test_with_fp16_all_places_skip_the_step(stage: int) -> None:
    for scales, changes in run_ranks(overflow, PLACES * DATA, stage, timeout_s=TIMEOUT_S):
        assert changes == [True, False, True], changes
        assert scales == [65536.0, 32768.0, 32768.0], scales


# -- ranks that are lost ----------------------------------------------------------------------------------------------


HEARTBEAT_S = 2.0
PROMISED_S = {"raise": 2.0, "kill": 3.0, "stop": HEARTBEAT_S + 1.0}
"""Of docs/reliability.md, until all others have named the cause."""
LOST_AT = 1
"""The micro-batch."""
WAITED_FOR = {
    (0, Kind.FORWARD): "the activation of micro-batch 1 from pipe 0",
    (0, Kind.SEND_OUTPUT): "the activation of micro-batch 1 from pipe 0",
    # In "1f1b" the first of two places is one micro-batch ahead.
    (0, Kind.RECEIVE_GRADIENT): "the activation of micro-batch 3 from pipe 0",
    (0, Kind.BACKWARD): "the activation of micro-batch 3 from pipe 0",
}
"""What the other place waits for when a rank is lost; "the gradient of micro-batch 1 from pipe 1" for other actions."""
CAUSES = {
    "raise": "ArithmeticError: planted",
    "kill": "its process exited without reporting an error (a signal, a crash, os._exit); it was last seen to be: ",
    "stop": f"no sign of life for {HEARTBEAT_S:g} s; last: ",
}


def lose(folder: str, what: str, rank: int, kind: Kind, stage: int) -> None:
    """Train; a rank is lost in its third step. What ranks print goes to files. Runs on a rank."""
    number = torch.distributed.get_rank()
    os.dup2(os.open(f"{folder}/{number}.err", os.O_WRONLY | os.O_CREAT), 2)
    is_armed = False

    def strike(action: Action) -> None:
        if not (is_armed and number == rank and (action.kind, action.micro_batch) == (kind, LOST_AT)):
            return
        time.sleep(HEARTBEAT_S / 2)  # so that its last heartbeat tells what it does
        Path(folder, "lost").write_text(repr(time.time()))
        if what == "raise":
            raise ArithmeticError("planted")
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    watch_actions(strike)
    mesh = init_device_mesh("cpu", (PLACES, DATA), mesh_dim_names=("pipe", "shard"))
    model = models.Stack(depth=DEPTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"settings": zs.Settings(watchdog_s=40.0, heartbeat_s=HEARTBEAT_S), "stage": stage, "loss": F.mse_loss}
    pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, **options)
    for step in range(4):
        is_armed = step == 2
        pipe.step(*batch(step, pipe.zero.mesh.rank))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("site", range(len(SITES)))
@pytest.mark.parametrize("what", ["raise", "kill", "stop"])
def test_a_rank_that_is_lost_is_named_with_its_place_and_micro_batch(tmp_path: Path, what: str, site: int) -> None:
    place, kind, _ = SITES[site]
    culprit = place * DATA + (site + len(what)) % DATA
    neighbour = (1 - place) * DATA + culprit % DATA
    grace_s = {"raise": 5.0, "kill": PROMISED_S["kill"], "stop": 1.0}[what]
    with pytest.raises(RankFailure) as failure:
        arguments = (str(tmp_path), what, culprit, kind, site % 4)
        run_ranks(lose, PLACES * DATA, *arguments, timeout_s=30.0, grace_s=grace_s)
    began, errors = float((tmp_path / "lost").read_text()), failure.value.errors
    ends = {"raise": "ArithmeticError", "kill": "SIGKILL", "stop": "TimeoutError"}
    assert errors.pop(culprit).type_name == ends[what]
    assert len(errors) == PLACES * DATA - 1
    # A message is received by the computation that needs it, and gradients are sent when a backward has them.
    computes = {Kind.RECEIVE_INPUT: Kind.FORWARD, Kind.RECEIVE_GRADIENT: Kind.BACKWARD}.get(kind, kind)
    if what != "raise" and kind is Kind.SEND_GRADIENT:
        computes = Kind.BACKWARD
    for rank, error in errors.items():
        said = tmp_path / f"{rank}.err"
        text = f"{error.message}{said.read_text()}"
        assert f"rank {culprit}: {CAUSES[what]}" in text, text
        assert f"{name_of(computes)} of chunk {place}, micro-batch {LOST_AT}" in text, text
        if rank == neighbour:
            awaited = WAITED_FOR.get((place, kind), f"the gradient of micro-batch {LOST_AT} from pipe 1")
            # On a busy machine the neighbour may be late, and a stopped process sends nothing that was not taken.
            until = re.sub(r"micro-batch (\d)", r"micro-batch [0-\1]", awaited)
            assert re.search(f"wait(s|ed) for {until}", text), text
        assert said.stat().st_mtime - began <= PROMISED_S[what], said.stat().st_mtime - began


def test_the_first_value_of_all_steps_of_an_accumulation_is_named() -> None:
    mesh = Mesh(0, 2, 0, torch.device("cpu"), (("pipe", 2),)).at_place()
    finite, fine = Finite(mesh, schedule_of("gpipe", 2, 4)), torch.full((2,), torch.inf)
    finite.keep(torch.tensor([torch.inf, 5.0]), is_last=False)
    finite.keep(fine, is_last=True)
    text = "was the activation of micro-batch 1 from pipe 0, seen by [rank 1/2]. "
    assert finite.told().endswith(text), finite.told()
    finite.keep(fine, is_last=True)  # the next accumulation
    assert finite.told().startswith("All messages between places were finite")
