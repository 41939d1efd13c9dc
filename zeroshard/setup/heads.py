"""In-place accumulation of the gradient of an embedding that is also the model's head.

Owns a hook on the model's outputs. It must not know units or passes.

Note: a third table
    Autograd adds the gradients of a parameter's uses in place if no other tensor shares the memory of the first
    gradient. The gradient of a linear layer is a view, whose base stays alive, so the sum would need new memory: with
    both gradients, three times the size of the table, at the peak of the step. A plain tensor on the same memory
    permits the addition in place, with the same bits.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, final

import torch

from zeroshard.core.hooks import Eager
from zeroshard.torch_private import is_lazy, nodes_before
from zeroshard.tree import find

__all__ = ["AddInPlace"]

Tensor = torch.Tensor

NEAR: Final = 64
"""Number of graph nodes, from the outputs on, in which to search for a head."""


@final
class AddInPlace(Eager):
    """Post-hook of a model's forward: makes a head's gradients of some parameters plain tensors."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._ids = {id(parameter) for parameter in parameters}

    def _run(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        nodes = deque(tensor.grad_fn for tensor in find(output, torch.Tensor) if tensor.grad_fn is not None)
        seen = set(nodes)
        for _ in range(NEAR):
            if not nodes:
                return
            node = nodes.popleft()
            following = dict.fromkeys(nodes_before(node))
            if any(id(getattr(one, "variable", None)) in self._ids for one in following):
                node.register_hook(_as_plain)
            nodes.extend(one for one in following if one not in seen)
            seen.update(following)


def _as_plain(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    """Return gradients as plain tensors, not as views."""
    if torch.is_grad_enabled():  # create_graph=True: gradients have a graph
        return None
    return tuple(_plain(grad) if type(grad) is Tensor and grad._is_view() else grad for grad in grads)


def _plain(view: Tensor) -> Tensor:
    if is_lazy(view):
        return view  # its memory has other values
    # Not through its storage: Python's storage object would also share the memory.
    plain: Tensor = view.new_empty(0).set_(view)  # type: ignore[call-overload]
    return plain
