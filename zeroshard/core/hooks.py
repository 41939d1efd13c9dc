"""The hooks of a model's modules and parameters: each passes its event to the engine.

Owns nothing of what happens then, nor where they hang (`state/wiring.py`). Hooks are objects, so that a deep copy of a
module gets inert ones instead of a second engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import ref

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.torch_private import is_inside_functional_call

__all__ = ["Eager", "Enter", "Exit", "Hook", "Inert", "Landed", "Registered"]


class Hook:
    """A hook that holds the engine and becomes inert in a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Inert":
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()


class Eager(Hook):
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
    """Before a module's forward: tells the engine, and for the model that nothing of it was replaced or added.

    Args:
        own: what must be found unchanged.
        added: returns the name of a parameter that was added since, or "".
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        units: tuple[int, ...],
        own: Sequence[Registered] = (),
        added: Callable[[], str] | None = None,
    ) -> None:
        super().__init__()
        self._engine, self.name, self._units, self._own, self._added = engine, name, units, own, added

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for one in self._own:
            if id(one.container.get(one.key)) != one.identity:
                if is_inside_functional_call():
                    self._check_whole(one.name)
                    break
                raise RuntimeError(
                    f"{self._engine.mesh} '{one.name}' was replaced after zs.shard(): the new one would neither be "
                    "sharded nor updated. Replace modules and parameters (and resize embeddings) before zs.shard(); "
                    "to change values use `with zero.gathered(writeback=True):` and in-place operations."
                )
        if self._added is not None and (name := self._added()):
            raise RuntimeError(
                f"{self._engine.mesh} '{name}' was added to the model after zs.shard(): its gradient would not be "
                "reduced, no rank would have the others' values, and checkpoints would not have it. Add modules and "
                "parameters before zs.shard(); what each rank keeps for itself is named in ignored= there."
            )
        self._engine.enter(module, self.name, self._units, (args, kwargs))

    def _check_whole(self, name: str) -> None:
        """Raise where a forward with other tensors in the place of parameters would gather parameters for nothing."""
        if self._engine.is_sharded and self._engine.gathered is None:
            raise RuntimeError(
                f"{self._engine.mesh} functional_call() with another tensor for '{name}', while parameters are sharded "
                "and released. Use `with zero.gathered():` around it, on every rank, or keep parameters whole (stages "
                "0 to 2)."
            )


@final
class Exit(Eager):
    """After a module's forward: tells the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _run(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._engine.exit(module, output)


@final
class Landed(Hook):
    """The parameter's hook: a weak reference, since autograd keeps it where Python's collector cannot see it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    def __call__(self, parameter: torch.Tensor) -> None:
        """Hand a gradient to the engine."""
        engine = self._engine()
        if engine is not None:
            engine.landed(parameter)
