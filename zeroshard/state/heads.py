"""The gradient of an embedding that is the model's head, too, added up in place.

Owns a hook on the model's outputs. It must not know units or passes.

Note: a third table
    Autograd adds the gradients of a parameter's uses in place if nothing else shares the memory of the first. That of a
    linear layer is a view of what was computed, and keeps it alive, so the sum would take memory of its own: with both
    gradients three times that of the table, at the peak of the step. As a plain tensor on the same memory it is added
    to in place, with the same bits.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, final

import torch

from zeroshard.core.hooks import Eager
from zeroshard.torch_private import nodes_before
from zeroshard.tree import find

__all__ = ["AddInPlace"]

Tensor = torch.Tensor

NEAR: Final = 64
"""Nodes of the graph, from the outputs on, among which a head is looked for."""


@final
class AddInPlace(Eager):
    """After a model's forward: has the gradients that a head hands to some parameters be plain tensors."""

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
    """Return gradients without what they are views of."""
    if torch.is_grad_enabled():  # create_graph=True: they have a graph of their own
        return None
    return tuple(_plain(grad) if type(grad) is Tensor and grad._is_view() else grad for grad in grads)


def _plain(view: Tensor) -> Tensor:
    # Not by its storage: Python's object for that would share the memory, too.
    plain: Tensor = view.new_empty(0).set_(view)  # type: ignore[call-overload]
    return plain
