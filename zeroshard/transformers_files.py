"""The conversion by Transformers from the tensors in a model's files to the model's tensors.

Owns the mapping from tensors of files to tensors of a model. It must not know ranks or units. Read `contents_of` first.

Note: names
    Transformers' own mapping applies, as in `from_pretrained`: renamed modules, the prefix of a base model, separate
    experts that the model holds stacked, fused projections. The mapping runs on shapes alone, so the sources of each
    tensor of a model are known before any read. A model of another library reads tensors under its own names.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn

__all__ = ["Contents", "Conversion", "Source", "contents_of", "is_of_transformers"]

Tensor = torch.Tensor
Part = tuple[str, str]
"""A pattern of Transformers' mapping, and the name of a tensor in a file that matches it."""


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a model of Transformers, without importing Transformers."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


@final
class Conversion:
    """A computation by Transformers from tensors of files.

    Args:
        model: the model whose configuration and shapes the operations read.
        converter: Transformers' `WeightConverter`, without tensors.
        first: the model's name of the first result.
        parts: the inputs, in order.
    """

    def __init__(self, model: nn.Module, converter: Any, first: str, parts: Sequence[Part]) -> None:
        self._model, self._converter, self._first, self.parts = model, converter, first, parts

    def compute(self, read: Callable[[str], Tensor], parts: Sequence[Part] | None = None) -> dict[str, Tensor]:
        """Return the results, by the model's names.

        Args:
            read: returns a tensor of a file.
            parts: some of `self.parts`, as `pieces` yields them.
        """
        # The converter keeps its tensors until their conversion.
        converter = copy.deepcopy(self._converter)
        for pattern, name in self.parts if parts is None else parts:
            converter.collected_tensors[pattern].append(read(name))
        made = converter.convert(self._first, model=self._model, config=getattr(self._model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def pieces(self, rows: int) -> Iterator[tuple[Any, Sequence[Part]]]:
        """Yield separate computations: an index into the result, and its parts.

        Args:
            rows: the most rows of a piece, if each row comes from its own tensor, as in stacked experts.
        """
        by_pattern: dict[str, list[str]] = {}
        for pattern, name in self.parts:
            by_pattern.setdefault(pattern, []).append(name)
        count = len(next(iter(by_pattern.values())))
        if not self._stacks() or any(len(names) != count for names in by_pattern.values()):
            yield ..., self.parts
            return
        for start in range(0, count, rows):
            end = start + rows
            yield (
                slice(start, end),
                [(pattern, name) for pattern, names in by_pattern.items() for name in names[start:end]],
            )

    def _stacks(self) -> bool:
        """Return whether the operations first stack tensors, and then never mix rows of the stack."""
        first, *rest = self._converter.operations
        kinds = [type(one).__name__ for one in rest]
        dims = [dim for one in rest for key in ("dim", "dim0", "dim1") if (dim := getattr(one, key, None)) is not None]
        is_stack = type(first).__name__ == "MergeModulelist" and first.dim == 0
        return is_stack and set(kinds) <= {"Concatenate", "Transpose"} and all(dim > 0 for dim in dims)


@final
@dataclass(frozen=True)
class Source:
    """The source of a tensor of a model.

    Args:
        names: names of the tensors in files.
        shape: the shape of the result.
        conversion: None if the tensor of the file needs no conversion.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    conversion: Conversion | None = None


@final
@dataclass(frozen=True)
class Contents:
    """The tensors in the files of a model.

    Args:
        sources: sources by the model's name of a tensor.
        surplus: names in files that the model does not use.
        spared: tensors of the model that Transformers declares as absent from files; an initializer writes them.
    """

    sources: Mapping[str, Source]
    surplus: Sequence[str] = ()
    spared: Collection[str] = field(default_factory=frozenset)


def contents_of(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Contents:
    """Return the sources of a model's tensors in files.

    Args:
        model: on the meta device, or with values.
        shapes: shapes of the tensors in the files, by name.

    Raises:
        ValueError: two tensors of files match one tensor of the model, or an operation of Transformers fails.
    """
    plain = Contents({name: Source((name,), shape) for name, shape in shapes.items()})
    if not is_of_transformers(model):
        return plain
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before 5.0, with another interface for renaming
        return plain
    return _converted(model, shapes, conversion_mapping.get_model_conversion_mapping(model), core_model_loading)


def _converted(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], transforms: Sequence[Any], loading: Any
) -> Contents:
    """Return the sources by Transformers' mapping, as `convert_and_load_state_dict_in_model` applies it."""
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = model.state_dict(), getattr(model, "base_model_prefix", None)
    sources: dict[str, Source] = {}
    joined: dict[str, list[Part]] = {}
    surplus: dict[str, str] = {}
    for name in sorted(shapes, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if new not in known and name in known:
            new, pattern = loading.rename_source_key(name, [], [], prefix, known)
        if new not in known:
            surplus[new] = name
        elif pattern is not None:
            joined.setdefault(new, []).append((pattern, name))
        elif new in sources:
            raise ValueError(
                f"'{sources[new].names[0]}' and '{name}' both map to the model's '{new}' in Transformers. "
                "Remove one of the two tensors from the files."
            )
        else:
            sources[new] = Source((name,), shapes[name])
    for first, parts in joined.items():
        conversion = Conversion(model, converter_of[parts[0][0]], first, parts)
        names = [name for _, name in parts]
        try:
            made = conversion.compute(lambda name: torch.empty(shapes[name], device="meta"))
        except Exception as error:
            raise ValueError(
                f"Transformers cannot compute '{first}' from {len(names)} tensor(s), the first of them '{names[0]}': "
                f"{type(error).__name__}: {error}. The files are incomplete, or belong to another model."
            ) from error
        for target, tensor in made.items():
            if target in sources or target not in known:
                raise ValueError(
                    f"'{names[0]}' maps to '{target}' in Transformers, which "
                    f"{'another tensor also maps to' if target in sources else 'the model does not have'}."
                )
            sources[target] = Source(names, tuple(tensor.shape), conversion)
    told = SimpleNamespace(missing_keys=known.keys() - sources.keys(), unexpected_keys=set(surplus))
    if (adjust := getattr(model, "_adjust_missing_and_unexpected_keys", None)) is not None:
        # Removes names that the model's class declares: buffers of older versions, computed weights.
        adjust(told)
    spared = frozenset(known.keys() - sources.keys() - told.missing_keys)
    return Contents(sources, [surplus[name] for name in surplus if name in told.unexpected_keys], spared)
