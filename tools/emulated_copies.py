"""A bus in emulation on which gradients leave late: as late, or as early, as the engine's events allow.

Owns the copies of `zeroshard/store/landing.py` on a CPU, where host and device are one memory. It must not know what
leaves. Tests use `late_bus()` around `zs.shard` and training; `Bus.check` raises an error with all defects.

Note: what is found
    A copy is made when its event is waited for, or at a moment before that a generator chooses, after those of its lane
    and after the events that it follows. Until then memory of the host that gradients replace holds NaN, so code that
    reads it too early computes NaN. The bus does not keep what leaves alive: memory that is freed or changed before the
    copy is a defect.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor

from tools.emulated import Region
from zeroshard import devices
from zeroshard.store.landing import HostLanding, Leaving

__all__ = ["Bus", "Copy", "late_bus"]


@final
class Copy:
    """A piece on its way: what stands for its event."""

    def __init__(self, bus: "Bus", lane: str, after: "list[Any]", made: Callable[[], object]) -> None:
        self._bus, self.lane, self._after, self._made, self.is_done = bus, lane, after, made, False
        self.name, self.begun = bus.name, bus.now()
        bus.lanes.setdefault(lane, deque()).append(self)

    def wait(self) -> None:
        """Have a stream wait."""
        self._bus.waited(self)
        self.end()

    def synchronize(self) -> None:
        """Have the host wait."""
        self.wait()

    def end(self) -> None:
        """Make the copy, after those before it."""
        lane = self._bus.lanes[self.lane]
        while not self.is_done:
            first = lane.popleft()
            for one in first._after:
                if isinstance(one, Copy):
                    one.end()
            first._made()
            first.is_done = True


@final
@dataclass(frozen=True)
class Passed:
    """The event of what was launched before: kernels run at once."""

    def wait(self) -> None:
        """Go on."""

    def synchronize(self) -> None:
        """Go on."""


@final
@dataclass(eq=False)
class Bus:
    """The bus of one rank.

    Args:
        seed: of the order in which copies are made.
        eagerness: how probable it is that a copy to the host is made when it is issued, and one from there is not.
        waited: is told of each copy that something waits for.
        now: the time that a copy has as `begun`.
    """

    seed: int = 0
    eagerness: float = 0.3
    waited: Callable[[Copy], object] = lambda copy: None
    now: Callable[[], float] = lambda: 0.0
    defects: list[str] = field(default_factory=list)
    lanes: dict[str, deque[Copy]] = field(default_factory=dict)
    name: str = ""
    """The unit whose gradients leave now."""
    issued: list[Copy] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """What the allocator keeps until the copies are over."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def issue(self, lane: str, after: list[Any], made: Callable[[], object]) -> Copy:
        """Put a copy behind the others of its lane."""
        copy = Copy(self, lane, after, made)
        self.issued.append(copy)
        if (self._random.random() < self.eagerness) is (lane == "out"):
            copy.end()
        return copy

    def check(self) -> None:
        """Raise an error with all defects."""
        if self.defects:
            raise AssertionError("\n".join(self.defects))


@contextmanager
def late_bus(bus: Bus) -> Iterator[Bus]:
    """Have gradients leave by this bus."""
    take, bring, send = Leaving._take, Leaving._bring, HostLanding._send

    def late_take(leaving: Leaving, to: Tensor, piece: Tensor, after: list[Any], *args: Any, **options: Any) -> Copy:
        given, was, name = Region(piece), piece.clone(), bus.name

        def made() -> None:
            now = given.bytes()
            if now is None:
                bus.defects.append(f"gradients of {name}: their memory was freed before they left")
            elif not torch.equal(now, was.view(torch.uint8)):
                bus.defects.append(f"gradients of {name}: they were changed before they left")
            take(leaving, to, was, [Passed()], *args, **options)

        if not options.get("adds"):
            to.fill_(torch.nan)
        return bus.issue("out", after, made)

    def late_bring(leaving: Leaving, room: Tensor, source: Tensor, after: list[Any]) -> Copy:
        return bus.issue("back", after, lambda: bring(leaving, room, source, [Passed()]))

    def named(landing: HostLanding, *args: Any, **options: Any) -> None:
        bus.name = landing._tell.args[0]  # type: ignore[attr-defined]
        send(landing, *args, **options)

    with (
        patch.object(Leaving, "_take", late_take),
        patch.object(Leaving, "_bring", late_bring),
        patch.object(HostLanding, "_send", named),
        patch.object(HostLanding, "is_far", True),
        patch.object(devices, "lane", lambda device, use, after: nullcontext()),
        patch.object(devices, "mark", lambda device: Passed()),
        patch.object(devices, "used_on", lambda device, use, memory: bus.kept.append(memory)),
        patch.object(devices, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype)),
    ):
        yield bus
