"""The treatments of activations in a trace: the links of `activations/`, on tensors without memory.

Owns what an engine gives them otherwise: the saved-tensor hooks, the units' forwards, a bus, and a tensor axis. It must
not know what a treatment does. Read `recorder.py` and `activations/chain.py` first.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from zeroshard.activations import treatment_of
from zeroshard.activations.compress import Compress
from zeroshard.activations.offloaded import Offload
from zeroshard.activations.partition import Axis
from zeroshard.activations.products import Products
from zeroshard.activations.recompute import recompute
from zeroshard.activations.saved import Saved
from zeroshard.describe.selection import recomputed_modules
from zeroshard.describe.units import UnitPlan
from zeroshard.plan.shape.tape import Exchange
from zeroshard.plan.trace.recorder import Recorder
from zeroshard.plan.trace.uses import UnitWatch
from zeroshard.store.bus import Bus, Lane, Transfer
from zeroshard.table.activations import Activations, Compressed, Offloaded
from zeroshard.table.schedule import ROOT
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import graph_task, is_called_by_checkpoint

__all__ = ["Treated", "Unwatched"]


@final
class Treated(Saved):
    """The saved-tensor hooks of a model on the meta device, whose activations are treated.

    Args:
        cell: the treatments.
        plans: the units of the model.
        twins: the modules that run, by the modules of the plans.
        tensor: number of ranks along the tensor axis.
        small_bytes: tensors below this size are not offloaded.
        zeros: fraction of zeros in a ReLU's results; None if unknown.
    """

    def __init__(
        self,
        cell: Activations,
        plans: Sequence[UnitPlan],
        twins: Mapping[nn.Module, nn.Module],
        tensor: int,
        small_bytes: int,
        zeros: float | None,
    ) -> None:
        self._recorder: Recorder | None = None
        self._watch: UnitWatch | None = None
        self._under_way: list[tuple[int, ...]] = []
        self._compressions: list[Compress] = []

        def compress(cell: Compressed, axis: Axis) -> Compress:
            self._compressions.append(Compress(cell.rest, zeros))
            return self._compressions[-1]

        kinds: Mapping[Any, Callable[[Any, Axis], Any]] = {
            Compressed: compress,
            Offloaded: lambda cell, axis: Offload(cell, _Bus(small_bytes, self._copy)),
        }
        axis, ledger, model = Axis(tensor, 0, "In a trace,", self._gather), Ledger(), plans[ROOT].module
        super().__init__(treatment_of(cell, plans, axis, ledger, kinds), self._unit)
        modules = [(twins[module], how) for module, how in recomputed_modules(cell, plans)]
        hooks = {twins[module]: (Unwatched(name), Unwatched()) for name, module in model.named_modules()}
        recompute(
            modules, hooks, Products(self, ledger), lambda *_: None, operator.setitem, {module for module, _ in modules}
        )
        entries: dict[nn.Module, tuple[int, ...]] = {model: ()}
        for number, plan in enumerate(plans):
            for module in plan.entries:
                entries[module] = (*entries.get(module, ()), number)
        for module, units in entries.items():
            twins[module].register_forward_pre_hook(partial(self._enter, units), prepend=True)
            twins[module].register_forward_hook(self._leave)
        self.passes = 1 + any(isinstance(one, Offloaded) and one.fraction < 1 for one in sum(cell.chains, ()))
        """Number of traces until one is that of a steady step: the first tells a fraction of offload its bytes."""

    @property
    def has_bounds(self) -> bool:
        """Whether a tensor counts as uncompressed although the result depends on values."""
        return any(one.has_bounds for one in self._compressions)

    def begin(self, recorder: Recorder, watch: UnitWatch | None) -> None:
        """Set what the next trace is recorded by, and what observes its units."""
        self._recorder, self._watch = recorder, watch

    def place_of(self, tensor: Tensor) -> None:
        """Return None: recomputations are not compared."""

    def pack(self, tensor: Tensor) -> Any:
        """Return a box; for a tensor of the model, or one saved by a loss or in a backward, its unit and the tensor."""
        assert self._recorder is not None
        self._recorder.packed(tensor)
        if self._recorder.is_of_model(tensor) or graph_task() != -1 or not self._under_way:
            return None if self._watch is None else self._watch.unit_of(tensor), tensor.detach()
        return self.box(tensor, is_called_by_checkpoint(), ())

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor."""
        if not isinstance(packed, tuple):
            restored: Tensor = packed.value if packed.treatment is None else packed.treatment.restore(packed)
            return restored
        unit, tensor = packed
        if self._watch is not None:
            self._watch.unpack(unit)
        return cast("Tensor", tensor)

    def _unit(self) -> int:
        return next((units[-1] for units in reversed(self._under_way) if units), ROOT)

    def _enter(self, units: tuple[int, ...], module: nn.Module, args: Any) -> None:
        if graph_task() == -1:
            self._under_way.append(units)

    def _leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if graph_task() == -1:
            units = self._under_way.pop()
            self.treat(units[-1] if units else self._unit(), outputs)

    def _copy(self, lane: str, number: int, nbytes: int = 0) -> None:
        assert self._recorder is not None
        self._recorder.copy(lane, number, nbytes)

    def _gather(self, whole: Tensor, number: int, kind: str, what: str) -> Callable[[], object]:
        assert self._recorder is not None
        self._recorder.exchange(Exchange("gather", whole.nbytes))
        return lambda: None


@final
class Unwatched:
    """Hooks of a module without an engine."""

    rank = "[plan]"

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


@final
class _Host:
    """Host memory: a number of bytes, which is not the traced device's."""

    def __init__(self, nbytes: int) -> None:
        self.numel = lambda: nbytes

    def __getitem__(self, part: slice) -> "_Host":
        return _Host(part.stop)


@final
@dataclass(slots=True, eq=False)
class _Numbered(Transfer):
    """A copy with its number in the trace."""

    number: int = field(default=-1, kw_only=True)


@final
class _Bus(Bus):
    """The bus of a trace: it tells of copies, and what returns is new memory of the device.

    Args:
        tell: takes the lane of a copy, its number and its bytes; lane "" where it is waited for.
    """

    def __init__(self, small_bytes: int, tell: Callable[..., None]) -> None:
        super().__init__(torch.device("cpu"), small_bytes)
        self._tell, self._count = tell, itertools.count()

    def _begin(self, lane: Lane, nbytes: int) -> Transfer:
        transfer = _Numbered(lane, nbytes, number=next(self._count))
        self._tell(lane, transfer.number, nbytes)
        return transfer

    def allocate(self, nbytes: int) -> Any:
        """Return host memory."""
        return _Host(nbytes)

    def out(self, source: Tensor, host: Any, after: Transfer | None) -> Transfer:
        """Return a transfer."""
        return self._begin("out", source.numel())

    def back(self, host: Any, after: Transfer) -> tuple[Tensor, Transfer]:
        """Return new memory."""
        return torch.empty(host.numel(), dtype=torch.uint8), self._begin("back", host.numel())

    def wait(self, transfer: Transfer, memory: Tensor) -> None:
        """Tell of the wait."""
        transfer.is_waited = True
        assert isinstance(transfer, _Numbered)
        self._tell("", transfer.number)

    def abandon(self, transfer: Transfer) -> None:
        """Do nothing."""

    def is_done(self, transfer: Transfer) -> bool:
        """Return True."""
        return True
