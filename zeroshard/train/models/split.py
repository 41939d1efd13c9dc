"""How layers are split over the ranks along the axis "tensor".

Owns the plan of the GPT, and what the plans of transformers need besides. It must not know the loop, and the models do
not know it. The import of torch's DTensor takes half a second, so only a run with `run.tensor` imports this module.
Read `split_gpt` first.

Note: the GPT
    Between layers, each rank has a part of the positions: norms and additions are done once, and their activations are
    not copied. A layer before heads or hidden units gathers the positions and computes this rank's heads or units; the
    layer behind them sums over ranks and keeps its positions. Embedding and head are split by vocabulary, and so is the
    loss: no rank has all logits.
"""

from dataclasses import replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from zeroshard.train.models.gpt import GPT
from zeroshard.train.models.language import LanguageModel
from zeroshard.train.models.shape import check_gpt
from zeroshard.train.models.split_hf import split_hf

__all__ = ["split", "split_language"]


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a GPT, or a model of transformers by its own plan, over a mesh of one axis, in place.

    Args:
        model: on the meta device; `zs.shard` gives each rank its parts of the values.

    Raises:
        ValueError: the ranks do not divide the model, or its plan cannot be used.
    """
    if isinstance(model, GPT):
        check_gpt(model.config, mesh.size())
        _split_gpt(model, mesh)
    else:
        split_hf(model, mesh)


def _split_gpt(model: GPT, mesh: DeviceMesh) -> None:
    by_time = Shard(1)  # of activations, (batch, time, width)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_time),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention.qkv_by_head": ColwiseParallel(input_layouts=by_time),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=by_time),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=by_time),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=by_time),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=by_time, use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embedding.weight  # `parallelize_module` makes a parameter for each


def split_language(language: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Split a language model, and return how it is called then. See `split`."""
    model = language.module
    split(model, mesh)
    if not isinstance(model, GPT):
        return language  # plans of transformers gather the logits

    def compute_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return cast(DTensor, model(tokens, targets)).to_local()

    def compute_logits(tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        padded = F.pad(tokens, (0, -time % mesh.size()))  # no token sees those after it
        return cast(DTensor, model(padded)).full_tensor()[:, :time]

    return replace(language, compute_loss=compute_loss, compute_logits=compute_logits, around_steps=loss_parallel)
