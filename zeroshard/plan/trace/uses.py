"""The order in which a traced model uses its units.

Owns the observation of modules, gradients and saved parameters of one forward and backward on tensors without memory.
It must not know the engine: it reimplements the observations of the engine's hooks, so a test that compares both can
fail. `table/step.py` has the actions that follow from the uses. Read `describe/units.py` first.

Note: what tells of a use
    Forward: a module with parameters of a unit starts, and ends. Backward: the use starts when the gradient of an
    output of such a module is computed, a saved parameter is unpacked, or the module runs again (activation
    checkpointing). It ends with the gradients of the module's inputs, of the last call that has any. If no input
    requires a gradient, it ends with the gradient of the unit's last parameter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from zeroshard.describe.selection import recomputed_modules
from zeroshard.describe.units import UnitPlan
from zeroshard.table.activations import Activations
from zeroshard.table.schedule import ROOT, Mark
from zeroshard.torch_private import accumulator_of, graph_task, local_of, storage_of, will_run
from zeroshard.tree import find

__all__ = ["UnitWatch"]


@final
class UnitWatch:
    """Observes the uses of units.

    Args:
        plans: the model's units, as from `plan_units`.
        twins: the module of the traced model for each module of the plans.
        activations: the treatment of activations, which determines the modules that run again in the backward.
    """

    def __init__(
        self, plans: Sequence[UnitPlan], twins: Mapping[nn.Module, nn.Module], activations: Activations
    ) -> None:
        again = {module for module, _ in recomputed_modules(activations, plans)}
        self._recomputed = {
            number
            for number, plan in enumerate(plans)
            if any(block in again for block in plan.blocks or (plan.module,))
        }
        self._entries: dict[nn.Module, tuple[int, ...]] = {twins[plans[ROOT].module]: ()}
        for number, plan in enumerate(plans):
            for module in plan.entries:
                self._entries[twins[module]] = (*self._entries.get(twins[module], ()), number)
        self._names = [[name for name, _ in plan.parameters] for plan in plans]
        self._parameters: list[list[Tensor]] = []
        self._joined = {number for number, plan in enumerate(plans) if plan.blocks}
        self._by_storage: dict[int, int] = {}
        self._note: Callable[[Mark], None] = lambda mark: None
        self._stack: list[nn.Module] = []
        self._has_begun_backward = False
        self._between: int | None = None
        self._users: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._hinted: set[int] = set()
        self._landed: dict[int, set[int]] = {number: set() for number in range(len(plans))}
        self._hooks: list[Any] = []

    def begin(self, model: nn.Module, note: Callable[[Mark], None]) -> None:
        """Register hooks on a model whose parameters have no memory.

        Args:
            note: called with each mark, in order.
        """
        own = dict(model.named_parameters(remove_duplicate=False))
        self._note, self._parameters = note, [[own[name] for name in names] for names in self._names]
        self._by_storage = {storage_of(local_of(p)): n for n, some in enumerate(self._parameters) for p in some}
        for module, units in self._entries.items():
            enter, leave = partial(self._enter, units), partial(self._leave, units)
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        for number, some in enumerate(self._parameters):
            for parameter in some:
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._land, number)))

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def end_backward(self) -> None:
        """Note the end of the backward."""
        self._note(("close", ROOT))

    @property
    def partial(self) -> frozenset[int]:
        """Units that got some of their gradients, but not all."""
        return frozenset(n for n, landed in self._landed.items() if landed and not self._has_all(n))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _enter(self, units: tuple[int, ...], module: nn.Module, args: Any, kwargs: Any) -> None:
        if graph_task() != -1:
            for number in units:
                self._need(number)
                self._recomputed.add(number)
            return
        self._stack.append(module)
        between, self._between = self._between, None
        if between is not None and between not in units:
            self._note(("leave", between))
        inputs = [one for one in find((args, kwargs), Tensor) if one.requires_grad and one.grad_fn is not None]
        for number in units:
            self._note(("need", number))
            self._users[number] += 1
            self._calls[number] += 1
        targets = [number for number in units if number != ROOT]
        if targets and inputs:
            self._hinted.update(targets)
            register_multi_grad_hook(inputs, partial(self._end_calls, targets), mode="any")

    def _leave(self, units: tuple[int, ...], module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != -1:
            return
        self._stack.pop()
        for number in units:
            self._users[number] -= 1
            if not self._users[number] and number in self._joined and self._stack:
                self._between = number
            elif not self._users[number]:
                self._note(("leave", number))
        targets = [number for number in units if number != ROOT]
        for tensor in find(output, Tensor):
            if targets and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._begin_calls, targets))
        if not self._stack:
            self._note(("close", ROOT))

    # -- backward -----------------------------------------------------------------------------------------------------

    def unit_of(self, tensor: Tensor) -> int | None:
        """Return the unit of a parameter whose memory a tensor shares."""
        return self._by_storage.get(storage_of(tensor)) if tensor.layout is torch.strided else None

    def unpack(self, number: int | None) -> None:
        """Note that the backward reads a saved tensor of `unit_of`; nothing if it is of no unit."""
        if number is not None and graph_task() != -1:
            self._need(number)

    def _open(self) -> None:
        if not self._has_begun_backward and self._calls[ROOT]:
            self._note(("need", ROOT))
        self._has_begun_backward = True

    def _need(self, number: int) -> None:
        self._open()
        self._note(("need", number))

    def _begin_calls(self, numbers: Sequence[int], grad: Tensor) -> None:
        for number in numbers:
            self._need(number)

    def _end_calls(self, numbers: Sequence[int], grad: Tensor) -> None:
        self._open()
        for number in numbers:
            self._calls[number] -= 1
            if self._calls[number] <= 0:
                if self._landed[number] and not self._has_all(number) and not self._awaits(number):
                    self._note(("land", number))
                self._note(("leave", number))

    def _land(self, number: int, parameter: Tensor) -> None:
        self._open()
        own, landed = self._parameters[number], self._landed[number]
        landed.add(id(parameter))
        if self._has_all(number):
            self._note(("land", number))
            if len(landed) == len(own) and number not in self._hinted | self._recomputed:
                self._note(("leave", number))

    def _has_all(self, number: int) -> bool:
        return all(id(p) in self._landed[number] for p in self._parameters[number] if p.requires_grad)

    def _awaits(self, number: int) -> bool:
        """Return whether the current backward will compute more gradients of a unit."""
        missing = (p for p in self._parameters[number] if p.requires_grad and id(p) not in self._landed[number])
        return any(will_run(accumulator_of(p)) for p in missing)
