"""Whole values of a sharded model by name, and meshes, for tests that move checkpoints between layouts."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zeroshard as zs

__all__ = ["mesh_of", "whole_of"]


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return one mesh for all models of a process: torch never ends the threads of a mesh's groups."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def whole_of(zero: zs.Zero, model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole parameters and states that this rank's place has, by name. Collective: `gathered()`."""
    with zero.gathered(states=True):
        found: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            found[name] = _full(parameter)
            for optimizer in optimizers:
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    found[f"{name}/{key}"] = _full(value)
        return found


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value
