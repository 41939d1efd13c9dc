"""Ignored parameters stay each rank's own; all others train as plain data parallelism does."""

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Plain, assert_same, run_cases, seed
from tests.oracle import _copied as copied
from tests.rotation import third
from tests.state.test_meta import one_process, reset


class Expert(models.Stack):
    """A stack with a layer that each rank has of its own, a norm that nobody trains, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(models.WIDTH, models.WIDTH)
        self.fixed = nn.LayerNorm(models.WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.fixed(x + self.own(x)))


def others(model: Expert) -> list[nn.Parameter]:
    left = set(map(id, [*model.own.parameters(), *model.fixed.parameters()]))
    return [p for p in model.parameters() if id(p) not in left]


def trained(stage: int | None, shared_memory: bool, folder: str) -> tuple[Any, ...]:
    """Train with an optimizer for what is shared and another one for what is not; plainly where no stage is given."""
    rank = dist.get_rank()
    model = models.build(Expert)
    with torch.no_grad():
        model.own.weight.add_(rank)
    run, held = Plain(), others(model)
    optimizer, own = torch.optim.AdamW(held, lr=0.01), torch.optim.SGD(model.own.parameters(), lr=0.1)
    zero = None
    if stage is not None:
        settings = zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
        zero = zs.shard(model, optimizer, stage=stage, ignored=[model.own, "fixed.*"], settings=settings)
        assert isinstance(model.own.weight, nn.Parameter) and type(model.own.weight) is nn.Parameter
    else:
        # The oracle reduces what `models` holds.
        shared = nn.Module()
        shared.held = nn.ParameterList(held)
        run.models.append(shared)
    records = []
    for step in range(3):
        for micro in range(2):
            loss = models.stack_loss(model, step, rank, micro)
            loss.backward() if zero is not None else run.backward(loss)
        norm = nn.utils.clip_grad_norm_(held, 0.1)
        records.append((loss.item(), norm.item(), copied(model.own.weight.grad)))
        if zero is not None:
            with pytest.raises(RuntimeError, match=r"with the gradient of 'own\.weight', an ignored"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            assert zero.grad_norm().item() == pytest.approx(min(norm.item(), 0.1), rel=1e-4)
        nn.utils.clip_grad_norm_(model.own.parameters(), 0.1)
        optimizer.step()
        own.step()
        model.zero_grad()
    if zero is None:
        return records, copied(model.state_dict())
    path = zero.save(Path(folder) / f"{stage}-{shared_memory}" / "step-1")
    with zero.gathered():
        state = copied(model.state_dict())
    with torch.no_grad():
        model.own.weight.zero_()
    zero.load(path)
    assert not model.own.weight.any()  # no checkpoint has it
    with zero.gathered(writeback=True):
        model.load_state_dict(state)
    assert torch.equal(model.own.weight, state["own.weight"])
    numel = sum(p.numel() for p in held)
    assert sum(unit.numel for unit in zero.units) == numel
    return records, state


@functools.cache
def results() -> Mapping[tuple[Any, ...], list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        cases = [(None, True), *((stage, shared) for stage in STAGES for shared in (True, False))]
        return run_cases(trained, 2, [(*case, folder) for case in cases], timeout_s=2 * TIMEOUT_S)


def test_what_is_ignored_is_the_ranks_own_and_all_else_is_as_in_data_parallelism() -> None:
    expected, *found = results().values()
    for by_rank in found:
        for rank in range(2):
            assert_same(expected[rank], by_rank[rank], f"[rank {rank}/2]")
    # Ranks differ in what is ignored, and in nothing else.
    ours, theirs = expected[0][1], expected[1][1]
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == {"own.weight", "own.bias"}


def test_what_cannot_be_ignored_is_refused() -> None:
    def shard(ignored: Any, held: Any = None) -> zs.Zero:
        model = models.build(Expert)
        parameters = model.parameters() if held is None else held(model)
        chosen = ignored(model) if callable(ignored) else ignored
        return zs.shard(model, torch.optim.AdamW(parameters), ignored=chosen)

    with pytest.raises(ValueError, match=r"Parameter 'own\.weight' is ignored \(ignored=\), and in AdamW"):
        shard(["own.*"])
    with pytest.raises(ValueError, match=r"ignored= has 'owner\.\*', which is not a parameter of the model"):
        shard(["owner.*"], others)
    with pytest.raises(ValueError, match="ignored= has Linear, which is not a parameter"):
        shard([nn.Linear(2, 2)], others)
    with pytest.raises(TypeError, match=r"takes a list of parameters, modules or names; got Linear, no list\."):
        shard(lambda model: model.own, others)
    for wrong, kind in ((None, "NoneType"), (3, "int"), (lambda model: model.own.parameters(), "generator")):
        with pytest.raises(TypeError, match=rf"ignored= takes a list .* got {kind}, no list\."):
            shard(wrong)
    with pytest.raises(TypeError, match="takes parameters, modules and patterns of parameter names; got 3"):
        shard([3], others)
    with pytest.raises(ValueError, match=r"Parameter 'own\.weight' is ignored"):
        model = models.build(Expert)
        zs.shard(model, ignored=[model.own]).attach(torch.optim.SGD(model.parameters(), lr=0.1))


def values_from_meta(stage: int, source: str) -> dict[str, torch.Tensor]:
    """Shard a model without values, and return all of them after a step of the ignored parameters' own optimizer."""
    rank = dist.get_rank()
    with torch.device("meta"):
        model = Expert()
    optimizer, own = torch.optim.AdamW(others(model), lr=0.01), torch.optim.SGD(model.own.parameters(), lr=0.1)
    seed(5 + rank)
    options: dict[str, Any] = {"weights": source or None, "settings": zs.Settings(watchdog_s=WATCHDOG_S)}
    zero = zs.shard(model, optimizer, stage=stage, ignored=[model.own, "fixed.*"], **options)
    assert type(model.own.weight) is nn.Parameter and not model.own.weight.is_meta
    assert [id(p) for p in own.param_groups[0]["params"]] == [id(p) for p in model.own.parameters()]
    with zero.gathered():
        state = copied(model.state_dict())
    models.stack_loss(model, 0, rank, 0).backward()
    assert model.own.weight.grad is not None
    own.step()
    assert not torch.equal(model.own.weight, state["own.weight"])
    return state


def test_ignored_parameters_of_a_model_on_the_meta_device_begin_alike_on_all_ranks(tmp_path: Path) -> None:
    save_file(models.build(Expert).state_dict(), tmp_path / "model.safetensors")
    expected = {"": one_process(Expert, reset), str(tmp_path): copied(models.build(Expert).state_dict())}
    cases = [(stage, source) for stage in (0, 3) for source in expected]
    for (stage, source), by_rank in run_cases(values_from_meta, 2, third(cases[::-1]), timeout_s=TIMEOUT_S).items():
        for rank in range(2):
            assert_same(expected[source], by_rank[rank], f"[rank {rank}/2] stage {stage}, {source!r}")


def test_ignored_parameters_with_values_keep_them_where_others_have_none() -> None:
    model = models.build(Expert)
    values = copied(model.own.state_dict())
    with torch.device("meta"):
        model.own.bias = nn.Parameter(torch.empty(models.WIDTH))  # its module is initialized, the weight included
        model.blocks[0] = models.Block()
    zs.shard(model, torch.optim.AdamW(others(model)), ignored=[model.own])
    assert torch.equal(model.own.weight, values["weight"])
    assert not model.own.bias.is_meta and not torch.equal(model.own.bias, values["bias"])
