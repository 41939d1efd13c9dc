"""States in files: pieces that begin and end inside parameters, disks that fail, fill up or are none, and kills.

Owns what only files have; `test_offload_states.py` has what all offload has in common.
"""

import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.errors import raised
from tests.oracle import assert_same, randn
from zeroshard.core.slot import slot_of
from zeroshard.store import file_calls
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.update.streamed import Chunk

WIDTH = 160
STAGING_BYTES = 1 << 18
"""Of which a piece is less than a quarter of a weight."""

adamw = functools.partial(models.adamw, fused=True)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw-looped": functools.partial(models.adamw, foreach=False, fused=False),
    "sgd": models.sgd,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5, fused=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), foreach=False),
    "amsgrad": functools.partial(models.adamw, amsgrad=True, fused=True),
}


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def in_files(folder: str | Path, **options: Any) -> zs.Offload:
    return zs.Offload(**{"to": folder, "staging_bytes": STAGING_BYTES, **options})


def build(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, Any, zs.Zero]:
    model = models.build(models.Even, 2, WIDTH)
    optimizer = make(model)
    return model, optimizer, zs.shard(model, optimizer, **{"settings": zs.Settings(watchdog_s=5), **options})


def advance(run: tuple[nn.Module, Any, zs.Zero], steps: range) -> list[torch.Tensor]:
    model, optimizer, _ = run
    losses = []
    for step in steps:
        loss = model(randn(4, WIDTH, key=(step, rank_of()))).square().mean()
        loss.backward()
        if step == 1:
            model.blocks[0].first.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole(run: tuple[nn.Module, Any, zs.Zero]) -> list[Any]:
    with run[2].gathered(states=True):
        state = {
            k: {key: torch.as_tensor(v).clone() for key, v in one.items()}
            for k, one in run[1].state_dict()["state"].items()
        }
        return [*(p.detach().clone() for p in run[0].parameters()), state]


def both(name: str, stage: int, fraction: float, precision: str) -> tuple[Any, Any, int]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"stage": stage, "precision": precision}
        resident = build(OPTIMIZERS[name], **options)
        filed = build(OPTIMIZERS[name], offload=in_files(folder, states=fraction), **options)
        pieces = 0
        begin = Chunk.start

        def counted(chunk: Chunk) -> None:
            nonlocal pieces
            pieces += 1
            begin(chunk)

        Chunk.start = counted  # type: ignore[method-assign]
        found = [(advance(run, range(4)), whole(run)) for run in (resident, filed)]
        source = filed[2]._sharded[0].source
        assert source is not None
        assert source.staging_bytes <= STAGING_BYTES
        assert os.listdir(folder) == []
        return found[0], found[1], pieces


LAYOUTS = ((1, 3, 1.0), (2, 1, 1.0), (3, 3, 0.4), (2, 2, 0.7))


# Each optimizer on two of the layouts, in turn.
@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "world", "stage", "fraction"),
    [(name, *LAYOUTS[(place + shift) % 4]) for place, name in enumerate(OPTIMIZERS) for shift in (0, 2)],
)
def test_pieces_cut_parameters_and_change_no_bit(name: str, world: int, stage: int, fraction: float) -> None:
    precision = "bf16" if world == 2 else "fp32"
    for resident, filed, pieces in run_ranks(both, world, name, stage, fraction, precision, process_group=world > 1):
        assert_same(resident, filed)
        assert pieces > 4 * 4 // world


# -- disks that fail --------------------------------------------------------------------------------------------------


def fail_at(folder: str, operation: str, number: int, failure: str, rank: int, options: dict[str, Any]) -> list[str]:
    """Train while the n-th read or write of one rank's file fails; return the errors of training and of a save."""
    run = build(adamw, offload=in_files(folder, **options), stage=3)
    advance(run, range(2))
    run[2].save(Path(folder) / "step-2")
    original, count = getattr(file_calls, operation), 0

    def act(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count != number:
            return original(descriptor, data, offset)
        if failure == "short":
            return 17
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if rank_of() == rank:
        setattr(file_calls, operation, act)
    said = []
    for attempt in (lambda: advance(run, range(2, 4)), lambda: run[2].save(Path(folder) / "step-4")):
        try:
            attempt()
        except RuntimeError as error:
            said.append(str(error))
    setattr(file_calls, operation, original)
    again = build(adamw, stage=3)
    assert again[2].load(zs.latest(folder)).step == 2
    return said


@pytest.mark.product
@pytest.mark.parametrize("failure", ["short", "EIO"])
@pytest.mark.parametrize(("operation", "number"), [("read_at", 1), ("read_at", 7), ("write_at", 1), ("write_at", 9)])
def test_a_failing_disk_is_one_error_on_all_ranks(tmp_path: Path, operation: str, number: int, failure: str) -> None:
    for said in run_ranks(fail_at, 2, str(tmp_path), operation, number, failure, 1, {}):
        assert len(said) == 2
        assert "rank 1: " in said[0]
        assert ("Input/output error" in said[0]) is (failure == "EIO")
        assert str(tmp_path) in said[0]
        assert "resume from it" in said[0]
        assert "resume from it" in said[1]  # a save of what is left is refused


@pytest.mark.product
@pytest.mark.parametrize("failure", ["short", "EIO"])
@pytest.mark.parametrize("states", [0.0, 1.0])
def test_a_write_of_parameters_that_fails_is_one_error_on_all_ranks(
    tmp_path: Path, states: float, failure: str
) -> None:
    options = {"states": states, "parameters": 1.0}
    for said in run_ranks(fail_at, 2, str(tmp_path), "write_at", 2, failure, 1, options):
        assert "rank 1: " in said[0]
        assert "writing " in said[0]
        assert str(tmp_path) in said[0]
        assert "resume from it" in said[0]


@pytest.mark.product
@pytest.mark.parametrize("failure", ["short", "EIO"])
@pytest.mark.parametrize(("states", "number"), [(0.0, 3), (1.0, 7)])
def test_a_read_of_parameters_that_fails_names_rank_folder_and_unit(
    tmp_path: Path, states: float, number: int, failure: str
) -> None:
    options = {"states": states, "parameters": 1.0}
    (said,) = run_ranks(fail_at, 1, str(tmp_path), "read_at", number, failure, 0, options, process_group=False)
    assert "[rank 0/1] The offloaded parameters of " in said[0]
    assert "reading " in said[0]
    assert str(tmp_path) in said[0]
    assert "not used again" in said[0]


def shard_in(folder: str, **options: Any) -> str:
    try:
        build(adamw, offload=in_files(folder, **options))
    except (ValueError, zs.RankMismatchError) as error:
        return str(error)
    return ""


def test_a_folder_that_is_not_there_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(shard_in, 2, str(tmp_path / "nowhere"))
    assert "no file can be made there" in first
    assert "nowhere" in second


def reserve_nothing(folder: str) -> list[str]:
    """Shard while one rank's disk has no room; return what is said, and whether the model is as it was."""
    if rank_of() == 1:

        def refuse(descriptor: int, offset: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        file_calls.reserve = refuse
    model = models.build(models.Even, 2, WIDTH)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        zs.shard(model, adamw(model), offload=folder)
    except (ValueError, zs.RankMismatchError) as error:
        assert_same(before, [p.detach() for p in model.parameters()])
        assert type(model.stem.weight) is nn.Parameter
        return [str(error)]
    return []


def test_a_full_disk_is_refused_at_the_start_with_what_is_free(tmp_path: Path) -> None:
    said = run_ranks(reserve_nothing, 2, str(tmp_path))
    for (text,) in said:
        assert "bytes are free" in text
        assert "No space left on device" in text
        assert "states=0.5" in text


def test_what_cannot_be_in_files_is_refused(tmp_path: Path) -> None:
    class Own(torch.optim.AdamW):
        pass

    model = models.build(models.Even, 2, WIDTH)
    with pytest.raises(ValueError, match="Own cannot keep its states in files"):
        zs.shard(model, Own(model.parameters()), offload=tmp_path)
    at_random = zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
    with pytest.raises(ValueError, match="rounding='stochastic'"):
        zs.shard(model, adamw(model), offload=tmp_path, precision=at_random)
    few = in_files(tmp_path, states=0.001)  # moves one bucket
    with pytest.raises(ValueError, match="rounding='stochastic'"):
        zs.shard(model, adamw(model), offload=few, precision=at_random)
    zero = zs.shard(model, offload=tmp_path)
    with pytest.raises(ValueError, match="Own cannot keep"):
        zero.attach(Own(model.parameters()))


def refused_at_random(folder: str, column: str) -> str:
    """Shard one element, of which all ranks but one have none, by an offload that leaves the one nothing in files."""
    model = models.build(functools.partial(nn.Linear, 1, 1, bias=False))
    at_random = zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
    offload = in_files(folder, **{"states": 0.0, column: 0.3})
    return raised(lambda: zs.shard(model, adamw(model), offload=offload, precision=at_random))


@pytest.mark.product
@pytest.mark.parametrize("column", ["states", "parameters"])
def test_a_rank_without_elements_refuses_what_the_others_refuse(tmp_path: Path, column: str) -> None:
    texts = run_ranks(refused_at_random, 3, str(tmp_path), column)
    assert texts[0].startswith("ValueError: rounding='stochastic'")
    assert len(set(texts)) == 1, texts


@pytest.mark.skipif(file_calls.kind_of(Path("/dev/shm")) != "tmpfs", reason="there is no tmpfs")
def test_a_folder_in_memory_is_warned_of() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, pytest.warns(UserWarning, match="tmpfs"):
        run = build(adamw, offload=in_files(folder))
    advance(run, range(2))  # direct or not


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": 1.5}, "from 0 to 1"),
        ({"states": True}, "from 0 to 1"),
        ({"gradients": 0.5}, "gradients are stored with their states"),
        ({"parameters": -0.5}, "from 0 to 1"),
        ({"to": "scratch"}, "an absolute path"),
        ({"parameters_to": "/scratch"}, "omit parameters_to="),
        ({"staging_bytes": 10}, "65,536"),
    ],
)
def test_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zs.Offload(**options)


# -- kills ------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, zeroshard as zs
from tests import models
from tests.errors import raised
from tests.engine.test_offload_files import adamw, build, advance, in_files
folder, scratch = sys.argv[1:]
run = build(adamw, offload=in_files(scratch, parameters=1.0), stage=3)
start = 0
if zs.latest(folder) is not None:
    start = run[2].load(zs.latest(folder)).step
for step in range(start, 100000):
    advance(run, range(step, step + 1))
    run[2].save(f"{folder}/step-{step + 1}", keep=2)
    print(step + 1, flush=True)
"""


@pytest.mark.rotates
def test_a_kill_leaves_the_last_checkpoint_and_no_file(tmp_path: Path) -> None:
    folder, scratch = tmp_path / "runs", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    free = shutil.disk_usage(scratch).free
    reached = 0
    for delay_s in (0.0, 0.013, 0.031):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(scratch)], stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        assert int(program.stdout.readline()) == reached + 1 or reached
        time.sleep(delay_s)
        program.send_signal(signal.SIGKILL)
        program.wait()
        program.stdout.close()
        newest = zs.latest(folder)
        assert newest is not None
        resident = build(adamw)
        step = resident[2].load(newest).step
        assert step > reached
        straight = build(adamw)
        advance(straight, range(step))
        assert_same(whole(straight), whole(resident))
        reached = step
    assert os.listdir(scratch) == []
    assert shutil.disk_usage(scratch).free > free - (64 << 20)


def test_files_are_nobody_elses(tmp_path: Path) -> None:
    run = build(adamw, offload=in_files(tmp_path))
    assert os.listdir(tmp_path) == []
    entries = [Path(f"/proc/self/fd/{number}") for number in range(256)]
    mine = [entry for entry in entries if entry.is_symlink() and str(tmp_path) in os.readlink(entry)]
    assert mine
    assert all(os.stat(entry).st_mode & 0o777 == 0o600 and os.stat(entry).st_nlink == 0 for entry in mine)
    assert slot_of(run[1].param_groups[0]["params"][0]).bucket.spec.row.states.is_in_file
    del run


def test_an_error_of_one_rank_in_the_body_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="of its own"):
        run_ranks(raise_in_body, 2, str(tmp_path))


def raise_in_body(folder: str) -> None:
    run = build(adamw, offload=in_files(folder))
    advance(run, range(1))
    if rank_of() == 1:

        def entries(chunk: Chunk) -> Any:
            raise RuntimeError("of its own")

        Chunk.entries = entries  # type: ignore[method-assign]
    advance(run, range(1, 2))


def train_by_two(folder: Path | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam(parameters[at::2], lr=0.1, foreach=False) for at in range(2)]
    offload = zs.Offload(states=1.0, to=str(folder), staging_bytes=65536) if folder is not None else None
    zero = zs.shard(model, optimizers, stage=1, offload=offload)
    for step in range(3):
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with zero.gathered():
        return [p.detach().clone() for p in parameters]


def test_optimizers_with_parameters_between_each_others_keep_their_states(tmp_path: Path) -> None:
    # The first step of the second optimizer makes a state that the first one's parameters have already.
    (expected,), (found,) = (run_ranks(train_by_two, 1, folder) for folder in (None, tmp_path))
    assert all(map(torch.equal, expected, found))


def load_after_steps(folder: str) -> bool:
    """Train, save, train on, load, and tell whether the parameters are those that were saved."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, stage=3, offload=folder)
    found = []
    for step in range(3):
        if step:
            with zero.gathered():
                found.append([p.detach().clone() for p in model.parameters()])
            zero.load(f"{folder}/a") if step > 1 else zero.save(f"{folder}/a")
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return not any(map(torch.equal, *found)) and all(map(torch.equal, found[1], model.parameters()))


def test_a_run_that_has_made_steps_loads_its_checkpoint(tmp_path: Path) -> None:
    """Ranks hold no elements of some parameters, whose states then have no memory of a kind of their own."""
    assert run_ranks(load_after_steps, 2, str(tmp_path)) == [True, True]
