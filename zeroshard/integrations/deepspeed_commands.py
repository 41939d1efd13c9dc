"""`zeroshard deepspeed check`: what becomes of each key of a DeepSpeed configuration.

Owns the command. It prints through functions of `cli.py`, and imports typer and torch only when used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["make_commands"]


def make_commands(show: Callable[[str], None], fail: Callable[[str | Exception], None]) -> "typer.Typer":
    """Return the commands.

    Args:
        show: prints a text.
        fail: exits with a message about an error of the user.
    """
    import typer

    app = typer.Typer(no_args_is_help=True, help="Read configurations of DeepSpeed.")

    def check(
        path: Annotated[Path, typer.Argument(help="DeepSpeed's JSON.")],
        ranks: Annotated[int | None, typer.Option(help="Number of processes, to check batches.", min=1)] = None,
    ) -> None:
        """Say what becomes of each key, with the arguments of zs.shard; or only what is refused, and exit with 2."""
        from zeroshard.integrations.deepspeed import from_deepspeed

        try:
            found = from_deepspeed(path, world_size=ranks)
        except (ValueError, OSError) as error:
            fail(error)
            return
        for one in found.notes:
            show(str(one))
        options = ", ".join(f"{name}={value!r}" for name, value in found.options.items())
        show(f"\nzs.shard(model, optimizer, {options})")

    app.callback()(lambda: None)  # so that `check` keeps its name while there is one command
    app.command()(check)
    return app
