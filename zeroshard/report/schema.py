"""The data of the report page: the mapping that plans and runs are converted into.

Owns the names, types and units of the page's input. It must not know torch, HTML, or the source of numbers;
`zeroshard/report/check.py` validates a mapping. Read `PageData` first. All data is JSON. Related lists are columns of
equal length: 100,000 events are seven lists, not 100,000 objects.
"""

from typing import Final, Literal, NotRequired, TypedDict

__all__ = [
    "Activation",
    "Comparison",
    "Configuration",
    "Curves",
    "Defaults",
    "Events",
    "Film",
    "Hardware",
    "Heldout",
    "Lane",
    "Memory",
    "Model",
    "PageData",
    "Phase",
    "Player",
    "RankClass",
    "Result",
    "Score",
    "Source",
    "Spans",
    "Ticks",
    "VERSION",
    "Verdict",
    "Walk",
    "WalkEvent",
    "WalkState",
    "WalkStep",
    "WalkUnit",
]

VERSION: Final = 2

Option = str | int | float | bool
Verdict = Literal["fits", "tight", "no"]


class Model(TypedDict):
    """The model, by name and number of parameters; `details` are shown unchanged."""

    name: str
    parameters_numel: int
    details: NotRequired[dict[str, Option]]


class Hardware(TypedDict):
    """The memory of one device, and what of it torch's allocator can use: the rest is context and communicators."""

    name: str
    capacity_bytes: int
    usable_bytes: int


class Memory(TypedDict):
    """The total of a plan, as `Plan.total_bytes` defines it, and its parts by name, which are its sum."""

    total_bytes: int
    parts: dict[str, int]


class Result(TypedDict):
    """One number of a plan or a run; `unit` as in `Comparison`, None for a loss that is not finite."""

    what: str
    value: float | None
    unit: str


class Source(TypedDict):
    """One plan, search, run or scorecard that a page shows.

    Args:
        state: of a run: whether it did all its steps, ended before, or has no summary.
        verdict, memory: of a plan.
        options: all settings, which the page compares between sources of a kind.
        results: the most important one first.
    """

    kind: Literal["plan", "search", "run", "scorecard"]
    name: str
    state: NotRequired[Literal["complete", "interrupted", "unfinished"]]
    verdict: NotRequired[Verdict]
    model: NotRequired[Model | None]
    hardware: NotRequired[Hardware | None]
    memory: NotRequired[Memory | None]
    results: NotRequired[list[Result]]
    options: NotRequired[dict[str, Option]]


class RankClass(TypedDict):
    """Ranks that hold the same bytes.

    Args:
        resident_bytes: between steps, by column.
        peak_bytes: peak of allocated bytes in a step.
        total_bytes: device memory at the peak, as `Memory`.
        source: index into `PageData.sources`.
    """

    name: str
    count: int
    resident_bytes: dict[str, int]
    peak_bytes: int | None
    total_bytes: NotRequired[int | None]
    source: NotRequired[int]


class Events(TypedDict):
    """Allocations (`nbytes` above 0) and releases (below 0), in the order of time.

    `nbytes` is never 0. `storage` numbers an allocation: its two events share it. `column` is an index into
    `PageData.columns`; `module`, `tensor` and `operation` are indices into `PageData.names`.
    """

    t_s: list[float]
    nbytes: list[int]
    storage: list[int]
    column: list[int]
    module: list[int]
    tensor: list[int]
    operation: list[int]


class Phase(TypedDict):
    """A named part of the step, in seconds since the start of the step."""

    name: str
    start_s: float
    stop_s: float


class Ticks(TypedDict):
    """Events of the engine: `kind` as in `zeroshard.Event`, `unit` an index into `PageData.names`, bytes sent."""

    t_s: list[float]
    kind: list[str]
    unit: list[int]
    nbytes: list[int]


class Film(TypedDict):
    """Memory of one rank over one step. `initial` is the state at the start of the step; its times are not read."""

    events: Events
    initial: NotRequired[Events]
    phases: NotRequired[list[Phase]]
    ticks: NotRequired[Ticks]


class Spans(TypedDict):
    """The work of a lane with its times; `is_exposed` marks work that the computation waits for."""

    start_s: list[float]
    stop_s: list[float]
    label: list[str]
    is_exposed: list[bool]


class Lane(TypedDict):
    """One of a rank's concurrent activities: compute, gather, reduce, copy."""

    name: str
    spans: Spans


class Activation(TypedDict):
    """Bytes of activations: tokens of a micro-batch * (blocks * bytes per block + fixed bytes)."""

    bytes_per_token_block: float
    blocks: int
    fixed_bytes_per_token: float


class Defaults(TypedDict):
    """The initial sliders of the stage player; `batch` is in sequences per rank."""

    stage: int
    ranks: int
    batch: int
    sequence: int


class Player(TypedDict):
    """The inputs of the closed forms of the stage player.

    `units` are the numbers of elements of each unit, the root first. Bytes are per element. Shards are rounded up to
    `align_numel`: a power of two up to 64, by default 1. `p90_ratio` is the 90th percentile of measured over predicted
    peaks. `total_bytes` is the total of a plan at `defaults`, to which the closed forms are scaled.
    """

    units: list[int]
    parameter_bytes: float
    gradient_bytes: float
    state_bytes: float
    activation: Activation
    capacity_bytes: int
    usable_bytes: int
    align_numel: NotRequired[int]
    p90_ratio: NotRequired[float]
    defaults: NotRequired[Defaults]
    total_bytes: NotRequired[int]


class Configuration(TypedDict):
    """One configuration of a search: tokens/s of all ranks, and the total of the fullest rank, as `Memory`."""

    label: str
    total_bytes: int
    tokens_per_s: float
    is_best: bool
    verdict: Verdict
    options: dict[str, Option]


class Score(TypedDict):
    """One published or measured number, and its prediction."""

    source: str
    label: str
    metric: str
    unit: str
    predicted: float
    measured: float


class Comparison(TypedDict):
    """One number of a run, predicted before and measured during the run; `unit` "B" is shown in GiB, MiB or KiB."""

    what: str
    unit: str
    predicted: float
    measured: float


class Heldout(TypedDict):
    """The evaluations of a run: the loss on held-out text in nats per token, after each of some steps."""

    step: list[int]
    loss: list[float | None]


class Curves(TypedDict):
    """A run by step: columns of equal length, with None where a number is not finite.

    `loss` is in nats per token, `mfu` a part of the devices' peak. `memory_bytes` is of rank 0: the sum of the peaks of
    its columns, without activations. `clock_s` counts from the first step of all runs on the page, if these overlap.
    """

    run: str
    step: list[int]
    loss: list[float | None]
    learning_rate: NotRequired[list[float | None]]
    grad_norm: NotRequired[list[float | None]]
    tokens_per_s: NotRequired[list[float | None]]
    mfu: NotRequired[list[float | None]]
    memory_bytes: NotRequired[list[float | None]]
    clock_s: NotRequired[list[float | None]]
    heldout: NotRequired[Heldout]


class WalkUnit(TypedDict):
    """One unit of the model of the walk; `shard_numel` is the size of each rank's shard, including padding."""

    name: str
    numel: int
    shard_numel: int


class WalkEvent(TypedDict):
    """The fields of `zeroshard.Event` in the walk; `nbytes` is sent by each rank."""

    phase: Literal["forward", "backward", "step"]
    kind: Literal["gather", "release", "reduce", "publish", "step"]
    unit: str
    nbytes: int
    dtype: str


class WalkState(TypedDict):
    """The ranks after an event.

    `whole`, `kept` and `reduced` are names of units with gathered parameters, with an input kept for recomputation, and
    with a gradient shard. `resident_bytes` is measured: for each rank, a mapping by column.
    """

    whole: list[str]
    kept: list[str]
    reduced: list[str]
    is_updated: bool
    resident_bytes: list[dict[str, int]]


class WalkStep(TypedDict):
    """One event of the engine's trace, in a sentence, and the state after it."""

    sentence: str
    event: WalkEvent
    state: WalkState


class Walk(TypedDict):
    """One step at stage 3, event by event. `model` describes the model in one line."""

    model: str
    ranks: int
    units: list[WalkUnit]
    start: WalkState
    steps: list[WalkStep]


class PageData(TypedDict):
    """All data of a page. Views with missing data (or None) are not shown.

    `shows` says which of `sources` a view shows, by the entry of the view: {"film": [0], "curves": [1, 2]}. A view that
    it does not name shows all of them.
    """

    version: int
    title: str
    sources: NotRequired[list[Source]]
    shows: NotRequired[dict[str, list[int]]]
    columns: NotRequired[list[str]]
    ranks: NotRequired[list[RankClass] | None]
    names: NotRequired[list[str]]
    film: NotRequired[Film | None]
    lanes: NotRequired[list[Lane] | None]
    player: NotRequired[Player | None]
    frontier: NotRequired[list[Configuration] | None]
    scorecard: NotRequired[list[Score] | None]
    comparison: NotRequired[list[Comparison] | None]
    curves: NotRequired[list[Curves] | None]
    walk: NotRequired[Walk | None]
