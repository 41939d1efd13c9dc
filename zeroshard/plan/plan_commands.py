"""`zeroshard plan`: a plan, or a search, as text or JSON.

Owns the arguments and their errors. It prints through functions of `cli.py`, and imports typer only in `add_commands`.
Plans of shapes work without torch.
"""

import dataclasses
import gc
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

from zeroshard.plan.beside import table_of
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.machine.profiles import device_for
from zeroshard.plan.planning import make_plan
from zeroshard.plan.search import search
from zeroshard.plan.shape.shapes import SHAPES
from zeroshard.table.sizes import GIB

if TYPE_CHECKING:
    import typer

__all__ = ["add_commands"]

Print = Callable[[str], None]
TRIED: Final = (
    *("batch", "stage", "residency", "activations", "mesh", "tensor", "micro_batches", "no_sync"),
    *("pipe", "schedule", "chunks", "reduce", "recompute", "cut"),
)
"""Arguments of `zs.plan` that are options of the same name, and of which a search tries values."""

MOST_RANKS: Final = 1 << 24

SAME: Final = ("seq", "precision", "optimizer", "batch_tokens", "loss")
"""Arguments that a search has, too."""


def add_commands(
    app: "typer.Typer", show: Print, fail: Callable[[str | Exception], None], tell_progress: Callable[[int, int], None]
) -> None:
    """Add `plan` to the command line.

    Args:
        show: prints a text of one or more lines.
        fail: exits with a message about an error of the user.
        tell_progress: shows how many configurations of how many a search has looked at.
    """
    import typer

    def plan(
        context: typer.Context,
        model: Annotated[
            str,
            typer.Argument(
                help="A bundled shape (--list), a config.json or its folder, or package.module:function, which returns "
                "a module, or a module and its inputs."
            ),
        ] = "",
        ranks: Annotated[str, typer.Option(help="Number of processes; with --search, several: 8,16,32.")] = "8",
        device: Annotated[str, typer.Option(help="A preset, this (see doctor), or a profile.")] = "h100-80",
        batch: Annotated[int | None, typer.Option(help="Sequences per micro-batch and rank; 1 by default.")] = None,
        seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
        stage: Annotated[str | None, typer.Option(help="ZeRO stage, 0 to 3, or auto.")] = None,
        residency: Annotated[str | None, typer.Option(help="Configuration of the ZeRO paper, C1 to C5.")] = None,
        activations: Annotated[str | None, typer.Option(help="recompute, recompute-rest, ..., joined by +.")] = None,
        offload: Annotated[
            str | None,
            typer.Option(help="host, /folder, states=0.6,parameters=1,to=/folder, auto, or, with --search, none."),
        ] = None,
        precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, or paper (the paper's).")] = None,
        mesh: Annotated[int, typer.Option("--replicas", "--mesh", help="Copies of the sharded state.")] = 1,
        tensor: Annotated[int, typer.Option(help="Ranks of tensor parallelism.")] = 1,
        pipe: Annotated[int, typer.Option(help="Places of a pipe.")] = 1,
        schedule: Annotated[str, typer.Option(help="Of micro-batches: 1f1b, gpipe, interleaved, naive.")] = "1f1b",
        chunks: Annotated[int | None, typer.Option(help="Chunks of a place, for interleaved.")] = None,
        reduce: Annotated[str, typer.Option(help="Backwards of a pipe that reduce: auto, last or each.")] = "auto",
        recompute: Annotated[bool, typer.Option("--recompute", help="Run chunks of a pipe again.")] = False,
        cut: Annotated[str | None, typer.Option(help="time: divide blocks over places by their time.")] = None,
        optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, muon, lion, ...")] = "adamw",
        micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
        batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a step; replaces --micro-batches.")] = None,
        loss: Annotated[str | None, typer.Option(help="Cross-entropy: logits, fused or chunked.")] = None,
        no_sync: Annotated[bool, typer.Option("--no-sync", help="Reduce in the last micro-batch only.")] = False,
        host: Annotated[float | None, typer.Option(min=0.001, max=1e9, help="Host memory of a node in GiB.")] = None,
        system: Annotated[
            str,
            typer.Option(
                help="Programs to compare with zeroshard, each with its own stage and offload: fsdp2,deepspeed-3,..."
            ),
        ] = "",
        as_search: Annotated[bool, typer.Option("--search", help="Try many configurations.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
        as_list: Annotated[bool, typer.Option("--list", help="List the bundled shapes and devices.")] = False,
    ) -> None:
        """Predict memory and time of a run, without a device."""
        if as_list or not model:
            show("\n".join(_known()))
            return
        try:
            where = device_for(device)
            where = where if host is None else dataclasses.replace(where, host_bytes=int(host * GIB))
            counts, same = _numbers(ranks), {name: context.params[name] for name in SAME}
            if as_search:
                if system:
                    raise ValueError("--search is of zeroshard; leave out --system, or compare single plans.")
                sources = {name: context.get_parameter_source(name) for name in TRIED}
                given = [name for name, one in sources.items() if one is not None and one.name != "DEFAULT"]
                if given:
                    option = given[0].replace("_", "-")
                    raise ValueError(f"--search has its own values of --{option}; leave it out, or use zs.search().")
                gc.disable()  # simulations are millions of tuples: looking for cycles takes a fifth of the time
                try:
                    found = search(
                        model, world_size=counts, device=where, offload=_places(offload), progress=tell_progress,
                        processes=os.cpu_count() or 1, **same,
                    )  # fmt: skip
                finally:
                    gc.enable()
                text = json.dumps(found.to_json()) if as_json else str(found)
            elif len(counts) > 1:
                raise ValueError(f"--ranks takes several numbers with --search only; got {ranks!r}.")
            else:
                same |= {"world_size": counts[0], "device": where} | {name: context.params[name] for name in TRIED}
                same["stage"] = int(stage) if stage is not None and stage.isdecimal() else stage
                made = [make_plan(model, **same, offload=offload)]
                same |= {"stage": None, "residency": None}  # a program has its own, and its own offload
                programs = [one for part in system.split(",") if (one := part.strip()) not in ("", "zeroshard")]
                made += [make_plan(model, **same, system=name) for name in programs]
                text = str(made[0]) if not programs else table_of(made)
                if as_json:
                    text = json.dumps([one.to_json() for one in made] if programs else made[0].to_json())
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
            fail(error)
        else:
            show(text)

    app.command()(plan)


def _places(asked: str | None) -> tuple[str, ...]:
    """Return the places that a search may move something to: the host, and a folder as well, or none.

    Raises:
        ValueError: an offload that says how much.
    """
    if asked is not None and asked not in ("auto", "host", "none") and not asked.startswith("/"):
        raise ValueError(
            f"--search tries how much is offloaded itself; --offload takes host, none, or a folder on a disk; got "
            f"{asked!r}."
        )
    if asked == "none":
        return ()
    return ("host",) if asked is None or not asked.startswith("/") else ("host", asked)


def _numbers(ranks: str) -> list[int]:
    """Return numbers of ranks.

    Raises:
        ValueError: a part of the text is not a number above 0.
    """
    parts = [one.strip() for one in ranks.split(",")]
    if all(one.isdecimal() and 0 < int(one) <= MOST_RANKS for one in parts):
        return [*map(int, parts)]
    raise ValueError(
        f"--ranks takes numbers from 1 to {MOST_RANKS:,}, such as 8 or, with --search, 8,16; got {ranks!r}."
    )


def _known() -> list[str]:
    sizes = (f"  {name:18} {shape.numel() / 1e9:10.3f} billion parameters" for name, shape in SHAPES.items())
    memories = (f"  {name:18} {device.memory_bytes / GIB:10.1f} GiB" for name, device in DEVICES.items())
    return ["shapes:", *sizes, "", "devices:", *memories]
