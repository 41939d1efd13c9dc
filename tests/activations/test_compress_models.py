"""Compression through `shard`: whole models train to the same bits, at every world size, and keep fewer bytes."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from benchmarks.compress import link_of
from benchmarks.resnet import ResNet18
from tests.oracle import Run, assert_matches, randint, randn, seed
from zeroshard.train.models.gpt import GPT, GPTConfig


def build_gpt(depth: int = 2, context: int = 32) -> nn.Module:
    seed(1)
    model = GPT(GPTConfig(depth, context=context))
    for block in model.blocks:
        nn.init.normal_(block.mlp.down.weight, std=0.02)  # type: ignore[union-attr, arg-type]
        nn.init.normal_(block.attention.out.weight, std=0.02)  # type: ignore[union-attr, arg-type]
    return model


def gpt_batch(step: int, rank: int, context: int = 32) -> tuple[Tensor, ...]:
    tokens = randint(256, 2, context + 1, key=(step, rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build_resnet(width: int = 64) -> nn.Module:
    seed(1)
    return ResNet18(10, width)


def resnet_batch(step: int, rank: int) -> tuple[Tensor, ...]:
    return randn(2, 3, 64, 64, key=(step, rank)), randint(10, 2, key=(step, rank, 1))


def script(build: Callable[[], nn.Module], batch: Callable[[int, int], tuple[Tensor, ...]], run: Run) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.shard(model, optimizer)
    for step in range(3):
        loss = model(*batch(step, run.rank))
        run.backward(loss)
        run.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_a_gpt_trains_to_the_same_bits(world: int) -> None:
    assert_matches(functools.partial(script, build_gpt, gpt_batch), world, (0, 3), {"activations": "compress"})


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_a_resnet_trains_to_the_same_bits(world: int) -> None:
    assert_matches(
        functools.partial(script, functools.partial(build_resnet, 8), resnet_batch),
        world,
        (0, 3),
        {"activations": "compress"},
    )


def ratio_of(model: nn.Module, batch: tuple[Tensor, ...], how: str) -> tuple[float, dict[str, tuple[int, int]]]:
    """Return how many times fewer bytes are kept, and the bytes by encoding."""
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=0, activations=how)
    model(*batch).backward()
    saved = link_of(zero).saved()  # type: ignore[union-attr]
    before, after = (sum(pair[side] for pair in saved.values()) for side in (0, 1))
    return before / after, saved


def test_a_resnet_keeps_fewer_bytes() -> None:
    ratio, _ = ratio_of(build_resnet(), resnet_batch(0, 0), "compress")
    assert ratio > 1.25


def test_a_gpt_keeps_fewer_bytes() -> None:
    ratio, saved = ratio_of(build_gpt(4, 128), gpt_batch(0, 0, 128), "compress")
    assert ratio > 1.6
    # The square of a ReLU's result, as large as the result, is derived from its values.
    assert saved["derived"] == (saved["nonzero"][0], 0)


def test_a_gpt_keeps_fewer_bytes_in_bf16() -> None:
    ratio, _ = ratio_of(build_gpt(4, 128), gpt_batch(0, 0, 128), "compress-bf16")
    assert ratio > 1.8


class Checkpointed(nn.Module):
    """Recomputes its layers; what it keeps is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x * 2, use_reentrant=False)


@pytest.mark.parametrize(("how", "is_same"), [("compress", True), ("compress-bf16", False)])
def test_inputs_of_recomputed_modules_are_rounded_on_request(how: str, is_same: bool) -> None:
    def train(activations: str) -> list[Tensor]:
        seed(2)
        model = Checkpointed()
        zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=0, activations=activations)
        model(randn(32, 64, key=(1,)).requires_grad_()).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    pairs = list(zip(train("keep"), train(how), strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(one, other) for one, other in pairs) == is_same
    assert all(torch.allclose(one, other, rtol=0.0, atol=0.1 * float(one.abs().max())) for one, other in pairs)


def test_recomputed_units_and_compression_go_together() -> None:
    assert_matches(functools.partial(script, build_gpt, gpt_batch), 1, (0, 3), {"activations": "recompute+compress"})


@pytest.mark.parametrize("rest", ["bf16", "fp8", "int8"])
def test_a_recomputation_from_rounded_inputs_is_not_compared(rest: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    zs.shard(model, stage=0, activations=f"recompute+compress-{rest}")
    model(torch.randn(32, 64)).sum().backward()  # two recomputations with other outputs than their forwards
    assert all(parameter.grad is not None for parameter in model.parameters())
