"""What islands keep and send, for a plan: from `zs.Outer`, the units of a rank, and a device.

Owns that arithmetic, which `outer/` follows with tensors. A `zs.Outer` is known by its attributes, as a DeviceMesh is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from zeroshard.table.spec import UnitSpec, itemsize, message_of

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
        buffer_bytes: on the device, during the exchange of the largest fragment.
        sent_bytes: by the rank in an exchange of all parameters.
        exchange_s: seconds of that exchange.
        every, delay, fragments: as in `zs.Outer`.
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

    def exposed_s(self, step_s: float) -> float:
        """Return the seconds that a step waits for exchanges, on average.

        Args:
            step_s: seconds of a step between exchanges.
        """
        return max(0.0, self.exchange_s - self.fragments * self.delay * step_s) / self.every

    def to_json(self, step_s: float) -> Mapping[str, int | float | str]:
        """Return everything as JSON values; see `exposed_s`."""
        return {**vars(self), "exposed_s_per_step": self.exposed_s(step_s)}

    def lines(self, step_s: float) -> list[str]:
        """Return lines for people; see `exposed_s`."""
        if self.islands == 1:
            return []
        waits = f"{1e3 * self.exposed_s(step_s):,.1f} ms of each step wait for it"
        return [
            f"exchanges           every {self.every} steps each rank sends {self.sent_bytes / 1e6:,.1f} MB to other "
            f"islands, in {1e3 * self.exchange_s:,.1f} ms; {waits}",
            f"anchors             {self.kept_bytes / 2**30:.2f} GiB with their states, on the {self.memory}",
        ]


WITHOUT: Final = Foreseen()
"""No islands."""


def foresee(outer: Any, islands: int, units: Sequence[UnitSpec], device: Any, stride: int) -> Foreseen:
    """Return what a rank keeps and sends for the exchanges of islands.

    Args:
        outer: a `zs.Outer`, checked; None without islands.
        units: as the rank sees them.
        device: a `zs.Device`.
        stride: number of ranks of an island.

    Raises:
        ValueError: more fragments than units.
    """
    if outer is None:
        return WITHOUT
    trained = [[bucket for bucket in unit.buckets if bucket.is_reduced] for unit in units]
    trained = [buckets for buckets in trained if buckets]
    sizes = [sum(bucket.layout.full_numel for bucket in buckets) for buckets in trained]
    whole_bytes = sent_bytes = buffer_bytes = 0
    for fragment in outer.divided(trained, sizes):
        buckets = [bucket for some in fragment for bucket in some]
        numel = sum(bucket.layout.shard_numel for bucket in buckets)
        dtype = max(("float32", *(bucket.formats.master for bucket in buckets)), key=itemsize)
        count, held = message_of(codec := outer.codec(dtype), numel)
        change_bytes, message_bytes = numel * itemsize(dtype), count * itemsize(held)
        whole_bytes += change_bytes
        if is_summed := islands > 2 and codec == dtype:  # each adds up a part, and the sums are gathered
            message_bytes = 2 * -(-numel // islands) * itemsize(dtype)
        sent_bytes += (islands - 1) * message_bytes
        buffer_bytes = max(buffer_bytes, (2 - is_summed) * change_bytes + islands * message_bytes)
    kept_bytes, span = whole_bytes * outer.kept_per_element, device.spread(islands, stride)
    # A ring moves what every rank sends; both formulas of a device take the bytes of all its ranks.
    took_s = device.collective_s("gather", sent_bytes * islands / (islands - 1), span)
    took_s += PASSES * whole_bytes / (device.memory_bytes_per_s * device.memory_part)
    kept = kept_bytes, outer.cell.memory
    return Foreseen(islands, *kept, buffer_bytes, sent_bytes, took_s, outer.every, outer.delay, outer.fragments)
