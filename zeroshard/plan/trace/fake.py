"""Tensors without memory: the model and the inputs of a trace.

Owns copies on the meta device, and the temporary replacement of a model's parameters and buffers by fake tensors. The
model object stays the user's, so its hooks, wrapped functions and closures run. It must not know the traced step.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeroshard.describe.split import like_split
from zeroshard.torch_private import has_split, local_of, storage_of
from zeroshard.tree import map_tensors

__all__ = ["Fakes", "exchanged", "on_meta"]


@final
class Fakes:
    """Fake copies of tensors: copies of tensors with shared memory also share memory.

    All copies are on the CPU, because autograd fails for fake tensors of an absent device.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor, the same on each call; call it in a fake-tensor mode."""
        if id(tensor) not in self._copies:
            # Keeping the original alive prevents reuse of its id.
            self._copies[id(tensor)] = (tensor, self._make(tensor))
        return self._copies[id(tensor)][1]

    def of_all(self, value: Any) -> Any:
        """Return a value of nested containers with each tensor replaced by its copy."""
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
        """Return a view at the same place in a storage of the same size."""
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        nbytes, key = tensor.untyped_storage().nbytes(), storage_of(tensor)
        if key not in self._storages:
            numel = nbytes // tensor.element_size()
            self._storages[key] = (tensor, torch.empty(numel, dtype=tensor.dtype, device="cpu"))
        return self._storages[key][1].view(tensor.dtype).as_strided(size, stride, offset).detach()

    def forget_storages(self) -> None:
        """Drop the references that make copies share memory, because a trace counts references."""
        self._storages.clear()


def on_meta(model: nn.Module, dtypes: Mapping[int, str] = MappingProxyType({})) -> nn.Module:
    """Return a copy of a model on the meta device; tied parameters stay tied, and tensors of a graph become leaves.

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
    with _Leaves():
        return copy.deepcopy(model, memo)


@final
class _Leaves(TorchFunctionMode):
    """Lets tensors of a graph be copied, without it: losses and hidden states that modules keep as attributes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone().requires_grad_()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def exchanged(model: nn.Module, fakes: Fakes) -> Iterator[None]:
    """Replace a model's parameters, buffers and other tensors of modules by fake tensors, and restore them at the end.

    In between, `to()` and the other conversions of its modules leave the parameters in place, as those of a run do.

    Raises:
        TypeError: torch cannot make fake copies of the class of a parameter or buffer.
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
        for prefix, module in model.named_modules():
            vars(module)["_apply"] = functools.partial(_apply, prefix, module)
        yield
    finally:
        for module in model.modules():
            vars(module).pop("_apply", None)
        for kind, name, value in places:
            kind[name] = value


def _apply(prefix: str, module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert a module in a forward; torch's own would swap each fake parameter, which graph nodes forbid."""
    for child in module.children() if recurse else ():
        child._apply(change)
    with torch.no_grad():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            made = change(parameter)
            if (made.dtype, made.device.type) != (parameter.dtype, parameter.device.type):
                raise RuntimeError(
                    f"The forward converts parameter '{name}' from {parameter.dtype} on {parameter.device.type} to "
                    f"{made.dtype} on {made.device.type}. A run refuses another dtype, and a trace, on the CPU, a new "
                    "device. Convert the module before the forward, or name its dtype in Precision(modules=); "
                    "for a device, write that of an input."
                )
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, change(buffer))
    return module
