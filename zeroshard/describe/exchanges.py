"""What islands keep and send, for a plan: from `zs.Outer`, the units of a rank, and a device.

Owns that arithmetic, which `outer/` follows with tensors. A `zs.Outer` is known by its attributes, as a DeviceMesh is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from zeroshard.table.sizes import size_text
from zeroshard.table.spec import BLOCK_NUMEL, BucketSpec, UnitSpec, itemsize, message_of
from zeroshard.table.wires import Messages

__all__ = ["Foreseen", "WITHOUT", "foresee"]

PASSES: Final = 8
"""How often an exchange reads or writes its elements: changes, messages, sums, anchors and parameters."""


@final
@dataclass(frozen=True)
class Foreseen:
    """The exchanges of one rank; none by default.

    Args:
        islands: their number.
        kept_bytes: of anchors, outer states, and what rounding lost.
        memory: where these are.
        buffer_bytes: on the device, at most, until the mean of the largest fragment is there; without delay, from the
            beginning of its exchange on.
        sent_bytes: by the rank in an exchange of all parameters.
        exchange_s: seconds of that exchange.
        every, delay, fragments: as in `zs.Outer`.
        local_s: the part of `exchange_s` in which nothing can be trained.
        staleness: of islands that are launches of their own, as in `zs.Outer`; else 0.
        is_alone: whether this launch is one island.
        states_bytes: the part of `kept_bytes` that the first exchange of each fragment makes: outer states.
        begin_bytes: on the device, at most, while the exchange of the largest fragment begins.
        under_way_bytes: on the device, of its messages, from its beginning to its end.
        moving_bytes: on the device, at most, while the outer optimizer moves its anchors by the mean.
    """

    islands: int = 1
    kept_bytes: int = 0
    memory: str = "device"
    buffer_bytes: int = 0
    sent_bytes: int = 0
    exchange_s: float = 0.0
    every: int = 1
    delay: int = 0
    fragments: int = 1
    local_s: float = 0.0
    staleness: int | None = 0
    is_alone: bool = False
    states_bytes: int = 0
    begin_bytes: int = 0
    under_way_bytes: int = 0
    moving_bytes: int = 0

    @property
    def at_first(self) -> tuple[int, bool]:
        """The most that an exchange has on the device in the first step, before anchors move, and whether they do."""
        distance = self.every // self.fragments
        ends = distance == 1
        return self.buffer_bytes if ends else self.begin_bytes * (distance - self.delay == 1), ends

    def exposed_s(self, step_s: float) -> float:
        """Return the seconds that a step waits for exchanges, on average, of islands of equal speed.

        Args:
            step_s: seconds of a step between exchanges.
        """
        if self.staleness is None:
            return self.local_s / self.every
        overlapped = self.staleness * self.every if self.is_alone else self.fragments * self.delay
        return max(self.local_s, self.exchange_s - overlapped * step_s) / self.every

    def paces(self, step_s: float, speeds: Sequence[float]) -> list[tuple[float, float]]:
        """Return for each island when it begins to wait for the slowest one, and its steps per second from then on.

        Before, each makes `speed / step_s` steps per second. An island that never waits has `inf` seconds.

        Args:
            step_s: seconds of a step of an island of speed 1.
            speeds: of the islands, above 0.

        Raises:
            ValueError: a speed is not above 0.

        >>> from zeroshard.describe.exchanges import Foreseen
        >>> Foreseen(2, every=50, staleness=4, is_alone=True).paces(0.1, [1.0, 0.5])
        [(40.0, 5.0), (inf, 5.0)]
        """
        if not speeds or min(speeds) <= 0:
            raise ValueError(f"speeds must be numbers above 0, one for each island; got {list(speeds)}.")
        rates = [speed / step_s for speed in speeds]
        slowest, lead = min(rates), self.staleness
        found = []
        for rate in rates:
            waits = lead is not None and rate > slowest
            found.append((lead * self.every / (rate - slowest), slowest) if waits else (math.inf, rate))  # type: ignore[operator]
        return found

    def to_json(self, step_s: float) -> Mapping[str, int | float | str]:
        """Return everything as JSON values; see `exposed_s`."""
        return {**vars(self), "exposed_s_per_step": self.exposed_s(step_s)}

    def lines(self, step_s: float) -> list[str]:
        """Return lines for people; see `exposed_s`."""
        if self.islands == 1:
            return []
        waits = f"{1e3 * self.exposed_s(step_s):,.1f} ms of each step wait for it"
        to = f"to the mailbox and takes {self.islands - 1} times as many" if self.is_alone else "to other islands"
        lines = [
            f"exchanges           every {self.every} steps each rank sends {size_text(self.sent_bytes)} {to}, in "
            f"{1e3 * self.exchange_s:,.1f} ms; {waits}",
            f"anchors             {size_text(self.kept_bytes)} with their states, on the {self.memory}",
        ]
        if self.is_alone:
            begin_s, _ = self.paces(step_s, (1.0, 0.5))[0]
            when = "never waits" if math.isinf(begin_s) else f"waits for it after {begin_s:,.1f} s"
            lines.append(f"staleness           {self.staleness}: beside an island of half its speed, this one {when}")
        return lines


WITHOUT: Final = Foreseen()
"""No islands."""


def foresee(asked: Any, units: Sequence[UnitSpec]) -> Foreseen:
    """Return what a rank keeps and sends for the exchanges of islands.

    Args:
        asked: the options of a plan, with a `zs.Outer` that was checked; None without islands.
        units: as the rank sees them.

    Raises:
        ValueError: more fragments than units.
    """
    outer, islands, device, stride = asked.outer, asked.islands, asked.device, asked.shard_ranks * asked.tensor
    if outer is None:
        return WITHOUT
    trained = [[bucket for bucket in unit.buckets if bucket.is_reduced] for unit in units]
    trained = [buckets for buckets in trained if buckets]
    if outer.is_alone:
        return _foresee_alone(outer, [bucket for buckets in trained for bucket in buckets], device, stride)
    sizes = [sum(bucket.layout.full_numel for bucket in buckets) for buckets in trained]
    is_here = outer.cell.is_beside(is_cpu=device.is_cpu)  # changes, anchors and outer states
    whole_bytes = sent_bytes = begin_bytes = under_way_bytes = moving_bytes = buffer_bytes = 0
    for fragment in outer.divided(trained, sizes):
        buckets = [bucket for some in fragment for bucket in some]
        numel = sum(bucket.layout.shard_numel for bucket in buckets)
        dtype, change_bytes, message_bytes = _change_of(outer, buckets, numel)
        whole_bytes += change_bytes
        if is_summed := islands > 2 and outer.codec(dtype) == dtype:  # each adds up a part, and the sums are gathered
            message_bytes = 2 * -(-numel // islands) * itemsize(dtype)
        sent_bytes += (islands - 1) * message_bytes
        if is_summed:
            part, peers = -(-numel // islands), islands - 1
            rows_bytes, blocks_bytes = islands * part * itemsize(dtype), (0, 0)
            received = Messages(asked.wire_bytes).piece_numel(part, dtype, peers) * device.is_cpu
            held_bytes = rows_bytes + peers * received * itemsize(dtype)
            end_bytes = 0
        else:
            rows_bytes = held_bytes = islands * message_bytes
            blocks_bytes = _blocks_bytes(numel, dtype, islands) if outer.codec(dtype) != dtype else (0, 0)
            end_bytes = change_bytes + blocks_bytes[1]
        begin_bytes = max(begin_bytes, held_bytes, rows_bytes + (change_bytes + blocks_bytes[0]) * is_here)
        under_way_bytes = max(under_way_bytes, held_bytes)
        buffer_bytes = max(buffer_bytes, held_bytes + end_bytes)
        # The messages have gone then.
        moving_bytes = max(moving_bytes, int(change_bytes * (1 + asked.outer_passing)) * is_here)
    if not outer.delay:
        buffer_bytes = max(buffer_bytes, begin_bytes)
    lasting_bytes = whole_bytes * (1 + (outer.codec("float32") != "float32"))  # anchors, and what rounding lost
    kept_bytes, span = whole_bytes * outer.kept_per_element, device.spread(islands, stride)
    # A ring moves what every rank sends; both formulas of a device take the bytes of all its ranks.
    took_s = device.collective_s("gather", sent_bytes * islands / (islands - 1), span)
    took_s += PASSES * whole_bytes / (device.memory_bytes_per_s * device.memory_part)
    kept = kept_bytes, outer.cell.memory
    return Foreseen(
        islands, *kept, buffer_bytes, sent_bytes, took_s, outer.every, outer.delay, outer.fragments,
        states_bytes=kept_bytes - lasting_bytes, begin_bytes=begin_bytes, under_way_bytes=under_way_bytes,
        moving_bytes=moving_bytes,
    )  # fmt: skip


def _blocks_bytes(numel: int, dtype: str, islands: int) -> tuple[int, int]:
    """Return what the encoding of a change and the sum of messages hold at most, as `wire/codec.py` has blocks."""
    block_bytes = min(numel, BLOCK_NUMEL) * itemsize(dtype)
    # A loop holds the values of the block before while it makes the next ones.
    before = numel > BLOCK_NUMEL
    return (2 + before) * block_bytes, (islands + 1 + before * islands) * block_bytes


def _change_of(outer: Any, buckets: Sequence[BucketSpec], numel: int) -> tuple[str, int, int]:
    """Return the dtype in which a change of `numel` elements is computed, its bytes, and those of its message."""
    dtype = max(("float32", *(bucket.formats.master for bucket in buckets)), key=itemsize)
    count, held = message_of(outer.codec(dtype), numel)
    return dtype, numel * itemsize(dtype), count * itemsize(held)


def _foresee_alone(outer: Any, buckets: Sequence[BucketSpec], device: Any, stride: int) -> Foreseen:
    """Return what a rank keeps, puts and takes of an island that is a launch of its own."""
    numel = sum(bucket.layout.owned_numel(*bucket.states) for bucket in buckets)
    _, whole_bytes, sent_bytes = _change_of(outer, buckets, numel)
    # The mailbox has what all put, and each takes it from there, as in a ring.
    local_s = device.host_s(PASSES * whole_bytes, min(stride, device.node_ranks))
    took_s = local_s + device.collective_s("gather", sent_bytes * outer.islands, device.spread(outer.islands, stride))
    shares = outer.every, outer.delay, outer.fragments, local_s, outer.staleness, True
    return Foreseen(outer.islands, whole_bytes * outer.kept_per_element, "host", 0, sent_bytes, took_s, *shares)
