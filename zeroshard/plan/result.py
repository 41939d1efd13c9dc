"""The result of a plan: bytes, seconds, a verdict, and their text.

Owns the record and derived values. It must not know how plans are made (`planning.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, final

from zeroshard.describe.exchanges import WITHOUT, Foreseen
from zeroshard.plan.job import Options
from zeroshard.plan.machine.retries import NO_RETRIES, Retries
from zeroshard.plan.margins import kind_of, margin_of
from zeroshard.plan.numbers import bar, count, seconds
from zeroshard.plan.step.film import COLUMNS, Event, Film, LaneSpan
from zeroshard.plan.trace.events import Doubt
from zeroshard.table.cells import FAR
from zeroshard.table.sizes import GIB, size_text

__all__ = ["Change", "Plan", "RankClass", "Verdict", "film_columns", "verdict_of", "wide_bytes"]


Verdict = Literal["fits", "tight", "no"]


@final
@dataclass(frozen=True)
class RankClass:
    """Ranks that hold the same bytes.

    Args:
        resident_bytes: between steps, by column.
        peak_bytes: peak of allocated bytes in a steady step.
        allocator_bytes: the same, of torch's allocator: without pages that the ranks of a host share.
        reserved_bytes: peak of bytes reserved by torch's allocator, over a first and two steady steps; on a device that
            has fewer, those that are reserved after its retries.
        elsewhere_bytes: between steps in other memories, by memory: "host" and "file".
    """

    name: str
    count: int
    resident_bytes: Mapping[str, int]
    peak_bytes: int
    allocator_bytes: int
    reserved_bytes: int
    elsewhere_bytes: Mapping[str, int]

    @property
    def fullness(self) -> tuple[int, int]:
        """A number that is larger for ranks that hold more: on the device as reserved, else in all memories."""
        return self.reserved_bytes, self.peak_bytes + sum(self.elsewhere_bytes.values())


@final
@dataclass(frozen=True)
class Change:
    """A change of the options, and its effect.

    Args:
        options, verdict, total_bytes, tokens_per_s: those of the full plan with the change.
    """

    what: str
    options: Mapping[str, str | int]
    verdict: Verdict
    total_bytes: int
    tokens_per_s: float


@final
@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a run.

    Args:
        model: its name; `parameters_numel` counts all parameters, `used_numel` those that each token
            uses, None for a module.
        options: as readable text.
        ranks: classes of ranks that hold the same bytes.
        live: tensors live at the peak, largest first: (column, unit, description, bytes).
        film: a steady step of the fullest rank; `first` is its first step.
        flops_per_step: operations of all ranks: 6 per parameter and token, and causal attention; no recomputation.
        save_bytes: host memory of an asynchronous save, at most of all ranks; 0 with islands of one launch.
        host_bytes: host memory of the processes of a node, including offloaded state.
        file_bytes: disk space of a node.
        outside_bytes: device memory outside the allocator.
        notes: effects that were not predicted, with reasons.
        units: number of elements of each unit on a tensor rank, the root first.
        element_bytes: bytes of an element of parameters, of held gradients, and of masters and states.
        activations: (bytes that a block keeps per token, number of blocks, bytes that other modules keep per token).
        owned_bytes: by rank of a replica, bytes of states of matrices that the rank updates as a whole; part of its
            states.
        moved: what offload moves, in whole buckets: "40.0% of states".
        shown: index of the class of ranks that `film`, `first` and `live` are of.
        idle: by place of a pipe, the part of the time until the last backward in which it waits for other places.
        cut: of a pipe, the modules at which the chunks after the first begin, for `zs.pipeline(cut=)`.
        later_s: of a pipe, seconds for which the place of `film` waits for the updates of others.
        compute_dtype: dtype of most operations, whose peak `mfu` counts.
        outer: the exchanges of islands, whose average wait is a part of `step_s`.
        retries: retries of the allocator, on a device with room for allocated but not for all reserved memory.
        find_changes: returns `changes` of a plan; None if they are not planned.

    ```python
    import zeroshard as zs

    plan: zs.Plan = zs.plan("gpt2", world_size=4, stage=2, device="a100-40")
    assert plan.total_bytes < plan.asked.device.memory_bytes and plan.verdict == "fits"
    ```
    """

    model: str
    parameters_numel: int
    used_numel: int | None
    asked: Options
    options: Mapping[str, str | int]
    ranks: Sequence[RankClass]
    live: Sequence[tuple[str, str, str, int]]
    film: Film
    first: Film
    flops_per_step: float
    save_bytes: int
    host_bytes: int
    file_bytes: int
    outside_bytes: int
    notes: Sequence[str]
    units: Sequence[int]
    element_bytes: tuple[int, int, int]
    activations: tuple[float, int, float]
    retries: Retries = NO_RETRIES
    owned_bytes: Sequence[int] = ()
    moved: str = ""
    shown: int = 0
    idle: Sequence[float] = ()
    cut: Sequence[str] = ()
    later_s: float = 0.0
    compute_dtype: str = "bfloat16"
    outer: Foreseen = WITHOUT
    find_changes: Callable[["Plan"], Sequence[Change]] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def changes(self) -> Sequence[Change]:
        """Changes of one option that lower memory, with their effects, fastest first; planned when first read."""
        return () if self.find_changes is None else tuple(self.find_changes(self))

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Bytes between steps on the fullest rank, by column."""
        return self.ranks[self.shown].resident_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes in a steady step."""
        return max(one.peak_bytes for one in self.ranks)

    @property
    def allocated_bytes(self) -> int:
        """Peak of bytes allocated by torch's allocator, in a steady step of the fullest rank."""
        return self.film.allocated_bytes

    @property
    def mapped_bytes(self) -> int:
        """Peak of bytes in pages shared by the ranks of a host, of the fullest rank; nonzero only on CPUs."""
        return self.film.mapped_bytes

    @property
    def excess_bytes(self) -> float:
        """The bytes that must leave the device for the plan to have its margin; at most 0 if it has."""
        return wide_bytes(self.reserved_bytes, self.outside_bytes, self.asked) - self.asked.room_bytes

    @property
    def reserved_bytes(self) -> int:
        """Peak of bytes reserved by torch's allocator."""
        return max(one.reserved_bytes for one in self.ranks)

    @property
    def total_bytes(self) -> int:
        """The total of a plan: peak of device memory of the fullest rank, reserved or outside torch's allocator."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def total_parts(self) -> Mapping[str, int]:
        """Parts of `total_bytes`, which are its sum: columns between steps, and what the peak adds."""
        fullest = max(self.ranks, key=lambda one: one.fullness)
        peak_bytes = min(fullest.peak_bytes, fullest.reserved_bytes)
        held = {name: nbytes for name, nbytes in fullest.resident_bytes.items() if nbytes >= LEAST_BYTES}
        return held | {
            "other, at the peak": peak_bytes - sum(held.values()),
            "reserved, unallocated": fullest.reserved_bytes - peak_bytes,
            "context, communicators": self.outside_bytes,
        }

    @property
    def runs(self) -> bool:
        """Whether the device has enough memory, perhaps after retries of the allocator."""
        return self.total_bytes <= self.asked.room_bytes

    @property
    def verdict(self) -> Verdict:
        """The verdict: "fits" with a margin for the 90th percentile of known errors, "tight" without it, or "no".

        A plan that does not count some memory, as a note then says, is at most "tight".
        """
        host_bytes = self.host_bytes * bool(self.film.host_peak_bytes)
        found = verdict_of(self.reserved_bytes, self.outside_bytes, self.asked, host_bytes)
        return "tight" if found == "fits" and any(isinstance(one, Doubt) for one in self.notes) else found

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """Seconds of a steady step: of film, allocator's retries, other places' updates and exchanges of islands."""
        between_s = self.film.step_s + self.retries.steady_s + self.later_s
        return between_s + self.outer.exposed_s(between_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.asked.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPS utilization: the model's own operations as a fraction of the devices' peak."""
        device = self.asked.device
        peak = device.peak_flops.get(self.compute_dtype, device.peak_flops["float32"])
        return self.flops_per_step / self.step_s / (peak * self.asked.world_size)

    def gpu_hours(self, tokens: float) -> float:
        """Return the device-hours for a number of tokens."""
        return tokens / self.tokens_per_s * self.asked.world_size / 3600

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; `zeroshard report` makes a page of them."""
        return {
            "version": 1,
            "model": {"name": self.model, "parameters": self.parameters_numel, "used_parameters": self.used_numel},
            "options": dict(self.options),
            "verdict": self.verdict,
            "memory": {
                "ranks": [_plain(one) for one in self.ranks],
                "peak": {
                    "bytes": self.film.peak[0],
                    "phase": self.film.peak_phase,
                    "at_s": self.film.events[self.film.peak[1]].at_s,
                    "live": [dict(zip(("column", "unit", "what", "bytes"), one, strict=True)) for one in self.live],
                },
                "first_step_peak_bytes": self.first.peak[0],
                "reserved_bytes": self.reserved_bytes,
                "outside_bytes": self.outside_bytes,
                "total_bytes": self.total_bytes,
                "total_parts": dict(self.total_parts),
                "device_bytes": self.asked.room_bytes,
                "host_bytes": self.host_bytes,
                "file_bytes": self.file_bytes,
                "offloaded_peak_bytes": self.film.host_peak_bytes,
                "save_bytes": self.save_bytes,
                "owned_bytes": list(self.owned_bytes),
                "error": dataclasses.asdict(margin_of(self.asked)),
                "retries": {"by_step": list(self.retries.by_step), "is_served": self.retries.is_served},
            },
            "traffic": dict(self.film.sent_bytes),
            "islands": self.outer.to_json(self.film.step_s),
            "time": {
                "step_s": self.step_s,
                "first_step_s": self.first.step_s,
                "compute_s": self.film.compute_s,
                "exposed_s": self.film.exposed_s,
                "offload_s": self.film.offload_s,
                "update_s": self.film.update_s,
                "allocator_s": self.retries.steady_s,
                "tokens_per_step": self.asked.tokens_per_step,
                "tokens_per_s": self.tokens_per_s,
                "mfu": self.mfu,
                "idle": list(self.idle),
                "cut": list(self.cut),
                "gpu_hours_per_1e9_tokens": self.gpu_hours(1e9),
            },
            "changes": [_plain(one) for one in self.changes],
            "notes": list(self.notes),
            "sharding": {
                "units": list(self.units),
                "element_bytes": dict(zip(("parameters", "gradients", "states"), self.element_bytes, strict=True)),
                "activations": dict(zip(("token_block_bytes", "blocks", "token_bytes"), self.activations, strict=True)),
            },
            "film": film_columns(self.film),
        }

    def __str__(self) -> str:
        return _render(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.model}: {self.verdict}, {size_text(self.total_bytes)} a rank; print() shows it>"


OF_SPANS: Final = MappingProxyType({one: one for one in ("start_s", "stop_s", "is_exposed")} | {"label": "what"})
"""Columns of a lane, with the fields of a `LaneSpan`."""


def film_columns(film: Film) -> dict[str, Any]:
    """Return a film as columns of numbers, and a list of names for their indices."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def columns(events: Sequence[Event]) -> dict[str, list[Any]]:
        return {
            "t_s": [one.at_s for one in events],
            "nbytes": [one.nbytes for one in events],
            "storage": [one.storage for one in events],
            "column": [COLUMNS.index(one.column) for one in events],
            "module": [number(one.unit or "(root)") for one in events],
            "tensor": [number(one.what) for one in events],
            "operation": [number(one.what) for one in events],
        }

    lanes: dict[str, list[LaneSpan]] = {}
    for span in film.lanes:
        lanes.setdefault(span.lane, []).append(span)
    return {
        "columns": list(COLUMNS),
        "initial": columns(film.before),
        "events": columns(film.events),
        "phases": [phase._asdict() for phase in film.phases],
        "ticks": {
            "t_s": [one.at_s for one in film.ticks],
            "kind": [one.kind for one in film.ticks],
            "unit": [number(one.unit or "(root)") for one in film.ticks],
            "nbytes": [one.nbytes for one in film.ticks],
        },
        "lanes": [
            {
                "name": name,
                "spans": {key: [getattr(one, of) for one in spans] for key, of in OF_SPANS.items()},
            }
            for name, spans in lanes.items()
        ],
        "names": list(names),
    }


def _plain(record: RankClass | Change) -> dict[str, Any]:
    """Return a record as a dictionary, including nested mappings."""
    values = {one.name: getattr(record, one.name) for one in dataclasses.fields(record)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def verdict_of(reserved_bytes: int, outside_bytes: int, options: Options, host_bytes: int = 0) -> Verdict:
    """Return whether the device has enough memory, with the known error on reserved memory.

    Args:
        host_bytes: host memory of the processes of a node, with offloading.
    """
    if reserved_bytes + outside_bytes > options.room_bytes or host_bytes > options.device.host_bytes:
        return "no"
    return "fits" if wide_bytes(reserved_bytes, outside_bytes, options) <= options.room_bytes else "tight"


def wide_bytes(reserved_bytes: int, outside_bytes: int, options: Options) -> float:
    """Return the bytes that a rank takes with the margin for the error of 90% of plans."""
    return reserved_bytes * (1 + margin_of(options).nine_tenths) + outside_bytes


LEAST_BYTES: Final = 5 << 20
"""Smaller columns are no part of their own."""
SHOWN_LIVE: Final = 6
SAYS: Final = MappingProxyType(
    {
        "fits": "FITS, with a margin for the error of 90% of plans",
        "tight": "TIGHT: fits as predicted, but without a margin for the error of 90% of plans",
        "no": "DOES NOT FIT",
    }
)


PLAIN: Final = (
    ("system", "zeroshard"),
    ("copies", 1),
    ("islands", 1),
    ("tensor", 1),
    ("pipe", 1),
    ("schedule", "none"),
    ("sequence parallel", "no"),
    ("micro-batches", 1),
    ("loss", "logits"),
)
"""Default options, which are not shown."""


def _offloaded(plan: Plan) -> list[str]:
    """Return lines on state in other memories."""
    kept, lanes = plan.ranks[plan.shown].elsewhere_bytes, plan.film.busy_s
    if not kept:
        return []
    places = ", ".join(f"{size_text(nbytes)} {FAR[memory]}" for memory, nbytes in sorted(kept.items()))
    host = f"{plan.host_bytes / GIB:.1f} of {plan.asked.device.host_bytes / GIB:.1f} GiB of the node's memory"
    busy = ", ".join(f"{what} {seconds(lanes[lane])}" for lane, what in LANES.items() if lanes.get(lane))
    return [
        f"offloaded           {places}, per rank; peak {plan.film.host_peak_bytes / GIB:.2f} on the host; {host}",
        f"offloaded part      {plan.moved}, in whole buckets",
        f"offload lanes       {busy}",
    ]


def _margin(plan: Plan) -> str:
    """Return a line on the margin of the verdict."""
    found, kind = margin_of(plan.asked), kind_of(plan.asked)
    told = f"margin {found.nine_tenths:.1%}: the error of nine in ten of {found.runs}"
    if not found.is_proven:
        return f"margin {found.nine_tenths:.1%}: not proven on runs of this kind ({kind}); the widest"
    if plan.asked.device.is_cpu:
        return f"{told} {found.left_out}"
    return f"{told} published runs of this kind ({kind}), one {found.left_out} left out"


def _fullest(plan: Plan) -> str:
    return f", of the fullest place ({plan.ranks[plan.shown].name})" if plan.idle else ""


def _places(plan: Plan) -> list[str]:
    """Return lines on the places of a pipe."""
    if not plan.idle:
        return []
    own = [[one for one in plan.ranks if one.name.split(",")[0] == f"place {n}"] for n in range(len(plan.idle))]
    peaks = [max(one.peak_bytes for one in some) for some in own]
    return [
        "peak by place, GiB  " + ", ".join(f"{nbytes / GIB:.2f}" for nbytes in peaks),
        "chunks begin at     " + ", ".join(plan.cut),
        "idle by place       " + ", ".join(f"{part:.1%}" for part in plan.idle),
    ]


LANES: Final = MappingProxyType(
    {
        "out": "bus to the host",
        "back": "bus to the device",
        "host": "the host's processors",
        "read": "disk read",
        "write": "disk write",
    }
)
"""Labels of the lanes of offload."""


def _render(plan: Plan) -> str:
    """Return a plan as text."""
    asked, options = plan.asked, plan.options
    room_bytes, sharing = asked.room_bytes, asked.node_processes if asked.device.is_cpu else 1
    used = plan.used_numel or plan.parameters_numel
    lines = [
        f"{plan.model}: {count(plan.parameters_numel)} parameters"
        + f" ({count(used)} used by each token)" * (used != plan.parameters_numel),
        ", ".join(f"{name} {value}" for name, value in options.items() if (name, value) not in PLAIN),
        "",
        f"memory per rank, GiB{_fullest(plan)}: {SAYS[plan.verdict]}",
    ]
    lines += [bar(name, nbytes, room_bytes) for name, nbytes in plan.total_parts.items()]
    shared = f": {asked.device.memory_bytes / GIB:.1f} for the {sharing} ranks of a node" * (sharing > 1)
    lines.append(bar("total", plan.total_bytes, room_bytes) + f" of {room_bytes / GIB:.1f}{shared}")
    lines += [_margin(plan), "", f"at the peak ({plan.film.peak_phase}):"]
    lines += [
        f"  {nbytes / GIB:8.2f}  {column}: {what}" + f" of {unit}" * bool(unit)
        for column, unit, what, nbytes in plan.live[:SHOWN_LIVE]
    ]
    film = plan.film
    parts = {"computing": film.compute_s, "waiting for others": film.exposed_s, "update": film.update_s}
    if film.elsewhere_bytes:
        parts["waiting for offload"] = film.offload_s
    if plan.retries.steady:
        parts["allocator"] = plan.retries.steady_s
    each = plan.tokens_per_s / plan.asked.world_size
    lines += [
        "",
        f"time per step       {seconds(plan.step_s)}: "
        + ", ".join(f"{name} {seconds(took_s)}" for name, took_s in parts.items()),
        f"speed               {plan.tokens_per_s:,.0f} tokens/s, {each:,.0f} per rank, {plan.mfu:.1%} of the peak; "
        f"{plan.gpu_hours(1e9):,.1f} device-hours for 1e9 tokens",
        *_places(plan),
        *plan.outer.lines(film.step_s),
        "sent per rank       "
        + (", ".join(f"{kind} {size_text(nbytes)}" for kind, nbytes in film.sent_bytes.items()) or "nothing"),
        f"first step          peak {size_text(plan.first.peak[0])}, {seconds(plan.first.step_s)}",
        *[f"asynchronous save   {size_text(plan.save_bytes)} of host memory per rank"] * (plan.asked.islands == 1),
        *_offloaded(plan),
        *[f"allocator           {plan.retries}" for _ in plan.retries.by_step[:1]],
    ]
    if plan.verdict != "fits" and plan.changes:
        lines += ["", "changes that save memory, fastest first:"]
        lines += [
            f"  {one.what:26} {one.total_bytes / GIB:7.1f} GiB  {one.tokens_per_s:12,.0f} tokens/s  {one.verdict}"
            for one in plan.changes
        ]
        if all(one.verdict != "fits" for one in plan.changes):
            lines.append("  no single change is enough; --search tries combinations")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)
