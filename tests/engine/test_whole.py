"""Optimizers that need whole matrices give the bits of one process, at any stage and number of ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from tests import models
from tests.oracle import STAGES, WORLDS, Run, assert_matches, at_worlds
from zeroshard.optim.whole import whole_matrix


class Trust(Optimizer):
    """An optimizer that looks at the norm of each whole parameter, as LARS and LAMB do.

    It makes new tensors instead of changing old ones, and keeps plain numbers beside tensors.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = p.grad.mean() + state.get("mean", 0.0)
                    state["last"] = p.grad.clone()
                    p.data = p.data - p.grad * p.norm() / (p.grad.norm() + 1e-6) * group["lr"] / state["count"]


def muon_and_adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    """Return Muon for the matrices inside, and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embedding" not in name and "position" not in name]
    others = [p for _, p in named if not any(p is one for one in matrices)]
    return [Muon(matrices, lr=0.02, **options), torch.optim.AdamW(others, lr=1e-2)]


def train(run: Run, model: nn.Module, *optimizers: Optimizer, steps: int = 3, first: int = 0) -> None:
    """Train a stack, or a GPT, with everything that `optimizers` hold."""
    for step in range(first, first + steps):
        loss = (models.gpt_loss if isinstance(model, models.GPT) else models.stack_loss)(model, step, run.rank)
        run.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss=loss)


def muon(run: Run) -> None:
    model = models.build(models.GPT)
    optimizers = muon_and_adamw(model)
    run.shard(model, *optimizers)
    train(run, model, *optimizers)


def adafactor(run: Run) -> None:
    for options in ({"foreach": False}, {"foreach": True}, {"maximize": True}, {"lr": torch.tensor(0.02)}):
        model = models.build(models.GPT)
        optimizer = Adafactor(model.parameters(), **{"lr": 0.05, "weight_decay": 0.1, **options})
        run.shard(model, optimizer)
        train(run, model, optimizer)


def trust(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = whole_matrix(Trust(model.parameters()))
    run.shard(model, optimizer)
    train(run, model, optimizer)


def some_whole_some_sliced(run: Run) -> None:
    """Split one optimizer's parameters by shape, and one group by its key."""
    for cls, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"fused": 1}),
    ):
        model = models.build(models.Stack)
        groups = [
            {"params": [*model.blocks.parameters()]},
            {"params": [*model.head.parameters()], "whole": False, "lr": 0.03},
            {"params": [*model.stem.parameters()], "weight_decay": 0.1},
        ]
        optimizer = whole_matrix(cls(groups, lr=1e-2, **options), takes=lambda shape: len(shape) == 2)
        run.shard(model, optimizer)
        train(run, model, optimizer)


def several_groups_and_a_schedule(run: Run) -> None:
    model = models.build(models.Stack)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = Muon(
        [{"params": matrices[::2], "lr": 0.1}, {"params": matrices[1::2], "momentum": 0.5, "nesterov": False}], lr=0.02
    )
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)
    run.shard(model, optimizer, rest)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        train(run, model, optimizer, rest, steps=1, first=step)
        scheduler.step()
        run.record(rates=scheduler.get_last_lr())


def a_group_added_later(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = Adafactor([*model.blocks.parameters()], lr=0.05)
    rest = torch.optim.SGD(model.stem.parameters(), lr=0.1)
    for p in model.head.parameters():
        p.requires_grad_(False)
    run.shard(model, optimizer, rest)
    train(run, model, optimizer, rest, steps=2)
    for p in model.head.parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.head.parameters()], "lr": 0.1})
    train(run, model, optimizer, rest, steps=2, first=2)


def parameters_used_now_and_then(run: Run) -> None:
    """Use blocks for the first time in different steps, some on one rank alone, and one parameter never."""
    model = models.build(models.Routed)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    run.shard(model, optimizer)
    routes: list[Sequence[int]] = [(0,), (0, 2), (1, 3), (3,), ()]
    for step, route in enumerate(routes):
        mine = route if run.rank == 0 else route[:1]
        loss = F.mse_loss(model(models.features(step, run.rank), mine), models.targets(step, run.rank))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def a_step_without_gradients(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    run.shard(model, optimizer)
    optimizer.step()
    train(run, model, optimizer, steps=2)
    optimizer.step()


def clipped_and_accumulated(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    run.shard(model, optimizer)
    for step in range(3):
        with run.no_sync():
            run.backward(models.stack_loss(model, step, run.rank))
        run.backward(models.stack_loss(model, step, run.rank, 1))
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def existing_state(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    models.stack_loss(model, 9, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    run.shard(model, optimizer)
    train(run, model, optimizer)


class Odd(nn.Module):
    """Parameters of all kinds: of no and of one element, without dimensions, in other strides, one larger than all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 300)
        self.narrow = nn.Linear(300, 3)
        self.convolution = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3).t())
        self.one = nn.Parameter(torch.ones(1, 1))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        image = self.narrow(self.stem(x)).view(-1, 3, 1, 1).contiguous(memory_format=torch.channels_last)
        y = F.linear(F.linear(self.convolution(image).flatten(1), self.transposed.t()), self.transposed)
        return (y * self.one.squeeze() + self.number) * self.frozen + self.nothing.sum()


def odd_parameters(run: Run) -> None:
    for cls in (Adafactor, Trust):
        model = models.build(Odd)
        trained = [p for p in model.parameters() if p.requires_grad and (p.numel() or cls is Trust)]
        optimizers = [whole_matrix(cls(trained, lr=0.05))]
        if cls is Adafactor:
            optimizers.append(torch.optim.SGD([model.nothing], lr=0.1))
        run.shard(model, *optimizers)
        train(run, model, *optimizers)


class Single(nn.Module):
    """Fewer matrices than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def fewer_matrices_than_ranks(run: Run) -> None:
    model = models.build(Single)
    optimizer = Muon(model.parameters(), lr=0.1)
    run.shard(model, optimizer)
    train(run, model, optimizer)


def attached_later(run: Run) -> None:
    model = models.build(models.Stack)
    run.shard(model)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    run.attach(optimizer)
    train(run, model, optimizer)


def states_read_and_written(run: Run) -> None:
    """Read whole states, change them, and go on."""
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=2)
    with run.gathered(states=True, writeback=True):
        held = optimizer.state_dict()
        for state in held["state"].values():
            for key in ("row_var", "col_var", "variance"):
                if key in state:
                    state[key] = state[key] * 2
        optimizer.load_state_dict(held)
    train(run, model, optimizer, steps=2, first=2)


SCRIPTS = [
    adafactor,
    trust,
    some_whole_some_sliced,
    several_groups_and_a_schedule,
    a_group_added_later,
    parameters_used_now_and_then,
    a_step_without_gradients,
    clipped_and_accumulated,
    existing_state,
    odd_parameters,
    fewer_matrices_than_ranks,
    attached_later,
    states_read_and_written,
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("script", [muon, adafactor])
def test_torchs_own_optimizers_at_all_stages(script: Any, world: int) -> None:
    assert_matches(script, world, STAGES)


@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS[1:], (2,)))
def test_whole_matrices(script: Any, world: int) -> None:
    assert_matches(script, world)


@pytest.mark.parametrize("script", [muon, adafactor, odd_parameters, parameters_used_now_and_then])
def test_messages_give_the_same_bits(script: Any) -> None:
    assert_matches(script, 3, options={"shared_memory": False})
