"""How the plan of a transformers model splits it over the ranks along the axis "tensor".

Owns the check of these plans, and what they need besides under `zs.shard`. The split itself is transformers' own. It
must not know the loop. Read `plan_of` first.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.train.extras import need

__all__ = ["RANDOM", "plan_of", "split_hf"]

_FIRST, _BEYOND = (5, 23), (5, 25)
"""Versions of transformers with the functions below: from the first on, and below the second."""
_DIMENSIONS: Final = MappingProxyType(
    {
        "colwise": -2,
        "colwise_gather_output": -2,
        "colwise_rep": -2,
        "packed_colwise": -2,
        "rowwise": -1,
        "rowwise_rep": -1,
        "rowwise_split_input": -1,
        "packed_rowwise": -1,
        "embedding_rowwise": 0,
        "embedding_colwise": 1,
    }
)
"""The dimension of a matrix that each style splits."""
_GROUPS: Final = MappingProxyType({"packed_colwise": 2, "packed_rowwise": 2})
"""Groups of that dimension, each of which every rank has a block of: the gate and the up projection in one weight."""
_SUMMED: Final = "replicated_with_grad_allreduce"
_STYLES: Final = frozenset([*_DIMENSIONS, _SUMMED, "replicate", "all_reduce", "moe_tp_experts"])
_KEYS: Final = ("k_proj", "qkv_proj", "query_key_value")
RANDOM: Final = re.compile(r"drop|jitter")
"""Settings of a configuration that draw numbers in a forward."""


def plan_of(model: Any, tensor: int) -> Mapping[str, str]:
    """Return the style of each module and parameter that a model's own plan names.

    Args:
        model: a causal model of transformers, whole; it may be on the meta device.
        tensor: number of ranks along the axis.

    Raises:
        ValueError: the model has no plan, or one that cannot be used with these ranks; or transformers has another
            version.
    """
    name, otherwise = type(model).__name__, "set run.tensor=1 to train the model without tensor parallelism"
    version = need("transformers", "transformers", "run.tensor").__version__
    if not _FIRST <= tuple(int(part) for part in version.split(".")[:2]) < _BEYOND:
        raise ValueError(
            f"run.tensor={tensor} splits models of transformers 5.23 and 5.24, and {version} is installed; "
            f'pip install "transformers>=5.23,<5.25", or {otherwise}'
        )
    if not model.base_model.tp_plan:
        raise ValueError(f"run.tensor={tensor}: {name} has no base_model_tp_plan in transformers; {otherwise}")
    for place, style in model.tp_plan.items():
        if style not in _STYLES:
            raise ValueError(
                f"run.tensor={tensor}: the plan of {name} has the style {style!r} at {place!r}, and zeroshard train "
                f"supports {', '.join(sorted(_STYLES))}; {otherwise}"
            )
    config = model.config.get_text_config()
    for key, value in config.to_dict().items():
        if RANDOM.search(key) and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            raise ValueError(
                f"run.tensor={tensor}: {key} of {name} is {value}, and ranks that split a layer would draw other "
                f"numbers; set it to 0 in config.json, or {otherwise}"
            )
    if any(place.endswith(_KEYS) and style == "colwise" for place, style in model.tp_plan.items()):
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key, None)
            if isinstance(heads, int) and heads % tensor:
                raise ValueError(f"run.tensor={tensor} does not divide {key}={heads} of {name}; {otherwise}")
    return _check_sizes(model, _resolve(model, tensor), tensor, otherwise)


def _resolve(model: Any, tensor: int) -> Mapping[str, str]:
    from transformers.distributed import DistributedConfig

    plan: Mapping[str, str] = model._resolve_parallel_plans(DistributedConfig(tp_size=tensor, tp_plan="auto"))[0]
    return plan


def _check_sizes(model: nn.Module, plan: Mapping[str, str], tensor: int, otherwise: str) -> Mapping[str, str]:
    """Return the plan, if ranks have equal parts of all parameters."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = plan.get(name, "")
        dimension, groups = _DIMENSIONS.get(style), _GROUPS.get(style, 1)
        if dimension is not None and parameter.ndim > 1 and parameter.shape[dimension] % (tensor * groups):
            raise ValueError(
                f"run.tensor={tensor} does not divide {f'each of {groups} equal groups of ' if groups > 1 else ''}"
                f"the {parameter.shape[dimension]:,} {'rows' if dimension in (-2, 0) else 'columns'} of '{name}' "
                f"{tuple(parameter.shape)}; {otherwise}"
            )
    return plan


def split_hf(model: Any, mesh: DeviceMesh) -> None:
    """Split a causal model of transformers by its own plan over a mesh of one axis, in place.

    Raises:
        ValueError: as `plan_of` does, before any change.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, modules = plan_of(model, mesh.size()), dict(model.named_modules())
    tied = _untie(model)
    # transformers sums these gradients in hooks on `.grad`, which is a sum over ranks under `zs.shard`.
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != _SUMMED})
    for (module, key), (first, first_key) in tied.items():
        module._parameters[key] = first._parameters[first_key]
    for name, style in plan.items():
        if style == _SUMMED and name in modules:
            _sum_gradients(modules[name], mesh)


Place = tuple[nn.Module, str]
"""A module and the name of a parameter in it."""


def _untie(model: nn.Module) -> Mapping[Place, Place]:
    """Make a parameter of its own at each place of a tied one, and return the first place of each other place."""
    first, found = dict[int, Place](), dict[Place, Place]()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or first.setdefault(id(parameter), (module, key)) == (module, key):
                continue
            found[module, key] = first[id(parameter)]
            module._parameters[key] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return found


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a module's parameters over the ranks of a mesh, each of which uses them for its heads."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    forward: Callable[..., Any] = module.forward

    def sum_later(parameter: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def call(*args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = dict(module._parameters)
        module._parameters.update({key: sum_later(p) for key, p in own.items() if p is not None})  # type: ignore[misc]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = call
