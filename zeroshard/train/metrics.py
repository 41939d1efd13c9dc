"""The measurements of a run: the records, the files of a run, and the interface of reporters.

Owns the format of `metrics.jsonl` and `summary.json`, and the `Reporter` interface. It must not know the terminal
(`cli.py`) or the computation of the numbers (`loop.py`). Read `Reporter` first, then the records.
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

from zeroshard.text_files import write_whole
from zeroshard.train.inputs import open_input

__all__ = ["EvalRecord", "RankBytes", "Reporter", "Reporters", "RunFiles", "Start", "StepRecord", "Summary"]

Bytes = Mapping[str, int]


@final
@dataclass(frozen=True)
class Start:
    """The facts known before the first step.

    Args:
        model: one line with the model and its size.
        mesh: one line with the ranks.
        data: one line with the text.
        row: name of the row of the residency table.
        cells: for each column, the name of its cell.
        predicted_bytes: bytes by column, for each rank.
        steps: total number of steps of the run.
        done: number of these steps that earlier starts have done.
        folder: folder of the run's files.
        changes: settings that this start changes from here on, each with both values.
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
    changes: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class StepRecord:
    """One step: `loss` (nats per token) and seconds are means over all ranks; bytes are of rank 0, by column.

    `time` is the moment in seconds since 1970 (UTC), `tokens` counts all tokens of the run up to the step, and `mfu` is
    the part of the devices' peak that the model's own products take; None where the peak is not known.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    resident_bytes: Bytes
    peak_bytes: Bytes
    time: float = 0.0
    tokens: int = 0
    mfu: float | None = None


@final
@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on held-out text after `step` steps: `loss` in nats per token, and bits per byte of the text.

    Seconds are the mean over all ranks; `time` and `tokens` as in `StepRecord`.
    """

    step: int
    loss: float
    bits_per_byte: float
    scored_bytes: int
    eval_s: float
    time: float = 0.0
    tokens: int = 0


@final
@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: in memory by column of the residency table, sent by collective.

    Args:
        predicted_bytes: predicted bytes in training.
        resident_bytes: bytes held at the end of the last step, including gradients.
        peak_bytes: peak bytes, separately for each column.
        predicted_sent_bytes: predicted bytes sent by the training steps, by the schedule of the first step; empty if
            each step followed an evaluation.
        sent_bytes: bytes sent by the training steps.
        other_sent_bytes: all other bytes sent: by the start, evaluations and the sample.
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
        model: one line with the model and its size.
        is_interrupted: whether the run ended before its last step.
        steps: total number of steps done.
        resumed_at: number of steps done at each resume; `ranks` counts from the last resume.
        depth: depth of a GPT; None for other models.
        tensor: number of ranks that split a layer, of `world_size`; each batch is divided over the rest.
        pipe: number of places of a pipeline, each of which has `world_size / pipe` ranks that follow each other.
        schedule, micro_batches: of the pipeline; "" and 0 without.
        idle: by rank, the part of the last steps, up to 50, in which it waited for other places; empty without a
            pipeline.
        final_train_loss: mean over the last steps, up to 50, in nats per token.
        final_heldout_loss: loss of the last evaluation, in nats per token.
        bits_per_byte: bits per byte of text in the last evaluation; unlike losses, comparable between tokenizers.
        tokens_per_s: tokens per second of the training steps, over all ranks.
        mfu: mean part of the devices' peak; None where it is not known.
        train_s: seconds of training steps; `wall_s` counts from the start of the command.
        ranks: bytes by rank.
        profile: the table of the profiled steps of rank 0; empty without profiled steps.
        plan: the prediction of `zs.plan` for rank 0 and the measurements; empty on the other ranks.
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
    tensor: int = 1
    pipe: int = 1
    schedule: str = ""
    micro_batches: int = 0
    idle: list[float] = field(default_factory=list)
    mfu: float | None = None


class Reporter(Protocol):
    """Receives the events of a run. Only rank 0 has reporters."""

    def started(self, start: Start) -> None:
        """Receive the facts known before the first step."""

    def stepped(self, record: StepRecord) -> None:
        """Receive the record of one step."""

    def evaluated(self, record: EvalRecord) -> None:
        """Receive the record of one evaluation."""

    def saving(self, step: int) -> None:
        """Prepare for a checkpoint after `step` steps: make everything received so far durable."""

    def saved(self, step: int, path: Path) -> None:
        """Receive the path of a checkpoint that is on disk."""

    def finished(self, summary: Summary) -> None:
        """Receive the summary at the end of the run, whether complete or interrupted."""


@final
class Reporters:
    """Forwards events to several reporters; empty on ranks that do not report."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = reporters

    def started(self, start: Start) -> None:
        """Forward to each reporter."""
        for reporter in self._reporters:
            reporter.started(start)

    def stepped(self, record: StepRecord) -> None:
        """Forward to each reporter."""
        for reporter in self._reporters:
            reporter.stepped(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Forward to each reporter."""
        for reporter in self._reporters:
            reporter.evaluated(record)

    def saving(self, step: int) -> None:
        """Forward to each reporter."""
        for reporter in self._reporters:
            reporter.saving(step)

    def saved(self, step: int, path: Path) -> None:
        """Forward to each reporter."""
        for reporter in self._reporters:
            reporter.saved(step, path)

    def finished(self, summary: Summary) -> None:
        """Forward to each reporter."""
        for reporter in self._reporters:
            reporter.finished(summary)


@final
class RunFiles:
    """The reporter that writes the files of a run: `config.toml`, `metrics.jsonl` and `summary.json`.

    Each record is appended to `metrics.jsonl` at once, so an interrupted run keeps its records. Records are flushed to
    disk before each checkpoint, so the records up to a checkpoint are complete wherever the checkpoint exists.
    A failed write raises no error here, because the other ranks would wait for this rank: `problem` describes the
    failure, and ranks check it together.

    Args:
        folder: created if missing.
        config_toml: the resolved configuration.
        done: number of steps that the run has done. Records of later steps, which a start without a further checkpoint
            left, are removed, because these steps run again.
    """

    def __init__(self, folder: Path, config_toml: str, done: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._summary = folder / "summary.json"
        self._summary.unlink(missing_ok=True)
        self._path = folder / "metrics.jsonl"
        write_whole(folder / "config.toml", config_toml)
        write_whole(self._path, "".join(_lines_until(self._path, done)))
        self._metrics: TextIO = self._path.open("a", encoding="utf-8")
        self._failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._noted():  # closing writes buffered records
            self._metrics.close()

    @property
    def problem(self) -> str:
        """Why the files of the run cannot be written; empty if they can."""
        try:
            if not self._failure and not os.path.samestat(self._path.stat(), os.fstat(self._metrics.fileno())):
                self._failure = f"{self._path} was replaced by another file"
        except OSError as error:
            self._failure = f"{self._path} was removed ({error.strerror})"
        return self._failure

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Record the first failed write."""
        try:
            yield
        except OSError as error:
            self._failure = self._failure or f"{error.filename or self._path} cannot be written ({error.strerror})"

    def started(self, start: Start) -> None:
        """Write nothing: the configuration and the summary contain these facts."""

    def stepped(self, record: StepRecord) -> None:
        """Append the record of one step."""
        self._append("step", record)

    def evaluated(self, record: EvalRecord) -> None:
        """Append the record of one evaluation."""
        self._append("eval", record)

    def saving(self, step: int) -> None:
        """Flush all records to disk."""
        with self._noted():
            os.fsync(self._metrics.fileno())

    def saved(self, step: int, path: Path) -> None:
        """Write nothing: the checkpoint is on disk."""

    def finished(self, summary: Summary) -> None:
        """Write the summary."""
        with self._noted():
            write_whole(self._summary, json.dumps(_plain(summary), indent=2) + "\n")

    def _append(self, kind: str, record: StepRecord | EvalRecord) -> None:
        with self._noted():
            self._metrics.write(json.dumps({"kind": kind, **_plain(record)}) + "\n")
            self._metrics.flush()


def _lines_until(metrics: Path, step: int) -> list[str]:
    """Return the records of steps up to `step`, without incomplete and later ones."""
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


def _plain(value: Any) -> Any:
    """Return a record as JSON values. Non-finite numbers become strings, because JSON cannot represent them."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
