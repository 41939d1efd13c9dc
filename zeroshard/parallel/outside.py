"""State of the modules that run at every place of a pipe: the model itself, and modules without parameters.

Owns the refusal of forwards that change it, where places or chunks would differ. It must not know borders or messages.
Read `parallel/chunked.py` first.

Note: what may change
    These modules run once for each chunk of a place. What a forward computes of its inputs, such as a cache of
    positions or the last length, is the same after each chunk of a micro-batch. A counter or a running mean is not, and
    is an error in the first forward of each shape. A saved buffer may not change at all: places would save others.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn, strided

from zeroshard.activations.values import Values, values_of
from zeroshard.parallel.alike import checksum
from zeroshard.torch_private import version_of

__all__ = ["Outside"]


@final
class Outside:
    """The state outside of the parts of one model.

    Args:
        parts: the modules that run at one place each.
        chunks: how many chunks the place has.
    """

    def __init__(self, model: nn.Module, parts: Mapping[nn.Module, Any], chunks: int) -> None:
        self._model, self._parts, self._chunks = model, parts, chunks
        self._after: dict[int, dict[str, Any]] = {}
        """The state after the first forward of each chunk with inputs of the last shape."""

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return the identity and version of each saved buffer."""
        return {
            f"{path}.{key}".removeprefix("."): (id(one), version_of(one))
            for path, module in self._modules()
            for key, one in module._buffers.items()
            if one is not None and key not in module._non_persistent_buffers_set and not one.is_inference()
        }

    def refuse_changes(
        self, place: str, chunk: int, before: Mapping[str, tuple[int, int]], depends: Callable[[Tensor], bool]
    ) -> None:
        """Raise if the first forward of a chunk changed what it may not change.

        Args:
            before: what `versions` returned.
            depends: whether a tensor depends on a part, or on random numbers.
        """
        name, now = type(self._model).__name__, self.versions()
        if changed := [key for key, version in now.items() if before.get(key) != version]:
            raise RuntimeError(
                f"{place} The forward of {name} changes the buffer '{changed[0]}' of a "
                "module without parameters, which runs at every place of the pipe, and not equally often. Change it "
                "outside of the model, or in a module that has parameters."
            )
        if self._chunks == 1:
            return
        if chunk in self._after:
            self._after.clear()
        mine = self._after[chunk] = self._values(depends)
        first = next(iter(self._after.values()))
        if changed := [key for key, value in mine.items() if first.get(key, value) != value]:
            raise RuntimeError(
                f"{place} The forward of {name} changes '{changed[0]}' of a module without parameters each time, and "
                f"runs once for each of the {self._chunks} chunks of this place: one micro-batch counts as several. "
                'Write schedule="1f1b", or change it outside of the model, or in a module that has parameters.'
            )

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        inside = {inner for part in self._parts for inner in part.modules()}
        return ((path, module) for path, module in self._model.named_modules() if module not in inside)

    def _values(self, depends: Callable[[Tensor], bool]) -> dict[str, Any]:
        """Return the numbers, texts and sums of tensors that modules have as buffers and attributes."""
        found = dict[str, Any]()
        for path, module in self._modules():
            for key, value in {**vars(module), **module._buffers}.items():
                name = f"{path}.{key}".removeprefix(".")
                if isinstance(value, bool | int | float | str):
                    found[name] = repr(value)
                elif isinstance(value, Tensor) and _is_read(value) and not depends(value):
                    found[name] = tuple(value.shape), checksum(value)
        return found


def _is_read(tensor: Tensor) -> bool:
    return tensor.layout is strided and values_of(tensor) is not Values.NEVER
