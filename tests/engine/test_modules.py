"""Modules of torch that handle their parameters in ways of their own, and hooks of the user's."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests import models
from tests.models import WIDTH
from tests.oracle import Run, assert_matches, at_worlds


class Around(nn.Module):
    """A residual block around any module on (batch, features)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def blocks_of(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a stack whose three blocks wrap what `make` makes."""
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(Around(make()) for _ in range(3))
    return model


def train(run: Run, model: nn.Module, steps: int = 3) -> None:
    """Train with AdamW, evaluating after each step."""
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(steps):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.record(loss=loss, evaluated=models.stack_loss(model, 100 + step, run.rank))
        model.train()


def _weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers the parametrization
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def old_weight_norm(run: Run) -> None:
    train(run, blocks_of(_weight_norm))


def old_spectral_norm(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        train(run, blocks_of(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))))


def weight_norm_parametrization(run: Run) -> None:
    train(run, blocks_of(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))


def orthogonal_parametrization(run: Run) -> None:
    train(run, blocks_of(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))))


def spectral_norm_parametrization(run: Run) -> None:
    train(run, blocks_of(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))


class Recurrent(nn.Module):
    """A recurrent layer on features as a sequence."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x.view(-1, 3, 4))
        return self.out(y).reshape(-1, WIDTH)


def lstm(run: Run) -> None:
    train(run, blocks_of(lambda: Recurrent(nn.LSTM)))


def gru(run: Run) -> None:
    train(run, blocks_of(lambda: Recurrent(nn.GRU)))


class Attending(nn.Module):
    """torch's own attention, which reads the weights of a submodule that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 4)
        return self.attention(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)


def multihead_attention(run: Run) -> None:
    train(run, blocks_of(Attending))


class Encoding(nn.Module):
    """torch's encoder layer, which in evaluation takes a fused path of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 3, 4)).reshape(-1, WIDTH)


def transformer_encoder_layer(run: Run) -> None:
    train(run, blocks_of(Encoding))


def attention_submodules_as_units(run: Run) -> None:
    """The unit is a module whose parent reads its weight without calling it."""
    model = blocks_of(Attending)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[block.inner.attention.out_proj for block in model.blocks])
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def sequential_model(run: Run) -> None:
    """No ModuleList at all."""
    torch.manual_seed(1)
    train(run, nn.Sequential(nn.Linear(5, WIDTH), models.Block(), nn.ReLU(), models.Block(), nn.Linear(WIDTH, 3)))


def units_without_parameters(run: Run) -> None:
    model = models.build(models.Stack)
    model.blocks = nn.ModuleList([model.blocks[0], nn.GELU(), model.blocks[1], nn.Dropout(0.0)])
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[*model.blocks])
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def bilinear_and_embedding_bag(run: Run) -> None:
    train(run, blocks_of(Summing))


class Summing(nn.Module):
    """Layers with parameters of three dimensions, and with lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.bag = nn.EmbeddingBag(7, WIDTH, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        places = (x.detach().abs() * 10).long() % 7
        return self.bilinear(x, x.tanh()) + self.bag(places)


def user_hooks(run: Run) -> None:
    """Hooks on modules and parameters, set before and after sharding, see and change what they would without it."""
    model = models.build(models.Stack)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model.blocks[1].register_forward_hook(lambda module, args, output: output + 0.25)
    model.blocks[1].up.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    model.stem.weight.register_hook(lambda grad: grad * 2)
    model.blocks[2].down.weight.register_hook(lambda grad: seen.append(grad.clone()))
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    model.blocks[2].register_forward_hook(lambda module, args, output: output * 0.5)
    model.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].clone()))
    model.head.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    model.head.weight.register_hook(lambda grad: grad.sign())
    model.register_forward_hook(lambda module, args, output: output * 2)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss, seen=seen)
        seen.clear()


def hooks_that_read_parameters(run: Run) -> None:
    """A hook of a block may read that block's parameters, before and after it runs."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    sums: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: sums.append(module.up.weight.detach().sum()))
    run.shard(model, optimizer)
    model.blocks[1].register_forward_hook(lambda module, args, output: sums.append(module.up.bias.detach().sum()))
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()
        run.record(sums=sums)
        sums.clear()


def hooks_that_copy_parameters_of_other_units(run: Run) -> None:
    """Take parameters of another unit in a forward, in ways that are no function of torch."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[models.Block])

    def copies(module: nn.Module, *_: object) -> None:
        for take in (lambda p: p.data, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))):
            found = [take(parameter).detach() for block in model.blocks for parameter in block.parameters()]
            run.record(sums=torch.stack([one.sum() for one in found]))

    model.blocks[0].register_forward_hook(copies)
    for step in range(2):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


def kept_activations(run: Run) -> None:
    """A hook that keeps an intermediate tensor, whose gradient the user then retains."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.blocks[1].register_forward_hook(keep)
    for step in range(2):
        kept.clear()
        run.backward(models.stack_loss(model, step, run.rank))
        run.record(grad=kept[0].grad)
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS = [
    old_weight_norm,
    old_spectral_norm,
    weight_norm_parametrization,
    orthogonal_parametrization,
    spectral_norm_parametrization,
    lstm,
    gru,
    multihead_attention,
    transformer_encoder_layer,
    attention_submodules_as_units,
    sequential_model,
    units_without_parameters,
    bilinear_and_embedding_bag,
    user_hooks,
    hooks_that_read_parameters,
    hooks_that_copy_parameters_of_other_units,
    kept_activations,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_modules(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)
