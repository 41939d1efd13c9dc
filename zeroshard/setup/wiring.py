"""Registration of the engine's hooks on a model.

Owns the registration, and the hooks that reject state dicts outside `gathered()`; `core/hooks.py` has the other hooks.
Read it first.

Note: order
    The pre-hook is prepended, so that the user's hooks see gathered parameters. The post-hook is registered last with
    `always_call=True`, so that it runs after the user's hooks, and when forward raises.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn

from zeroshard.core.buffer import refuse_ahead
from zeroshard.core.engine import Engine
from zeroshard.core.hooks import Arrive, Enter, Exit, Hook, Landed, Registered
from zeroshard.core.norms import IGNORED
from zeroshard.core.parameter import ShardedParameter
from zeroshard.core.slot import slot_of
from zeroshard.describe.precision import Chosen, Precision
from zeroshard.setup.additions import Additions
from zeroshard.setup.autocast import RefuseUnapplied
from zeroshard.setup.casts import CastIn, CastOut, Edge, EdgeIn, EdgeOut
from zeroshard.setup.duplicate import copy_plain, owner_of
from zeroshard.setup.graphs import RefuseGraphs
from zeroshard.setup.heads import AddInPlace
from zeroshard.setup.request import Described
from zeroshard.torch_private import IGNORED_BY_DDP

__all__ = ["wire"]


def wire(engine: Engine, described: Described) -> dict[nn.Module, tuple[Enter, Exit]]:
    """Register the hooks on every module whose forward needs gathered units, and on the model.

    Returns: the hooks of each module's forward.
    """
    model, parts, plans = described.model, described.parts, described.plans
    entries: dict[nn.Module, tuple[str, tuple[int, ...]]] = {part: (name, ()) for part, name in parts.items()}
    for unit, plan in zip(engine.units, plans, strict=True):
        for module, name in plan.entries.items():
            known = entries.get(module, ("", ()))[1]
            entries[module] = (parts.get(module, name), (*known, unit.number))
    called = [*parts, *(module for plan in plans for module in plan.entries)]
    edge = _hang_casts(engine, model, called, described.precision, described.own_precision)
    engine.flights.parts = frozenset((*parts.values(), *described.settings.forward_methods))
    return _hang(engine, model, parts, entries, _registered(model), described.settings.forward_methods, edge)


def _hang(
    engine: Engine,
    model: nn.Module,
    parts: Iterable[nn.Module],
    entries: dict[nn.Module, tuple[str, tuple[int, ...]]],
    own: Sequence[Registered],
    forward_methods: Sequence[str],
    edge: Edge | None,
) -> dict[nn.Module, tuple[Enter, Exit]]:
    """Register all hooks of a model; return those of each module's forward.

    Args:
        entries: modules whose forward needs units, with the name of the module and the numbers of the units.
        own: places that must not change.
        forward_methods: methods that act like forward, such as "encoder.encode".
    """
    additions, keep = Additions(model), engine.undo.keep
    engine.undo.add(additions.end)
    hooks, added = {}, additions.first
    for module, (name, units) in entries.items():
        if module not in parts and not engine.has_frames:
            # Only the model needs an event: its entry checks and completes passes.
            if engine.comm.wire.overlaps:
                keep(module.register_forward_pre_hook(Arrive(engine, units), prepend=True))
            continue
        checked = (own, added) if module in parts else ()
        enter, leave = hooks[module] = Enter(engine, name, units, *checked), Exit(engine)
        keep(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        keep(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
    for path in forward_methods:
        owner, method = owner_of(model, path)
        units = entries.get(owner, ("", ()))[1]
        wrapped = _wrap(owner, method, Enter(engine, path, units, own, added), Exit(engine), edge)
        engine.undo.put(vars(owner), method, wrapped)
    landed = Landed(engine)
    parameters = [parameter for unit in engine.units for parameter in unit.parameters]
    for parameter in parameters:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # it can never be trained
        # torch supports hooks only on trainable parameters; a frozen parameter may be trained later.
        is_trainable = parameter.requires_grad
        keep(handle := parameter.requires_grad_(True).register_post_accumulate_grad_hook(landed))
        # Before the hooks of the user: if those raise, the gradient is in the bucket, where zero_grad() drops it.
        for earlier in list(queue := handle.hooks_dict_ref())[:-1]:
            queue[earlier] = queue.pop(earlier)  # torch calls them in the order of insertion, not of `move_to_end`
        parameter.requires_grad_(is_trainable)
    if tables := [p for p in parameters if len(slot_of(p).bucket.parameters) == 1]:
        for part in parts:
            keep(part.register_forward_hook(AddInPlace(tables)))
    taken = set(map(id, parameters))
    for name, parameter in model.named_parameters():
        if id(parameter) not in taken and parameter.requires_grad and engine.mesh.world_size > 1:
            keep(parameter.register_post_accumulate_grad_hook(NameGradient(name)))
    has_fp32 = any(p.requires_grad and p.dtype is torch.float32 for p in parameters)
    for part in parts:
        if engine.mesh.device.type == "cuda":
            # Elsewhere such a mode records nothing, and the forward has no hook for it.
            keep(part.register_forward_pre_hook(RefuseGraphs(), prepend=True))
        unapplied = RefuseUnapplied(engine.mesh, is_float32=edge is None and has_fp32)
        keep(part.register_forward_pre_hook(unapplied, prepend=True))
    refuse_save, refuse_load, lend = RefuseSave(engine), RefuseLoad(engine), LendStorages()
    for module in model.modules():
        keep(module.register_state_dict_pre_hook(refuse_save))
        keep(module.register_state_dict_post_hook(lend))
        keep(module.register_load_state_dict_pre_hook(refuse_load))
    engine.undo.put(vars(model), IGNORED_BY_DDP, RefuseDDP())
    copy = functools.partial(copy_plain, model, tuple(forward_methods))
    engine.undo.put(vars(model), "__deepcopy__", copy)
    return hooks


def _hang_casts(
    engine: Engine, model: nn.Module, called: Iterable[nn.Module], precision: Precision, chosen: Iterable[Chosen]
) -> Edge | None:
    """Cast at the edges of the model, and of the modules with a separate precision or dtype.

    Args:
        called: modules that user code may call directly.
        chosen: modules with a separate precision.
    """
    casts, keep = [(one.module, one.inside, one.outside) for one in chosen], engine.undo.keep
    edge, edges = None, dict[nn.Module, None]()
    if precision.param is not None:
        for module in model.modules():
            if isinstance(module, precision.keep) and (kept := next(module.parameters(False), None)) is not None:
                casts.append((module, kept.dtype, precision.param))
        output, scale = precision.output or torch.float32, engine.loss_scale
        edge = Edge(CastIn(precision.param, scale), CastOut(output, scale), engine.flights.is_cut)
        edges = dict.fromkeys(called)
        for module in edges:
            keep(module.register_forward_pre_hook(EdgeIn(edge), with_kwargs=True))
    # Inside the other edge, for inputs and outputs, if a module has both.
    for module, inside, outside in casts:
        keep(module.register_forward_pre_hook(CastIn(inside), with_kwargs=True))
        keep(module.register_forward_hook(CastOut(outside), with_kwargs=True))
    if edge is not None:
        for module in edges:
            keep(module.register_forward_hook(EdgeOut(edge), with_kwargs=True))
    return edge


def _wrap(module: nn.Module, method: str, enter: Enter, leave: Exit, edge: Edge | None) -> Callable[..., Any]:
    plain = getattr(module, method)

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            enter(module, args, kwargs)
            if edge is not None:
                args, kwargs = edge.enter(module, args, kwargs)
            output = plain(*args, **kwargs)
        except BaseException:
            leave(module, args, kwargs, None)
            raise
        leave(module, args, kwargs, output)
        return output if edge is None else edge.leave(module, args, kwargs, output)

    return run


def _registered(model: nn.Module) -> list[Registered]:
    """Return every place where a parameter is registered, and the modules on the path to it."""
    found: dict[str, Registered] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if isinstance(parameter, ShardedParameter):  # others are ignored
                name = f"{path}.{key}" if path else key
                found[name] = Registered(name, module._parameters, key, id(parameter))
                found.update((one.name, one) for one in _way_to(model, path))
    return list(found.values())


def _way_to(model: nn.Module, path: str) -> Iterator[Registered]:
    """Yield the modules from the model down to `path`, each in its parent."""
    parent, parts = model, path.split(".") if path else []
    for place, key in enumerate(parts):
        child = parent._modules[key]
        assert child is not None
        yield Registered(".".join(parts[: place + 1]), parent._modules, key, id(child))
        parent = child


@final
class NameGradient(Hook):
    """Marks the local gradient of an ignored parameter, for norms that would mix it with sharded gradients."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        """Name the gradient."""
        if parameter.grad is not None:
            parameter.grad.__dict__[IGNORED] = self._name


@final
class RefuseSave(Hook):
    """Before a module's `state_dict`."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_whole = engine, all(unit.spec.is_whole for unit in engine.units)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise unless parameters are gathered."""
        buckets = (bucket for unit in self._engine.units for bucket in unit.buckets)
        refuse_ahead(buckets, f"{self._engine.mesh} state_dict()")
        self._engine.learn()
        self._engine.await_published()
        if self._engine.gathered is None and not self._is_whole:
            raise RuntimeError(
                f"{self._engine.mesh} state_dict() outside gathered() would not hold full parameters, because they are "
                "sharded. Use `with zero.gathered():` around it, on every rank, `for _ in zero.on_first_rank():` "
                "instead of `if rank == 0:`, or zero.save(path) for a checkpoint; with Accelerate, save_state() of "
                "zeroshard.integrations.accelerate.Accelerator."
            )


@final
class LendStorages(Hook):
    """After a module's `state_dict`: its parameters get storages of their own size, without a copy; tied ones share."""

    def __init__(self) -> None:
        self._given: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """The last entry of each parameter, by identity."""

    def __call__(self, module: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
        """Replace the storages of the module's own entries."""
        for key, parameter in module._parameters.items():
            entry = state.get(prefix + key)
            if type(entry) is not torch.Tensor or not isinstance(parameter, ShardedParameter):
                continue  # user code has replaced the entry, or the parameter is ignored
            given = self._given.get(id(parameter))
            if given is not None and given.data_ptr() == entry.data_ptr():
                entry.data = given
            else:
                slot_of(parameter).bucket.lend(entry)
            self._given[id(parameter)] = entry


@final
class RefuseDDP(Hook):
    """Replaces the list in which DistributedDataParallel looks up ignored parameters."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "DistributedDataParallel around a model of zs.shard() would reduce its gradients twice: remove it. "
            "Accelerate from 1.14, and with it the Trainer of Transformers, takes the model as it is if a process "
            "group existed at zs.shard(): create the Accelerator before. With an earlier release, prepare the "
            "optimizer and the data loader, but not the model: `optimizer, loader = accelerator.prepare(optimizer, "
            "loader)`; with Fabric, `fabric.setup_optimizers(optimizer)` and `fabric.setup_dataloaders(loader)`."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return ()  # a copy is a plain model


@final
class RefuseLoad(Hook):
    """Before a module's `load_state_dict`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, module: Any, state: Any, prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        """Raise unless loaded values reach the shards; values are copied into the existing parameters."""
        local_metadata.pop("assign_to_params_buffers", None)  # load_state_dict(assign=True)
        if self._engine.gathered is None or not self._engine.gathered.writeback:
            raise RuntimeError(
                f"{self._engine.mesh} load_state_dict() here would not reach the shards. Use `with "
                "zero.gathered(writeback=True):` around it, on every rank, or zero.load(path)."
            )
