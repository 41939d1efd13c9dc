"""Memory that runs out on one rank: all ranks end with that cause, and with what was held."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.testing import RankFailure, run_ranks

from .job import loss_of, make

WORLD = 3
CULPRIT = 1


def exhaust(kind: str, folder: str) -> None:
    """Train, and let one rank's memory run out in a forward. Runs on a rank."""
    model, optimizer, zero = make(3)
    for step in range(3):
        if step == 2 and zero.mesh.rank == CULPRIT:
            Path(folder, "held").write_text(held(zero))
            model.blocks[1].register_forward_pre_hook(lambda *_: fail(kind))
        loss_of(model, step, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def fail(kind: str) -> None:
    """Run out of memory, or fail otherwise."""
    if kind == "device":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if kind == "host":
        # More than any machine has: torch's own error, whatever its words are.
        torch.empty(1 << 60, dtype=torch.uint8)
    elif kind == "python":
        bytearray(1 << 60)
    raise ArithmeticError("something else")


def held(zero: zs.Zero) -> str:
    """Return the bytes of the columns that do not change within a step, in the words of the cause."""
    now = zero.memory().resident_bytes
    return f"parameters {now['parameters']:,} ("


@pytest.mark.product
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("device", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        ("host", "RuntimeError: "),
        ("python", "MemoryError"),
    ],
)
def test_all_ranks_end_with_the_cause_and_the_memory_by_column(tmp_path: Path, kind: str, cause: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(exhaust, WORLD, kind, str(tmp_path))
    errors = failure.value.errors
    assert set(errors) == set(range(WORLD))
    for rank, error in errors.items():
        said = error.traceback
        assert f"rank {CULPRIT}: {cause}" in said if rank != CULPRIT else cause in said, said
        assert f"[rank {CULPRIT}/{WORLD}] held by zeroshard, in bytes now (at most): " in said, said
        assert (tmp_path / "held").read_text() in said, said
        assert all(f"{column} " in said for column in ("gradients", "states", "padding", "transient"))


def test_other_errors_do_not_speak_of_memory(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(exhaust, WORLD, "other", str(tmp_path))
    for error in failure.value.errors.values():
        assert "ArithmeticError: something else" in error.traceback
        assert "held by zeroshard" not in error.traceback


def test_the_handle_does_not_outlive_its_model(tmp_path: Path) -> None:
    assert run_ranks(count_handles, 2) == [0, 0]


def count_handles() -> int:
    """Drop a sharded model; return how many of its handles are left. Runs on a rank."""
    import gc

    model, optimizer, zero = make(2)
    dist.barrier()
    del model, optimizer, zero
    gc.collect()
    return sum(isinstance(thing, zs.Zero) for thing in gc.get_objects())
