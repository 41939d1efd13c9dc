"""Checkpoints of other programs, written as this package's: safetensors, `torch.save`, torch.distributed.checkpoint.

Owns the choice of a reader and the writing. torch is imported only for what needs it. Read `folders.py`,
`bin_folder.py` and `dcp_folder.py` first.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from zeroshard.checkpoint import files, strict
from zeroshard.checkpoint.attempt import new_folder
from zeroshard.checkpoint.dcp_layout import METADATA
from zeroshard.checkpoint.fields import quoted
from zeroshard.checkpoint.folders import BIN, INDEX_END, FolderReader, copy_rows
from zeroshard.checkpoint.index import serialize
from zeroshard.checkpoint.manifest import EXTRA, Manifest, spread
from zeroshard.checkpoint.ranges import Spec, arrange, make_header
from zeroshard.checkpoint.reader import CheckpointReader, Source
from zeroshard.checkpoint.writer import FileWriter, write_file
from zeroshard.core.version import VERSION
from zeroshard.table.errors import CheckpointError

__all__ = ["described", "import_checkpoint"]

TORCH_ENDS: Final = (".bin", ".pt", ".pth")


def import_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    model_only: bool = False,
) -> Path:
    """Write the checkpoint of another program as one of this package.

    Of safetensors files and `torch.save`d state dicts (what DeepSpeed's `zero_to_fp32.py` writes) it has parameters and
    buffers, for `zero.load(path, model_only=True)`. Of a folder of torch.distributed.checkpoint (FSDP2) it has the
    states, groups and hyper-parameters of the optimizers, too. Generators of random numbers are in none of them: each
    rank keeps its own. Nothing that a pickle names is run: files that hold more than numbers, texts and tensors are
    refused.

    Args:
        source: a file, or a folder.
        target: the new checkpoint.
        step: its step; None takes the optimizers' largest count, or 0.
        model: in a folder of torch.distributed.checkpoint, the keys that lead to the model's state dict, joined by
            dots; None finds it.
        optimizer: the class of the optimizers in such a folder, which it does not name; None tells Adam, AdamW and SGD
            by their options.
        model_only: leave the optimizers of such a folder out.

    Raises:
        CheckpointError: the source is invalid, damaged or would run code, or the target exists.
    """
    path = Path(source)
    if (path / METADATA).exists():
        from zeroshard.checkpoint.dcp_folder import DcpFolder
        from zeroshard.checkpoint.described import pack

        folder = DcpFolder(path, model=model, model_only=model_only, optimizer=optimizer)
        if extra := folder.layout.extra:
            names = ", ".join(map(quoted, extra[:5])) + f" and {len(extra) - 5} more" * (len(extra) > 5)
            warnings.warn(
                f"{path}: what modules return from get_extra_state() is not imported: {names}. Set it after "
                "zero.load(); the next zero.save() holds it.",
                stacklevel=2,
            )
        places = {name: place for place, name in enumerate(folder.specs)}
        states = [_checked(one, places, path) for one in folder.optimizers]
        if step is None:
            step = max((one["steps"] for one in states), default=0)
        tensors = [*folder.specs.values(), *folder.states.values()]
        return _write(folder, tensors, pack(states, places), Path(target), step)
    if model is not None or optimizer is not None or model_only:
        raise CheckpointError(
            f"{path}: --model, --optimizer and --model-only are for folders of torch.distributed.checkpoint, which "
            f"have a file {METADATA}; this has none."
        )
    reader = _reader_of(path)
    return _write(reader, list(reader.specs.values()), [], Path(target), step or 0)


def _reader_of(path: Path) -> Source:
    if path.suffix in TORCH_ENDS or any((path / name).exists() for name in (BIN, f"{BIN}{INDEX_END}")):
        from zeroshard.checkpoint.bin_folder import BinFolder

        return BinFolder(path)
    if path.is_dir() and (found := [name for name in files.names_in(path) if name.endswith("_model_states.pt")]):
        raise CheckpointError(
            f"{path}: is a checkpoint of DeepSpeed's engine ({found[0]}), which only DeepSpeed reads. Run the "
            "zero_to_fp32.py that lies beside it (--safe_serialization) and import what it writes."
        )
    return FolderReader(path)


def _checked(described: dict[str, Any], places: dict[str, int], path: Path) -> dict[str, Any]:
    """Return an optimizer's description whose parameters are all in the model, each in one group."""
    grouped = [name for group in described["groups"] for name in group["params"]]
    strangers = {*grouped, *described["states"]} - places.keys()
    if strangers or len(grouped) != len({*grouped}) or not described["states"].keys() <= {*grouped}:
        name = min(strangers, default="a parameter")
        raise CheckpointError(
            f"{path}: {name} of an optimizer is not in the model, or not in exactly one group. Import the model alone "
            "(--model-only)."
        )
    return described


def _write(source: Source, specs: Iterable[Spec], optimizers: list[Any], path: Path, step: int) -> Path:
    """Write a checkpoint of one rank."""
    specs = tuple(specs)
    with new_folder(path) as folder:
        whole = ((0, spec.name, place, 0, spec.numel) for place, spec in enumerate(specs) if spec.numel)
        by_kind, (homes, *columns) = spread(whole, [spec.kind for spec in specs], 1)
        names = sorted(name for several in by_kind.values() for name in several)
        chunks = arrange(specs, names, ([names.index(home) for home in homes], *columns), str(path))
        extra = strict.dumps({"extra": {}, "loss_scale": None, "optimizers": optimizers}, EXTRA)
        entries = {EXTRA: write_file(folder / EXTRA, extra)}
        for file, name in enumerate(names):
            with FileWriter(folder / name) as writer:
                for piece in make_header(specs, chunks, file):
                    writer.write(memoryview(piece))
                for place in chunks.tensor[chunks.of_file(file)].tolist():
                    copy_rows(source, specs[place], writer)
            entries[name] = writer.entry()
        manifest = Manifest(step, 1, specs, None, entries, chunks, {"zeroshard": VERSION})
        for name, text in serialize(manifest).items():
            write_file(folder / name, text)
    return path


def described(path: Path) -> str:
    """Say in a few words what an imported checkpoint holds, and how to load it."""
    reader = CheckpointReader(path)
    names = [one["class"] for one in strict.loads(reader.read_extra(), EXTRA)["optimizers"]]
    what = f"{len(reader.specs)} tensors of the model, {len(reader.states)} states of {', '.join(names)}"
    return f"{what}; load it with zero.load(path)" if names else "load it with zero.load(path, model_only=True)"
