"""`zeroshard checkpoint`: ls, verify, diff, export, import.

Owns the arguments and the words. It prints through what `cli.py` hands it, and needs typer only when it is asked for
its commands. All of it works without torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.exchange import export, import_folder
from zeroshard.checkpoint.verify import list_checkpoints, verify
from zeroshard.core.errors import CheckpointError

if TYPE_CHECKING:
    import typer

__all__ = ["make_commands"]

Print = Callable[[str], None]
Progress = Callable[[], AbstractContextManager[Callable[[int, int], None]]]


def make_commands(line: Print, problem: Print, progress: Progress) -> "typer.Typer":
    """Return the commands.

    Args:
        line: prints a line of a result.
        problem: prints a line about something wrong.
        progress: a context that shows progress, and gives what is to be told how many bytes of how many are done.
    """
    import typer

    app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, and move them to and from other formats.")
    folder = Annotated[Path, typer.Argument(help="A checkpoint, such as runs/a/step-00000100.")]

    def ls(path: Annotated[Path, typer.Argument(help="The folder that holds checkpoints.")]) -> None:
        """List the checkpoints in a folder."""
        with _Failure(problem):
            for one in list_checkpoints(path):
                size = f"{one.nbytes / 1e6:>10.1f} MB  {one.tensors:>5} tensors, {one.world_size} ranks"
                line(f"{one.path.name}  {one.problem or f'step {one.step:>8}  {size}'}")

    def check(paths: Annotated[list[Path], typer.Argument(help="Checkpoints.")]) -> None:
        """Read every byte of checkpoints and compare it with its checksum."""
        with _Failure(problem):
            for path in paths:
                with progress() as on_bytes:
                    manifest = verify(path, on_bytes)
                nbytes = sum(entry.nbytes for entry in manifest.files.values())
                line(f"{path}: whole; step {manifest.step}, {len(manifest.tensors)} tensors, {nbytes / 1e6:.1f} MB")

    def compare(first: folder, second: folder) -> None:
        """Say what differs between two checkpoints; the exit status is 1 where something does."""
        with _Failure(problem):
            found = diff(first, second)
            for one in found:
                line(f"{one.name}: {one.what}")
        raise typer.Exit(1 if found else 0)

    def write(
        source: folder,
        target: Annotated[Path, typer.Argument(help="A new folder.")],
        config: Annotated[Path | None, typer.Option(help="config.json of the model, to be copied along.")] = None,
    ) -> None:
        """Write parameters and buffers as a folder of safetensors that transformers loads."""
        with _Failure(problem):
            line(f"{export(source, target, config=config)}: written")

    def read(
        source: Annotated[Path, typer.Argument(help="A folder of safetensors, or one file.")],
        target: Annotated[Path, typer.Argument(help="The checkpoint to be.")],
    ) -> None:
        """Make a checkpoint without optimizers of a folder of safetensors."""
        with _Failure(problem):
            line(f"{import_folder(source, target)}: written; load it with only_model=True")

    for name, command in (("ls", ls), ("verify", check), ("diff", compare), ("export", write), ("import", read)):
        app.command(name)(command)
    return app


class _Failure:
    """A context that turns an expected error into one line and exit status 1."""

    def __init__(self, problem: Print) -> None:
        self._problem = problem

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (CheckpointError, OSError)):
            self._problem(str(error))
            raise SystemExit(1)
