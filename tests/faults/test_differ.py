"""Ranks that differ: an error with the difference before anything changes, or the result of ranks that do not."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, Case, assert_same, ddp_run, engine_run, randn, seed
from zeroshard.setup.equal import options_text
from zeroshard.testing import RankFailure, run_ranks

from .job import Net, loss_of, make


def whole(model: nn.Module, zero: zs.Zero) -> dict[str, Tensor]:
    with zero.gathered():
        return {name: value.clone() for name, value in model.state_dict().items()}


def one_rank_computes_no_number(stage: int, value: float) -> tuple[str, bool]:
    """Put a value into one rank's gradient; return the error, and whether anything changed. Runs on a rank."""
    model, optimizer, zero = make(stage)
    states = []
    for step in range(3):
        if step == 2 and zero.mesh.rank == 1:
            model.blocks[1][0].bias.register_hook(lambda grad: grad + value)
        loss_of(model, step, zero.mesh.rank).backward()
        states.append(whole(model, zero))
        if step == 2:
            with pytest.raises(RuntimeError) as caught:
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    after = whole(model, zero)
    counters = {float(state["step"]) for state in optimizer.state.values()}
    return str(caught.value), all(torch.equal(states[-1][key], after[key]) for key in after) and counters == {2.0}


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_changes_nothing_on_any_rank(stage: int, value: float) -> None:
    for rank, (text, is_unchanged) in enumerate(run_ranks(one_rank_computes_no_number, 3, stage, value)):
        assert f"[rank {rank}/3] The gradient of 'blocks.1.0.bias' is not finite; nothing was changed" in text
        assert is_unchanged


def start(what: str) -> dict[str, Tensor]:
    """Shard with something that differs between ranks, and train. Runs on a rank."""
    rank = dist.get_rank()
    seed(3, rank if what == "seed" else 0)
    model, settings = Net(), {"lr": 0.01, "weight_decay": 0.0}
    if rank == 1:
        change(what, model, settings)
    stage = 1 if what == "stage" and rank == 1 else 3
    parameters = list(model.parameters())
    if what == "entries" and rank == 1:
        parameters = parameters[1:] + parameters[:1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        if what == "attached":
            zero = zs.shard(model, stage=stage, settings=zs.Settings(watchdog_s=10.0))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + 0.01 * (rank == 1))
            zero.attach(optimizer)
        else:
            optimizer = torch.optim.AdamW(parameters, **settings)
            zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=10.0))
    except zs.RankMismatchError:
        if what != "attached":
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            assert type(model.head.weight) is nn.Parameter
        raise
    for step in range(2):
        if step == 1 and rank == 1 and "schedule" in what:
            optimizer.param_groups[0]["lr"] = 0.03 if what == "schedule" else torch.tensor(0.5)
        seed(4, rank)
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, zero)


def change(what: str, model: nn.Module, settings: dict[str, Any]) -> None:
    """Let this rank be given something else than the others."""
    if what == "dtype":
        model.double()
    elif what == "shape":
        model.blocks[1][0] = nn.Linear(16, 48)
        model.blocks[1][2] = nn.Linear(48, 16)
    elif what == "module":
        model.blocks[1][1] = nn.ReLU()
    elif what == "rate":
        settings["lr"] = 0.02
    elif what == "tensor rate":
        # A rate may be a tensor, whose representation is rounded.
        settings |= {"lr": torch.tensor(0.01000001, dtype=torch.float64)}
    elif what == "betas":
        settings["betas"] = (0.9, 0.95)
    elif what == "version":
        import zeroshard.sharding

        zeroshard.sharding.VERSION = "0.0.0+other"
    elif what == "numpy":
        np.__version__ = "0.0.0"
    elif what == "library":
        # A model of some library, which is here another version of it.
        Net.__module__ = "pytest.models"
        pytest.__version__ = "0.0.0"


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("dtype", ["torch.float32", "torch.float64"]),
        ("shape", ["'blocks.1.0.weight': (32, 16)", "'blocks.1.0.weight': (48, 16)"]),
        ("module", ["module 'blocks.1.1': GELU", "module 'blocks.1.1': ReLU"]),
        ("rate", ["lr=0.01", "lr=0.02"]),
        ("tensor rate", ["lr=0.01,", "lr=0.01000001,"]),
        ("betas", ["betas=(0.9, 0.999)", "betas=(0.9, 0.95)"]),
        ("entries", ["group 0: 'embedding.weight'", "group 0: 'blocks.0.0.weight'"]),
        ("attached", ["lr=0.01", "lr=0.02"]),
        ("schedule", ["step 1 of optimizer 0 (AdamW, lr [0.01])", "step 1 of optimizer 0 (AdamW, lr [0.03])"]),
        ("tensor schedule", ["(AdamW, lr [0.01])", "step 1 of optimizer 0 (AdamW, lr [0.5])"]),
        ("stage", ["stage 3", "stage 1"]),
        ("version", ["zeroshard 0.0.0+other", f"zeroshard {zs.__version__}"]),
        ("numpy", ["numpy 0.0.0", f"numpy {np.__version__}"]),
        ("library", ["pytest 0.0.0"]),
    ],
)
def test_ranks_that_were_given_different_things_say_which(what: str, texts: list[str]) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(start, 3, what)
    assert set(failure.value.errors) == {0, 1, 2}
    for error in failure.value.errors.values():
        assert error.type_name == "RankMismatchError", error
        assert all(text in error.message for text in texts), error.message
        assert "rank 0: " in error.message and "rank 1: " in error.message


class Schedule:
    """Has the text of any object, with its address."""


def options() -> dict[str, Any]:
    """Return options of a group whose texts differ between processes, by addresses and by the order of a set."""
    return {
        "schedule": Schedule(),
        "schedules": [(Schedule(), 1.0), {"warm": lambda step: step, "at": torch.tensor([0.5, 2.0])}],
        "roles": {"head", "norm", "bias", "embedding"},
    }


def shard_with_objects() -> str:
    """Shard an optimizer with objects in a group. Runs on a rank."""
    taken = [Schedule() for _ in range(100 * dist.get_rank())]
    model = nn.Linear(4, 4)
    zs.shard(model, torch.optim.SGD([{"params": list(model.parameters()), **options()}], lr=0.1), stage=1)
    return f"{len(taken)} {options_text({**options(), 'lr': torch.tensor(0.5)})}"


def test_objects_in_groups_are_no_difference() -> None:
    """Their addresses are others on each rank, which were told of different models."""
    text = (
        "lr=0.5, roles={bias, embedding, head, norm}, schedule=Schedule, "
        "schedules=((Schedule, 1.0), {warm: options.<locals>.<lambda>, at: [0.5, 2.0]})"
    )
    assert run_ranks(shard_with_objects, 2) == [f"0 {text}", f"100 {text}"]


def seed_by_rank(seeds: list[int | None]) -> tuple[list[float], str]:
    """Start with a seed of one's own; return what is drawn after it, and the error. Runs on a rank."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    text = ""
    try:
        zs.init(seed=seeds[dist.get_rank()])
    except zs.RankMismatchError as error:
        text = str(error)
    return [float(torch.rand(())), random.random(), float(np.random.rand())], text


@pytest.mark.parametrize("seeds", [[5, 6, 5], [None, None, 0], [-1, 1, 1], [2**64 - 1, 2**63, 2**64 - 1]])
def test_different_seeds_are_an_error_with_all_of_them(seeds: list[int | None]) -> None:
    [(undisturbed, _), *_] = run_ranks(seed_by_rank, 1, [None])
    for rank, (drawn, text) in enumerate(run_ranks(seed_by_rank, 3, seeds)):
        assert text.startswith(f"[rank {rank}/3] zs.init() was given different seeds:\n")
        assert all(f"  rank {other}: seed={given}\n" in text for other, given in enumerate(seeds))
        assert drawn == undisturbed


@pytest.mark.parametrize("given", [7, None])
def test_equal_seeds_are_none(given: int | None) -> None:
    drawn, texts = zip(*run_ranks(seed_by_rank, 3, [given] * 3), strict=True)
    assert texts == ("", "", "")
    assert all((drawn[0] == other) == (given is None) for other in drawn[1:])


def test_ranks_with_different_seeds_train_the_model_of_rank_0() -> None:
    same, other = run_ranks(start, 3, "nothing"), run_ranks(start, 3, "seed")
    for rank in range(3):
        assert all(torch.equal(same[rank][name], value) for name, value in other[rank].items())


class Experts(nn.Module):
    """Experts of one shape, of which a rank may use another than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.experts[chosen](torch.tanh(self.first(x)))


CHOICES = [[0, 1], [1, 0], [2, 2], [0, 2]]
"""By step, the expert that each rank uses."""


def experts() -> Experts:
    return models.build(Experts)


def loss_of_experts(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(randn(4, 6, key=(1, step, rank)), CHOICES[step][rank]).square().mean()


EXPERTS = Case(experts, loss_of_experts, models.adamw, steps=len(CHOICES))


def with_experts(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train where ranks choose experts of their own, sharded and with DistributedDataParallel. Runs on a rank."""
    return engine_run(EXPERTS, stage, units=[nn.Linear]), ddp_run(EXPERTS, find_unused_parameters=True)


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_use_different_experts_train_as_ddp_does(stage: int) -> None:
    for ours, theirs in run_ranks(with_experts, 2, stage):
        assert_same(theirs, ours)


def swallow(where: str) -> Any:
    """Train where one rank swallows an exception of its own in a step. Runs on a rank."""
    model, optimizer, zero = make(3, watchdog_s=4.0)
    for step in range(6):
        try:
            loss = loss_of(model, step, zero.mesh.rank)
            if step == 2 and zero.mesh.rank == 1 and where == "before backward":
                raise ArithmeticError("swallowed")
            loss.backward()
            if step == 2 and zero.mesh.rank == 1 and where == "before the step":
                raise ArithmeticError("swallowed")
            optimizer.step()
            optimizer.zero_grad()
        except ArithmeticError:
            continue


@pytest.mark.parametrize("where", ["before backward", "before the step"])
def test_an_exception_that_one_rank_swallowed_is_noticed(where: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(swallow, 2, where)
    for error in failure.value.errors.values():
        assert error.type_name == "RankMismatchError", error
        assert "rank 0" in error.message and "rank 1" in error.message
