"""The observation of a step that runs on tensors without memory: storages, modules, saved tensors.

Owns the observation. It must not know the run of the step (`tracer.py`) or the differences of a device's kernels
(`personality.py`). Read `events.py` first, which defines the events.

Note: how a step is observed
    A dispatch mode sees each operation below autograd. A new storage is an event, and a weak reference to the storage
    makes the event of its end. In a forward, hooks show which module runs. In a backward, each node of the graph has a
    number; numbers are assigned in order, so each module has a range of them.
    Kept storages are found in two ways: saved-tensor hooks give the module that saves, and storages that outlive the
    forward are kept by some owner. The second way is needed because saved-tensor hooks do not chain: the hooks of
    activation checkpointing hide tensors saved inside. In a backward, operations with gradients enabled are a
    recomputation, and storages that outlive it are activations.

Note: what fake tensors change
    When two gradients of one tensor meet, autograd adds in place if nothing else uses the first, but never if it is a
    fake tensor. The mode recognises these sums and adds in place where autograd would, under the same condition: one
    reference to the first tensor exists, and one tensor on its storage.
"""

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from zeroshard.activations.products import argument_of
from zeroshard.activations.recompute import refuse_reentrant
from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.shape.tape import Exchange
from zeroshard.plan.trace.events import Category, Event, Landed, Marked, Phase, Trace
from zeroshard.plan.trace.masks import Masks
from zeroshard.plan.trace.personality import Personality, exchange_of, is_wait
from zeroshard.table.schedule import Mark
from zeroshard.torch_private import (
    DispatchMode,
    count_users,
    graph_task,
    has_split,
    is_dense,
    local_of,
    next_node_number,
    running_node_number,
    storage_of,
    users_of_storage,
)
from zeroshard.tree import find

__all__ = ["Recorder", "unreadable"]

aten: Final = torch.ops.aten

_TEMPORARY: Final = MappingProxyType(
    {
        Phase.BEFORE: Category.INPUT,
        Phase.FORWARD: Category.FORWARD,
        Phase.BACKWARD: Category.BACKWARD,
        Phase.UPDATE: Category.UPDATE,
    }
)


def unreadable(module: str, what: str) -> RuntimeError:
    """Return the error about a module that reads values."""
    where = f"module {module!r}" if module else "the model"
    return RuntimeError(
        f"A trace has no values, but {where} reads some ({what}). Give the value with reads=, e.g. "
        "reads=lambda tensor: True; a shape that depends on values cannot be traced."
    )


@final
class Pause:
    """A reentrant context; `depth` counts the entries."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


@final
class Recorder(DispatchMode):
    """Records all operations of a trace.

    Args:
        kernels: the device's kernels.
        reads: returns the values that the model reads.
        takes_gradients: whether gradients are taken from their parameters when they are complete.
    """

    def __init__(
        self, kernels: Personality, reads: Callable[[Tensor], Any] | None, *, takes_gradients: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads, self._takes_gradients = reads, takes_gradients
        self.pause = Pause()
        """A context whose operations are not recorded."""
        self.phase = Phase.BEFORE
        self.kernels, self.masks = kernels, Masks()
        # Events, by column: bytes, storage, phase, module, operation.
        self._events: list[tuple[int, int, Phase, str, str]] = []
        self._operation = ""
        self._categories: list[Category] = []
        self._makers: list[str] = []
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # by storage: reference, number, bytes
        self._saved: dict[int, str] = {}
        self._recomputed: list[int] = []
        self._stack: list[str] = []
        self._last = ""
        self._node_numbers: list[int] = []
        self._node_modules: list[str] = []
        self._results: dict[int, weakref.ref[Tensor]] = {}
        self._unshared = -1
        self._hooks: list[Any] = []
        self._kernels: list[tuple[int, Cost]] = []
        self._flops = 0.0
        self._marks: list[Landed | Marked] = []
        self._exchanges: list[tuple[int, Exchange]] = []
        self._copies: list[tuple[int, str, int, int]] = []
        self._names: dict[int, str] = {}

    # -- before and after ---------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Record the storages that exist before the step, and register hooks on the modules."""
        self.phase = Phase.BEFORE
        for prefix, module in model.named_modules():
            self._stack = [prefix]
            for key, parameter in module.named_parameters(recurse=False):
                self._note(parameter, Category.PARAMETER)
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
                    self._names.setdefault(id(parameter), f"{prefix}.{key}".lstrip("."))
            for value in [*module.buffers(recurse=False), *(v for v in vars(module).values() if isinstance(v, Tensor))]:
                self._note(value, Category.BUFFER)
            self._hooks += [
                module.register_forward_pre_hook(partial(self._enter, prefix), prepend=True, with_kwargs=True),
                module.register_forward_hook(partial(self._leave, prefix), always_call=True),
            ]
        self._stack = []
        for tensor in inputs:
            self._note(tensor, Category.INPUT)

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def follow_states(self) -> Iterator[None]:
        """Record the states of random numbers that torch copies on a CPU: each recomputed module keeps one."""
        before, thread = getattr(torch.get_rng_state, "__wrapped__", torch.get_rng_state), get_ident()

        @wraps(before)
        def get_rng_state() -> Tensor:
            state: Tensor = before()
            if self.kernels.name == "cpu" and get_ident() == thread:
                self._note(state, Category.BACKWARD)  # which reads it: no activation
            return state

        torch.get_rng_state = get_rng_state
        try:
            yield
        finally:
            if torch.get_rng_state is get_rng_state:  # else that of a trace in another thread, which began later
                torch.get_rng_state = before

    def calibrate(self) -> None:
        """Measure the reference count of an unshared tensor at the time when its sum with another is seen here."""
        events, self._unshared = len(self._events), -1
        self.phase = Phase.BACKWARD
        x = torch.empty(1, requires_grad=True)
        y = x * 1.0
        (y.sin() + y.cos()).sum().backward()
        del x, y
        del self._events[events:]
        numbers = {event[1] for event in self._events}
        del self._categories[len(numbers) :], self._makers[len(numbers) :]
        self._results.clear()
        self._recomputed.clear()
        self._kernels.clear()
        self.phase, self._last, self._flops = Phase.BEFORE, "", 0.0

    def result(self) -> Trace:
        """Return the trace so far."""
        events = tuple(
            Event(order, nbytes, number, self._categories[number], phase, module, operation)
            for order, (nbytes, number, phase, module, operation) in enumerate(self._events)
        )
        return Trace(
            events,
            MappingProxyType(dict(self._saved)),
            tuple(self._kernels),
            tuple(self._marks),
            tuple(self._exchanges),
            tuple(self._copies),
            self._flops,
        )

    # -- storages -----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> str:
        """The innermost module in forward or backward."""
        if self._stack:
            return self._stack[-1]
        if self.phase is Phase.BACKWARD:
            number = running_node_number()
            if number is not None and self._node_numbers:
                self._last = self._node_modules[max(0, bisect_right(self._node_numbers, number) - 1)]
            return self._last  # accumulation belongs to the node that made the gradient
        return ""

    def assign(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors' storages."""
        for tensor in tensors:
            number = self.number_of(tensor)
            # A state may be the parameter, as in an averaged model.
            if number is not None and self._categories[number] not in (Category.PARAMETER, Category.BUFFER):
                self._categories[number] = category

    def packed(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves."""
        number = self.number_of(tensor)
        if number is not None and self._categories[number] not in (Category.PARAMETER, Category.BUFFER):
            # Includes inputs: a storage between modules is kept for both, regardless of other references.
            self._saved.setdefault(number, self.module)
            if self._categories[number] is Category.FORWARD:
                self._categories[number] = Category.ACTIVATION
        return tensor

    def is_of_model(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a buffer, or a view of one."""
        number = self.number_of(tensor)
        return number is not None and self._categories[number] in (Category.PARAMETER, Category.BUFFER)

    def end_forward(self, loss: Tensor) -> None:
        """Record storages that outlive the forward although no hook saw them saved."""
        result = self.number_of(loss)
        for _, number, _ in self._live.values():
            if self._categories[number] is Category.FORWARD and number != result:
                self._categories[number] = Category.ACTIVATION
                self._saved.setdefault(number, self._makers[number])

    @property
    def count(self) -> int:
        """Number of events so far."""
        return len(self._events)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, as in events; None for unknown storages."""
        found = self._live.get(storage_of(local_of(tensor)))
        return None if found is None else found[1]

    def _note(self, tensor: Tensor, category: Category) -> None:
        """Record a tensor's storage if it is new or was resized."""
        tensor = local_of(tensor)
        storage = tensor.untyped_storage()
        key, nbytes = storage_of(tensor), storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[2] == nbytes:
                return
            category = self._categories[known[1]]
            self._gone(key, known[1], known[2])
        number = len(self._categories)
        module = self.module
        self._categories.append(category)
        self._makers.append(module)
        self._live[key] = (weakref.ref(storage, lambda _: self._gone(key, number, nbytes)), number, nbytes)
        self._event(nbytes, number, module)
        if self.phase is Phase.BACKWARD and torch.is_grad_enabled() and graph_task() >= 0:
            self._recomputed.append(number)

    def _gone(self, key: int, number: int, nbytes: int) -> None:
        known = self._live.get(key)
        if known is not None and known[1] == number:  # otherwise it was resized, and has a new number
            del self._live[key]
            self._event(-nbytes, number, self.module)

    def _event(self, nbytes: int, number: int, module: str) -> None:
        self._events.append((nbytes, number, self.phase, module, self._operation))

    # -- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.pause.depth:
            return func(*args, **kwargs)
        if has_split(types):
            return NotImplemented  # its operations on local tensors are dispatched here
        if is_wait(func):
            return args[0]  # a fake tensor would be created again
        is_backward = self.phase is Phase.BACKWARD and not torch.is_grad_enabled()
        if func is torch.ops.prim.device.default:
            if is_backward:  # autograd inspects the result of a node
                self._note_result(args[0])
            return func(*args, **kwargs)
        self._operation = str(func)
        if is_backward and self._recomputed:
            self._end_recomputation()
        if func is aten._local_scalar_dense.default:
            return self._value(args[0])
        if is_backward and func is aten.add.Tensor and not kwargs and all(map(self._is_result, args)):
            out = (aten.add_ if self._is_sum_in_place(*args) else aten.add).Tensor(*args)
            self._note_result(out)
        else:
            out = self.kernels.run(func, args, kwargs)
        made = _stored(out)
        if (exchange := exchange_of(func, args, made)) is not None:
            self.exchange(exchange)
        else:
            self._note_cost(func, args, kwargs, out, made)
        if self.masks.are_read:
            self.masks.follow(func, args, kwargs, _stored((args, kwargs)), made)
        for tensor in made:
            self._note(tensor, _TEMPORARY[self.phase])
        if nbytes := self.kernels.workspace(func, args, out):
            number = len(self._categories)
            module = self.module
            self._categories.append(_TEMPORARY[self.phase])
            self._makers.append(module)
            self._operation += " (workspace)"
            self._event(nbytes, number, module)
            self._event(-nbytes, number, module)
        return out

    def _note_cost(self, func: Any, args: Any, kwargs: Any, out: Any, made: Sequence[Tensor]) -> None:
        """Record the operations and traffic of an operation; views have none."""
        given = _stored((args, kwargs))
        storages = {storage_of(one) for one in given}
        if not made or (func.is_view or (all(storage_of(one) in storages for one in made) and not _is_in_place(func))):
            return
        flops = _flops_of(func, args, kwargs, out)
        moved_bytes = sum(one.nbytes for one in given) + sum(one.nbytes for one in made)
        if not moved_bytes:
            return  # of no elements, which no kernel runs for
        if self.phase is not Phase.BACKWARD:
            self._flops += flops
        elif not torch.is_grad_enabled():  # with gradients, a backward recomputes
            # Of the five products in the backward of attention, the first repeats the forward's.
            self._flops += flops * (0.8 if _is_attention(func) else 1.0)
        kind = "memory" if not flops else "attention" if _is_attention(func) else "matmul"
        shape = tuple(made[0].shape) if kind == "matmul" else ()
        rows, columns = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (0, 0)
        dtype = str(made[0].dtype).removeprefix("torch.")
        self._kernels.append((len(self._events), Cost(flops, moved_bytes, kind, rows, columns, dtype)))

    def exchange(self, exchange: Exchange) -> None:
        """Record a collective along the tensor axis."""
        self._exchanges.append((len(self._events), exchange))

    def copy(self, lane: str, number: int, nbytes: int = 0) -> None:
        """Record a copy of activations, or the wait for it, as in `Trace.copies`."""
        self._copies.append((len(self._events), lane, number, nbytes))

    def mark(self, mark: Mark) -> None:
        """Record a use of a unit."""
        self._marks.append(Marked(len(self._events), self.phase, mark))

    def _is_sum_in_place(self, first: Tensor, second: Tensor) -> bool:
        """Return whether autograd would add a gradient to another in place if they were not fake."""
        users = count_users(first)
        if self._unshared < 0:
            self._unshared = users
        is_alone = first.layout is torch.strided and users == self._unshared and users_of_storage(first) == 1
        return is_alone and is_dense(first) and first.shape == second.shape and first.dtype == second.dtype

    def _note_result(self, tensor: Tensor) -> None:
        self._results[id(tensor)] = weakref.ref(tensor)

    def _is_result(self, one: Any) -> bool:
        known = self._results.get(id(one))
        return known is not None and known() is one

    def _end_recomputation(self) -> None:
        """Record storages that outlive a forward inside a backward: they are kept for that backward."""
        live = {number for _, number, _ in self._live.values()}
        for number in self._recomputed:
            if number in live and self._categories[number] is Category.BACKWARD:
                self._categories[number] = Category.ACTIVATION
        self._recomputed.clear()

    def _value(self, tensor: Tensor) -> Any:
        """Return the value of a tensor that the model reads."""
        if (answer := self.masks.answer(tensor)) is not None:
            return answer
        if self._reads is None and self.phase is Phase.UPDATE:
            return 1.0 if tensor.is_floating_point() else tensor.dtype is torch.bool or 1
        if self._reads is None:
            raise unreadable(self.module, f"{self._operation} of a tensor of shape {tuple(tensor.shape)}")
        return self._reads(tensor)

    # -- modules ------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append(name)
        self._mark()

    def _leave(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Assign graph nodes created from now on to the innermost module."""
        self._node_numbers.append(next_node_number())
        self._node_modules.append(self._stack[-1] if self._stack else "")

    def _accumulated(self, parameter: Tensor) -> None:
        if (grad := parameter.grad) is None:
            return
        grad = grad if grad.layout is torch.strided else grad.to_dense()  # as the engine does
        self.assign([grad], Category.GRADIENT)
        number, parameter_part, grad = self.number_of(grad), local_of(parameter), local_of(grad)
        if self._takes_gradients and number is not None:
            refuse_reentrant()
            is_alone = grad.stride() == parameter_part.stride() and grad.untyped_storage().nbytes() == grad.nbytes
            is_alone = is_alone and users_of_storage(grad) == 1
            self._marks.append(Landed(len(self._events), self._names[id(parameter)], number, grad.nbytes, is_alone))
            parameter.grad = None


def _flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the operations of a call, by torch's formulas, which lack the products of experts."""
    if str(func) == "aten._grouped_mm.default":
        one, other = args[:2]
        is_by_columns = one.dim() == 3 and other.dim() == 2
        return 2.0 * float(other.numel() * one.shape[-2] if is_by_columns else one.numel() * other.shape[-1])
    # torch has no formula for the kernel of a CPU, whose first arguments are those of the GPU's.
    packet = func.overloadpacket
    if (name := packet.__name__).startswith("_scaled_dot_product_flash_attention_for_cpu"):
        packet = getattr(aten, name.replace("_for_cpu", ""))
    formula = flop_registry.get(packet)
    flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
    # The formulas count masked blocks, which the kernels of causal attention leave out.
    return flops / 2 if _is_attention(func) and argument_of(func, args, kwargs, "is_causal") else flops


def _stored(value: Any) -> list[Tensor]:
    """Return the tensors in a value that have a storage; those of a sparse one are its indices and values."""
    found = [value] if isinstance(value, Tensor) else find(value, Tensor)
    sparse = [one for one in found if one.layout is torch.sparse_coo]
    found = [one for one in found if one.layout is not torch.sparse_coo]
    return [*found, *(part for one in sparse for part in (one._indices(), one._values()))]


def _is_attention(func: Any) -> bool:
    return "attention" in str(func)


def _is_in_place(func: Any) -> bool:
    return str(func.overloadpacket).endswith("_")
