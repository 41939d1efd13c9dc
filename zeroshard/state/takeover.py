"""How a model is taken over: what is checked first, and how units, buckets and slots come to be.

Owns the steps before training; `handle.py` calls them in order. Nothing is changed before everything was checked,
here and on the other ranks, so that a refusal leaves the model as it was.
"""

import dataclasses
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.buffer import Bucket, Pool
from zeroshard.core.comm import BUCKETS, Comm
from zeroshard.core.errors import RankMismatchError
from zeroshard.core.gradient import LogicalGradient, MasterGradient, MasterSlice
from zeroshard.core.layout import CUTS, plan_layout
from zeroshard.core.mesh import Mesh
from zeroshard.core.parameter import Form, ShardedParameter, Slot, slot_of
from zeroshard.core.precision import Dtypes, Precision
from zeroshard.core.residency import Replicated, Residency
from zeroshard.core.trace import Ledger
from zeroshard.core.unit import Unit
from zeroshard.state.admission import admit
from zeroshard.state.units import UnitPlan

__all__ = [
    "Options",
    "check_bucket_count",
    "check_equal",
    "check_model",
    "check_optimizers",
    "describe",
    "describe_optimizer",
    "kept_parameters",
    "lay_out",
    "make_unit",
    "register_foreach_types",
    "spread",
    "take_over",
    "tell_refusal",
]


AXES = ("replicate", "shard", "tensor", "pipe")
"""What an axis of a mesh may be called."""


def check_model(model: nn.Module, forward_methods: Sequence[str], cut: str, mesh: Mesh) -> None:
    """Raise where a model cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if isinstance(forward_methods, str):
        raise TypeError(f"forward_methods takes a list of names; got the text {forward_methods!r}.")
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
        if type(parameter).__name__ == "DTensor" and len(mesh.tensor_ranks) == 1:
            raise TypeError(
                f"Parameter '{name}' is a DTensor, and the ranks have no axis 'tensor'. Pass zs.shard(mesh=...) the "
                "mesh whose mesh['tensor'] parallelize_module() was given; use the plain model instead of "
                "fully_shard()."
            )
        if type(parameter) is not nn.Parameter and type(parameter).__name__ != "DTensor":
            raise TypeError(
                f"Parameter '{name}' is a {type(parameter).__module__}.{type(parameter).__qualname__}; what that class "
                "does would be lost with zs.shard(). Hold plain torch.nn.Parameters (quantized weights as integers "
                "that do not require gradients, beside their scales)."
            )
        if parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize == 1:
            raise ValueError(
                f"Parameter '{name}' is trainable and of {parameter.dtype}, in which no optimizer computes. Freeze it "
                "with requires_grad_(False), or hold it in bfloat16 or wider."
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"Parameter '{name}' has layout {parameter.layout}; only dense parameters can be sharded.")
    if held := [name for name, p in model.named_parameters() if p.grad is not None]:
        raise ValueError(
            f"{len(held)} parameter(s) hold a gradient from before zs.shard(), '{held[0]}' first. It is this rank's "
            "own, and would be lost. Use it (optimizer.step()) or clear it (model.zero_grad()) before zs.shard()."
        )
    for method in forward_methods:
        if not callable(getattr(model, method, None)):
            raise ValueError(f"forward_methods names '{method}', which {type(model).__name__} does not have.")


def lay_out(mesh: Mesh, replicas: int, device_mesh: DeviceMesh | None) -> Mesh:
    """Return the ranks with their axes.

    Raises:
        ValueError: the axes do not fit the ranks, or leave nothing to shard over.
    """
    if not isinstance(replicas, int) or not isinstance(device_mesh, DeviceMesh | None):
        raise TypeError(f"replicas must be a whole number, and mesh a DeviceMesh; got {replicas!r}, {device_mesh!r}.")
    if device_mesh is None:
        if replicas < 1 or mesh.world_size % replicas:
            raise ValueError(f"replicas must divide the {mesh.world_size} rank(s); got {replicas}.")
        axes: tuple[tuple[str, int], ...] = (("replicate", replicas), ("shard", mesh.world_size // replicas))
    else:
        if replicas != 1:
            raise ValueError(f"Give replicas= or mesh= with an axis 'replicate', not both; got replicas={replicas}.")
        axes = _axes_of(device_mesh, mesh.world_size)
    laid = dataclasses.replace(mesh, axes=axes)
    if mesh.world_size > 1 and laid.shard_size == 1:
        sizes = ", ".join(f"{name} {size}" for name, size in axes)
        raise ValueError(
            f"The axes ({sizes}) of {mesh.world_size} ranks leave one rank a copy, so nothing would be sharded. Use "
            "stage=0 for plain data parallelism, and an axis 'shard' of two or more ranks beside others."
        )
    return laid


def _axes_of(device_mesh: DeviceMesh, world_size: int) -> tuple[tuple[str, int], ...]:
    names, sizes = device_mesh.mesh_dim_names or (), tuple(device_mesh.mesh.shape)
    if not names or not set(names) <= set(AXES):
        raise ValueError(
            f"mesh= takes axes called {', '.join(AXES)}; got {names or 'no names'}. Make it with "
            "init_device_mesh(device, sizes, mesh_dim_names=('shard', 'tensor'))."
        )
    if (ranks := device_mesh.mesh.flatten().tolist()) != list(range(world_size)):
        raise ValueError(
            f"mesh= must hold all {world_size} ranks of the run in order; got axes {names} of sizes {sizes} with ranks "
            f"{ranks}. Pass what init_device_mesh() returned, not a part of it."
        )
    axes = tuple(zip(names, sizes, strict=True))
    if dict(axes).get("pipe", 1) > 1:
        raise ValueError(
            f"The axis 'pipe' has {dict(axes)['pipe']} ranks, and stages of a pipeline cannot be sharded yet. Use the "
            "axes replicate, shard and tensor."
        )
    return axes


def check_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    row: Residency,
    elementwise: bool | None,
    *,
    is_final: bool,
) -> None:
    """Raise where optimizers and model do not belong together, or where an update cannot be cut.

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


def register_foreach_types() -> None:
    """Let torch's multi-tensor paths accept the classes that gradients and slices are of.

    Without it, clipping would be one collective and the update one kernel per parameter. The lists are torch's own and
    global; they hold types only, and adding twice changes nothing.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists = [getattr(module, "_foreach_supported_types", None) for module in (optimizer, _foreach_utils)]
    for types in lists:
        if types is not None:
            types.extend(t for t in (LogicalGradient, MasterGradient, MasterSlice) if t not in types)


def describe(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], plans: Sequence[UnitPlan], options: str, version: str
) -> list[str]:
    """Return what all ranks must have in common, a fact a line."""
    versions = _library_versions([*model.modules(), *optimizers]) | {"numpy": np.__version__, "zeroshard": version}
    lines = [f"{library} {found}" for library, found in sorted(versions.items())] + [f"options: {options}"]
    lines += [f"module '{name}': {type(module).__qualname__}" for name, module in model.named_modules()]
    for name, p in model.named_parameters():
        trains = "trainable" if p.requires_grad else "frozen"
        placed = f", placements {p.placements}" if hasattr(p, "placements") else ""
        lines.append(f"parameter '{name}': {tuple(p.shape)} {p.dtype} {trains} strides {tuple(p.stride())}{placed}")
    lines += [f"buffer '{name}': {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit '{plan.name}': {len(plan.parameters)} parameters, {plan.numel} elements" for plan in plans]
    for number, optimizer in enumerate(optimizers):
        lines += describe_optimizer(model, optimizer, number)
    return lines


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[str]:
    """Return what all ranks must have in common of one optimizer, a fact a line."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = []
    for place, group in enumerate(optimizer.param_groups):
        settings = ", ".join(f"{key}={value}" for key, value in sorted(group.items()) if key != "params")
        has_state = sum(parameter in optimizer.state for parameter in group["params"])
        entries = f"{len(group['params'])} entries ({has_state} with state)"
        lines.append(f"optimizer {number}, group {place}: {type(optimizer).__name__}, {entries}, {settings}")
        lines += [f"optimizer {number}, group {place}: '{names[id(parameter)]}'" for parameter in group["params"]]
    return lines


def _library_versions(things: Iterable[object]) -> dict[str, str]:
    """Return the versions of the libraries that define the classes of things, and torch's."""
    tops = {type(thing).__module__.partition(".")[0] for thing in things} | {"torch"}
    versions = {top: getattr(sys.modules.get(top), "__version__", None) for top in tops}
    return {top: str(version) for top, version in versions.items() if version is not None}


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
    """What holds for all units of a model.

    Args:
        kept: the parameters that precision leaves as they are, by identity.
        forms: what kind of tensor each parameter is, by identity.
    """

    row: Residency
    precision: Precision
    cut: str
    scale: float
    kept: frozenset[int]
    forms: Mapping[int, Form]


def kept_parameters(model: nn.Module, precision: Precision) -> frozenset[int]:
    """Return the identities of the parameters of modules that keep their own dtype."""
    kept = [module for module in model.modules() if isinstance(module, precision.keep)]
    return frozenset(id(parameter) for module in kept for parameter in module.parameters())


def make_unit(
    number: int, plan: UnitPlan, options: Options, mesh: Mesh, pool: Pool, ledger: Ledger, first_bucket: int
) -> Unit:
    """Make a unit with empty buckets: one for each set of dtypes and trainability, in order of first parameters."""
    buckets: list[Bucket] = []
    for dtypes, parameters in _by_bucket(plan, options):
        named = [(name, options.forms[id(p)].part(p.detach())) for name, p in parameters]
        rows = tuple(p.numel() // p.shape[0] if p.ndim and p.shape[0] else 1 for _, p in named)
        numels = tuple(p.numel() for _, p in named)
        layout = plan_layout(numels, dtypes.param.itemsize, mesh.shard_size, rows, options.cut, mesh.replicas)
        name, place = plan.name or "the root", first_bucket + len(buckets)
        names, parts = [name for name, _ in named], [part for _, part in named]
        buckets.append(Bucket(name, place, names, parts, layout, options.row, mesh.shard_rank, pool, ledger, dtypes))
    return Unit(number, plan.name, buckets, mesh, options.scale, plan.blocks)


def _by_bucket(plan: UnitPlan, options: Options) -> list[tuple[Dtypes, list[tuple[str, nn.Parameter]]]]:
    """Return the parameters of a unit by what makes a bucket: dtypes and trainability."""
    sets: dict[tuple[Dtypes, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in plan.parameters:
        dtypes = options.precision.dtypes_of(parameter.dtype, is_kept=id(parameter) in options.kept)
        sets.setdefault((dtypes, parameter.requires_grad), []).append((name, parameter))
    return [(dtypes, named) for (dtypes, _), named in sets.items()]


def check_bucket_count(plans: Sequence[UnitPlan], options: Options) -> None:
    """Raise where a model has more buckets than messages can tell apart."""
    count = sum(len(_by_bucket(plan, options)) for plan in plans)
    if count > BUCKETS:
        raise ValueError(
            f"The model has {count:,} buckets (a unit has one for each dtype and trainability), and messages tell "
            f"{BUCKETS:,} apart. Name larger units with units=: there are {len(plans):,} now."
        )


def take_over(unit: Unit, plan: UnitPlan, forms: Mapping[int, Form], comm: Comm) -> None:
    """Move a unit's parameters into its buckets, with rank 0's values, and release it. Collective: broadcast."""
    homes = {name: (bucket, index) for bucket in unit.buckets for index, name in enumerate(bucket.names)}
    start = [bucket.start_values() for bucket in unit.buckets]
    views = {bucket.number: bucket.grads.views_of(values) for bucket, values in zip(unit.buckets, start, strict=True)}
    for name, parameter in plan.parameters:
        (bucket, index), form = homes[name], forms[id(parameter)]
        views[bucket.number][index].copy_(form.part(parameter.detach()))
        form.point(parameter, bucket.views[index])
        parameter.__dict__["_zeroshard"] = Slot(name, unit.number, bucket, index, form)
        parameter.__class__ = form.classes[0]
        unit.parameters.append(parameter)
        bucket.parameters.append(parameter)
    for bucket, values in zip(unit.buckets, start, strict=True):
        spread(bucket, values, comm, f"the parameters of {unit}", "start")
        bucket.set_start(values)
        bucket.changes.accept()
        if not bucket.is_whole and bucket.layout.full_numel:
            bucket.close()
    if not unit.is_whole:
        unit.let_read(is_there=False)


def spread(bucket: Bucket, values: torch.Tensor, comm: Comm, what: str, kind: str) -> None:
    """Overwrite a whole bucket with rank 0's. Collective: broadcasts; every rank must call.

    Args:
        values: (full_numel,); each rank along the tensor axis has its own parts there, beside what all have alike.
    """
    for parameter, view in zip(bucket.parameters, bucket.grads.views_of(values), strict=True):
        if slot_of(parameter).form.is_alike:
            comm.broadcast(view, what, kind)
    comm.broadcast(values, what, kind, is_part=True)
