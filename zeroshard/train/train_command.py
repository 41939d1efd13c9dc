"""`zeroshard train`: its options, the checks before ranks start, and the launch.

Owns the arguments of the command. It prints through functions of `cli.py`. `settings.py` has the settings, `loop.py`
the training. Imports typer only in `add_commands`, and torch only where a run begins, so that help is quick.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

from zeroshard.table.errors import printable
from zeroshard.train.config import AUTO, Config, SettingsError, choices_of, default_of, load_config, to_toml
from zeroshard.train.launch import (
    StopSignal,
    follow_launcher,
    is_first_rank,
    is_own_launch,
    joined_world_size,
    launch_ranks,
    name_launcher,
    seconds_running,
)

if TYPE_CHECKING:
    import typer

__all__ = ["EXAMPLES", "add_commands"]

Print = Callable[[str], None]
_PROFILED_STEPS: Final = 3
_MISTAKE: Final = 2
"""Exit status of an error in the user's input."""

EXAMPLES: Final = """
Examples:

zeroshard train  (a small GPT on Python's documentation, in minutes)

zeroshard train --data texts/ --depth 8 --steps 3000 --lr 0.002 --name books

zeroshard train --model hf:models/llama --lora rank=16 --data notes.jsonl --precision bf16

zeroshard train --ranks 8 --stage 2 --activations recompute --compile weight_decay=0.05

zeroshard train --dry-run  (the settings, the plan, and nothing else)
"""


def add_commands(app: "typer.Typer", show: Print, fail: Callable[..., NoReturn], terminal: Callable[..., Any]) -> None:
    """Add `train` to the command line.

    Args:
        show: prints a text of one or more lines.
        fail: exits with a message, and a status, by default that of an error in the user's input.
        terminal: makes the reporter that shows a run.
    """
    import typer

    def option(name: str, about: str, panel: str, *flags: str) -> Any:
        """Return the option of one setting, with its choices and default."""
        default, choices = default_of(name), choices_of(name)
        shown = "none" if default == "" else str(default)
        if default == 0 and name in ("train.learning_rate", "train.batch"):
            shown = "the model's"
        kind = {str: "TEXT", int: "N", float: "X"}.get(type(default), "")
        metavar = "|".join(filter(None, choices)) or kind
        return typer.Option(*flags, help=f"{about} Default: {shown}.", metavar=metavar, rich_help_panel=panel)

    def flag(about: str, panel: str, *flags: str) -> Any:
        """Return an option without a value."""
        return typer.Option(*flags, help=about, rich_help_panel=panel, metavar="")

    model_, data_, train_, zero_, run_ = "Model", "Data", "Training", "Sharding and ranks", "The run"

    def train(
        overrides: Annotated[
            list[str] | None,
            typer.Argument(metavar="KEY=VALUE", help="Any other setting, such as clip=0.5; --list shows all."),
        ] = None,
        model: Annotated[
            str | None, option("model.source", "gpt, or hf:DIR for a local folder of transformers.", model_)
        ] = None,
        depth: Annotated[
            int | None, option("model.depth", "Blocks of gpt; sets width, batch, learning rate.", model_)
        ] = None,
        context: Annotated[int | None, option("model.context", "Tokens that the model sees at once.", model_)] = None,
        lora: Annotated[
            str | None,
            option("model.lora", "Train adapters alone: rank=16, or rank=16,alpha=32,targets=q_proj+v_proj.", model_),
        ] = None,
        data: Annotated[
            str | None,
            option("data.path", "Text, .jsonl, .parquet, or a folder of these; none: Python's documentation.", data_),
        ] = None,
        column: Annotated[
            str | None, option("data.column", "Column of the text in .jsonl and .parquet.", data_)
        ] = None,
        tokenizer: Annotated[
            str | None, option("data.tokenizer", "A file of `zeroshard tokenizer`, or a Hugging Face folder.", data_)
        ] = None,
        steps: Annotated[int | None, option("train.steps", "Updates of the parameters.", train_)] = None,
        lr: Annotated[float | None, option("train.learning_rate", "Maximum learning rate.", train_)] = None,
        batch_size: Annotated[
            int | None, option("train.batch", "Windows of a step, over all ranks.", train_, "--batch-size", "--batch")
        ] = None,
        accumulation: Annotated[
            int | None,
            option(
                "train.accumulation",
                "Micro-batches of a step.",
                train_,
                "--accumulation",
                "--gradient-accumulation-steps",
            ),
        ] = None,
        optimizer: Annotated[str | None, option("train.optimizer", "Sets the learning rate, too.", train_)] = None,
        precision: Annotated[
            str | None, option("train.precision", "Precision of the model's computation.", train_)
        ] = None,
        compiled: Annotated[bool, flag("Compile each block with torch.compile.", train_, "--compile")] = False,
        seed: Annotated[int | None, option("run.seed", "Seed of parameters, data order and sample.", train_)] = None,
        ranks: Annotated[
            int | None,
            option("run.ranks", "Processes; 0: one a GPU, or 2 on a CPU. torchrun's number has priority.", zero_),
        ] = None,
        stage: Annotated[
            str | None,
            typer.Option(help="ZeRO stage. Default: 3.", metavar="0|1|2|3|auto", rich_help_panel=zero_),
        ] = None,
        residency: Annotated[
            str | None, option("zero.residency", "Row of the ZeRO paper; replaces --stage.", zero_)
        ] = None,
        activations: Annotated[
            str | None,
            option(
                "zero.activations", "keep, recompute (activation checkpointing), compress, ..., joined by +.", zero_
            ),
        ] = None,
        offload: Annotated[
            str | None, option("zero.offload", "host, /folder, states=0.6,parameters=1,to=/folder, auto.", zero_)
        ] = None,
        replicas: Annotated[
            int | None,
            option("run.replicas", "Copies of the sharded state (hybrid sharding).", zero_, "--replicas", "--mesh"),
        ] = None,
        outer: Annotated[
            int | None, option("run.outer", "The copies are islands, which exchange every so many steps.", zero_)
        ] = None,
        outer_bits: Annotated[int | None, option("run.outer_bits", "Bits of an exchanged element.", zero_)] = None,
        mailbox: Annotated[
            str | None, option("run.mailbox", "host:port: this launch is one island of several.", zero_)
        ] = None,
        secret_file: Annotated[str | None, option("run.secret_file", "With --mailbox: its secret.", zero_)] = None,
        island: Annotated[
            str | None, option("run.island", "With --mailbox: which island of how many, 1/2.", zero_)
        ] = None,
        staleness: Annotated[
            str | None, option("run.staleness", "With --mailbox: exchanges that it may lead; none never waits.", zero_)
        ] = None,
        tensor: Annotated[
            int | None, option("run.tensor", "Ranks that split each layer: tensor parallelism.", zero_)
        ] = None,
        pipe: Annotated[
            int | None, option("run.pipe", "Places of a pipeline: the model divided by layers.", zero_)
        ] = None,
        schedule: Annotated[str | None, option("run.schedule", "Order of micro-batches, with --pipe.", zero_)] = None,
        micro_batches: Annotated[
            int | None, option("run.micro_batches", "With --pipe; 0: twice as many as places.", zero_)
        ] = None,
        name: Annotated[
            str | None, option("run.name", "Files go to runs/NAME/; an existing run resumes.", run_)
        ] = None,
        config: Annotated[
            Path | None,
            typer.Option(help="TOML file with settings; --dry-run prints one.", rich_help_panel=run_, metavar="FILE"),
        ] = None,
        log_to: Annotated[
            str | None, option("run.log_to", "tensorboard, wandb or mlflow, beside metrics.jsonl.", run_)
        ] = None,
        fresh: Annotated[bool, flag("Start a new run; fail if the run exists.", run_, "--fresh")] = False,
        profile: Annotated[bool, flag("Profile some steps; print where time goes.", run_, "--profile")] = False,
        verbose: Annotated[
            bool, flag("Also print bytes of each rank, and all frames of an error.", run_, "--verbose", "-v")
        ] = False,
        dry_run: Annotated[
            bool, flag("Check everything, print the settings and the plan, and exit.", run_, "--dry-run")
        ] = False,
        list_: Annotated[bool, flag("Print all settings with types and defaults, and exit.", run_, "--list")] = False,
        json_schema: Annotated[
            bool, flag("Print the JSON schema of the settings, and exit.", run_, "--json-schema")
        ] = False,
    ) -> None:
        """Train a language model on text, with state sharded over ranks. Repeat the command to resume the run."""
        if list_ or json_schema:
            from zeroshard.train.listing import list_settings, schema

            show(schema() if json_schema else list_settings())
            return
        options = {
            "model.source": model,
            "model.depth": depth,
            "model.context": context,
            "model.lora": lora,
            "data.path": data,
            "data.column": column,
            "data.tokenizer": tokenizer,
            "train.steps": steps,
            "train.learning_rate": lr,
            "train.batch": batch_size,
            "train.accumulation": accumulation,
            "train.optimizer": optimizer,
            "train.precision": precision,
            "train.compile_blocks": "true" if compiled else None,
            "run.seed": seed,
            "run.ranks": ranks,
            "zero.stage": stage,
            "zero.residency": residency,
            "zero.activations": activations,
            "zero.offload": offload,
            "run.replicas": replicas,
            "run.outer": outer,
            "run.outer_bits": outer_bits,
            "run.mailbox": mailbox,
            "run.secret_file": secret_file,
            "run.island": island,
            "run.staleness": staleness,
            "run.tensor": tensor,
            "run.pipe": pipe,
            "run.schedule": schedule,
            "run.micro_batches": micro_batches,
            "run.name": name,
            "run.log_to": log_to,
            "run.profile_steps": _PROFILED_STEPS if profile else None,
        }
        joined = joined_world_size()
        resolved = _resolve(config, options, overrides or [], joined, fail)
        if dry_run:
            _describe(resolved, show, fail)
            return
        if is_first_rank():
            _prepare(resolved, fail, is_fresh=fresh, launched=joined)
        from zeroshard.train.resume import is_complete

        if is_complete(resolved):
            if is_first_rank():
                show(_complete_line(resolved))
            return
        if joined is None and resolved.run.ranks > 1:
            patience_s = resolved.zero.watchdog_s
            status, failure = launch_ranks(resolved.run.ranks, sys.argv[1:], patience_s=patience_s, shows_all=verbose)
            if failure:
                fail(failure, status)
            sys.exit(status)
        _train(resolved, fail, lambda: terminal(log_every=resolved.run.log_every, is_verbose=verbose))

    app.command(epilog=EXAMPLES)(train)


def _resolve(
    config: Path | None,
    options: Mapping[str, object],
    overrides: list[str],
    joined: int | None,
    fail: Callable[..., NoReturn],
) -> Config:
    """Return the settings, or exit with what is wrong in them."""
    settings = [f"{key}={value}" for key, value in options.items() if value is not None] + overrides
    if joined is not None:
        follow_launcher()
        settings.append(f"run.ranks={joined}")
    try:
        resolved = load_config(config, settings)
        if is_first_rank():
            from zeroshard.train.checks import check_places  # imports torch, which is slow
            from zeroshard.train.run import check_paths
            from zeroshard.train.trackers import check_installed

            check_paths(resolved)
            check_places(resolved)
            check_installed(resolved.run.log_to)
        if AUTO in (resolved.zero.stage, resolved.zero.offload):
            from zeroshard.train.planned import choose_sharding

            resolved = choose_sharding(resolved)
    except ValueError as error:
        fail(error)
    return resolved


def _describe(config: Config, show: Print, fail: Callable[..., NoReturn]) -> None:
    from zeroshard.train.checks import check_devices
    from zeroshard.train.planned import describe_plan, describe_text

    try:
        check_devices(config)
        show(to_toml(config).rstrip("\n"))
        show("".join(f"\n# {printable(line)}" for line in (describe_text(config), *describe_plan(config))))
    except ValueError as error:
        fail(error)


def _prepare(config: Config, fail: Callable[..., NoReturn], *, is_fresh: bool, launched: int | None) -> None:
    """Prepare files before ranks start, so that one process reports errors and no rank waits."""
    from zeroshard.train.checks import check_devices, check_space
    from zeroshard.train.resume import check_contents, check_folder
    from zeroshard.train.run import prepare

    try:
        if launched is None:
            check_devices(config)
        check_folder(config, is_fresh=is_fresh, launcher=name_launcher())
        tokenizer, corpus = prepare(config)
        check_contents(config, corpus, tokenizer)
        if not is_own_launch():
            check_space(config, tokenizer)
    except (ValueError, ImportError, OSError) as error:
        fail(error)


def _train(config: Config, fail: Callable[..., NoReturn], terminal: Callable[[], Any]) -> NoReturn:
    """Train as one rank: the only rank, or a launched rank."""
    from zeroshard.train.loop import train as run

    start_s = time.perf_counter() - seconds_running()
    try:
        with StopSignal() as stop, terminal() as shown:
            summary = run(config, shown, stop.is_wanted, start_s=start_s)
    except SettingsError as error:  # on every rank alike
        if is_own_launch():
            raise  # the launcher says it
        if is_first_rank():
            fail(error)
        sys.exit(_MISTAKE)
    sys.exit(stop.exit_status if summary.is_interrupted else 0)


def _complete_line(config: Config) -> str:
    """Return a line that says that the run is complete, and how to continue."""
    made = f"{config.folder} is complete: all {config.train.steps} steps are done"
    return f"{made}. Continue with more --steps, or start a new run with another --name."
