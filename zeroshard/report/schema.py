"""What the report page shows, as data: the mapping that plans and runs are turned into, and its checks.

Owns the names, types and units of the page's input. Must not know torch, HTML, nor where numbers come from. Read
`PageData` first. All data is what JSON can hold; lists that belong together are columns of equal length, so that
100,000 events are seven lists and not 100,000 objects.
"""

import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, TypedDict

__all__ = [
    "Activation",
    "Comparison",
    "Configuration",
    "Defaults",
    "Events",
    "Film",
    "Hardware",
    "Lane",
    "Losses",
    "Model",
    "PageData",
    "Phase",
    "Player",
    "RankClass",
    "Score",
    "Spans",
    "Ticks",
    "VERSION",
    "Walk",
    "WalkEvent",
    "WalkState",
    "WalkStep",
    "WalkUnit",
    "check_page",
]

VERSION: Final = 1

Option = str | int | float | bool


class Model(TypedDict):
    """The model, by name and number of parameters; `details` are shown as they are."""

    name: str
    parameters_numel: int
    details: NotRequired[dict[str, Option]]


class Hardware(TypedDict):
    """The memory of one device: what the vendor says, and what a program can use of it."""

    name: str
    capacity_bytes: int
    usable_bytes: int


class RankClass(TypedDict):
    """Ranks that hold the same: their number, bytes between steps by column, and the peak of a step."""

    name: str
    count: int
    resident_bytes: dict[str, int]
    peak_bytes: int | None


class Events(TypedDict):
    """Memory that is taken (`nbytes` above 0) and given back (below 0), in the order of time.

    `storage` numbers an allocation: its two events share it. `column` is an index into `PageData.columns`; `module`,
    `tensor` and `operation` are indices into `PageData.names`.
    """

    t_s: list[float]
    nbytes: list[int]
    storage: list[int]
    column: list[int]
    module: list[int]
    tensor: list[int]
    operation: list[int]


class Phase(TypedDict):
    """A named part of the step, in seconds since its begin."""

    name: str
    start_s: float
    stop_s: float


class Ticks(TypedDict):
    """What the engine issued: `kind` as in `zeroshard.Event`, `unit` an index into `PageData.names`, bytes sent."""

    t_s: list[float]
    kind: list[str]
    unit: list[int]
    nbytes: list[int]


class Film(TypedDict):
    """Memory of one rank over one step. `initial` is what is there when the step begins; its times are not read."""

    events: Events
    initial: NotRequired[Events]
    phases: NotRequired[list[Phase]]
    ticks: NotRequired[Ticks]


class Spans(TypedDict):
    """What a lane does and when; `is_exposed` marks what the computation waits for."""

    start_s: list[float]
    stop_s: list[float]
    label: list[str]
    is_exposed: list[bool]


class Lane(TypedDict):
    """One of the things that a rank does at the same time: compute, gather, reduce, copy."""

    name: str
    spans: Spans


class Activation(TypedDict):
    """Bytes of activations: tokens of a micro-batch times (blocks times one factor, and another)."""

    bytes_per_token_block: float
    blocks: int
    fixed_bytes_per_token: float


class Defaults(TypedDict):
    """Where the sliders of the stage player stand at first; `batch` is in sequences of one rank."""

    stage: int
    ranks: int
    batch: int
    sequence: int


class Player(TypedDict):
    """What the closed forms of the stage player read.

    `units` are elements of each unit, the root first. Bytes are of one element. `align_numel` is what shards are
    rounded up to, 1 if it is not given. `p95_ratio` is the peak that 95 of 100 runs stay below, over the predicted one.
    """

    units: list[int]
    parameter_bytes: float
    gradient_bytes: float
    state_bytes: float
    activation: Activation
    capacity_bytes: int
    usable_bytes: int
    align_numel: NotRequired[int]
    p95_ratio: NotRequired[float]
    defaults: NotRequired[Defaults]


class Configuration(TypedDict):
    """One configuration of a search: tokens/s of all ranks, and the peak of the fullest rank."""

    label: str
    peak_bytes: int
    tokens_per_s: float
    is_best: bool
    verdict: Literal["fits", "tight", "no"]
    options: dict[str, Option]


class Score(TypedDict):
    """One published or measured number, and the prediction of it."""

    source: str
    label: str
    metric: str
    unit: str
    predicted: float
    measured: float


class Comparison(TypedDict):
    """One number of a run, predicted before and measured after it; `unit` "B" is shown in GiB, MiB or KiB."""

    what: str
    unit: str
    predicted: float
    measured: float


class Losses(TypedDict):
    """The loss of a run, in nats a token, after each step; None where it was not finite."""

    run: str
    step: list[int]
    loss: list[float | None]


class WalkUnit(TypedDict):
    """One unit of the model of the walk; `shard_numel` is what each rank keeps, padding included."""

    name: str
    numel: int
    shard_numel: int


class WalkEvent(TypedDict):
    """The fields of `zeroshard.Event` that the walk shows; `nbytes` is what each rank sends."""

    phase: Literal["forward", "backward", "step"]
    kind: Literal["gather", "release", "reduce", "publish", "step"]
    unit: str
    nbytes: int
    dtype: str


class WalkState(TypedDict):
    """The ranks after an event.

    `whole`, `kept` and `reduced` are names of units: parameters gathered, input kept for recomputation, gradient shard
    held. `resident_bytes` was measured: a mapping for each rank, by column.
    """

    whole: list[str]
    kept: list[str]
    reduced: list[str]
    is_updated: bool
    resident_bytes: list[dict[str, int]]


class WalkStep(TypedDict):
    """One event of the engine's trace, in a sentence, and what it leads to."""

    sentence: str
    event: WalkEvent
    state: WalkState


class Walk(TypedDict):
    """One step at stage 3, event by event. `model` says in a line what was run."""

    model: str
    ranks: int
    units: list[WalkUnit]
    start: WalkState
    steps: list[WalkStep]


class PageData(TypedDict):
    """Everything that a page may show. A view whose data is missing (or None) is not shown."""

    version: int
    kind: Literal["plan", "run"]
    title: str
    model: NotRequired[Model | None]
    options: NotRequired[dict[str, Option] | None]
    hardware: NotRequired[Hardware | None]
    columns: NotRequired[list[str]]
    ranks: NotRequired[list[RankClass] | None]
    names: NotRequired[list[str]]
    film: NotRequired[Film | None]
    lanes: NotRequired[list[Lane] | None]
    player: NotRequired[Player | None]
    frontier: NotRequired[list[Configuration] | None]
    scorecard: NotRequired[list[Score] | None]
    comparison: NotRequired[list[Comparison] | None]
    losses: NotRequired[list[Losses] | None]
    walk: NotRequired[Walk | None]


def check_page(data: Mapping[str, Any]) -> None:
    """Check that a mapping is a `PageData` whose parts agree with one another.

    Raises:
        TypeError: an entry has another type than the schema says; the message has the path of the entry.
        ValueError: an entry is unknown or missing, columns differ in length, an index or a number is out of range, or
            memory is given back that was not taken.

    >>> from zeroshard.report.schema import check_page
    >>> check_page({"version": 1, "kind": "run", "title": "a run"})
    """
    _check(data, PageData, "data")
    if data["version"] != VERSION:
        raise ValueError(f"data.version must be {VERSION}, got {data['version']}: make the data anew")
    columns, names = data.get("columns", []), data.get("names", [])
    for place, rank in enumerate(data.get("ranks") or ()):
        if unknown := sorted(rank["resident_bytes"].keys() - set(columns)):
            raise ValueError(f"data.ranks[{place}].resident_bytes has {unknown}, which data.columns has not")
    if film := data.get("film"):
        _check_film(film, len(columns), len(names))
    for place, lane in enumerate(data.get("lanes") or ()):
        _check_lengths(lane["spans"], f"data.lanes[{place}].spans")
    for place, run in enumerate(data.get("losses") or ()):
        _check_lengths({key: run[key] for key in ("step", "loss")}, f"data.losses[{place}]")
    if (player := data.get("player")) and not player["units"]:
        raise ValueError("data.player.units is empty: give the elements of each unit, the root first")
    if walk := data.get("walk"):
        _check_walk(walk)


def _check_film(film: Film, columns: int, names: int) -> None:
    live: dict[int, tuple[int, int]] = {}
    for part in ("initial", "events"):
        if (events := film.get(part)) is None:
            continue
        where = f"data.film.{part}"
        _check_lengths(events, where)
        for key, limit in (("column", columns), ("module", names), ("tensor", names), ("operation", names)):
            _check_indices(events[key], limit, f"{where}.{key}")
        for place, (nbytes, storage, column) in enumerate(
            zip(events["nbytes"], events["storage"], events["column"], strict=True)
        ):
            if nbytes >= 0 and storage in live:
                raise ValueError(f"{where}: event {place} takes storage {storage}, which is taken already")
            if nbytes < 0 and live.pop(storage, None) != (-nbytes, column):
                raise ValueError(
                    f"{where}: event {place} gives back {-nbytes} bytes of storage {storage} in column {column}; "
                    "give back what was taken, in its column"
                )
            if nbytes >= 0:
                live[storage] = (nbytes, column)
    _check_order(film["events"]["t_s"], "data.film.events.t_s")
    if ticks := film.get("ticks"):
        _check_lengths(ticks, "data.film.ticks")
        _check_indices(ticks["unit"], names, "data.film.ticks.unit")
        _check_order(ticks["t_s"], "data.film.ticks.t_s")


def _check_walk(walk: Walk) -> None:
    units = {unit["name"] for unit in walk["units"]}
    states = [walk["start"], *(step["state"] for step in walk["steps"])]
    for place, state in enumerate(states):
        if unknown := {*state["whole"], *state["kept"], *state["reduced"]} - units:
            raise ValueError(f"data.walk: state {place} names {sorted(unknown)}, which data.walk.units has not")
        if len(state["resident_bytes"]) != walk["ranks"]:
            raise ValueError(f"data.walk: state {place} has {len(state['resident_bytes'])} ranks of {walk['ranks']}")


def _check_lengths(columns: Mapping[str, Any], where: str) -> None:
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: columns differ in length: {lengths}")


def _check_indices(values: Sequence[int], limit: int, where: str) -> None:
    if values and not (min(values) >= 0 and max(values) < limit):
        raise ValueError(f"{where}: indices must be from 0 to {limit - 1}, got {min(values)} to {max(values)}")


def _check_order(times: Sequence[float], where: str) -> None:
    for place in range(1, len(times)):
        if times[place] < times[place - 1]:
            raise ValueError(f"{where}: entry {place} is before the one in front of it; sort events by time")


def _check(value: Any, expected: Any, where: str) -> None:
    """Compare a value with an annotation, as far as the annotations of this module go."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if typing.is_typeddict(expected):
        _check_mapping(value, expected, where)
    elif origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {list(arguments)}, got {value!r}")
    elif origin in (types.UnionType, typing.Union):
        _check_union(value, arguments, where)
    elif origin is list:
        _require(isinstance(value, list), value, "a list", where)
        (entry,) = arguments
        if entry in (int, str, bool) and all(type(one) is entry for one in value):
            return  # the columns of events, at the speed of C
        for place, one in enumerate(value):
            _check(one, entry, f"{where}[{place}]")
    elif origin is dict:
        _require(isinstance(value, Mapping), value, "a mapping", where)
        for key, one in value.items():
            _require(isinstance(key, str), key, "a str as key", where)
            _check(one, arguments[1], f"{where}.{key}")
    elif expected is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(is_number, value, "a number", where)
        if not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value}")
    else:
        _require(type(value) is expected, value, "None" if expected is types.NoneType else expected.__name__, where)


def _check_mapping(value: Any, expected: Any, where: str) -> None:
    _require(isinstance(value, Mapping), value, "a mapping", where)
    annotations = typing.get_type_hints(expected)
    if missing := sorted(expected.__required_keys__ - value.keys()):
        raise ValueError(f"{where} has no {missing}")
    if unknown := sorted(value.keys() - annotations.keys()):
        raise ValueError(f"{where} has {unknown}, which {expected.__name__} does not know")
    for key, one in value.items():
        _check(one, annotations[key], f"{where}.{key}")


def _check_union(value: Any, members: Sequence[Any], where: str) -> None:
    if value is None and types.NoneType in members:
        return
    others = [member for member in members if member is not types.NoneType]
    plain = [member for member in others if isinstance(member, type) and not typing.is_typeddict(member)]
    if type(value) in plain:
        others = [type(value)]
    elif len(others) > 1:
        _require(False, value, " or ".join(member.__name__ for member in plain), where)
    _check(value, others[0], where)


def _require(is_right: bool, value: Any, expected: str, where: str) -> None:
    if not is_right:
        raise TypeError(f"{where} must be {expected}, got {type(value).__name__}: {str(value)[:80]!r}")
