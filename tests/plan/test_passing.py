"""What the steps of optimizers take beside their states: of plans, of traces, and of runs."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

import zeroshard as zs
from benchmarks.peaks import measure_peak
from zeroshard.optim.adamw8bit import BATCH_NUMEL, BATCH_NUMEL_ELSEWHERE
from zeroshard.plan.machine.profiles import host_device
from zeroshard.plan.named import OPTIMIZERS, Passing, States
from zeroshard.plan.planning import make_plan
from zeroshard.plan.trace.passing import passing_of
from zeroshard.testing import run_ranks


def test_steps_of_optimizers_take_what_their_traces_take() -> None:
    parameters = [nn.Parameter(torch.ones(4))]
    made = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad,
        "momentum": functools.partial(torch.optim.SGD, momentum=0.9), "sgd": torch.optim.SGD,
        "lion": zs.optim.Lion, "lamb": zs.optim.Lamb, "muon": zs.optim.Muon,
    }  # fmt: skip
    for name, make in made.items():
        states = OPTIMIZERS[name]
        for is_cpu in (True, False):
            expected = Passing() if states.is_fused and not is_cpu else states.passing
            assert passing_of(make(parameters), States(0, 0, is_fused=states.is_fused), is_cpu=is_cpu) == expected, name
    found = passing_of(torch.optim.AdamW(parameters, foreach=True), OPTIMIZERS["adamw"], is_cpu=True)
    assert found == Passing(total=1)
    packed = passing_of(zs.optim.AdamW8bit(parameters), OPTIMIZERS["adamw8bit"], is_cpu=True)
    assert packed.total == OPTIMIZERS["adamw8bit"].passing.total
    assert OPTIMIZERS["adamw8bit"].passing.batch_numel == (BATCH_NUMEL["cpu"], BATCH_NUMEL_ELSEWHERE)


def two_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))


def group_of_each(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([{"params": [one]} for one in parameters], lr, foreach=True)


MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "AdamW on lists": functools.partial(torch.optim.AdamW, foreach=True),
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
    "Lion": zs.optim.Lion,
    "Adafactor on lists": functools.partial(torch.optim.Adafactor, foreach=True),
    "Adafactor on lists, a group of each parameter": group_of_each,
    "Adafactor with moments": functools.partial(zs.optim.Adafactor, beta1=0.9),
    "Adafactor on lists with moments": functools.partial(zs.optim.Adafactor, beta1=0.9, foreach=True),
    "whole matrices on lists": lambda *some, **named: zs.optim.whole_matrix(
        torch.optim.AdamW(*some, **named, foreach=True)
    ),
}


def most_bytes(name: str) -> int:
    """Return the peak of torch's allocator in a third step. Runs in a process of its own."""

    def train(steps: int = 3) -> Any:
        model, x = two_layers(), torch.ones(4, 256)
        optimizer = MADE[name](model.parameters(), lr=0.1)
        zs.shard(model, optimizer, stage=0)
        for step in range(steps):
            with record_function(f"step {step}"):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model, x, optimizer

    train(1)
    gc.collect()
    return max(one.live_bytes for one in measure_peak(train).blocks if "step 2" in one.operations)


@pytest.mark.product
@pytest.mark.parametrize("name", MADE)
def test_the_temporary_memory_of_an_update_is_that_of_a_run(name: str) -> None:
    model = two_layers()
    plan = zs.plan(
        model, world_size=1, device=host_device(), stage=0, precision="fp32", inputs=[torch.ones(4, 256)],
        optimizer=MADE[name](model.parameters(), lr=0.1), loss=Tensor.sum,
    )  # fmt: skip
    (measured_bytes,) = run_ranks(most_bytes, 1, name)
    assert plan.ranks[0].allocator_bytes == pytest.approx(measured_bytes, rel=0.01)


@pytest.mark.parametrize(("make", "is_made"), [(torch.optim.Adagrad, True), (torch.optim.AdamW, False)])
def test_states_that_are_made_with_the_optimizer_are_there_in_the_first_step(make: Any, is_made: bool) -> None:
    model, name = two_layers(), make.__name__.lower()
    of_module = zs.plan(model, world_size=2, inputs=[torch.ones(4, 256)], optimizer=make(model.parameters()))
    for plan in (of_module, make_plan("gpt2", world_size=2, seq=64, optimizer=name)):
        masters_bytes = sum(one.nbytes for one in plan.film.before if one.what == "masters")
        states_bytes = plan.resident_bytes["states"]
        assert masters_bytes < states_bytes
        assert plan.first.resident_bytes["states"] == (states_bytes if is_made else masters_bytes)


def test_an_update_on_a_cpu_that_is_not_fused_takes_memory() -> None:
    looped, fused = (make_plan("gpt2", world_size=2, seq=64, device=host_device(), fused=one) for one in (False, True))
    embedding_bytes = 4 * 50257 * 768
    assert looped.film.peak[0] - fused.film.peak[0] == pytest.approx(embedding_bytes, rel=1e-4)
