"""Gradients that leave a device beside its backward: the bits of a resident run, however late the copies are.

Owns what may happen while they are under way. Read `tools/emulated_copies.py` first. `tests/emulated` has streams,
`tests/plan/test_offload_time.py` times.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.engine import test_offload_states as runs
from tests.oracle import STAGES_AT, TIMEOUT_S, assert_same
from tools.emulated import gpu
from tools.emulated_copies import Bus, late_bus
from zeroshard import devices
from zeroshard.store.landing import Leaving
from zeroshard.store.stores import FarStore
from zeroshard.testing import run_ranks

BUFFER_BYTES = 256
"""Of the models' gradients, most are larger."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """Note how many buckets are under way, each time that a gradient leaves."""
    send, counts = Leaving.send, list[int]()

    def noted(leaving: Leaving, *args: Any) -> Any:
        left = send(leaving, *args)
        counts.append(len(leaving._under_way))
        return left

    with patch.object(Leaving, "send", noted):
        yield counts


def train(name: str, stages: list[int]) -> list[Any]:
    """Train with gradients on the device, and with gradients that leave it, in pieces."""
    found: list[Any] = []
    is_alone, most = not dist.is_initialized(), 0
    for stage in stages:
        for is_late in (False, True):
            bus = Bus(seed=stage + 10 * runs.rank_of(), eagerness=(0.0, 0.3)[stage % 2])
            with ExitStack() as stack:
                stack.enter_context(nullcontext() if is_alone else gpu())
                stack.enter_context(late_bus(bus) if is_late else nullcontext())
                stack.enter_context(patch.object(FarStore, "_buffer_bytes", BUFFER_BYTES))
                stack.enter_context(patch.object(devices, "EXACT_BYTES", 1))
                counts = stack.enter_context(counted())
                run = runs.build(name, runs.fused, stage, offload=zs.Offload() if is_late else None)
                seen = runs.advance(name, run, range(4))
                found.append([seen, runs.state_of(run)])
                run[2].check_copies()
            bus.check()
            most = max(most, *counts, 0)
            assert bool(bus.issued) is is_late
    assert most == 2
    return found


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["accumulates", "leaves-out", "overflows", "bf16"])
def test_gradients_that_leave_late_change_no_bit(name: str, world: int) -> None:
    # Gradients leave where a rank keeps only those that it updates.
    stages = [stage for stage in STAGES_AT[world] if world == 1 or stage > 1]
    for found in run_ranks(train, world, name, stages, timeout_s=2 * TIMEOUT_S, process_group=world > 1):
        for stage, resident, late in zip(stages, found[::2], found[1::2], strict=True):
            assert_same(resident, late, f"stage {stage} of {world}, {name}")


def accumulate() -> bool:
    """Add to the gradients of the only unit while those of the backward before are under way."""
    bus = Bus(eagerness=0.0)
    with late_bus(bus):
        model = nn.Linear(6, 5)
        x = torch.ones(2, 6)
        expected = [2.5 * one for one in torch.autograd.grad(model(x).square().sum(), [*model.parameters()])]
        zs.shard(model, torch.optim.AdamW(model.parameters()), offload="host")
        for scale in (0.5, 1.5, 0.5):
            (model(x).square().sum() * scale).backward()
        found = [full(p) for p in model.parameters()]
    bus.check()
    return all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_come_back_after_they_have_left() -> None:
    assert run_ranks(accumulate, 1, process_group=False) == [True]


class Woven(nn.Module):
    """Layers between which parameters of the root are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.own = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, own in zip(self.layers, self.own, strict=True):
            x = torch.tanh(layer(x)) * own
        return x


def under_way() -> tuple[list[tuple[str, str]], int]:
    """Return the waits of a backward, as (unit that is waited for, unit whose gradient leaves), and the most units."""
    waits = list[tuple[str, str]]()
    bus = Bus(eagerness=0.0, waited=lambda copy: waits.append((copy.name, bus.name)))

    with late_bus(bus), counted() as counts:
        model = Woven()
        zs.shard(model, torch.optim.AdamW(model.parameters()), units=[nn.Linear], offload="host")
        model(torch.ones(2, 16)).sum().backward()
        found = [*waits]
    bus.check()
    return found, max(counts)


def test_gradients_of_two_units_are_under_way_and_no_more() -> None:
    """One rank sends each parameter by itself, and those of the root between those of the layers."""
    ((waits, most),) = run_ranks(under_way, 1, process_group=False)
    assert most == 2
    layers = [name for name, _ in waits if name]
    # A layer is waited for when the next one's first gradient leaves, since the root is the other unit under way.
    assert list(dict.fromkeys(layers)) == [f"layers.{number}" for number in (5, 4, 3, 2, 1)]
    assert all(other != name for name, other in waits)


def full(p: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient."""
    grad: Any = p.grad
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


def read(what: str) -> tuple[bool, bool]:
    """Do something with gradients as soon as a backward is over; return whether it is what a resident run has."""
    values = []
    for is_late in (False, True):
        bus = Bus(eagerness=0.0)
        with late_bus(bus) if is_late else nullcontext():
            model = runs.models.build(runs.models.Stack)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            zero = zs.shard(model, optimizer, stage=2, offload=zs.Offload() if is_late else None)
            for _ in range(2):
                runs.models.stack_loss(model, 0, 0).backward()
            parameters = [*model.parameters()]
            match what:
                case "values":
                    values.append([full(p) for p in parameters if p.grad is not None])
                case "a norm":
                    values.append([nn.utils.clip_grad_norm_(parameters, 1e-3), *(full(p) for p in parameters)])
                case "the norm of the handle":
                    values.append([zero.grad_norm(2.0), zero.grad_norm(1.0)])
                case "a change":
                    for p in parameters:
                        p.grad.mul_(2)
                    values.append([full(p) for p in parameters])
                case "the optimizer's":
                    values.append([full(p) for p in optimizer.param_groups[0]["params"]])
                case "gathered":
                    with zero.gathered(states=True):
                        values.append([full(p) for p in parameters])
                case "another gradient":
                    parameters[0].grad = torch.ones_like(parameters[0])
                    parameters[1].grad = None
                    runs.models.stack_loss(model, 1, 0).backward()
                    values.append([full(p) for p in parameters])
                case "a slice that was read before":
                    slices = optimizer.param_groups[0]["params"]
                    kept = [p.grad for p in slices]
                    runs.models.stack_loss(model, 1, 0).backward()
                    values.append([one.clone() for one in kept])
                    runs.models.stack_loss(model, 2, 0).backward()
                    values[-1] += [p.grad.clone() for p in slices]
                case "zeros":
                    optimizer.zero_grad(set_to_none=False)
                    slices = optimizer.param_groups[0]["params"]
                    runs.models.stack_loss(model, 1, 0).backward()
                    values.append([torch.empty(0), *(p.grad.as_subclass(torch.Tensor).clone() for p in slices)])
                case "a step":
                    optimizer.step()
                    values.append([p.detach().clone() for p in parameters])
        bus.check()
    resident, late = values
    return len(resident) > 1, all(torch.equal(one, other) for one, other in zip(resident, late, strict=True))


@pytest.mark.parametrize(
    "what",
    [
        "values",
        "a norm",
        "the norm of the handle",
        "a change",
        "the optimizer's",
        "gathered",
        "another gradient",
        "a slice that was read before",
        "zeros",
        "a step",
    ],
)
def test_whoever_reads_gradients_waits_for_them(what: str) -> None:
    assert run_ranks(read, 1, what, process_group=False) == [(True, True)]
