"""The way of gradients into the memory between steps: the device's, or the host's.

Owns the copies of gradients that leave a device, and when its stream waits for them. It must not know units, nor how
gradients are reduced. Read `Leaving` first.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple, final

import torch

from zeroshard import devices
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import owns_memory, users_of_storage

__all__ = ["Buffer", "DeviceLanding", "HostLanding", "Landing", "Leaving", "Tell"]

Tensor = torch.Tensor
Form = tuple[tuple[int, ...], tuple[int, ...]]
Tell = Callable[[str, int], None]


@final
class Buffer:
    """Staging memory, and the event of the last copy from it."""

    def __init__(self, memory: Tensor, copied: devices.Mark | None = None) -> None:
        self.memory, self.copied = memory, copied


class Landing(ABC):
    """The way of a bucket's gradients into the memory between steps.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of that memory, with any content."""

    @abstractmethod
    def put(self, target: Tensor, values: Tensor) -> None:
        """Begin to write values of the device to `target`."""

    @abstractmethod
    def add(self, target: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Begin to add `scale` times values of the device to `target`, in the dtype of the target."""

    @abstractmethod
    def keep(self, values: Tensor, dtype: torch.dtype, scale: float, form: Form, *, is_taken: bool) -> Tensor:
        """Return a tensor of that memory and dtype, in which `scale` times `values` will be.

        Args:
            form: its shape and strides; it has no gaps.
            is_taken: whether `values` has this form, and its memory may be changed and kept.
        """

    @abstractmethod
    def sum(self, held: Tensor) -> Tensor | None:
        """Return the sum of values on their arrival; None if the host would have to wait for it."""

    @abstractmethod
    def place_of_sum(self, held: Callable[[], Tensor], other: Tensor) -> Tensor:
        """Return where the device writes a sum: to that memory, `held()`, if it can, or to `other`, for `put`."""

    @abstractmethod
    def count(self, ledger: Ledger, nbytes: int) -> None:
        """Count bytes that are taken there, or given back if negative."""

    def wait(self) -> None:
        """Return when all that was begun is there."""
        return

    def end_pass(self) -> None:
        """Give back the memory of what is under way, at the end of a backward."""
        return


@final
class DeviceLanding(Landing):
    """Gradients that stay on the device."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Landing`."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def put(self, target: Tensor, values: Tensor) -> None:
        """See `Landing`."""
        target.copy_(values)

    def add(self, target: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """See `Landing`."""
        target.add_(values if scale == 1.0 else values.to(target.dtype), alpha=scale)

    def keep(self, values: Tensor, dtype: torch.dtype, scale: float, form: Form, *, is_taken: bool) -> Tensor:
        """See `Landing`."""
        is_kept = is_taken and values.dtype == dtype
        held = values if is_kept else self.empty(values.numel(), dtype).as_strided(*form).copy_(values)
        return _scaled(held, scale)

    def sum(self, held: Tensor) -> Tensor | None:
        """See `Landing`."""
        return held.sum() if held.device.type == "cpu" else None

    def place_of_sum(self, held: Callable[[], Tensor], other: Tensor) -> Tensor:
        """See `Landing`."""
        return held()

    def count(self, ledger: Ledger, nbytes: int) -> None:
        """See `Landing`."""
        ledger.add("gradients", nbytes)


class _Sent(NamedTuple):
    """A gradient that leaves: its memory on the device, and the event of the last copy."""

    values: Tensor
    left: devices.Mark


@final
class Leaving:
    """Gradients that leave a device while its backward goes on.

    They leave by one lane. What lies on the host already comes by the other lane and is added to on the device, in
    pieces through two buffers, so both directions of the bus are busy at once and carry 8 bytes for each element. Sums
    on the host would move 10 in its memory, of whose bandwidth updates reached a quarter on an H100's host
    (benchmarks/results/gpu_offload.json). The stream of the backward waits for the gradients of the bucket before the
    last one, and for no others: so the memory of two buckets is under way, and returns to the allocator in the order of
    that stream.

    Args:
        nbytes: of each buffer, made at the first use.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._buffers: deque[Buffer] = deque()
        self._under_way: dict[Landing, list[_Sent]] = {}
        """By bucket, the one that sent last at the end."""

    def send(
        self, owner: Landing, target: Tensor, values: Tensor, scale: float, written: devices.Mark | None, adds: bool
    ) -> devices.Mark:
        """Begin to write `scale` times `values` to memory of the host, or to add them; return the last copy's event.

        Args:
            target: of the shape and strides of `values`, without gaps.
            values: memory that nothing changes, and that the sender gives up.
            written: the event of the last copy to `target`.
        """
        self._make_room(owner)
        begun = devices.mark(self._device)
        while len(self._buffers) < 2:
            with devices.lane(self._device, "out", begun):
                memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
                self._buffers.append(Buffer(memory, devices.mark(self._device)))
        step, left = max(1, self._nbytes // target.itemsize), begun
        for to, piece in zip(_flat(target).split(step), _flat(values).split(step), strict=True):
            if not adds and scale == 1.0 and to.dtype == piece.dtype:
                left = self._take(to, piece, [begun])
                continue
            self._buffers.rotate()
            buffer = self._buffers[0]
            room, after = buffer.memory[: to.nbytes].view(to.dtype), [begun]
            if adds:
                after.append(self._bring(room, to, [one for one in (buffer.copied, written) if one is not None]))
            left = buffer.copied = self._take(to, piece, after, room, scale, adds=adds)
        self._under_way[owner] = sent = self._under_way.pop(owner, [])
        sent.append(_Sent(values, left))
        return left

    def _make_room(self, owner: Landing) -> None:
        """Have the stream of the backward wait for the gradients of all buckets but this one and the last one."""
        last = next((one for one in reversed(self._under_way) if one is not owner), owner)
        for other in [one for one in self._under_way if one not in (owner, last)]:
            for one in self._under_way.pop(other):
                one.left.wait()

    def _bring(self, room: Tensor, source: Tensor, after: list[devices.Mark]) -> devices.Mark:
        """Copy memory of the host to a buffer, after these events."""
        with devices.lane(self._device, "back", after[0]):
            for one in after[1:]:
                one.wait()
            room.copy_(source, non_blocking=True)
            return devices.mark(self._device)

    def _take(
        self,
        to: Tensor,
        piece: Tensor,
        after: list[devices.Mark],
        room: Tensor | None = None,
        scale: float = 1.0,
        *,
        adds: bool = False,
    ) -> devices.Mark:
        """Copy a piece to the host after these events.

        Args:
            room: a buffer; the piece is converted in this memory, or added to the values there, and leaves from it.
        """
        with devices.lane(self._device, "out", after[0]):
            for one in after[1:]:
                one.wait()
            if room is not None and adds:
                room.add_(piece if scale == 1.0 else piece.to(room.dtype), alpha=scale)
            elif room is not None:
                _scaled(room.copy_(piece), scale)
            to.copy_(piece if room is None else room, non_blocking=True)
            return devices.mark(self._device)

    def forget(self, owner: Landing) -> None:
        """Give back the memory of a bucket's gradients, which have arrived."""
        self._under_way.pop(owner, None)

    def end_pass(self) -> None:
        """Give back all memory; the allocator uses it again when the copies are over."""
        under_way, self._under_way = self._under_way, {}
        for one in chain.from_iterable(under_way.values()):
            devices.used_on(self._device, "out", one.values)


@final
class HostLanding(Landing):
    """Gradients that a device leaves on the host: under way until `wait()`.

    Args:
        tell: is told of copies, by kind and bytes.
        leaving: of all buckets.
    """

    def __init__(self, device: torch.device, tell: Tell, leaving: Leaving) -> None:
        super().__init__(device)
        self._tell, self._leaving = tell, leaving
        self._blocks = defaultdict[tuple[int, torch.dtype], list[Tensor]](list)
        """Large memory that was pinned, for each step."""
        self._left: devices.Mark | None = None

    @property
    def is_far(self) -> bool:
        """Whether host and device are two memories."""
        return self._device.type != "cpu"

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Landing`."""
        if not self.is_far:
            return torch.empty(numel, dtype=dtype, device="cpu")
        if numel * dtype.itemsize < devices.EXACT_BYTES:
            return devices.pinned((numel,), dtype)
        blocks = self._blocks[numel, dtype]
        block = next((one for one in blocks if users_of_storage(one) == 1), None)
        if block is None:
            blocks.append(block := devices.pinned((numel,), dtype))
        return block.detach()

    def put(self, target: Tensor, values: Tensor) -> None:
        """See `Landing`."""
        if self.is_far:
            self._send(target, _owned(values, target))
        else:
            target.copy_(values)

    def add(self, target: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """See `Landing`."""
        if self.is_far:
            self._tell("copy in", target.nbytes)
            self._send(target, _owned(values, target), scale, adds=True)
        else:
            target.add_(values if scale == 1.0 else values.to(target.dtype), alpha=scale)

    def keep(self, values: Tensor, dtype: torch.dtype, scale: float, form: Form, *, is_taken: bool) -> Tensor:
        """See `Landing`."""
        held = self.empty(values.numel(), dtype).as_strided(*form)
        if self.is_far:
            self._send(held, values if is_taken else _copy(values.to(self._device), held), scale)
        else:
            _scaled(held.copy_(values), scale)
        return held

    def _send(self, target: Tensor, values: Tensor, scale: float = 1.0, *, adds: bool = False) -> None:
        self._tell("copy out", target.nbytes)
        self._left = self._leaving.send(self, target, values, scale, self._left, adds)

    def sum(self, held: Tensor) -> None:
        """See `Landing`."""

    def place_of_sum(self, held: Callable[[], Tensor], other: Tensor) -> Tensor:
        """See `Landing`."""
        return other

    def count(self, ledger: Ledger, nbytes: int) -> None:
        """See `Landing`: the ledger counts bytes of the device."""

    def wait(self) -> None:
        """See `Landing`."""
        if self._left is not None:
            self._left.synchronize()
            self._left = None
            self._leaving.forget(self)

    def end_pass(self) -> None:
        """See `Landing`."""
        self._leaving.end_pass()


def _scaled(held: Tensor, scale: float) -> Tensor:
    return held if scale == 1.0 else held.mul_(scale)


def _owned(values: Tensor, like: Tensor) -> Tensor:
    """Return values of the strides of `like` in memory of their own, which is all that stays until they have left."""
    return values if owns_memory(values) and values.stride() == like.stride() else _copy(values, like)


def _copy(values: Tensor, like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device)
    return made.copy_(values)


def _flat(dense: Tensor) -> Tensor:
    """Return (numel,) of a tensor without gaps, in the order of its memory."""
    return dense.as_strided((dense.numel(),), (1,))
