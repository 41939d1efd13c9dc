"""The command line: training, plans, reports, tokenizers and checkpoints.

Owns arguments and errors. The commands themselves are in `zeroshard/train`, `zeroshard/plan`, `zeroshard/report` and
`zeroshard/checkpoint`; `terminal.py` shows a training. Needs typer, rich and pydantic (the extra `zeroshard[cli]`), and
names the extra if they are missing. Read `train` first.

Note: untrusted text
    Control characters in names of files, folders and models, and in generated text, are printed as escapes, and such
    text is never parsed as rich markup: `[bold]` in a name is printed literally.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import zeroshard
from zeroshard.table.errors import printable
from zeroshard.train.launch import (
    StopSignal,
    follow_launcher,
    is_first_rank,
    joined_world_size,
    launch_ranks,
    name_launcher,
)

try:
    import pydantic  # noqa: F401
    import typer

    from zeroshard.terminal import Terminal, progress_of_bytes
except ModuleNotFoundError as error:
    _MISSING: str | None = error.name
else:
    _MISSING = None

if TYPE_CHECKING:
    from zeroshard.train.config import Config

__all__ = ["main"]

_PROFILED_STEPS: Final = 3
_DOCTOR_PATIENCE_S: Final = 10.0
_MISTAKE: Final = 2
"""Exit status of an error in the user's input."""


def main() -> None:
    """Run the command line, and end the process with its exit status."""
    if _MISSING is not None:
        _fail(f'the command line needs {_MISSING!r}; install it with: pip install "zeroshard[cli]"')
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Train PyTorch models that do not fit.",
    )
    app.callback(invoke_without_command=True)(_options)
    app.command()(train)
    app.command()(tokenizer)
    app.command()(version)
    app.command()(doctor)
    app.command()(report)
    app.command()(paper)
    app.command()(scorecard)
    _add_plan(app)
    app.add_typer(_checkpoint_commands(), name="checkpoint")
    app.add_typer(_deepspeed_commands(), name="deepspeed")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Any setting, such as lr=0.001; --dry-run lists them."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; --dry-run prints one.")] = None,
    model: Annotated[str | None, _setting("model.source", "gpt, or hf:DIR for a local folder of transformers.")] = None,
    depth: Annotated[int | None, _setting("model.depth", "Blocks of gpt; sets width, batch, learning rate.")] = None,
    ranks: Annotated[
        int | None, _setting("run.ranks", "Processes; 0: one per GPU, or 2 on a CPU. torchrun's number has priority.")
    ] = None,
    tensor: Annotated[int | None, _setting("run.tensor", "Ranks that split each layer: tensor parallelism.")] = None,
    pipe: Annotated[int | None, _setting("run.pipe", "Places of a pipeline: the model divided by layers.")] = None,
    schedule: Annotated[str | None, _setting("run.schedule", "Order of micro-batches, with --pipe.")] = None,
    micro_batches: Annotated[
        int | None, _setting("run.micro_batches", "Micro-batches of a step, with --pipe; 0: twice as many as places.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="ZeRO stage. Default: 3.", metavar="0|1|2|3|auto")] = None,
    residency: Annotated[str | None, _setting("zero.residency", "Row of the ZeRO paper; replaces --stage.")] = None,
    activations: Annotated[
        str | None,
        _setting("zero.activations", "keep, recompute (activation checkpointing), compress, ..., joined by +."),
    ] = None,
    offload: Annotated[
        str | None,
        _setting("zero.offload", "host, /folder, states=0.6,parameters=1,to=/folder, auto."),
    ] = None,
    precision: Annotated[str | None, _setting("train.precision", "Precision of the model's computation.")] = None,
    optimizer: Annotated[str | None, _setting("train.optimizer", "Optimizer; sets the learning rate.")] = None,
    data: Annotated[
        str | None, _setting("data.path", "Text, .jsonl, .parquet, or a folder of these; none: Python's documentation.")
    ] = None,
    name: Annotated[str | None, _setting("run.name", "Files go to runs/NAME/; an existing run resumes.")] = None,
    steps: Annotated[int | None, _setting("train.steps", "Updates of the parameters.")] = None,
    seed: Annotated[int | None, _setting("run.seed", "Seed of parameters, data order and sample.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile each block with torch.compile.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Profile some steps; print where time goes.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run; fail if the run exists.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings and the plan, and exit.")
    ] = False,
) -> None:
    """Train a language model on text, with state sharded over ranks. Repeat the command to resume the run."""
    from zeroshard.train.config import AUTO, load_config, to_toml
    from zeroshard.train.resume import is_complete

    options = {
        "model.source": model,
        "model.depth": depth,
        "run.ranks": ranks,
        "run.tensor": tensor,
        "run.pipe": pipe,
        "run.schedule": schedule,
        "run.micro_batches": micro_batches,
        "zero.stage": stage,
        "zero.residency": residency,
        "zero.activations": activations,
        "zero.offload": offload,
        "train.precision": precision,
        "train.optimizer": optimizer,
        "data.path": data,
        "run.name": name,
        "train.steps": steps,
        "run.seed": seed,
        "run.profile_steps": _PROFILED_STEPS if profile else None,
        "train.compile_blocks": "true" if compiled else None,
    }
    settings = [f"{key}={value}" for key, value in options.items() if value is not None] + (overrides or [])
    joined = joined_world_size()
    if joined is not None:
        follow_launcher()
        settings.append(f"run.ranks={joined}")
    try:
        resolved = load_config(config, settings)
        if is_first_rank():
            from zeroshard.train.run import check_paths  # imports torch, which is slow

            check_paths(resolved)
        if AUTO in (resolved.zero.stage, resolved.zero.offload):
            from zeroshard.train.planned import choose_sharding

            resolved = choose_sharding(resolved)
    except ValueError as error:
        _fail(str(error))
    if dry_run:
        from zeroshard.train.planned import describe_plan, describe_text

        print(to_toml(resolved), end="")
        print("".join(f"\n# {printable(line)}" for line in (describe_text(resolved), *describe_plan(resolved))))
        return
    if is_first_rank():
        _prepare(resolved, is_fresh=fresh)
    if is_complete(resolved):
        if is_first_rank():
            _say(_complete_line(resolved))
        return
    if joined is None and resolved.run.ranks > 1:
        status, failure = launch_ranks(resolved.run.ranks, sys.argv[1:], patience_s=resolved.zero.watchdog_s)
        if failure:
            _fail(failure, status)
        sys.exit(status)
    _train(resolved)


def tokenizer(
    out: Annotated[Path, typer.Option(help="File to write; pass it to train as data.tokenizer=FILE.")],
    data: Annotated[str, typer.Argument(help="Text, .jsonl, .parquet, or a folder of these.")] = "",
    vocab: Annotated[int, typer.Option(help="Number of tokens, 257 or more.")] = 4096,
    column: Annotated[str, typer.Option(help="Column of the text in .jsonl and .parquet.")] = "text",
) -> None:
    """Train a byte-pair tokenizer on the training part of a text."""
    from zeroshard.train.config import Data
    from zeroshard.train.corpus import find_split
    from zeroshard.train.text import open_source, take
    from zeroshard.train.tokenizer import train_tokenizer

    try:
        source = open_source(data, column)
        cut, _ = find_split(source, Data().heldout_fraction)
        train_tokenizer(take(source.documents(), 0, cut), vocab, out)
    except (ValueError, ImportError, OSError) as error:
        _fail(str(error))
    _say(f"{vocab} tokens, from {cut:,} bytes of {source.name}, written to {out}")


def doctor(
    ranks: Annotated[int, typer.Option(help="Processes for collectives; torchrun's number has priority.")] = 1,
    out: Annotated[Path | None, typer.Option(help="File of the profile; --device this finds the default file.")] = None,
) -> None:
    """Measure matrix products, copies and collectives of this machine, and store the profile for plans."""
    from zeroshard.plan.machine.profiles import profile_path, write_profile
    from zeroshard.report.doctor import measure_device, measure_ranks

    joined = joined_world_size()
    if joined is None and ranks > 1:
        status, failure = launch_ranks(ranks, sys.argv[1:], patience_s=_DOCTOR_PATIENCE_S)
        if failure:
            _fail(failure, status)
        sys.exit(status)
    if joined is not None:
        follow_launcher()
    mesh = zeroshard.init()
    device = measure_ranks(measure_device(), mesh.world_size)
    if is_first_rank():
        path = out or profile_path()
        write_profile(device, path)
        peaks = ", ".join(f"{dtype} {flops / 1e12:,.2f}" for dtype, flops in device.peak_flops.items())
        _say(f"products, TFLOPS: {peaks}; memory {device.memory_bytes_per_s / 1e9:,.1f} GB/s")
        _say(f"links: {device.link_bytes_per_s / 1e9:,.2f} GB/s, {1e6 * device.hop_s:,.1f} us a hop; written to {path}")


def report(
    sources: Annotated[list[str], typer.Argument(help="Folders of runs, or files of `plan --json`.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Page to write.")] = Path("report.html"),
    pictures: Annotated[Path | None, typer.Option(help="Folder for PNG and SVG files of the figures.")] = None,
) -> None:
    """Write one self-contained HTML page of runs, plans, searches and scorecards."""
    from zeroshard.report.page import write_page
    from zeroshard.report.pictures import write_pictures
    from zeroshard.report.plans import read_sources

    try:
        data = read_sources(sources)
        _say(f"{write_page(data, out)}: written")
        if pictures is not None:
            _say("\n".join(str(path) for path in write_pictures(data, pictures)))
    except (ValueError, TypeError, ImportError, OSError) as error:
        _fail(str(error))


def paper(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG and SVG files of the figures.")] = None,
) -> None:
    """Print tables and figures of the ZeRO paper, predicted beside published: docs/paper.md."""
    from zeroshard.evidence.paper import reproduce
    from zeroshard.report.paper_plots import write_paper_plots

    found = reproduce()
    print(found.json() if as_json else found.render())
    try:
        for path in write_paper_plots(found, plots) if plots is not None else ():
            print(f"{path}: written", file=sys.stderr)
    except (ImportError, OSError) as error:
        _fail(str(error))


def scorecard(
    data: Annotated[Path, typer.Option(help="CSV file of published runs; docs/plan.md lists the columns.")],
    systems: Annotated[
        Path | None, typer.Option(help="JSON file with the systems of sources; docs/plan.md has the form.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
) -> None:
    """Predict published runs, and print the errors in memory and time by system and source."""
    from zeroshard.evidence.scorecard import render
    from zeroshard.evidence.scorecard import scorecard as judge
    from zeroshard.evidence.sources import read_sources

    try:
        card = judge(data, () if systems is None else read_sources(systems))
    except (ValueError, OSError) as error:
        _fail(str(error))
    _say(card.to_json() if as_json else render(card))


def version() -> None:
    """Print the version."""
    print(f"zeroshard {zeroshard.__version__}")


def _options(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version, and exit.")] = False,
) -> None:
    """Handle options that precede a command."""
    if is_version:
        version()
        raise typer.Exit


def _setting(name: str, about: str) -> Any:
    """Return the option of one setting, with its choices and default from `zeroshard.train.config`."""
    from zeroshard.train.config import choices_of, default_of

    default, choices = default_of(name), choices_of(name)
    shown = "none" if default == "" else str(default)
    return typer.Option(help=f"{about} Default: {shown}.", metavar="|".join(filter(None, choices)) or None)


def _checkpoint_commands() -> typer.Typer:
    """Return the checkpoint commands, which print through this module."""
    from zeroshard.checkpoint.checkpoint_commands import make_commands

    return make_commands(print, lambda text: print(f"zeroshard: {text}", file=sys.stderr), progress_of_bytes)


def _deepspeed_commands() -> typer.Typer:
    """Return the commands about DeepSpeed's configurations, which print through this module."""
    from zeroshard.integrations.deepspeed_commands import make_commands

    return make_commands(_say, _fail)


def _add_plan(app: typer.Typer) -> None:
    """Add the command `plan`, which prints through this module."""
    from zeroshard.plan.plan_commands import add_commands

    add_commands(app, _say, _fail)


def _train(config: Config) -> NoReturn:
    """Train as one rank: the only rank, or a launched rank."""
    from zeroshard.train.config import SettingsError
    from zeroshard.train.loop import train as run

    try:
        with StopSignal() as stop, Terminal(log_every=config.run.log_every) as terminal:
            summary = run(config, terminal, stop.is_wanted)
    except SettingsError as error:  # on every rank alike
        if is_first_rank():
            _fail(str(error))
        sys.exit(_MISTAKE)
    sys.exit(stop.exit_status if summary.is_interrupted else 0)


def _prepare(config: Config, *, is_fresh: bool) -> None:
    """Prepare files before ranks start, so that one process reports errors and no rank waits."""
    from zeroshard.train.resume import check_folder
    from zeroshard.train.run import prepare

    try:
        check_folder(config, is_fresh=is_fresh, launcher=name_launcher())
        prepare(config)
    except (ValueError, ImportError, OSError) as error:
        _fail(str(error))


def _say(message: str) -> None:
    """Print a line that may contain names from files."""
    print(printable(message))


def _fail(message: str, status: int = _MISTAKE) -> NoReturn:
    """Exit with a message."""
    print(printable(f"zeroshard: {message}"), file=sys.stderr)
    sys.exit(status)


def _complete_line(config: Config) -> str:
    """Return a line that says that the run is complete, and how to continue."""
    made = f"{config.folder} is complete: all {config.train.steps} steps are done"
    return f"{made}. Continue with more --steps, or start a new run with another --name."


if __name__ == "__main__":
    main()
