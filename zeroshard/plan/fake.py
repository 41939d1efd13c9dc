"""Tensors without memory: a model and inputs, for the time of a trace.

Owns copies on the meta device, and the exchange of a model's parameters and buffers for fake ones, and back. There the
model stays the user's object, so that its hooks, wrapped functions and closures are the ones that run. Must not know
what is traced.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.describe.split import like_split
from zeroshard.torch_private import has_split, local_of, storage_of
from zeroshard.tree import map_tensors

__all__ = ["Fakes", "exchanged", "on_meta"]


@final
class Fakes:
    """Fake copies of tensors: those that share memory have copies that share memory, too.

    Everything is on the CPU: fake tensors of a device that is not there cannot be differentiated.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor, the same one each time, to be called where tensors are fake."""
        if id(tensor) not in self._copies:
            # The original is kept with its copy, so that no other tensor gets its id meanwhile.
            self._copies[id(tensor)] = (tensor, self._make(tensor))
        return self._copies[id(tensor)][1]

    def of_all(self, value: Any) -> Any:
        """Return a value of nested containers with a copy of each tensor in it."""
        return map_tensors(value, self.of)

    def _make(self, tensor: Tensor) -> Tensor:
        if (local := local_of(tensor)) is not tensor:
            with torch.no_grad():
                split = like_split(self.of(local.detach()), tensor)
            return nn.Parameter(split, requires_grad=tensor.requires_grad)
        if tensor.layout is not torch.strided:
            raise TypeError(f"A trace needs dense tensors, got one of layout {tensor.layout} and shape {tensor.shape}.")
        with torch.no_grad():
            copy = self._view(tensor)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            vars(copy).update(vars(tensor))
            return copy
        return copy.requires_grad_(tensor.requires_grad)

    def _view(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same place in a storage of the same size."""
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        nbytes, key = tensor.untyped_storage().nbytes(), storage_of(tensor)
        if key not in self._storages:
            numel = nbytes // tensor.element_size()
            self._storages[key] = (tensor, torch.empty(numel, dtype=tensor.dtype, device="cpu"))
        return self._storages[key][1].view(tensor.dtype).as_strided(size, stride, offset).detach()

    def forget_storages(self) -> None:
        """Let go of what was kept to make copies share memory, as its uses count when a trace asks for them."""
        self._storages.clear()


def on_meta(model: nn.Module, dtypes: Mapping[int, str] = MappingProxyType({})) -> nn.Module:
    """Return a copy of a model on the meta device; tied parameters stay tied.

    Args:
        dtypes: of parameters, by identity; others keep theirs.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = getattr(torch, dtypes[id(parameter)]) if id(parameter) in dtypes else parameter.dtype
        local = local_of(parameter)
        made = torch.empty_strided(local.shape, local.stride(), dtype=kind, device="meta")
        made = made if local is parameter else like_split(made, parameter)
        memo[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device="meta")
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def exchanged(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """Give a model fake parameters, buffers and other tensors that its modules hold, and its own back at the end.

    Raises:
        TypeError: a parameter or buffer is of a class that torch cannot have fake copies of.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for prefix, module in model.named_modules():
        own: dict[str, Any] = vars(module)
        for kind in (own["_parameters"], own["_buffers"], own):
            for name, value in kind.items():
                if isinstance(value, Tensor):
                    is_split = has_split([type(value)]) and kind is own["_parameters"]
                    if type(value) not in (Tensor, nn.Parameter, nn.Buffer) and not is_split:
                        where = f"{prefix}.{name}".lstrip(".")
                        raise TypeError(f"A trace needs plain tensors; {where} is a {type(value).__name__}.")
                    places.append((kind, name, value))
    try:
        for kind, name, value in places:
            kind[name] = fakes.of(value)
        yield
    finally:
        for kind, name, value in places:
            kind[name] = value
