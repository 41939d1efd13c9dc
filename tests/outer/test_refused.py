"""What is refused of islands, by name and on all ranks, and that islands wait for each other in exchanges alone."""

import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard as zs
from tests.outer.plain import adamw, build, loss_of, mesh_of
from zeroshard import sharding
from zeroshard.testing import RankFailure, run_ranks

TIMEOUT_S = 120.0
SETTINGS = zs.Settings(watchdog_s=20.0, heartbeat_s=5.0)


class Closure(torch.optim.SGD):
    """An optimizer whose update of an element depends on all elements."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= p.grad * p.grad.norm()


def outer(**options: Any) -> dict[str, Any]:
    """Return the arguments of a call with these options."""
    return {"outer": zs.Outer(**options)}


def of_one_island(wrong: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Return what island 1 is given, or what island 0 is."""
    return wrong if dist.get_rank() >= 2 else right


def flat() -> DeviceMesh:
    """Return a mesh without islands."""
    return DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("shard",))


def split() -> DeviceMesh:
    """Return a mesh whose islands split layers."""
    return DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "tensor"))


def pipe() -> DeviceMesh:
    """Return a mesh with a pipe."""
    return DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "pipe"))


Case = Callable[[], dict[str, Any]]
CASES: MappingProxyType[str, tuple[Case, str]] = MappingProxyType(
    {
        "every": (lambda: outer(every=0), "Outer(every=) must be at least 1; got 0"),
        "every is no number": (lambda: outer(every=2.0), "Outer(every=) must be an integer; got 2.0"),
        "fragments": (lambda: outer(every=4, fragments=3), "Outer(fragments=3) must divide every=4"),
        "too many fragments": (
            lambda: outer(every=99, fragments=99),
            "the model has 4 unit(s) with trained parameters",
        ),
        "delay": (lambda: outer(every=4, fragments=2, delay=2), "Outer(delay=2) must be below the 2 step(s)"),
        "mix": (lambda: outer(every=4, mix=1.0), "at least 0 and below 1; got 1.0"),
        "bits": (lambda: outer(every=4, bits=2), "Outer(bits=) must be one of (32, 8, 4); got 2"),
        "bits beside split layers": (
            lambda: outer(every=4, bits=8) | {"mesh": split()},
            "Outer(bits=8) with an axis 'tensor': elements that share a scale are rounded together",
        ),
        "memory": (lambda: outer(every=4, memory="disk"), "must be one of ('device', 'host'); got 'disk'"),
        "optimizer": (lambda: outer(every=4, optimizer="mean"), "must be 'average' or a function"),
        "no optimizer": (lambda: outer(every=4, optimizer=len), "returned 1, which is no torch.optim.Optimizer"),
        "of others": (
            lambda: outer(every=4, optimizer=lambda p: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)),
            "exactly the parameters that it is given",
        ),
        "whole matrices": (
            lambda: outer(every=4, optimizer=lambda p: zs.optim.Adafactor(p, lr=0.1)),
            "Adafactor needs whole matrices, and anchors are sharded",
        ),
        "not element-wise": (
            lambda: outer(every=4, optimizer=lambda p: Closure(p, lr=0.1)),
            "Closure",
        ),
        "no options": (lambda: {"outer": 4}, "outer must be a zs.Outer; got 4"),
        "no mesh": (lambda: outer(every=4) | {"mesh": None}, "an axis 'replicate' of at least 2 places"),
        "no islands": (lambda: outer(every=4) | {"mesh": flat()}, "an axis 'replicate' of at least 2 places"),
        "one island": (lambda: outer(every=4) | {"mesh": 1}, "an axis 'replicate' of at least 2 places"),
        "unequal islands": (lambda: outer(every=4) | {"mesh": 3}, "must divide the 4 rank(s)"),
        "a pipe": (lambda: outer(every=4) | {"mesh": pipe()}, "outer= does not support an axis 'pipe'"),
        "a sum over all ranks": (
            lambda: outer(every=4) | {"model": nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4))},
            "Module '1' is a SyncBatchNorm over all ranks of the launch",
        ),
        "another every": (lambda: of_one_island(outer(every=8), outer(every=4)), "outer: every=8"),
        "other bits": (lambda: of_one_island(outer(every=4, bits=8), outer(every=4)), "bits=8"),
        "another rate": (
            lambda: outer(every=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1 * (1 + dist.get_rank() // 2))),
            "outer optimizer: SGD",
        ),
        "another model": (
            lambda: outer(every=4) | of_one_island({"model": nn.Linear(5, 3)}, {"model": nn.Linear(5, 4)}),
            "parameter 'weight': (3, 5)",
        ),
        "another dtype": (
            lambda: outer(every=4) | of_one_island({"model": nn.Linear(5, 3).double()}, {"model": nn.Linear(5, 3)}),
            "torch.float64",
        ),
        "another optimizer": (
            lambda: outer(every=4) | of_one_island({"optimizer": torch.optim.SGD}, {"optimizer": torch.optim.Adam}),
            "optimizer 0, group 0: SGD",
        ),
        "another version": (lambda: outer(every=4) | of_one_island({"version": "0.0"}, {}), "zeroshard 0.0"),
        "refused on one island": (lambda: of_one_island(outer(every=0), outer(every=4)), "must be at least 1; got 0"),
        "one rank of an island": (
            lambda: outer(every=4) | ({"model": nn.Linear(5, 3)} if dist.get_rank() == 3 else {}),
            "different models, options or versions",
        ),
    }
)


def refusals() -> dict[str, str]:
    """Try each case; return what it raised."""
    found, version = {}, sharding.VERSION
    for name, (case, _) in CASES.items():
        asked = {"mesh": mesh_of(2), "stage": 2, "settings": SETTINGS, **case()}
        model = asked.pop("model", None) or build(torch.float32)
        optimizer = asked.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.1)
        sharding.VERSION = asked.pop("version", version)  # type: ignore[misc]
        try:
            zs.shard(model, optimizer, **asked)
        except (TypeError, ValueError, zs.RankMismatchError) as error:
            found[name] = str(error)
        finally:
            sharding.VERSION = version  # type: ignore[misc]
    return found


def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    for rank, found in enumerate(run_ranks(refusals, 4, timeout_s=TIMEOUT_S)):
        for name, (_, message) in CASES.items():
            assert message in found.get(name, "nothing was raised"), f"{name}, rank {rank}"


# -- in training ------------------------------------------------------------------------------------------------------


def made(**options: Any) -> tuple[zs.Zero, nn.Module, torch.optim.Optimizer]:
    """Shard a model on two islands of two ranks."""
    model = build(torch.float32)
    optimizer = adamw(model.parameters())
    zero = zs.shard(model, optimizer, stage=3, mesh=mesh_of(2), outer=zs.Outer(**options), settings=SETTINGS)
    return zero, model, optimizer


def step(run: tuple[zs.Zero, nn.Module, torch.optim.Optimizer], number: int) -> None:
    """Make a step."""
    _, model, optimizer = run
    loss_of(model, number, dist.get_rank(), torch.float32).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def apart(folder: str) -> float:
    """Make the steps of an interval, island 1 after island 0 has made its own."""
    run, done = made(every=8), Path(folder) / "done"
    island = dist.get_rank() // 2
    while island and not done.exists():
        time.sleep(0.01)
    begin_s = time.monotonic()
    for number in range(7):
        step(run, number)
    run[0].agree(True, "the steps of an interval")
    if not island:
        done.touch()
    took_s = time.monotonic() - begin_s
    step(run, 7)
    run[0].check_copies()
    return took_s


def test_islands_wait_for_each_other_in_exchanges_alone(tmp_path: Path) -> None:
    assert len(run_ranks(apart, 4, str(tmp_path), timeout_s=60.0)) == 4


def at_other_steps() -> str:
    """Finish after different numbers of steps."""
    run = made(every=9)
    for number in range(2 + dist.get_rank() // 2):
        step(run, number)
    try:
        run[0].finish()
    except zs.RankMismatchError as error:
        return str(error)
    return "nothing was raised"


def test_islands_at_other_steps_are_told() -> None:
    for rank, text in enumerate(run_ranks(at_other_steps, 4, timeout_s=60.0)):
        assert "Islands are at different exchanges" in text, rank
        assert "begun at step 2" in text and "begun at step 3" in text, rank


def diverged(bits: int) -> tuple[str, bool]:
    """Let the parameters of island 1 become infinite, and exchange."""
    run = made(every=4, bits=bits)
    zero, *_ = run
    step(run, 0)
    assert zero._islands is not None
    if dist.get_rank() >= 2:
        zero._islands.fragments[-1].parts[-1].values().fill_(float("inf"))
    before = [fragment.anchor.detach().clone() for fragment in zero._islands.fragments]
    try:
        zero.finish()
    except RuntimeError as error:
        after = [fragment.anchor.detach() for fragment in zero._islands.fragments]
        return str(error), all(map(torch.equal, before, after))
    return "nothing was raised", False


@pytest.mark.parametrize("bits", [32, 4])
def test_an_island_that_diverges_is_told_and_spoils_no_other(bits: int) -> None:
    for rank, (text, is_kept) in enumerate(run_ranks(diverged, 4, bits, timeout_s=60.0)):
        assert "the change of an island was not finite" in text, rank
        assert is_kept, rank


def dying() -> None:
    """Let island 1 end between exchanges."""
    run = made(every=4)
    for number in range(4):
        if (number, dist.get_rank() // 2) == (2, 1):
            raise ArithmeticError("island 1 ends")
        step(run, number)


def test_an_island_that_ends_is_named_by_the_others() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(dying, 4, timeout_s=60.0)
    for rank in (0, 1):
        error = failure.value.errors[rank]
        assert error.type_name == "RankMismatchError", error
        assert "exchange 1 between islands" in error.message
        assert f"rank {rank + 2}" in error.message
