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
Layout = list[tuple[int, list[tuple[str, int, int, int]]]]
"""For each fragment: elements that a rank exchanges, and of each parameter its name, the first of its elements that are
among them, where they begin, and where they end."""


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

    The last value is where the elements of parameters lie in what this rank exchanges; see `Layout`.
    """
    dtype = options.pop("dtype", torch.float64)
    model = build(dtype)
    optimizer = options.pop("inner", adamw)(model.parameters())
    settings = zs.Settings(shared_memory=shared, watchdog_s=60.0)
    mesh = mesh_of(islands)
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings, outer=zs.Outer(**outer), **options)
    layout = layout_of(zero)
    found = []
    for step in range(steps):
        loss_of(model, step, dist.get_rank(), dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(zero, model))
    zero.finish()
    zero.check_copies()
    return [*found, whole(zero, model)], layout


def layout_of(zero: zs.Zero) -> Layout:
    """Return where the elements of parameters lie in what this rank exchanges."""
    found: Layout = []
    assert zero._islands is not None
    for fragment in zero._islands.fragments:
        rows = []
        for part in fragment.parts:
            for slot, start, stop in part.slices():
                bucket = part.bucket
                first = bucket.layout.overlap(slot.index, *bucket.spec.shard)[0] - bucket.layout.offsets[slot.index]
                rows.append((slot.name, first, start, stop))
        found.append((fragment.numel, rows))
    return found


def whole(zero: zs.Zero, model: nn.Module) -> Values:
    """Return copies of all parameters."""
    with zero.gathered():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain(
    islands: int,
    ranks: int,
    steps: int,
    layouts: Sequence[Layout],
    *,
    every: int,
    optimizer: Any = "average",
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    dtype: torch.dtype = torch.float64,
    bits: int = 32,
    memory: str = "device",
    inner: Made = adamw,
) -> list[list[Values]]:
    """Train K copies in one process; return for each island the parameters after each step, and after `finish()`.

    Args:
        ranks: number of ranks of an island, each with its own batch.
        layouts: of each rank of an island.
        memory: where anchors are, which changes nothing.
    """
    first = build(dtype)
    copies = [copy.deepcopy(first) for _ in range(islands)]
    optimizers = [inner(model.parameters()) for model in copies]
    held = [dict(model.named_parameters()) for model in copies]
    anchors = {name: nn.Parameter(p.detach().clone()) for name, p in first.named_parameters()}
    names = [list(dict.fromkeys(row[0] for layout in layouts for row in layout[f][1])) for f in range(fragments)]
    lost = [[[torch.zeros(numel, dtype=dtype) for numel, _ in layout] for layout in layouts] for _ in copies]
    outers = [None if optimizer == "average" else optimizer([anchors[name] for name in part]) for part in names]
    sent: Values = {}

    @torch.no_grad()
    def begin(fragment: int) -> None:
        for name in names[fragment]:
            sent[name] = torch.zeros_like(anchors[name])
        for rank, layout in enumerate(layouts):
            numel, rows = layout[fragment]
            total = torch.zeros(numel, dtype=dtype)
            for island, one in enumerate(held):
                change = torch.zeros(numel, dtype=dtype)
                for name, first, start, stop in rows:
                    whole_change = (one[name] - anchors[name]).flatten()
                    change[start:stop] = whole_change[first : first + stop - start]
                change += lost[island][rank][fragment]
                told = change if bits == 32 else rounded(change, bits)
                lost[island][rank][fragment] = change - told
                total = total + told
            for name, first, start, stop in rows:
                sent[name].view(-1)[first : first + stop - start] = (total * (1.0 / islands))[start:stop]

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


def rounded(change: Tensor, bits: int) -> Tensor:
    """Return a change as other islands read it: integers times one fp32 scale for each 256 elements."""
    assert len(change) <= 65536, "the models of these tests are small"
    most, told = 2 ** (bits - 1) - 1, torch.zeros_like(change)
    for start in range(0, len(change), 256):
        block = change[start : start + 256].float()
        scale = block.abs().max() / most
        if scale > 0:
            told[start : start + 256] = (block * (1.0 / scale)).round().to(change.dtype) * scale.to(change.dtype)
    return told
