"""The values of a model in a directory of safetensors files, read one tensor at a time.

Owns the comparison of the files with the model, and reading in pieces of bounded size. Must not know ranks, units or
the order in which tensors are asked for (`materialize.py`). Read `transformers_files.py` for names that differ, then
`Weights`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from zeroshard.transformers_files import Contents, contents_of

__all__ = ["Weights", "own_tensors", "tensors_of"]

Tensor = torch.Tensor

SLICE_BYTES = 64 * 2**20
"""What is read from a file at once."""

_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Formats of files that hold values, and not codes that need a scale."""


@final
class Weights:
    """The tensors that a directory of safetensors files gives a model, by the model's names.

    Args:
        directory: holds `*.safetensors`; every rank must see it, and rank 0 reads the values.
        model: whose names they are, or, for a model of Transformers, which is loaded from them under other names.

    Raises:
        ValueError: no such file there, one that cannot be read, or a name in two files; tensors that Transformers
            cannot join.
    """

    def __init__(self, directory: str | Path, model: nn.Module) -> None:
        self.directory = Path(directory)
        self._paths: dict[str, Path] = {}
        self._formats: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"weights={str(directory)!r} holds no *.safetensors file.")
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    found = {name: tuple(one.get_shape()) for name, one in slices.items()}
                    self._formats |= {name: one.get_dtype() for name, one in slices.items()}
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
            if twice := sorted(found.keys() & self._paths.keys()):
                raise ValueError(f"'{twice[0]}' is in {self._paths[twice[0]]} and in {path}; which one is meant?")
            self._paths.update(dict.fromkeys(found, path))
            shapes |= found
        try:
            self._contents: Contents = contents_of(model, shapes)
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from error.__cause__

    def find(self, names: Sequence[str]) -> str | None:
        """Return which of a tensor's names in the model the files have values for."""
        return next((name for name in names if name in self._contents.sources), None)

    def check(self, model: nn.Module, *, compares: bool) -> None:
        """Raise ValueError where the files do not hold what a model needs, or hold more.

        Args:
            compares: whether to compare the values of tied tensors, which one rank does for all.
        """
        sources, spared = self._contents.sources, self._contents.spared
        known: set[str] = set()
        wanted = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
        for tensor, names in tensors_of(model).values():
            known |= set(names)
            if not tensor.is_meta or id(tensor) not in wanted:
                continue
            found = self.find(names)
            if found is None:
                if not any(name in spared for name in names):
                    raise ValueError(self._lacks(names[0], tensor))
                continue
            if sources[found].shape != tuple(tensor.shape):
                raise ValueError(
                    f"'{found}' has shape {sources[found].shape} in {self.directory}{self._origin(found)} and "
                    f"{tuple(tensor.shape)} in the model. Build the model from the configuration that the files were "
                    "saved with."
                )
            self._check_format(found, tensor)
            if compares:
                self._check_tied([name for name in names if name in sources])
        surplus = [*self._contents.surplus, *(name for name in sources if name not in known)]
        if surplus:
            raise ValueError(
                f"{self.directory} holds {len(surplus)} tensor(s) that the model has not, '{surplus[0]}' first. Build "
                "the model that the files were saved from, or write a directory without them."
            )

    def _lacks(self, name: str, tensor: Tensor) -> str:
        held = self._paths
        return (
            f"{self.directory} has no '{name}' {tuple(tensor.shape)}. It must hold every parameter and persistent "
            "buffer of the model, under its name in state_dict() or one that Transformers loads as that; it holds "
            f"{len(held)} tensors, '{next(iter(held), None)}' first. Nothing is initialized at random beside weights "
            "from files: write a directory with all of them, or leave weights= out to initialize the whole model."
        )

    def _origin(self, name: str) -> str:
        names = self._contents.sources[name].names
        return "" if list(names) == [name] else f" (from {len(names)} tensor(s), '{names[0]}' first)"

    def _check_format(self, name: str, tensor: Tensor) -> None:
        codes = [one for one in self._contents.sources[name].names if self._formats[one] not in _FLOATING]
        if codes and tensor.is_floating_point():
            raise ValueError(
                f"'{codes[0]}' is {self._formats[codes[0]]} in {self._paths[codes[0]]}, and '{name}' of the model is "
                f"{tensor.dtype}: quantized values, which mean nothing without their scales. Write a directory with "
                "values in 16 or 32 bits."
            )

    def _check_tied(self, names: Sequence[str]) -> None:
        """Raise where a tensor that the model has under several names has several values."""
        for other in names[1:]:
            pairs = zip(self._pieces(names[0]), self._pieces(other), strict=False)
            if not all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in pairs):
                raise ValueError(
                    f"'{names[0]}' and '{other}' are one tensor in the model, and have different values in "
                    f"{self.directory}. Build a model that does not tie them (tie_word_embeddings=False in the "
                    "configuration), or write a directory with one of them."
                )

    @torch.no_grad()
    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, converted to its dtype, piece by piece."""
        for where, values in self._pieces(name):
            target[where].copy_(values)

    def _pieces(self, name: str) -> Iterator[tuple[Any, Tensor]]:
        """Yield a tensor in pieces of about `SLICE_BYTES`, each with its index."""
        source = self._contents.sources[name]
        rows = max(1, SLICE_BYTES // max(1, 4 * math.prod(source.shape[1:])))  # of four bytes a number
        with ExitStack() as stack:
            paths = {self._paths[held] for held in source.names}
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
            if source.conversion is not None:
                for where, parts in source.conversion.pieces(rows):
                    made = source.conversion.compute(lambda held: files[self._paths[held]].get_tensor(held), parts)
                    yield where, made[name]
                return
            (held,) = source.names
            file = files[self._paths[held]]
            if not source.shape or 0 in source.shape:
                yield ..., file.get_tensor(held)
                return
            values = file.get_slice(held)
            for first in range(0, source.shape[0], rows):
                yield slice(first, first + rows), values[first : first + rows]


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's own parameters and buffers."""
    return [(k, t) for k, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]


def tensors_of(model: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    """Return every tensor of a model with all its names: tied ones have several."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in own_tensors(module):
            found.setdefault(id(tensor), (tensor, []))[1].append(f"{prefix}.{key}" if prefix else key)
    return found
