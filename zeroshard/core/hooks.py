"""What the engine hangs on a model: hooks on modules and parameters, and copies without them.

Owns registration and nothing of what happens then; each hook passes its event to the engine. Hooks are objects, so that
a deep copy of a module gets inert ones instead of a second engine.

Note: order
    The pre-hook is prepended, so that the user's own hooks find the parameters there; the post-hook is registered last
    with `always_call=True`, so that it runs after them, and when forward raises.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import ref

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.core.precision import LossScale, Precision, map_floating

__all__ = ["Registered", "hang"]


class _Hook:
    """A hook that holds the engine and becomes inert in a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Inert":
        return _Inert()

    def __reduce__(self) -> Any:
        return _Inert, ()


class _Untraced(_Hook):
    """A hook that runs as plain Python between compiled graphs; Dynamo would trace a plain one into them."""

    def __init__(self) -> None:
        self._call = torch.compiler.disable(self._run)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def _run(self, *args: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Registered:
    """A place in a module where something must stay what it was: a parameter, or a module that holds one."""

    name: str
    container: Mapping[str, Any]
    key: str
    identity: int


@final
class _Inert:
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


@final
class _Enter(_Untraced):
    def __init__(self, engine: Engine, name: str, units: tuple[int, ...], own: Sequence[Registered]) -> None:
        super().__init__()
        self._engine, self._name, self._units, self._own = engine, name, units, own

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for one in self._own:
            if id(one.container.get(one.key)) != one.identity:
                raise RuntimeError(
                    f"{self._engine.mesh} '{one.name}' was replaced after zs.shard(): the new one would neither be "
                    "sharded nor updated. Replace modules and parameters (and resize embeddings) before zs.shard(); "
                    "to change values use `with zero.gathered(writeback=True):` and in-place operations."
                )
        self._engine.enter(module, self._name, self._units, (args, kwargs))


@final
class _Exit(_Untraced):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _run(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._engine.exit(module, output)


@final
class _CastIn(_Hook):
    """Casts the floating-point inputs of a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_floating(args, self._cast), map_floating(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype)


@final
class _CastOut(_Hook):
    """Casts the floating-point outputs of a module; with a loss scale, their gradients are multiplied by it."""

    def __init__(self, dtype: torch.dtype, loss_scale: LossScale | None = None) -> None:
        self._dtype, self._loss_scale = dtype, loss_scale

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return map_floating(output, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._loss_scale is not None and tensor.requires_grad:
            scaled: torch.Tensor = _Scaled.apply(tensor, self._dtype, self._loss_scale)  # type: ignore[no-untyped-call]
            return scaled
        return tensor.to(self._dtype)


class _Scaled(torch.autograd.Function):
    """A cast whose gradient is multiplied by the loss scale: a node of the graph, which nothing bypasses."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, loss_scale: LossScale) -> torch.Tensor:
        ctx.dtype, ctx.loss_scale = tensor.dtype, loss_scale
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * ctx.loss_scale.value).to(ctx.dtype), None, None


@final
class _Landed(_Hook):
    """The parameter's hook: a weak reference, since autograd keeps it where Python's collector can not see it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    def __call__(self, parameter: torch.Tensor) -> None:
        engine = self._engine()
        if engine is not None:
            engine.landed(parameter)


@final
class _RefuseSave(_Hook):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._engine.gathered is None:
            raise RuntimeError(
                f"{self._engine.mesh} state_dict() outside gathered() would not hold the whole parameters on every "
                "stage and rank. Use `with zero.gathered():` around it, on every rank, or zero.save(path) for a "
                "checkpoint."
            )


@final
class _RefuseLoad(_Hook):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._engine.gathered is None or not self._engine.gathered.writeback:
            raise RuntimeError(
                f"{self._engine.mesh} load_state_dict() here would not reach the shards. Use `with "
                "zero.gathered(writeback=True):` around it, on every rank, or zero.load(path)."
            )


def hang(
    engine: Engine,
    model: nn.Module,
    entries: dict[nn.Module, tuple[str, tuple[int, ...]]],
    own: Sequence[Registered],
    forward_methods: Sequence[str],
    precision: Precision,
) -> None:
    """Register all hooks of a model.

    Args:
        entries: modules whose forward needs units: the module's name and the units' numbers.
        own: what the model must find unchanged.
        forward_methods: methods of the model that compute as forward does.
    """
    for module, (name, units) in entries.items():
        enter, leave = _Enter(engine, name, units, own if module is model else ()), _Exit(engine)
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True, always_call=True)
        if module is model:
            casts = _hang_casts(engine, model, precision)
            for method in forward_methods:
                model.__dict__[method] = _wrap(model, method, enter, leave, casts)
    for parameter in model.parameters():
        # torch takes hooks of trainable parameters only; a frozen one may be trained later.
        is_trainable = parameter.requires_grad
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(_Landed(engine))
        parameter.requires_grad_(is_trainable)
    refuse_save, refuse_load = _RefuseSave(engine), _RefuseLoad(engine)
    for module in model.modules():
        module.register_state_dict_pre_hook(refuse_save)
        module.register_load_state_dict_pre_hook(refuse_load)
    model.__dict__["__deepcopy__"] = functools.partial(_copy_plain, model, tuple(forward_methods))


def _hang_casts(engine: Engine, model: nn.Module, precision: Precision) -> tuple[_CastIn, _CastOut] | None:
    """Cast at the edges of the model, and at those of the modules that keep their own dtype."""
    if precision.param is None:
        return None
    for module in model.modules():
        if isinstance(module, precision.keep) and (kept := next(module.parameters(False), None)) is not None:
            module.register_forward_pre_hook(_CastIn(kept.dtype), with_kwargs=True)
            module.register_forward_hook(_CastOut(precision.param), with_kwargs=True)
    casts = _CastIn(precision.param), _CastOut(torch.float32, engine.loss_scale)
    model.register_forward_pre_hook(casts[0], with_kwargs=True)
    model.register_forward_hook(casts[1], with_kwargs=True)
    return casts


def _wrap(
    model: nn.Module, method: str, enter: _Enter, leave: _Exit, casts: tuple[_CastIn, _CastOut] | None
) -> Callable[..., Any]:
    plain = getattr(model, method)

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            enter(model, args, kwargs)
            if casts is not None:
                args, kwargs = casts[0](model, args, kwargs)
            output = plain(*args, **kwargs)
        except BaseException:
            leave(model, args, kwargs, None)
            raise
        leave(model, args, kwargs, output)
        return output if casts is None else casts[1](model, args, kwargs, output)

    return run


def _copy_plain(model: nn.Module, forward_methods: tuple[str, ...], memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of the model without hooks; its parameters are plain (and raise unless gathered)."""
    hidden = {name: model.__dict__.pop(name) for name in ("__deepcopy__", *forward_methods) if name in model.__dict__}
    try:
        copied = copy.deepcopy(model, memo)
    finally:
        model.__dict__.update(hidden)
    for module in copied.modules():
        for hooks in vars(module).values():
            if isinstance(hooks, dict):
                for key in [key for key, hook in hooks.items() if _is_inert(hook)]:
                    del hooks[key]
    return copied


def _is_inert(hook: Any) -> bool:
    # State-dict pre-hooks are wrapped by torch in an object that keeps the hook itself.
    return isinstance(hook, _Inert) or isinstance(getattr(hook, "hook", None), _Inert)
