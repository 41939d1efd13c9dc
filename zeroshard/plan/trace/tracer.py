"""A trace of training steps without memory: storages, their lifetimes, and their purposes.

Owns the run of a step on fake tensors. It must not know ranks or sharding, or the observation (`recorder.py`).
`events.py` defines the result.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.describe.split import split_parameters
from zeroshard.plan.trace.events import Category, Phase, Trace
from zeroshard.plan.trace.fake import Fakes, exchanged
from zeroshard.plan.trace.personality import PERSONALITIES
from zeroshard.plan.trace.recorder import Recorder, unreadable
from zeroshard.plan.trace.treated import Treated
from zeroshard.plan.trace.uses import UnitWatch
from zeroshard.torch_checks import check_tracing
from zeroshard.torch_private import fake_errors, fake_tensors, run_backward, while_inferring
from zeroshard.tree import find

__all__ = ["trace_step"]


def trace_step(
    step: Callable[..., Tensor],
    model: nn.Module,
    inputs: Sequence[Any] = (),
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    personality: str = "cpu",
    micro_batches: int = 1,
    steps: int = 1,
    reads: Callable[[Tensor], bool | int | float] | None = None,
    takes_gradients: bool = False,
    treated: Treated | None = None,
    watch: UnitWatch | None = None,
) -> Trace:
    """Run training steps of a model on tensors without memory, and return the allocations.

    The model is restored at the end: during the trace it has fake parameters and buffers. Existing gradients are not
    counted. Nothing is computed, so `reads` must return the value if the model reads one, as `if x.sum() > 0:` does. A
    model that behaves differently with fake tensors is traced with that behaviour.

    Args:
        step: called with the model and the inputs, returns the loss; the trace runs its backward.
        model: with parameters on any device, including "meta".
        inputs: tensors on any device, or containers of tensors.
        optimizer: makes the optimizer from the parameters, e.g. `torch.optim.AdamW`; None for no updates.
        personality: name of the kernels, "cpu" or "cuda".
        micro_batches: number of forwards and backwards per step, each with the same inputs.
        steps: number of traced steps; the first step starts without gradients and optimizer states.
        reads: called with a tensor of one element whose value the model or the optimizer reads, returns the value;
            without it, optimizers read 1.
        takes_gradients: whether gradients are taken from their parameters when they are complete, as in the engine;
            `Trace.marks` has the times. There are no updates then.
        treated: the treatments of tensors saved for the backward.
        watch: observes the uses of units in a step of one micro-batch; they are in `Trace.marks`.

    Raises:
        ValueError: the model has no such unit, the personality is unknown, or a count is below 1.
        TypeError: `step` does not return a loss, or a tensor of the model cannot be fake.
        RuntimeError: the model reads values of tensors.

    >>> import torch
    >>> from zeroshard.plan.trace.tracer import trace_step
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(1024, 1024, bias=False)
    >>> trace = trace_step(lambda model, x: model(x).sum(), model, [torch.empty(8, 1024, device="meta")])
    >>> max(trace.live), trace.saved_bytes()
    (8454152, 32768)
    """
    check_tracing()
    if personality not in PERSONALITIES:
        raise ValueError(f"Personality {personality!r} is unknown; known: {', '.join(PERSONALITIES)}.")
    for name, count in (("micro_batches", micro_batches), ("steps", steps)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")
    kernels = PERSONALITIES[personality]()
    recorder = Recorder(kernels, reads, takes_gradients=takes_gradients)
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors())
        # It prints the traceback of an error that is raised here anyway, in the program's words.
        log = logging.getLogger(type(mode).__module__)
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        fakes = Fakes()
        stack.enter_context(exchanged(model, fakes))
        given = fakes.of_all(tuple(inputs))
        fakes.forget_storages()
        recorder.begin(model, find(given, Tensor))
        stack.callback(recorder.end)
        recorder.masks.begin(find(tuple(inputs), Tensor), find(given, Tensor))
        stack.enter_context(recorder.masks.read(mode))
        if watch is not None:
            watch.begin(model, recorder.mark)
            stack.callback(watch.end)
        stack.enter_context(recorder)
        stack.enter_context(recorder.follow_states())
        recorder.calibrate()
        if split_parameters(model):
            stack.enter_context(while_inferring(recorder.pause))
        stack.enter_context(kernels.rewriting())
        try:
            made = _run(recorder, step, model, given, optimizer, micro_batches, steps, treated, watch)
        except fake_errors() as error:
            raise unreadable(recorder.module, str(error)) from error
        trace = recorder.result()
        del made  # states live until the end of the trace
        return trace


def _run(
    recorder: Recorder,
    step: Callable[..., Tensor],
    model: nn.Module,
    inputs: tuple[Any, ...],
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    micro_batches: int,
    steps: int,
    treated: Treated | None,
    watch: UnitWatch | None,
) -> torch.optim.Optimizer | None:
    """Run the steps and return the optimizer."""
    optimizer = make(model.parameters()) if make is not None else None
    if optimizer is not None:
        recorder.kernels.prepare(optimizer)
    for _ in range(steps):
        for _ in range(micro_batches):
            _pass(recorder, step, model, inputs, treated, watch)
        recorder.phase = Phase.UPDATE
        if optimizer is not None:
            optimizer.step()
            recorder.assign(
                find([list(state.values()) for state in optimizer.state.values()], Tensor), Category.OPTIMIZER
            )
        model.zero_grad(set_to_none=True)
    return optimizer


def _pass(
    recorder: Recorder,
    step: Callable[..., Tensor],
    model: nn.Module,
    inputs: tuple[Any, ...],
    treated: Treated | None,
    watch: UnitWatch | None,
) -> None:
    """Run one forward and its backward."""
    recorder.phase = Phase.FORWARD

    def pack(tensor: Tensor) -> Any:
        unit = watch.unit_of(tensor) if watch is not None else None
        return unit, recorder.packed(tensor)

    def unpack(packed: tuple[int | None, Tensor]) -> Tensor:
        unit, tensor = packed
        if watch is not None:
            watch.unpack(unit)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    if treated is not None:
        treated.begin(recorder, watch)
        hooks = treated.context()
    with torch.enable_grad(), hooks:
        loss = step(model, *inputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"step must return the loss, a tensor with one element and a graph; got {what}.")
    recorder.end_forward(loss)
    recorder.phase = Phase.BACKWARD
    # `loss.backward()` would leave the mode that rewrites functions, and the mode would not see a recomputation.
    run_backward(loss)
    if watch is not None:
        watch.end_backward()
