"""Whether an update is made: with gradients that are not finite, everything stays as it was, on all ranks.

Owns the check of gradients before an update, and what keeps an update from being made. It must not know passes, nor
what follows an update. Read `core/optimizer.py` beside it.

Note: two guards
    In memory of the host the answer costs no wait. `HostGuard` has it before ranks vote, and the vote carries it.
    A device would have to finish all that is queued before the host could read the answer, and would then be idle until
    the host has launched the update. So `DeviceGuard` leaves the answer there: a flag for each parameter, of which the
    ranks keep the largest. torch's fused kernels take it (`found_inf`) and change nothing where it is 1. A copy of the
    flags is on its way to the host behind an event that is recorded before the update, so the host reads it while the
    update runs. Whatever reads states, changes gradients or ends the program reads it first (`Engine.learn`).
    Since the flags name parameters, the error needs no collective, and each rank may read them when it likes.
    An optimizer that takes no flag is updated only after the host has read it, which is a wait in each step.
Note: the first step of SGD
    torch's fused SGD makes its momentum buffers in the first step, with any content, for the kernel to fill. A kernel
    that is told to skip leaves that content. So buffers are made beforehand, of -0.0, to which momentum * buffer + g
    adds up to g, bit for bit, as in torch's first step. With dampening it does not, so there the host reads first. On
    any device torch's fused SGD also takes no parameters of which some have a buffer and some, used later, have none.
"""

import atexit
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch

from zeroshard.core.gradient import part_of
from zeroshard.core.loose import HOT_NUMEL
from zeroshard.core.precision import LossScale
from zeroshard.core.slot import slot_of
from zeroshard.optim.whole import whole_of
from zeroshard.torch_private import NoSubclasses, foreach_norm
from zeroshard.watch.process import end_with, is_child_of
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh
from zeroshard.wire.readback import Readback

__all__ = ["Answer", "DeviceGuard", "FUSED", "Guard", "HostGuard", "guard_of", "not_finite"]

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer

FUSED = frozenset([torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
"""The optimizers whose fused kernels take a flag."""
INFINITY = float("inf")
FILLED_NUMEL = 1 << 20
"""Elements of a state that are written at once."""


@final
class Answer:
    """What a device has found in the gradients of an update, on its way to the host.

    A program that ends without reading it ends with the error, if there is one. Meanwhile this keeps no memory of the
    model alive.

    Args:
        names: of the parameters that the last of the flags stand for.
        fails: tells whether what was found is an error.
        scale: the loss scale, for its text.
    """

    def __init__(
        self, flags: Readback, names: Sequence[str], mesh: Mesh, fails: Callable[[], bool], scale: LossScale | None
    ) -> None:
        self._flags, self._names, self._mesh, self._fails, self._scale = flags, names, mesh, fails, scale
        self._process = os.getpid()

    def read(self) -> str:
        """Wait for it; return the first parameter whose gradient is not finite, "" where all are."""
        atexit.unregister(self.read_at_exit)
        found = self._flags.read()
        named = zip(self._names, found[len(found) - len(self._names) :], strict=True)
        return next((name for name, is_bad in named if is_bad), "?") if any(found) else ""

    def read_at_exit(self) -> None:
        """Read it, in an interpreter that ends, and end with the error."""
        if not is_child_of(self._process) and (name := self.read()) and self._fails():
            end_with(not_finite(self._mesh, name, self._scale))


class Guard(ABC):
    """Keeps updates from being made with gradients that are not finite."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.waits = 0
        """How often the host has waited for a device before an update."""
        self.skips = False
        """Whether a step is left out, and not an error, where no loss scale accounts for what is not finite."""
        self.skipped = 0
        """Steps that were left out so."""

    def is_fatal(self, scale: LossScale | None) -> bool:
        """Tell whether gradients that are not finite are an error, and not a matter of the loss scale or skipped."""
        return not self.skips if scale is None else scale.value <= scale.FLOOR

    def note_skipped(self, name: str, step: int) -> None:
        """Say that a step was left out: on rank 0, in the log.

        Args:
            name: of the parameter whose gradient is not finite.
        """
        self.skipped += 1
        if self._comm.mesh.rank == 0:
            logging.getLogger(__name__).warning(
                f"step {step} was skipped on all ranks: the gradient of '{name}' is not finite ({self.skipped} skipped "
                "so far; zs.Settings(non_finite='raise') makes that an error)."
            )
        self.updates_on_host = False
        """Whether some states lie on the host, beside a device."""

    @abstractmethod
    def look(self, sums: Iterable[Tensor]) -> list[Any]:
        """Return what the loss scale keeps of sums of gradients: which of them are not finite."""

    @abstractmethod
    def is_fine(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> bool:
        """Return this rank's vote: False where the host knows of a gradient that is not finite.

        Args:
            scale: the engine's loss scale; with it what was noted decides, since user code may change gradients.
        """

    def ask(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> str:
        """Find out, once all ranks have voted for an update, whether a gradient on a device forbids it.

        Returns: the parameter, the same on all ranks; "" where there is none, or a flag is to guard the update.

        Collective: on a device an all-reduce (maximum) of 4 bytes a parameter; every rank must call.
        """
        return ""

    def blame(self, masters: Sequence[Tensor]) -> str:
        """Return a parameter whose gradient the vote was about, the same on all ranks. Collective: as `Comm.texts`."""
        mine = next((slot_of(m).name for m in masters if m.grad is not None and not m.grad.isfinite().all()), "")
        texts = self._comm.texts(mine, "the parameter whose gradient is not finite")
        return min((text for text in texts if text), default="?")

    def arm(self, optimizer: Optimizer, masters: Sequence[Tensor]) -> list[Tensor]:
        """Have the update change nothing if a flag says so; return the slices whose states it will make then."""
        make_buffers(optimizer)
        return []

    def finish(self, optimizer: Optimizer) -> Answer | None:
        """End an update: return what the host has yet to read of it."""
        return None

    def is_awaited(self, optimizer: Optimizer) -> bool:
        """Tell whether the host waits for a device before an optimizer's updates."""
        return False


@final
class HostGuard(Guard):
    """In memory of the host: the vote before an update carries what each rank has found."""

    def look(self, sums: Iterable[Tensor]) -> list[bool]:
        """See `Guard`."""
        return [True] if not all(bool(one.isfinite().all()) for one in sums) else []

    def is_fine(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> bool:
        """See `Guard`."""
        return not scale.noted if scale is not None else _is_scaled(optimizer) or _is_finite(masters)


@final
class DeviceGuard(Guard):
    """On a device: a flag there guards the update, and the host reads a copy of it later."""

    def __init__(self, comm: Comm, *, updates_on_host: bool) -> None:
        super().__init__(comm)
        self.updates_on_host = updates_on_host
        self._read_back = Readback
        self._flag: Tensor | None = None
        self._answer: Answer | None = None

    def look(self, sums: Iterable[Tensor]) -> list[Tensor]:
        """See `Guard`."""
        return [_spoiled(parts, self._comm.mesh.device)] if (parts := list(sums)) else []

    def is_fine(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> bool:
        """Know nothing."""
        return True

    def ask(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> str:
        """See `Guard`."""
        self._flag = self._answer = None
        if _is_scaled(optimizer):
            return ""  # a GradScaler has voted itself
        mesh, names, flags = self._comm.mesh, list[str](), [_zero(torch.float32, self._comm.mesh.device).view(1)]
        if scale is not None and scale.noted:
            flags = [torch.cat(scale.noted).amax().view(1)]
        if masters and (scale is None or self.is_fatal(scale)):
            names = [slot_of(master).name for master in masters]
            flags.append(_spoiled(list(map(_part, masters)), mesh.device))
        found = torch.cat(flags)
        self._comm.flag(found, "whether gradients are finite")
        # Begun before the update, which so does not delay it.
        answer = Answer(self._read_back(found), names, mesh, functools.partial(self.is_fatal, scale), scale)
        if self.is_awaited(optimizer):
            self.waits += 1
            return answer.read()
        self._flag, self._answer = found.amax(), answer
        return ""

    def arm(self, optimizer: Optimizer, masters: Sequence[Tensor]) -> list[Tensor]:
        """See `Guard`."""
        for name in ("grad_scale", "found_inf") if self.updates_on_host else ():
            # Of GradScaler: torch copies them to the host without a wait, and kernels there would read what is not yet.
            if isinstance(value := getattr(optimizer, name, None), Tensor):
                setattr(optimizer, name, value.cpu())
        state, is_full = optimizer.state, len(optimizer.state) >= len(masters)
        fresh = [] if is_full or self._flag is None else [m for m in masters if not state.get(m)]
        make_buffers(optimizer)
        if self._flag is not None:
            self._flag.__dict__["_zeroshard"] = True  # a GradScaler's has no such mark
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        return fresh

    def finish(self, optimizer: Optimizer) -> Answer | None:
        """See `Guard`."""
        if not _is_scaled(optimizer):
            vars(optimizer).pop("found_inf", None)
        if (answer := self._answer) is not None:
            atexit.register(answer.read_at_exit)
        self._flag = self._answer = None
        return answer

    def is_awaited(self, optimizer: Optimizer) -> bool:
        """See `Guard`; kernels on the host cannot read a device's flag."""
        if self.updates_on_host or type(optimizer) not in FUSED or whole_of(optimizer) is not None:
            return True
        return not all(
            group["fused"] and not (group.get("momentum") and group["dampening"]) for group in optimizer.param_groups
        )


def make_buffers(optimizer: Optimizer) -> None:
    """Make what torch's fused SGD makes in its first step; see "Note: the first step of SGD"."""
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        for master in group["params"] if group["fused"] and group["momentum"] and not group["dampening"] else ():
            slot = slot_of(master)
            if slot.has_grad and optimizer.state[master].get("momentum_buffer") is None:
                made = slot.bucket.room(slot.index, "momentum_buffer", master.dtype)
                optimizer.state[master]["momentum_buffer"] = made
                for part in made.split(FILLED_NUMEL):  # it may lie in a file
                    part.fill_(-0.0)


def guard_of(comm: Comm, *, updates_on_host: bool) -> Guard:
    """Return the guard for the memory that a transport's tensors lie in.

    Args:
        updates_on_host: whether some states lie on the host, beside a device.
    """
    return HostGuard(comm) if comm.is_on_host else DeviceGuard(comm, updates_on_host=updates_on_host)


def not_finite(mesh: Mesh, name: str, scale: LossScale | None) -> RuntimeError:
    """Return the error for a gradient that is not finite.

    Args:
        name: of the parameter.
    """
    if scale is None:
        return RuntimeError(
            f"{mesh} The gradient of '{name}' is not finite; nothing was changed on any rank. The training has "
            "diverged, or a rank's data hold what is no number: look at the losses of each rank, lower the learning "
            "rate, or clip."
        )
    return RuntimeError(
        f"{mesh} The gradient of '{name}' is not finite at the smallest loss scale, {scale.value:g}; earlier steps "
        f"were skipped at {scale.history}. The training has diverged, or a value is out of fp16's range: lower the "
        "learning rate, look at this parameter's inputs, or use precision='bf16'."
    )


def _is_scaled(optimizer: Optimizer) -> bool:
    """Tell whether torch.amp.GradScaler makes this step: it has given a fused optimizer a flag that is not ours."""
    return hasattr(optimizer, "found_inf") and not hasattr(optimizer.found_inf, "_zeroshard")


def _part(master: Tensor) -> Tensor:
    slot = slot_of(master)
    return part_of(slot) if slot.has_grad else _zero(slot.bucket.grads.dtype, slot.bucket.device)


def _spoiled(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return (number of parts,) fp32: 1 for each with an element that is not finite, else 0.

    The number of launches does not depend on that of parts, where they have one dtype.
    """
    with NoSubclasses():
        # The largest magnitude neither overflows, as a sum may, nor hides what is no number. Where there are many ranks
        # most slices have no element, and so no norm.
        filled = [part for part in parts if part.numel()]
        norms = iter(foreach_norm(filled, INFINITY) if filled else filled)
        largest = [next(norms) if part.numel() else _zero(part.dtype, part.device) for part in parts]
        if len({norm.device for norm in largest}) > 1:
            largest = [norm.to(device) for norm in largest]
        return (torch.stack(largest) < INFINITY).logical_not().float().to(device)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _is_finite(masters: Sequence[Tensor]) -> bool:
    """Tell whether the gradients of this rank's slices are; a sum costs one pass and is one number.

    It may overflow, and padding may hold anything: where it is not finite, the slices decide.
    """
    buckets = {id(bucket): bucket for bucket in (slot_of(master).bucket for master in masters)}
    probes = [probe for bucket in buckets.values() for probe in bucket.grads.probes()]
    # One kernel for many small ones.
    small = [probe.reshape(-1) for probe in probes if probe.numel() < HOT_NUMEL]
    sums = [probe.sum() for probe in probes if probe.numel() >= HOT_NUMEL]
    sums += [torch.cat(small).sum()] if small else []
    if not sums or torch.stack(sums).sum().isfinite():
        return True
    return all(bool(grad.isfinite().all()) for master in masters if (grad := master.grad) is not None)
