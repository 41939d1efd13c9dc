"""The whole model on rank 0, in host memory: what `save_pretrained` and other programs' savers write.

Owns the gathering, a unit at a time, so that no device holds more than one unit beside its part. A checkpoint
(`save.py`) needs no rank that holds the model. Read `inventory.py` first.
"""

import torch
from torch import nn

from zeroshard.checkpoint.inventory import named_buffers
from zeroshard.core.engine import Engine
from zeroshard.core.parameter import ShardedParameter
from zeroshard.core.slot import slot_of
from zeroshard.whole.detach import gather_masters

__all__ = ["state_on_first_rank"]


def state_on_first_rank(engine: Engine, model: nn.Module, what: str) -> dict[str, torch.Tensor]:
    """Return what `model.state_dict()` has in one process, with master weights, in host memory; {} on other ranks.

    Tied parameters share a tensor. Split parameters need `zero.gathered(whole=True)`, and a pipe needs a checkpoint.

    Args:
        what: the caller, for messages.

    Collective: an all-gather of each unit; every rank must call.
    """
    engine.leave_passes(what)
    engine.order.settle(what)
    engine.order.buffers.settle()
    is_first, found = engine.mesh.rank == 0, dict[str, torch.Tensor]()
    for unit in engine.units:
        for bucket in unit.buckets:
            views = bucket.places.views_of(gather_masters(engine, bucket))
            if is_first:
                names = [slot_of(parameter).name for parameter in bucket.parameters]
                found.update((name, view.to("cpu", copy=True)) for name, view in zip(names, views, strict=True))
    if not is_first:
        return {}
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_sharded = isinstance(parameter, ShardedParameter)
        state[name] = found[slot_of(parameter).name] if is_sharded else parameter.detach().cpu()
    return state | {name: buffer.detach().cpu() for name, buffer in named_buffers(model)}
