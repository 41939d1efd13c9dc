"""What the report page shows, as data: the mapping that plans and runs are turned into.

Owns the names, types and units of the page's input. Must not know torch, HTML, nor where numbers come from;
`zeroshard/report/check.py` compares a mapping with it. Read `PageData` first. All data is what JSON can hold; lists
that belong together are columns of equal length, so that 100,000 events are seven lists and not 100,000 objects.
"""

from typing import Final, Literal, NotRequired, TypedDict

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
    rounded up to: a power of two up to 64, 1 if it is not given. `p95_ratio` is the peak that 95 of 100 runs stay
    below, over the predicted one.
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
