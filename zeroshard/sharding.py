"""`shard()`: the order of the steps that shard a model.

Owns that order. It lies above `handle.py`, whose `Zero` it returns. Read `docs/design.md` for an overview, then
`core/engine.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard import accelerate_private
from zeroshard import argument_names as names
from zeroshard.account.summary import warn_if_whole
from zeroshard.activations import recompute_units, treatment_of
from zeroshard.core.version import VERSION
from zeroshard.describe.offload import Offload
from zeroshard.describe.optimizers import Optimizers
from zeroshard.describe.precision import Precision
from zeroshard.handle import Zero
from zeroshard.join.start import accepted_by_all, everybody_at, told_to_others
from zeroshard.misuse import refuse_others
from zeroshard.outer.options import Outer
from zeroshard.outer.start import Start
from zeroshard.parallel.alike import watch_axis
from zeroshard.parallel.forms import choose_forms
from zeroshard.parallel.pipe import check_callers, check_places, norms_over, set_parts_apart
from zeroshard.parallel.standins import StandIns
from zeroshard.setup.automatic import free_bytes
from zeroshard.setup.equal import check_equal, check_mesh, facts_of
from zeroshard.setup.memories import make_stores
from zeroshard.setup.request import Request, describe, domain_of, place_of
from zeroshard.setup.takeover import axis_of, build
from zeroshard.setup.wiring import wire
from zeroshard.table.activations import Activations, Treated
from zeroshard.table.cells import Cell, Residency
from zeroshard.table.settings import Settings
from zeroshard.table.trace import Ledger
from zeroshard.torch_checks import check_torch
from zeroshard.values.materialize import InitFn
from zeroshard.whole.module_buffers import follow_buffers
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh, current_mesh
from zeroshard.wire.transports import make_comm

__all__ = ["shard", "shard_over"]

Treatments = names.ActivationsName | Treated | Sequence[names.ActivationsName | Treated]
Formats = names.PrecisionName | torch.dtype | Precision
MakeComm = Callable[[Mesh, Settings, Ledger], Comm]
"""Creates the communicator of a mesh; every rank calls it at the same time."""


@refuse_others
def shard(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    stage: names.StageName | None = None,
    residency: names.ResidencyName | Residency | None = None,
    activations: Treatments | Mapping[str, Treatments] | Activations | None = None,
    offload: names.OffloadName | str | PathLike[str] | Offload | None = None,
    parameters: names.ParametersName | Cell | Mapping[str, names.ParametersName | Cell] | None = None,
    ignored: Sequence[object] = (),
    precision: Formats | Mapping[str | type[nn.Module], Formats] = "fp32",
    units: Sequence[object] | None = None,
    replicas: int | None = None,
    mesh: DeviceMesh | int | None = None,
    reduction: Literal["mean", "sum"] | float = "mean",
    outer: Outer | None = None,
    weights: str | Path | InitFn | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> Zero:
    """Shard a model and its optimizers in place over all ranks, or those of a mesh; the training loop does not change.

    Every rank receives the parameters and buffers of rank 0. The model, its parameters and the optimizer remain the
    same objects.

    Args:
        model: any module; its parameters may have any dtype and strides. A model on another device is moved to the
            rank's device unit by unit, with its buffers and the optimizer's states. Parameters on the meta device are
            initialized unit by unit, with the values that `model.apply(initializer)` gives in one process.
        optimizer: the optimizer or optimizers of the model. With None, pass the optimizer to `zero.attach()` later.
        stage: the ZeRO stage, 0 to 3; 3 by default. "auto" chooses the lowest stage whose model states and buffers take
            at most half of the device's free memory; `zs.plan(stage="auto")` also counts activations.
        residency: a `Residency`, or the name of a configuration of the ZeRO paper, "C1" to "C5"; replaces `stage`.
        activations: how the tensors that autograd saves are stored between forward and backward: a name such as
            "recompute" or "recompute+partition+offload" (docs/activations.md lists them), a cell such as
            `zs.Recomputed(every=4)`, a sequence of names and cells, or a mapping from patterns of unit names to these.
            By default activations are kept.
        offload: the state that is stored in host memory or in files instead of on the device: "host" or a folder for
            optimizer states, master weights and gradients, or a `zs.Offload` for fractions of them (docs/offload.md).
            "auto" moves to the host only the part of the states that does not fit half of the device's free memory; if
            all states are not enough, also their gradients, and at stage 3 then parameters.
        parameters: how units keep their parameters, if not as `stage` says: "sharded", "until-backward" (gathered
            parameters stay full from the forward until the backward has used them), "until-step" (they stay full until
            the optimizer's step, for several micro-batches), "replicated" (never sharded), a cell, or a mapping from
            patterns of unit names to these, such as {"head": "replicated"}.
        ignored: parameters, modules or patterns of parameter names that zeroshard does not manage: each rank keeps its
            own values and gradients, and updates them with an optimizer that is not passed to `shard`. Checkpoints and
            gradient norms exclude them. Ignored parameters on the meta device start with the values of rank 0.
        precision: "fp32" (no dtype changes), "bf16", "fp16" (with a dynamic loss scale), a `Precision`, or a mapping
            from module classes and patterns of module names to these, with the model's own under "", such as {"":
            "bf16", "blocks.*.router": "fp32"}.
        units: the modules whose parameters are gathered and reduced together: modules, classes or class names. By
            default, the blocks in (nested) lists, sequences and dictionaries of modules; small blocks are joined.
        replicas: the number of copies of the sharded state, each over world_size / replicas neighbouring ranks: more
            copies save less memory, and keep most messages among neighbours, such as the ranks of one host ("hybrid
            sharding"). 1 by default.
        mesh: the ranks and what each axis of them does, where a number of replicas does not say it: a DeviceMesh with
            axes named "replicate", "shard" and "tensor": state is sharded over "shard", and
            `parallelize_module(model, mesh["tensor"], plan)` has split parameters over "tensor". Ranks along "tensor"
            train on the same data, ranks along the other axes on different data. The mesh may be a part of the
            launch, in any order; the other ranks do not call, and rank 0 is then its first rank (docs/meshes.md). A
            number is that of `replicas`.
        reduction: how gradients are reduced over ranks: "mean", as in data parallelism, "sum", for losses weighted by
            tokens, or a divisor of the sum.
        outer: with a mesh that has an axis "replicate" (or `mesh=2`), its places become islands: each trains by itself,
            and they exchange what they learned as a `zs.Outer` says, instead of gradients in each step (docs/outer.md).
        weights: the source of values for a model on the meta device: a function that initializes the tensors of one
            module, or a directory of safetensors files with the model's parameter names or, for a model of
            Transformers, the names of its published files. Every rank must see the directory; rank 0 reads it slice by
            slice. By default, `_init_weights` initializes models of Transformers, and `reset_parameters` of each module
            initializes other models.
        settings: timeouts, transports and assurances of the caller; see `Settings`.

    Returns: the handle.

    Raises:
        ValueError, TypeError: an argument, a parameter or an optimizer cannot be sharded; the text says which.
        RankMismatchError: ranks differ in model, options or versions, or another rank rejected its arguments.
        RuntimeError: torchrun started several ranks, and `zs.init()` was not called.

    Collective: broadcast of all parameters and buffers from rank 0; every rank of the mesh must call.
    Source: Rajbhandari et al. 2020, section 5.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=3)
    before = model(torch.ones(4, 8)).square().mean().item()
    for _ in range(20):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < before
    ```
    """
    asked = Request(
        model,
        optimizer,
        stage,
        residency,
        activations,
        offload,
        parameters,
        ignored,
        precision,
        units,
        mesh,
        reduction,
        weights,
        settings,
        replicas=replicas,
    )
    return shard_over(asked, current_mesh(place_of(model)), make_comm, outer=outer)


def shard_over(
    asked: Request, joined: Mesh, make_comm: MakeComm, *, draws_alike: bool = False, outer: Outer | None = None
) -> Zero:
    """Shard a model over a communicator that the caller creates: describe, check, build, wire.

    Args:
        draws_alike: whether places of a pipe draw equal first values for what they have in common.
        outer: how islands exchange what they learned.

    Collective: as `shard()`.
    """
    settings, ledger = asked.settings if isinstance(asked.settings, Settings) else Settings(), Ledger()
    with told_to_others(joined):
        asked = asked.with_replicas()
        start = Start(outer, asked.mesh, domain_of(joined, asked.mesh))
    asked, domain, launch = dataclasses.replace(asked, mesh=start.asked), start.own, start.launch
    by_messages = dataclasses.replace(settings, shared_memory=False)
    with everybody_at("zs.shard()", launch, settings.watchdog_s, settings.heartbeat_s):
        # A collective: every rank calls it, whatever its arguments.
        room_bytes = free_bytes(domain, settings, asked.model)
        with accepted_by_all(launch, "zs.shard()"):
            described = describe(dataclasses.replace(asked, room_bytes=room_bytes), domain, choose_forms)
            start.check(described)
        check_mesh(described.mesh if start.across is None else launch)
        comm = make_comm(described.mesh, settings, ledger)
        if (pipe := described.mesh.pipe) is not None:
            comm.span(make_comm(pipe, by_messages, Ledger()))
        if start.across is not None:
            start.connect(make_comm(start.across, by_messages, Ledger()))
    elsewhere = frozenset[str]()
    if pipe is None:
        with start.together():
            check_equal(described.mesh, comm, facts := facts_of(described, VERSION))
        start.compare(facts)
    else:
        elsewhere = check_places(described, comm, VERSION, draws_alike=draws_alike)
    check_torch()
    with accepted_by_all(launch, "zs.shard()"):
        stores = make_stores(described)
    cell, plans = described.row.activations, described.plans
    dtypes = {name: parameter.dtype for plan in plans for name, parameter in plan.parameters}
    engine = build(described, comm, ledger, treatment_of(cell, plans, axis_of(comm), ledger), stores, StandIns)
    if pipe is not None:
        engine.norms_of_places = norms_over(engine, elsewhere)
    if domain.launched > 1:
        check_callers(engine)
    engine.order.buffers = follow_buffers(described, comm, engine.order.votes, engine.saved.preserve)
    zero = Zero(engine, described, dtypes, stores, start)
    hooks = wire(engine, described)
    if pipe is not None:
        set_parts_apart(engine, described)
    if len(described.mesh.tensor_ranks) > 1:
        watch_axis(engine, described.model, settings)
    recompute_units(cell, plans, hooks, engine.saved, ledger, engine.guard.suspect, engine.undo.put)
    warn_if_whole(described.mesh, engine.units, described.plans)
    accelerate_private.mark(described.model, zero.no_sync, engine.undo.put)
    return zero
