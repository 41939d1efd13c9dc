"""The order in which a model uses its units, determined by one forward and backward on tensors without memory.

Owns the observation of modules, gradients and saved tensors of that run. It must not know the engine: it reimplements
the observations of the engine's hooks, so a test that compares both can fail. `plan/trace/step_events.py` makes events
of the uses. Read `describe/units.py` first.

Note: what tells of a use
    Forward: a module with parameters of a unit starts, and ends. Backward: the use starts when the gradient of an
    output of such a module is computed, a saved parameter is unpacked, or the module runs again (activation
    checkpointing). It ends with the gradients of the module's inputs, of the last call that has any. If no input
    requires a gradient, it ends with the gradient of the unit's last parameter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.describe.selection import recomputed_modules
from zeroshard.describe.units import UnitPlan
from zeroshard.plan.trace.fake import Fakes, exchanged
from zeroshard.plan.trace.step_events import Uses
from zeroshard.table.activations import Activations
from zeroshard.table.schedule import ROOT, Mark
from zeroshard.torch_checks import check_tracing
from zeroshard.torch_private import (
    accumulator_of,
    fake_errors,
    fake_tensors,
    graph_task,
    run_backward,
    storage_of,
    will_run,
)
from zeroshard.tree import find

__all__ = ["trace_uses"]


def trace_uses(
    step: Callable[..., Tensor],
    model: nn.Module,
    inputs: Sequence[Any],
    plans: Sequence[UnitPlan],
    *,
    activations: Activations | None = None,
) -> Uses:
    """Return the uses of units in a forward and a backward of a model, without computing; the model does not change.

    Args:
        step: called with the model and the inputs, returns the loss; it runs the model once.
        model: with parameters on any device, including "meta".
        inputs: tensors on any device, or containers of tensors.
        plans: the model's units, as from `plan_units`.
        activations: the treatment of activations, which determines the modules that run again in the backward.

    Raises:
        ValueError: `step` does not run the model exactly once, or modules are recomputed in segments, which have
            another order.
        RuntimeError: the model reads values of tensors.
    """
    check_tracing()
    modules = recomputed_modules(activations or Activations(), plans)
    if any(how.every != 1 for _, how in modules):
        raise ValueError(
            f"activations={activations} recomputes segments of several modules; uses are known only for every=1. Pass "
            "your own uses to plan.passes.step_events()."
        )
    again = {module for module, _ in modules}
    recomputed = {
        number for number, plan in enumerate(plans) if any(block in again for block in plan.blocks or (plan.module,))
    }
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        fakes = Fakes()
        stack.enter_context(exchanged(model, fakes))
        given = fakes.of_all(tuple(inputs))
        watch = _Watch(model, plans, {id(p): fakes.of(p) for plan in plans for _, p in plan.parameters}, recomputed)
        stack.callback(watch.end)
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
                loss = step(model, *given)
            run_backward(loss)
        except fake_errors() as error:
            raise RuntimeError(
                f"A trace has no values, but the model reads some ({error}), and the units that it uses may depend on "
                "them. Pass your own uses to plan.passes.step_events()."
            ) from error
        return watch.result()


@final
class _Watch:
    """Observes modules, gradients and saved parameters of one forward and backward.

    Args:
        fakes: the fake copy of each parameter, by identity.
        recomputed: units whose modules run again in the backward.
    """

    def __init__(
        self, model: nn.Module, plans: Sequence[UnitPlan], fakes: Mapping[int, Tensor], recomputed: set[int]
    ) -> None:
        self._model, self._recomputed = model, recomputed
        self._parameters = [[fakes[id(p)] for _, p in plan.parameters] for plan in plans]
        self._joined = {number for number, plan in enumerate(plans) if plan.blocks}
        self._by_storage = {storage_of(p): number for number, own in enumerate(self._parameters) for p in own}
        self._forward: list[Mark] = []
        self._backward: list[Mark] = []
        self._stack: list[nn.Module] = []
        self._runs = 0
        self._between: int | None = None
        self._users: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._hinted: set[int] = set()
        self._landed: dict[int, set[int]] = {number: set() for number in range(len(plans))}
        self._hooks: list[Any] = []
        entries: dict[nn.Module, tuple[int, ...]] = {model: ()}
        for number, plan in enumerate(plans):
            for module in plan.entries:
                entries[module] = (*entries.get(module, ()), number)
        for module, units in entries.items():
            enter, leave = partial(self._enter, units), partial(self._leave, units)
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        for number, own in enumerate(self._parameters):
            for parameter in own:
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._land, number)))

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def result(self) -> Uses:
        """Return the observed uses.

        Raises:
            ValueError: the model did not run exactly once.
        """
        if self._runs != 1:
            raise ValueError(f"step must run the model once; it ran {self._runs} times.")
        partly = {number for number, landed in self._landed.items() if landed and not self._has_all(number)}
        return Uses(tuple(self._forward), (*self._backward, ("close", ROOT)), frozenset(partly))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _enter(self, units: tuple[int, ...], module: nn.Module, args: Any, kwargs: Any) -> None:
        if graph_task() != -1:
            for number in units:
                self._need(number)
                self._recomputed.add(number)
            return
        self._runs += not self._stack
        self._stack.append(module)
        between, self._between = self._between, None
        if between is not None and between not in units:
            self._forward.append(("leave", between))
        inputs = [one for one in find((args, kwargs), Tensor) if one.requires_grad and one.grad_fn is not None]
        for number in units:
            self._forward.append(("need", number))
            self._users[number] += 1
            self._calls[number] += 1
        targets = [number for number in units if number != ROOT]
        if targets and inputs:
            self._hinted.update(targets)
            end = _Once(partial(self._end_calls, targets))
            for tensor in inputs:
                tensor.register_hook(end)

    def _leave(self, units: tuple[int, ...], module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != -1:
            return
        self._stack.pop()
        for number in units:
            self._users[number] -= 1
            if not self._users[number] and number in self._joined and self._stack:
                self._between = number
            elif not self._users[number]:
                self._forward.append(("leave", number))
        targets = [number for number in units if number != ROOT]
        for tensor in find(output, Tensor):
            if targets and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._begin_calls, targets))
        if not self._stack:
            self._forward.append(("close", ROOT))

    def pack(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return a tensor that autograd saves with its unit, or None."""
        return tensor, self._by_storage.get(storage_of(tensor)) if tensor.layout is torch.strided else None

    # -- backward -----------------------------------------------------------------------------------------------------

    def unpack(self, packed: tuple[Tensor, int | None]) -> Tensor:
        """Record that the backward reads a saved tensor."""
        tensor, number = packed
        if number is not None and graph_task() != -1:
            self._need(number)
        return tensor

    def _open(self) -> None:
        if not self._backward and self._calls[ROOT]:
            self._backward.append(("need", ROOT))

    def _need(self, number: int) -> None:
        self._open()
        self._backward.append(("need", number))

    def _begin_calls(self, numbers: Sequence[int], grad: Tensor) -> None:
        for number in numbers:
            self._need(number)

    def _end_calls(self, numbers: Sequence[int]) -> None:
        self._open()
        for number in numbers:
            self._calls[number] -= 1
            if self._calls[number] <= 0:
                if self._landed[number] and not self._has_all(number) and not self._awaits(number):
                    self._backward.append(("land", number))
                self._backward.append(("leave", number))

    def _land(self, number: int, parameter: Tensor) -> None:
        self._open()
        own, landed = self._parameters[number], self._landed[number]
        landed.add(id(parameter))
        if self._has_all(number):
            self._backward.append(("land", number))
            if len(landed) == len(own) and number not in self._hinted | self._recomputed:
                self._backward.append(("leave", number))

    def _has_all(self, number: int) -> bool:
        return all(id(p) in self._landed[number] for p in self._parameters[number] if p.requires_grad)

    def _awaits(self, number: int) -> bool:
        """Return whether the current backward will compute more gradients of a unit."""
        missing = (p for p in self._parameters[number] if p.requires_grad and id(p) not in self._landed[number])
        return any(will_run(accumulator_of(p)) for p in missing)


@final
class _Once:
    """A hook on several tensors that acts on its first call."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._is_due = act, True

    def __call__(self, grad: Tensor) -> None:
        if self._is_due:
            self._is_due = False
            self._act()
