"""Closures that a program passes to `optimizer.step()`.

Owns their call, and what the optimizer's step gets instead of them. It must not know how an update is made.

Note: a closure is called once, before the update
    torch's optimizers call a closure before they read gradients. Forward and backward need parameters, votes and
    collectives, and all of an update follows from the gradients: the vote whether they are finite, the slices, the
    pieces. So our pre-hook, the last one, calls the closure, and the optimizer's step gets a `Computed` loss. Hooks of
    user code ran before the closure, as in torch. An optimizer that ignores its closure gets these gradients, too.
"""

from collections.abc import Callable
from typing import Any, final

from zeroshard.optim.arguments import loss_of
from zeroshard.wire.mesh import Mesh

__all__ = ["Arguments", "call_closure"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@final
class Computed:
    """A closure whose loss is known, and which can be called once.

    Args:
        name: of the optimizer's class.
        give_up: what ends an update that is not completed.
    """

    def __init__(self, loss: Any, mesh: Mesh, name: str, give_up: Callable[[], None]) -> None:
        self._loss, self._mesh, self._name, self._give_up = loss, mesh, name, give_up
        self._is_called = False

    def __call__(self) -> Any:
        if self._is_called:
            self._give_up()
            raise RuntimeError(
                f"{self._mesh} {self._name}.step() called its closure a second time. Sharded parameters cannot run "
                "forward and backward during their update, so the closure runs once, before the update. A part of the "
                "update may have been made: load a checkpoint, and use an optimizer that calls its closure once, such "
                "as torch.optim.AdamW."
            )
        self._is_called = True
        return self._loss


def call_closure(
    mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], give_up: Callable[[], None]
) -> Arguments | None:
    """Call the closure among the arguments of an optimizer's step, with gradients enabled.

    Args:
        args: the optimizer, then the positional arguments of its step.
        give_up: called before the error of a second call.

    Returns: the arguments with a `Computed` loss instead of the closure; None if there is no closure.

    Raises:
        TypeError: there are positional arguments besides a closure.

    Collective: those of the closure's forwards and backwards.
    """
    (optimizer, *rest), name = args, type(args[0]).__name__
    closure, *others = rest or [kwargs.get("closure")]
    if any(other is not None for other in others) or not (closure is None or callable(closure)):
        raise TypeError(f"{mesh} {name}.step() takes a closure and no other positional argument; got {rest}.")
    if closure is None:
        return None
    computed = Computed(loss_of(closure), mesh, name, give_up)
    return ((optimizer, computed), kwargs) if rest else (args, {**kwargs, "closure": computed})
