"""Plans of models with frozen parameters: what lies in memory and what is sent are the engine's, to the byte."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import peft
import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, run_cases

STEPS = 3
Sent = tuple[str, str, int]
SENT = ("gather", "release", "reduce", "publish")
CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)


def backbone() -> nn.Module:
    return _frozen(models.Stack(), lambda name: not name.startswith("head"))


def embedding() -> nn.Module:
    return _frozen(models.GPT(tied=False), lambda name: name.startswith("embedding"))


def middle() -> nn.Module:
    return _frozen(models.Stack(), lambda name: name.startswith("blocks.1"))


def partly() -> nn.Module:
    return _frozen(models.Stack(), lambda name: "norm" in name or name.startswith("blocks.2"))


def all_but_a_bias() -> nn.Module:
    return _frozen(models.Stack(), lambda name: name != "blocks.1.up.bias")


def lora() -> nn.Module:
    """A model whose adapters alone are trained."""
    return peft.get_peft_model(models.Stack(), peft.LoraConfig(r=2, target_modules=["up", "down"]))  # type: ignore[arg-type]


class WithUnused(models.Stack):
    """Has a layer that no forward uses, so that gets neither gradients nor states."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(models.WIDTH, 40)


def unused() -> nn.Module:
    return WithUnused()


def _frozen(model: nn.Module, is_frozen: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    return model


MODELS = (backbone, embedding, middle, partly, all_but_a_bias, lora)


def adamw(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=1e-3)]


def trained(model: nn.Module) -> list[torch.optim.Optimizer]:
    return adamw(p for p in model.parameters() if p.requires_grad)


def everything(model: nn.Module) -> list[torch.optim.Optimizer]:
    return adamw(model.parameters())


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two optimizers that share buckets, each with frozen parameters among its own."""
    return [*adamw(p for p in model.parameters() if p.ndim > 1), *adamw(p for p in model.parameters() if p.ndim == 1)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [zs.optim.Adafactor(model.parameters(), lr=1e-3)]


OWNERS = (trained, everything, two, adafactor)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"shared_memory": True, "precision": "fp32"},
    {"shared_memory": False, "precision": "bf16"},
    {"shared_memory": False, "precision": "fp32", "offload": zs.Offload(states=0.5)},
)
CASES = [
    (build, OWNERS[(place + stage) % len(OWNERS)], stage, (place + 2 * stage) % len(OPTIONS))
    for place, build in enumerate(MODELS)
    for stage in STAGES
]
UNUSED = [(unused, OWNERS[stage], stage, stage % len(OPTIONS)) for stage in STAGES]
COLUMNS = ("parameters", "gradients", "states", "padding", "transient")


def sample(build: Callable[[], nn.Module]) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    if build is embedding:
        return models.gpt_loss, [models.tokens(0, 0)]
    return models.stack_loss, [models.features(0, 0)]


def run(
    build: Callable[[], nn.Module], owners: Callable[[nn.Module], list[torch.optim.Optimizer]], stage: int, place: int
) -> tuple[dict[str, int], list[Sent], dict[str, int]]:
    """Train, and return the bytes that this rank keeps, what it sends in a steady step, and the bytes that it predicts.

    Runs on a rank.
    """
    loss, asked = sample(build)[0], dict(OPTIONS[place])
    model = models.build(build)
    optimizers = owners(model)
    settings = zs.Settings(shared_memory=asked.pop("shared_memory"))
    zero = zs.shard(model, optimizers, stage=stage, settings=settings, **asked)
    for step in range(STEPS):
        loss(model, step, 0).backward()
        for one in optimizers:
            one.step()
        model.zero_grad()
    events = zero.trace.step_events(STEPS - 1)
    sent = [(e.kind, e.unit, e.nbytes) for e in events if e.kind != "step"]
    return dict(zero.memory().resident_bytes), sent, dict(zero.memory().predicted_bytes)


@functools.cache
def measured() -> dict[tuple[Any, ...], list[Any]]:
    return run_cases(run, 2, CASES + UNUSED, timeout_s=4 * TIMEOUT_S)


def planned(build: Callable[[], nn.Module], optimizer: Any, stage: int, place: int) -> zs.Plan:
    inputs, model = sample(build)[1], models.build(build)
    given = optimizer if isinstance(optimizer, str) else optimizer(model)
    return zs.plan(model, world_size=2, device=CPU, stage=stage, inputs=inputs, optimizer=given, **OPTIONS[place])


def closed(events: Sequence[Sent]) -> list[Sent]:
    """Sort the releases at the end of the backward, where nothing else happens: their order differs from a plan's."""
    end = next((n for n, one in reversed([*enumerate(events)]) if one[0] == "reduce"), -1) + 1
    releases = [one for one in events[end:] if one[0] == "release"]
    return [*events[:end], *sorted(releases), *events[end + len(releases) :]]


@pytest.mark.product
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1].__name__}-{case[2]}-{case[3]}")
def test_the_plan_is_the_run(case: tuple[Any, ...]) -> None:
    build, _, stage, _ = case
    plan = planned(*case)
    buffer_bytes = sum(one.nbytes for one in models.build(build).buffers())
    for rank, (held, sent, told) in enumerate(measured()[case]):
        assert told["states"] == held["states"]
        one = plan.ranks[rank]
        expected = {name: one.resident_bytes[name] for name in COLUMNS}
        expected["parameters"] -= buffer_bytes
        assert {name: held[name] for name in COLUMNS} == expected
        assert held.get("host", 0) == one.elsewhere_bytes.get("host", 0)
        ticks = [(tick.kind, tick.unit, tick.nbytes) for tick in plan.film.ticks if tick.kind in SENT]
        assert closed(ticks) == closed(sent)
    assert (stage in (1, 2)) == any(kind == "publish" for kind, *_ in sent)


@pytest.mark.parametrize("case", UNUSED, ids=lambda case: f"{case[1].__name__}-{case[2]}-{case[3]}")
def test_parameters_that_no_forward_uses_have_no_states(case: tuple[Any, ...]) -> None:
    plan = planned(*case)
    for rank, (held, *_) in enumerate(measured()[case]):
        one = plan.ranks[rank]
        assert {name: held[name] for name in COLUMNS} == {name: one.resident_bytes[name] for name in COLUMNS}
        assert held.get("host", 0) == one.elsewhere_bytes.get("host", 0)
    states_bytes = sum(held["states"] for held, *_ in measured()[case])
    counters_bytes = 4 * (len([*unused().parameters()]) - len([*unused().unused.parameters()]))
    assert sum(plan.owned_bytes) == (states_bytes + counters_bytes) * (case[1] is adafactor)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_name_of_an_optimizer_means_one_of_the_trained_parameters(stage: int) -> None:
    name, given = (planned(lora, one, stage, 0) for one in ("adamw", trained))
    assert name.ranks == given.ranks
    assert name.film.sent_bytes == given.film.sent_bytes
