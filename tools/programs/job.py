"""What a program means: on ranks through zeroshard, and in one process, in fp64 or, of bf16 programs, in bf16.

Owns the few calls in which a written program differs from an ordinary training script, twice: `Sharded` runs this
rank's part of them, `Oracle` all ranks' in turn. What both note can be compared. Must not know how programs are drawn
or written.

Note: what the oracle computes
    Each rank's loss, multiplied by what zeroshard multiplies sums of gradients by, is propagated into the same plain
    parameters. That is the sum over ranks and micro-batches which data parallelism promises, and a parameter that no
    rank used keeps `grad is None`. Nothing is cut, reduced, gathered or released. What bf16 rounds, training
    amplifies, so that fp64 says little of it: `RoundedOracle` rounds wherever `zeroshard/core/dtypes.py` does.
    Ignored parameters are each process's own, and begin with other values on each: the oracle keeps a set for each
    process, and puts it in place when the data of one of its ranks is asked for.
"""

import contextlib
import copy
import functools
import gc
import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import zeroshard as zs
from tools.settled import settled
from zeroshard.core import engine
from zeroshard.core import guard as guards
from zeroshard.update import background
from zeroshard.wire.comm import Comm

from .blocks import IDS, Fickle
from .draw import FILES
from .write import compiled, path_of

__all__ = ["Job", "run_oracle", "run_sharded"]

Build = Callable[[], tuple[nn.Module, list[Optimizer]]]
WATCHDOG_S = 40.0
LEAST_CUT = 2
"""The stage from which on a rank may keep a part of each parameter: it keeps no more of gradients."""
ROWS = 3
BatchNorm = nn.modules.batchnorm._BatchNorm
"""Modules that stay in fp32 where others are rounded."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
OWN_RATE = 0.05
"""The learning rate of ignored parameters, in plain SGD."""
_MEETINGS = itertools.count()
"""Numbers of the files by which ranks meet; equal on all ranks, which take part in all meetings."""
UNHEARD = ("capturable", "differentiable", "fused")
DEFAULT_BUFFERS = getattr(zs.Settings, "buffers", "own")


class Job(ABC):
    """One run of one program.

    Args:
        key: chooses the data.
        world: the ranks that the program is written for.
        options: what `zs.shard` is given.

    `notes` holds what the program saw, by rank: (name, value).
    """

    ranks: Sequence[int]
    dtype: torch.dtype
    weight: float
    """What losses are multiplied by."""
    groups = 0
    """How often the program went on with other ranks; what these note is counted as that of more ranks."""
    rows = ROWS
    """Of an input, at least."""
    has_faults = False
    """Whether faulty steps are made; they change nothing, so plain torch leaves them out."""

    def __init__(self, key: int, world: int, options: Mapping[str, Any]) -> None:
        self.key, self.world, self.options = key, world, dict(options)
        self.notes: dict[int, list[tuple[str, Any]]] = {}
        self.own: list[nn.Parameter] = []
        self.model: nn.Module
        self.optimizers: list[Optimizer]

    @abstractmethod
    def start(self, build: Build) -> tuple[nn.Module, list[Optimizer]]:
        """Build the model and its optimizers, and prepare them for training on all ranks."""

    @abstractmethod
    def resume(self, build: Build, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        """Save, build everything again, load: as in a new process. `options` are of the new start."""

    @abstractmethod
    def detach(self, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        """Make the model and its optimizers plain again, and start over with the same objects."""

    def check_copies(self) -> None:  # noqa: B027 (one process has no copies)
        """Compare the copies of the state that ranks have."""

    @abstractmethod
    def no_sync(self, axis: Literal["all", "replicate"] = "all") -> contextlib.AbstractContextManager[Any]:
        """Leave gradients unreduced."""

    @abstractmethod
    def gathered(self, *, writeback: bool = False, states: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Make parameters whole."""

    @abstractmethod
    def grad_norm(self, p: float) -> Tensor:
        """Return the norm of all gradients."""

    @abstractmethod
    def each_own(self) -> Iterator[tuple[int, float]]:
        """Put the ignored parameters of each process that is run here in place; yield its number, and their rate."""

    def find_own(self) -> None:
        """Find the ignored parameters of the model."""
        modules = [self.model.get_submodule(name) for name in self.options.get("ignored", ())]
        self.own = [p for module in modules for p in module.parameters()]

    def shared(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those that are not ignored."""
        own = set(map(id, self.own))
        return [p for p in parameters if id(p) not in own]

    @torch.no_grad()
    def step_own(self) -> None:
        """Update the ignored parameters of each process with its own gradients."""
        for _, rate in self.each_own():
            for p in self.own:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate)

    def zero_own(self) -> None:
        """Clear the gradients of the ignored parameters of each process."""
        for _ in self.each_own():
            for p in self.own:
                p.grad = None

    def data(self, at: int, rank: int, part: int = 0) -> Tensor:
        """Return inputs: (rows, 3), or (rows,) of ids where the model's stem is an embedding."""
        draw = torch.Generator().manual_seed(((self.key * 131 + at) * 17 + rank) * 5 + part)
        rows = self.rows + (rank + at) % 2
        if isinstance(self.model.stem, nn.Embedding):
            return torch.randint(IDS, (rows,), generator=draw)
        return torch.randn(rows, 3, generator=draw).to(self.dtype)

    def loss(self, output: tuple[Tensor, Sequence[Tensor]], rank: int, *, is_bad: bool = False) -> Tensor:
        """Return the loss of one forward, and note it; a bad one is not finite."""
        values, sides = output
        loss = 2.0 * (values - 0.3).square().mean()
        for side in sides:
            loss = loss + side
        self.note(rank, "loss", loss)
        return loss * (float("inf") if is_bad else self.weight)

    def backward(self, losses: Sequence[Tensor], *, retain_graph: bool = False) -> None:
        """Run the backward of the losses of this process's ranks, if it has any."""
        if losses:
            torch.stack(list(losses)).sum().backward(retain_graph=retain_graph)

    def spoil(self, output: tuple[Tensor, Sequence[Tensor]], *, is_bad: bool) -> Tensor:
        """Return the loss of one forward of a faulty step, which nobody notes."""
        values, sides = output
        loss = sum(sides, values.square().mean())
        return loss * (float("nan") if is_bad else self.weight)

    def note(self, rank: int, name: str, value: Any) -> None:
        """Keep what a rank sees, by value."""
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self.notes.setdefault(rank + self.world * self.groups, []).append((name, kept))

    def note_all(self, name: str, value: Any) -> None:
        """Keep what all ranks see alike."""
        for rank in self.ranks:
            self.note(rank, name, value)

    def note_grads(self) -> None:
        """Keep which parameters have gradients."""
        shared = set(map(id, self.shared(self.model.parameters())))
        names = [n for n, p in self.model.named_parameters() if id(p) in shared and p.grad is None]
        self.note_all("without gradients", names)

    def finish(self) -> dict[str, Any]:
        """Return the notes and the state at the end, by value."""
        with self.gathered(states=True):
            names = {id(p): name for name, p in self.model.named_parameters()}
            states = {
                f"{names[id(p)]}/{key}": value.detach().clone()
                for optimizer in self.optimizers
                for p, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
            parameters = {names[id(p)]: p.detach().clone() for p in self.shared(self.model.parameters())}
        for process, _ in self.each_own():
            for p in self.own:
                self.note(process, f"ignored {names[id(p)]}", p)
        return {"notes": self.notes, "parameters": parameters, "states": states}


@torch.no_grad()
def _make_own(own: Sequence[nn.Parameter], process: int) -> None:
    """Give ignored parameters values that no other process has."""
    for p in own:
        p.mul_(1.0 + 0.125 * process)


def _buffers_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the buffers of a model are."""
    return [
        (module, name) for module in model.modules() for name, value in module._buffers.items() if value is not None
    ]


def _share(options: Mapping[str, Any], ranks: int) -> float:
    """Return what the sum of the losses of so many ranks is multiplied by."""
    reduction = options.get("reduction", "mean")
    return {"mean": 1.0 / ranks, "sum": 1.0}[reduction] if isinstance(reduction, str) else 1.0 / reduction


def _is_cast(given: Sequence[Any]) -> bool:
    """Tell whether a module's first input is of those that are cast."""
    return isinstance(given[0], Tensor) and given[0].is_floating_point()


def _rank_weight(options: Mapping[str, Any], world: int, processes: int) -> float:
    """Return what a process multiplies its losses by, where there are fewer of them than the program has ranks."""
    return processes / world if options.get("reduction", "mean") == "mean" else 1.0


class Oracle(Job):
    """One process, plain torch, fp64.

    Args:
        processes: among which `world` ranks are divided.
    """

    dtype = torch.float64

    def __init__(self, key: int, world: int, options: Mapping[str, Any], processes: int) -> None:
        super().__init__(key, world, options)
        self.ranks = range(world)
        self.weight = _share(options, world)
        # Ignored parameters are not divided by anything.
        self._own_rate = OWN_RATE * _rank_weight(options, world, processes) / self.weight
        self._at, self._held = 0, dict[int, list[tuple[Tensor, Tensor | None]]]()
        self._processes = processes
        self._buffers = Buffers(options.get("buffers", DEFAULT_BUFFERS), processes)
        self.loss_scale, self._has_overflowed = 1.0, False
        """With a loss scale, sums are looked at before user code may hide an infinity by clipping."""

    def start(self, build: Build) -> tuple[nn.Module, list[Optimizer]]:
        self.model, self.optimizers = build()
        self.model.to(self.dtype)
        self.find_own()
        for process in range(self._processes):
            values = [p.detach().clone() for p in self.own]
            self._held[process] = [(value, None) for value in values]
            _make_own(values, process)
        self._show(0)
        self._skip_at_steps()
        self._buffers.watch(self.model, self.model)
        self._follow_at_steps()
        return self.model, self.optimizers

    def _skip_at_steps(self) -> None:
        """Leave a step out where a gradient is not finite, if the program asks for this."""
        if self.options.get("non_finite") == "skip" or self.options.get("precision") == "fp16":
            for optimizer in self.optimizers:
                optimizer.step = functools.partial(self._step, optimizer.step)  # type: ignore[method-assign]

    def _follow_at_steps(self) -> None:
        """Let buffers follow before each update."""
        for optimizer in self.optimizers if self._buffers.by_name() else ():
            optimizer.step = functools.partial(self._step_after, optimizer.step)  # type: ignore[method-assign]

    def _step_after(self, step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self._buffers.step()
            return step()

        def computed() -> Any:
            returned = closure()
            self._buffers.step()
            return returned

        return step(computed)

    def _step(self, step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            returned = closure() if closure is not None else None
        is_finite = all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)
        has_overflowed, self._has_overflowed = self._has_overflowed, False
        if is_finite and not has_overflowed:
            step()
        elif self.options.get("loss_scale") == "dynamic":
            self.loss_scale /= 2.0
        return returned

    def each_own(self) -> Iterator[tuple[int, float]]:
        for process in range(self._processes if self.own else 0):
            self._show(process)
            yield process, self._own_rate

    def _show(self, process: int) -> None:
        """Put the ignored parameters of a process in place."""
        if self._at != process:
            self._held[self._at] = [(p.data, p.grad) for p in self.own]
        for p, (value, grad) in zip(self.own, self._held[process], strict=True):
            p.data, p.grad = value, grad
        self._at = process

    def data(self, at: int, rank: int, part: int = 0) -> Tensor:
        if self.own and self._at != (process := rank % self._processes):
            self._show(process)
        self._buffers.show(rank % self._processes)
        return super().data(at, rank, part)

    def resume(self, build: Build, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        self._processes = options.get("ranks", self._processes)
        self.groups += "ranks" in options
        self._buffers.restart(self._processes, is_new=True)
        return self.model, self.optimizers

    def backward(self, losses: Sequence[Tensor], *, retain_graph: bool = False) -> None:
        # Each process has a backward of its own, which adds up what its ranks share in the dtype of the module.
        for process in range(self._processes):
            of_process = [loss for at, loss in enumerate(losses) if at % self.world % self._processes == process]
            super().backward(of_process, retain_graph=retain_graph)
        self._buffers.note_backward()

    def detach(self, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        self._buffers.restart(self._processes, is_new=False)
        return self.model, self.optimizers

    def no_sync(self, axis: Literal["all", "replicate"] = "all") -> contextlib.AbstractContextManager[Any]:
        return self._buffers.unequal()

    def finish(self) -> dict[str, Any]:
        self._buffers.meet()
        for process in range(self._processes):
            self._buffers.show(process)
            for name, value in self._buffers.by_name():
                self.note(process, f"buffer {name}", value)
        return super().finish()

    def gathered(self, *, writeback: bool = False, states: bool = False) -> contextlib.AbstractContextManager[Any]:
        self._buffers.meet()
        return self._buffers.replaced() if writeback else contextlib.nullcontext()

    def grad_norm(self, p: float) -> Tensor:
        return nn.utils.get_total_norm([q.grad for q in self.shared(self.model.parameters()) if q.grad is not None], p)


@final
class Buffers:
    """The buffers of the oracle's model as each process has them.

    Buffers are due after a forward in training mode with gradients and after a backward, both outside `no_sync()`. They
    follow before the next forward, at a step, and where values are read or saved; after forwards alone only if the last
    step changed any. A norm in evaluation mode, whose statistics a backward may read, has the new ones at the step.

    Args:
        rule: what processes do with them: "rank 0" (all take those of the first), "mean" (all take the mean, and of
            integers the first's), "own" (nothing).
        processes: how many there are.
    """

    def __init__(self, rule: str, processes: int) -> None:
        self._rule, self._processes = rule, processes
        self._places: list[tuple[nn.Module, str]] = []
        self._names: list[str] = []
        self._sets: list[list[Tensor]] = []
        self._starts: list[Tensor] = []
        self._equal: list[list[Tensor]] = []
        """Values of each process when they last followed."""
        self._left: dict[int, Tensor] = {}
        """Values, by place, that follow at the next step."""
        self._modes: nn.Module
        self._at, self._forwards = 0, 0
        self._is_unequal = self._is_due = self._is_told = self._is_calm = False

    def watch(self, model: nn.Module, modes: nn.Module) -> None:
        """Take over a model that is about to train; the program changes the mode of `modes`."""
        self._places, self._modes = _buffers_of(model), modes
        names = {id(module): name for name, module in model.named_modules()}
        self._names = [f"{names[id(module)]}.{name}" for module, name in self._places]
        self._starts = [value.clone() for value in self._values()]
        self._begin_equal(self._starts)
        if self._places:
            model.register_forward_pre_hook(lambda *_: self._begin_forward())

    def show(self, process: int) -> None:
        """Put the buffers of a process in place."""
        if self._places and process != self._at:
            self._sets[self._at] = self._values()
            self._put(process)

    def by_name(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that are in place."""
        return list(zip(self._names, self._values(), strict=True))

    def restart(self, processes: int, *, is_new: bool) -> None:
        """Begin with the first process's on each; a new model has its own of those that no checkpoint holds."""
        self.meet()
        self.show(0)
        values = self._values()
        if is_new:
            kept = [name not in module._non_persistent_buffers_set for module, name in self._places]
            values = [now if is_kept else old for now, is_kept, old in zip(values, kept, self._starts, strict=True)]
        self._processes, self._forwards = processes, 0
        self._is_due = self._is_told = self._is_calm = False
        self._begin_equal(values)

    @contextlib.contextmanager
    def unequal(self) -> Iterator[None]:
        """Leave what forwards change as each process has it."""
        self._is_unequal = True
        yield
        self._is_unequal = False

    def note_backward(self) -> None:
        """Note that ranks have met at the end of a backward."""
        if not self._is_unequal:
            self._is_due = self._is_told = True

    def step(self) -> None:
        """Let buffers follow at a step."""
        if self._is_due and (self._is_told or not self._is_calm):
            self._is_calm = not self._follow()
        self._write_left()

    def meet(self) -> None:
        """Let buffers follow where ranks meet."""
        self.step()

    def replace(self) -> None:
        """Give all processes the first one's, by any rule."""
        self.show(0)
        self._begin_equal(self._values())

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Give all processes the first one's at the end."""
        yield
        self.replace()

    def _begin_forward(self) -> None:
        if self._forwards % self._processes == 0:
            if self._is_due and (self._is_told or not self._is_calm):
                self._follow()
            if torch.is_grad_enabled() and self._modes.training and not self._is_unequal:
                self._is_due, self._is_told = True, False
        self._forwards += 1

    @torch.inference_mode(mode=False)
    def _follow(self) -> bool:
        """Have all processes take the same values; tell whether any had changed."""
        self._is_due = self._is_told = False
        if self._rule == "own" or not self._places or self._processes == 1:
            return False
        self._sets[self._at] = self._values()
        pairs = zip(self._sets, self._equal, strict=True)
        is_changed = any(not torch.equal(*both) for one in pairs for both in zip(*one, strict=True))
        is_changed |= any(module.training for module, name in self._places if name == "running_mean")
        for at, values in enumerate(zip(*self._sets, strict=True)):
            module = self._places[at][0]
            is_averaged = self._rule == "mean" and values[0].is_floating_point()
            value = torch.stack(values).mean(0) if is_averaged else values[0]
            self._left.pop(at, None)
            if not module.training and "running_mean" in module._buffers:
                self._left[at] = value
                continue
            for of_process, equal in zip(self._sets, self._equal, strict=True):
                of_process[at], equal[at] = value.clone(), value.clone()
        self._put(self._at)
        return is_changed

    @torch.inference_mode(mode=False)
    def _write_left(self) -> None:
        """Write what waited for the step, unless the norm has trained since."""
        left = {at: value for at, value in self._left.items() if not self._places[at][0].training}
        self._left.clear()
        if not left:
            return
        self._sets[self._at] = self._values()
        for at, value in left.items():
            for values in (*self._sets, *self._equal):
                values[at] = value.clone()
        self._put(self._at)

    @torch.inference_mode(mode=False)
    def _begin_equal(self, values: Sequence[Tensor]) -> None:
        self._sets = [[value.clone() for value in values] for _ in range(self._processes)]
        self._equal = [[value.clone() for value in values] for _ in range(self._processes)]
        self._put(0)

    def _values(self) -> list[Tensor]:
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]

    def _put(self, process: int) -> None:
        self._at = process
        for (module, name), value in zip(self._places, self._sets[process] if self._sets else [], strict=True):
            module._buffers[name] = value


@final
class PlainOracle(Oracle):
    """One process, plain torch, fp32: how far its rounding carries a program from fp64."""

    dtype = torch.float32


@final
class RoundedOracle(Oracle):
    """One process, plain torch: masters, states and gradients in fp32, modules in bf16.

    The program sees the masters. Their forward is that of a twin in bf16, whose gradients are added to the masters'.

    Args:
        processes: among which `world` ranks are divided; sums are divided by their number in fp32.
        nudge: if not 0, gradients are off by up to one unit in the last place of fp32, others for each number.
    """

    dtype = torch.float32

    def __init__(self, key: int, world: int, options: Mapping[str, Any], processes: int, nudge: int = 0) -> None:
        super().__init__(key, world, options, processes)
        self._nudges = torch.Generator().manual_seed(nudge) if nudge else None
        self._low = torch.float16 if options["precision"] == "fp16" else torch.bfloat16
        self._begin_scale()
        self._divide()
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._is_reduced = True

    @contextlib.contextmanager
    def no_sync(self, axis: Literal["all", "replicate"] = "all") -> Iterator[None]:
        with super().no_sync(axis):
            self._is_reduced = axis == "replicate"
            try:
                yield
            finally:
                self._is_reduced = True

    def start(self, build: Build) -> tuple[nn.Module, list[Optimizer]]:
        self.model, self.optimizers = build()
        self.model.to(self.dtype)
        twin = copy.deepcopy(self.model)
        for p in twin.parameters():
            p.data = p.data.to(self._low)
        wide = self.options.get("fp32", ())
        norms = [name for name, module in twin.named_modules() if isinstance(module, BatchNorm)]
        for name in [*wide, *norms]:
            module = twin.get_submodule(name).float()
            module.register_forward_pre_hook(
                lambda _, given: (given[0].float(), *given[1:]) if _is_cast(given) else None
            )
            outside = torch.float32 if any(name.startswith(f"{one}.") for one in wide) else self._low
            module.register_forward_hook(lambda _, given, output, outside=outside: output.to(outside))
        output = DTYPES[self.options.get("output", "float32")]
        self._twins = list(zip(self.model.parameters(), twin.parameters(), strict=True))
        for master, rounded in self._twins:
            rounded.requires_grad_(True).register_post_accumulate_grad_hook(self._adder(master))

        def forward(x: Tensor, *given: Any, **named: Any) -> tuple[Tensor, list[Tensor]]:
            self._round()
            for mine, its in zip(self.model.modules(), twin.modules(), strict=True):
                its.training = mine.training
                if isinstance(mine, Fickle):
                    vars(its)["which"] = mine.which
            values, sides = twin(x.to(self._low) if x.is_floating_point() else x, *given, **named)
            return values.to(output), [side.to(output) for side in sides]

        self.model.forward = forward
        self._skip_at_steps()
        self._buffers.watch(twin, self.model)
        self._follow_at_steps()
        return self.model, self.optimizers

    def _begin_scale(self) -> None:
        start = self.options.get("loss_scale", 1.0)
        self.loss_scale = 65536.0 if start == "dynamic" else float(start)

    def detach(self, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        self._begin_scale()  # no checkpoint takes it along
        return super().detach(**options)

    def _divide(self) -> None:
        self.weight = _rank_weight(self.options, self.world, self._processes)
        self._scale = _share(self.options, self._processes)

    def resume(self, build: Build, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        restarted = super().resume(build, **options)
        self._divide()
        return restarted

    def loss(self, output: tuple[Tensor, Sequence[Tensor]], rank: int, *, is_bad: bool = False) -> Tensor:
        return super().loss(output, rank, is_bad=is_bad) * self.loss_scale

    def _adder(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def add(rounded: Tensor) -> None:
            assert rounded.grad is not None
            grad = rounded.grad.float() * (self._scale / self.loss_scale)
            if self._nudges is not None:
                grad *= 1.0 + 2.0**-23 * torch.randint(-1, 2, grad.shape, generator=self._nudges)
            master.grad = grad if master.grad is None else master.grad + grad
            if self._is_reduced and "loss_scale" in self.options:
                # What passes left unreduced before is looked at with this pass, unless it was set to zero.
                grads = (one.grad for one, _ in self._twins if one.grad is not None)
                self._has_overflowed |= not all(bool(one.isfinite().all()) for one in grads)
            rounded.grad = None

        return add

    @torch.no_grad()
    def _round(self) -> None:
        """Make the twin's parameters the masters, rounded, where these changed."""
        for master, rounded in self._twins:
            rounded.requires_grad_(master.requires_grad)
            # Fused optimizers leave the version of what they update as it was.
            if not torch.equal(rounded, value := master.to(rounded.dtype)):
                rounded.copy_(value)

    @contextlib.contextmanager
    def gathered(self, *, writeback: bool = False, states: bool = False) -> Iterator[None]:
        """Show rounded parameters; a master whose rounded value the program changes becomes that value."""
        self._buffers.meet()
        masters = [master.detach().clone() for master, _ in self._twins]
        with torch.no_grad():
            for master, rounded in self._twins:
                master.copy_(master.to(rounded.dtype))
        yield
        with torch.no_grad():
            for (master, rounded), before in zip(self._twins, masters, strict=True):
                now = master.to(rounded.dtype)
                is_changed = now != before.to(rounded.dtype)
                master.copy_(torch.where(is_changed, now.float(), before) if writeback else before)
        if writeback:
            self._buffers.replace()


@final
class Sharded(Job):
    """This rank's part, through `zs.shard`.

    Args:
        folder: for checkpoints, the same on every rank.
        resumes: whether `resume` does what it says; without, the program goes on undisturbed.
        on_device: whether gradients are checked as on a device, whose flags the host reads later.
    """

    has_faults = True

    def __init__(
        self,
        key: int,
        world: int,
        options: Mapping[str, Any],
        dtype: torch.dtype,
        folder: Path | None = None,
        *,
        resumes: bool = True,
        tensor: int = 1,
        on_device: bool = False,
    ) -> None:
        super().__init__(key, world, options)
        self.dtype, self._resumes, self._tensor, self._on_device = dtype, resumes, tensor, on_device
        self._folder = folder
        self._zero: zs.Zero | None = None
        self.paths: list[Path] = []
        """Checkpoints that were written."""
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._divide(self._world)

    def _divide(self, ranks: int) -> None:
        """Take a part of the program; where there are fewer processes than it has ranks, several ranks' in turn."""
        processes = ranks // self._tensor
        self.ranks = range(self._rank // self._tensor, self.world, processes) if self._rank < ranks else range(0)
        self.weight = _rank_weight(self.options, self.world, processes)

    def start(self, build: Build) -> tuple[nn.Module, list[Optimizer]]:
        self.model, self.optimizers = build()
        self.model.to(self.dtype)
        self.find_own()
        _make_own(self.own, self._rank)
        self._shard()
        return self.model, self.optimizers

    def _shard(self) -> None:
        if not self.ranks:
            return  # this process takes no part for now
        options = dict(self.options)
        for name in ("units", "ignored"):
            if (chosen := options.get(name)) is not None:
                options[name] = [self.model.get_submodule(path) for path in chosen]
        own, output = options.pop("fp32", ()), options.pop("output", None)
        if options.get("precision") == "bf16":
            whole = zs.Precision(param=torch.bfloat16, output=DTYPES[output] if output else None)
            options["precision"] = {"": whole, **dict.fromkeys(own, "fp32")}
        if options.get("precision") == "fp16":
            scale = options.pop("loss_scale")
            options["precision"] = zs.Precision(param=torch.float16, loss_scale=scale)
        if FILES in (options.get("offload") or ""):
            assert self._folder is not None
            options["offload"] = options["offload"].replace(FILES, str(self._folder))
        if self._tensor > 1:
            shape = (self._world // self._tensor, self._tensor)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
        if options["stage"] < LEAST_CUT:
            # A program may resume at another stage.
            options.pop("parameters", None)
        # Also on a CPU, where nothing computes meanwhile: what may go wrong is the same.
        with patch.object(background, "is_worthwhile", lambda device: True), _flags_on(self._on_device):
            self._zero = zs.shard(self.model, self.optimizers, **settled({"watchdog_s": WATCHDOG_S, **options}))

    def resume(self, build: Build, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        if not self._resumes:
            return self.model, self.optimizers
        if self._folder is None:
            raise ValueError("A program that resumes needs a folder that all ranks see.")
        path = self._folder / f"step-{len(self.paths)}"
        self.paths.append(path)
        if self._zero is not None:
            self._zero.save(path)
        if (ranks := options.pop("ranks", None)) is not None:
            self.groups += 1
            self.regroup(ranks)
        self.options |= options
        own = self.own
        self.start(build)
        if self._zero is not None:
            self._zero.load(path)
        with torch.no_grad():
            for p, before in zip(self.own, own, strict=True):
                p.copy_(before)
        return self.model, self.optimizers

    def regroup(self, ranks: int) -> None:
        """Go on with the first ranks alone; the others wait until they are asked for again."""
        assert self._folder is not None
        self._zero, self.model, self.optimizers = None, nn.Module(), []
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        # The file is the store of the process group until the next meeting, also in the programs that follow.
        meeting = self._folder / f"meeting-{next(_MEETINGS)}"
        if self._rank < ranks:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=self._rank, world_size=ranks)
            dist.barrier()
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._divide(ranks)

    def reunite(self) -> None:
        """Have all ranks in the process group."""
        if not dist.is_initialized() or dist.get_world_size() < self._world:
            self.regroup(self._world)

    def detach(self, **options: Any) -> tuple[nn.Module, list[Optimizer]]:
        if self._zero is not None:
            self._zero.detach(to="all")  # type: ignore[attr-defined]
            self._zero = None
        self.options |= options
        self._shard()
        return self.model, self.optimizers

    def each_own(self) -> Iterator[tuple[int, float]]:
        if self.own:
            yield self.ranks[0], OWN_RATE

    def finish(self) -> dict[str, Any]:
        if not self.ranks:
            return {"notes": self.notes}
        found = super().finish()
        for module, name in _buffers_of(self.model):
            place = next(at for at, one in self.model.named_modules() if one is module)
            self.note(self.ranks[0], f"buffer {place}.{name}", module._buffers[name])
        return found

    def check_copies(self) -> None:
        if self._zero is not None:
            self._zero.check_copies()

    def no_sync(self, axis: Literal["all", "replicate"] = "all") -> contextlib.AbstractContextManager[Any]:
        return self._zero.no_sync(axis) if self._zero is not None else contextlib.nullcontext()

    def gathered(self, *, writeback: bool = False, states: bool = False) -> contextlib.AbstractContextManager[Any]:
        if self._zero is None:
            return contextlib.nullcontext()
        return self._zero.gathered(writeback=writeback, states=states)

    def grad_norm(self, p: float) -> Tensor:
        return self._zero.grad_norm(p) if self._zero is not None else torch.zeros(())


@contextlib.contextmanager
def _flags_on(on_device: bool) -> Iterator[None]:
    """Have what is sharded inside check gradients by flags on a device, of which the host sees the last values.

    Kernels on the host that do not wait for a flag read what was there before: zero.
    """
    if not on_device:
        yield
        return

    def guard_of(comm: Comm, *, updates_on_host: bool) -> guards.Guard:
        guard = guards.DeviceGuard(comm, updates_on_host=updates_on_host)
        arm = guard.arm

        def arm_early(optimizer: Optimizer, masters: Sequence[Tensor]) -> list[Tensor]:
            fresh = arm(optimizer, masters)
            if updates_on_host and isinstance(flag := getattr(optimizer, "found_inf", None), Tensor):
                flag.zero_()
            return fresh

        guard.arm = arm_early  # type: ignore[method-assign]
        return guard

    with patch.object(engine, "guard_of", guard_of):
        yield


def run_sharded(spec: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Run a program through zeroshard on this rank and return what it noted."""
    _build, program = compiled(spec)
    job = Sharded(
        spec["seed"],
        spec["world"],
        _options_of(spec),
        DTYPES[spec["dtype"]],
        place,
        resumes=spec.get("resumes", True),
        tensor=spec.get("tensor", 1),
        on_device=spec.get("on_device", False),
    )
    job.rows = spec.get("rows", ROWS)
    try:
        with _default_dtype(spec):
            program(job)
            found = job.finish()
    finally:
        job.reunite()
        if dist.get_rank() == 0:
            for path in job.paths:
                shutil.rmtree(path, ignore_errors=True)
    return found


def _options_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a program, with the names of modules as the model has them."""
    options = dict(spec["options"])
    for name in ("units", "ignored", "fp32"):
        if options.get(name) is not None:
            options[name] = [path_of(spec, part) for part in options[name]]
    return options


def run_oracle(spec: Mapping[str, Any], nudge: int = 0, lossy: Sequence[str] = ()) -> dict[str, Any]:
    """Run a program in this process: in fp64, or as its bf16 rounds, which `nudge` has a part in.

    Args:
        lossy: treatments that round activations. Backwards then read saved tensors that are off by up to the bounds of
            these encodings, others for each nudge.
    """
    given = spec["seed"], spec["world"], _options_of(spec), spec["processes"] // spec.get("tensor", 1)
    is_rounded = spec["options"].get("precision") in ("bf16", "fp16")
    draw = torch.Generator().manual_seed(nudge)

    def pack(tensor: Tensor) -> Tensor:
        value = tensor.detach()
        if value.numel() < ROUNDED_NUMEL or not value.is_floating_point():
            return value  # all parameters are smaller, too
        for name in lossy:
            value = value + BOUNDS[name](value) * (
                2.0 * torch.rand(value.shape, dtype=value.dtype, generator=draw) - 1.0
            )
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one) if lossy else contextlib.nullcontext():
        return _run(spec, RoundedOracle(*given, nudge) if is_rounded else Oracle(*given))


def _bound_of_blocks(tensor: Tensor) -> Tensor:
    """Return what int8 may be off by: a share of the greatest value among 128 elements."""
    flat = tensor.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % 128)).view(-1, 128)
    greatest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).flatten()
    return greatest[: len(flat)].view_as(tensor) / 252.0


ROUNDED_NUMEL = 1024
BOUNDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "compress-bf16": lambda tensor: tensor.abs() / 256.0,
    "compress-fp8": lambda tensor: tensor.abs() / 16.0,
    "compress-int8": _bound_of_blocks,
}
"""What lossy encodings may change, by element; see `zeroshard/activations/compress_rounded.py`."""


def run_plain(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run a program in this process in fp32."""
    return _run(spec, PlainOracle(spec["seed"], spec["world"], _options_of(spec), spec["processes"]))


def _run(spec: Mapping[str, Any], job: Oracle) -> dict[str, Any]:
    _build, program = compiled(spec | {"optimizers": [_as_plain(one) for one in spec["optimizers"]]})
    job.rows = spec.get("rows", ROWS)
    with _default_dtype(spec):
        program(job)
        return job.finish()


def _as_plain(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer without options that change no number: plain torch refuses them here, or fails.

    torch's fused SGD fails on a parameter whose first gradient comes later than the others'.
    """
    options = {name: value for name, value in one["options"].items() if name not in UNHEARD}
    return {**one, "options": options}


@contextlib.contextmanager
def _default_dtype(spec: Mapping[str, Any]) -> Iterator[None]:
    """Have the default dtype of a program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[spec.get("default", "float32")])
    try:
        yield
    finally:
        torch.set_default_dtype(before)
