"""The hooks of a model's modules and parameters, which pass events to the engine.

The engine handles the events, and `setup/wiring.py` registers the hooks. Hooks are objects, so that a deep copy of a
module gets inert hooks instead of a second engine.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import ref

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.torch_private import is_inside_functional_call, untraced
from zeroshard.tree import find

__all__ = ["Arrive", "Eager", "Enter", "Exit", "Hook", "Inert", "Landed", "Registered"]


REASON: Final = "zeroshard works between graphs: use fullgraph=False, or compile blocks instead of the sharded model"


class Hook:
    """A hook that references the engine and becomes inert in a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Inert":
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()


class Eager(Hook):
    """A hook that runs as plain Python between compiled graphs; Dynamo would trace other hooks into them."""

    def __init__(self) -> None:
        self._call = torch.compiler.disable(self._run, reason=REASON)

    @untraced  # all hooks share its code, which Dynamo would compile for each of them
    def __call__(self, *args: Any) -> None:
        """Run it."""
        self._call(*args)

    def _run(self, *args: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Registered:
    """A place in a module whose parameter or submodule must not be replaced."""

    name: str
    container: Mapping[str, Any]
    key: str
    identity: int


@final
class Inert:
    """The replacement of a hook in a copy of its module."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


@final
class Enter(Eager):
    """Before a module's forward: notifies the engine, and checks the model for replaced or added parameters.

    Args:
        own: the places that must be unchanged.
        added: returns the name of a parameter that was added after `shard`, or "".
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

    @property
    def rank(self) -> str:
        """The rank as errors name it, such as "[rank 0/2]"."""
        return str(self._engine.mesh)

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for one in self._own:
            if id(one.container.get(one.key)) != one.identity:
                if is_inside_functional_call():
                    self._check_whole(one.name)
                    break
                raise RuntimeError(
                    f"{self._engine.mesh} '{one.name}' was replaced after zs.shard(): the replacement would neither be "
                    "sharded nor updated. Replace modules and parameters (and resize embeddings) before zs.shard(); "
                    "to change values, use `with zero.gathered(writeback=True):` and in-place operations."
                )
        if self._added is not None and (name := self._added()):
            raise RuntimeError(
                f"{self._engine.mesh} '{name}' was added to the model after zs.shard(): its gradient would not be "
                "reduced, its values would differ between ranks, and checkpoints would not contain it. Add modules "
                "and parameters before zs.shard(); name parameters that each rank keeps for itself in ignored=."
            )
        self._engine.enter(module, self.name, self._units, (args, kwargs))

    def _check_whole(self, name: str) -> None:
        """Raise if other tensors replace the parameters in a forward, which would gather parameters for nothing."""
        if self._engine.is_sharded and self._engine.gathered is None:
            raise RuntimeError(
                f"{self._engine.mesh} functional_call() with another tensor for '{name}', while parameters are sharded "
                "and released. To train through it, call it in the forward of the sharded model, or keep parameters "
                "whole (stage=2, or parameters='replicated'). Without a backward, use `with zero.gathered():` around "
                "it, on every rank."
            )


@final
class Arrive(Eager):
    """Before the forward of a module: waits for its updated parameters; extensions in C++ do not ask their class."""

    def __init__(self, engine: Engine, units: tuple[int, ...]) -> None:
        super().__init__()
        self._engine, self._units, self._needed = engine, units, [engine.units[number] for number in units]

    def __call__(self, *args: Any) -> None:
        """Run it, if there is something to wait for."""
        for unit in self._needed:
            if unit.is_coming:
                self._call()

    def _run(self) -> None:
        self._engine.await_published(self._units)


@final
class Exit(Eager):
    """After a module's forward: notifies the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _run(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._engine.gathered is not None:
            self._end_with_context(output)
        elif self._engine.has_frames and (error := sys.exception()) is not None:
            self._explain(error)
        self._engine.exit(module, output)

    def _explain(self, error: BaseException) -> None:
        """Add to torch's error for a transform inside a forward, which nothing can replace there, why and what else."""
        if "support saved tensor hooks" in str(error) and not hasattr(error, "__notes__"):
            error.add_note(
                f"{self._engine.mesh} torch.func.grad, vjp, jacrev and hessian refuse the hooks on saved tensors that "
                "this forward has, which gather parameters for a backward or treat activations. Use "
                "torch.autograd.grad, or keep parameters whole (stage=2, or parameters='replicated') and activations "
                "as they are."
            )

    def _end_with_context(self, output: Any) -> None:
        """Let a backward through a forward under `gathered()` raise after it: the graph would read released memory."""
        engine, context = self._engine, self._engine.gathered

        def check(grad: torch.Tensor) -> None:
            if engine.gathered is not context:
                raise RuntimeError(
                    f"{engine.mesh} backward() after gathered() through a forward inside it, whose parameters are "
                    "released. Run the forward outside the context, or keep parameters whole (stage=2)."
                )

        for tensor in find(output, torch.Tensor) if engine.is_sharded and torch.is_grad_enabled() else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(check)


@final
class Landed(Hook):
    """The hook of a parameter, with a weak reference, because Python's collector cannot see autograd's reference."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)

    @untraced  # a compiled function may call backward()
    def __call__(self, parameter: torch.Tensor) -> None:
        """Pass a gradient to the engine."""
        if (engine := self._engine()) is not None:
            engine.landed(parameter)
