"""What the command line shows of a training: a banner, progress, evaluations, and the result.

Owns the layout on a terminal and in a file. It must not know how a run trains: `train/metrics.py` has the records that
it is given. Needs rich (the extra `zeroshard[cli]`).
"""

import math
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TextIO, final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from zeroshard.table.errors import printable
from zeroshard.table.sizes import size_text
from zeroshard.train.metrics import EvalRecord, RankBytes, Start, StepRecord, Summary

__all__ = ["Terminal", "progress_of_bytes", "spark"]

_COLUMNS: Final = ("states", "gradients", "parameters", "padding", "transient")
_PLAIN_WIDTH: Final = 100
_WIDE: Final = 110
"""Columns of a terminal that shows progress in one line."""
_INDENT: Final = 7
"""Columns before the facts of a run."""
_LEAST_WIDTH: Final = 20
_COMMANDS: Final = ("next", "")
"""Labels of facts that are commands."""
_SPARK: Final = 40
"""Characters of the curve of the loss."""
_BLOCKS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_KEPT_IN_SAMPLE: Final = "\n\t\u00a0\u200c\u200d"
"""Unprintable characters that belong to text: ends of lines, tabs, spaces and joiners of writing systems."""


class _Output:
    """Standard output, whose reader may end before the run does (`zeroshard train | head`), or whose disk may be full.

    A run must not be lost to either: it continues without output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            _discard(self._stream)
            is_closed = isinstance(error, BrokenPipeError)
            why = "is closed" if is_closed else f"cannot be written ({error.strerror})"
            try:
                sys.stderr.write(f"zeroshard: standard output {why}; the run continues\n")
                sys.stderr.flush()
            except OSError:
                _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Have what is written to a stream from here on dropped, also at the end of the process."""
    # A stream of a notebook or of a test has no file.
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


@final
class Terminal:
    """A reporter for people: a banner, a progress bar or lines, evaluations, and the result as the last lines.

    As a context manager it restores the terminal on exit.

    Args:
        log_every: steps between lines if the output is not a terminal.
        console: the output; standard output by default.
        is_verbose: whether tables of every rank's bytes stand above the result.
    """

    def __init__(self, *, log_every: int, console: Console | None = None, is_verbose: bool = False) -> None:
        self._console = console or Console(highlight=False, file=_Output(sys.stdout))  # type: ignore[arg-type]
        if not self._console.is_terminal:
            self._console.width = _PLAIN_WIDTH
        self._log_every, self._is_verbose = log_every, is_verbose
        self._steps = self._done = 0
        self._train_s = 0.0
        self._losses: list[float] = []
        self._folder = Path()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def started(self, start: Start) -> None:
        """Print the banner, and start the progress bar on a terminal."""
        self._steps, self._done, self._folder = start.steps, start.done, start.folder
        facts = {"model": start.model, "mesh": f"{start.mesh}, {start.row}", "data": start.data}
        facts["files"] = f"{start.folder}/"
        if start.done:
            facts["start"] = f"after step {start.done} of {start.steps}, from its checkpoint"
        if start.changes:
            facts["new"] = "; ".join(start.changes)
        for label, fact in facts.items():
            self._tell(label, fact)
        if self._is_verbose:
            self._console.print(_residency_table(start))
        if self._console.is_terminal:
            self._progress = _make_progress(self._console)
            self._progress.start()
            self._progress.add_task("train", total=start.steps, completed=start.done, status="")

    def _tell(self, label: str, fact: str) -> None:
        """Print one fact; on a terminal the lines of a long one end between words, but commands stay whole."""
        text = printable(fact)
        if self._console.is_terminal and label not in _COMMANDS:
            width = max(_LEAST_WIDTH, self._console.width - _INDENT)
            lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            text = f"\n{' ' * _INDENT}".join(lines)
        self._console.print(Text.assemble((f"{label:<{_INDENT - 1}}", "bold"), f" {text}"), soft_wrap=True)

    def stepped(self, record: StepRecord) -> None:
        """Move the bar, or print a line every `log_every` steps."""
        self._train_s += record.step_s
        self._losses.append(record.loss)
        held_bytes = sum(record.resident_bytes.values())
        # A narrow bar has two lines, because a terminal cuts what is too long for it.
        between = "\n" if self._progress is not None and self._console.width < _WIDE else "  "
        status = (
            f"loss {record.loss:.4f}  lr {record.learning_rate:.2e}  norm {record.grad_norm:.2f}{between}"
            f"{record.tokens_per_s:,.0f} tokens/s  {_of_peak(record.mfu)}{size_text(held_bytes)}/rank"
        )
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record.step, status=status)
        elif record.step % self._log_every == 0 or record.step in (self._done + 1, self._steps):
            left_s = self._train_s / (record.step - self._done) * (self._steps - record.step)
            line = f"step {record.step:>5}/{self._steps}  {status}  {_minutes(left_s)} left"
            self._console.print(line, soft_wrap=True)

    def evaluated(self, record: EvalRecord) -> None:
        """Print one evaluation."""
        self._console.print(
            f"[bold]eval[/bold] after step {record.step}: [bold]{record.bits_per_byte:.4f} bits per byte[/bold] on "
            f"{record.scored_bytes:,} held-out bytes, {record.eval_s:.1f} s",
            soft_wrap=True,
        )

    def saving(self, step: int) -> None:
        """Print nothing yet."""

    def saved(self, step: int, path: Path) -> None:
        """Print the path of the checkpoint."""
        self._console.print(Text.assemble(("saved", "bold"), printable(f" after step {step}: {path}")), soft_wrap=True)

    def finished(self, summary: Summary) -> None:
        """Print the sample, tables on request, and the result, which stands last."""
        if self._progress is not None:
            self._progress.stop()
        if summary.sample:
            self._console.rule("sample")
            self._console.print(Text(printable(summary.sample, _KEPT_IN_SAMPLE)))
            self._console.rule()
        if self._is_verbose:
            self._console.print(_memory_table(summary.ranks))
            self._console.print(_traffic_table(summary.ranks))
            if summary.plan:
                self._console.print(_plan_table(summary.plan))
        if summary.pipe > 1:
            self._console.print(_places_table(summary))
        if summary.profile:
            self._console.print(Text(printable(summary.profile)), soft_wrap=True)
        for label, fact in _result(summary, self._losses, self._folder).items():
            self._tell(label, fact)


def _result(summary: Summary, losses: Sequence[float], folder: Path) -> Mapping[str, str]:
    """Return the result of a run: what came out, how fast, in how much memory, where it lies, and what to do next.

    Args:
        losses: of the steps of this start.
    """
    state = f"interrupted after step {summary.steps:,}" if summary.is_interrupted else f"{summary.steps:,} steps"
    score = "not evaluated"
    if summary.bits_per_byte is not None:
        score = f"{summary.bits_per_byte:.4f} bits per byte held out"
        if summary.final_heldout_loss is not None:
            score += f", loss {summary.final_heldout_loss:.4f}"
    found = {"score": f"{score}; {state}, {_minutes(summary.wall_s)} in all"}
    if losses:
        ends = f"{losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"
        found["loss"] = f"{ends}  {spark(losses, _SPARK)}"
    found["speed"] = f"{summary.tokens_per_s:,.0f} tokens/s" + (
        f", {summary.mfu:.1%} of the devices' peak (MFU)" if summary.mfu is not None else ""
    )
    found["memory"] = _peaks(summary)
    found["run"] = f"{folder}/"
    again = shlex.quote(str(folder))
    found["next"] = f"zeroshard generate {again} --prompt 'The '"
    found[""] = f"zeroshard report {again}"
    if summary.is_interrupted:
        found["next"], found[""] = "the same command goes on from here", f"zeroshard plot {again}"
    return found


def _peaks(summary: Summary) -> str:
    """Return the peak of the fullest rank, predicted and measured: of torch's allocator, or where there is none the
    bytes that the engine counts: model states, and at most the buffers beside them.
    """
    predicted, measured = (summary.plan.get(name, {}).get("peak_bytes") for name in ("predicted", "measured"))
    if predicted and measured:
        return f"at most {size_text(predicted)} a rank predicted, {size_text(measured)} measured, by torch's allocator"
    columns = _COLUMNS
    by_rank = [
        (
            sum(one.predicted_bytes.get(c, 0) for c in columns),
            sum((one.peak_bytes if c == "transient" else one.resident_bytes).get(c, 0) for c in columns),
        )
        for one in summary.ranks
    ]
    planned, held = max(by_rank, key=lambda pair: pair[1])
    return f"{size_text(planned)} a rank predicted, {size_text(held)} measured: model states and buffers"


def spark(values: Sequence[float], width: int) -> str:
    """Return a small curve of numbers: means of equal parts, as blocks of eight heights.

    >>> from zeroshard.terminal import spark
    >>> spark([3.0, 2.0, 1.0], 40)
    '█▅▁'
    """
    count = min(width, len(values))
    parts = [values[len(values) * k // count : len(values) * (k + 1) // count] for k in range(count)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    heights = [(mean - low) / span if span else 0.0 for mean in means if math.isfinite(mean)]
    drawn = iter(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in heights)
    return "".join(next(drawn) if math.isfinite(mean) else "x" for mean in means)


def _of_peak(mfu: float | None) -> str:
    return "" if mfu is None else f"MFU {mfu:.0%}  "


def _residency_table(start: Start) -> Table:
    """Return where each column of the training state lives, and the bytes predicted for each rank."""
    table = Table(title="Residency", title_justify="left")
    for heading in ("", *start.cells):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(start.row, *start.cells.values())
    for rank, predicted in enumerate(start.predicted_bytes):
        held = [f"{predicted[cell]:,}" if cell in predicted else "" for cell in start.cells]
        table.add_row(f"rank {rank}, predicted bytes", *held)
    return table


def _make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
    )


def _memory_table(ranks: Sequence[RankBytes]) -> Table:
    """Return a table of predicted and measured bytes in memory by rank."""
    columns = [*_COLUMNS, *({"activations"} & ranks[0].peak_bytes.keys())]
    table = _make_table("Bytes in memory after the last backward (transient, activations: at most)", columns)
    for rank, of_rank in enumerate(ranks):
        at_most = {name: nbytes for name, nbytes in of_rank.peak_bytes.items() if name in ("transient", "activations")}
        _add_pair(table, rank, of_rank.predicted_bytes, {**of_rank.resident_bytes, **at_most}, columns)
    return table


def _traffic_table(ranks: Sequence[RankBytes]) -> Table:
    """Return a table of predicted and measured bytes sent in training steps, and of other bytes sent, by rank."""
    kinds = tuple(dict.fromkeys((*ranks[0].predicted_sent_bytes, *ranks[0].sent_bytes)))
    table = _make_table("Bytes sent in training steps", kinds)
    for rank, of_rank in enumerate(ranks):
        _add_pair(table, rank, of_rank.predicted_sent_bytes, of_rank.sent_bytes, kinds)
        table.add_row("  outside steps", *(f"{of_rank.other_sent_bytes.get(kind, 0):,}" for kind in kinds))
    return table


def _places_table(summary: Summary) -> Table:
    """Return a table of the places of a pipeline: how long they wait for each other, and the memory of a rank."""
    title = f"Places of the pipeline: {summary.schedule}, {summary.micro_batches} micro-batches a step"
    table = _make_table(title, ("idle, planned", "idle", "bytes of a rank, predicted", "measured"))
    planned = summary.plan.get("predicted", {}).get("idle", [])
    each = summary.world_size // summary.pipe
    for place in range(summary.pipe):
        own = range(place * each, (place + 1) * each)
        ranks = f"ranks {own[0]} to {own[-1]}" if each > 1 else f"rank {own[0]}"
        waited = [summary.idle[rank] for rank in own if summary.idle]
        held = [
            max(sum(getattr(summary.ranks[rank], name).values()) for rank in own)
            for name in ("predicted_bytes", "resident_bytes")
        ]
        table.add_row(
            f"place {place}, {ranks}",
            f"{planned[place]:.1%}" if planned else "-",
            f"{sum(waited) / each:.1%}" if waited else "-",
            *(f"{nbytes:,}" for nbytes in held),
        )
    return table


def _plan_table(plan: Mapping[str, Any]) -> Table | Text:
    """Return the plan of rank 0 beside its measurement, or the reason why it is missing."""
    if "problem" in plan:
        return Text(printable(f"no plan: {plan['problem']}"))
    heads = {"step_s": "step, s", "tokens_per_s": "tokens/s", "peak_bytes": "allocated at most"}
    columns = tuple(plan["measured"]["resident_bytes"])
    shown_columns = ("parameters, buffers" if column == "parameters" else column for column in columns)
    title = "Plan of rank 0 beside its measurement, bytes between steps (after zero_grad)"
    table = _make_table(title, (*shown_columns, *heads.values()))
    for name, values in (("predicted", plan["predicted"]), ("measured", plan["measured"])):
        numbers = [values[key] for key in heads]
        shown = ["-" if one is None else f"{one:,.3f}" if isinstance(one, float) else f"{one:,}" for one in numbers]
        table.add_row(name, *(f"{values['resident_bytes'][column]:,}" for column in columns), *shown)
    table.caption = printable("; ".join(plan["notes"])) or None
    return table


def _make_table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _add_pair(
    table: Table, rank: int, predicted: Mapping[str, int], measured: Mapping[str, int], columns: Iterable[str]
) -> None:
    """Add two rows for one rank: predicted ("-" if unpredictable) and measured."""
    columns = tuple(columns)
    table.add_row(f"rank {rank} predicted", *(f"{predicted[c]:,}" if c in predicted else "-" for c in columns))
    table.add_row("  measured", *(f"{measured.get(c, 0):,}" for c in columns))


def _minutes(seconds: float) -> str:
    """Write a duration as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress_of_bytes() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar in bytes on a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("bytes", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
