"""`zeroshard checkpoint`: ls, verify, diff, export, import.

Owns the arguments and the output. It prints through functions of `cli.py`, line by line, and imports typer only in
`make_commands`. All commands work without torch.

Note: names
    Checkpoints may come from untrusted sources. Unprintable characters in names of folders, files and tensors,
    including ends of lines, are printed as escapes: a name can neither control the terminal nor imitate a line of the
    output.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.folders import export
from zeroshard.checkpoint.imports import described, import_checkpoint
from zeroshard.checkpoint.verify import list_below, verify
from zeroshard.table.errors import CheckpointError, printable
from zeroshard.table.sizes import size_text

if TYPE_CHECKING:
    import typer

__all__ = ["make_commands"]

Print = Callable[[str], None]
_TROUBLE: Final = 2
"""Exit status of an error where 1 is a result."""
Progress = Callable[[], AbstractContextManager[Callable[[int, int], None]]]


def make_commands(line: Print, problem: Print, progress: Progress) -> "typer.Typer":
    """Return the commands.

    Args:
        line: prints a line of the result.
        problem: prints a line about a problem.
        progress: a context that shows progress, and yields a function of (bytes done, total bytes).
    """
    import typer

    app = typer.Typer(no_args_is_help=True, help="List, verify, compare, export and import checkpoints.")
    say = _in_one_line(line)
    failure, trouble = (_Failure(_in_one_line(problem), status) for status in (1, _TROUBLE))
    folder = Annotated[Path, typer.Argument(help="A checkpoint, such as runs/a/step-00000100.")]

    def ls(path: Annotated[Path, typer.Argument(help="The folder that holds checkpoints.")]) -> None:
        """List the checkpoints in a folder and in the folders below it."""
        with failure:
            found = list_below(path)
            for one in found:
                size = f"{size_text(one.nbytes):>12}  {one.tensors:>5} tensors, {one.world_size} ranks"
                name = path.name if one.path == path else one.path.relative_to(path)
                say(f"{name}  {one.problem or f'step {one.step:>8}  {size}'}")
            if not found:
                say(f"{path}: no checkpoints, neither here nor in folders below")

    def check(paths: Annotated[list[Path], typer.Argument(help="Checkpoints.")]) -> None:
        """Read checkpoints completely and verify their checksums."""
        with failure:
            for path in paths:
                with progress() as on_bytes:
                    manifest = verify(path, on_bytes)
                nbytes = sum(entry.nbytes for entry in manifest.files.values())
                say(f"{path}: whole; step {manifest.step}, {len(manifest.tensors)} tensors, {size_text(nbytes)}")

    def compare(first: folder, second: folder) -> None:
        """Print the differences between two checkpoints; the exit status is 1 if there are any, 2 after an error."""
        with trouble:
            found = diff(first, second)
            for one in found:
                say(f"{one.name}: {one.what}")
        raise typer.Exit(1 if found else 0)

    def write(
        source: folder,
        target: Annotated[Path, typer.Argument(help="A new folder.")],
        config: Annotated[Path | None, typer.Option(help="config.json of the model, or adapter_config.json.")] = None,
    ) -> None:
        """Export parameters and buffers for transformers, or a LoRA adapter for peft."""
        with failure:
            say(f"{export(source, target, config=config)}: written")

    def read(
        source: Annotated[
            Path,
            typer.Argument(help="A file or folder: safetensors, torch.save (zero_to_fp32.py), DCP (FSDP2)."),
        ],
        target: Annotated[Path, typer.Argument(help="The new checkpoint.")],
        model: Annotated[str | None, typer.Option(help="Of a DCP folder: keys to the model, as in app.model.")] = None,
        optimizer: Annotated[str | None, typer.Option(help="Of a DCP folder: the optimizer's class.")] = None,
        model_only: Annotated[bool, typer.Option("--model-only", help="Leave optimizers out.")] = False,
    ) -> None:
        """Create a checkpoint from another program's: a model, and the optimizers of a DCP folder (FSDP2)."""
        with failure:
            path = import_checkpoint(source, target, model=model, optimizer=optimizer, model_only=model_only)
            say(f"{path}: written; {described(path)}")

    for name, command in (("ls", ls), ("verify", check), ("diff", compare), ("export", write), ("import", read)):
        app.command(name)(command)
    return app


def _in_one_line(show: Print) -> Print:
    """Return a function that prints a text as one line of printable characters."""
    return lambda text: show(printable(text, keeps=""))


class _Failure:
    """A context that turns an expected error into one line and an exit status."""

    def __init__(self, problem: Print, status: int) -> None:
        self._problem, self._status = problem, status

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (CheckpointError, OSError)):
            self._problem(str(error))
            raise SystemExit(self._status)
