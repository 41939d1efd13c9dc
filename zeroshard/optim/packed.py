"""States that lie packed: how they become tensors of the parameter's shape, and back.

Owns what an optimizer says of them, for whoever cuts, joins, counts or saves states. It must not know how they are
packed. `adamw8bit.py` has the optimizer of this kind.

Note: both forms are states
    The same optimizer has its moments packed, as `exp_avg` of codes beside `exp_avg_scales`, and may be given them as
    plain floating-point tensors under the names that AdamW uses: by a checkpoint, or by `zero.gathered(states=True)`.
    It packs these at its next step. `pack` and `unpack` leave what has the wanted form already.
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
    """What packed states of one slice take.

    Attributes:
        element_bytes: for each element.
        block_numel: elements that share one scale; a slice's last block may be short.
        block_bytes: for each block.
    """

    element_bytes: int
    block_numel: int
    block_bytes: int


@final
@dataclass(frozen=True)
class Packed:
    """One packed state, as the tensor that it stands for.

    Attributes:
        parts: the keys of an optimizer's state in which it lies.
        shape, dtype: of the tensor.
        unpack: makes the tensor, anew each time.
    """

    parts: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    unpack: Callable[[], Tensor]


class PackingOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose states lie packed. Its update of a slice depends on that slice alone."""

    packed_bytes: PackedBytes

    _given: list[dict[str, Any]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states over; unlike in torch's own optimizers they keep their dtypes, whatever the parameters'."""
        self._given = []
        # The last of the hooks has what the others made of it.
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
        """Put states in their own dtypes in the place of those that torch has cast to the parameters'."""
        places = [place for group in given["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for key, value in given["state"].get(place, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[parameter][key] = value.to(parameter.device)

    @abstractmethod
    def packed_states(self, state: State) -> dict[str, Packed]:
        """Return the packed ones of a parameter's states, by the name that their tensors have."""

    @abstractmethod
    def pack_state(self, state: State) -> dict[str, Any]:
        """Return a parameter's states with every tensor packed that this optimizer keeps packed."""


def views_of(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return a parameter's states, each packed one as a `Packed` in place of its parts; nothing is computed."""
    if not isinstance(optimizer, PackingOptimizer):
        return dict(state)
    found, parts = optimizer.packed_states(state), parts_of(optimizer, state)
    return {key: value for key, value in state.items() if key not in parts} | found


def parts_of(optimizer: torch.optim.Optimizer, state: State) -> frozenset[str]:
    """Return the keys of a parameter's states in which packed ones lie."""
    packed = optimizer.packed_states(state).values() if isinstance(optimizer, PackingOptimizer) else ()
    return frozenset(part for one in packed for part in one.parts)


def tensor_of(value: "Tensor | Packed") -> Tensor:
    """Return the tensor that a state is, or stands for."""
    return value.unpack() if isinstance(value, Packed) else value


def unpack(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return a parameter's states with every packed one as its tensor."""
    return {key: tensor_of(value) for key, value in views_of(optimizer, state).items()}


def pack(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return a parameter's states as the optimizer keeps them."""
    return optimizer.pack_state(state) if isinstance(optimizer, PackingOptimizer) else dict(state)
