"""The construction of units, buckets and slots from a description, with the values of rank 0.

Owns the steps from a description to units. `setup/request.py` has checked the description on all ranks, so that errors
leave the model unchanged.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from zeroshard.activations.partition import Axis
from zeroshard.activations.saved import Treatment
from zeroshard.core.buffer import Bucket
from zeroshard.core.dtypes import LossScale
from zeroshard.core.engine import Engine
from zeroshard.core.gradient import LogicalGradient, MasterGradient
from zeroshard.core.slices import MasterSlice
from zeroshard.core.slot import Form, Slot, slot_of
from zeroshard.core.states import Presence
from zeroshard.core.unit import Unit
from zeroshard.describe.units import UnitPlan
from zeroshard.setup.request import Described
from zeroshard.store.ahead import Waitable
from zeroshard.store.stores import Stores
from zeroshard.table.schedule import ROOT
from zeroshard.table.trace import Ledger, Trace
from zeroshard.torch_private import NoFunctionTransforms, accept_in_foreach, local_of
from zeroshard.values.materialize import Share, StandIns, materialize
from zeroshard.wire.comm import Comm, Tag

__all__ = ["axis_of", "build", "move_states", "spread"]


def axis_of(comm: Comm) -> Axis:
    """Return the tensor axis of a mesh, for the treatments of activations."""

    def gather(whole: torch.Tensor, number: int, kind: str, what: str) -> Callable[[], object]:
        return comm.gather(whole, Tag(number, 0, what), kind, "tensor").wait

    ranks = comm.mesh.tensor_ranks
    return Axis(len(ranks), ranks.index(comm.mesh.rank), str(comm.mesh), gather)


def build(
    described: Described,
    comm: Comm,
    ledger: Ledger,
    treatment: Treatment | None,
    stores: Stores,
    standins: Callable[[torch.nn.Module, Share], StandIns],
) -> Engine:
    """Take over a model unit by unit, and return its engine, without hooks.

    Args:
        stores: the memories of the model's state.
        standins: see `materialize`.

    Collective: broadcast of parameters and buffers from rank 0; every rank must call.
    """
    # Otherwise clipping would need a collective, and the update a kernel, per parameter. torch's lists are global; they
    # hold types, and adding twice has no effect.
    accept_in_foreach(LogicalGradient, MasterGradient, MasterSlice)
    model, made = described.model, dict[int, Unit]()
    unset = [(name, p) for name, p in model.named_parameters() if id(p) in described.ignored and p.is_meta]
    placed = standins(model, partial(comm.broadcast, kind="start"))
    for number in materialize(model, described.plans, described.mesh, placed, described.source, described.ignored):
        made[number] = _make_unit(number, described, comm, ledger, stores)
        # Each unit is taken over and released before the next: at most one unit exists twice, and of a model on another
        # device, at most one unit besides the shards is on the rank's device.
        _take_over(made[number], described.plans[number], described.forms, comm)
    for name, parameter in unset:
        own = local_of(parameter.data)
        comm.broadcast(own, f"the ignored parameter '{name}'", "start", is_part=own.shape != parameter.shape)
    for name, tensor in model.named_buffers():
        if tensor.device != described.mesh.device:
            tensor.data = tensor.data.to(described.mesh.device)
        comm.broadcast(tensor.data, f"buffer '{name}'", "start")
    engine = Engine(described.mesh, comm, [made[number] for number in range(len(made))], ledger, treatment)
    if (home := stores.home) is not None:
        engine.order.launch = home.ahead.launch
        home.ahead.around = partial(_launch, comm, engine.order.history.trace)
    engine.guard.skips = described.settings.non_finite == "skip"
    engine.take_slots(slot_of(p) for p in model.parameters() if id(p) not in described.ignored)
    if described.precision.loss_scale is not None:
        engine.use_loss_scale(LossScale(described.precision.loss_scale))
    return engine


def _launch(comm: Comm, trace: Trace, name: str, begin: Callable[[], Waitable]) -> Waitable:
    """Begin the gather of a unit that waited for values of another memory; its event counts what it sends."""
    before = comm.sent_bytes["gather"]
    # Where a transform of torch.func is under way, as in `Order`.
    with NoFunctionTransforms():
        begun = begin()
    trace.add_sent("gather", name, comm.sent_bytes["gather"] - before)
    return begun


def _make_unit(number: int, described: Described, comm: Comm, ledger: Ledger, stores: Stores) -> Unit:
    """Create a unit from its description, with empty buckets."""
    plan, spec = described.plans[number], described.units[number]
    parameters = {name: described.forms[id(p)].part(p.detach()) for name, p in plan.parameters}
    device = described.mesh.device
    buckets = [
        Bucket(one, [parameters[name] for name in one.names], comm.pool, ledger, device, stores) for one in spec.buckets
    ]
    for bucket in buckets:
        if bucket.flat is not None:
            # Gradients of the root arrive throughout a backward, and would wait for its end.
            bucket.flat.lands_together = comm.wire.lands_together and number != ROOT
            bucket.flat.message = getattr(torch, comm.wire.lands_as(bucket.spec))
    return Unit(spec, buckets, described.scale, plan.blocks)


def _take_over(unit: Unit, plan: UnitPlan, forms: Mapping[int, Form], comm: Comm) -> None:
    """Move a unit's parameters into its buckets, with the values of rank 0, and release it. Collective: broadcast."""
    homes = {name: (bucket, index) for bucket in unit.buckets for index, name in enumerate(bucket.spec.names)}
    start = [bucket.start_values() for bucket in unit.buckets]
    views = {bucket.number: bucket.places.views_of(values) for bucket, values in zip(unit.buckets, start, strict=True)}
    for name, parameter in plan.parameters:
        (bucket, index), form = homes[name], forms[id(parameter)]
        views[bucket.number][index].copy_(form.part(parameter.detach()))
        form.point(parameter, bucket.views[index])
        parameter.__dict__["_zeroshard"] = Slot(name, unit.number, bucket, index, form, parameter)
        parameter.__class__ = form.classes[0]
        unit.parameters.append(parameter)
        bucket.parameters.append(parameter)
    for bucket, values in zip(unit.buckets, start, strict=True):
        spread(bucket, values, comm, f"the parameters of {unit}", "start")
        bucket.set_start(values)
        bucket.changes.accept()
        if not bucket.spec.is_whole and bucket.layout.full_numel:
            bucket.close()
    if not unit.spec.is_whole:
        unit.let_read(Presence.RELEASED)


def move_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the unsharded states of an optimizer to the rank's device; sharded states move slice by slice.

    Step counters are not moved, unless the update reads them on the device.
    """
    for group in optimizer.param_groups:
        reads_steps = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                is_small = isinstance(value, torch.Tensor) and value.shape != parameter.shape
                if is_small and value.device != device and (key != "step" or reads_steps):
                    state[key] = value.to(device)


def spread(bucket: Bucket, values: torch.Tensor, comm: Comm, what: str, kind: str) -> None:
    """Overwrite a full bucket with the values of rank 0.

    Collective: broadcasts; every rank must call.

    Args:
        values: (full_numel,); ranks along the tensor axis have different parts, and replicated values.
    """
    for parameter, view in zip(bucket.parameters, bucket.places.views_of(values), strict=True):
        if slot_of(parameter).form.is_alike:
            comm.broadcast(view, what, kind)
    comm.broadcast(values, what, kind, is_part=True)
