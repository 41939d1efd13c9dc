"""`zeroshard generate`, `evaluate` and `plot`: what a run's model writes and scores, and the curves of runs.

Owns the arguments of these commands, and their output. It prints through functions of `cli.py`. `using.py` loads and
uses the model, `curves.py` draws. Imports typer only in `add_commands`.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import zeroshard as zs
from zeroshard.text_files import write_whole
from zeroshard.train.launch import follow_launcher, is_first_rank, is_own_launch, joined_world_size, launch_ranks

if TYPE_CHECKING:
    import typer

    from zeroshard.train.using import Loaded

__all__ = ["add_commands"]

Print = Callable[[str], None]
Fail = Callable[..., NoReturn]
_PATIENCE_S: Final = 60.0


def add_commands(app: "typer.Typer", show: Print, fail: Fail) -> None:
    """Add the commands to the command line.

    Args:
        show: prints a text of one or more lines.
        fail: exits with a message, and a status, by default that of an error in the user's input.
    """
    import typer

    folder = Annotated[
        Path, typer.Argument(help="The folder of a run, such as runs/default, or one of its checkpoints.")
    ]
    ranks_ = Annotated[
        int, typer.Option(help="Processes, over which the model is sharded; torchrun's have priority.", min=1)
    ]
    stage_ = Annotated[
        int, typer.Option(help="ZeRO stage; with 3 each of several ranks holds a part.", metavar="0|1|2|3")
    ]

    def generate(
        run: folder,
        prompt: Annotated[str, typer.Option(help="The text to continue.")] = "The ",
        tokens: Annotated[int, typer.Option(help="Number of tokens to add.", min=1)] = 200,
        temperature: Annotated[
            float, typer.Option(help="Of the draws; 0 takes the likeliest token.", min=0, max=100)
        ] = 0.7,
        seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0, max=2**63 - 1)] = 1,
        ranks: ranks_ = 1,
        stage: stage_ = 3,
    ) -> None:
        """Continue a prompt with the model of a run."""

        def use(loaded: "Loaded") -> None:
            from zeroshard.train.using import continue_prompt

            text = continue_prompt(loaded, prompt, tokens=tokens, temperature=temperature, seed=seed)
            if loaded.mesh.rank == 0:
                show(text)

        _on_ranks(run, ranks, stage, fail, use)

    def evaluate(
        run: folder,
        data: Annotated[
            str, typer.Option(help="Text, .jsonl, .parquet, or a folder of these, all of which is scored.")
        ] = "",
        choices: Annotated[
            str, typer.Option(help='Questions: a .jsonl of {"question": "", "choices": ["", ""], "answer": 0}.')
        ] = "",
        column: Annotated[str, typer.Option(help="Column of the text in .jsonl and .parquet.")] = "text",
        limit_bytes: Annotated[
            int, typer.Option("--bytes", help="Bytes of the text to score, at most; 0 for all.", min=0)
        ] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.", metavar="")] = False,
        ranks: ranks_ = 1,
        stage: stage_ = 3,
    ) -> None:
        """Score a text (perplexity, bits per byte) or multiple-choice questions (accuracy) with the model of a run."""
        if not data and not choices:
            fail("evaluate needs --data TEXT, --choices FILE.jsonl, or both")

        def use(loaded: "Loaded") -> None:
            from zeroshard.train.using import describe_scores, score

            scores = score(loaded, data, choices, column=column, limit_bytes=limit_bytes)
            if loaded.mesh.rank == 0:
                show(describe_scores(scores, as_json=as_json))

        _on_ranks(run, ranks, stage, fail, use)

    def plot(
        runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
        out: Annotated[
            Path | None, typer.Option("-o", "--out", help="An .svg or .html to write; without, curves are text.")
        ] = None,
        names: Annotated[
            str,
            typer.Option("--metrics", help="loss, heldout, learning_rate, grad_norm, tokens_per_s, joined by a comma."),
        ] = "loss,heldout,learning_rate,grad_norm,tokens_per_s",
        width: Annotated[int, typer.Option(help="Characters of a curve as text.", min=1)] = 60,
    ) -> None:
        """Draw the curves of runs: loss, held-out loss, learning rate, gradient norm, speed."""
        from zeroshard.train.curves import as_html, as_svg, as_text, read_curves

        if out is not None and out.suffix.lower() not in (".svg", ".html"):
            fail(f"--out writes .svg or .html; got {str(out)!r}")
        try:
            curves = read_curves(runs, names.split(","))
            if out is None:
                show(as_text(curves, width))
                return
            write_whole(out, as_html(curves) if out.suffix.lower() == ".html" else as_svg(curves))
        except (ValueError, OSError) as error:
            fail(error)
        show(f"{out}: written")

    for command in (generate, evaluate, plot):
        app.command()(command)


def _on_ranks(run: Path, ranks: int, stage: int, fail: Fail, use: Callable[["Loaded"], None]) -> None:
    """Load the model of a run on ranks, and use it on each."""
    joined = joined_world_size()
    if joined is not None:
        follow_launcher()
    elif not os.path.exists(run):  # told before the imports, which take seconds
        others: list[str] = []
        with suppress(OSError):
            others = os.listdir(run.parent)
        near = "".join(f"; did you mean {run.with_name(one)}?" for one in get_close_matches(run.name, others, 1))
        fail(f"{run} is not the folder of a run: this folder does not exist{near}")
    from zeroshard.train.using import check_run, load_run

    try:
        check_run(run, stage)
        if joined is None and ranks > 1:
            status, failure = launch_ranks(ranks, sys.argv[1:], patience_s=_PATIENCE_S)
            if failure:
                fail(failure, status)
            sys.exit(status)
        with load_run(run, stage=stage) as loaded:
            use(loaded)
    except (ValueError, ImportError, zs.CheckpointError) as error:  # on every rank alike
        if is_own_launch():
            raise
        if is_first_rank():
            fail(error)
        sys.exit(2)
