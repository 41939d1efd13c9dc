"""What one rank does in a step: units, the model's script, updates, and the machine.

Owns the record that a film is made from. It must not know how it is made (`simulate.py`). Needs no torch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import final

from zeroshard.describe.exchanges import WITHOUT, Foreseen
from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.step.script import Call, Script, script_of
from zeroshard.plan.step.system import ZEROSHARD, System
from zeroshard.plan.step.turns import Turn, turns_of
from zeroshard.table.bytes import Sliced, Updates
from zeroshard.table.pipeline import Action, Kind, Schedule
from zeroshard.table.spec import UnitSpec, itemsize
from zeroshard.table.wires import Wire

__all__ = ["Account", "Border", "Call", "Job", "Piped", "Tied", "account_of", "tied_unit"]


@final
@dataclass(frozen=True)
class Account:
    """What optimizers keep and move; searches make it once for many jobs.

    Args:
        states: (name of the bucket, bytes of states, their memory, bytes of counters).
        wide_bytes, moved_bytes: of each optimizer: masters that are widened, and all that an update on the device reads
            and writes.
        wide_apart_bytes: of each optimizer: masters that are widened on the host.
        moved_apart_bytes: by number of the bucket, what an update elsewhere reads and writes.
        turns: of each optimizer, how what is updated whole is exchanged and updated.
    """

    states: Sequence[tuple[str, int, str, int]]
    wide_bytes: Sequence[int]
    moved_bytes: Sequence[int]
    wide_apart_bytes: Sequence[int]
    moved_apart_bytes: Mapping[int, int]
    turns: Sequence[Sequence[Turn]]


def account_of(updates: Sequence[Updates], device: Device) -> Account:
    """Return the account of some optimizers."""
    states: list[tuple[str, int, str, int]] = []
    moved_bytes: list[int] = []
    moved_apart = Counter[int]()
    for one in updates:
        by_bucket: dict[int, list[Sliced]] = {}
        moved = 0
        for entry in one.trained.parameters:
            bucket, sizes = entry.bucket, entry.bucket.formats
            by_bucket.setdefault(bucket.number, []).append(entry)
            # Master and states are read and written, the gradient read, the rounded parameter written.
            kept = entry.cost.each_bytes(itemsize(sizes.state))
            each = 2 * itemsize(sizes.master) + 2 * kept + itemsize(sizes.grad)
            if not bucket.row.states.is_on_device:
                moved_apart[bucket.number] += entry.numel * each
            else:
                moved += entry.numel * (each + itemsize(sizes.param) * bucket.has_masters)
        moved_bytes.append(moved)
        for places in by_bucket.values():
            bucket, kept_bytes = places[0].bucket, sum(entry.state_bytes for entry in places)
            counter_bytes = sum(entry.cost.counter_bytes for entry in places)
            states.append((bucket.name, kept_bytes, bucket.row.states.memory, counter_bytes))
        whole = [owned for owned in one.trained.whole if owned.is_kept]
        states += [(o.bucket.name, o.state_bytes, o.bucket.row.states.memory, o.counter_bytes) for o in whole]
    return Account(
        tuple(states),
        tuple(one.numel_bytes(only_wide=True) for one in updates),
        tuple(moved_bytes),
        tuple(one.numel_bytes(only_wide=True, is_apart=True) for one in updates),
        MappingProxyType(dict(moved_apart)),
        [turns_of(one.trained.whole, device) for one in updates],
    )


Border = tuple[str, int]
"""A tensor that crosses a border between two chunks: its shape and dtype as a text, and its bytes."""


@final
@dataclass(frozen=True)
class Tied:
    """A unit whose parameters several places of a pipe have.

    Args:
        unit: its number.
        places: that have it, in order.
        nbytes: of a rank's elements of its gradients.
    """

    unit: int
    places: Sequence[int]
    nbytes: int


def tied_unit(unit: UnitSpec, places: Sequence[int]) -> Tied:
    """Return the record of a unit that several places of a pipe have."""
    sizes = [bucket.layout.owned_numel(*bucket.states) * itemsize(bucket.formats.grad) for bucket in unit.reduced]
    return Tied(unit.number, places, sum(sizes))


@final
@dataclass(frozen=True)
class Piped:
    """What a rank does at one place of a pipe.

    Args:
        schedule: of the step.
        chunks: of each chunk of the place, the job that has the script of this chunk, and the units of all.
        messages: by kind and chunk, the tensors that any chunk of the pipe receives.
        tied: units that other places have, too.
        ready_s: when each message is here.
        end_s: when the last place has made its last backward.
    """

    schedule: Schedule
    place: int
    chunks: "Mapping[int, Job]"
    messages: Mapping[tuple[Kind, int], Sequence[Border]]
    tied: Sequence[Tied] = ()
    ready_s: Mapping[Action, float] = field(default_factory=dict)
    end_s: float = 0.0

    @property
    def actions(self) -> Sequence[Action]:
        """What the place does, in order."""
        return self.schedule.actions[self.place]


@final
@dataclass(frozen=True)
class Job:
    """What one rank does in a step.

    Args:
        units: as this rank sees them, the root first.
        calls: uses of units of a shape, in order of the forward; none where there is a script.
        updates: what the optimizer updates and keeps.
        wire: the transport of gradients and parameters.
        device: whose kernels run.
        dtype: of products.
        spans: where the ranks of each axis are: "shard", "replicate", "tensor", "pipe".
        micro_batches: forwards and backwards of a step.
        input_bytes: of one micro-batch, there until the next one is, and through the update.
        buffer_bytes, saved_buffer_bytes: of buffers of the model, and of those that a checkpoint has.
        keeps_gradients: whether the memory of gradients stays from step to step, as with
            `zero_grad(set_to_none=False)`.
        seconds: of one kernel; the device's own formula where not given.
        script: of a model that was traced.
        passing_bytes: what the optimizer's kernels take beside its states, and the check of gradients before.
        account: of the updates, where it is known already.
        host_ranks: ranks of a node, which share its processors and its disk.
        is_early: whether the optimizer is one whose update on the host may go on after `step()`.
        no_sync: whether only the last micro-batch reduces gradients.
        pipe: the actions of a place of a pipe, whose chunks have scripts of their own.
        system: the program.
        made: what the first step makes and never gives back, as (what, bytes), by moment: "start", "forward",
            "backward"; "model" is there before.
        outer: what islands keep and exchange besides.
        recomputes: whether backwards recompute activations.
    """

    units: Sequence[UnitSpec]
    calls: Sequence[Call]
    updates: Sequence[Updates]
    wire: Wire
    device: Device
    dtype: str
    spans: Mapping[str, Span]
    micro_batches: int = 1
    input_bytes: int = 0
    buffer_bytes: int = 0
    keeps_gradients: bool = False
    seconds: Callable[[Cost], float] | None = None
    script: Script | None = None
    passing_bytes: tuple[int, int] = (0, 0)
    account: Account | None = None
    host_ranks: int = 1
    is_early: bool = False
    no_sync: bool = False
    pipe: Piped | None = None
    system: System = ZEROSHARD
    made: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    outer: Foreseen = WITHOUT
    saved_buffer_bytes: int = 0
    recomputes: bool = False

    @cached_property
    def told(self) -> Script:
        """What the model does in a micro-batch."""
        return script_of(self.calls) if self.script is None else self.script

    @cached_property
    def sums(self) -> Account:
        """The account of the updates."""
        return self.account or account_of(self.updates, self.device)
