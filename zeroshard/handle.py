"""The handle of a sharded model, which `zs.shard()` returns.

Owns the public handle `Zero`. The module lies above `setup/` because the handle offers full states and memory accounts.
`sharding.py` makes handles.
"""

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from zeroshard import peers
from zeroshard.account import accounting
from zeroshard.account.exhaustion import describe_exhaustion, is_exhaustion
from zeroshard.account.summary import summarize
from zeroshard.checkpoint.contents import How
from zeroshard.checkpoint.islands import load_islands
from zeroshard.checkpoint.load import Loaded, load
from zeroshard.checkpoint.reader import path_of
from zeroshard.checkpoint.save import Saver
from zeroshard.core.engine import Engine
from zeroshard.core.norms import norms_of
from zeroshard.core.states import Scope, Sum
from zeroshard.core.undo import DETACHED, Undo
from zeroshard.core.unit import Unit
from zeroshard.describe.optimizers import check_entries, optimizers_of
from zeroshard.loader import Stateful, checked_position, states_of
from zeroshard.misuse import HABIT, Loop, refuse_those
from zeroshard.optim.admission import admit_groups, check_optimizers, needs_shapes
from zeroshard.optim.keeps import kept_by
from zeroshard.optim.whole import ATTRIBUTE, SHAPED
from zeroshard.outer.start import Start
from zeroshard.report.profile import Profile
from zeroshard.setup.equal import check_equal, facts_of_optimizer, tell_refusal
from zeroshard.setup.memories import check_updates, reserve, source_of
from zeroshard.setup.request import Described
from zeroshard.setup.takeover import move_states
from zeroshard.store.stores import Stores
from zeroshard.table.stages import name_of_row
from zeroshard.table.trace import Memory, Trace, Traffic
from zeroshard.update.kernels import choose_kernels
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.update.whole_sums import give_sums
from zeroshard.whole.access import open_states
from zeroshard.whole.average import Average, count_averages
from zeroshard.whole.copies import check_copies
from zeroshard.whole.detach import detach, release
from zeroshard.whole.gathered import gathered
from zeroshard.whole.moved import move_states_away, move_states_back
from zeroshard.whole.written import watch_written
from zeroshard.wire.mesh import Mesh

__all__ = ["Zero"]


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

    def __init__(
        self,
        engine: Engine,
        described: Described,
        dtypes: Mapping[str, torch.dtype],
        stores: Stores,
        start: Start,
    ) -> None:
        self._dtypes, self._settings, self._stores, self._specs = dtypes, described.settings, stores, described.units
        self._engine, self._model, self._elementwise = engine, described.model, described.settings.elementwise
        self._ignored, self._sharded = described.ignored, list[ShardedOptimizer]()
        self._taken = dict[ShardedOptimizer, tuple[Undo, list[str]]]()
        """How each optimizer becomes plain again, and lines about its kernels."""
        self._chosen = [described.chosen] if described.chosen else []
        if described.chosen and engine.mesh.rank == 0:
            logging.getLogger(__name__).info(described.chosen)
        watch_written(engine)
        self._islands = start.islands(engine, described.model, self._sharded)
        self._together = start.saved_as_one
        self._saver = Saver(engine, described.model, self._sharded, self._together)
        self._averages: weakref.WeakSet[Average] = weakref.WeakSet()
        self.residency = described.row
        """The row of the residency table."""
        if engine.comm.watchdog is not None:
            # The watchdog's threads must not keep the model alive.
            engine.comm.watchdog.tell_with_errors(functools.partial(_describe, weakref.ref(self)))
        for one in described.optimizers:
            self._take(one)

    def __str__(self) -> str:
        return self.summary() if "_engine" in vars(self) else repr(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: the handle is not a model, because `shard()` changes the model in place."""
        raise TypeError(f"{HABIT} Call the model.")

    if not TYPE_CHECKING:  # for a type checker, names that the class does not have are mistakes

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__") and "_engine" not in vars(self):
                raise RuntimeError(DETACHED)
            is_of_model = not name.startswith("__") and hasattr(nn.Module, name)
            hint = f" Write {peers.METHODS[name]}." if name in peers.METHODS else f" {HABIT}" * is_of_model
            # obj=None keeps Python from suggesting a similar name of this class, which would mislead here.
            raise AttributeError(f"'Zero' object has no attribute '{name}'.{hint}", name=name, obj=None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self!r} cannot be copied or pickled: it belongs to its process. Use zero.save(path).")

    def __repr__(self) -> str:
        if "_engine" not in vars(self):
            return "Zero(detached)"
        numel = sum(unit.numel for unit in self.units)
        row = name_of_row(self.residency)
        return f"Zero({self.mesh} {row}, {len(self.units):,} units, {numel:,} parameters)"

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks, with the position of this rank."""
        return self._engine.mesh

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, root first: parameters that are gathered and reduced together. Each has `name` and `numel`."""
        return tuple(self._engine.units)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that update the shards."""
        return tuple(one.optimizer for one in self._sharded)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None without loss scaling.

        Raises:
            RuntimeError: the gradients of the last step were not finite and the scale is at its minimum (CUDA only).
        """
        self._engine.learn()
        scale = self._engine.loss_scale
        return None if scale is None else scale.value

    @property
    def trace(self) -> Trace:
        """The actions that the engine issued in the last steps, and those that it will issue in the next step."""
        return self._engine.order.history.trace

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer that was built from the sharded model's parameters; it stays the same object.

        Raises:
            ValueError: the optimizer's update cannot be sharded, or a parameter is not in the model or already has an
                optimizer.
            RankMismatchError: the optimizer's settings differ between ranks.

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
            raise ValueError(
                f"This {type(optimizer).__name__} is attached already. To shard its model again, call zero.detach() "
                "first, which makes model and optimizer plain."
            )
        self._attach(optimizer)

    def _attach(self, optimizer: torch.optim.Optimizer, room: int = 0) -> None:
        """See `attach`.

        Args:
            room: states of each element for which files have room that no optimizer uses.
        """
        engine, number = self._engine, len(self._sharded)
        engine.leave_passes("attach()")
        engine.order.barrier(f"attach() of optimizer {number}")
        try:
            names = check_entries(self._model, optimizers_of([optimizer]), self._ignored, is_final=False)
            check_optimizers(names, [optimizer], self._elementwise, is_cut=self.residency.is_cut)
            check_updates(self._specs, [*self.optimizers, optimizer], engine.mesh.device)
            reserve(self._stores, self._specs, [optimizer], is_first=False, room=room)
        except (TypeError, ValueError) as error:
            tell_refusal(engine.mesh, engine.comm, error)
            raise
        check_equal(engine.mesh, engine.comm, facts_of_optimizer(self._model, optimizer, number))
        self._take(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer after its checks."""
        with self._engine.undo.apart() as part:
            if needs_shapes(optimizer, is_cut=self.residency.is_cut):
                self._engine.undo.put(vars(optimizer), ATTRIBUTE, SHAPED)
            move_states(optimizer, self.mesh.device)
            lines = choose_kernels(self._engine.guard, optimizer, self._engine.undo)
            number, kept = len(self._sharded), kept_by(optimizer)
            source = source_of(self._engine, self._stores, optimizer, kept.per_element)
            admit = functools.partial(
                admit_groups, optimizer, elementwise=self._elementwise, is_cut=self.residency.is_cut
            )
            self._sharded.append(one := ShardedOptimizer(self._engine, optimizer, number, source, kept, admit))
            self._taken[one] = part, lines
            if self._islands is not None:
                self._islands.follow(one)
            open_states(self._engine, one)
            give_sums(self._engine, optimizer)
            if self._engine.comm.watchdog is not None and len(self._sharded) == 1:
                self._engine.undo.keep(optimizer.register_step_post_hook(self._engine.comm.watchdog.count_step))

    def _replace(self, before: Sequence[torch.optim.Optimizer], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Attach what a trainer made for a training, in this order, and let go what it made before, with its states.

        Args:
            before: optimizers that are let go, except those that are among `optimizers`, too.

        Raises: as `attach`; those before are gone then.
        Collective: as `attach`, for each new one; every rank must call.
        """
        self._engine.leave_passes("new optimizers")
        self._saver.wait("new optimizers")
        left = {id(one) for one in before} - {id(one) for one in optimizers}
        gone = [one for one in self._sharded if id(one.optimizer) in left]
        for one in gone:
            release(self._engine, one, self._taken[one][0])
            self._sharded.remove(one)
            del self._taken[one]
        known = {id(one) for one in self.optimizers}
        for new in [one for one in optimizers if id(one) not in known]:
            # Rooms in files are those of a state's name.
            rooms = [one.kept.per_element for one in gone if type(one.optimizer) is type(new)]
            self._attach(new, max(rooms, default=0))
            self._sharded[-1].applied = min((one.applied for one in gone), default=0)
        places = {id(one): place for place, one in enumerate(optimizers)}
        self._sharded.sort(key=lambda one: places.get(id(one.optimizer), len(places)))
        if self._islands is not None:
            self._islands.recount()

    def gathered(
        self, *, writeback: bool = False, states: bool = False, whole: bool = False
    ) -> AbstractContextManager[None]:
        """Gather all parameters as full, plain tensors inside the context; passes inside it do not communicate.

        Parameters that torch split over an axis "tensor" are DTensors inside the context, and passes still communicate
        along that axis. With `whole`, their modules have plain parameters of the whole shape instead, as
        `torch.save(model.state_dict(), path)` and `save_pretrained` need them, and forwards are refused.

        Args:
            writeback: on exit, broadcast parameters and buffers (and states) of rank 0, with a pipe of the first rank
                of each place, to all ranks. Without it, a change in place is an error. After an exception inside the
                context, nothing is written back; parameters that are whole on each rank (stages 0 to 2) and were
                changed before it are refused by evaluation, and by steps, saves, loads and `gathered()`, until another
                `gathered(writeback=True)` has written them. Islands write at the start, after `finish()` or at an
                exchange of the whole model, all of them: the first one's parameters and buffers.
            states: also gather optimizer states, for `state_dict` and `load_state_dict` of the optimizers. After an
                exception inside, states, groups and their options are as before it.
            whole: also gather what is split over an axis "tensor": every rank has the whole model in memory. Without
                such an axis, values are whole anyway.

        Raises:
            RuntimeError: called inside another `gathered()` or a pass, or parameters changed without `writeback`, or
                islands write between exchanges.

        Collective: all-gather of all parameters (and states) on entry, broadcast on exit with `writeback`; every rank
            must enter. Generation inside the context may differ in length between ranks.
        """
        given = (self._engine, self._model, self._sharded)
        outer: AbstractContextManager[None] = gathered(*given, writeback=writeback, states=states)
        if writeback and self._islands is not None:
            outer = self._islands.written(outer)
        if not whole or len(self.mesh.tensor_ranks) == 1:
            return outer
        from zeroshard.parallel.whole import with_whole_values  # imports DTensor

        engine, model = self._engine, self._model
        return with_whole_values(outer, engine, model, self.optimizers, writeback=writeback, states=states)

    def on_first_rank(self, when: bool = True, *, states: bool = False, whole: bool = False) -> Iterator[None]:
        """Run the body of a `for` loop once, on rank 0 only, with full parameters: for evaluation or saving.

        The other ranks wait at the end of the loop until rank 0 finishes. Replace `if rank == 0:` of a
        DistributedDataParallel script with `for _ in zero.on_first_rank():`. If the model and its states do not fit one
        rank, use `zero.save(path)`, which writes them in parts.

        Args:
            when: False skips the body on all ranks without communication; equal on every rank.
            states: also gather optimizer states, as in `gathered()`.
            whole: also gather what is split over an axis "tensor", as in `gathered()`.

        Raises:
            RuntimeError: called inside `gathered()` or a pass, or the body changed a parameter.

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
        return Loop(self._once(when, states=states, whole=whole))

    def _once(self, when: bool, *, states: bool, whole: bool) -> Iterator[None]:
        if not when:
            return
        with self.gathered(states=states, whole=whole):
            if self.mesh.rank == 0:
                yield

    @contextmanager
    def no_sync(self, axis: Literal["all", "replicate"] = "all") -> Iterator[None]:
        """Accumulate gradients without reducing them over all ranks; the next backward outside reduces their sum.

        Args:
            axis: "all" keeps gradients on this rank. Sharded gradients are then full and unreduced, and `memory()`
                counts them as transient. "replicate" reduces gradients within each replica of the state (`mesh=`) and
                delays the sum over replicas: it takes no more memory, and sends fewer messages between replicas.

        Raises:
            ValueError: `axis` is neither "all" nor "replicate".
            RuntimeError: called inside a pass, or "replicate" with gradients that are already summed over all replicas.
            RankMismatchError: ranks make different numbers of passes inside, where they need each other.

        Collective: none of its own. Ranks may make different numbers of passes inside, or none, at stages 0 to 2 with
            "all". Where parameters are sharded (stage 3), and with "replicate", every rank must make equally many.
        """
        if axis not in ("all", "replicate"):
            raise ValueError(f"axis must be 'all' or 'replicate'; got {axis!r}.")
        engine = self._engine
        engine.leave_passes("no_sync()")
        is_apart = axis == "replicate" and self.mesh.replicas > 1
        held = [(slot.bucket.grads, slot.index) for slot in engine.slots.values() if is_apart]
        sums = [grads.own_part(i) for grads, i in held if grads.scope is Scope.ALL and grads.sums[i] is Sum.USED]
        # Zeros, left by zero_grad(set_to_none=False), are valid sums over any set of ranks.
        if any(bool(one.any()) for one in sums):
            raise RuntimeError(
                f"{self.mesh} no_sync('replicate') was entered after a backward that summed gradients over all "
                "replicas. Enter it for all micro-batches of a step but the last, or clear the gradients first."
            )
        with engine.reducing_over(Scope.COPY if axis == "replicate" else Scope.RANK):
            yield

    def grad_norm(self, p: float = 2.0) -> torch.Tensor:
        """Return the p-norm of all gradients of the model as a 0-d tensor, equal on all ranks.

        Args:
            p: the order of the norm; 2 by default.

        Collective: all-gather of 8 bytes per parameter, on the first call after gradients change; every rank must call.
        """
        # A collective: ranks without a gradient call it, too.
        self._engine.norms(float(p))
        slots = [slot for slot in self._engine.slots.values() if slot.has_grad]
        norms = self._engine.norms_of_places(norms_of(slots, float(p)), slots, float(p), True)
        if not norms:
            return torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), p)
        return total

    def ema(self, decay: float) -> Average:
        """Return a new exponential moving average of the trainable parameters, sharded like the optimizer states.

        Call `update()` of the average after each step; inside `swapped()` the model computes with the average.

        Args:
            decay: the weight of the previous average, such as 0.999.

        Raises:
            ValueError: `decay` is outside [0, 1).
            RuntimeError: called inside a pass.
            RankMismatchError: `decay` differs between ranks.

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
        """Move optimizer states and separate master weights to host memory, to free device memory for another phase.

        Generation, evaluation, saving and loading work in this state; an optimizer step raises until `reload_states()`.
        States that `zs.shard(offload=)` placed elsewhere stay there. On a CPU, nothing moves.

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
        """Move the states that `offload_states()` moved back to the device; without a previous call, do nothing.

        Raises:
            RuntimeError: inside a pass or `gathered()`.

        Collective: an all-reduce of 32 bytes; every rank must call.
        """
        move_states_back(self._engine, self._sharded)

    def detach(self, *, to: Literal["all", "rank 0"] = "all", dtype: torch.dtype | None = None) -> None:
        """Make the model and its optimizers plain again, the same objects, with full values and states.

        Hooks, replaced methods, threads, files and process groups of `zs.shard` are gone. Groups, options and
        schedulers continue, and `zs.shard` takes model and optimizer again. Parameters have the values of their master
        weights. This handle, and averages of `ema()`, raise an error afterwards; the loss scale of "fp16" and the
        number of steps are not kept.

        Args:
            to: "all" for full values on every rank. With "rank 0" the parameters of the other ranks have 0 elements, so
                that a forward raises an error, and their optimizers have no states.
            dtype: the dtype of floating-point parameters, and of states of that format. By default the dtype of the
                master weights (fp32 with precision="bf16"), or that before `zs.shard` if it was wider.

        Raises:
            ValueError: an argument is not supported.
            RuntimeError: inside a pass, `gathered()` or `swapped()`, or gradients were not applied by a step. Nothing
                was changed.
            MemoryError, RankMismatchError: a rank has too little memory. Nothing was changed.

        Collective: all-gathers of parameters and states, unit by unit; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for stage in (0, 3):
            zero = zs.shard(model, optimizer, stage=stage)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            zero.detach()
        assert type(model.weight) is torch.nn.Parameter and optimizer.state[model.weight]["step"] == 2
        ```
        """
        if any(one.is_swapped for one in self._averages):
            raise RuntimeError(f"{self.mesh} zero.detach() inside swapped() of an average: leave the context first.")
        if self._islands is not None:
            self._islands.check_detach()
        self._saver.wait("zero.detach()")
        detach(self._engine, self._sharded, self._dtypes, to=to, dtype=dtype, room_bytes=self._settings.device_bytes)
        if self._islands is not None:
            self._islands.close()
        vars(self).clear()

    @refuse_those(peers.OF_SAVE)
    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        asynchronous: bool = False,
        keep: int | None = None,
        model_only: bool = False,
        loader: Stateful | None = None,
        mode: int | None = None,
    ) -> Path:
        """Write a checkpoint: parameters, buffers, optimizers, loss scale, random generators of each rank, and `extra`.

        A checkpoint is complete or absent, never partial. Any number of ranks at any stage and precision can load it.
        It does not have parameters that `zs.shard` was told to ignore, nor their optimizers.
        When this method returns, the checkpoint is on disk. With `asynchronous`, this rank's part is in host memory
        instead, and a thread writes it. Each optimizer step then asks all ranks for their progress. A failure is raised
        on every rank at the first step after it, at the next `save`, `load` or `wait`, or at interpreter exit, which
        waits for the save and returns status 1 if it failed. A killed process does not wait.

        Args:
            path: a new folder, equal on every rank, on a file system that all ranks share.
            extra: values that the program needs to resume, such as a scheduler's `state_dict()` and the position in the
                data: numbers, strings, lists, mappings, small tensors; equal on every rank.
            step: the number by which `zs.latest` finds the newest checkpoint. By default, the number at the end of the
                path ("runs/a/step-1000"), or the number of optimizer steps, including those before a load.
            asynchronous: return after the copy to host memory. Later saves reuse the memory. One save is under way at a
                time.
            keep: the number of checkpoints to keep in the parent folder, at least 2, with this one. Older checkpoints
                that were also saved with `keep` are removed; checkpoints saved without `keep` stay. Checkpoints saved
                with `model_only`, of another model, or with another name but for numbers, are counted apart.
            model_only: write parameters and buffers alone, and `extra`, without optimizers and generators: for
                `zero.load(path, model_only=True)`, for exports, and for the best model of a run.
            loader: the data loader or sampler, whose position in the data, which differs between ranks, is saved, too:
                what has `state_dict()`, such as `zs.Resumable(DataLoader(...))`.
            mode: who may read the files: permission bits, such as 0o600 for the owner alone. By default those that the
                process's umask leaves, as for any file.

        Returns: the path.

        Raises:
            CheckpointError: on every rank, with the reason of one rank; nothing was committed, unless the text says so.
            RuntimeError: called inside a pass or `gathered()`.
            TypeError: `path` is no path, or `extra` no mapping.

        Collective: all-reduces of a few bytes and an all-gather of checksums; every rank must call.

        ```python
        import tempfile, torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.AdamW(model.parameters()))
        with tempfile.TemporaryDirectory() as folder:
            zero.save(f"{folder}/step-7", extra={"epoch": 2}, keep=3)
            assert zero.load(zs.latest(folder)).extra == {"epoch": 2}
        ```
        """
        path = path_of(path, f"{self.mesh} zero.save(path)")
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"{self.mesh} zero.save(extra=) takes a mapping, such as {{'epoch': 2}}; got {extra!r}.")
        if loader is not None:
            extra = states_of(self.mesh.across, loader, extra or {})
        how = How(step, keep, model_only, mode)
        return self._saver.save(path, extra, how, asynchronous=asynchronous)

    def wait(self) -> None:
        """Wait until an asynchronous save is committed; without one under way, do nothing.

        Raises:
            CheckpointError: on every rank, if the save failed.
            RuntimeError: called inside a pass or `gathered()`.

        Collective: all-reduces of a few bytes; every rank must call.

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

    @refuse_those(peers.OF_LOAD)
    def load(
        self,
        path: str | Path,
        *,
        model_only: bool = False,
        cast: bool = False,
        loader: Stateful | None = None,
    ) -> Loaded:
        """Load a checkpoint, written by any number of ranks at any stage, into the model and its optimizers.

        Names, shapes, dtypes and checksums are verified before anything in memory changes. Each rank reads its own
        ranges, tensor by tensor. Random generators are restored on ranks of which the checkpoint has them.
        Optimizer options that do not change the result (`foreach`, `fused`, `capturable`, `differentiable`) keep their
        current values.

        Args:
            path: the checkpoint's folder, on a file system that all ranks share.
            model_only: load only parameters and buffers; the path may then be a safetensors file, or a folder of such
                files as Transformers writes it, or a checkpoint that was saved with `model_only`.
            cast: convert dtypes that differ; without it, a difference is an error.
            loader: the data loader or sampler that continues at the saved position, as in `save`.

        Returns: the checkpoint's step, and the `extra` that was passed to `save`.

        Raises:
            CheckpointError: on every rank; the text names the file, and says whether memory is unchanged.
            RuntimeError: called inside a pass, `gathered()` or `swapped()`.
            TypeError: `path` is no path; `zs.latest` returns None where there is no checkpoint.

        Collective: all-reduces of a few bytes, and an all-gather of parameters at stages 1 and 2; every rank must call.
        """
        if path is None:
            raise TypeError(
                f"{self.mesh} zero.load(None): zs.latest() returns None where it finds no checkpoint. Start from the "
                "beginning then: `if (path := zs.latest(folder)) is not None: zero.load(path)`."
            )
        path = path_of(path, f"{self.mesh} zero.load(path)")
        if any(one.is_swapped for one in self._averages):
            raise RuntimeError(
                f"{self.mesh} zero.load() inside swapped() of an average, where the values would become those of the "
                "average: leave the context first."
            )
        self._saver.wait("zero.load()")
        start = load if self._together is None else functools.partial(load_islands, islands=self._together)
        check = functools.partial(checked_position, self.mesh.across, loader, path)
        loaded = start(self._engine, self._model, self._sharded, path, model_only=model_only, cast=cast, check=check)
        if self._islands is not None:
            self._islands.loaded()
        return loaded

    def check_copies(self) -> None:
        """Compare the replicated parameters and states of all ranks, to detect silent data corruption.

        Ranks along an axis "tensor" also compare buffers, and what they hold alike of sharded state. The cost is one
        read of the replicated values; fully sharded state has none. Call it every few hundred steps. Islands compare
        anchors, outer states, and parameters that have made no step since their exchange.

        Raises:
            RankMismatchError: on every rank, with the first parameter or state that differs, or with the parameters
                that were changed when an exception ended `gathered()`.
            RuntimeError: called inside a pass.

        Collective: an all-gather of at most 40 bytes, if any state is replicated; every rank must call.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=1)
        zero.check_copies()
        ```
        """
        check_copies(self._engine, self._model, self._sharded)
        if self._islands is not None:
            self._islands.check_copies()

    def agree(self, value: bool, what: str = "") -> bool:
        """Return whether `value` is true on all ranks, for decisions that depend on local data, clocks or signals.

        Examples: whether there is a next batch, whether to stop, whether to save. A rank that decides alone and takes a
        step waits for the others until the watchdog ends it.

        Args:
            value: the answer of this rank.
            what: the question, shown in errors; equal on every rank.

        Raises:
            RuntimeError: called inside a pass.
            RankMismatchError: ranks are at different places of the program, or a rank failed.

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
        place, order = f"agree({what!r})", self._engine.order
        return bool(order.votes.span(place, order.barrier(place, bool(value))[0]))

    def finish(self) -> None:
        """Exchange between islands what was not exchanged yet, so that all of them have equal parameters.

        Call it after the last step, and before an evaluation of the common model. An exchange that is under way ends;
        then each part of the model that has made steps since its last exchange is exchanged, without delay, and the
        result replaces the islands' parameters. Without `zs.shard(outer=)` it does nothing.

        Raises:
            RuntimeError: called inside a pass, or (on all ranks of all islands) the parameters of an island diverged.
            RankMismatchError: islands have not made the same number of steps.

        Collective: as one exchange of the whole model; every rank of all islands must call.

        ```python
        import torch, zeroshard as zs

        zero = zs.shard(torch.nn.Linear(4, 1))
        zero.finish()
        ```
        """
        if self._islands is not None:
            self._islands.finish()

    def summary(self) -> str:
        """Return a table in plain text with a line for each unit: parameters, shards, padding, bytes held and sent.

        Lines below the table give the bytes that are gathered at once and, on CUDA, the kernels of the optimizers and
        whether their steps wait for the device. `print(zero)` prints the summary.

        ```python
        import torch, zeroshard as zs

        model = torch.nn.Linear(4, 1)
        zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert "(root)" in zero.summary()
        ```
        """
        lines = [line for _, chosen in self._taken.values() for line in chosen]
        return "\n".join([summarize(self._engine, self._sharded, name_of_row(self.residency)), *self._chosen, *lines])

    def memory(self) -> Memory:
        """Return the bytes that this rank holds: current, peak and predicted."""
        found = count_averages(accounting.measure(self._engine, self._sharded), self._averages)
        return found if self._islands is None else self._islands.counted(found)

    def profile(self) -> Profile:
        """Return a context manager that measures where the time of steps goes on this rank: see `zs.Profile`.

        Raises:
            RuntimeError: the context is entered inside a pass.

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
        """Return the bytes that this rank has sent, and the predicted bytes of a step with one micro-batch."""
        order = self._engine.order
        per_step = accounting.predict_step_bytes(self._engine.units, self._sharded)
        sent = Counter(self._engine.comm.sent_bytes)
        sent.update({} if self._islands is None else self._islands.sent_bytes())
        return Traffic(dict(sent), per_step, order.history.made)


def _describe(handle: "weakref.ref[Zero]", error: BaseException) -> str:
    """Return text to add to an error that ends this process."""
    zero = handle()
    return describe_exhaustion(zero.mesh, zero.memory()) if zero is not None and is_exhaustion(error) else ""
