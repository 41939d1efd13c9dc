"""Packed states: their conversion into tensors of the parameter's shape, and back.

Owns an optimizer's description of its packed states, for code that slices, joins, counts or saves states. It must not
know the format. `adamw8bit.py` has an optimizer of this kind.

Note: both forms are states
    The optimizer keeps its moments packed, as codes `exp_avg` with scales `exp_avg_scales`. It also accepts plain
    floating-point tensors under AdamW's names, from a checkpoint or from `zero.gathered(states=True)`, and packs them
    at its next step. `pack` and `unpack` do not change states that already have the requested form.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

__all__ = ["Packed", "PackedBytes", "PackingOptimizer", "pack", "parts_of", "tensor_of", "unpack", "views_of"]

Tensor = torch.Tensor
State = Mapping[str, Any]


@final
@dataclass(frozen=True)
class PackedBytes:
    """The size of the packed states of one slice.

    Attributes:
        element_bytes: bytes per element.
        block_numel: number of elements that share one scale; a slice's last block may be short.
        block_bytes: bytes per block.
    """

    element_bytes: int
    block_numel: int
    block_bytes: int


@final
@dataclass(frozen=True)
class Packed:
    """One packed state, described as a tensor.

    Attributes:
        parts: the keys of its parts in an optimizer's state.
        shape, dtype: those of the tensor.
        unpack: creates the tensor, on each call.
    """

    parts: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    unpack: Callable[[], Tensor]


class PackingOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer with packed states. Its update of a slice depends only on that slice."""

    packed_bytes: PackedBytes

    _given: list[dict[str, Any]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states; unlike in torch's optimizers, they keep their dtypes whatever the dtypes of parameters."""
        self._given = []
        # The last hook receives the result of the other hooks.
        last = self.register_load_state_dict_pre_hook(lambda _, given: self._given.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            del self._given

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = self.__dict__.get("_given")
        super().__setstate__(state)
        if given:
            self._undo_casts(given[-1])

    def _undo_casts(self, given: dict[str, Any]) -> None:
        """Replace states that torch has cast to the parameters' dtypes by the originals."""
        places = [place for group in given["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for key, value in given["state"].get(place, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[parameter][key] = value.to(parameter.device)

    @abstractmethod
    def packed_states(self, state: State) -> dict[str, Packed]:
        """Return a parameter's packed states, by the name of their tensors."""

    @abstractmethod
    def pack_state(self, state: State) -> dict[str, Any]:
        """Return a parameter's states in the form that this optimizer keeps: packed where it packs them."""


def views_of(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return a parameter's states, with a `Packed` in place of the parts of each packed state; computes nothing."""
    if not isinstance(optimizer, PackingOptimizer):
        return dict(state)
    found, parts = optimizer.packed_states(state), parts_of(optimizer, state)
    return {key: value for key, value in state.items() if key not in parts} | found


def parts_of(optimizer: torch.optim.Optimizer, state: State) -> frozenset[str]:
    """Return the keys of the parts of a parameter's packed states."""
    packed = optimizer.packed_states(state).values() if isinstance(optimizer, PackingOptimizer) else ()
    return frozenset(part for one in packed for part in one.parts)


def tensor_of(value: "Tensor | Packed") -> Tensor:
    """Return the tensor of a state, packed or not."""
    return value.unpack() if isinstance(value, Packed) else value


def unpack(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return a parameter's states with packed states as tensors."""
    return {key: tensor_of(value) for key, value in views_of(optimizer, state).items()}


def pack(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return a parameter's states in the optimizer's own form."""
    return optimizer.pack_state(state) if isinstance(optimizer, PackingOptimizer) else dict(state)
