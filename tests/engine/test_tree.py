"""Nested values keep their classes and attributes when tensors in them change."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.tree import find, map_floating, map_tensors


class Named(NamedTuple):
    x: Tensor
    size: torch.Size


class Own(tuple[Tensor, ...]):
    """Made of keyword arguments, with an attribute."""

    def __new__(cls, *, first: Tensor) -> "Own":
        made = super().__new__(cls, (first, first + 1))
        made.note = "note"  # type: ignore[attr-defined]
        return made


class Items(list[Any]):
    """Made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.note = "note"


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    count: int = 1


def test_each_container_is_of_its_class_afterwards() -> None:
    x = torch.ones(2)
    items = Items()
    items += [x, {"deep": (x,)}]
    values: list[Any] = [
        (x, 1),
        [x],
        Named(x, x.shape),
        Own(first=x),
        items,
        torch.max(torch.ones(2, 2), 0),
        torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1), torch.tensor([2])),
        {"x": x},
        OrderedDict(x=x),
        Record(x),
    ]
    for value in values:
        found = map_floating(value, lambda one: one * 3)
        assert type(found) is type(value)
        tensors = [one for one in find(value, Tensor) if one.is_floating_point()]
        changed = [one for one in find(found, Tensor) if one.is_floating_point()]
        assert len(tensors) == len(changed) > 0
        assert all(torch.equal(a * 3, b) for a, b in zip(tensors, changed, strict=True))
        assert getattr(found, "note", "") == getattr(value, "note", "")
    assert torch.equal(x, torch.ones(2))


def test_what_holds_no_tensor_stays() -> None:
    for value in (torch.Size((2, 3)), (1, "a"), "text", None, slice(0, 2)):
        assert map_tensors(value, lambda one: one + 1) is value


def test_other_classes_are_mapped() -> None:
    assert map_tensors([1, (2, "a")], lambda one: one + 1, int) == [2, (3, "a")]
