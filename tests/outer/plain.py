"""Islands in plain torch: K copies of a model in one process, and the same training through `zs.shard(outer=)`.

Owns the oracle of exchanges between islands, written from the formulas of `docs/outer.md`, without shards and messages.
It must not know the engine beyond its public interface, but for which parameters a fragment has.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zeroshard as zs
from tests import models
from tests.oracle import randn

Made = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Values = dict[str, Tensor]


def nesterov(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Make the outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def adamw(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Make the inner optimizer."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build the model."""
    return models.build(models.Stack).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the loss of a rank's batch of a step."""
    inputs, targets = (randn(4, size, key=(step, rank, size), dtype=dtype) for size in (5, 3))
    return (model(inputs) - targets).square().mean()


def mesh_of(islands: int) -> DeviceMesh:
    """Return the mesh of all ranks, with islands of neighbouring ranks; every rank must call."""
    ranks = torch.arange(dist.get_world_size()).view(islands, -1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def sharded(islands: int, steps: int, stage: int, shared: bool, outer: Mapping[str, Any], **options: Any) -> Any:
    """Train on islands; return the parameters of this rank's island after each step, and after `finish()`.

    The last value is the names of each fragment's parameters.
    """
    dtype = options.pop("dtype", torch.float64)
    model = build(dtype)
    optimizer = options.pop("inner", adamw)(model.parameters())
    settings = zs.Settings(shared_memory=shared, watchdog_s=60.0)
    mesh = mesh_of(islands)
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings, outer=zs.Outer(**outer), **options)
    names = [[slot.name for unit in one.units for slot in unit.slots] for one in zero._islands.fragments]  # type: ignore[union-attr]
    found = []
    for step in range(steps):
        loss_of(model, step, dist.get_rank(), dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(zero, model))
    zero.finish()
    zero.check_copies()
    return [*found, whole(zero, model)], names


def whole(zero: zs.Zero, model: nn.Module) -> Values:
    """Return copies of all parameters."""
    with zero.gathered():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain(
    islands: int,
    ranks: int,
    steps: int,
    names: Sequence[Sequence[str]],
    *,
    every: int,
    optimizer: Any = "average",
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    dtype: torch.dtype = torch.float64,
    inner: Made = adamw,
) -> list[list[Values]]:
    """Train K copies in one process; return for each island the parameters after each step, and after the last exchange.

    Args:
        ranks: number of ranks of an island, each with its own batch.
        names: the names of each fragment's parameters.
    """
    first = build(dtype)
    copies = [copy.deepcopy(first) for _ in range(islands)]
    optimizers = [inner(model.parameters()) for model in copies]
    held = [dict(model.named_parameters()) for model in copies]
    anchors = {name: nn.Parameter(p.detach().clone()) for name, p in first.named_parameters()}
    outers = [None if optimizer == "average" else optimizer([anchors[name] for name in part]) for part in names]
    sent: Values = {}

    @torch.no_grad()
    def begin(fragment: int) -> None:
        for name in names[fragment]:
            changes = [one[name] - anchors[name] for one in held]
            total = changes[0]
            for change in changes[1:]:
                total = total + change
            sent[name] = total * (1.0 / islands)

    @torch.no_grad()
    def end(fragment: int, own: float) -> None:
        for name in names[fragment]:
            if outers[fragment] is None:
                anchors[name] += sent[name]
            anchors[name].grad = -sent[name]
        if outers[fragment] is not None:
            outers[fragment].step()
        for name in names[fragment]:
            for one in held:
                one[name].copy_(own * one[name] + (1 - own) * anchors[name] if own else anchors[name])

    found: list[list[Values]] = [[] for _ in copies]
    distance, exchanged = every // fragments, [0] * fragments
    for step in range(steps):
        for island, (model, one) in enumerate(zip(copies, optimizers, strict=True)):
            for rank in range(ranks):
                (loss_of(model, step, island * ranks + rank, dtype) / ranks).backward()
            one.step()
            one.zero_grad()
        done = step + 1
        if (done + delay) % distance == 0:
            begin(turn := ((done + delay) // distance - 1) % fragments)
        if done % distance == 0:
            end(turn, mix)
            exchanged[turn] = -1 if mix else done
        for island, one in enumerate(held):
            found[island].append({name: p.detach().clone() for name, p in one.items()})
    if (steps + delay) % distance < delay:
        end(turn, mix)
        exchanged[turn] = -1 if mix else steps
    for fragment, at in enumerate(exchanged):
        if at != steps:
            begin(fragment)
            end(fragment, 0.0)
    for island, one in enumerate(held):
        found[island].append({name: p.detach().clone() for name, p in one.items()})
    return found
