"""Modules that are split over a tensor axis: split by the caller's function, or checked.

Owns the emulated ranks of that axis. It must not know traces. Read `describe/split.py` first.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.describe.split import check_buffers, check_placement, split_parameters
from zeroshard.plan.trace.fake import on_meta
from zeroshard.torch_groups import emulated_group

__all__ = ["check_split", "split"]


def check_split(model: nn.Module, ranks: int) -> None:
    """Raise unless a model is split over the plan's number of tensor ranks.

    Raises:
        ValueError: the model is not split so, or `zs.shard` does not support the layout of a parameter.
    """
    check_buffers(model)
    found = split_parameters(model)
    if not found and ranks > 1:
        raise ValueError(
            f"tensor={ranks}: no parameter of this {type(model).__name__} is split. Pass to plan() parallelize=, a "
            "function of a module and a mesh that calls parallelize_module(), or a module that has been parallelized."
        )
    for name, parameter in found.items():
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        if mesh.size() != ranks or mesh.ndim != 1:
            raise ValueError(
                f"tensor={ranks}: parameter '{name}' is a DTensor over {mesh.size()} ranks in {mesh.ndim} "
                "dimension(s). Pass to plan() the size of the axis over which parallelize_module() split the module."
            )
        if mesh.device_type not in ("cpu", "meta"):
            raise ValueError(
                f"Parameter '{name}' is a DTensor over devices of type '{mesh.device_type}', but traces run on the "
                "CPU. Pass to plan() the plain module and parallelize=, in a process without a process group."
            )
        check_placement(name, parameter, ranks)


def split(
    model: nn.Module,
    ranks: int,
    parallelize: Callable[[nn.Module, DeviceMesh], Any],
    units: Sequence[object] | None,
    stack: ExitStack,
) -> tuple[nn.Module, Sequence[object] | None]:
    """Return a copy of a model on the meta device that the caller's function has split, and its units.

    The model does not change.

    Args:
        ranks: number of ranks along the tensor axis.
        parallelize: called with the copy and the mesh of these ranks.
        units: units of the model, as in `zs.shard`.
        stack: holds the emulated process group of the copy.

    Raises:
        RuntimeError: the process already has a process group.
    """
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "parallelize= emulates a process group, but the process already has one. Plan before "
            "init_process_group() or zs.init(), or pass to plan() the module parallelized over the group's mesh."
        )
    stack.enter_context(emulated_group(ranks))
    copied = on_meta(model)
    twins = dict(zip(model.modules(), copied.modules(), strict=True))
    if units is not None and not isinstance(units, str | type):
        units = [twins.get(one, one) if isinstance(one, nn.Module) else one for one in units]
    parallelize(copied, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",)))
    return copied, units
