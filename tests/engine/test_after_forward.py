"""Code that computes with parameters outside the model's forward: chunks of a loss, functional calls, flat copies."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, run_cases
from tests.rotation import third

TOKENS = 11


class Trunk(models.Stack):
    """Returns what its head takes; the loss calls the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(models.WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def by_module(model: Trunk, x: Tensor) -> Tensor:
    return model.head(x)


def by_method(model: Trunk, x: Tensor) -> Tensor:
    return model.head.forward(x)


def by_function(model: Trunk, x: Tensor) -> Tensor:
    return F.linear(x, model.head.weight, model.head.bias)


WAYS = {"module": by_module, "method": by_method, "function": by_function}


def make(stage: int | None, shared_memory: bool, **options: Any) -> tuple[Trunk, Any, zs.Zero | None]:
    model = models.build(Trunk)
    optimizer = models.sgd(model)
    if stage is None:
        return model, optimizer, None
    settings = zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S, **options.pop("settings", {}))
    units = [models.Block, model.head]
    return model, optimizer, zs.shard(model, optimizer, stage=stage, units=units, settings=settings, **options)


def in_chunks(model: Trunk, way: Callable[[Trunk, Tensor], Tensor], rank: int, *, is_detached: bool) -> float:
    """Compute a loss and its gradients chunk by chunk, in one backward or in one for each."""
    found = model(models.features(0, rank, rows=6))
    leaf = found.detach().requires_grad_(True) if is_detached else found
    total = torch.zeros(())
    for chunk in leaf.split(2):
        loss = F.cross_entropy(way(model, chunk), torch.arange(2) + rank)
        if is_detached:
            loss.backward()
        total = total + loss
    if is_detached:
        found.backward(leaf.grad)
    else:
        total.backward()
    return total.item()


def losses(stage: int | None, shared_memory: bool) -> Mapping[str, Any]:
    """Return, by way, the losses of two steps, or the text of the error."""
    rank, found = dist.get_rank(), dict[str, Any]()
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "module": ("module", {}),
        "method": ("method", {"settings": {"forward_methods": ("head.forward",)}}),
        "function": ("function", {}),
        "function, replicated": ("function", {"parameters": {"head": "replicated"}}),
    }
    for name, (way, options) in asked.items():
        for is_detached in (False, True):
            if stage is not None and stage < 3:
                options = {key: value for key, value in options.items() if key != "parameters"}
            model, optimizer, _ = make(stage, shared_memory, **options)
            told: list[Any] = []
            try:
                for _ in range(2):
                    told.append(in_chunks(model, WAYS[way], rank, is_detached=is_detached))
                    if stage is None:
                        for p in model.parameters():
                            dist.all_reduce(p.grad)
                            p.grad /= dist.get_world_size()
                    optimizer.step()
                    optimizer.zero_grad()
            except RuntimeError as error:
                told = [str(error)]
            found[f"{name}, {'detached' if is_detached else 'at once'}"] = told
    return found


@functools.cache
def all_losses() -> Mapping[tuple[Any, ...], list[Any]]:
    cases = [(None, True), *third((stage, shared) for stage in STAGES[::-1] for shared in (True, False))]
    return run_cases(losses, 2, cases, timeout_s=2 * TIMEOUT_S)


def test_a_loss_in_chunks_is_that_of_plain_data_parallelism_or_the_error_says_what_to_write() -> None:
    expected, *_ = all_losses().values()
    for (stage, shared), by_rank in all_losses().items():
        for rank, found in enumerate(by_rank):
            for name, told in found.items():
                where = f"stage {stage}, shared memory {shared}, {name}, [rank {rank}/2]"
                if stage == 3 and name.startswith("function, ") and "replicated" not in name:
                    assert "forward_methods=('head.forward',)" in told[0], where
                    assert "parameters={'head': 'replicated'}" in told[0], where
                    assert "call the module that holds it (`model.head(...)`)" in told[0], where
                else:
                    assert told == pytest.approx(expected[rank][name], rel=1e-6), where


def called(stage: int, shared_memory: bool) -> tuple[Any, ...]:
    """Return what functional_call gives with doubled parameters, and what it is where they are released."""
    model, _, zero = make(stage, shared_memory)
    assert zero is not None
    x = models.features(0, dist.get_rank())
    with zero.gathered():
        doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
        inside = functional_call(model, doubled, (x,)).sum().item()
        with torch.no_grad():
            before = model(x).sum().item()
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"functional_call\(\) with another .* `with zero\.gathered\(\):`"):
            functional_call(model, doubled, (x,))
        zero.agree(True)
        return inside, before
    assert functional_call(model, doubled, (x,)).sum().item() == inside
    # Gradients reach the model through what is made of its parameters.
    functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x,)).sum().backward()
    assert zero.grad_norm() > 0
    return inside, before


def test_functional_call_works_where_parameters_are_whole() -> None:
    cases = [(stage, shared) for stage in STAGES for shared in (True, False)]
    by_case = run_cases(called, 2, cases, timeout_s=TIMEOUT_S)
    for found in by_case.values():
        for rank in range(2):
            assert found[rank] == by_case[0, True][rank]
            assert found[rank][0] != found[rank][1]
