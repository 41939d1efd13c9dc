"""`pipeline()`: a model whose chunks are divided over the places of a pipe, each place sharded by ZeRO.

Owns the order of the steps that cut a model, and the public handle `Pipeline`. The module lies above `handle.py`, which
shards the part of a place. Read `table/pipeline.py` for schedules, and `parallel/runner.py` for a step.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard import peers
from zeroshard.core.engine import Engine
from zeroshard.core.undo import Undo
from zeroshard.describe.ignored import ignored_of
from zeroshard.describe.optimizers import Optimizers, optimizers_of
from zeroshard.handle import Zero
from zeroshard.join.start import accepted_by_all, everybody_at, texts_across_ranks, told_to_others
from zeroshard.parallel.absent import drawing_all, with_generator_of
from zeroshard.parallel.batch import Batch
from zeroshard.parallel.chunked import ChunkedModel
from zeroshard.parallel.cut import Cut, cut_model, is_here, remove_others, stand_in_on
from zeroshard.parallel.remote import Absence
from zeroshard.parallel.runner import Loss, Runner
from zeroshard.setup.automatic import STATES_PART, free_bytes
from zeroshard.setup.request import Request, domain_of, place_of
from zeroshard.sharding import shard_over
from zeroshard.table.bytes import on_device
from zeroshard.table.errors import RankMismatchError
from zeroshard.table.pipeline import Schedule, training_of
from zeroshard.table.settings import Settings
from zeroshard.torch_private import bytes_in, is_compiled, local_of
from zeroshard.values.materialize import check_source, is_on_meta
from zeroshard.values.weights import Weights
from zeroshard.wire.comm import gather_across_ranks
from zeroshard.wire.mesh import Mesh, current_mesh
from zeroshard.wire.transports import make_comm

__all__ = ["Pipeline", "pipeline"]

FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings of Transformers that collect values of all layers."""
OPTIONS = {field.name for field in dataclasses.fields(Request)} - {"model", "optimizer", "mesh", "room_bytes"}
"""The arguments of `zs.shard()` that `pipeline()` passes on."""


def pipeline(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    mesh: DeviceMesh,
    micro_batches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    loss: Loss | None = None,
    cut: Sequence[str] | None = None,
    reduce: Literal["auto", "last", "each"] = "auto",
    recompute: bool = False,
    **options: Any,
) -> "Pipeline":
    """Divide a model over the places of a pipe, and shard each place's part, in place; train with `Pipeline.step`.

    Every rank passes the whole model, which may be on the meta device, and an optimizer of all its parameters. Each
    place keeps the modules of its chunks; the others stay in the model, without parameters, and are not called. Names,
    groups and checkpoints are those of the whole model.

    Args:
        model: any module whose forward calls its parts one after the other, each with what the one before returned.
        optimizer: as in `zs.shard`; groups stay, and may be empty at a place.
        mesh: a DeviceMesh with an axis "pipe", and axes as in `zs.shard`.
        micro_batches: how many micro-batches a step cuts its batch into.
        schedule: "1f1b", "gpipe", "interleaved" (several chunks at each place), or "naive" (one micro-batch at a time).
        chunks: the number of chunks at each place, for "interleaved"; 2 by default.
        loss: a function of the model's output and the targets of a micro-batch that returns its mean loss. With None,
            the model returns the loss, or an object with an attribute `loss`.
        cut: the names of the modules at which the chunks after the first begin, such as ["blocks.6"]. By default blocks
            are divided so that the largest chunk has as few bytes of parameters as possible.
        reduce: "last" reduces gradients with the last micro-batch of a step, and keeps them whole until then; "each"
            reduces them with each micro-batch. "auto" is "last" if model states and whole gradients fit half of the
            free memory of each device, and "each" otherwise.
        recompute: whether of each micro-batch a chunk keeps its input alone, and runs again while the gradient is on
            its way. The first micro-batch, and one whose backward follows its forward, keep their activations.
        options: the other arguments of `zs.shard`.

    Returns: the handle.

    Raises:
        ValueError, TypeError: an argument is not supported, or the model cannot be cut there; nothing was changed.
        RankMismatchError: ranks differ in model, options or versions, or another rank rejected its arguments.

    Collective: as `zs.shard`, and a broadcast of all parameters along the pipe; every rank of the mesh must call.
    Source: Huang et al., GPipe, 2019; Narayanan et al., PipeDream, 2019; Narayanan et al., Megatron-LM, 2021.

    ```python
    import torch, zeroshard as zs
    from torch.distributed.device_mesh import init_device_mesh

    ranks = zs.init()
    if ranks.world_size > 1:  # torchrun --nproc-per-node 2
        mesh = init_device_mesh(ranks.device.type, (2, ranks.world_size // 2), mesh_dim_names=("pipe", "shard"))
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=4, loss=torch.nn.functional.mse_loss)
        for _ in range(3):
            loss = pipe.step(torch.ones(16, 8), torch.zeros(16, 8))
            optimizer.step()
            optimizer.zero_grad()
    ```
    """
    for name in options.keys() - OPTIONS:
        hint = f": {peers.ARGUMENTS[name]}" if name in peers.ARGUMENTS else ""
        raise TypeError(f"pipeline() has no argument {name}={hint}. It takes its own, and those of zs.shard().")
    joined, settings = current_mesh(place_of(model)), options.get("settings", Settings())
    settings = settings if isinstance(settings, Settings) else Settings()
    with told_to_others(joined):
        if "pipe" not in (getattr(mesh, "mesh_dim_names", None) or ()):
            raise ValueError(
                f"{joined} zs.pipeline() needs mesh= with an axis 'pipe'; got {mesh!r}. Create it with "
                "init_device_mesh(device, (2, size), mesh_dim_names=('pipe', 'shard'))."
            )
        domain = domain_of(joined, mesh)
    places, place = mesh["pipe"].size(), mesh.get_local_rank("pipe")
    with everybody_at("zs.pipeline()", domain, settings.watchdog_s, settings.heartbeat_s):
        with accepted_by_all(domain, "zs.pipeline()"):
            training = training_of(schedule, places, micro_batches, chunks, reduce, recompute=recompute)
            found = _cut(model, cut, training, loss)
            _refuse_optimizers(model, optimizer)
            ignored_of(model, options.get("ignored", ()))
            source = check_source(model, options.get("weights"), compares=domain.rank == 0)
        _check_alike(domain, training, found, f"reduce='{reduce}', recompute={recompute}", model)
    is_drawn, along = is_on_meta(model), mesh["pipe"]
    for tensor in (*model.parameters(), *model.buffers()):
        _take_from_first(tensor, along)
    own, undo = [*training.chunks_of(place)], Undo()
    room_bytes = free_bytes(domain, settings, model) if reduce == "auto" else None
    try:
        removed = remove_others(model, found, own, undo, absence := Absence())
        chunked = ChunkedModel(model, found, own, removed, absence)
        _remove_from(optimizers_of(optimizer), model, undo)
        undo.put(vars(model), "forward", chunked.replacement())
        with accepted_by_all(domain, "zs.pipeline()"):
            options["units"] = found.units(model, own, options.get("units"))
        options["ignored"] = [one for one in options.get("ignored", ()) if is_here(model, one)]
        if is_drawn:
            if not isinstance(source, Weights):
                source = drawing_all(model, removed, joined.device, source)
            options["weights"] = source
        request = Request(model, optimizer, mesh=mesh, **options)
        with with_generator_of(lambda state: _take_from_first(state, along), joined.device):
            zero = shard_over(request, joined, make_comm, draws_alike=True)
    except BaseException:
        undo.run()
        raise
    engine = zero._engine
    chunked.absence.place = str(engine.mesh)
    chunked.note_hooks()
    stand_in_on(engine.mesh.device, model, removed, chunked.absence)
    reduces_last = _reduces_last(zero, domain, reduce, room_bytes)
    return Pipeline(zero, _runner(engine, chunked, training, loss, reduces_last=reduces_last))


def _refuse_optimizers(model: nn.Module, optimizer: Optimizers) -> None:
    """Raise ValueError if an optimizer has a parameter that the model has not, such as one of the loss."""
    own = {id(parameter) for parameter in model.parameters()}
    for one in optimizers_of(optimizer):
        for number, group in enumerate(one.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise ValueError(
                        f"Group {number} of {type(one).__name__} has a parameter of shape {tuple(parameter.shape)} "
                        "that the model does not have. A pipeline trains the parameters of its model: make it a "
                        "parameter of the model, of a module that the forward calls last, or leave it out."
                    )


def _cut(model: object, cut: Sequence[str] | None, training: Schedule, loss: object) -> Cut:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of outputs and targets, or None; got {loss!r}.")
    if is_compiled(model):
        raise TypeError(
            f"{type(model).__name__} is compiled as a whole, and a pipe runs a part of its forward at each place: "
            "compile its blocks, with block.compile(), after zs.pipeline()."
        )
    for name in FLAGS:
        if getattr(getattr(model, "config", None), name, False) is True:
            raise ValueError(
                f"config.{name}=True asks for values of all layers, and a place of a pipe has those of its own: set it "
                "to False."
            )
    if training.chunks > 1 and training.places == 1:
        raise ValueError("schedule='interleaved' needs at least 2 places along 'pipe'; this mesh has 1.")
    if isinstance(cut, str):
        raise TypeError(f"cut takes a list of names; got the string {cut!r}.")
    return cut_model(model, cut, training.all_chunks)


def _check_alike(mesh: Mesh, schedule: Schedule, cut: Cut, options: str, model: nn.Module) -> None:
    """Raise on every rank unless all have the same schedule, cut and model. Collective: as `texts_across_ranks`."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = zlib.crc32(repr([(name, one.shape, one.dtype, one.is_meta) for name, one in tensors]).encode())
    mine = (
        f"schedule='{schedule.name}', chunks={schedule.chunks}, micro_batches={schedule.micro_batches}, "
        f"{options}, cut={list(cut.starts)}, a {type(model).__name__} of {len(tensors)} tensors with checksum "
        f"{shapes:08x} of their names and shapes"
    )
    texts = texts_across_ranks(mesh, mine)
    if len(set(texts)) > 1:
        raise RankMismatchError(
            f"{mesh} zs.pipeline() was given different arguments:\n{mesh.lines(texts)}\nPass the same on every rank."
        )


@torch.no_grad()
def _take_from_first(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Give a tensor the values of the first place. Collective: all-gather along the pipe."""
    tensor = local_of(tensor)
    if not tensor.is_meta and tensor.numel() and mesh.size() > 1:
        data = gather_across_ranks(bytes_in(tensor), mesh)[0]
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _remove_from(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, undo: Undo) -> None:
    """Remove parameters that the model has no more from optimizers; groups stay, also empty ones."""
    kept = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            is_kept = [id(one) in kept for one in group["params"]]
            for key in group.keys() & {"params", "param_names"}:
                undo.put(group, key, [*itertools.compress(group[key], is_kept)])


def _reduces_last(zero: Zero, domain: Mesh, reduce: str, room_bytes: int | None) -> bool:
    """Return whether gradients are reduced with the last micro-batch alone.

    Args:
        room_bytes: the free memory of the fullest device; None without a limit, or where it does not decide.

    Collective: an all-gather of 8 bytes over all places, if a limit decides.
    """
    if room_bytes is None:
        return reduce != "each"
    specs = [bucket.spec for unit in zero._engine.units for bucket in unit.buckets if bucket.spec.is_trained]
    whole = sum(sum(one.bytes_of(one.full, one.formats.grad)) for one in specs if not one.holds_whole_gradients)
    nbytes = on_device(zero.memory().predicted_bytes) + whole if whole else 0  # held whole, "each" would save nothing
    most = int(gather_across_ranks(torch.tensor([nbytes], device="cpu"), domain).max())
    return most <= STATES_PART * room_bytes


def _runner(
    engine: Engine,
    chunked: ChunkedModel,
    training: Schedule,
    loss: Loss | None,
    *,
    reduces_last: bool,
) -> Runner:
    ranks, chunks_of = engine.mesh.across.along("pipe"), chunked.cut.chunks(chunked.model)

    def units_of(chunk: int) -> Iterator[int]:
        return (unit.number for unit in engine.units if any(chunk in chunks_of[one] for one in unit.parameters))

    shared = dict[nn.Parameter, Sequence[int]]()
    for parameter, chunks in chunks_of.items():
        if len(places := sorted({chunk % training.places for chunk in chunks})) > 1:
            shared[parameter] = [ranks[place] for place in places]
    units = {chunk: [*units_of(chunk)] for chunk in chunked.own}
    return Runner(engine, chunked, training, ranks, loss, units, shared, reduces_last=reduces_last)


class StepLoss(Tensor):
    """The mean loss of a step, whose backward `Pipeline.step` has already made."""

    # What is computed from it is such a loss, too: users divide it, or scale it.

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise: there is nothing left to do."""
        raise RuntimeError(
            "pipe.step() has already run the backward of each micro-batch: remove loss.backward(), and go on with "
            "clipping and optimizer.step()."
        )


@final
class Pipeline:
    """The handle of a model that is divided over the places of a pipe; see `zs.pipeline`.

    ```python
    import torch, zeroshard as zs
    from torch.distributed.device_mesh import init_device_mesh

    ranks = zs.init()
    if ranks.world_size > 1:  # torchrun --nproc-per-node 2
        mesh = init_device_mesh(ranks.device.type, (2, ranks.world_size // 2), mesh_dim_names=("pipe", "shard"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        pipe = zs.pipeline(model, mesh=mesh, micro_batches=2, cut=["1"], loss=torch.nn.functional.mse_loss)
        before = pipe.evaluate(torch.ones(8, 4), torch.zeros(8, 1))
        pipe.zero.save("checkpoint")
    ```
    """

    def __init__(self, zero: Zero, runner: Runner) -> None:
        self.zero, self._runner = zero, runner
        """The handle of the part of this place: saving, loading, norms, `gathered()` (docs/meshes.md)."""

    def __repr__(self) -> str:
        schedule, reduce = self._runner.training, "last" if self._runner.reduces_last else "each"
        return f"Pipeline({schedule.name}, {schedule.micro_batches} micro-batches, reduce='{reduce}', {self.zero!r})"

    def step(self, inputs: Any, targets: Any = None, *, last: bool = True) -> Tensor:
        """Run forward and backward of a batch, in micro-batches, and reduce gradients; the optimizer's step is yours.

        Every rank passes the batch of its place along the data-parallel axes: ranks along "pipe" and "tensor" pass the
        same. The first dimension of each tensor is cut into micro-batches.

        Args:
            inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments of the model.
            targets: what `loss=` takes beside the model's output.
            last: False to accumulate gradients over several calls: with reduce="last" they are reduced in the call with
                True, which must be made before clipping and `optimizer.step()`.

        Returns: (): the mean loss of all micro-batches and ranks, in fp64, equal on every rank.

        Raises:
            ValueError: the batch cannot be cut into micro-batches.
            RankMismatchError: a rank raised an exception, which the text has; the gradients of the step were dropped.
                The rank itself raises its exception.

        Collective: the messages of the pipe, and the passes of `zs.shard`; every rank of the mesh must call.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.zero.mesh} pipe.step() runs backwards, and gradients are off here (torch.no_grad() or "
                "inference_mode()). Write pipe.evaluate(), or leave the context."
            )
        batch = self._batch(inputs, targets, self._runner.training.micro_batches)
        return self._runner.step(batch, is_last=last).as_subclass(StepLoss)

    @property
    def idle(self) -> float | None:
        """The part of the last step or evaluation, from 0 to 1, in which this rank waited for other places.

        The step ends when all places have made their last backward. None before the first step. On a device the waits
        are those of the stream that computes, and reading them waits for the device.
        """
        return self._runner.mail.waits.part()

    def evaluate(self, inputs: Any, targets: Any = None, *, loss: Loss | None = None) -> Tensor:
        """Return the mean loss of a batch, without gradients, in fp64, equal on every rank; call `model.eval()` before.

        Args:
            inputs: as in `step`; a batch of any size is cut into at most as many micro-batches as in a step.
            targets: as in `step`.
            loss: another function than that of `zs.pipeline`.

        Raises:
            RankMismatchError: as in `step`.

        Collective: the messages of the pipe, and the forwards of `zs.shard`; every rank of the mesh must call.
        """
        return self._runner.evaluate(self._batch(inputs, targets), loss)

    def forward(self, inputs: Any, *, take: Callable[[Any], Tensor] | None = None) -> Tensor:
        """Return the model's output for a batch, without gradients, on every rank of its pipe: for generation.

        Generate on every rank of the mesh, with equal lengths, and without a cache of keys and values: each call runs
        the model on all places.

        Args:
            inputs: as in `evaluate`.
            take: a function that returns a tensor of the model's output, such as its logits; its first dimension is
                that of the batch. By default the output is that tensor.

        Collective: as `evaluate`; every rank of the mesh must call.
        """
        return self._runner.forward(self._batch(inputs, None), take)

    def _batch(self, inputs: Any, targets: Any, count: int = 0) -> Batch:
        """Return a batch, in `count` micro-batches, or in the most of equal size that a step's number allows."""
        self._runner.engine.check_outside_backward("A call of the pipeline")
        if isinstance(inputs, Mapping) and (asked := [name for name in FLAGS if inputs.get(name) is True]):
            raise ValueError(
                f"{self.zero.mesh} {asked[0]}=True asks for values of all layers, and a place of a pipe has those of "
                "its own: leave it out."
            )
        args: tuple[Any, ...] = () if isinstance(inputs, Mapping) else (inputs,)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        args = inputs if isinstance(inputs, tuple) else args
        batch = Batch(args, kwargs, targets, count or 1, str(self.zero.mesh))
        if count:
            return batch
        # Ranks may have batches of other lengths, and make equally many passes.
        across = self._runner.engine.comm.across
        mine = torch.tensor(float(batch.rows), dtype=torch.float64, device=across.mesh.device)
        rows = math.gcd(*map(int, across.collect(mine, "the lengths of batches").tolist()))
        fits = [n for n in range(1, self._runner.training.micro_batches + 1) if rows % n == 0]
        return dataclasses.replace(batch, micro_batches=fits[-1])
