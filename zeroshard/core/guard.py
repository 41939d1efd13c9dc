"""The guard of updates: with gradients that are not finite, no rank changes anything.

Owns the check of gradients before an update, and the prevention of an update. It must not know passes, or what follows
an update. See also `update/optimizer.py`.

Note: two guards
    In host memory, the check needs no wait: `HostGuard` has the result before ranks vote, and includes it in the vote.
    A device would have to finish all queued work before the host could read the result, and would then be idle until
    the host launches the update. So `DeviceGuard` keeps the result on the device: a flag for each parameter, reduced
    with a maximum over ranks. torch's fused kernels take the flag (`found_inf`), and change nothing if it is 1. An
    asynchronous copy of the flags, with an event before the update, lets the host read them while the update runs. Code
    that reads states, changes gradients, begins a backward or ends the program reads the flags first (`Engine.learn`);
    a forward and `zero_grad()` do so only with a loss scale, which may change: the host would wait for the end of the
    last backward there, and the device then for the host. The flags identify parameters, so the error needs no
    collective, and each rank may read them at any time. For an optimizer without a
    flag, the host reads the flags before the update, which is a wait in each step.
Note: the first step of SGD
    torch's fused SGD allocates its momentum buffers in the first step with undefined content, which a skipped kernel
    does not overwrite. So buffers are created before, filled with -0.0: momentum * buffer + g is then g, bit for bit,
    as in torch's first step. With dampening this does not hold, so the host reads the flags first. On any device,
    torch's fused SGD also does not support a mix of parameters with and without a buffer.
"""

import atexit
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from zeroshard.activations.saved import BECAUSE
from zeroshard.core.dtypes import LossScale
from zeroshard.core.gradient import part_of
from zeroshard.core.slot import slot_of
from zeroshard.optim.whole import whole_of
from zeroshard.table.settings import HOT_NUMEL
from zeroshard.torch_private import NoSubclasses, foreach_norm
from zeroshard.watch.process import end_with, is_child_of
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh
from zeroshard.wire.readback import Readback

__all__ = ["Answer", "DeviceGuard", "FUSED", "Guard", "HostGuard", "guard_of", "not_finite"]

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer

FUSED = frozenset([torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
"""Optimizers whose fused kernels support a flag."""
INFINITY = float("inf")
FILLED_NUMEL = 1 << 20
"""Elements of a state that are written at a time."""


@final
class Answer:
    """The result of the check of gradients on a device, being copied to the host.

    A program that ends without reading it ends with the error, if any. The object keeps no memory of the model alive.

    Args:
        names: names of the parameters of the last flags.
        fails: returns whether the result is an error.
        error: returns that error, for the name of a parameter.
        doubts: flags of this rank's recomputations, by name; the first of all flags is their maximum over ranks.
    """

    def __init__(
        self,
        flags: Readback,
        names: Sequence[str],
        mesh: Mesh,
        fails: Callable[[], bool],
        error: Callable[[str], RuntimeError],
        doubts: Mapping[str, Tensor],
    ) -> None:
        self._flags, self._names, self._mesh, self._fails, self._error = flags, names, mesh, fails, error
        self._doubts = doubts
        self._process = os.getpid()

    def read(self) -> str:
        """Wait for the result; return the first parameter whose gradient is not finite, or "".

        Raises:
            RuntimeError: a recomputation gave other values than its forward, on any rank; nothing was changed.
        """
        atexit.unregister(self.read_at_exit)
        found = self._flags.read()
        if found[0]:
            raise _not_repeated(self._mesh, self._doubts)
        named = zip(self._names, found[len(found) - len(self._names) :], strict=True)
        return next((name for name, is_bad in named if is_bad), "?") if any(found) else ""

    def read_at_exit(self) -> None:
        """Read the result at interpreter exit, and end the process with the error, if any."""
        if is_child_of(self._process):
            return
        try:
            if (name := self.read()) and self._fails():
                end_with(self._error(name))
        except RuntimeError as error:
            end_with(error)


class Guard(ABC):
    """Prevents updates with gradients that are not finite."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.waits = 0
        """Number of times that the host has waited for a device before an update."""
        self.skips = False
        """Whether, without a loss scale, gradients that are not finite skip the step instead of raising an error."""
        self.skipped = 0
        """Number of skipped steps."""
        self.updates_on_host = False
        """Whether some states are in host memory, with a CUDA device."""
        self.origin: Callable[[], str] = lambda: ""
        """Returns a sentence about where the last step had its first value that is not finite, "" if it is not known;
        equal on all ranks."""

    def error(self, name: str, scale: LossScale | None) -> RuntimeError:
        """Return the error for a gradient that is not finite; see `not_finite`."""
        return not_finite(self._comm.mesh, name, scale, self.origin())

    def is_fatal(self, scale: LossScale | None) -> bool:
        """Return whether gradients that are not finite are an error: without a loss scale and without skipping."""
        return not self.skips if scale is None else scale.value <= scale.FLOOR

    def note_skipped(self, name: str, step: int) -> None:
        """Log a skipped step on rank 0.

        Args:
            name: name of the parameter whose gradient is not finite.
        """
        self.skipped += 1
        if self._comm.across.mesh.rank == 0:
            logging.getLogger(__name__).warning(
                f"step {step} was skipped on all ranks: the gradient of '{name}' is not finite ({self.skipped} skipped "
                "so far). Set zs.Settings(non_finite='raise') to raise an error instead."
            )

    @abstractmethod
    def look(self, sums: Iterable[Tensor]) -> list[Any]:
        """Return for each sum of gradients whether it is not finite, for the loss scale."""

    def suspect(self, name: str, flag: Tensor | bool) -> None:
        """Take a flag that is True if the values of a recomputation are not those of its forward.

        Args:
            name: the beginning of the error.

        Raises:
            RuntimeError: the flag is True, and can be read without a wait.
        """
        if flag:
            raise _not_repeated(self._comm.mesh, {name: flag})

    @abstractmethod
    def is_fine(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> bool:
        """Return this rank's vote: False if the host knows of a gradient that is not finite.

        Args:
            scale: the engine's loss scale; with it, the results of `look` decide, because user code may change
                gradients, and the gradients that are suspect (`Gradients.is_suspect`).
        """

    def ask(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> str:
        """Check, after all ranks have voted for an update, whether a gradient on a device forbids the update.

        Returns: the name of the parameter, equal on all ranks; "" if there is none, or if flags guard the update.

        Collective: on a device, an all-reduce (maximum) of 4 bytes per parameter; every rank must call.
        """
        return ""

    def blame(self, masters: Sequence[Tensor]) -> str:
        """Return the parameter that caused a negative vote, equal on all ranks. Collective: as `Comm.texts`."""
        mine = next((slot_of(m).name for m in masters if not _is_part_finite(m)), "")
        texts = self._comm.across.texts(mine, "the parameter whose gradient is not finite")
        return min((text for text in texts if text), default="?")

    def arm(self, optimizer: Optimizer, masters: Sequence[Tensor]) -> list[Tensor]:
        """Make the update change nothing if a flag is set; return the slices whose states are created here."""
        make_buffers(optimizer)
        return []

    def finish(self, optimizer: Optimizer) -> Answer | None:
        """End an update: return the result that the host has not read yet."""
        return None

    def is_awaited(self, optimizer: Optimizer) -> bool:
        """Return whether the host waits for a device before an optimizer's updates."""
        return False


@final
class HostGuard(Guard):
    """For host memory: the vote before an update includes the result of each rank."""

    def look(self, sums: Iterable[Tensor]) -> list[bool]:
        """See `Guard`."""
        return [True] if not all(bool(one.isfinite().all()) for one in sums) else []

    def is_fine(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> bool:
        """See `Guard`."""
        if scale is not None:
            return not scale.noted and _is_finite(_suspects(masters))
        return _is_scaled(optimizer) or _is_finite(masters)


@final
class DeviceGuard(Guard):
    """For a device: a flag on the device guards the update, and the host reads a copy later."""

    def __init__(self, comm: Comm, *, updates_on_host: bool) -> None:
        super().__init__(comm)
        self.updates_on_host = updates_on_host
        self._read_back = Readback
        self._flag: Tensor | None = None
        self._doubts: dict[str, Tensor] = {}
        self._answer: Answer | None = None

    def look(self, sums: Iterable[Tensor]) -> list[Tensor]:
        """See `Guard`."""
        return [_spoiled(parts, self._comm.mesh.device)] if (parts := list(sums)) else []

    def is_fine(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> bool:
        """Know nothing."""
        return True

    def suspect(self, name: str, flag: Tensor | bool) -> None:
        """See `Guard`; the flag is kept for the next update."""
        if isinstance(flag, bool):
            if not flag:
                return
            flag = torch.ones((), device=self._comm.mesh.device, dtype=torch.bool)
        known = self._doubts.get(name)
        self._doubts[name] = flag if known is None else known | flag

    def ask(self, optimizer: Optimizer, masters: Sequence[Tensor], scale: LossScale | None) -> str:
        """See `Guard`."""
        self._flag = self._answer = None
        doubts, self._doubts = self._doubts, {}
        if _is_scaled(optimizer):
            # A GradScaler has voted itself, and has waited for the device.
            for name, flag in doubts.items():
                super().suspect(name, flag)
            return ""
        mesh, names = self._comm.mesh, list[str]()
        # As many flags on all ranks: recomputations and overflows are noted by each rank for itself.
        flags = [_any([flag.float().view(1) for flag in doubts.values()], mesh.device)]
        noted = [] if scale is None else scale.noted + self.look(map(_part, _suspects(masters)))
        flags.append(_any(noted, mesh.device))
        if masters and (scale is None or self.is_fatal(scale)):
            names = [slot_of(master).name for master in masters]
            flags.append(_spoiled(list(map(_part, masters)), mesh.device))
        found = torch.cat(flags)
        self._comm.flag(found, "whether gradients are finite")
        if (across := self._comm.across) is not self._comm:
            # Other places have other parameters: one number says whether the update of any place is prevented.
            elsewhere = found.amax().view(1)
            across.flag(elsewhere, "whether gradients are finite at all places")
            found = torch.cat([found[:1], elsewhere, found[1:]])
        # Started before the update, so that the update does not delay the copy.
        fails, error = functools.partial(self.is_fatal, scale), functools.partial(self.error, scale=scale)
        answer = Answer(self._read_back(found), names, mesh, fails, error, doubts)
        if self.is_awaited(optimizer):
            self.waits += 1
            return answer.read()
        self._flag, self._answer = found.amax(), answer
        return ""

    def arm(self, optimizer: Optimizer, masters: Sequence[Tensor]) -> list[Tensor]:
        """See `Guard`."""
        for name in ("grad_scale", "found_inf") if self.updates_on_host else ():
            # GradScaler's flag: torch copies it to the host without a wait, and kernels there would read it too early.
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
    """Create the momentum buffers of torch's fused SGD; see "Note: the first step of SGD"."""
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        for master in group["params"] if group["fused"] and group["momentum"] and not group["dampening"] else ():
            slot = slot_of(master)
            if slot.has_grad and optimizer.state[master].get("momentum_buffer") is None:
                made = slot.bucket.room(slot.index, "momentum_buffer", master.dtype)
                optimizer.state[master]["momentum_buffer"] = made
                for part in made.split(FILLED_NUMEL):  # it may lie in a file
                    part.fill_(-0.0)


def guard_of(comm: Comm, *, updates_on_host: bool) -> Guard:
    """Return the guard for the memory of a transport's tensors.

    Args:
        updates_on_host: whether some states are in host memory, with a CUDA device.
    """
    return HostGuard(comm) if comm.is_on_host else DeviceGuard(comm, updates_on_host=updates_on_host)


def not_finite(mesh: Mesh, name: str, scale: LossScale | None, origin: str) -> RuntimeError:
    """Return the error for a gradient that is not finite.

    Args:
        name: name of the parameter.
        origin: see `Guard`.
    """
    if scale is None:
        return RuntimeError(
            f"{mesh} The gradient of '{name}' is not finite; nothing was changed on any rank. {origin}The training has "
            "diverged, or a rank's data contain NaN or infinity: check the losses of each rank, lower the learning "
            "rate, or clip."
        )
    return RuntimeError(
        f"{mesh} The gradient of '{name}' is not finite at the smallest loss scale, {scale.value:g}; earlier steps "
        f"were skipped at {scale.history}. {origin}The training has diverged, or a value is out of fp16's range: lower "
        "the learning rate, look at this parameter's inputs, or use precision='bf16'."
    )


def _not_repeated(mesh: Mesh, doubts: Mapping[str, Tensor | bool]) -> RuntimeError:
    """Return the error for a recomputation whose values are not those of its forward, on this or another rank."""
    name = next((name for name, flag in doubts.items() if flag), "A recomputation on another rank")
    return RuntimeError(f"{mesh} {name} saved other values than its forward{BECAUSE}")


def _is_scaled(optimizer: Optimizer) -> bool:
    """Return whether torch.amp.GradScaler runs this step: the fused optimizer has a flag from another source."""
    return hasattr(optimizer, "found_inf") and not hasattr(optimizer.found_inf, "_zeroshard")


def _part(master: Tensor) -> Tensor:
    slot = slot_of(master)
    return part_of(slot) if slot.has_grad else _zero(slot.bucket.grads.dtype, slot.bucket.device)


def _suspects(masters: Sequence[Tensor]) -> list[Tensor]:
    """Return the slices whose held gradients a loss scale must look at again."""
    return [master for master in masters if slot_of(master).bucket.grads.is_suspect]


def _spoiled(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return (number of parts,) fp32: 1 for each part with an element that is not finite, else 0.

    For parts of one dtype, the number of kernel launches is constant.
    """
    with NoSubclasses():
        # The largest magnitude does not overflow, unlike a sum, and propagates NaN. With many ranks, most slices have
        # no element, and so no norm.
        filled = [part for part in parts if part.numel()]
        norms = iter(foreach_norm(filled, INFINITY) if filled else filled)
        largest = [next(norms) if part.numel() else _zero(part.dtype, part.device) for part in parts]
        if len({norm.device for norm in largest}) > 1:
            largest = [norm.to(device) for norm in largest]
        return (torch.stack(largest) < INFINITY).logical_not().float().to(device)


def _any(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the maximum of flags, each of shape (some,): (1,)."""
    return torch.cat([*flags]).amax().view(1) if flags else _zero(torch.float32, device).view(1)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _is_finite(masters: Sequence[Tensor]) -> bool:
    """Return whether the gradients of this rank's slices are finite, by a sum, which takes one pass.

    The sum may overflow, and padding is undefined: if the sum is not finite, the slices are checked.
    """
    buckets = {id(bucket): bucket for bucket in (slot_of(master).bucket for master in masters)}
    probes = [probe for bucket in buckets.values() for probe in bucket.grads.probes()]
    # One kernel for many small tensors.
    small = [probe.reshape(-1) for probe in probes if probe.numel() < HOT_NUMEL]
    sums = [probe.sum() for probe in probes if probe.numel() >= HOT_NUMEL]
    sums += [torch.cat(small).sum()] if small else []
    if not sums or torch.stack(sums).sum().isfinite():
        return True
    return all(map(_is_part_finite, masters))


def _is_part_finite(master: Tensor) -> bool:
    """Return whether the gradient of this rank's slice is finite, if there is one."""
    grad = master.grad
    with NoSubclasses():
        return grad is None or bool(grad.isfinite().all())
