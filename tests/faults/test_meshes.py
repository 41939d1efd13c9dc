"""A wrong `mesh=`: one error on each rank that it concerns, soon, and nothing changes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroshard as zs
from tests import models
from zeroshard.testing import run_ranks

TIMEOUT_S = 240
WATCHDOG_S = 200.0
"""Longer than any test: no error here may come from the end of a wait."""


def described(ranks: Any, *names: str) -> Any:
    """Return what zeroshard reads of a DeviceMesh; torch makes none of such ranks."""
    return SimpleNamespace(mesh_dim_names=names, mesh=torch.tensor(ranks))


def mesh_of(ranks: Any, *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


def refused(mesh: Any, model: nn.Module | None = None) -> str:
    """Return the error of a call, which must leave the model as it was."""
    model = models.build(models.Stack) if model is None else model
    before = {name: (type(one), one.detach().clone()) for name, one in model.named_parameters()}
    try:
        zs.shard(model, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    except (ValueError, zs.RankMismatchError) as error:
        for name, one in model.named_parameters():
            assert type(one) is before[name][0], name
            assert isinstance(one, nn.Parameter) and not hasattr(one, "_zeroshard")
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()  # a rank that tried again at once would meet the others in their first call
    return ""


def train(mesh: Any) -> dict[str, torch.Tensor]:
    """Train two steps; a refusal before must leave no trace."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for step in range(2):
        models.stack_loss(model, step, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.detach()
    return dict(model.named_parameters())


def agree(values: dict[str, torch.Tensor]) -> bool:
    """Tell whether all ranks of the launch have the same values."""
    rows = zs.gather_across_ranks(torch.cat([value.detach().flatten() for value in values.values()]))
    return bool((rows == rows[0]).all())


# -- the same everywhere ----------------------------------------------------------------------------------------------


def wrong_ranks() -> dict[str, str]:
    outer = [0, 1, 2, 3]
    own = dist.get_rank()
    return {
        "twice": refused(described([[0, 1], [2, 1]], "replicate", "shard")),
        "outside": refused(described([0, 1, 2, 9], "shard")),
        "absent": refused(described([one for one in outer if one != own], "shard")),
        "replicas only": refused(mesh_of(outer, "replicate")),
        "names": refused(mesh_of(outer, "data")),
        "tensor": refused(mesh_of([[0, 1], [3, 2]], "shard", "tensor")),
        "pipe": refused(mesh_of([[2, 1], [0, 3]], "pipe", "shard")),
    }


WRONG = {
    "twice": "ValueError: mesh= has rank 1, twice: its ranks are (0, 1, 2, 1)",
    "outside": "ValueError: mesh= has rank 9, and the process group has the ranks 0 to 3",
    "absent": "This rank is not in mesh=, which has the ranks",
    "replicas only": "The axes (replicate 4) of 4 ranks leave one rank per replica, so nothing would be sharded",
    "tensor": "ValueError: mesh= has ranks [3, 2] along 'tensor', where torch's process groups number places by",
    "pipe": "ValueError: mesh= has ranks [2, 0] along 'pipe'",
    "names": "mesh= takes axes named replicate, shard, tensor, pipe; got ('data',)",
}


def test_wrong_ranks_are_refused_by_number() -> None:
    for rank, texts in enumerate(run_ranks(wrong_ranks, 4, timeout_s=TIMEOUT_S)):
        assert all(words in texts[case] for case, words in WRONG.items()), texts
        assert f"[rank {rank}/4]" in texts["absent"]


# -- not the same -----------------------------------------------------------------------------------------------------


def part_and_whole() -> tuple[str, bool]:
    """Give rank 0 its half of a mesh, and the others the whole mesh; then all the whole mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    text = refused(mesh["shard"] if dist.get_rank() == 0 else mesh)
    return text, agree(train(mesh))


def one_twice() -> tuple[str, bool]:
    """Give one rank a mesh that is refused, and the others a right one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    text = refused(described([[0, 1], [1, 3]], "replicate", "shard") if dist.get_rank() == 2 else mesh)
    return text, agree(train(mesh))


def other_axes() -> tuple[str, bool]:
    """Give the ranks the same ranks along other axes."""
    names = ("replicate", "shard") if dist.get_rank() < 3 else ("shard", "replicate")
    text = refused(mesh_of([[0, 1], [2, 3]], *names))
    return text, agree(train(mesh_of([[0, 1], [2, 3]], "replicate", "shard")))


def other_order() -> tuple[str, bool]:
    """Give the ranks the same ranks in another order."""
    text = refused(described([0, 1, 2, 3] if dist.get_rank() else [0, 2, 1, 3], "shard"))
    return text, agree(train(None))


def each(case: Callable[[], tuple[str, bool]]) -> list[str]:
    found = run_ranks(case, 4, timeout_s=TIMEOUT_S)
    assert all(text and is_right for text, is_right in found), found
    for rank, (text, _) in enumerate(found):
        assert "watchdog_s" not in text and (f"[rank {rank}/4" in text or text.startswith("ValueError")), text
    return [text for text, _ in found]


def test_a_part_on_one_rank_and_the_whole_on_another_is_one_error() -> None:
    for text in each(part_and_whole):
        assert "RankMismatchError" in text and "zs.shard(): rank " in text and "Pass the same mesh= on all" in text
        assert "the ranks [0, 1]" in text and "the ranks [0, 1, 2, 3]" in text


def test_a_rank_whose_mesh_was_refused_is_not_waited_for() -> None:
    texts = each(one_twice)
    assert texts[2].startswith("ValueError: mesh= has rank 1, twice")
    for rank in (0, 1, 3):
        assert "zs.shard(): rank 2 was refused its mesh=: mesh= has rank 1, twice" in texts[rank]


def test_axes_and_order_are_those_of_all_ranks() -> None:
    for text in each(other_axes):
        assert "Ranks were given different mesh=" in text
        assert "rank 0: axes replicate 2, shard 2 over the ranks (0, 1, 2, 3)" in text
        assert "rank 3: axes shard 2, replicate 2 over" in text
    for text in each(other_order):
        assert "rank 0: axes shard 4 over the ranks (0, 2, 1, 3)" in text and "rank 1: axes shard 4" in text


# -- within a domain --------------------------------------------------------------------------------------------------


def other_modules() -> tuple[str, bool]:
    """Give the two ranks of one domain different models, while the other domain trains."""
    rank, mesh = dist.get_rank(), mesh_of([[0, 1], [2, 3]], "island", "shard")["shard"]
    if rank < 2:
        own = train(mesh)
        dist.barrier()
        return "", agree(own)
    return refused(mesh, nn.Sequential(nn.Linear(4, 4 + rank))), agree(train(mesh))


def test_different_modules_of_a_domain_are_an_error_there() -> None:
    for rank, (text, is_right) in enumerate(run_ranks(other_modules, 4, timeout_s=TIMEOUT_S)):
        assert is_right
        if rank < 2:
            assert text == ""
        else:
            assert f"[rank {rank}/4: shard {rank - 2}] Ranks were given different models" in text
            assert "rank 2: parameter '0.weight': (6, 4)" in text and "rank 3: parameter '0.weight': (7, 4)" in text


def other_tensor_ranks() -> str:
    mesh = mesh_of([[0, 1], [2, 3]], "island", "tensor")
    model = models.build(models.Stack)
    parallelize_module(model, mesh["island"], {"head": ColwiseParallel()})
    return refused(mesh["tensor"], model)


def test_tensors_over_ranks_of_another_domain_are_refused() -> None:
    for rank, text in enumerate(run_ranks(other_tensor_ranks, 4, timeout_s=TIMEOUT_S)):
        over, own = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        assert f"'head.weight' is a DTensor over ranks {over}, and the axis 'tensor' of mesh= has {own} here" in text
