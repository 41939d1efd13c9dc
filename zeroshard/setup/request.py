"""The arguments of `shard()`, their checks, and the description of the sharded model that follows.

Owns the arguments, their checks and their consequences, before any tensor changes and any communication. It must not
know engines. Read `Request` first, then `describe`.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.parameter import ShardedParameter
from zeroshard.core.slot import Form
from zeroshard.describe.asked import Asked, resolve
from zeroshard.describe.axes import Axes, check_count, ranks_of
from zeroshard.describe.blocks import members
from zeroshard.describe.ignored import ignored_of
from zeroshard.describe.offload import OffloadLike, row_with
from zeroshard.describe.optimizers import Optimizers, check_entries, optimizers_of
from zeroshard.describe.parameters import ParametersLike, check_patterns
from zeroshard.describe.precision import Chosen, Precision, PrecisionLike, chosen_modules, precision_of
from zeroshard.describe.rows import StageLike
from zeroshard.describe.selection import check_activations
from zeroshard.describe.specs import describe_units
from zeroshard.describe.treatments import ActivationsLike
from zeroshard.describe.units import UnitPlan, plan_units
from zeroshard.join.start import check_seconds
from zeroshard.optim.admission import check_optimizers
from zeroshard.setup.automatic import KeptBytes, choose_least
from zeroshard.setup.duplicate import owner_of
from zeroshard.setup.graphs import refuse_graphs
from zeroshard.table.cells import Residency, check_memories
from zeroshard.table.settings import Settings
from zeroshard.table.spec import UnitSpec
from zeroshard.table.stages import name_of_row
from zeroshard.torch_private import has_split, is_dense, is_fake, local_of
from zeroshard.values.materialize import InitFn, check_source
from zeroshard.values.weights import Weights
from zeroshard.wire.comm import Tag
from zeroshard.wire.mesh import Mesh, backend_of

__all__ = ["Described", "Request", "check_bucket_count", "check_selections", "describe", "domain_of", "place_of"]

FormsOf = Callable[[nn.Module, Mesh, bool], Mapping[int, Form]]

PLAIN = frozenset([bool, bytes, float, int, str, type(None)])
"""Types of values that hold no tensors."""


@final
@dataclass(frozen=True)
class Request:
    """The arguments of `shard()`, which documents them."""

    model: nn.Module
    optimizer: Optimizers = None
    stage: StageLike = None
    residency: Residency | str | None = None
    activations: ActivationsLike = None
    offload: OffloadLike = None
    parameters: ParametersLike = None
    ignored: Sequence[object] = ()
    precision: PrecisionLike = "fp32"
    units: Sequence[object] | None = None
    mesh: DeviceMesh | int | None = None
    reduction: Literal["mean", "sum"] | float = "mean"
    weights: str | Path | InitFn | Weights | None = None
    settings: Settings = field(default_factory=Settings)
    room_bytes: int | None = None
    """Device bytes that stage and offload "auto" may use on each rank; None for no limit."""
    replicas: int | None = None

    def with_replicas(self) -> "Request":
        """Return the arguments with the number of replicas as the mesh.

        Raises:
            ValueError, TypeError: both were given, or no number of at least 1.
        """
        if self.replicas is None:
            return self
        if self.mesh is not None:
            raise ValueError(
                f"Give replicas={self.replicas} or mesh=, not both: a DeviceMesh has an axis 'replicate' for copies."
            )
        return dataclasses.replace(self, mesh=check_count("replicas", self.replicas), replicas=None)

    @property
    def asked(self) -> Asked:
        """The arguments that plans have, too."""
        return Asked(**{one.name: getattr(self, one.name) for one in dataclasses.fields(Asked)})


@final
@dataclass(frozen=True)
class Described:
    """The checked description of a sharded model: its units, and the storage and communication of their tensors.

    Args:
        reduction: "mean", "sum", or the divisor of sums of gradients over ranks.
        plans: the units as modules and parameters.
        units: the units as records, with their buckets on this rank.
        forms: the form of each parameter, by identity.
        source: the source of values for a model on the meta device.
        chosen: a line about automatic choices, with the reason.
        own_precision: modules with a separate precision.
        ignored: the names of ignored parameters, by identity.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    row: Residency
    precision: Precision
    mesh: Mesh
    reduction: str | float
    plans: Sequence[UnitPlan]
    units: Sequence[UnitSpec]
    forms: Mapping[int, Form]
    source: Weights | InitFn | None
    settings: Settings
    chosen: str = ""
    own_precision: Sequence[Chosen] = ()
    ignored: Mapping[int, str] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[nn.Module, str]:
        """The modules that user code calls, with their names: the model, or, on a pipe, the members of a container."""
        return members(self.model) if self.mesh.pipe is not None else {self.model: ""}

    @property
    def scale(self) -> float:
        """The factor of sums of gradients over ranks."""
        if isinstance(self.reduction, str):
            return 1.0 / len(self.mesh.data_ranks) if self.reduction == "mean" else 1.0
        return 1.0 / self.reduction

    def options(self) -> str:
        """Return, as text, the options that must be equal on all ranks."""
        row = name_of_row(self.row)
        kind = self.mesh.device.type
        return f"{row}, reduction={self.reduction}, {self.precision}, axes={self.mesh.axes}, on {kind}, {self.settings}"


def describe(request: Request, joined: Mesh, forms_of: FormsOf) -> Described:
    """Check a request, and return its description, without changes and communication.

    Args:
        forms_of: returns the form of each parameter, by identity.

    Raises:
        ValueError, TypeError: an argument, a parameter or an optimizer cannot be sharded; the text says which.
    """
    model, settings = request.model, request.settings
    if not isinstance(settings, Settings):
        raise TypeError(f"settings must be a zs.Settings; got {settings!r}.")
    _check_settings(settings)
    resolved = resolve(request.asked, joined.world_size)
    precision, mesh = precision_of(resolved.precision), _lay_out(joined, resolved.axes, request.mesh)
    _check_reduction(request.reduction)
    optimizers = optimizers_of(request.optimizer)
    _check_model(model, settings.forward_methods, mesh, request.ignored)
    ignored = ignored_of(model, request.ignored)
    _check_devices(model, mesh, ignored)
    if mesh.device.type == "cuda":
        refuse_graphs(model)
    plans = plan_units(model, request.units, ignored, members(model) if mesh.pipe is not None else ())
    source = check_source(model, request.weights, compares=mesh.rank == 0)
    forms = forms_of(model, mesh, bool(ignored))

    def numel_of(parameter: nn.Parameter) -> int:
        return forms[id(parameter)].part(parameter.detach()).numel()

    # Before their states are counted.
    names = check_entries(model, optimizers, ignored, is_final=request.optimizer is not None)
    kept = KeptBytes(plans, optimizers, precision, mesh, numel_of)
    row, offload, chosen = choose_least(resolved, kept, request.room_bytes)
    row = row_with(row, offload, is_alone=kept.is_alone)
    check_memories(row)
    check_optimizers(names, optimizers, settings.elementwise, is_cut=row.is_cut)
    if mesh.pipe is None:  # the units of a pattern may be at another place: see `check_places`
        check_selections(row, plans, len(mesh.tensor_ranks))
    units = describe_units(
        plans,
        row,
        precision,
        shard_size=mesh.shard_size,
        shard_rank=mesh.shard_rank,
        replicas=mesh.replicas,
        numel_of=numel_of,
        is_part=mesh.pipe is not None,
    )
    check_bucket_count(units)
    own, reduction = chosen_modules(model, precision), request.reduction
    return Described(
        model, optimizers, row, precision, mesh, reduction, plans, units, forms, source, settings, chosen, own, ignored
    )


def check_selections(row: Residency, plans: Sequence[UnitPlan], tensor_size: int) -> None:
    """Raise ValueError unless the patterns of a row select units; see `check_patterns`, `check_activations`."""
    check_patterns(row, [plan.name for plan in plans])
    check_activations(row.activations, plans, tensor_size)


def _refuse_shared_memory(model: nn.Module, mesh: Mesh, ignored: Collection[int]) -> None:
    """Raise if a trained parameter shares memory with another tensor of the model, which would be set apart."""
    registered = dict([*model.named_parameters(), *model.named_buffers()])
    by_place = list[tuple[int, int, str, bool]]()
    for name, one in (*registered.items(), *_plain_attributes(model, registered.values())):
        part = local_of(one.detach())
        if part.layout is not torch.strided or part.is_nested or part.is_meta or is_fake(part) or not part.numel():
            continue
        if is_dense(part) or not isinstance(one, nn.Parameter):  # parameters may be columns of one matrix
            reach = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            trains = name in registered and one.requires_grad and id(one) not in ignored
            by_place.append((part.data_ptr(), reach * part.itemsize, name, trains))
    last, last_stop, is_trained = "", 0, False
    for place, nbytes, name, trains in sorted(by_place):
        if place < last_stop and (trains or is_trained):
            if plain := {last, name} - registered.keys():
                remedy = (
                    f"'{plain.pop()}' is neither a parameter nor a buffer, so updates would not reach its values: "
                    "compute the values in forward, from the parameter, or clone the tensor to keep them."
                )
            else:
                remedy = (
                    "Assign one nn.Parameter to both modules, with a transposition in forward if need be, or clone one."
                )
            raise ValueError(
                f"{mesh} '{last}' and '{name}' share memory, but are two tensors, which zs.shard() would set apart. "
                + remedy
            )
        if place + nbytes > last_stop:
            last, last_stop, is_trained = name, place + nbytes, trains


def _plain_attributes(model: nn.Module, known: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that modules keep as attributes, or in lists, tuples and dicts there, except known ones.

    An attribute that a hook computes before each forward, as of the old `spectral_norm`, is none.
    """
    seen = {id(one) for one in known}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            values = [value] if f"{key}_orig" not in module._parameters else []
            while values:
                one = values.pop()
                if not isinstance(one, torch.Tensor | list | tuple | dict) or id(one) in seen:
                    continue
                seen.add(id(one))
                if not isinstance(one, torch.Tensor):  # a data set may be millions of numbers
                    inside = one.values() if isinstance(one, dict) else one
                    values += (each for each in inside if type(each) not in PLAIN)
                elif type(one) in (torch.Tensor, nn.Parameter) or has_split([type(one)]):
                    yield f"{path}.{key}".removeprefix("."), one


def _check_settings(settings: Settings) -> None:
    """Raise unless each option has one of its values; `_check_model` checks the names of methods."""
    check_seconds(watchdog_s=settings.watchdog_s, heartbeat_s=settings.heartbeat_s)
    size, flag = "a number of bytes above 0", "True or False"
    for name, wanted, is_fine in (
        ("wire_bytes", size, _is_size(settings.wire_bytes)),
        ("device_bytes", f"{size}, or None", settings.device_bytes is None or _is_size(settings.device_bytes)),
        ("shared_memory", flag, isinstance(settings.shared_memory, bool)),
        ("compare_inputs", flag, isinstance(settings.compare_inputs, bool)),
        ("elementwise", "True, False or None", isinstance(settings.elementwise, bool | None)),
        ("non_finite", "'raise' or 'skip'", settings.non_finite in ("raise", "skip")),
        ("buffers", "'rank 0', 'own' or 'mean'", settings.buffers in ("rank 0", "own", "mean")),
    ):
        if not is_fine:
            raise ValueError(f"Settings({name}=) must be {wanted}; got {getattr(settings, name)!r}.")


def _is_size(nbytes: object) -> bool:
    return type(nbytes) is int and nbytes > 0


def _check_reduction(reduction: object) -> None:
    is_number = isinstance(reduction, int | float) and not isinstance(reduction, bool)
    if reduction not in ("mean", "sum") and not (is_number and 0 < reduction < math.inf):  # type: ignore[operator]
        raise ValueError(f"reduction must be 'mean', 'sum' or a divisor above 0; got {reduction!r}.")


def _check_model(model: nn.Module, forward_methods: Sequence[str], mesh: Mesh, asked: Sequence[object]) -> None:
    """Raise if a model cannot be sharded.

    Args:
        asked: ignored parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if isinstance(forward_methods, str) or not isinstance(forward_methods, Collection):
        raise TypeError(f"Settings(forward_methods=) takes a list of names; got {forward_methods!r}.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"Module '{name}' ({type(module).__name__}) is TorchScript, which reads parameters without hooks that "
                "could gather them. Shard the plain module; torch.compile works on it."
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "The model is wrapped in DistributedDataParallel, which zs.shard() replaces. Shard model.module, or "
            "call zs.shard() before accelerator.prepare()."
        )
    ignored = ignored_of(model, asked)
    for name, parameter in model.named_parameters():
        if id(parameter) in ignored:
            continue
        if isinstance(parameter, ShardedParameter):
            raise ValueError(
                f"Parameter '{name}' is sharded already. To shard the model again, as when the cell of a notebook runs "
                "twice, call zero.detach() of its handle first, which makes model and optimizer plain."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter '{name}' is uninitialized (a lazy module). Run one forward pass before zs.shard()."
            )
        if type(parameter).__name__ == "DTensor" and len(mesh.tensor_ranks) == 1:
            raise TypeError(
                f"Parameter '{name}' is a DTensor, but the mesh has no axis 'tensor' of two or more ranks. Pass to "
                "zs.shard(mesh=...) the mesh whose mesh['tensor'] was passed to parallelize_module(), and leave that "
                "call out where the axis has one rank; instead of fully_shard(), use the plain model."
            )
        if type(parameter) is not nn.Parameter and type(parameter).__name__ != "DTensor":
            raise TypeError(
                f"Parameter '{name}' is a {type(parameter).__module__}.{type(parameter).__qualname__}; zs.shard() "
                "would lose the behaviour of that class. Use plain torch.nn.Parameters (for quantized weights, "
                "integers that do not require gradients, with separate scales)."
            )
        if parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize == 1:
            raise ValueError(
                f"Parameter '{name}' is trainable and of {parameter.dtype}, which no optimizer supports. Freeze it "
                "with requires_grad_(False), or store it in bfloat16 or a wider dtype."
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"Parameter '{name}' has layout {parameter.layout}; only dense parameters can be sharded.")
    if held := [name for name, p in model.named_parameters() if id(p) not in ignored and p.grad is not None]:
        raise ValueError(
            f"{len(held)} parameter(s) have a gradient from before zs.shard(), '{held[0]}' first. It is local to this "
            "rank, and would be lost. Use it (optimizer.step()) or clear it (model.zero_grad()) before zs.shard()."
        )
    for path in forward_methods:
        try:
            module, method = owner_of(model, path)
            is_there = callable(getattr(module, method, None))
        except AttributeError:
            is_there = False
        if not is_there:
            raise ValueError(
                f"forward_methods names '{path}', which {type(model).__name__} does not have. Write the name of the "
                "module in the model and of the method, such as 'encoder.encode', or only the name of a method of the "
                "model."
            )
    _refuse_shared_memory(model, mesh, ignored)


def place_of(model: object) -> torch.device | None:
    """Return the common device of a model's parameters, without those on the meta device; None for several devices."""
    places = _places_of(model, ()) if isinstance(model, nn.Module) else {}
    return next(iter(places)) if len(places) == 1 else None


def _places_of(model: nn.Module, ignored: Collection[int]) -> dict[torch.device, list[str]]:
    """Return the names of a model's parameters by device, without those on the meta device."""
    places: dict[torch.device, list[str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and id(parameter) not in ignored:
            places.setdefault(parameter.device, []).append(name)
    return places


def _check_devices(model: nn.Module, mesh: Mesh, ignored: Collection[int]) -> None:
    """Raise if parameters are on several devices, or on a device that this run cannot use.

    A model on one device, including the CPU, is accepted: `shard()` moves it to the rank's device unit by unit.
    """
    places = _places_of(model, ignored)
    if len(places) > 1:
        held = "; ".join(f"{len(names)} on {device}, '{names[0]}' first" for device, names in places.items())
        raise ValueError(
            f"{mesh} The parameters of {type(model).__name__} are on {len(places)} devices: {held}. A model that is "
            "split over devices (device_map=, .to() on parts) cannot be sharded, because each rank trains on one "
            f"device. Move it with model.to('{mesh.device}'), or keep the whole model on the CPU: zs.shard() moves it "
            "unit by unit."
        )
    elsewhere = [(device, names[0]) for device, names in places.items() if device.type not in ("cpu", mesh.device.type)]
    if elsewhere and mesh.device.type == "cpu":
        device, name = elsewhere[0]
        why = f"no '{device.type}' device is available"
        if dist.is_initialized():
            why = f"the process group has the backend {backend_of(device.type)!r} for '{device.type}'"
        raise ValueError(
            f"{mesh} Parameter '{name}' is on {device}, but this rank trains on the CPU, because {why}. To train on "
            "CUDA devices, create the process group with zs.init() or init_process_group('nccl'); to train on the "
            "CPU, call model.cpu() before zs.shard()."
        )


def domain_of(joined: Mesh, wanted: object) -> Mesh:
    """Return the mesh of the ranks of `mesh=`, before its axes are known.

    Raises:
        ValueError: the ranks are not distinct ranks of the process group, this one among them.
    """
    ranks = ranks_of(wanted, joined.world_size)
    if joined.rank not in ranks:
        raise ValueError(
            f"{joined} This rank is not in mesh=, which has the ranks {ranks}. Call zs.shard() on those ranks only, or "
            "pass the part of the mesh that this rank is in, such as mesh['shard']."
        )
    rank, size = ranks.index(joined.rank), len(ranks)
    return dataclasses.replace(joined, rank=rank, world_size=size, ranks=ranks, launched=joined.world_size)


def _lay_out(mesh: Mesh, axes: Axes, wanted: DeviceMesh | int | None) -> Mesh:
    """Return the mesh with its axes.

    Raises:
        ValueError: torch split tensors over another kind of device than the rank's.
    """
    laid = dataclasses.replace(mesh, axes=axes).at_place()
    if isinstance(wanted, DeviceMesh) and len(laid.tensor_ranks) > 1 and wanted.device_type != mesh.device.type:
        raise ValueError(
            f"mesh= was created for '{wanted.device_type}', but this rank's device is {mesh.device}: tensors that are "
            f"split over its axis 'tensor' stay on '{wanted.device_type}'. Create it with "
            f"init_device_mesh('{mesh.device.type}', ...) and parallelize the model there."
        )
    return laid


def check_bucket_count(units: Sequence[UnitSpec]) -> None:
    """Raise if a model has more buckets than message tags can distinguish."""
    count = sum(len(unit.buckets) for unit in units)
    if count > Tag.BUCKETS:
        raise ValueError(
            f"The model has {count:,} buckets (a unit has one for each dtype and trainability), but message tags "
            f"support {Tag.BUCKETS:,}. Name larger units with units=: there are {len(units):,} now."
        )
