"""Derivatives of derivatives, and the other ways to differentiate through a sharded model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, assert_matches
from tools.settled import settled
from zeroshard.testing import run_ranks


class Smooth(models.Stack):
    """A stack whose every layer has second derivatives that are not zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def gradient_penalty(run: Run) -> None:
    """A critic whose gradient at its input is held at norm 1, as in WGAN-GP, and its accumulation."""
    critic = models.build(Smooth)
    optimizer = models.adamw(critic)
    run.shard(critic, optimizer)
    for step in range(3):
        for micro in range(1 + step % 2):
            x = models.features(step, run.rank, micro).requires_grad_()
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            run.record(penalty=penalty, slope=slope)
            run.backward(score.mean() + 10 * penalty)
        optimizer.step()
        optimizer.zero_grad()


def penalty_alone(run: Run) -> None:
    """The penalty of an interpolated input in a backward of its own, after that of the loss."""
    critic = models.build(Smooth)
    optimizer = models.sgd(critic)
    run.shard(critic, optimizer)
    for step in range(2):
        run.backward(models.stack_loss(critic, step, run.rank))
        x = models.features(step, run.rank, 1).requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        run.backward(slope.square().sum())
        optimizer.step()
        optimizer.zero_grad()


def third_derivative(run: Run) -> None:
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        x = models.features(step, run.rank).requires_grad_()
        value = model(x).sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = slope.square().sum()
        run.record(value=value)
        run.backward(value)
        optimizer.step()
        optimizer.zero_grad()


def products_with_the_hessian_of_the_input(run: Run) -> None:
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        x, direction = models.features(step, run.rank), models.features(step, run.rank, 1)

        def scalar(x: Tensor) -> Tensor:
            return model(x).square().sum()

        run.record(
            hvp=functional.hvp(scalar, x, direction),
            vhp=functional.vhp(scalar, x, direction),
            hessian=functional.hessian(scalar, x[:1]),
            jacobian=functional.jacobian(model, x[:1]),
            vectorized=functional.jacobian(model, x[:1], vectorize=True),
            jvp=functional.jvp(model, x, direction),
            vjp=functional.vjp(model, x, models.targets(step, run.rank)),
            unused=[p.grad is None for p in model.parameters()],
        )
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


def gradients_of_parameters(run: Run) -> None:
    """`autograd.grad` with respect to parameters is this rank's own; through it goes a backward that is reduced."""
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        chosen = [model.head.weight, model.blocks[0].up.weight, model.stem.bias]
        run.record(own=torch.autograd.grad(models.stack_loss(model, step, run.rank), chosen))
        everything = list(model.parameters())
        slopes = torch.autograd.grad(models.stack_loss(model, step, run.rank), everything, create_graph=True)
        run.record(slopes=slopes)
        run.backward(sum(slope.square().sum() for slope in slopes))
        run.record(grads=[p.grad is None for p in everything])
        optimizer.step()
        optimizer.zero_grad()


def batched_gradients(run: Run) -> None:
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        x = models.features(step, run.rank).requires_grad_()
        output = model(x)
        basis = torch.eye(output.numel()).view(-1, *output.shape)
        run.record(rows=torch.autograd.grad(output, x, basis, is_grads_batched=True, retain_graph=True))
        (curved,) = torch.autograd.grad(output, x, basis, is_grads_batched=True, create_graph=True)
        run.backward(curved.square().sum())
        optimizer.step()
        optimizer.zero_grad()


class Forces(Smooth):
    """A model whose output is the gradient of its energy, as those of molecules are."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy, -slope


def a_gradient_inside_forward(run: Run) -> None:
    model = models.build(Forces, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(3):
        energy, forces = model(models.features(step, run.rank))
        run.record(energy=energy, forces=forces)
        run.backward(energy.square() + forces.square().sum())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.record(evaluated=model(models.features(step, run.rank, 1)))
        model.train()


def transforms_of_forward(run: Run) -> None:
    """Forward-mode derivatives, and a batch of models' inputs."""
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        x, direction = models.features(step, run.rank), models.features(step, run.rank, 1)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction)))
            run.record(primal=dual.primal, tangent=dual.tangent)
            run.backward(dual.tangent.square().sum())
        run.record(jvp=torch.func.jvp(model, (x,), (direction,)))
        run.record(vmap=torch.vmap(model)(x[:, None]), jacobian=torch.func.jacfwd(model)(x[0]))
        run.backward(torch.vmap(model)(x[:, None]).square().sum())
        optimizer.step()
        optimizer.zero_grad()


def graph_kept_and_used_again(run: Run) -> None:
    """Two backwards through a backward, and one that begins in the middle of it."""
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        x = models.features(step, run.rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = slope.square().sum()
        run.backward(loss, retain_graph=True)
        run.backward(loss.sin(), retain_graph=True)
        x.grad = None
        run.backward(loss, inputs=[x])
        run.record(grad=x.grad)
        optimizer.step()
        optimizer.zero_grad()


def loss_at(model: nn.Module, values: dict[str, Tensor], *key: int) -> Tensor:
    """Return the loss of other parameters."""
    output = torch.func.functional_call(model, values, (models.features(*key),))
    return (output - models.targets(*key)).square().mean()


class Adapting(nn.Module):
    """A model whose loss is that of its parameters after a step of their own, as in MAML."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *key: int) -> Tensor:
        values = dict(self.model.named_parameters())
        for micro in range(2):
            slopes = torch.autograd.grad(
                loss_at(self.model, values, *key, micro), list(values.values()), create_graph=True
            )
            values = {name: p - 0.1 * slope for (name, p), slope in zip(values.items(), slopes, strict=True)}
        return loss_at(self.model, values, *key, 2)


def inner_steps(run: Run) -> None:
    model = Adapting(models.build(Smooth, depth=2))
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        run.backward(loss := model(step, run.rank))
        run.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def inner_steps_outside(run: Run) -> None:
    """The same where parameters are whole, by another way, too."""
    model = models.build(Smooth, depth=2)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        values = dict(model.named_parameters())
        slopes = torch.func.grad(lambda values, step=step: loss_at(model, values, step, run.rank, 0))(values)
        moved = {name: p - 0.1 * slopes[name] for name, p in values.items()}
        run.backward(Adapting(model)(step, run.rank) + loss_at(model, moved, step, run.rank, 1))
        optimizer.step()
        optimizer.zero_grad()


RIGHT = [
    inner_steps,
    gradient_penalty,
    penalty_alone,
    third_derivative,
    products_with_the_hessian_of_the_input,
    gradients_of_parameters,
    batched_gradients,
    a_gradient_inside_forward,
    transforms_of_forward,
    graph_kept_and_used_again,
]


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "messages"])
@pytest.mark.parametrize("script", RIGHT, ids=lambda script: script.__name__)
def test_right(script: Callable[[Run], None], shared_memory: bool) -> None:
    assert_matches(script, 2, STAGES, {"shared_memory": shared_memory})


@pytest.mark.product
@pytest.mark.parametrize("options", [{}, {"parameters": "replicated"}], ids=["whole", "replicated"])
def test_inner_steps_where_parameters_are_whole(options: dict[str, Any]) -> None:
    assert_matches(inner_steps_outside, 2, (3,) if options else (0, 1, 2), {"shared_memory": bool(options), **options})


def sharded(stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, zs.Zero]:
    model = models.build(Smooth)
    optimizer = models.sgd(model)
    return model, optimizer, zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": WATCHDOG_S, **options}))


def checkpointed(model: nn.Module) -> None:
    """Second derivatives through what is recomputed."""
    x = models.features(0, dist.get_rank()).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def scaled(model: nn.Module) -> None:
    """Second derivatives with a loss scale, which would be in both."""
    x = models.features(0, dist.get_rank()).requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def transform(model: nn.Module) -> None:
    torch.func.grad(lambda x: model(x).sum())(models.features(0, dist.get_rank()))


def transform_inside(model: nn.Module) -> None:
    """Gradients of each sample, in the forward."""

    def loss(values: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model.head, values, (x,)).sum()

    def each(module: nn.Module, args: Any, output: Tensor) -> None:
        values = {name: p.detach() for name, p in model.head.named_parameters()}
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, output.detach())

    hook = model.stem.register_forward_hook(each)
    try:
        model(models.features(0, dist.get_rank()))
    finally:
        hook.remove()


def hessian(model: nn.Module) -> None:
    torch.func.hessian(lambda x: model(x).sum())(models.features(0, dist.get_rank())[0])


def functional_call(model: nn.Module) -> None:
    values = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, (models.features(0, dist.get_rank()),))


def inner_step(model: nn.Module) -> None:
    """A step of MAML outside the context."""
    slopes = torch.autograd.grad(models.stack_loss(model, 0, dist.get_rank()), [*model.parameters()], create_graph=True)
    for p, slope in zip(model.parameters(), slopes, strict=True):
        _ = p - 0.1 * slope


def backward_after_gathered(model: nn.Module, zero: zs.Zero) -> None:
    with zero.gathered():
        loss = models.stack_loss(model, 0, dist.get_rank())
    loss.backward()


def create_graph(model: nn.Module) -> None:
    models.stack_loss(model, 0, dist.get_rank()).backward(create_graph=True)


class Inner(Smooth):
    """A model that calls backward() in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.square().sum().backward(retain_graph=True)
        return y


def backward_inside_forward(model: nn.Module) -> None:
    model.__class__ = Inner
    try:
        model(models.features(0, dist.get_rank()))
    finally:
        model.__class__ = Smooth


def graph_over_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = models.features(0, dist.get_rank()).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    models.stack_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    slope.square().sum().backward()


class Recomputed(models.Block):
    """A block that is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


REFUSED: dict[str, tuple[Callable[..., None], tuple[int, ...], str]] = {
    "torch.func.grad": (transform, (3,), "torch.func.grad"),
    "torch.func.grad inside forward": (
        transform_inside,
        (3,),
        "torch.autograd.grad, or keep parameters whole (stage=2",
    ),
    "torch.func.hessian": (hessian, (3,), "torch.func.grad"),
    "functional_call": (functional_call, (3,), "functional_call() with another tensor for 'stem.weight'"),
    "an inner step": (inner_step, (3,), "run it in the model's forward, or keep parameters whole (stage=2"),
    "backward after gathered": (backward_after_gathered, (3,), "backward() after gathered() through a forward"),
    "create_graph": (create_graph, (0, 1, 2, 3), "create_graph=True"),
    "backward inside forward": (backward_inside_forward, (3,), "inside the forward"),
    "a graph kept over a step": (graph_over_a_step, (0, 1, 2, 3), "step|modified by an inplace"),
    "create_graph through checkpointing": (checkpointed, (3,), "create_graph=True through activation checkpointing"),
    "create_graph with a loss scale": (scaled, (0, 1, 2, 3), "create_graph=True with a loss scale"),
}


def refuse(shared_memory: bool) -> list[tuple[str, int, str, list[bool]]]:
    """Do each at each stage; a step after it must be that of a model that was never disturbed."""
    seen = []
    for stage in STAGES:
        for what, (action, _, _) in REFUSED.items():
            ends = []
            text = "nothing was raised"
            for is_disturbed in (False, True):
                precision = "fp16" if action is scaled else "fp32"
                model, optimizer, zero = sharded(stage, shared_memory=shared_memory, precision=precision)
                if action is checkpointed:
                    for block in model.blocks:
                        block.__class__ = Recomputed
                if action is graph_over_a_step and not is_disturbed:
                    models.stack_loss(model, 0, dist.get_rank()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if is_disturbed:
                    try:
                        others = {graph_over_a_step: [optimizer], backward_after_gathered: [zero]}
                        action(model, *others.get(action, []))
                    except RuntimeError as error:
                        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
                    optimizer.zero_grad()
                for step in range(2):
                    models.stack_loss(model, step, dist.get_rank()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with zero.gathered():
                    ends.append([p.detach().clone() for p in model.parameters()])
            seen.append((what, stage, text, [a.equal(b) for a, b in zip(*ends, strict=True)]))
    return seen


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "messages"])
def test_refused_by_name_before_anything_is_lost(shared_memory: bool) -> None:
    for seen in run_ranks(refuse, 2, shared_memory, timeout_s=4 * TIMEOUT_S):
        for what, stage, text, is_same in seen:
            _, stages, words = REFUSED[what]
            if stage in stages:
                assert any(word in text for word in words.split("|")), f"{what} at stage {stage}: {text}"
            else:
                assert text == "nothing was raised", f"{what} at stage {stage}: {text}"
            assert all(is_same), f"{what} at stage {stage}"
