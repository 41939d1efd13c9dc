"""Parameters and modules used more than once: tied, called again, nested, used from elsewhere, other methods."""

import functools
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.models import VOCABULARY, WIDTH
from tests.oracle import STAGES, WORLDS, Run, assert_matches, at_worlds


def train(run: Run, model: nn.Module, steps: int = 3, **options: object) -> None:
    """Train a stack-like model with AdamW."""
    optimizer = models.adamw(model)
    run.shard(model, optimizer, **options)
    for step in range(steps):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def train_gpt(run: Run, model: nn.Module, **options: object) -> None:
    """Train a language model with AdamW."""
    optimizer = models.adamw(model)
    run.shard(model, optimizer, **options)
    for step in range(3):
        loss = models.gpt_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss, is_tied=model.head.weight is model.embedding.weight)


def tied_in_the_root(run: Run) -> None:
    train_gpt(run, models.build(models.GPT, tied=True))


def tied_embedding_in_a_unit_of_its_own(run: Run) -> None:
    model = models.build(models.GPT, tied=True)
    train_gpt(run, model, units=[*model.blocks, model.embedding])


def tied_across_two_units(run: Run) -> None:
    model = models.build(models.GPT, tied=True)
    train_gpt(run, model, units=[*model.blocks, model.embedding, model.head])


def tied_inside_a_block(run: Run) -> None:
    model = models.build(models.Stack)
    for block in model.blocks:
        block.extra = nn.Linear(WIDTH, 2 * WIDTH)
        block.extra.weight = block.up.weight
        block.forward = functools.partial(twice_up, block)
    train(run, model)


def twice_up(block: nn.Module, x: Tensor) -> Tensor:
    h = block.norm(x)
    return x + block.down(block.up(h) * block.extra(h).sigmoid())


def tied_across_blocks(run: Run) -> None:
    """All blocks share one weight, and keep biases of their own."""
    model = models.build(models.Stack)
    for block in model.blocks[1:]:
        block.up.weight = model.blocks[0].up.weight
    train(run, model)


def one_block_in_every_place(run: Run) -> None:
    """The list holds the same module three times."""
    model = models.build(models.Stack)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    train(run, model)


class Recurrent(models.Stack):
    """A stack that runs all its blocks twice, first in order, then in reverse."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = block(x)
        return self.head(x)


def blocks_called_twice(run: Run) -> None:
    train(run, models.build(Recurrent))


class Siamese(models.Stack):
    """A stack that compares two inputs through the same blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - super().forward(x.flip(0).sin())


def whole_model_called_twice_inside(run: Run) -> None:
    train(run, models.build(Siamese))


class Outer(nn.Module):
    """Two blocks with a weight between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = models.Block()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.second = models.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x)))


class Nested(models.Stack):
    """A stack of blocks that contain blocks."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Outer() for _ in range(2))


def nested_units(run: Run) -> None:
    model = models.build(Nested)
    train(run, model, units=[Outer, models.Block])


def nested_units_given_inside_out(run: Run) -> None:
    model = models.build(Nested)
    outer, block = model.blocks[1], model.blocks[1].second
    train(run, model, units=[block, outer])


def the_root_named_as_a_unit(run: Run) -> None:
    model = models.build(models.Stack)
    train(run, model, units=[model, *model.blocks])


class Borrower(models.Stack):
    """A stack whose root uses a weight of a block, before and after that block runs."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[1].down.weight
        x = self.stem(x)
        x = x + F.linear(x.repeat(1, 2), weight)
        for block in self.blocks:
            x = block(x)
        return self.head(x + F.linear(x.repeat(1, 2), self.blocks[1].down.weight, self.blocks[0].down.bias))


def root_uses_a_blocks_weight(run: Run) -> None:
    train(run, models.build(Borrower))


class Peeking(models.Block):
    """A block that also uses the weight of another block, which it does not own as a module."""

    def __init__(self, neighbour: list[nn.Module]) -> None:
        super().__init__()
        self.neighbour = neighbour

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.layer_norm(
            x, (WIDTH,), self.neighbour[0].norm.weight, self.neighbour[0].norm.bias
        )


def a_block_uses_its_neighbours_weight(run: Run) -> None:
    model = models.build(models.Stack, depth=1)
    model.blocks.append(Peeking([model.blocks[0]]))
    train(run, model, units=[*model.blocks])


class Held(nn.Module):
    """A model whose parameters belong to submodules that never run themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer.weight, layer.bias).tanh()
        return self.out(x)


def units_that_never_run(run: Run) -> None:
    train(run, models.build(Held))


class Regularized(models.Stack):
    """A stack whose loss, computed in its forward, includes the size of its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(block.up.weight.square().mean() for block in self.blocks)
        return super().forward(x) + penalty


def weights_inside_the_forward_of_the_root(run: Run) -> None:
    train(run, models.build(Regularized))


SCRIPTS = [
    tied_in_the_root,
    tied_embedding_in_a_unit_of_its_own,
    tied_across_two_units,
    tied_inside_a_block,
    tied_across_blocks,
    one_block_in_every_place,
    blocks_called_twice,
    whole_model_called_twice_inside,
    nested_units,
    nested_units_given_inside_out,
    the_root_named_as_a_unit,
    root_uses_a_blocks_weight,
    a_block_uses_its_neighbours_weight,
    units_that_never_run,
    weights_inside_the_forward_of_the_root,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_sharing(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


class TwoFaced(models.GPT):
    """A model with forward methods besides `forward`."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x

    def score(self, tokens: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.head(self.norm(self.features(tokens))) * scale


def other_forward_methods(run: Run) -> None:
    model = models.build(TwoFaced)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, forward_methods=("score", "features"))
    for step in range(3):
        ids = models.tokens(step, run.rank)
        logits = model.score(ids[:, :-1], scale=0.5)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        loss = loss + model.features(ids).square().mean() + models.gpt_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_registered_forward_methods(world: int) -> None:
    assert_matches(other_forward_methods, world, STAGES)
