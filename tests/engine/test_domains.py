"""A model's ranks are a part of the launch: they make the same passes, and wait for no other ranks.

Four processes train two models on two ranks each. Each must have the bits that it has in a launch of its own.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard as zs
from tests import models
from tests.oracle import assert_same
from tests.processes import is_stopped
from tests.rotation import third
from zeroshard.join.start import texts_across_ranks
from zeroshard.testing import run_ranks

TIMEOUT_S = 240
SETTINGS = {"watchdog_s": 120.0}
ORDER = ((3, 1), (2, 0))
"""The ranks of each domain, in its order."""
STEPS = (2, 4)
CASES = [(stage, shared) for stage in range(4) for shared in (True, False)]
"""The stage, and whether ranks share memory."""


def mesh_of(ranks: Any, *names: str) -> DeviceMesh:
    """Return a mesh of some ranks; all ranks of the launch call, as torch has it."""
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


def train(domain: int, steps: int, mesh: DeviceMesh | None, stage: int, *, shared: bool = True) -> dict[str, Any]:
    """Train the model of a domain; return its losses and whole parameters."""
    model = models.build(models.Stack, 3 if domain else 2)
    optimizer = models.adamw(model)
    settings = zs.Settings(shared_memory=shared, **SETTINGS)
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings)
    losses = []
    for step in range(steps):
        loss = models.stack_loss(model, step, zero.mesh.rank)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item(), zs.mean_across_ranks(loss, zero.mesh).item()]
    zero.check_copies()
    zero.detach()
    return {"losses": losses, "parameters": dict(model.named_parameters())}


def alone(domain: int, cases: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    """Train one of the models in a launch of its own."""
    return [train(domain, STEPS[domain], None, stage, shared=shared) for stage, shared in cases]


def together(cases: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    """Train the model of this rank's domain beside the other."""
    mesh = mesh_of(ORDER, "island", "shard")["shard"]
    domain = next(number for number, ranks in enumerate(ORDER) if dist.get_rank() in ranks)
    return [train(domain, STEPS[domain], mesh, stage, shared=shared) for stage, shared in cases]


def test_two_models_train_as_in_launches_of_their_own() -> None:
    cases = third(CASES)
    by_rank = run_ranks(together, 4, cases, timeout_s=TIMEOUT_S)
    for domain, ranks in enumerate(ORDER):
        for place, expected in enumerate(run_ranks(alone, 2, domain, cases, timeout_s=TIMEOUT_S)):
            for case, one, actual in zip(cases, expected, by_rank[ranks[place]], strict=True):
                assert_same(one, actual, f"domain {domain}, rank {ranks[place]}, {case}")


# -- several handles of a process -------------------------------------------------------------------------------------


def overlapping() -> list[Any]:
    """Train three models whose ranks overlap, so that processes have made other numbers of process groups."""
    rank, found = dist.get_rank(), []
    for ranks in ((0, 1), (2, 1), (0, 1, 2), (1, 2)):
        mesh = mesh_of(ranks, "shard")
        if rank in ranks:  # the others do not call
            found.append(train(len(ranks) % 2, 2, mesh, 3))
    return found


def test_a_process_may_train_models_with_several_others() -> None:
    first, second, third_, last = run_ranks(overlapping, 4, timeout_s=TIMEOUT_S)
    assert (len(first), len(second), len(third_), last) == (2, 4, 3, [])
    pair = first[0]["parameters"]
    # Whoever comes first in the mesh has the first part of the data.
    assert_same(third_[0]["losses"], first[0]["losses"])
    assert_same(second[3], first[0])
    for found in (second[0], second[1], third_[0], second[3], third_[2]):
        assert_same(pair, found["parameters"])
    assert_same(first[1]["parameters"], second[2]["parameters"])


def alternating() -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a model of all ranks and one of two ranks, a step each in turn."""
    halves = mesh_of(((0, 1), (2, 3)), "half", "shard")["shard"]
    made = []
    for mesh in (None, halves):
        model = models.build(models.Stack)
        optimizer = models.adamw(model)
        made.append((model, optimizer, zs.shard(model, optimizer, mesh=mesh, settings=zs.Settings(**SETTINGS))))
    for step in range(3):
        for model, optimizer, zero in made:
            models.stack_loss(model, step, zero.mesh.rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for _, _, zero in made:
        zero.detach()
    return tuple(dict(model.named_parameters()) for model, _, _ in made)  # type: ignore[return-value]


def one_after_another(mesh: None) -> dict[str, Any]:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, mesh=mesh, settings=zs.Settings(**SETTINGS))
    for step in range(3):
        models.stack_loss(model, step, zero.mesh.rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    zero.detach()
    return dict(model.named_parameters())


def test_handles_of_a_process_have_ranks_of_their_own() -> None:
    whole, half = (run_ranks(one_after_another, size, None, timeout_s=TIMEOUT_S)[0] for size in (4, 2))
    for by_all, by_half in run_ranks(alternating, 4, timeout_s=TIMEOUT_S):
        assert_same(whole, by_all)
        assert_same(half, by_half)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_swap(folder: str) -> list[dict[str, Any]]:
    """Save the models of two domains, and load each in the other one, also asynchronously."""
    mesh = mesh_of(ORDER, "island", "shard")["shard"]
    domain = next(number for number, ranks in enumerate(ORDER) if dist.get_rank() in ranks)
    torch.manual_seed(domain)
    model = models.Stack()
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=2 + domain, mesh=mesh, settings=zs.Settings(**SETTINGS))
    found = []
    for step in range(2):
        models.stack_loss(model, step, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.save(f"{folder}/{domain}/step-1", asynchronous=bool(domain))
    zero.wait()
    dist.barrier()
    for other in (domain, 1 - domain):
        zero.load(f"{folder}/{other}/step-1")
        with zero.gathered():
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def test_checkpoints_are_those_of_the_domain(tmp_path: Path) -> None:
    found = run_ranks(save_and_swap, 4, str(tmp_path), timeout_s=TIMEOUT_S)
    assert_same(found[3], found[1])
    assert_same(found[2], found[0])
    assert_same(found[3], found[0][::-1])
    assert any(not torch.equal(value, found[3][1][name]) for name, value in found[3][0].items())


# -- values of some ranks ---------------------------------------------------------------------------------------------


def exchange() -> tuple[list[float], list[float], float, list[str], str]:
    rank = dist.get_rank()
    mesh = mesh_of(ORDER, "island", "shard")
    part, own = mesh["shard"], torch.tensor([float(rank)])
    ranks = ORDER[0] if rank in ORDER[0] else ORDER[1]
    if ranks is ORDER[0]:  # the other domain makes no such call
        zs.gather_across_ranks(own, part)
    others = [mesh_of(pair, "shard") for pair in ([0, 2], [1, 3])][1 - rank % 2]
    with pytest.raises(ValueError, match="and not this one") as refused:
        zs.gather_across_ranks(own, others)
    return (
        zs.gather_across_ranks(own, part).flatten().tolist(),
        zs.gather_across_ranks(own, mesh=mesh).flatten().tolist(),
        zs.mean_across_ranks(own, part).item(),
        texts_across_ranks(part, f"rank {rank}"),
        str(refused.value),
    )


@pytest.mark.parametrize("wrong", [3, None, [1.0]])
def test_what_is_no_tensor_is_not_gathered(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"gather_across_ranks\(\) takes a tensor, .* got"):
        zs.gather_across_ranks(wrong)


def test_values_are_gathered_in_the_order_of_the_mesh() -> None:
    for rank, (part, whole, mean, texts, refused) in enumerate(run_ranks(exchange, 4, timeout_s=TIMEOUT_S)):
        ranks = ORDER[0] if rank in ORDER[0] else ORDER[1]
        assert part == [*ranks] and whole == [3, 1, 2, 0] and mean == sum(ranks) / 2
        assert texts == [f"rank {one}" for one in ranks]
        assert f"[rank {rank}/4]" in refused


# -- one domain does not wait for the other ---------------------------------------------------------------------------


STOP = "kill -STOP $0; for i in $(seq 1800); do [ -e $1 ] && break; sleep 0.1; done; kill -CONT $0"
"""A shell stops a process until a file is there, for three minutes at most."""


def beside_a_stopped_domain(folder: str) -> dict[str, Any]:
    """Stop the processes of one domain after its first step, while those of the other one shard, train and save."""
    rank, over = dist.get_rank(), Path(folder) / "over"
    mesh = mesh_of(ORDER, "island", "shard")["shard"]
    if rank in ORDER[0]:
        model = models.build(models.Stack)
        optimizer = models.adamw(model)
        zero = zs.shard(model, optimizer, mesh=mesh, settings=zs.Settings(**SETTINGS))
        shell = None
        for step in range(2):
            models.stack_loss(model, step, zero.mesh.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not step:
                (Path(folder) / str(os.getpid())).touch()
                shell = subprocess.Popen(["sh", "-c", STOP, str(os.getpid()), str(over)])
        assert shell is not None and shell.wait() == 0
        zero.detach()
        return dict(model.named_parameters())
    while not (len(stopped := os.listdir(folder)) == 2 and all(map(is_stopped, stopped))):
        time.sleep(0.01)
    found: dict[str, Any] = train(1, 3, mesh, 3)["parameters"]
    assert all(map(is_stopped, stopped))
    if len(zs.gather_across_ranks(torch.zeros(1), mesh)) and rank == ORDER[1][0]:
        over.touch()
    return found


def test_a_stopped_domain_keeps_nobody_waiting(tmp_path: Path) -> None:
    found = run_ranks(beside_a_stopped_domain, 4, str(tmp_path), timeout_s=TIMEOUT_S)
    for ranks in ORDER:
        assert_same(found[ranks[0]], found[ranks[1]])
