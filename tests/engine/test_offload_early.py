"""Updates on the host that go on after `step()`: the bits of updates that `step()` has finished.

Owns what may happen meanwhile. On a CPU nothing is hidden by it, so tests switch it on; the thread is made to wait
where a test is about what comes too early.
"""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.engine import test_offload_states as runs
from tests.oracle import TIMEOUT_S, assert_same
from zeroshard.testing import run_ranks
from zeroshard.update import background

OFFLOADS = (zs.Offload(), zs.Offload(parameters=1.0), zs.Offload(states=0.5, parameters=0.3))


@contextmanager
def in_background(delay_s: float = 0.002) -> Iterator[list[int]]:
    """Update in the background; each unit's update begins late. Yields the units whose update is over."""
    plain, ended = background._Run._update, list[int]()

    def update(self: Any, unit: int, entries: Any) -> None:
        time.sleep(delay_s)
        plain(self, unit, entries)
        ended.append(unit)

    with (
        patch.object(background, "is_worthwhile", lambda device: True),
        patch.object(background._Run, "_update", update),
    ):
        yield ended


def train(name: str, is_early: bool) -> list[Any]:
    found = []
    for offload in OFFLOADS:
        with in_background() if is_early else patch.object(background, "is_worthwhile", lambda device: False):
            run = runs.build(name, runs.fused, 3, offload=offload)
            assert (run[2]._sharded[0].source is not None) is is_early
            found.append([runs.advance(name, run, range(4)), runs.state_of(run)])
            run[2].check_copies()
    return found


@pytest.mark.product
@pytest.mark.parametrize(("name", "world"), [("accumulates", 2), ("leaves-out", 3), ("overflows", 1), ("bf16", 2)])
def test_updates_in_the_background_are_the_same(name: str, world: int) -> None:
    expected = run_ranks(train, world, name, False, timeout_s=2 * TIMEOUT_S, process_group=world > 1)
    assert_same(expected, run_ranks(train, world, name, True, timeout_s=2 * TIMEOUT_S, process_group=world > 1))


def build(parameters: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer, zs.Zero]:
    return runs.build("accumulates", runs.fused, 3, offload=zs.Offload(parameters=parameters))


def begin(run: tuple[nn.Module, torch.optim.Optimizer, zs.Zero], step: int = 0) -> None:
    """Make a step whose update continues in the background."""
    model, optimizer, _ = run
    models.stack_loss(model, step, runs.rank_of()).backward()
    optimizer.step()


def wait_for(what: str) -> tuple[bool, bool]:
    """Ask for something while the last unit has not been updated; tell whether all had been before, and after."""
    with in_background(0.03) as ended:
        run = model, optimizer, zero = build()
        begin(run)
        slices = [master for group in optimizer.param_groups for master in group["params"]]
        len(optimizer.state)
        ended.clear()
        begin(run, 1)
        units, before = len(zero.units), len(ended)
        if what == "states":
            assert all("exp_avg" in state for state in optimizer.state.values())
        elif what == "a slice":
            slices[-1].detach().clone()
        elif what == "a change of gradients":
            for p in model.parameters():
                p.grad.zero_()
        elif what == "another step":
            begin(run, 2)
        elif what == "gathered":
            with zero.gathered():
                pass
        elif what == "memory":
            zero.memory()
        elif what == "a fork":
            if not (child := os.fork()):
                os._exit(len(ended) < units)
            assert os.waitpid(child, 0)[1] == 0
        elif what == "a scheduler and zero_grad":
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
            optimizer.param_groups[0]["lr"] = 1.0
            optimizer.zero_grad()
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        elif what == "a forward of another kind":
            with torch.no_grad():
                model(models.features(3, 0))
        return before < units, len(ended) >= units


@pytest.mark.product
@pytest.mark.parametrize(
    "what", ["states", "a slice", "a change of gradients", "another step", "gathered", "memory", "a fork"]
)
def test_who_reads_or_changes_what_is_updated_waits(what: str) -> None:
    assert run_ranks(wait_for, 1, what, process_group=False) == [(True, True)]


def test_who_does_not_goes_on() -> None:
    assert run_ranks(wait_for, 1, "a scheduler and zero_grad", process_group=False) == [(True, False)]


def change_rates(is_early: bool) -> Any:
    with in_background(0.01) if is_early else patch.object(background, "is_worthwhile", lambda device: False):
        run = _, optimizer, _ = build(0.4)
        rate = torch.tensor(0.01)
        optimizer.param_groups[0]["lr"] = rate
        for step in range(3):
            begin(run, step)
            # Neither a rate that is replaced nor one that is changed in place is one of the step before.
            optimizer.param_groups[0]["betas"] = (0.5, 0.5 + step / 10)
            rate.mul_(0.1)
            optimizer.zero_grad()
        return runs.state_of(run)


def test_rates_that_change_afterwards_count_from_the_next_step_on() -> None:
    for world in (1, 2):
        expected = run_ranks(change_rates, world, False, process_group=world > 1)
        assert_same(expected, run_ranks(change_rates, world, True, process_group=world > 1))


def each_unit_waits_for_its_own() -> list[tuple[int, list[int]]]:
    """Return, of each unit in the order of a forward, which units had been updated as its module began."""
    with in_background(0.03) as ended:
        run = model, _, zero = build()
        begin(run)
        seen: list[tuple[int, list[int]]] = []
        for number, unit in enumerate(zero.units[1:], 1):
            block = unit.parameters[0]
            module = next(m for m in model.modules() if any(p is block for p in m.parameters(recurse=False)))
            module.register_forward_pre_hook(lambda *_, n=number: seen.append((n, list(ended))))
        begin(run, 1)
        return seen


def test_each_unit_waits_for_its_own_update() -> None:
    (seen,) = run_ranks(each_unit_waits_for_its_own, 1, process_group=False)
    assert len(seen) > 2
    assert all(number in ended for number, ended in seen)
    assert len(seen[0][1]) < len(seen[-1][1])


def fail() -> list[str]:
    """Have the update fail on the last rank, as memory ends; return what is raised, by what is asked."""
    plain, said = background._Run._update, []

    def update(self: Any, unit: int, entries: Any) -> None:
        if unit == 1 and runs.rank_of() == max(0, (dist.get_world_size() if dist.is_initialized() else 1) - 1):
            with patch.object(background, "body_of", side_effect=MemoryError("no memory is left")):
                plain(self, unit, entries)
        else:
            plain(self, unit, entries)

    with patch.object(background, "is_worthwhile", lambda device: True):
        run = _, optimizer, zero = build()
        begin(run)
        optimizer.zero_grad()
        with patch.object(background._Run, "_update", update):
            begin(run, 1)
            optimizer.zero_grad()
            for ask in (lambda: begin(run, 2), lambda: begin(run, 3), lambda: zero.save("/nowhere")):
                try:
                    ask()
                except RuntimeError as error:
                    said.append(str(error))
    return said


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_an_update_that_fails_is_one_error_on_all_ranks(world: int) -> None:
    for rank, said in enumerate(run_ranks(fail, world, process_group=world > 1)):
        assert len(said) == 3
        assert all("failed after optimizer.step() had returned" in text for text in said)
        assert all(("rank 1: " in text) is (world > 1) for text in said), rank
        assert all("MemoryError: no memory is left" in text for text in said)


def end_with_a_step(fails: bool) -> None:
    """End the interpreter while a model is updated."""
    plain = background._Run._update

    def update(self: Any, unit: int, entries: Any) -> None:
        time.sleep(0.1)
        if fails:
            with patch.object(background, "body_of", side_effect=MemoryError("no memory is left")):
                plain(self, unit, entries)
        else:
            plain(self, unit, entries)

    with (
        patch.object(background, "is_worthwhile", lambda device: True),
        patch.object(background._Run, "_update", update),
    ):
        begin(build())
    print("made")


@pytest.mark.product
@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_program_waits_and_tells_of_an_error(fails: bool) -> None:
    code = f"from tests.engine import test_offload_early as t; t.end_with_a_step({fails})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "made\n"
    assert done.returncode == int(fails), done.stderr
    assert ("an update in the background failed: MemoryError" in done.stderr) is fails


def let_go() -> list[bool]:
    """Delete a model while it is updated."""
    with in_background(0.05):
        run = model, optimizer, zero = build()
        begin(run)
        thread = next(one for one in threading.enumerate() if one.name.startswith("zeroshard-update"))
        gone = [weakref.ref(model), weakref.ref(zero._engine)]
        del run, model, optimizer, zero
        gc.collect()
        while thread.is_alive():
            time.sleep(0.01)
            gc.collect()
        return [one() is None for one in gone]


def test_a_model_that_is_deleted_meanwhile_goes_with_its_thread() -> None:
    assert run_ranks(let_go, 1, process_group=False) == [[True, True]]


def save(folder: Path) -> Any:
    with in_background(0.02):
        run = build(0.5)
        begin(run)
        run[2].save(folder / "a")
        begin(run, 1)
        run[2].save(folder / "b", asynchronous=True)
        run[2].wait()
        saved = runs.state_of(run)
    plain = runs.build("accumulates", runs.fused, 3)
    plain[2].load(folder / "b")
    return saved, runs.state_of(plain)


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_waits_for_the_update(world: int, tmp_path: Path) -> None:
    for saved, loaded in run_ranks(save, world, tmp_path, process_group=world > 1):
        assert_same(saved, loaded)
