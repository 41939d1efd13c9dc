"""How a model is taken over: what is checked first, and how units, buckets and slots come to be.

Owns the steps before training; `handle.py` calls them in order. Nothing is changed before everything was checked,
here and on the other ranks, so that a refusal leaves the model as it was.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.core.buffer import Bucket, Pool
from zeroshard.core.comm import Comm
from zeroshard.core.engine import Engine
from zeroshard.core.errors import RankMismatchError
from zeroshard.core.hooks import hang
from zeroshard.core.layout import CUTS, plan_layout
from zeroshard.core.mesh import Mesh
from zeroshard.core.parameter import ReleasedParameter, ShardedParameter, Slot
from zeroshard.core.precision import Dtypes, Precision
from zeroshard.core.residency import Replicated, Residency
from zeroshard.core.trace import Ledger
from zeroshard.core.unit import Unit
from zeroshard.state.admission import admit
from zeroshard.state.units import UnitPlan, registered

__all__ = [
    "Options",
    "check_equal",
    "check_model",
    "check_optimizers",
    "check_replicas",
    "describe",
    "kept_parameters",
    "make_unit",
    "take_over",
    "tell_refusal",
    "wire",
]


def check_model(model: nn.Module, forward_methods: Sequence[str], cut: str) -> None:
    """Raise where a model can not be sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if cut not in CUTS:
        raise ValueError(f"cut must be one of {', '.join(CUTS)}; got {cut!r}.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"Module '{name}' ({type(module).__name__}) is TorchScript, whose code reads parameters where no hook "
                "can gather them. Shard the plain module; torch.compile works on it."
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "The model is wrapped in DistributedDataParallel, which zs.shard() replaces. Shard model.module."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedParameter):
            raise ValueError(f"Parameter '{name}' is sharded already; zs.shard() takes a model once.")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter '{name}' is uninitialized (a lazy module). Run one forward pass before zs.shard()."
            )
        if type(parameter).__name__ == "DTensor":
            raise TypeError(
                f"Parameter '{name}' is a DTensor, and parameters of other mesh axes can not be sharded yet. Apply "
                "zs.shard() to the plain model, without parallelize_module() or fully_shard()."
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"Parameter '{name}' has layout {parameter.layout}; only dense parameters can be sharded.")
    for method in forward_methods:
        if not callable(getattr(model, method, None)):
            raise ValueError(f"forward_methods names '{method}', which {type(model).__name__} does not have.")


def check_replicas(mesh: Mesh) -> None:
    """Raise unless the ranks fall into copies of two or more ranks each."""
    if mesh.replicas < 1 or mesh.world_size % mesh.replicas:
        raise ValueError(f"replicas must divide the {mesh.world_size} rank(s); got {mesh.replicas}.")
    if mesh.replicas > 1 and mesh.shard_size == 1:
        raise ValueError(
            f"replicas={mesh.replicas} on {mesh.world_size} ranks leaves one rank a copy, so nothing would be sharded. "
            "Use stage=0 for plain data parallelism."
        )


def check_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    row: Residency,
    elementwise: bool | None,
    *,
    is_final: bool,
) -> None:
    """Raise where optimizers and model do not belong together, or where an update can not be cut.

    Args:
        is_final: False while an optimizer may still come (`zero.attach`), so that none is missed yet.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    taken: dict[int, str] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them; got {kind}.")
        if not isinstance(row.states, Replicated):
            admit(optimizer, elementwise)
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ValueError(
                        f"Parameter {place} of group {number} of {kind}, shape {tuple(parameter.shape)}, is not in the "
                        "model. Build the optimizer from model.parameters(), after all changes to the model."
                    )
                if id(parameter) in taken:
                    raise ValueError(
                        f"Parameter '{names[id(parameter)]}' is in {taken[id(parameter)]} and in {kind}; one must "
                        "update it."
                    )
                taken[id(parameter)] = kind
    if is_final:
        missed = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
        if missed:
            raise ValueError(
                f"{len(missed)} trainable parameter(s) are in no optimizer, '{missed[0]}' first: gradients would be "
                "reduced for nothing. Add them to a group, or freeze them with requires_grad_(False)."
            )


def describe(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plans: Sequence[UnitPlan], options: str, version: str
) -> list[str]:
    """Return what all ranks must have in common, a fact a line."""
    lines = [f"torch {torch.__version__}", f"zeroshard {version}", f"options: {options}"]
    for name, p in model.named_parameters():
        trains = "trainable" if p.requires_grad else "frozen"
        lines.append(f"parameter '{name}': {tuple(p.shape)} {p.dtype} {trains} strides {tuple(p.stride())}")
    lines += [f"buffer '{name}': {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit '{plan.name}': {len(plan.parameters)} parameters, {plan.numel} elements" for plan in plans]
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            options = ", ".join(f"{key}={value}" for key, value in sorted(group.items()) if key != "params")
            has_state = sum(parameter in optimizer.state for parameter in group["params"])
            entries = f"{len(group['params'])} entries ({has_state} with state)"
            lines.append(f"optimizer {number}, group {place}: {type(optimizer).__name__}, {entries}, {options}")
    return lines


def tell_refusal(mesh: Mesh, comm: Comm, error: Exception) -> None:
    """Let the other ranks know that this one refuses, in case they do not. Collective: as `check_equal`."""
    try:
        check_equal(mesh, comm, [f"refused: {error}"])
    except RankMismatchError as mismatch:
        raise error from mismatch


def check_equal(mesh: Mesh, comm: Comm, lines: list[str]) -> None:
    """Raise on every rank, with the first difference, unless all ranks describe the same.

    Collective: an all-reduce of 16 bytes; where ranks differ, all-gathers of digests and of one line.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    low, high, _, most = comm.agree([digest, -digest, 0, -len(lines)], "the comparison of models and options")
    if low == -high:
        return
    digests = torch.zeros(-most, dtype=torch.int64)
    digests[: len(lines)] = torch.tensor([zlib.crc32(line.encode()) + 1 for line in lines])
    rows = comm.collect(digests.to(mesh.device), "the comparison of models and options")
    first = int((rows != rows[0]).any(0).nonzero()[0])
    texts = comm.texts(lines[first] if first < len(lines) else "(nothing)", "the comparison of models and options")
    shown = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    raise RankMismatchError(
        f"{mesh} Ranks were given different models, options or versions; the first difference is:\n{shown}\n"
        "Build the same model and optimizer, with the same arguments and the same versions, on every rank."
    )


@dataclass(frozen=True)
class Options:
    """What holds for all units of a model. `kept` are parameters that precision leaves as they are, by identity."""

    row: Residency
    precision: Precision
    cut: str
    scale: float
    kept: frozenset[int]


def kept_parameters(model: nn.Module, precision: Precision) -> frozenset[int]:
    """Return the identities of the parameters of modules that keep their own dtype."""
    kept = [module for module in model.modules() if isinstance(module, precision.keep)]
    return frozenset(id(parameter) for module in kept for parameter in module.parameters())


def make_unit(
    number: int, plan: UnitPlan, options: Options, mesh: Mesh, pool: Pool, ledger: Ledger, first_bucket: int
) -> Unit:
    """Make a unit with empty buckets: one for each set of dtypes and trainability, in order of first parameters."""
    sets: dict[tuple[Dtypes, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in plan.parameters:
        dtypes = options.precision.dtypes_of(parameter.dtype, is_kept=id(parameter) in options.kept)
        sets.setdefault((dtypes, parameter.requires_grad), []).append((name, parameter))
    buckets: list[Bucket] = []
    for (dtypes, _), named in sets.items():
        rows = tuple(p.numel() // p.shape[0] if p.ndim and p.shape[0] else 1 for _, p in named)
        numels = tuple(p.numel() for _, p in named)
        layout = plan_layout(numels, dtypes.param.itemsize, mesh.shard_size, rows, options.cut, mesh.replicas)
        name, place = plan.name or "the root", first_bucket + len(buckets)
        names, parameters = [name for name, _ in named], [p.detach() for _, p in named]
        buckets.append(
            Bucket(name, place, names, parameters, layout, options.row, mesh.shard_rank, pool, ledger, dtypes)
        )
    return Unit(number, plan.name, buckets, mesh, options.scale, plan.blocks)


def take_over(unit: Unit, plan: UnitPlan, comm: Comm) -> None:
    """Move a unit's parameters into its buckets, with rank 0's values, and release it. Collective: broadcast."""
    homes = {name: (bucket, index) for bucket in unit.buckets for index, name in enumerate(bucket.names)}
    start = [bucket.start_values() for bucket in unit.buckets]
    views = {bucket.number: bucket.grads.views_of(values) for bucket, values in zip(unit.buckets, start, strict=True)}
    for name, parameter in plan.parameters:
        bucket, index = homes[name]
        views[bucket.number][index].copy_(parameter.detach())
        # A gradient from before belongs to a step that was not sharded.
        parameter.grad = None
        parameter.data = bucket.views[index]
        parameter.__dict__["_zeroshard"] = Slot(name, unit.number, bucket, index)
        parameter.__class__ = ShardedParameter
        unit.parameters.append(parameter)
        bucket.parameters.append(parameter)
    for bucket, values in zip(unit.buckets, start, strict=True):
        comm.broadcast(values, f"the parameters of {unit}", "start")
        bucket.set_start(values)
        if not bucket.is_whole and bucket.layout.full_numel:
            bucket.close()
    if not unit.is_whole:
        unit.set_class(ReleasedParameter)


def wire(
    engine: Engine, model: nn.Module, plans: Sequence[UnitPlan], methods: Sequence[str], precision: Precision
) -> None:
    """Hang the hooks: every module whose forward needs units that come and go, and the model itself."""
    entries: dict[nn.Module, tuple[str, tuple[int, ...]]] = {model: ("", ())}
    for unit, plan in zip(engine.units, plans, strict=True):
        # Units that stay whole need no event of their own modules; the model's own entry checks and completes passes.
        for module, name in plan.entries.items() if not unit.is_whole else ():
            known = entries.get(module, ("", ()))[1]
            entries[module] = (name, (*known, unit.number))
    own = [one for plan in plans for one in registered(plan, model)]
    hang(engine, model, entries, own, methods, precision)
