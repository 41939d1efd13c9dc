"""What a run measures, writes down and tells: the records, the files of a run, and who is told.

Owns the shape of `metrics.jsonl` and `summary.json`, and the `Reporter` interface. Must not know the terminal (that is
`cli.py`) nor how the numbers come about (that is `loop.py`). Read `Reporter` first, then the records.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TextIO, final

from zeroshard.train.inputs import open_input

__all__ = ["EvalRecord", "RankBytes", "Reporter", "Reporters", "RunFiles", "Start", "StepRecord", "Summary"]

Bytes = Mapping[str, int]


@final
@dataclass(frozen=True)
class Start:
    """What is known before the first step.

    Args:
        model: one line that names the model and its size.
        mesh: one line that names the ranks.
        data: one line that names the text.
        row: how the row of the residency table is called.
        cells: by column, where it lives.
        predicted_bytes: for each rank, by column.
        steps: how many there will be, in all.
        done: how many of them earlier starts of the run have made.
        folder: where the files go.
    """

    model: str
    mesh: str
    data: str
    row: str
    cells: Mapping[str, str]
    predicted_bytes: list[Bytes]
    steps: int
    done: int
    folder: Path


@final
@dataclass(frozen=True)
class StepRecord:
    """One step: `loss` in nats a token and seconds, means over all ranks; bytes are of rank 0, by column."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    resident_bytes: Bytes
    peak_bytes: Bytes


@final
@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on held-out text, after `step` steps: `loss` in nats a token, and bits a byte of the text.

    Seconds are the mean over all ranks.
    """

    step: int
    loss: float
    bits_per_byte: float
    scored_bytes: int
    eval_s: float


@final
@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: in memory by column of the residency table, sent by collective.

    Args:
        predicted_bytes: that it should hold in training.
        resident_bytes: that it held at the end of the last step, gradients included.
        peak_bytes: that it held at most, each column by itself.
        predicted_sent_bytes: that the training steps should send, by the schedule of the first one; empty where each
            of them followed an evaluation.
        sent_bytes: that the training steps sent.
        other_sent_bytes: that everything else sent: the start, evaluations, the sample.
    """

    predicted_bytes: Bytes
    resident_bytes: Bytes
    peak_bytes: Bytes
    predicted_sent_bytes: Bytes
    sent_bytes: Bytes
    other_sent_bytes: Bytes


@final
@dataclass(frozen=True)
class Summary:
    """The whole run.

    Args:
        model: one line that names it and its size.
        is_interrupted: whether it was ended before its last step.
        steps: made in all.
        resumed_at: how many were made when the run was gone on with, once for each time; `ranks` counts from the last.
        depth: of a GPT; None for other models.
        final_train_loss: mean over the last steps, up to 50, in nats a token.
        final_heldout_loss: of the last evaluation, in nats a token.
        bits_per_byte: of the last evaluation, for each byte of text; other than losses, it compares tokenizers.
        tokens_per_s: of the training steps, over all ranks.
        train_s: spent in training steps; `wall_s` also counts start, evaluations and sample.
        ranks: by rank.
        profile: the table of the profiled steps, of rank 0; empty where none was wanted.
        plan: what `zs.plan` predicts of rank 0, beside what was measured; empty on the other ranks.
    """

    name: str
    model: str
    is_interrupted: bool
    steps: int
    resumed_at: list[int]
    depth: int | None
    parameters_numel: int
    world_size: int
    stage: int
    row: str
    final_train_loss: float | None
    final_heldout_loss: float | None
    bits_per_byte: float | None
    tokens: int
    tokens_per_s: float
    train_s: float
    wall_s: float
    ranks: list[RankBytes]
    data: Mapping[str, str | int]
    sample: str
    versions: Mapping[str, str]
    profile: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)


class Reporter(Protocol):
    """Who is told what happens. Only rank 0 tells anyone."""

    def started(self, start: Start) -> None:
        """Take the banner."""

    def stepped(self, record: StepRecord) -> None:
        """Take one step."""

    def evaluated(self, record: EvalRecord) -> None:
        """Take one evaluation."""

    def saving(self, step: int) -> None:
        """Know that a checkpoint is about to be made after `step` steps: what was told must outlast it."""

    def saved(self, step: int, path: Path) -> None:
        """Take a checkpoint that is on the disk."""

    def finished(self, summary: Summary) -> None:
        """Take the end of the run, whole or interrupted."""


@final
class Reporters:
    """Several reporters as one; none of them for a rank that says nothing."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = reporters

    def started(self, start: Start) -> None:
        """Tell each."""
        for reporter in self._reporters:
            reporter.started(start)

    def stepped(self, record: StepRecord) -> None:
        """Tell each."""
        for reporter in self._reporters:
            reporter.stepped(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Tell each."""
        for reporter in self._reporters:
            reporter.evaluated(record)

    def saving(self, step: int) -> None:
        """Tell each."""
        for reporter in self._reporters:
            reporter.saving(step)

    def saved(self, step: int, path: Path) -> None:
        """Tell each."""
        for reporter in self._reporters:
            reporter.saved(step, path)

    def finished(self, summary: Summary) -> None:
        """Tell each."""
        for reporter in self._reporters:
            reporter.finished(summary)


@final
class RunFiles:
    """The folder of a run: `config.toml`, `metrics.jsonl` and `summary.json`. A reporter that writes.

    A line of `metrics.jsonl` is in the file as soon as it is told, so an interrupted run keeps what it did, and on the
    disk before a checkpoint that comes after it. So the lines up to a checkpoint are whole wherever there is one.
    A failure to write raises nothing here, where the other ranks would wait for this one: it is in `problem`, which
    ranks look at together.

    Args:
        folder: made if it is not there.
        config_toml: the resolved configuration.
        done: steps that the run has made already. Lines about later ones, from a start that was cut off after its last
            checkpoint, go: their steps are made again.
    """

    def __init__(self, folder: Path, config_toml: str, done: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._summary = folder / "summary.json"
        self._summary.unlink(missing_ok=True)
        self._path = folder / "metrics.jsonl"
        _replace(folder / "config.toml", config_toml)
        _replace(self._path, "".join(_lines_until(self._path, done)))
        self._metrics: TextIO = self._path.open("a", encoding="utf-8")
        self._failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._noted():  # closing writes what could not be written before, if anything
            self._metrics.close()

    @property
    def problem(self) -> str:
        """What keeps the files of the run from being written; empty while they are in their place."""
        try:
            if not self._failure and not os.path.samestat(self._path.stat(), os.fstat(self._metrics.fileno())):
                self._failure = f"{self._path} is another file now"
        except OSError as error:
            self._failure = f"{self._path} is not there any more ({error.strerror})"
        return self._failure

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep the first failure to write."""
        try:
            yield
        except OSError as error:
            self._failure = self._failure or f"{error.filename or self._path} cannot be written ({error.strerror})"

    def started(self, start: Start) -> None:
        """Write nothing: all of it is in the configuration or will be in the summary."""

    def stepped(self, record: StepRecord) -> None:
        """Append one step."""
        self._append("step", record)

    def evaluated(self, record: EvalRecord) -> None:
        """Append one evaluation."""
        self._append("eval", record)

    def saving(self, step: int) -> None:
        """Have all lines on the disk."""
        with self._noted():
            os.fsync(self._metrics.fileno())

    def saved(self, step: int, path: Path) -> None:
        """Write nothing: the checkpoint is there."""

    def finished(self, summary: Summary) -> None:
        """Write the summary."""
        with self._noted():
            _replace(self._summary, json.dumps(_plain(summary), indent=2) + "\n")

    def _append(self, kind: str, record: StepRecord | EvalRecord) -> None:
        with self._noted():
            self._metrics.write(json.dumps({"kind": kind, **_plain(record)}) + "\n")
            self._metrics.flush()


def _lines_until(metrics: Path, step: int) -> list[str]:
    """Return the lines about steps up to `step`; what is no whole record, and what comes after it, is left out."""
    lines: list[str] = []
    if not step or not metrics.exists():
        return lines
    with open_input(metrics, "run.name") as file:
        text = file.read().decode(errors="replace")
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        made = record.get("step") if isinstance(record, dict) else None
        if not line.endswith("\n") or not isinstance(made, int) or made > step:
            break
        lines.append(line)
    return lines


def _replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, "utf-8")
    os.replace(unfinished, path)


def _plain(value: Any) -> Any:
    """Return a record as what JSON holds. A number that is not finite becomes its name, as JSON has none."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
