"""First values of a model of which a place of a pipe has a part: the numbers of one process.

Owns the initializer that draws for parameters of other places, too, so that those of this place get the numbers that
they get in one process. It must not know units. Read `values/materialize.py` first.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroshard.devices import generator_of
from zeroshard.tree import map_tensors
from zeroshard.values.materialize import InitFn, in_order, initializers_of, is_on_meta

__all__ = ["drawing_all", "with_generator_of"]


def drawing_all(model: nn.Module, removed: Mapping[str, Tensor], device: torch.device, own: InitFn | None) -> InitFn:
    """Return an initializer that also draws, and drops, the values of removed parameters, in the order of one process.

    `materialize` does not visit modules without parameters: they are initialized before the next one that it visits.

    Args:
        removed: what stands for the parameters of other places, on the meta device.
        own: the user's initializer; None for those of the modules.
    """
    known = {id(one) for one in removed.values()}
    initializers = dict.fromkeys(model.modules(), own) if own is not None else initializers_of(model)
    lacking = {m for m in model.modules() if any(id(one) in known for one in vars(m).values())}
    left = [
        (module, not is_on_meta(module) and any(one in lacking for one in module.modules()))
        for module in in_order(model, set())
    ]

    def draw(module: nn.Module) -> None:
        if (initializer := initializers[module]) is not None:
            with _Filling(known, device):
                initializer(module)

    def initialize(module: nn.Module) -> None:
        if not is_on_meta(module):  # else `materialize` looks at what the initializer writes
            while left and (turn := left.pop(0))[0] is not module:
                if turn[1]:
                    draw(turn[0])
        draw(module)

    return initialize


@final
class _Filling(TorchFunctionMode):
    """Gives each function memory on a device in the place of what stands for a removed parameter."""

    def __init__(self, known: set[int], device: torch.device) -> None:
        super().__init__()
        self._known, self._device = known, device
        self._made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_tensors((args, kwargs or {}), self._real)
        return func(*args, **kwargs)

    def _real(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        return self._made[id(tensor)]


@contextmanager
def with_generator_of(share: Callable[[Tensor], None], device: torch.device) -> Iterator[None]:
    """Draw the numbers of the first place inside; what was drawn is forgotten at the other places.

    Args:
        share: gives a tensor the values of the first place.
    """
    generators = {torch.default_generator, generator_of(device)}
    before = [(one, one.get_state()) for one in generators]
    for one, state in before:
        shared = state.clone()
        share(shared)
        one.set_state(shared)
    is_first = all(torch.equal(one.get_state(), state) for one, state in before)
    try:
        yield
    finally:
        for one, state in before if not is_first else ():
            one.set_state(state)
