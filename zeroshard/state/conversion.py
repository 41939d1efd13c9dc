"""How Transformers names, joins and cuts what lies in a model's files, tensor by tensor.

Owns which tensors of files give which tensor of a model. Must not know ranks or units. Read `contents_of` first.

Note: names
    Transformers' own mapping decides, as in `from_pretrained`: renamed modules, the prefix of a base model, experts one
    by one that the model holds stacked, fused projections. It is run on shapes alone, so what each tensor of a model
    comes from is known before anything is read. A model of another library takes tensors under its own names.
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
    """Tell whether a module is a model of Transformers, without importing that."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


@final
class Conversion:
    """What Transformers computes from some tensors of files.

    Args:
        model: whose configuration and shapes the operations read.
        converter: Transformers' `WeightConverter`, which has no tensors yet.
        first: the model's name of the first result.
        parts: of what it is computed, in order.
    """

    def __init__(self, model: nn.Module, converter: Any, first: str, parts: Sequence[Part]) -> None:
        self._model, self._converter, self._first, self.parts = model, converter, first, parts

    def compute(self, read: Callable[[str], Tensor], parts: Sequence[Part] | None = None) -> dict[str, Tensor]:
        """Return the results by the model's names.

        Args:
            read: returns a tensor of a file.
            parts: some of `self.parts`, as `pieces` yields them.
        """
        # It keeps what it is given until it has converted it.
        converter = copy.deepcopy(self._converter)
        for pattern, name in self.parts if parts is None else parts:
            converter.collected_tensors[pattern].append(read(name))
        made = converter.convert(self._first, model=self._model, config=getattr(self._model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def pieces(self, rows: int) -> Iterator[tuple[Any, Sequence[Part]]]:
        """Yield what may be computed apart: an index of the result, and its parts.

        Args:
            rows: of the result at most, where rows come from tensors of their own, as stacked experts do.
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
        """Tell whether tensors are stacked first, and rows of the stack do not mix after that."""
        first, *rest = self._converter.operations
        kinds = [type(one).__name__ for one in rest]
        dims = [dim for one in rest for key in ("dim", "dim0", "dim1") if (dim := getattr(one, key, None)) is not None]
        is_stack = type(first).__name__ == "MergeModulelist" and first.dim == 0
        return is_stack and set(kinds) <= {"Concatenate", "Transpose"} and all(dim > 0 for dim in dims)


@final
@dataclass(frozen=True)
class Source:
    """Where one tensor of a model comes from.

    Args:
        names: of the tensors in files.
        shape: of what they give.
        conversion: None where the tensor of a file is the model's as it is.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    conversion: Conversion | None = None


@final
@dataclass(frozen=True)
class Contents:
    """What the files of a model give.

    Args:
        sources: by the model's name of a tensor.
        surplus: names in files that no tensor of the model comes from.
        spared: the model's names that Transformers declares as absent from files; an initializer writes them.
    """

    sources: Mapping[str, Source]
    surplus: Sequence[str] = ()
    spared: Collection[str] = field(default_factory=frozenset)


def contents_of(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Contents:
    """Return what tensors of files give to a model.

    Args:
        model: on the meta device, or with values.
        shapes: of the tensors in the files, by name.

    Raises:
        ValueError: two tensors of files for one of the model; an operation of Transformers that fails.
    """
    plain = Contents({name: Source((name,), shape) for name, shape in shapes.items()})
    if not is_of_transformers(model):
        return plain
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # of before 5.0, which had other ways to rename
        return plain
    return _converted(model, shapes, conversion_mapping.get_model_conversion_mapping(model), core_model_loading)


def _converted(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], transforms: Sequence[Any], loading: Any
) -> Contents:
    """Return what tensors of files give by Transformers' mapping: as `convert_and_load_state_dict_in_model`."""
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
                f"'{sources[new].names[0]}' and '{name}' are both the model's '{new}', as Transformers names them. "
                "Write a directory with one of them."
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
                f"Transformers cannot make '{first}' of {len(names)} tensor(s), '{names[0]}' first: "
                f"{type(error).__name__}: {error}. The files lack a part, or are those of another model."
            ) from error
        for target, tensor in made.items():
            if target in sources or target not in known:
                raise ValueError(
                    f"'{names[0]}' gives '{target}', as Transformers names it, which "
                    f"{'another tensor gives, too' if target in sources else 'the model does not have'}."
                )
            sources[target] = Source(names, tuple(tensor.shape), conversion)
    told = SimpleNamespace(missing_keys=known.keys() - sources.keys(), unexpected_keys=set(surplus))
    if (adjust := getattr(model, "_adjust_missing_and_unexpected_keys", None)) is not None:
        # Takes out what the model's class declares: buffers of older versions, weights that are computed.
        adjust(told)
    spared = frozenset(known.keys() - sources.keys() - told.missing_keys)
    return Contents(sources, [surplus[name] for name in surplus if name in told.unexpected_keys], spared)
