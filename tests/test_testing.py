"""`zeroshard.testing`: results by rank and by value, every way to fail, and no process left behind."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.processes import is_running
from zeroshard.testing import RankFailure, run_ranks


class Pair(NamedTuple):
    """A result with a tensor in a named tuple."""

    left: torch.Tensor
    right: int


@dataclasses.dataclass
class Box:
    """A result with a tensor in a dataclass."""

    content: torch.Tensor


def sum_of_ranks(offset: int) -> tuple[int, int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), total.item()


def nested_tensors() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "list": [torch.full((2, 3), float(rank)), {"bf16": torch.arange(3, dtype=torch.bfloat16)}],
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "scalar": torch.tensor(rank == 1),
        "complex": torch.tensor([1 + 2j]).conj(),
        "strided": torch.arange(6).reshape(2, 3).T,
        "pair": Pair(torch.tensor(7), rank),
        "box": Box(torch.tensor([0.5])),
        "graph": (torch.ones(2, requires_grad=True) * 3),
        "big": torch.full((3_000_000,), float(rank)),
    }


def tied_module_stays_tied(model: torch.nn.Module) -> tuple[bool, int, torch.nn.Module]:
    return model[0].weight is model[1].weight, sum(p.requires_grad for p in model.parameters()), model


def torchrun_environment() -> tuple[bool, int, int, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return before, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), total.item()


def raise_on(bad: int) -> int:
    if dist.get_rank() == bad:
        raise ValueError(f"no luck on rank {bad}")
    return dist.get_rank()


def raise_on_while_peers_wait(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError("gone before the collective")
    dist.all_reduce(torch.ones(1))


def hang_on(bad: int) -> int:
    if dist.get_rank() == bad:
        threading.Event().wait()
    return dist.get_rank()


def hang_after_a_failure() -> None:
    if dist.get_rank() == 0:
        raise ValueError("first")
    threading.Event().wait()


def kill_self_on(bad: int) -> int:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def leave_early() -> None:
    raise SystemExit(0)


def exit_hard() -> None:
    os._exit(3)


def leave_a_thread(bad: int) -> int:
    if dist.get_rank() == bad:
        threading.Thread(target=threading.Event().wait).start()
    return dist.get_rank()


def write_pid(folder: str, seconds: float) -> None:
    path = Path(folder, f"{os.environ['RANK']}.pid")
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(seconds)


def return_a_lock() -> Any:
    return threading.Lock()


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def wait_until(condition: Any, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank(world_size: int) -> None:
    total = float(sum(range(world_size)) + 10 * world_size)
    assert run_ranks(sum_of_ranks, world_size, 10) == [(rank, world_size, 1, total) for rank in range(world_size)]


def test_tensors_come_by_value_wherever_they_are_nested() -> None:
    for rank, result in enumerate(run_ranks(nested_tensors, 2)):
        first, inner = result["list"]
        assert torch.equal(first, torch.full((2, 3), float(rank)))
        assert inner["bf16"].dtype == torch.bfloat16 and inner["bf16"].tolist() == [0, 1, 2]
        assert result["empty"].shape == (0, 4) and result["empty"].dtype == torch.int64
        assert result["scalar"].shape == () and result["scalar"].item() is (rank == 1)
        assert result["complex"].item() == 1 - 2j
        assert result["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert result["pair"].left.item() == 7 and result["pair"].right == rank
        assert result["box"].content.item() == 0.5
        assert result["graph"].tolist() == [3, 3] and not result["graph"].requires_grad
        assert result["big"].sum().item() == 3_000_000 * rank
        result["big"][0] = 5.0  # writable, and nobody else's
        assert not result["big"].is_shared()


def test_a_module_goes_and_comes_back_with_its_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    is_tied, trainable, back = run_ranks(tied_module_stays_tied, 1, model)[0]
    assert is_tied and trainable == 2
    assert all(isinstance(p, torch.nn.Parameter) for p in back.parameters())
    assert {k: v.tolist() for k, v in back.state_dict().items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }


def test_without_a_process_group_ranks_have_torchruns_environment() -> None:
    assert run_ranks(torchrun_environment, 2, process_group=False) == [(False, 0, 2, 2.0), (False, 1, 2, 2.0)]


def test_an_exception_names_its_rank_and_keeps_the_other_results() -> None:
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*\[rank 1/3\] ValueError: no luck on rank 1") as e:
        run_ranks(raise_on, 3, 1)
    assert list(e.value.errors) == [1]
    error = e.value.errors[1]
    assert (error.type_name, error.message) == ("ValueError", "no luck on rank 1")
    assert "in raise_on" in error.traceback
    assert e.value.results == {0: 0, 2: 2}


def test_peers_in_a_collective_fail_with_the_rank_that_left() -> None:
    begin_s = time.monotonic()
    with pytest.raises(RankFailure) as e:
        run_ranks(raise_on_while_peers_wait, 2, 0, timeout_s=60.0, grace_s=20.0)
    assert time.monotonic() - begin_s < 15.0
    assert e.value.errors[0].type_name == "ValueError"
    assert e.value.errors[1].type_name == "RuntimeError"


def test_a_hang_is_killed_and_reported_with_its_stack() -> None:
    with pytest.raises(RankFailure) as e:
        run_ranks(hang_on, 2, 1, timeout_s=4.0)
    assert list(e.value.errors) == [1]
    error = e.value.errors[1]
    assert error.type_name == "TimeoutError" and "not finished 4 s after the start" in error.message
    assert "in hang_on" in error.traceback
    assert e.value.results == {0: 0}


def test_a_process_that_ends_as_its_stack_is_asked_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        real_kill(pid, signal.SIGKILL)
        raise ProcessLookupError(number)

    real_kill = os.kill
    monkeypatch.setattr("zeroshard.testing.os.kill", kill)
    with pytest.raises(RankFailure) as e:
        run_ranks(hang_on, 2, 1, timeout_s=4.0)
    assert list(e.value.errors) == [1] and e.value.results == {0: 0}


def test_the_others_get_a_grace_period_after_a_failure() -> None:
    begin_s = time.monotonic()
    with pytest.raises(RankFailure) as e:
        run_ranks(hang_after_a_failure, 2, timeout_s=60.0, grace_s=1.0)
    assert time.monotonic() - begin_s < 30.0
    assert list(e.value.errors) == [0, 1]
    assert "not finished 1 s after rank 0 failed" in e.value.errors[1].message


def test_a_killed_rank_is_reported_by_its_signal() -> None:
    with pytest.raises(RankFailure) as e:
        run_ranks(kill_self_on, 2, 1)
    assert list(e.value.errors) == [1]
    assert e.value.errors[1].type_name == "SIGKILL" and "signal 9" in e.value.errors[1].message


def test_leaving_early_is_a_failure_even_with_exit_code_zero() -> None:
    with pytest.raises(RankFailure) as e:
        run_ranks(leave_early, 1)
    assert e.value.errors[0].type_name == "SystemExit"


def test_an_exit_without_a_report_is_reported_by_its_code() -> None:
    with pytest.raises(RankFailure) as e:
        run_ranks(exit_hard, 1)
    assert e.value.errors[0].type_name == "ProcessExit" and "exit code 3" in e.value.errors[0].message


def test_a_thread_left_behind_is_a_failure() -> None:
    with pytest.raises(RankFailure) as e:
        run_ranks(leave_a_thread, 2, 0, timeout_s=4.0)
    assert list(e.value.errors) == [0]
    assert "its target returned, but its process is still running" in e.value.errors[0].message


def test_a_result_that_cannot_travel_is_the_ranks_error() -> None:
    with pytest.raises(RankFailure) as e:
        run_ranks(return_a_lock, 1)
    assert e.value.errors[0].type_name == "TypeError" and "lock" in e.value.errors[0].message


@pytest.mark.parametrize("seconds", [0.0, 600.0])
def test_no_process_is_left(tmp_path: Path, seconds: float) -> None:
    if seconds:
        with pytest.raises(RankFailure):
            run_ranks(write_pid, 2, str(tmp_path), seconds, timeout_s=4.0)
    else:
        run_ranks(write_pid, 2, str(tmp_path), seconds)
    pids = pids_in(tmp_path)
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def test_ranks_die_with_a_killed_caller(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from {__name__} import write_pid
        from zeroshard.testing import run_ranks
        run_ranks(write_pid, 2, {str(tmp_path)!r}, 600.0)
        """
    )
    caller = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert wait_until(lambda: len(pids_in(tmp_path)) == 2, 60.0)
        pids = pids_in(tmp_path)
        assert all(is_running(pid) for pid in pids)
    finally:
        caller.kill()
        caller.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 10.0)


def test_bad_arguments_are_refused_before_any_process_starts() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        run_ranks(leave_early, 0)
    with pytest.raises(ValueError, match="timeout_s must be a positive number of seconds, got 0"):
        run_ranks(leave_early, 1, timeout_s=0)
