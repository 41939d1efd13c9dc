"""Whose kernels a trace stands for: what they save, and what memory they take for themselves.

Owns the differences between what torch does under a trace, with fake tensors on the CPU, and what kernels do. Must not
know events, modules or phases.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor

__all__ = ["PERSONALITIES", "CPU", "Personality"]

aten: Final = torch.ops.aten


class Personality(ABC):
    """How a device's kernels differ from what fake tensors on the CPU show."""

    name: str

    def rewriting(self) -> AbstractContextManager[Any]:
        """Return a context in which functions run the operations that the device would."""
        return contextlib.nullcontext()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; its results have the dtypes that the device gives them."""
        return func(*args, **kwargs)

    @abstractmethod
    def workspace(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Return the bytes that a kernel takes at most for itself, beside its results."""


@final
class CPU(Personality):
    """Torch's own CPU kernels in eager mode."""

    name = "cpu"

    def workspace(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        measure = _CPU_WORKSPACES.get(func)
        return measure(args, out) if measure else 0


_CPU_WORKSPACES: Mapping[Any, Callable[[tuple[Any, ...], Any], int]] = MappingProxyType({})

PERSONALITIES: Final[Mapping[str, Callable[[], Personality]]] = MappingProxyType({"cpu": CPU})
