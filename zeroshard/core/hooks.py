"""The hooks of a model's modules and parameters: each passes its event to the engine.

Owns nothing of what happens then, nor where they hang (`state/wiring.py`). Hooks are objects, so that a deep copy of a
module gets inert ones instead of a second engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import ref

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.core.precision import LossScale
from zeroshard.core.tree import map_floating

__all__ = ["CastIn", "CastOut", "Eager", "Enter", "Exit", "Inert", "Landed", "RefuseLoad", "RefuseSave", "Registered"]


class _Hook:
    """A hook that holds the engine and becomes inert in a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Inert":
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()


class Eager(_Hook):
    """A hook that runs as plain Python between compiled graphs; Dynamo would trace a plain one into them."""

    def __init__(self) -> None:
        self._call = torch.compiler.disable(self._run)

    def __call__(self, *args: Any) -> None:
        """Run it."""
        self._call(*args)

    def _run(self, *args: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Registered:
    """A place in a module where something must stay what it was: a parameter, or a module that holds one."""

    name: str
    container: Mapping[str, Any]
    key: str
    identity: int


@final
class Inert:
    """What a hook is in a copy of its module."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


@final
class Enter(Eager):
    """Before a module's forward: tells the engine, and for the model that nothing of it was replaced."""

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
class Exit(Eager):
    """After a module's forward: tells the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _run(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._engine.exit(module, output)


@final
class CastIn(_Hook):
    """Casts the floating-point inputs of a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the inputs, cast."""
        return map_floating(args, self._cast), map_floating(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype)


@final
class CastOut(_Hook):
    """Casts the floating-point outputs of a module; with a loss scale, their gradients are multiplied by it."""

    def __init__(self, dtype: torch.dtype, loss_scale: LossScale | None = None) -> None:
        self._dtype, self._loss_scale = dtype, loss_scale

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the outputs, cast."""
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
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True with a loss scale: what is computed from these gradients would be scaled twice. "
                'Use precision="bf16" or "fp32", or loss_scale=None and a scale of your own.'
            )
        return (grad * ctx.loss_scale.value).to(ctx.dtype), None, None


@final
class Landed(_Hook):
    """The parameter's hook: a weak reference, since autograd keeps it where Python's collector cannot see it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    def __call__(self, parameter: torch.Tensor) -> None:
        """Hand a gradient to the engine."""
        engine = self._engine()
        if engine is not None:
            engine.landed(parameter)


@final
class RefuseSave(_Hook):
    """Before a module's `state_dict`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise unless parameters are whole."""
        if self._engine.gathered is None:
            raise RuntimeError(
                f"{self._engine.mesh} state_dict() outside gathered() would not hold the whole parameters on every "
                "stage and rank. Use `with zero.gathered():` around it, on every rank, or zero.save(path) for a "
                "checkpoint."
            )


@final
class RefuseLoad(_Hook):
    """Before a module's `load_state_dict`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise unless what is loaded reaches the shards."""
        if self._engine.gathered is None or not self._engine.gathered.writeback:
            raise RuntimeError(
                f"{self._engine.mesh} load_state_dict() here would not reach the shards. Use `with "
                "zero.gathered(writeback=True):` around it, on every rank, or zero.load(path)."
            )
