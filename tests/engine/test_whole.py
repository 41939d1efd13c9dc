"""Optimizers that need whole matrices give the bits of one process, at any stage and number of ranks."""

import copy
import os
import signal
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import (
    STAGES,
    TIMEOUT_S,
    WORLDS,
    Case,
    Casts,
    Run,
    Sharded,
    assert_matches,
    assert_same,
    at_worlds,
    both,
    randn,
    single_run,
)
from tools.emulated import gpu
from tools.settled import settled
from zeroshard.core.slices import MasterSlice
from zeroshard.core.slot import slot_of
from zeroshard.optim.whole import whole_matrix
from zeroshard.testing import RankFailure, run_ranks


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


def a_group_removed_and_added_again(run: Run) -> None:
    """Matrices keep their owners, which have their states, or get some from another optimizer's plan."""
    model = models.build(models.Stack)
    blocks = [[p for p in block.parameters() if p.ndim == 2] for block in model.blocks]
    for p in [p for p in model.parameters() if not any(p is one for block in blocks for one in block)]:
        p.requires_grad_(False)
    optimizer = Muon([{"params": one} for one in blocks], lr=0.02)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=2)
    del optimizer.param_groups[0]
    train(run, model, optimizer, steps=1, first=2)
    optimizer.add_param_group({"params": blocks[0]})
    train(run, model, optimizer, steps=2, first=3)
    del optimizer.param_groups[-1]
    optimizer.state.clear()  # torch's state dict cannot name the states of a group that was removed
    other = torch.optim.SGD(blocks[0], lr=0.1)
    run.attach(other)
    train(run, model, optimizer, other, steps=1, first=5)


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


class Hollow(nn.Module):
    """Parameters without elements beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 3, bias=False)
        shapes = [(0, 4), (4, 0), (0,), (2, 0, 3)]
        self.nothing = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x)) + sum(p.sum() for p in self.nothing)


def over_elements(cls: type[Optimizer]) -> type[Optimizer]:
    """Return an optimizer that leaves out parameters without elements, by whose number Adafactor and Muon divide."""

    class Full(cls):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            everything = [group["params"] for group in self.param_groups]
            for group in self.param_groups:
                group["params"] = [p for p in group["params"] if p.numel()]
            loss = super().step(closure)
            for group, held in zip(self.param_groups, everything, strict=True):
                group["params"] = held
            return loss

    return Full


def parameters_without_elements(run: Run) -> None:
    """No rank updates them, whichever rank would be their owner; bytes of states are as predicted."""
    for cls in (Adafactor, zs.optim.Adafactor, Muon):
        model = models.build(Hollow)
        held = [p for p in model.parameters() if p.ndim == 2 or cls is not Muon]
        optimizers = [(cls if isinstance(run, Sharded) else over_elements(cls))(held, lr=0.05)]
        if cls is Muon:
            optimizers.append(torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1))
        run.shard(model, *optimizers)
        train(run, model, *optimizers)
        if isinstance(run, Sharded):
            memory = run.zeros[-1].memory()
            assert memory.resident_bytes["states"] == memory.predicted_bytes["states"], memory


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


def zs_muon(run: Run) -> None:
    for options in ({}, {"maximize": True}, {"adjust_lr_fn": "original", "momentum": 0.8}):
        model = models.build(models.GPT)
        optimizer = zs.optim.Muon(zs.optim.muon_groups(model), lr=0.02, **options)
        run.shard(model, optimizer)
        train(run, model, optimizer)


def zs_adafactor(run: Run) -> None:
    for options in ({}, {"beta1": 0.9}):
        model = models.build(models.GPT)
        optimizer = zs.optim.Adafactor(model.parameters(), **options)
        run.shard(model, optimizer)
        train(run, model, optimizer)


def zs_lamb(run: Run) -> None:
    model = models.build(models.GPT)
    optimizer = zs.optim.Lamb(model.parameters(), lr=0.01)
    run.shard(model, optimizer)
    train(run, model, optimizer)


SCRIPTS = [
    adafactor,
    trust,
    some_whole_some_sliced,
    several_groups_and_a_schedule,
    a_group_added_later,
    a_group_removed_and_added_again,
    parameters_used_now_and_then,
    a_step_without_gradients,
    clipped_and_accumulated,
    existing_state,
    odd_parameters,
    fewer_matrices_than_ranks,
    attached_later,
    states_read_and_written,
]


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("script", [muon, adafactor])
def test_torchs_own_optimizers_at_all_stages(script: Any, world: int) -> None:
    assert_matches(script, world, STAGES)


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_elements_are_left_as_they_are(world: int) -> None:
    assert_matches(parameters_without_elements, world, STAGES)


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS[1:]))
def test_whole_matrices(script: Any, world: int) -> None:
    assert_matches(script, world)


@pytest.mark.product
@pytest.mark.parametrize("script", [muon, parameters_used_now_and_then])
def test_messages_give_the_same_bits(script: Any) -> None:
    assert_matches(script, 3, options={"shared_memory": False})


def sums_of_two_copies(run: Run) -> None:
    """Use gradients whose sums are exact in any order, as copies add them up in another one."""
    for cls in (Adafactor, Muon):
        model = models.build(models.Even, depth=2, width=12)
        optimizer = cls(model.parameters(), lr=0.05)
        run.shard(model, optimizer)
        for step in range(3):
            loss = model(randn(4, 12, key=(step,))).square().mean()  # the same on all ranks
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.record(loss=loss)


@pytest.mark.product
@pytest.mark.parametrize("options", [{"mesh": 2}, {"mesh": 2, "shared_memory": False}])
def test_each_copy_makes_its_own_exchange(options: dict[str, Any]) -> None:
    assert_matches(sums_of_two_copies, 4, (1, 3), options)


@pytest.mark.product
@pytest.mark.parametrize("script", [zs_muon, zs_adafactor, zs_lamb])
@pytest.mark.parametrize("world", [2, 3])
def test_our_own_optimizers(script: Any, world: int) -> None:
    assert_matches(script, world)


def on_emulated_gpus(name: str, seed: int) -> dict[int, Any]:
    script = {"muon": muon, "adafactor": adafactor, "odd": odd_parameters, "mixed": some_whole_some_sliced}[name]
    with gpu(seed):
        return both(script, STAGES, {})[1]


@pytest.mark.product
@pytest.mark.parametrize(("name", "world"), [("muon", 2), ("adafactor", 2), ("odd", 3), ("mixed", 2)])
def test_nccls_code_gives_the_same_bits_at_all_stages(name: str, world: int) -> None:
    """At stage 0 nothing is exchanged; NCCL's sums are its own, so that plain data parallelism has other bits."""
    for found in run_ranks(on_emulated_gpus, world, name, world, timeout_s=2 * TIMEOUT_S):
        for stage in STAGES[1:]:
            assert_same(found[0], found[stage], f"stage {stage}")


# ---- end to end

STEPS = 200


def gpt_of(name: str) -> tuple[nn.Module, Optimizer]:
    model = models.build(models.GPT, width=24)
    if name == "muon":
        return model, zs.optim.Muon(zs.optim.muon_groups(model), lr=3e-3)
    return model, Adafactor(model.parameters(), lr=1e-2)


def tokens_of(step: int, rank: int) -> Tensor:
    """Return sequences that can be learned: each token follows from the one before."""
    first = models.tokens(step % 7, rank)[:, :1]
    return (first + 3 * torch.arange(9)) % models.VOCABULARY


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def on_whole_batches(name: str) -> list[float]:
    """Train in one process on the batches of both ranks together."""
    model, optimizer = gpt_of(name)
    losses = []
    for step in range(STEPS):
        loss = language_loss(model, torch.cat([tokens_of(step, 0), tokens_of(step, 1)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_ranks(name: str, stage: int) -> list[float]:
    model, optimizer = gpt_of(name)
    zs.shard(model, optimizer, stage=stage)
    losses = []
    for step in range(STEPS):
        loss = language_loss(model, tokens_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zs.mean_across_ranks(loss).item())
    return losses


@pytest.mark.product
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_losses_of_200_steps_are_those_of_one_process(name: str) -> None:
    expected = on_whole_batches(name)
    assert expected[-1] < expected[0] / 2
    for losses in run_ranks(on_ranks, 2, name, 3, timeout_s=120.0):
        assert losses == pytest.approx(expected, rel=0.01)


# ---- mixed precision


def even() -> nn.Module:
    return models.build(models.Even, depth=2, width=12)


def even_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(randn(4, 12, key=(step, rank))).square().mean()


CASES = {
    "muon": Case(even, even_loss, lambda model: Muon(model.parameters(), lr=0.02), 3),
    "adafactor": Case(even, even_loss, lambda model: Adafactor(model.parameters(), lr=0.05), 3),
}


def in_precision(name: str, precision: Any) -> list[tuple[list[float], dict[str, Tensor]]]:
    found, case, rank = [], CASES[name], dist.get_rank() if dist.is_initialized() else 0
    for stage in STAGES:
        model = case.build()
        optimizer = case.optimizer(model)
        zero = zs.shard(model, optimizer, stage=stage, precision=precision)
        losses = []
        for step in range(case.steps):
            loss = case.loss(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with zero.gathered():
            found.append((losses, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16])
def test_masters_are_updated_in_mixed_precision(name: str, world: int, param: torch.dtype) -> None:
    scale = 256.0 if param is torch.float16 else 1.0
    expected = single_run(CASES[name], world, Casts(param, scale=scale))
    precision = zs.Precision(param=param, loss_scale=scale) if param is torch.float16 else "bf16"
    for rank, by_stage in enumerate(run_ranks(in_precision, world, name, precision, process_group=world > 1)):
        for losses, parameters in by_stage:
            assert losses == expected["losses"][rank]
            assert_same(expected["parameters"], parameters)


def held_in_two_bytes() -> list[bool]:
    """Train with gradients held in bfloat16 and masters rounded at random to it: the same at all stages."""
    found = []
    precision = zs.Precision(
        param=torch.bfloat16, grad=torch.bfloat16, master=torch.bfloat16, rounding="stochastic", reduce=torch.float32
    )
    for stage in STAGES:
        model = even()
        optimizer = Adafactor(model.parameters(), lr=0.05)
        zero = zs.shard(model, optimizer, stage=stage, precision=precision)
        for step in range(3):
            even_loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            found.append([p.detach().clone() for p in model.parameters()])
    return [all(map(torch.equal, found[0], one)) for one in found]


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_masters_in_two_bytes_are_widened_for_their_owners(world: int) -> None:
    assert run_ranks(held_in_two_bytes, world) == [[True] * 4] * world


def averaged() -> tuple[bool, bool, bool]:
    """Average the masters of an update on owners; copy the model; go on with the copy in one process."""
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    zero = zs.shard(model, optimizer, stage=3)
    average = zero.ema(0.5)
    with zero.gathered():
        before = [p.detach().clone() for p in model.parameters()]
    models.stack_loss(model, 0, 0).backward()
    optimizer.step()
    average.update()
    with zero.gathered():
        after = [p.detach().clone() for p in model.parameters()]
        copied = copy.deepcopy(model)
    with average.swapped(), zero.gathered():
        is_mean = all(
            torch.equal(p, torch.lerp(a, b, 0.5)) for p, a, b in zip(model.parameters(), before, after, strict=True)
        )
    with zero.gathered():
        is_back = all(map(torch.equal, model.parameters(), after))
    return is_mean, is_back, all(map(torch.equal, copied.parameters(), after))


def test_averages_and_copies_of_what_owners_update() -> None:
    assert run_ranks(averaged, 2) == [(True, True, True)] * 2


def skipped(stage: int) -> tuple[bool, bool, int]:
    """Skip the first step, for an overflow on one rank; return whether nothing and then something changed."""
    model = even()
    optimizer = Muon(model.parameters(), lr=0.02)
    zero = zs.shard(model, optimizer, stage=stage, precision="fp16")
    seen = []
    for step in range(2):
        factor = float("inf") if step == 0 and dist.get_rank() == 1 else 1e-3
        (even_loss(model, step, dist.get_rank()) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zero.gathered(states=True):
            seen.append(([p.detach().clone() for p in model.parameters()], len(optimizer.state)))
    plain = [p.detach().half() for p in even().parameters()]
    is_kept, has_moved = (all(map(torch.equal, plain, one)) for one, _ in seen)
    return is_kept and seen[0][1] == 0, not has_moved, seen[1][1]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_overflows_exchanges_nothing(stage: int) -> None:
    assert run_ranks(skipped, 2, stage) == [(True, True, 5)] * 2


# ---- what an owner has


def owned(stage: int) -> tuple[list[int], list[int], list[type], int]:
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": 5.0}))
    before = [id(entry) for entry in optimizer.param_groups[0]["params"]]
    models.stack_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()
    entries = optimizer.param_groups[0]["params"]
    assert [id(entry) for entry in entries] == before
    names = [slot_of(entry).name for entry in entries]
    assert names == [name for name, _ in model.named_parameters()]
    places = [place for place, entry in enumerate(entries) if optimizer.state.get(entry)]
    for place in places:
        of_matrix = optimizer.state[entries[place]].get("row_var")
        assert of_matrix is None or of_matrix.shape == (*slot_of(entries[place]).shape[:1], 1)
    assert set(optimizer.state) <= set(entries)
    return places, [slot_of(entry).updater for entry in entries], [type(e) for e in entries], zero.mesh.rank


@pytest.mark.product
@pytest.mark.parametrize("stage", [1, 3])
def test_states_are_on_owners_alone_and_groups_hold_slices(stage: int) -> None:
    results = run_ranks(owned, 3, stage)
    owners = results[0][1]
    assert set(owners) == {0, 1, 2}
    for places, updaters, types, rank in results:
        assert updaters == owners
        assert places == [place for place, owner in enumerate(owners) if owner == rank]
        assert set(types) == {MasterSlice}


# ---- what goes wrong


def not_finite() -> tuple[str, bool, int]:
    model = models.build(models.Stack)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    zero = zs.shard(model, optimizer, stage=3, **settled({"watchdog_s": 5.0}))
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    (models.stack_loss(model, 0, dist.get_rank()) * factor).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    sent = zero.traffic().sent_bytes.get("update", 0)
    with zero.gathered(states=True):
        same = all(map(torch.equal, model.parameters(), models.build(models.Stack).parameters()))
        return str(error.value), same and not optimizer.state, sent


def test_a_gradient_that_is_not_finite_is_found_before_anything_is_sent() -> None:
    for text, is_unchanged, sent in run_ranks(not_finite, 2):
        assert "is not finite; nothing was changed on any rank" in text
        assert is_unchanged
        assert sent == 0


class Fails(Adafactor):
    """An optimizer whose update fails on one rank."""

    is_failing = False

    def step(self, closure: Any = None) -> Any:
        if self.is_failing and any(group["params"] for group in self.param_groups):
            raise ArithmeticError("the update failed here")
        return super().step(closure)


def failing(shared_memory: bool, is_killed: bool) -> None:
    model = models.build(models.Stack)
    optimizer = Fails(model.parameters(), lr=0.05)
    zs.shard(model, optimizer, stage=2, **settled({"watchdog_s": 5.0, "shared_memory": shared_memory}))
    for step in range(2):
        models.stack_loss(model, step, dist.get_rank()).backward()
        optimizer.is_failing = step == 1 and dist.get_rank() == 1
        if optimizer.is_failing and is_killed:
            optimizer.step = None  # type: ignore[method-assign, assignment]
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_an_update_that_fails_on_one_rank_ends_all_with_its_name(shared_memory: bool) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(failing, 3, shared_memory, False, timeout_s=TIMEOUT_S)
    errors = failure.value.errors
    assert errors[1].type_name == "ArithmeticError"
    for rank in (0, 2):
        assert errors[rank].type_name == "RankMismatchError"
        assert "rank 1: ArithmeticError: the update failed here" in errors[rank].message


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_dies_at_an_update_is_named(shared_memory: bool) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(failing, 3, shared_memory, True, timeout_s=TIMEOUT_S)
    for rank in (0, 2):
        assert "rank 1" in failure.value.errors[rank].message


# ---- what is refused


class Together(Trust):
    """An optimizer that looks at all parameters at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            total = sum(p.grad.norm() for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / total * group["lr"])


class Counting(Trust):
    """An optimizer whose groups count steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * group["lr"] / group["calls"])


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cls", [Together, Counting])
def test_an_optimizer_that_cannot_run_in_pieces_is_refused_by_name(cls: Any, stage: int) -> None:
    model = models.build(models.Stack)
    with pytest.raises(ValueError, match=f"{cls.__name__} updates whole parameters .* depends on others"):
        zs.shard(model, whole_matrix(cls(model.parameters())), stage=stage)


def test_one_that_needs_a_closure_is_refused_by_name() -> None:
    model = models.build(models.Stack)
    for optimizer in (torch.optim.LBFGS(model.parameters()), whole_matrix(torch.optim.LBFGS(model.parameters()))):
        for stage in (0, 1, 3):
            with pytest.raises(ValueError, match=r"LBFGS\.step\(\) evaluates a closure: .* torch\.optim\.AdamW"):
                zs.shard(model, optimizer, stage=stage)


class Sharpness(torch.optim.SGD):
    """Evaluates again in its step, as SAM does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is required"
        closure()
        super().step()


class Ascent(torch.optim.SGD):
    """Has the two methods of SAM, and another optimizer inside, which its constructor makes."""

    def __init__(self, parameters: Any, base: type[Optimizer], lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.base = base(self.param_groups)

    def first_step(self) -> None:
        """Change parameters between two backwards."""

    def second_step(self) -> None:
        """Take the change back, and update."""


class OfModel(torch.optim.SGD):
    """Is built with the model."""

    def __init__(self, parameters: Any, model: torch.nn.Module, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)


def test_others_that_cannot_be_tried_are_refused_by_name_too() -> None:
    model = models.build(models.Stack)
    marked = whole_matrix(Sharpness(model.parameters()))
    for optimizer in (Sharpness(model.parameters()), marked, Ascent(model.parameters(), torch.optim.SGD)):
        for stage in (0, 1):
            with pytest.raises(ValueError, match=rf"{type(optimizer).__name__}\.step\(\) evaluates a closure: "):
                zs.shard(model, optimizer, stage=stage)
    with pytest.raises(
        ValueError, match=r"cannot be tried on slices: its constructor needs model, which .*elementwise=True"
    ):
        zs.shard(model, OfModel(model.parameters(), model), stage=1)
    with pytest.raises(ValueError, match=r"SparseAdam supports only sparse gradients, .* Use torch\.optim\.Adam"):
        zs.shard(model, torch.optim.SparseAdam(model.parameters()), stage=0)


class Outside(Optimizer):
    """Wraps an optimizer without the constructor of torch's class."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state


class OutsideSteps(Outside):
    """Has the hooks of steps alone, as Lookahead of timm does."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        super().__init__(base)


@pytest.mark.parametrize("cls", [Outside, OutsideSteps])
def test_a_wrapper_without_hooks_is_refused_by_name(cls: type[Outside]) -> None:
    model = models.build(models.Stack)
    for stage, settings in ((0, zs.Settings()), (3, zs.Settings()), (3, zs.Settings(elementwise=True))):
        with pytest.raises(ValueError, match=f"{cls.__name__} wraps an optimizer.*the optimizer inside"):
            zs.shard(model, cls(torch.optim.AdamW(model.parameters())), stage=stage, settings=settings)


def look_ahead(stage: int) -> None:
    """Move entries by hand after each second step, as the error says that wrappers may, and compare parameters."""
    plain, model = models.build(models.Stack), models.build(models.Stack)
    inner, mine = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model))
    zero = zs.shard(model, mine, stage=stage)
    for one, optimizer in ((plain, inner), (model, mine)):
        entries = [p for group in optimizer.param_groups for p in group["params"]]
        slow = [p.data.clone() for p in entries]
        for step in range(4):
            one(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, q in zip(entries, slow, strict=True) if step % 2 else ():
                p.data.copy_(q.lerp_(p.data, 0.5))
    with zero.gathered():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_entries_may_change_between_steps(stage: int) -> None:
    run_ranks(look_ahead, 2, stage, timeout_s=TIMEOUT_S)


def test_an_unmarked_one_is_told_of_the_mark() -> None:
    model = models.build(models.Stack)
    with pytest.raises(ValueError, match=r"Trust is not element-wise.*zs\.optim\.whole_matrix\(optimizer\)"):
        zs.shard(model, Trust(model.parameters()), stage=2)


def test_what_is_left_to_slices_must_be_element_wise() -> None:
    model = models.build(models.Stack)
    optimizer = Adafactor([{"params": [*model.parameters()], "whole": False}], lr=0.05)
    with pytest.raises(ValueError, match="Adafactor is not known to be element-wise"):
        zs.shard(model, optimizer, stage=1)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused_by_name(cost: float) -> None:
    model = models.build(models.Stack)
    optimizer = whole_matrix(Trust(model.parameters()), cost=lambda shape: cost)
    with pytest.raises(ValueError, match=r"The cost of 'stem\.weight' \(12, 5\) in Trust must be a number from 0"):
        zs.shard(model, optimizer)
