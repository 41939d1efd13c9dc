"""Optimizers in `extra.json`: groups, hyper-parameters, steps, and states without a value per element.

Owns the compact format, at any number of parameters, and its reading, one parameter at a time. Read `values.py` and
`inventory.py` (`groups_of`) first.

Note: columns
    A parameter is its place among the checkpoint's tensors. An optimizer has `class`, `steps`, `groups` (each with its
    `options` and its `params`), `stateful` (the parameters that have a state; null for all, in the order of groups) and
    `states`: of each key the values, in the order of `stateful`, as `[key, of, values]`. `of` counts which of them have
    the key; null for all. Tensors of one dtype and shape are stacked, so a million step counters are a few texts.
    `others`, present only if there are any, are the states under keys that are no parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch

from zeroshard.checkpoint.fields import Value
from zeroshard.checkpoint.values import MAX_TENSOR_BYTES, check_key, decode, encode
from zeroshard.table.errors import CheckpointError

__all__ = ["pack", "unpack"]

Tensor = torch.Tensor

MAX_STEPS: Final = 2**53
"""More than any counter of steps."""
KEYS: Final = ("class", "groups", "stateful", "states", "steps")


def pack(described: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the result of `groups_of` in a form that JSON can hold.

    Args:
        places: of each parameter among the checkpoint's tensors.

    Raises:
        CheckpointError: a value cannot be saved; the error names the value.
    """
    return [_pack_one(one, places, f"optimizer {number}") for number, one in enumerate(described)]


def _pack_one(one: Mapping[str, Any], places: Mapping[str, int], where: str) -> dict[str, Any]:
    params = [name for group in one["groups"] for name in group["params"]]
    stateful = [name for name in params if name in one["states"]]
    columns: dict[Any, tuple[list[int], list[Any]]] = {}
    for row, name in enumerate(stateful):
        for key, value in one["states"][name].items():
            of, values = columns.setdefault(check_key(key, f"the state of '{name}' in {where}"), ([], []))
            of.append(row)
            values.append(value)
    others = {"others": encode(one["others"], f"{where}, the state")} if one.get("others") else {}
    return others | {
        "class": one["class"],
        "groups": [
            {
                "options": encode(group["options"], f"{where}, a group's options"),
                "params": [places[name] for name in group["params"]],
            }
            for group in one["groups"]
        ],
        "stateful": None if len(stateful) == len(params) else [places[name] for name in stateful],
        "states": [
            [key, None if len(of) == len(stateful) else of, _pack_values(values, f"{where}, state {key!r}")]
            for key, (of, values) in columns.items()
        ],
        "steps": one["steps"],
    }


def _pack_values(values: Sequence[Any], where: str) -> Any:
    first = values[0]
    if not isinstance(first, Tensor) or not 0 < first.nbytes <= MAX_TENSOR_BYTES or not _are_alike(values):
        return [encode(value, where) for value in values]
    rows = MAX_TENSOR_BYTES // first.nbytes
    return {
        "stacked": [
            encode(torch.stack(list(values[start : start + rows])), where) for start in range(0, len(values), rows)
        ]
    }


def _are_alike(values: Sequence[Any]) -> bool:
    kinds = {(v.dtype, v.shape, v.device) if isinstance(v, Tensor) else None for v in values}
    return len(kinds) == 1


def unpack(values: Any, names: Sequence[str], where: str) -> list[dict[str, Any]]:
    """Return the unpacked descriptions, with `States` as their states.

    Args:
        names: of the checkpoint's tensors.

    Raises:
        CheckpointError: the file holds data that `pack` does not write.
    """
    return [_unpack_one(one, names) for one in Value(values, where).items()]


def _unpack_one(one: Value, names: Sequence[str]) -> dict[str, Any]:
    one.has_keys(*KEYS, *one.keys() & {"others"})
    others = decode(one.value.get("others", {}), one.where)
    if not isinstance(others, dict):
        raise one.fail("an optimizer whose 'others' are a mapping")
    groups = []
    for group in one.get("groups").items():
        group.has_keys("options", "params")
        options = decode(group.get("options").value, one.where)
        if not isinstance(options, dict) or "params" in options:
            raise group.fail("options without 'params'")
        groups.append({"options": options, "params": _names_of(group.get("params"), names)})
    params = [name for group in groups for name in group["params"]]
    stateful = params if one.get("stateful").value is None else _names_of(one.get("stateful"), names)
    columns = [_Column(column, len(stateful)) for column in one.get("states").items()]
    if len(set(stateful)) != len(stateful) or len({column.key for column in columns}) != len(columns):
        raise one.fail("an optimizer with one state of each key for a parameter")
    return {
        "class": one.get("class").text(),
        "groups": groups,
        "others": others,
        "states": States(stateful, columns),
        "steps": one.get("steps").integer(MAX_STEPS - 1),
    }


def _names_of(places: Value, names: Sequence[str]) -> list[str]:
    return [names[place] for place in places.integers(len(names) - 1)]


@final
class States(Mapping[str, dict[str, Any]]):
    """The states of an optimizer, except tensors with a value per element, by parameter.

    A tensor of a stack is created on request: a short text can describe many.
    """

    def __init__(self, names: Sequence[str], columns: Sequence["_Column"]) -> None:
        self._names, self._columns = names, columns
        self._rows: dict[str, int] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if not self._rows:
            self._rows = {name: row for row, name in enumerate(self._names)}
        row = self._rows[name]
        return {column.key: column.value_of(row) for column in self._columns if column.has(row)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Column:
    """One key of the states, and its values in the order of parameters."""

    def __init__(self, column: Value, rows: int) -> None:
        items = list(column.items())
        if len(items) != 3:
            raise column.fail("a state's [key, of, values]")
        key, of, values = items
        self.key = check_key(key.value, column.where)
        self._rows: dict[int, int] | None = None
        if of.value is not None:
            self._rows = {row: place for place, row in enumerate(of.integers(rows - 1))}
            if len(self._rows) != len(of.value):
                raise of.fail("each row once")
            rows = len(self._rows)
        self._stacked = isinstance(values.value, dict)
        if self._stacked:
            values.has_keys("stacked")
            stacked = [decode(item.value, column.where) for item in values.get("stacked").items()]
            # Rows without bytes would make many of a short text.
            if not all(isinstance(item, Tensor) and item.ndim and item.nbytes for item in stacked):
                raise values.fail("stacked tensors")
            self._values: list[Any] = stacked
            count = sum(len(item) for item in stacked)
        else:
            self._values = [decode(item.value, column.where) for item in values.items()]
            count = len(self._values)
        if count != rows:
            raise CheckpointError(f"{column.where}: state {self.key!r} has {count} values for {rows} parameters.")

    def has(self, row: int) -> bool:
        """Return whether a row has a value."""
        return self._rows is None or row in self._rows

    def value_of(self, row: int) -> Any:
        """Return the value of a row."""
        place = row if self._rows is None else self._rows[row]
        if not self._stacked:
            return self._values[place]
        for item in self._values:
            if place < len(item):
                return item[place].clone()
            place -= len(item)
        raise AssertionError("rows were counted")
