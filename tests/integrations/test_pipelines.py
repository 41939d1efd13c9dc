"""Models of Transformers, unmodified, trained by `zs.pipeline`: the losses of one process."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.oracle import TIMEOUT_S, WATCHDOG_S, seed
from tests.rotation import third
from zeroshard.describe.blocks import find_blocks
from zeroshard.parallel.cut import cut_model
from zeroshard.testing import run_ranks

from . import tiny

STEPS, MICRO = 3, 2
REFUSED = "t5"


def gemma2() -> transformers.PretrainedConfig:
    return tiny.decoder(transformers.Gemma2Config, head_dim=6, sliding_window=4, pad_token_id=0)


def kinds() -> dict[str, tiny.Kind]:
    found = {**tiny.kinds(), "gemma2": tiny.Kind(transformers.Gemma2ForCausalLM, gemma2, tiny.text)}
    # The auxiliary loss of Mixtral is one of all layers, of which no place has all.
    found["mixtral"] = dataclasses.replace(found["mixtral"], config=mixtral)
    return found


def mixtral() -> transformers.PretrainedConfig:
    config = tiny.mixtral()
    config.output_router_logits = False
    return config


def build(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    seed(99)
    kind = kinds()[name]
    config = kind.config()
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)  # a place draws other numbers than one process
    model = kind.model(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def micro_batches(name: str, step: int, data: int) -> list[dict[str, Tensor]]:
    return [kinds()[name].batch(step, MICRO * data + micro) for micro in range(MICRO)]


def train(names: list[str], stages: list[int]) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard")), dict[str, Any]()
    for name, stage in zip(names, stages, strict=True):
        model, optimizer = build(name)
        settings, losses = zs.Settings(watchdog_s=WATCHDOG_S), []
        try:
            pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, stage=stage, settings=settings)
            for step in range(STEPS):
                parts = micro_batches(name, step, mesh.get_local_rank("shard"))
                batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
                losses.append(pipe.step(batch).item())
                optimizer.step()
                optimizer.zero_grad()
            found[name] = losses
        except (ValueError, RuntimeError, zs.RankMismatchError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def plain(name: str) -> list[float]:
    model, optimizer = build(name)
    losses = []
    for step in range(STEPS):
        parts = [part for data in range(2) for part in micro_batches(name, step, data)]
        loss = sum(model(**part).loss for part in parts) / len(parts)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.timeout(8 * TIMEOUT_S)
def test_models_of_transformers_train_as_in_one_process() -> None:
    names = third([name for name in kinds() if name != REFUSED])
    stages = [(3, 0, 2, 1)[number % 4] for number, _ in enumerate(names)]
    for found in run_ranks(train, 4, names, stages, timeout_s=4 * TIMEOUT_S):
        for name in names:
            assert found[name] == pytest.approx(plain(name), rel=1e-5), name


@pytest.mark.rotates
@pytest.mark.timeout(8 * TIMEOUT_S)
def test_an_encoder_and_a_decoder_are_refused() -> None:
    for found in run_ranks(train, 4, [REFUSED], [0], timeout_s=4 * TIMEOUT_S):
        assert "Module 'encoder' returns a BaseModelOutput" in found[REFUSED], found


def test_a_model_is_cut_between_the_blocks_of_its_own_plan_for_pipelines() -> None:
    """Gemma 3n has other lists of modules beside its layers."""
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(
            transformers.Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=0)
        )
    layers = [f"model.layers.{number}" for number in range(4)]
    outside = {name for name, module in model.named_modules() if module in find_blocks(model)[0]} - {*layers}
    assert outside  # of which blocks would be members
    for chunks in (2, 3, 4):
        assert {*cut_model(model, None, chunks).starts} < {*layers}
    with pytest.raises(ValueError, match="Gemma3nForCausalLM has 4 blocks, too few for a pipe of 5 chunks"):
        cut_model(model, None, 5)
