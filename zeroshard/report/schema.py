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
    """The model, by name and number of parameters; `details` are shown unchanged."""

    name: str
    parameters_numel: int
    details: NotRequired[dict[str, Option]]


class Hardware(TypedDict):
    """The memory of one device: as specified by the vendor, and usable by a program."""

    name: str
    capacity_bytes: int
    usable_bytes: int


class RankClass(TypedDict):
    """Ranks that hold the same bytes: their number, bytes between steps by column, and the peak of a step."""

    name: str
    count: int
    resident_bytes: dict[str, int]
    peak_bytes: int | None


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
    `align_numel`: a power of two up to 64, by default 1. `p95_ratio` is the 95th percentile of measured over predicted
    peaks.
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
    """One configuration of a search: tokens/s of all ranks, and the maximum peak of a rank."""

    label: str
    peak_bytes: int
    tokens_per_s: float
    is_best: bool
    verdict: Literal["fits", "tight", "no"]
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


class Losses(TypedDict):
    """The loss of a run, in nats per token, after each step; None if not finite."""

    run: str
    step: list[int]
    loss: list[float | None]


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
    """All data of a page. Views with missing data (or None) are not shown."""

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
