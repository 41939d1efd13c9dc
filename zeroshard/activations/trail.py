"""What a module's forward saved for the backward, and whether each recomputation saves the same.

Owns the notes on saved tensors, taken inside the hooks of `torch.utils.checkpoint`, which compares shapes, dtypes and
devices itself. It must not know who recomputes.

Note: what is compared
    For each saved tensor in a bucket, its place there: another layer of the same shape is found without reading values.
    Of the last saved floating-point tensor and of the tensors saved after it, such as masks, a sum; and checksums of
    the states of torch's random numbers at that moment. The recomputation can still stop there. A tensor is known to be
    the last one from earlier forwards of the module; the first forward sums all. A forward that saves less than those
    before, because parameters are frozen now or by another path, has no sum: its recomputation runs to its end, for its
    outputs. On a device the host never waits for a sum: a flag is read with the guard's (`Guard.suspect`).
Note: random numbers
    All threads draw from one generator of the CPU, so its state also differs where another thread, such as one that
    prepares batches, draws beside a module that draws nothing. Where values cannot be compared, states decide. On a
    CPU, values must differ, too: where states do, the recomputation runs to its end, for its outputs, since a sum says
    nothing of a branch without the last saved tensor; where the forward left the state alone, it drew nothing. On a
    device, whose sums are not exact, that of its generator decides.
Note: changes in place
    Autograd refuses a saved tensor that was changed later, by its version; hooks turn this check off, so it is made
    here for recomputed tensors. `core/saved.py` checks those of buckets.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch.utils.checkpoint import CheckpointError

from zeroshard.activations.saved import Saved
from zeroshard.torch_private import innermost_hooks, local_of, recompute_to_the_end, version_of, without_modes

__all__ = ["Trail", "Trails"]

Tensor = torch.Tensor
Hooks = AbstractContextManager[Any]

Pair = tuple[Callable[..., Any], Callable[..., Any]]
"""Hooks that pack and unpack a saved tensor."""
Sum = Tensor | float
"""A number in host memory, or a tensor on a device."""

SUM_TOLERANCE, NORM_TOLERANCE = 0.02, 1e-3
"""On a device, whose kernels may add in varying order: bounds of a difference, divided by the norm."""


@final
class Trails:
    """The notes on the forwards of one module.

    Args:
        saved: the hooks of the model.
        is_exact: whether a recomputation has the same values, and they can be read.
        suspect: receives a flag, True if values differ.
        differs: returns the error for another recomputation.
    """

    def __init__(
        self,
        saved: Saved,
        is_exact: bool,
        suspect: Callable[[Tensor | bool], None],
        differs: Callable[[str], RuntimeError],
    ) -> None:
        self.saved, self.is_exact, self.suspect, self.differs = saved, is_exact, suspect, differs
        self.least: int | None = None
        """The smallest number of the tensor that was summed in a forward."""

    def start(self) -> "Trail":
        """Return empty notes for a forward."""
        return Trail(self)


@final
class Trail:
    """The notes on one forward of a module."""

    def __init__(self, trails: Trails) -> None:
        self._trails = trails
        self._places: list[tuple[int, int] | None] = []
        self._versions: list[int] = []
        """Of the tensors of the last recomputation."""
        self._again: list[tuple[int, int] | None] = []
        """Their places."""
        self._last, self._random, self._begun = -1, list[int](), 0
        self._pack: Any = None
        """The hook of `torch.utils.checkpoint` in the forward, then in the recomputation."""
        self._sums: dict[int, Sum] = {}

    def noted(self) -> Hooks:
        """Return the hooks around the forward."""
        hooks = _checkpoints_hooks()
        self._pack = hooks[0]
        self._begun = _checksum(torch.get_rng_state()) if self._trails.is_exact else 0
        return self._around(hooks, self._note, self._places)

    def followed(self) -> Hooks:
        """Return the hooks around a recomputation."""
        self._versions.clear()
        self._again = list[tuple[int, int] | None]()
        hooks = _checkpoints_hooks()
        self._pack = hooks[0]
        return self._around(hooks, self._compare, self._again)

    def end(self) -> bool:
        """End the forward; return whether its outputs may be compared: it saved too little for a sum, or may draw."""
        pack, self._pack, least = self._pack, None, self._trails.least
        if self._last < 0:
            return False
        self._trails.least = self._last if least is None else min(least, self._last)
        if not self._trails.is_exact:
            return False
        if self._last in self._sums:
            return len(self._random) == 1 and self._begun != _checksum(torch.get_rng_state())
        recompute_to_the_end(pack)
        return True

    def _around(self, inner: Pair, look: Callable[[int, Tensor], None], places: list[Any]) -> Hooks:
        inner_pack, inner_unpack = inner
        versions, place_of = self._versions, self._trails.saved.place_of
        known, differs = self._places, self._trails.differs

        # Called for each saved tensor. The graph references these functions, so notes must not reference them.
        def pack(tensor: Tensor) -> tuple[int, Any]:
            number = len(places)
            places.append(place_of(tensor))
            look(number, tensor)
            return number, inner_pack(tensor)

        def unpack(packed: tuple[int, Any]) -> Tensor:
            number, value = packed
            try:
                tensor: Tensor = inner_unpack(value)
            except CheckpointError as error:
                raise differs(f"saved other tensors than its forward ({f'{error}'.splitlines()[0]})") from error
            if number < len(versions) and known[number] is None and version_of(tensor) != versions[number]:
                raise _changed(tensor, versions[number])
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _note(self, number: int, tensor: Tensor) -> None:
        if self._places[number] is not None or (value := _summable(tensor)) is None:
            return
        is_summed = number >= (self._trails.least or 0)
        if value.is_floating_point():
            self._last = number
            if is_summed:
                self._random, self._sums = _random_states(value), {}
        if is_summed and self._trails.is_exact:
            self._sums[number] = _sum_of(value)

    def _compare(self, number: int, tensor: Tensor) -> None:
        # `torch.autograd.grad` inside the forward recomputes what the forward has not saved yet.
        if number < len(self._places):
            self._versions.append(version_of(tensor))
            if self._again[number] != self._places[number]:
                raise self._trails.differs("used other parameters than its forward")
        if (number == self._last or number in self._sums) and (value := _summable(tensor)) is not None:
            self._compare_values(number, value)

    def _compare_values(self, number: int, value: Tensor) -> None:
        flag = number in self._sums and _differ(self._sums[number], _sum_of(value))
        if number == self._last and self._random:
            again, is_exact = _random_states(value), self._trails.is_exact
            if self._random[-1] != again[-1] if is_exact else self._random != again:
                if flag or not is_exact or len(again) > 1:
                    raise self._trails.differs(
                        "drew other random numbers than its forward, or another thread drew some, which needs a "
                        "torch.Generator of its own"
                    )
                recompute_to_the_end(self._pack)
        self._trails.suspect(flag)


def _checkpoints_hooks() -> Pair:
    """Return the hooks that torch.utils.checkpoint has set."""
    found = innermost_hooks()
    assert found is not None, "torch.utils.checkpoint has set its hooks"
    return found


def _changed(tensor: Tensor, version: int) -> RuntimeError:
    """Return the error for a recomputed tensor that was changed after autograd saved it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} in a recomputed module is at version "
        f"{version_of(tensor)}; version {version} was saved. Clone it before changing it."
    )


def _summable(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor of real numbers; None for others, and for a tensor of a trace, without values."""
    value = local_of(tensor)
    is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return value if is_plain and not (value.is_complex() or value.is_quantized) and value.numel() else None


def _sum_of(value: Tensor) -> Sum:
    """Return the sum; on a device, of floating-point numbers also the norm: (1 or 2,)."""
    with torch.no_grad(), without_modes():
        if value.device.type == "cpu":
            return value.sum().item()
        if not value.is_floating_point():
            return value.sum().view(1)
        return torch.stack((value.sum(dtype=torch.float32), torch.linalg.vector_norm(value, dtype=torch.float32)))


def _differ(first: Sum, again: Sum) -> Tensor | bool:
    """Return a flag, on the device of the sums."""
    if not isinstance(first, Tensor) or not isinstance(again, Tensor):
        return first != again and not (first != first and again != again)  # NaN equals NaN
    with torch.no_grad(), without_modes():
        gaps, norm = (first - again).abs(), first[-1]
        if len(gaps) == 1:
            return gaps[0] != 0
        return (gaps[0] > SUM_TOLERANCE * norm) | (gaps[1] > NORM_TOLERANCE * norm)


def _random_states(value: Tensor) -> list[int]:
    """Return the CRC-32 of the states of torch's generators of the CPU and of a tensor's device, in host memory.

    The state of a CPU's generator has 5 KB, which each recomputed module would keep until its backward.
    """
    own = [] if value.device.type == "cpu" else [torch.get_device_module(value.device).get_rng_state(value.device)]
    return [*map(_checksum, (torch.get_rng_state(), *own))]


def _checksum(state: Tensor) -> int:
    return zlib.crc32(state.numpy().data)
