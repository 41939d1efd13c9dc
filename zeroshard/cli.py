"""The command line: training, plans, reports, tokenizers and checkpoints.

Owns arguments and errors. The commands themselves are in `zeroshard/train`, `zeroshard/plan`, `zeroshard/report` and
`zeroshard/checkpoint`; `terminal.py` shows a training. Needs typer, rich and pydantic (the extra `zeroshard[cli]`), and
names the extra if they are missing. Read `train` first.

Note: untrusted text
    Control characters in names of files, folders and models, and in generated text, are printed as escapes, and such
    text is never parsed as rich markup: `[bold]` in a name is printed literally.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NoReturn

import zeroshard
from zeroshard.table.errors import printable

try:
    import typer
except ModuleNotFoundError as error:
    _MISSING: str | None = error.name
else:
    _MISSING = None

__all__ = ["main"]

_RUNS, _PLANS, _FILES, _MORE = "Train", "Plan and understand", "Files", "More"
COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "train": (_RUNS, "Train a language model on text, with state sharded over ranks."),
        "generate": (_RUNS, "Continue a prompt with the model of a run."),
        "evaluate": (_RUNS, "Score a text, or multiple-choice questions, with the model of a run."),
        "plot": (_RUNS, "Draw the curves of runs, as text or as a page."),
        "outer": (_RUNS, "Serve mailboxes to islands that are launches of their own, or replay what one took."),
        "tokenizer": (_RUNS, "Train a byte-pair tokenizer on the training part of a text."),
        "plan": (_PLANS, "Predict memory and time of a run, without a device."),
        "doctor": (_PLANS, "Measure this machine, for plans."),
        "report": (_PLANS, "Write one self-contained HTML page of runs, plans, searches and scorecards."),
        "paper": (_PLANS, "Print tables and figures of the ZeRO paper, predicted beside published."),
        "scorecard": (_PLANS, "Predict published runs, and print the errors."),
        "checkpoint": (_FILES, "List, verify, compare, export and import checkpoints."),
        "deepspeed": (_FILES, "Read configurations of DeepSpeed."),
        "version": (_MORE, "Print the version."),
    }
)
"""Each command with its heading in the help, and what it does."""
_SHORT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"learning_rate": ("--lr",), "batch": ("--batch-size",)}
)
"""Options of settings whose names differ from the setting's."""
_DOCTOR_PATIENCE_S: Final = 10.0
_MISTAKE: Final = 2
"""Exit status of an error in the user's input."""


def main() -> None:
    """Run the command line, and end the process with its exit status."""
    _open_closed()
    if _MISSING is not None:
        _fail(f'the command line needs {_MISSING!r}; install it with: pip install "zeroshard[cli]"')
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train PyTorch models that do not fit.",
        epilog="zeroshard COMMAND --help says more. Begin with: zeroshard train",
    )
    app.callback(invoke_without_command=True)(_options)
    # Whichever click typer has: the base of its errors.
    mistakes: type[Any] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a character that an encoding lacks must not end a run
            stream.reconfigure(errors="replace")
    try:
        _add(app, next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except typer.Abort:
        sys.exit(1)
    except mistakes as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        hint = _hint(error)
        _fail(error.format_message().rstrip(".") + (f"; {hint}" if hint else ""), error.exit_code)
    except Exception as error:
        from zeroshard.train.launch import joined_world_size, shows_all
        from zeroshard.watch.cause_file import VARIABLE, text_of  # imports torch

        if joined_world_size() is not None or shows_all() or {"--verbose", "-v"} & {*sys.argv}:
            raise
        _fail(f"{text_of(error, error.__traceback__)}\n--verbose or {VARIABLE}=full shows all frames.", 1)


def _open_closed() -> None:
    """Open what the parent closed (`>&-`), so that texts are dropped, and no other file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, TextIOWrapper(FileIO(os.devnull, "w" if number else "r"), encoding="utf-8"))


def _add(app: typer.Typer, wanted: str) -> None:
    """Add the commands: the wanted one alone in full, since the modules of all take long to import."""
    adders = {
        "train": _add_train,
        **dict.fromkeys(("generate", "evaluate", "plot"), _add_run_commands),
        "plan": _add_plan,
        "outer": _add_outer,
        "checkpoint": _add_checkpoint,
        "deepspeed": _add_deepspeed,
    }
    own = {one.__name__: one for one in (tokenizer, doctor, report, paper, scorecard, version)}
    if wanted and wanted not in COMMANDS:
        from zeroshard.peers import COMMANDS as OF_OTHERS

        if wanted in OF_OTHERS:
            _fail(f"unknown command {wanted!r}; write {OF_OTHERS[wanted]}")
    if wanted in adders:
        try:
            adders[wanted](app)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("pydantic", "rich"):
                raise
            _fail(f'the command line needs {error.name!r}; install it with: pip install "zeroshard[cli]"')
        return
    for name, (panel, about) in COMMANDS.items():
        if name in own:
            app.command(rich_help_panel=panel, hidden=name == "version")(own[name])
        else:
            app.command(name, help=about, rich_help_panel=panel)(lambda: None)


def _hint(error: Exception) -> str:
    """Return what to write instead of an option that there is not."""
    asked = getattr(error, "option_name", None)
    if type(error).__name__ != "NoSuchOption" or not isinstance(asked, str) or "train" not in sys.argv[1:2]:
        return ""
    from zeroshard.train.config import full_name

    try:
        name = full_name(asked.lstrip("-").replace("-", "_"))
    except ValueError:
        return "zeroshard train --list shows all settings"
    key = name.partition(".")[2]
    context: Any = getattr(error, "ctx", None)
    known = {flag for one in context.command.params for flag in one.opts} if context is not None else set()
    flag = next((one for one in (f"--{key.replace('_', '-')}", *_SHORT.get(key, ())) if one in known), "")
    return f"write {flag} VALUE" if flag else f"write {key}=VALUE, without dashes"


def tokenizer(
    out: Annotated[Path, typer.Option(help="File to write; pass it to train as data.tokenizer=FILE.")],
    data: Annotated[str, typer.Argument(help="Text, .jsonl, .parquet, or a folder of these.")] = "",
    vocab: Annotated[int, typer.Option(help="Number of tokens, 257 or more.", max=1 << 24)] = 4096,
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
        _fail(error)
    _say(f"{vocab} tokens, from {cut:,} bytes of {source.name}, written to {out}")


def doctor(
    ranks: Annotated[int, typer.Option(help="Processes for collectives; torchrun's number has priority.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="File of the profile; --device this finds the default file.")] = None,
) -> None:
    """Measure matrix products, copies and collectives of this machine, and store the profile for plans."""
    from zeroshard.plan.machine.profiles import profile_path, write_profile
    from zeroshard.report.doctor import measure_device, measure_ranks
    from zeroshard.train.launch import follow_launcher, is_first_rank, joined_world_size, launch_ranks

    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        _fail(f"--out {out}: this is a folder, or in none; give the path of a file.")
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

    for source in sources:
        if not Path(source).exists():
            _fail(f"{source}: there is no such file or folder; give runs/NAME, or a file of `zeroshard plan --json`")
    try:
        data = read_sources(sources)
        _say(f"{write_page(data, out)}: written")
        if pictures is not None:
            _say("\n".join(str(path) for path in write_pictures(data, pictures)))
    except (ValueError, TypeError, ImportError, OSError) as error:
        _fail(error)


def paper(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.", metavar="")] = False,
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
        _fail(error)


def scorecard(
    data: Annotated[Path, typer.Option(help="CSV file of published runs; docs/plan.md lists the columns.")],
    systems: Annotated[
        Path | None, typer.Option(help="JSON file with the systems of sources; docs/plan.md has the form.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.", metavar="")] = False,
) -> None:
    """Predict published runs, and print the errors in memory and time by system and source."""
    from zeroshard.evidence.scorecard import render
    from zeroshard.evidence.scorecard import scorecard as judge
    from zeroshard.evidence.sources import read_sources

    try:
        card = judge(data, () if systems is None else read_sources(systems))
    except (ValueError, OSError) as error:
        _fail(error)
    _say(card.to_json() if as_json else render(card))


def version() -> None:
    """Print the version."""
    print(f"zeroshard {zeroshard.__version__}")


def _options(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version, and exit.", metavar="")] = False,
) -> None:
    """Handle options that precede a command."""
    if is_version:
        version()
        raise typer.Exit


def _add_train(app: typer.Typer) -> None:
    from zeroshard.terminal import Terminal
    from zeroshard.train.train_command import add_commands

    add_commands(app, _say, _fail, Terminal)


def _add_run_commands(app: typer.Typer) -> None:
    from zeroshard.train.run_commands import add_commands

    add_commands(app, _say, _fail)


def _add_plan(app: typer.Typer) -> None:
    from zeroshard.plan.plan_commands import add_commands

    add_commands(app, _say, _fail, _tell_progress)


def _tell_progress(done: int, count: int) -> None:
    """Write how far a search is, on one line of a terminal that the next text replaces."""
    if sys.stderr.isatty():
        text = f"{done:,} of {count:,} configurations; Ctrl-C shows the best of these" * (done < count)
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _add_outer(app: typer.Typer) -> None:
    from zeroshard.outer.serve_commands import add_commands

    add_commands(app, lambda text: print(printable(text), flush=True), _fail)


def _add_checkpoint(app: typer.Typer) -> None:
    from zeroshard.checkpoint.checkpoint_commands import make_commands
    from zeroshard.terminal import progress_of_bytes

    told = make_commands(print, lambda text: print(f"zeroshard: {text}", file=sys.stderr), progress_of_bytes)
    app.add_typer(told, name="checkpoint")


def _add_deepspeed(app: typer.Typer) -> None:
    from zeroshard.integrations.deepspeed_commands import make_commands

    app.add_typer(make_commands(_say, _fail), name="deepspeed")


def _say(message: str) -> None:
    """Print a line that may contain names from files."""
    print(printable(message))


def _fail(why: str | Exception, status: int = _MISTAKE) -> NoReturn:
    """Exit with a message, or with that of an error."""
    if isinstance(why, OSError) and why.filename and not why.filename2:
        why = f"{why.filename}: {why.strerror}"
    print(printable(f"zeroshard: {why}"), file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
