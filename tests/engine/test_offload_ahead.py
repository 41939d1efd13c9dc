"""Parameters brought ahead of use by a thread: the bits of a resident run, errors, abandoned copies, forks.

Owns what the thread must not change. It runs here on a CPU, where the engine has no need of it: copies are slow, and
what they fill holds NaN until they are there. `tests/emulated` has streams, `tests/plan/test_offload_time.py` times.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import test_offload_states as runs
from tests.engine.test_offload_parameters import offload_at
from tests.oracle import TIMEOUT_S, assert_same
from tools.emulated import gpu
from zeroshard.store import ahead
from zeroshard.store.stores import FarStore
from zeroshard.testing import RankFailure, run_ranks

COPY_S = 0.003
Copy = Callable[[Tensor, Tensor], None]


@contextmanager
def slow(fail_at: int = 0, error: type[Exception] = RuntimeError) -> Iterator[list[int]]:
    """Bring parameters by the thread, late; yield the bytes of each copy.

    Args:
        fail_at: the number of the copy that fails; 0 for none.
    """
    brought, bring, copied = FarStore.brought, FarStore.bring, list[int]()

    def poisoned(store: FarStore, target: Tensor, source: Tensor, begin: Any, name: str) -> Any:
        target.fill_(torch.nan)
        return brought(store, target, source, begin, name)

    def late(store: FarStore, target: Tensor, source: Tensor) -> None:
        copied.append(target.nbytes)
        if len(copied) == fail_at:
            raise error("the copy failed")
        time.sleep(COPY_S)
        bring(store, target, source)

    with (
        patch.object(FarStore, "takes_time", True),
        patch.object(FarStore, "brought", poisoned),
        patch.object(FarStore, "bring", late),
    ):
        yield copied


def train(name: str) -> list[Any]:
    """Train with all on the device, with half of the parameters elsewhere, with all."""
    found: list[Any] = []
    is_alone = not dist.is_initialized()
    with nullcontext() if is_alone else gpu():
        for parameters in (None, 0.5, 1.0):
            with slow() if parameters else nullcontext([]) as copied:
                # Gradients and states stay: the copies are those of parameters.
                offload = None if parameters is None else offload_at(0.0, parameters)
                run = runs.build(name, runs.fused, 3, offload=offload)
                seen = runs.advance(name, run, range(4))
                # On one rank, what stays on the device is not gathered.
                events = [] if is_alone else [(one.kind, one.unit, one.nbytes) for one in run[2].trace.events]
                found.append([seen, runs.state_of(run), events])
                assert bool(copied) is (parameters is not None)
                run[2].check_copies()
    return found


@pytest.mark.product
@pytest.mark.parametrize(("name", "world"), [("leaves-out", 1), ("bf16", 1), ("accumulates", 2), ("leaves-out", 2)])
def test_copies_that_are_late_change_no_bit_and_no_order(name: str, world: int) -> None:
    for resident, *moved in run_ranks(train, world, name, timeout_s=2 * TIMEOUT_S, process_group=world > 1):
        for one in moved:
            assert_same(resident, one, name)


def break_off(what: str) -> list[Any]:
    """Train with an exception, an evaluation that is left early, or a fork while copies are under way."""
    run = runs.build("accumulates", runs.fused, 3, offload=offload_at(0.0, 1.0))
    model = run[0]
    with slow():
        seen = runs.advance("accumulates", run, range(2))

        def interrupt(module: Any, args: Any) -> None:
            if what == "a fork":
                if not (child := os.fork()):
                    os._exit(7)
                assert os.waitpid(child, 0)[1] == 7 << 8
            elif what:
                raise KeyError("of the program")

        handle = list(model.children())[1].register_forward_pre_hook(interrupt)
        for _ in range(2):
            try:
                with torch.no_grad() if what == "an evaluation" else nullcontext():
                    runs.models.stack_loss(model, 9, 0)
            except KeyError:
                pass
        handle.remove()
        run[1].zero_grad()
        return [*seen, *runs.advance("accumulates", run, range(2, 4)), runs.state_of(run)]


@pytest.mark.product
@pytest.mark.parametrize("what", ["an exception", "an evaluation", "a fork"])
def test_copies_that_nobody_uses_disturb_nothing(what: str) -> None:
    expected, found = (run_ranks(break_off, 1, one, process_group=False)[0] for one in ("", what))
    assert_same(expected, found)


def fail() -> list[str]:
    said = []
    run = runs.build("accumulates", runs.fused, 3, offload=offload_at(0.0, 1.0))
    with slow(fail_at=3):
        for _ in range(2):
            try:
                runs.advance("accumulates", run, range(1))
            except RuntimeError as error:
                said.append(str(error))
    return said


def test_a_copy_that_fails_is_an_error_wherever_the_values_are_used() -> None:
    (said,) = run_ranks(fail, 1, process_group=False)
    assert len(said) == 2
    for text in said:
        assert "[rank 0/1] The offloaded parameters of unit 'blocks" in text
        assert "the copy failed" in text


def fail_alone() -> None:
    with gpu(), slow(fail_at=3 if runs.rank_of() else 0):
        settings = {"watchdog_s": 2.0}
        run = runs.build("accumulates", runs.fused, 3, offload=offload_at(0.0, 1.0), **settings)
        runs.advance("accumulates", run, range(1))


def test_a_copy_that_fails_on_one_rank_is_named_on_the_others() -> None:
    with pytest.raises(RankFailure, match=r"\[rank 1/2\] The offloaded parameters of"):
        run_ranks(fail_alone, 2)


def test_a_copy_follows_what_was_queued_when_it_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [SimpleNamespace(wait=lambda: None) for _ in range(2)]
    lanes, count = list[Any](), iter(range(2))

    @contextmanager
    def lane(device: torch.device, name: str, after: Any) -> Iterator[None]:
        lanes.append((name, after))
        yield

    substitute = SimpleNamespace(mark_on=lambda _: marks[next(count)], lane=lane, begin_thread=lambda _: None)
    monkeypatch.setattr(ahead, "devices", substitute)
    done = list[str]()
    late = ahead.Ahead(torch.device("cpu")).begin(
        lambda: done.append("copy"), lambda: done.append("gather") or SimpleNamespace(wait=lambda: True), "a unit"
    )
    assert late.wait()
    assert done == ["copy", "gather"]
    assert lanes == [("back", marks[0]), ("readers", marks[1])]
