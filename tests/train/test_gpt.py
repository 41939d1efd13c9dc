"""The model: shapes, causality, what follows from the depth."""

import math

import pytest
import torch

from zeroshard.train.models.gpt import GPT, GPTConfig


def _model(depth=2, context=16):
    torch.manual_seed(0)
    model = GPT(GPTConfig(depth, context))
    for block in model.blocks:
        for matrix in (block.attention.out, block.mlp.down):
            torch.nn.init.normal_(matrix.weight, std=0.05)
    return model


def test_shapes_and_first_loss():
    config = GPTConfig(2, 16)
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(0, 256, (3, 12))
    assert model(tokens).shape == (3, 12, 256)
    loss = model(tokens, torch.randint(0, 256, (3, 12)))
    assert loss.shape == ()
    assert abs(loss.item() - math.log(256)) < 0.5


def test_no_token_sees_a_later_one():
    model = _model()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_place_matters():
    model = _model()
    logits = model(torch.full((1, 16), 7))
    swapped = model(torch.tensor([[1, 2, 7]]))[0, -1] - model(torch.tensor([[2, 1, 7]]))[0, -1]
    assert swapped.abs().max() > 1e-3
    assert torch.allclose(logits[0, 0], logits[0, 5], atol=1e-4)  # equal values mix to themselves wherever they stand


def test_ignored_targets_do_not_count():
    model = _model()
    tokens, targets = torch.randint(0, 256, (1, 8)), torch.randint(0, 256, (1, 8))
    targets[0, 4:] = -1
    assert torch.equal(model(tokens, targets), model(tokens[:, :4], targets[:, :4]))


@pytest.mark.parametrize("depth", [1, 2, 4, 6, 12])
def test_what_follows_from_the_depth(depth):
    config = GPTConfig(depth)
    assert config.width == 32 * depth
    assert config.heads * 32 == config.width
    assert config.batch % 4 == 0
    bigger = GPTConfig(depth + 1)
    assert bigger.batch >= config.batch
    assert bigger.learning_rate < config.learning_rate


def test_numel_follows_from_the_depth():
    config = GPTConfig(3)
    width = config.width
    numel = sum(p.numel() for p in GPT(config).parameters())
    assert numel == config.vocabulary * width + 3 * (12 * width**2 + 2 * width) + width


@pytest.mark.parametrize("field", ["depth", "context", "vocabulary"])
def test_impossible_shapes_are_named(field):
    with pytest.raises(ValueError, match=rf"GPTConfig\.{field} must be at least 1, got 0"):
        GPTConfig(**{"depth": 1, field: 0})


def test_bf16_stays_close():
    model = _model()
    tokens = torch.randint(0, 256, (2, 16))
    expected = model(tokens)
    got = model.to(torch.bfloat16)(tokens)
    assert got.dtype == torch.float32
    # bf16 keeps 8 bits: one part in 256, a few times over.
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()
