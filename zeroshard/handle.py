"""`shard()` and the handle it returns: where the layers meet.

Owns the order in which a model is taken over, and the public handle. It lies above the core because the handle offers
what
the layers between add: whole state, accounts of bytes. Read `docs/design.md` for the whole picture, then
`core/engine.py`.
"""

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.activations import recompute_units, treatment_of
from zeroshard.checkpoint.load import Loaded, load
from zeroshard.checkpoint.save import Saver
from zeroshard.core.engine import Engine
from zeroshard.core.norms import norms_of
from zeroshard.core.optimizer import ShardedOptimizer
from zeroshard.core.parameter import PlainForm
from zeroshard.core.slot import Form
from zeroshard.core.states import Scope, Sum
from zeroshard.core.unit import Unit
from zeroshard.core.version import VERSION
from zeroshard.describe.offload import OffloadLike
from zeroshard.describe.parameters import ParametersLike
from zeroshard.describe.precision import PrecisionLike
from zeroshard.describe.treatments import ActivationsLike
from zeroshard.optim.whole import whole_of
from zeroshard.report.profile import Profile
from zeroshard.state import accounting
from zeroshard.state.access import open_states
from zeroshard.state.admission import state_cost, whole_costs
from zeroshard.state.automatic import free_bytes
from zeroshard.state.average import Average, count_averages
from zeroshard.state.copies import check_copies
from zeroshard.state.elsewhere import check_updates, home_of, make_apart, reserve, source_of
from zeroshard.state.equal import check_equal, facts_of, facts_of_optimizer, tell_refusal
from zeroshard.state.exhaustion import describe_exhaustion, is_exhaustion
from zeroshard.state.gathered import gathered
from zeroshard.state.kernels import choose_kernels
from zeroshard.state.materialize import InitFn
from zeroshard.state.moved import move_states_away, move_states_back
from zeroshard.state.request import Described, Optimizers, Request, check_optimizers, describe, place_of
from zeroshard.state.start import accepted_by_all, everybody_at
from zeroshard.state.summary import summarize, warn_if_whole
from zeroshard.state.sums import give_sums
from zeroshard.state.takeover import build, move_states
from zeroshard.state.wiring import wire
from zeroshard.store.apart import Apart
from zeroshard.table.cells import Residency
from zeroshard.table.settings import Settings
from zeroshard.table.stages import name_of_row
from zeroshard.table.trace import Ledger, Memory, Trace, Traffic
from zeroshard.torch_private import check_torch
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh, current_mesh
from zeroshard.wire.transports import make_comm

__all__ = ["Zero", "shard", "shard_over"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
MakeComm = Callable[[Mesh, Settings, Ledger], Comm]
"""Makes the collectives of a mesh, on every rank at the same time."""

_HABIT = (
    "zs.shard() shards the model in place and returns a handle: write `zero = zs.shard(model, optimizer)` and keep "
    "using `model`."
)
OLD = MappingProxyType(
    {
        "cut": "shards are cut anywhere; leave it out",
        "replicas": "write mesh=2 for two copies",
        "init_fn": "write weights=function",
    }
)
"""Arguments of earlier versions, beside those that are fields of `Settings` now, and what is written instead."""


def _refuse_old(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function refuse arguments of earlier versions by name."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        fields = {field.name: f"write settings=zs.Settings({field.name}=...)" for field in dataclasses.fields(Settings)}
        for name in options.keys() & (fields | OLD).keys():
            raise TypeError(f"shard() has no argument {name}=: {(fields | OLD)[name]}.")
        return function(*args, **options)

    return call


@_refuse_old
def shard(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    stage: int | Literal["auto"] | None = None,
    residency: Residency | str | None = None,
    activations: ActivationsLike = None,
    offload: OffloadLike = None,
    parameters: ParametersLike = None,
    ignored: Sequence[object] = (),
    precision: PrecisionLike = "fp32",
    units: Sequence[object] | None = None,
    mesh: DeviceMesh | int | None = None,
    reduction: Literal["mean", "sum"] | float = "mean",
    weights: str | Path | InitFn | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> "Zero":
    """Shard a model and its optimizers in place over all ranks; the training loop stays as it is.

    Parameters and buffers become rank 0's on every rank. The model, its parameters and the optimizer remain the same
    objects.

    Args:
        model: any module; its parameters may have any dtypes and strides. From another device than the rank's it is
            moved there, unit by unit, with its buffers and the optimizer's states. On the meta device they get their
            values here, unit by unit, as `model.apply(initializer)` would give them in one process.
        optimizer: the optimizer or optimizers of the model, or None: then hand it to `zero.attach()` once it is built.
        stage: 0 to 3, a row of the residency table by name; 3 by default. "auto" is the least one whose model states
            and buffers take at most half of the device; `zs.plan(stage="auto")` knows activations, too.
        residency: instead of `stage`, a `Residency`, or the name of a configuration of the ZeRO paper, "C1" to "C5".
        activations: what happens between forward and backward to what autograd saves, the table's fourth column:
            names such as "recompute" or "recompute+partition+offload" (docs/activations.md has all), cells such as
            `zs.Recomputed(every=4)`, a sequence of them, or a mapping from patterns of unit names to these. By default
            activations are kept.
        offload: what lies in memory of the host, or in files, instead of on the device: "host" or a folder for the
            optimizer's states, master weights and gradients, or a `zs.Offload` for a part of them (docs/offload.md).
            "auto" moves to the host only what does not fit half of the device's free memory: the least part of the
            states, and at stage 3, where all of them are not enough, of the parameters.
        parameters: how units keep their parameters, where that differs from `stage`: "sharded", "until-backward" (what
            a forward has gathered stays whole until the backward has used it), "replicated" (never sharded), a cell, or
            a mapping from patterns of unit names to these, such as {"head": "replicated"}.
        ignored: parameters, modules or patterns of parameter names that are left to the caller: each rank keeps its
            own values and gradients of them, and updates them with an optimizer that is not handed over. Checkpoints
            and norms leave them out.
        precision: "fp32" (all as it is), "bf16", "fp16" (with a dynamic loss scale), or a `Precision`. Or a mapping
            from module classes and patterns of module names to these, with the model's own under "", such as
            {"": "bf16", "blocks.*.router": "fp32"}.
        units: what is gathered and reduced together: modules, classes or class names; by default blocks are found in
            lists, sequences and dictionaries of modules, also nested, and small ones joined.
        mesh: a number of copies of the sharded state, each over world_size / mesh neighbouring ranks: less memory is
            saved, and most messages stay among neighbours (one host, say). Or a DeviceMesh of all ranks with axes
            called "replicate", "shard" (over which state is sharded) and "tensor", over which
            `parallelize_module(model, mesh["tensor"], plan)` has split parameters. Ranks along "tensor" train on the
            same data, ranks along the others on data of their own.
        reduction: "mean" over ranks, as data parallelism does, "sum", for losses weighted by tokens, or a number that
            the sum is divided by.
        weights: where the values of a model on the meta device come from: a function that initializes the tensors of
            one module, or a directory of safetensors under the model's own names, which every rank must see, and rank 0
            reads, slice by slice. By default Transformers' `_init_weights` initializes its models, and each module's
            `reset_parameters` others.
        settings: limits of waits, transports, and what the caller vouches for.

    Returns: the handle.

    Raises:
        ValueError, TypeError: an argument, a parameter or an optimizer that cannot be sharded; the text says which.
        RankMismatchError: ranks differ in model, options or versions, or another rank refused what it was given.
        RuntimeError: torchrun started several ranks, and they have not joined: `zs.init()` comes first.

    Collective: broadcast of parameters and buffers from rank 0; every rank must call.
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
    )
    return shard_over(asked, current_mesh(place_of(model)), make_comm)


def shard_over(asked: Request, joined: Mesh, make_comm: MakeComm) -> "Zero":
    """Do what `shard()` does, over collectives that the caller makes: describe, check, build, wire.

    Collective: as `shard()`.
    """
    settings, ledger = asked.settings if isinstance(asked.settings, Settings) else Settings(), Ledger()
    with everybody_at("zs.shard()", joined, settings.watchdog_s, settings.heartbeat_s):
        # Every rank asks for this, whatever it was given.
        room_bytes = free_bytes(joined, settings, asked.model)
        with accepted_by_all(joined, "zs.shard()"):
            described = describe(dataclasses.replace(asked, room_bytes=room_bytes), joined, _forms_of)
        comm = make_comm(described.mesh, settings, ledger)
    check_equal(described.mesh, comm, facts_of(described, VERSION))
    check_torch()
    with accepted_by_all(described.mesh, "zs.shard()"):
        apart = make_apart(described)
    cell, plans = described.row.activations, described.plans
    treatment = treatment_of(cell, plans, comm, ledger)
    engine = build(described, comm, ledger, treatment, apart, home_of(described, apart))
    zero = Zero(engine, described, apart)
    hooks = wire(engine, described.model, plans, settings.forward_methods, described.precision, described.own_precision)
    recompute_units(cell, plans, hooks, engine.saved, ledger)
    warn_if_whole(described.mesh, engine.units, described.plans)
    return zero


def _forms_of(model: nn.Module, mesh: Mesh, has_ignored: bool) -> Mapping[int, Form]:
    """Return what kind of tensor each parameter is, by identity.

    Args:
        has_ignored: whether ranks have gradients of their own beside these, so that these are logical at each stage.
    """
    if len(mesh.tensor_ranks) == 1:
        plain = PlainForm(has_axis=has_ignored and mesh.world_size > 1)
        return dict.fromkeys(map(id, model.parameters()), plain)
    # torch's DTensor takes half a second to import.
    from zeroshard.parallel.tensor import forms_of

    return forms_of(model, mesh)


@final
class Zero:
    """The handle of a sharded model.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(4, 1)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    with zero.gathered():
        weights = model.state_dict()  # whole, on every rank
    assert weights["weight"].shape == (1, 4)
    ```
    """

    def __init__(self, engine: Engine, described: Described, apart: Apart | None = None) -> None:
        self._apart, self._specs = apart, described.units
        self._engine, self._model, self._elementwise = engine, described.model, described.settings.elementwise
        self._ignored, self._sharded = described.ignored, list[ShardedOptimizer]()
        self._chosen = [described.chosen] if described.chosen else []
        if described.chosen and engine.mesh.rank == 0:
            logging.getLogger(__name__).info(described.chosen)
        self._saver = Saver(engine, described.model, self._sharded)
        self._averages: weakref.WeakSet[Average] = weakref.WeakSet()
        self.residency = described.row
        """The row of the residency table."""
        if engine.comm.watchdog is not None:
            # The watchdog's threads must not keep the model alive.
            engine.comm.watchdog.tell_with_errors(functools.partial(_describe, weakref.ref(self)))
        for one in described.optimizers:
            self._take(one)

    def __str__(self) -> str:
        return self.summary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be called: `shard()` changes a model in place, and returns no other one."""
        raise TypeError(f"{_HABIT} Call the model.")

    def __getattr__(self, name: str) -> Any:
        is_of_model = not name.startswith("__") and hasattr(nn.Module, name)
        # Without an object Python suggests no similar name of this class, which would mislead here.
        raise AttributeError(
            f"'Zero' object has no attribute '{name}'." + f" {_HABIT}" * is_of_model, name=name, obj=None
        )

    def __repr__(self) -> str:
        numel = sum(unit.numel for unit in self.units)
        row = name_of_row(self.residency)
        return f"Zero({self.mesh} {row}, {len(self.units):,} units, {numel:,} parameters)"

    @property
    def mesh(self) -> Mesh:
        """The ranks, and this one's place among them."""
        return self._engine.mesh

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is gathered and reduced together, the root first; each has `name` and `numel`."""
        return tuple(self._engine.units)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that update the shards."""
        return tuple(one.optimizer for one in self._sharded)

    @property
    def loss_scale(self) -> float | None:
        """What gradients of the model's outputs are multiplied by at the moment; None without a loss scale.

        Raises:
            RuntimeError: on a device, where gradients of the last step were not finite and the scale is at its floor.
        """
        self._engine.learn()
        scale = self._engine.loss_scale
        return None if scale is None else scale.value

    @property
    def trace(self) -> Trace:
        """What the engine issued in the last steps, and what it will issue in the next."""
        return self._engine.order.history.trace

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer that was built from the sharded model's parameters; it stays the same object.

        Raises:
            ValueError: its update cannot be cut, or a parameter is not in the model or has an optimizer already.
            RankMismatchError: ranks differ in its settings.

        Collective: two all-reduces of 32 bytes; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        zero.attach(optimizer)
        ```
        """
        if any(one.optimizer is optimizer for one in self._sharded):
            raise ValueError(f"This {type(optimizer).__name__} is attached already.")
        engine, number = self._engine, len(self._sharded)
        engine.leave_passes("attach()")
        engine.order.barrier(f"attach() of optimizer {number}")
        try:
            row, is_known = self.residency, self._elementwise
            check_optimizers(self._model, [optimizer], row, is_known, is_final=False, ignored=self._ignored)
            check_updates(self.residency, self._specs, [*self.optimizers, optimizer])
            reserve(self._apart, self._specs, [optimizer], has_masters=False)
        except (TypeError, ValueError) as error:
            tell_refusal(engine.mesh, engine.comm, error)
            raise
        check_equal(engine.mesh, engine.comm, facts_of_optimizer(self._model, optimizer, number))
        self._take(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer that was checked and compared."""
        move_states(optimizer, self.mesh.device)
        self._chosen += choose_kernels(self._engine.guard, optimizer)
        whole = whole_of(optimizer)
        costs = {} if whole is None else whole_costs(optimizer, whole)
        self._sharded.append(ShardedOptimizer(self._engine, optimizer, len(self._sharded), state_cost(optimizer)))
        open_states(self._engine, self._sharded[-1])
        self._sharded[-1].whole_costs = costs
        give_sums(self._engine, optimizer)
        self._sharded[-1].source = source_of(self._engine, self._apart, self._sharded[-1])
        if self._engine.comm.watchdog is not None and len(self._sharded) == 1:
            optimizer.register_step_post_hook(self._engine.comm.watchdog.count_step)

    def gathered(self, *, writeback: bool = False, states: bool = False) -> AbstractContextManager[None]:
        """Hold all parameters whole inside the context, as plain tensors; passes inside it communicate nothing.

        Parameters that torch split over an axis "tensor" are DTensors here, and passes communicate along it as ever.

        Args:
            writeback: on the way out rank 0's parameters and buffers (and states) become everybody's. Without it a
                change in place is an error. An exception inside the context leaves without writing back.
            states: the optimizers hold the model's parameters and whole states, for `state_dict` and `load_state_dict`.

        Raises:
            RuntimeError: inside another `gathered()` or a pass; a change without `writeback`.

        Collective: all-gather of all parameters (and states) on the way in, broadcast on the way out with `writeback`;
        every rank must enter. Generation inside may differ in length between ranks.
        """
        return gathered(self._engine, self._model, self._sharded, writeback=writeback, states=states)

    def on_first_rank(self, when: bool = True, *, states: bool = False) -> Iterator[None]:
        """Run the body of a `for` once, on rank 0 alone and with whole parameters: evaluation or saving by one rank.

        The other ranks wait behind the loop until rank 0 is through. What only one rank has to do is written as it is
        with DistributedDataParallel, `for _ in zero.on_first_rank():` in the place of `if rank == 0:`. Where the model
        and its states do not fit a rank together, `zero.save(path)` writes them in parts.

        Args:
            when: False leaves the body out on all ranks, and communicates nothing; the same on every rank.
            states: as in `gathered()`: optimizers hold whole states, for `state_dict`.

        Raises:
            RuntimeError: inside `gathered()` or a pass; the body changed a parameter.

        Collective: as `gathered()`; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zs.shard(model, optimizer)
        for _ in zero.on_first_rank(states=True):
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        ```
        """
        if not when:
            return
        with self.gathered(states=states):
            if self.mesh.rank == 0:
                yield

    @contextmanager
    def no_sync(self, axis: Literal["all", "replicate"] = "all") -> Iterator[None]:
        """Accumulate gradients without reducing them over all ranks; the next backward outside does so for the sum.

        Args:
            axis: "all" keeps them on this rank; where gradients are sharded, whole unreduced ones are kept meanwhile,
                and `memory()` shows them as transient. "replicate" reduces them within each copy of the state (`mesh=`)
                and leaves the sum over copies to the end: no more memory, and fewer messages between copies.

        Raises:
            RuntimeError: a pass is open; "replicate" while gradients summed over all copies are held.
        """
        if axis not in ("all", "replicate"):
            raise ValueError(f"axis must be 'all' or 'replicate'; got {axis!r}.")
        engine = self._engine
        engine.leave_passes("no_sync()")
        is_apart = axis == "replicate" and self.mesh.replicas > 1
        held = [(slot.bucket.grads, slot.index) for slot in engine.slots.values() if is_apart]
        sums = [grads.own_part(i) for grads, i in held if grads.scope is Scope.ALL and grads.sums[i] is Sum.USED]
        # Zeros, as zero_grad(set_to_none=False) leaves them, are sums over any ranks.
        if any(bool(one.any()) for one in sums):
            raise RuntimeError(
                f"{self.mesh} no_sync('replicate') after a backward that summed over all copies. Enter it for all "
                "micro-batches of a step but the last, or clear the gradients first."
            )
        before = engine.scope
        engine.scope = min(before, Scope.COPY if axis == "replicate" else Scope.RANK)
        try:
            yield
        finally:
            engine.scope = before

    def grad_norm(self, p: float = 2.0) -> torch.Tensor:
        """Return the p-norm of all gradients of the model, 0-d, equal on all ranks.

        Collective: all-gather of 8 bytes a parameter, once after gradients change; every rank must call.
        """
        # Every rank asks, also one without a gradient.
        self._engine.norms(float(p))
        norms = norms_of([slot for slot in self._engine.slots.values() if slot.has_grad], float(p))
        if not norms:
            return torch.zeros((), device=self.mesh.device)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), p)
        return total

    def ema(self, decay: float) -> Average:
        """Return a new exponential moving average of the trainable parameters, sharded as the optimizer's states are.

        Call its `update()` after each step; inside its `swapped()` the model computes with the average.

        Args:
            decay: the weight of the average so far, such as 0.999.

        Raises:
            ValueError: a decay outside [0, 1).
            RuntimeError: inside a pass.
            RankMismatchError: ranks give different ones.

        Collective: an all-reduce of 32 bytes; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        average = zero.ema(0.999)
        average.update()
        with average.swapped(), zero.gathered():
            weights = model.state_dict()  # of the average, whole
        ```
        """
        average = Average(self._engine, decay)
        self._averages.add(average)
        return average

    def offload_states(self) -> None:
        """Move the optimizers' states, and master weights beside parameters, to the host: room for another phase.

        Generation, evaluation, saving and loading work meanwhile; a step raises until `reload_states()`. What is
        offloaded for good (`zs.shard(offload=)`) stays where it is. On a CPU nothing is moved.

        Raises:
            RuntimeError: inside a pass or `gathered()`.

        Collective: an all-reduce of 32 bytes; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zs.shard(model, optimizer)
        zero.offload_states()
        with zero.gathered(), torch.no_grad():
            model(torch.ones(2, 4))
        zero.reload_states()
        ```
        """
        move_states_away(self._engine, self._sharded)

    def reload_states(self) -> None:
        """Move back what `offload_states()` has moved; nothing is to be done where it has not.

        Raises:
            RuntimeError: inside a pass or `gathered()`.

        Collective: an all-reduce of 32 bytes; every rank must call.
        """
        move_states_back(self._engine, self._sharded)

    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint: parameters, buffers, optimizers, loss scale, each rank's random generators, and `extra`.

        It is there wholly or not at all; any number of ranks at any stage and precision reads it. When this returns, it
        is on the disk, unless `asynchronous`: then what this rank writes has been copied to host memory, and a thread
        writes the copy. While it does, each optimizer step asks all ranks how far they are. The outcome is known, and
        a failure raised on every rank, at the first step after it, at the next `save`, `load` or `wait`, or at exit of
        the interpreter, which waits for it and ends with status 1 if it failed. (A killed process does not exit.)

        Args:
            path: a new folder, the same on every rank, on a disk that all of them share.
            extra: what the program needs to go on, such as a scheduler's `state_dict()` and the position in its data:
                numbers, texts, lists, mappings, small tensors; the same on every rank.
            step: the checkpoint's number, by which `zs.latest` finds the newest; by default the number at the end of
                the path ("runs/a/step-1000"), else the steps that the optimizer has taken, also before a load.
            asynchronous: return after the copy, which is kept for the next one. One save is under way at a time.
            keep: let this checkpoint expire, and remove those beside it that expire, too, and are older, but for so
                many that `keep`, at least 2, are left with this one. Saved without it, a checkpoint stays.

        Returns: the path.

        Raises:
            CheckpointError: on every rank, with one rank's reason; nothing was committed, unless the text says so.
            RuntimeError: inside a pass or `gathered()`.

        Collective: agreements of some bytes, an all-gather of checksums; every rank must call.

        ```python
        import tempfile, torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.AdamW(model.parameters()))
        with tempfile.TemporaryDirectory() as folder:
            zero.save(f"{folder}/step-7", extra={"epoch": 2}, keep=3)
            assert zero.load(zs.latest(folder)).extra == {"epoch": 2}
        ```
        """
        return self._saver.save(path, extra, step=step, asynchronous=asynchronous, keep=keep)

    def wait(self) -> None:
        """Wait until an asynchronous save is committed; nothing is to be done where there is none.

        Raises:
            CheckpointError: on every rank, if it failed.
            RuntimeError: inside a pass or `gathered()`.

        Collective: agreements of some bytes; every rank must call.

        ```python
        import tempfile, torch, zeroshard as zs

        zero = zs.shard(torch.nn.Linear(4, 1))
        with tempfile.TemporaryDirectory() as folder:
            path = zero.save(f"{folder}/step-7", asynchronous=True)
            zero.wait()
            assert zs.latest(folder) == path
        ```
        """
        self._saver.wait("zero.wait()")

    def load(self, path: str | Path, *, only_model: bool = False, cast: bool = False) -> Loaded:
        """Read a checkpoint, written by any number of ranks at any stage, into the model and its optimizers.

        Everything is compared with the model and every byte with its checksum before anything in memory changes. Each
        rank reads its own ranges, tensor by tensor. Random generators are restored on ranks that had some when the
        checkpoint was written. Options of the optimizers that say how and not what (`foreach`, `fused`, `capturable`,
        `differentiable`) stay as they are.

        Args:
            only_model: read parameters and buffers alone; the path may then be a safetensors file, or a folder of them
                as Transformers writes it.
            cast: convert dtypes that differ, which is else an error.

        Returns: the checkpoint's step, and the `extra` that `save` was given.

        Raises:
            CheckpointError: on every rank; the text names the file, and says whether memory is unchanged.
            RuntimeError: inside a pass or `gathered()`.

        Collective: agreements of some bytes, and an all-gather where parameters are kept whole but updated in parts;
            every rank must call.
        """
        self._saver.wait("zero.load()")
        return load(self._engine, self._model, self._sharded, path, only_model=only_model, cast=cast)

    def check_copies(self) -> None:
        """Compare what several ranks hold of the same values: parameters and states that are not sharded, replicas.

        Costs a read of them; where everything is sharded, nothing. Call it every so many steps.

        Raises:
            RankMismatchError: on every rank, with the first parameter or state that differs.
            RuntimeError: inside a pass.

        Collective: all-gathers of 16 bytes, where there are copies; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=1)
        zero.check_copies()
        ```
        """
        check_copies(self._engine, self._sharded)

    def agree(self, value: bool, what: str = "") -> bool:
        """Return whether `value` is true on all ranks: the one way to decide alike what ranks see differently.

        Whether there is a next batch, whether to stop, whether it is time to save: clocks, signals and data differ by
        rank, and a rank that steps alone waits for the others until the watchdog ends it.

        Args:
            what: what is asked, for errors; ranks that ask for different things are one.

        Raises:
            RuntimeError: inside a pass.
            RankMismatchError: ranks are at different places of the program, or one failed.

        Collective: all-reduce of 32 bytes; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zs.shard(model, optimizer)
        batches = iter([torch.ones(2, 4)] * 3)
        while zero.agree((batch := next(batches, None)) is not None, "is there a batch?"):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
        """
        self._engine.leave_passes("agree()")
        return bool(self._engine.order.barrier(f"agree({what!r})", bool(value))[0])

    def summary(self) -> str:
        """Return a table in plain text, a line for each unit: parameters, shards, padding, bytes held and sent.

        Lines below it say how much is whole at once, where parameters are gathered, and on a device which kernels were
        chosen for optimizers and whether their steps wait for it. `print(zero)` prints the table.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert "(root)" in zero.summary()
        ```
        """
        return "\n".join([summarize(self._engine, self._sharded, name_of_row(self.residency)), *self._chosen])

    def memory(self) -> Memory:
        """Return the bytes that this rank holds, held at most, and is predicted to hold."""
        return count_averages(accounting.measure(self._engine, self._sharded), self._averages)

    def profile(self) -> Profile:
        """Return what counts, inside `with`, where the time of steps goes on this rank: see `zs.Profile`.

        Raises:
            RuntimeError: on entering it inside a pass.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zs.shard(model, optimizer)
        with zero.profile() as profile:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert profile.steps == 3 and profile.seconds["optimizer"] > 0
        ```
        """
        return Profile(self._engine, self._model, self._sharded)

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent, and what a step with one micro-batch sends."""
        order = self._engine.order
        per_step = accounting.predict_step_bytes(self._engine.units, self._sharded)
        return Traffic(dict(self._engine.comm.sent_bytes), per_step, order.history.made)


def _describe(handle: "weakref.ref[Zero]", error: BaseException) -> str:
    """Return what is to be told beside an error that ends this process."""
    zero = handle()
    return describe_exhaustion(zero.mesh, zero.memory()) if zero is not None and is_exhaustion(error) else ""
