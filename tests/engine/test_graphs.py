"""Autograd's whole range: structured inputs and outputs, views changed in place, losses from anywhere."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import TIMEOUT_S, Run, assert_matches, at_worlds
from zeroshard.testing import run_ranks


@dataclasses.dataclass
class Bundle:
    """A dataclass on its way between blocks."""

    hidden: Tensor
    skip: Tensor | None = None
    note: str = ""


class Pair(NamedTuple):
    """A named tuple on its way between blocks."""

    hidden: Tensor
    extra: Tensor


class FromTuple(models.Block):
    """(x, None) -> dict."""

    def forward(self, inputs: tuple[Tensor, None]) -> dict[str, Any]:  # type: ignore[override]
        x, nothing = inputs
        assert nothing is None
        return {"x": super().forward(x), "more": [x.sin(), None, {"deep": x.cos()}], "count": 3}


class FromDict(models.Block):
    """Keyword arguments -> dataclass."""

    def forward(self, *, state: dict[str, Any], flag: bool) -> Bundle:  # type: ignore[override]
        assert flag
        first, nothing, deep = state["more"]
        assert nothing is None
        return Bundle(super().forward(state["x"] + first * deep["deep"]), note="kept")


class FromDataclass(models.Block):
    """Dataclass -> named tuple, and a second output that nobody uses."""

    def forward(self, bundle: Bundle) -> tuple[Pair, Tensor]:  # type: ignore[override]
        assert bundle.skip is None
        assert bundle.note == "kept"
        y = super().forward(bundle.hidden)
        return Pair(y, y.relu()), self.up(y)


class Structured(nn.Module):
    """A model whose blocks and whose own inputs and outputs are structures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.first, self.second, self.third = FromTuple(), FromDict(), FromDataclass()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, batch: dict[str, Any], labels: Tensor | None = None) -> Bundle:
        state = self.first((self.stem(batch["inputs"][0]), None))
        pair, _ = self.third(self.second(state=state, flag=True))
        logits = self.head(pair.hidden * pair.extra)
        return Bundle(logits, None if labels is None else F.mse_loss(logits, labels))


def structured_inputs_and_outputs(run: Run) -> None:
    model = models.build(Structured)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[FromTuple, FromDict, FromDataclass])
    for step in range(3):
        batch = {"inputs": (models.features(step, run.rank), None), "id": step}
        output = model(batch, labels=models.targets(step, run.rank))
        run.backward(output.skip)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=output.skip, logits=output.hidden, without=model(batch).skip)


class Viewing(models.Block):
    """A block that returns a view of what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, -1, WIDTH)


class InPlace(nn.Module):
    """A model that changes in place the views that its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Viewing() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            y = block(x)
            y.mul_(0.5) if index else y[0].add_(1.0)
            x = y.reshape(-1, WIDTH)
        return self.head(x)[:, :3]


def returned_views_changed_in_place(run: Run) -> None:
    model = models.build(InPlace)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        output = model(models.features(step, run.rank))
        output.mul_(2.0)
        output[1:].add_(models.targets(step, run.rank)[1:])
        loss = output.square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


class Auxiliary(models.Block):
    """A block that leaves a loss on itself."""

    loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        self.loss = hidden.square().mean()
        return x + self.down(F.gelu(hidden))


class Balanced(models.Stack):
    """A stack of blocks with losses of their own."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Auxiliary() for _ in range(3))


def losses_from_inside_units(run: Run) -> None:
    model = models.build(Balanced)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank) + sum(block.loss for block in model.blocks)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def only_a_loss_from_inside_a_unit(run: Run) -> None:
    """The model's output is not part of the loss at all."""
    model = models.build(Balanced)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        model(models.features(step, run.rank))
        loss = model.blocks[1].loss
        run.backward(loss)
        run.record(loss=loss, unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


def a_loss_outside_the_model(run: Run) -> None:
    """Plain modules before and after the sharded one, with gradients of their own that nobody reduces."""
    model = models.build(models.Stack)
    before, after = models.build(nn.Linear, 5, 5), models.build(nn.Linear, 3, 2)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        loss = after(model(before(models.features(step, run.rank)).tanh())).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss, before=before.weight.grad, after=after.weight.grad)


def gradients_of_the_inputs(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        x = models.features(step, run.rank).requires_grad_()
        run.backward(model(x).square().mean())
        run.record(grad=x.grad)
        optimizer.step()
        optimizer.zero_grad()


def two_forwards_before_one_backward(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank, 0) * models.stack_loss(model, step, run.rank, 1)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def two_forwards_then_two_backwards(run: Run) -> None:
    """Backward in the order of the forwards, and against it."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(4):
        losses = [models.stack_loss(model, step, run.rank, micro) for micro in range(2)]
        for loss in losses if step % 2 else reversed(losses):
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def a_forward_that_nobody_uses(run: Run) -> None:
    """A forward with gradients enabled whose graph is dropped."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.record(dropped=models.stack_loss(model, step, run.rank, 1))
        run.backward(models.stack_loss(model, step, run.rank, 0))
        optimizer.step()
        optimizer.zero_grad()


def the_graph_retained(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss, retain_graph=True)
        run.backward(loss * 0.5)
        optimizer.step()
        optimizer.zero_grad()


def two_losses_of_one_forward(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        output = model(models.features(step, run.rank))
        run.backward(output.square().mean(), retain_graph=True)
        run.backward((output - models.targets(step, run.rank)).abs().mean())
        optimizer.step()
        optimizer.zero_grad()


def backward_into_some_parameters(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        chosen = [*model.head.parameters(), *model.blocks[step].parameters()]
        run.backward(models.stack_loss(model, step, run.rank), inputs=chosen)
        run.record(unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


def backward_into_the_input_alone(run: Run) -> None:
    """As an attack on the input does, then an ordinary step."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        x = models.features(step, run.rank).requires_grad_()
        run.backward(model(x).square().mean(), inputs=[x])
        run.record(grad=x.grad, unused=[p.grad is None for p in model.parameters()])
        run.backward(model(x.detach() + x.grad.sign()).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def backward_with_a_gradient(run: Run) -> None:
    """From an output that is not a scalar, with a gradient given."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        run.backward(model(models.features(step, run.rank)), gradient=models.targets(step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


def several_models_in_one_loss(run: Run) -> None:
    pair = [models.build(models.Stack), models.build(models.Stack, depth=2)]
    optimizers = [models.adamw(pair[0]), models.sgd(pair[1])]
    for model, optimizer in zip(pair, optimizers, strict=True):
        run.shard(model, optimizer)
    for step in range(3):
        loss = models.stack_loss(pair[0], step, run.rank) + models.stack_loss(pair[1], step, run.rank, 1)
        run.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss=loss)


def models_in_a_chain(run: Run) -> None:
    """A generator and a critic, trained in turns, as adversaries are."""
    generator, critic = models.build(Generator), models.build(models.Stack, depth=2)
    optimizers = [models.adamw(generator), models.adamw(critic)]
    run.shard(generator, optimizers[0])
    run.shard(critic, optimizers[1])
    for step in range(3):
        fake = generator(models.features(step, run.rank))
        run.backward(critic(fake.detach()).mean() - critic(models.features(step, run.rank, 1)).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        run.backward(-critic(fake).mean())
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


class Generator(models.Stack):
    """A stack from features to features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)


def a_graph_through_autograd_grad(run: Run) -> None:
    """`autograd.grad` with respect to the input leaves every parameter alone."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        x = models.features(step, run.rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x)
        run.record(grad=grad, unused=[p.grad is None for p in model.parameters()])
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS = [
    structured_inputs_and_outputs,
    returned_views_changed_in_place,
    losses_from_inside_units,
    only_a_loss_from_inside_a_unit,
    a_loss_outside_the_model,
    gradients_of_the_inputs,
    two_forwards_before_one_backward,
    two_forwards_then_two_backwards,
    a_forward_that_nobody_uses,
    the_graph_retained,
    two_losses_of_one_forward,
    backward_into_some_parameters,
    backward_into_the_input_alone,
    backward_with_a_gradient,
    several_models_in_one_loss,
    models_in_a_chain,
    a_graph_through_autograd_grad,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_graphs(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def step_between_forward_and_backward(run: Run) -> None:
    """The parameters that the graph saved are not the parameters any more: torch raises, and so must the engine."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    run.backward(models.stack_loss(model, 0, run.rank))
    stale = models.stack_loss(model, 1, run.rank)
    optimizer.step()
    try:
        run.backward(stale)
    except RuntimeError as error:
        run.record(is_error="modified" in str(error) or "step" in str(error))
    optimizer.zero_grad()
    run.backward(models.stack_loss(model, 2, run.rank))
    optimizer.step()


def saved_tensor_changed_in_place(run: Run) -> None:
    """Autograd's own check for other tensors must survive the engine's hooks."""
    model = models.build(models.Stack, depth=0)
    model.blocks.append(models.build(Corrupting))
    run.shard(model, models.adamw(model), units=[Corrupting])
    try:
        run.backward(models.stack_loss(model, 0, run.rank))
    except RuntimeError as error:
        run.record(is_error="modified" in str(error))
    run.models[-1].zero_grad()


class Corrupting(nn.Module):
    """A block that changes a tensor in place after autograd saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z = y.square()
        y.add_(1.0)
        return z


@pytest.mark.parametrize(
    "script", [step_between_forward_and_backward, saved_tensor_changed_in_place], ids=lambda script: script.__name__
)
def test_what_torch_refuses_is_refused(script: Callable[[Run], None]) -> None:
    for result in assert_matches(script, 2)[0].values():
        assert result["records"] == [{"is_error": True}]


def changed_where_torch_allows_it() -> list[str]:
    """Change an input in place under torch's context for that; return the errors at stages 2 and 3, and without it."""
    errors = []
    for stage, context in (
        (2, allow_mutation_on_saved_tensors),
        (3, allow_mutation_on_saved_tensors),
        (3, nullcontext),
    ):
        model, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
        zs.shard(model, stage=stage)
        with context():
            loss = model(x).square().mean()
            x.zero_()
            try:
                loss.backward()
                errors.append("")
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def test_an_error_names_the_context_that_does_not_help() -> None:
    for none, named, plain in run_ranks(changed_where_torch_allows_it, 2, timeout_s=TIMEOUT_S):
        assert none == ""
        assert named.startswith(plain)
        assert "modified by an inplace operation" in plain
        assert "such as allow_mutation_on_saved_tensors(), does not help" in named.removeprefix(plain)
