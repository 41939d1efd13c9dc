"""Parameters that user code changes in place: kept where all ranks make the same change, an error by name elsewhere."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zeroshard as zs
from tests import models
from tests.errors import raised
from tests.models import WIDTH
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, assert_matches, assert_same, run_cases
from zeroshard.testing import run_ranks

CODES = 6


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """Average over all ranks, in one order of summation."""
    if not dist.is_initialized():
        return tensor
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.stack(rows).mean(0)


class Codebook(models.Block):
    """A block that adds the nearest of some codes, which follow a moving average of the inputs of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CODES, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.lerp_(mean_over_ranks(x.mean(0)).expand_as(self.codes), 0.1)
        return super().forward(x) + F.embedding(nearest, self.codes)


class CodebookByData(Codebook):
    """The same by way of `.data`, as older code has it."""

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.9).add_(0.1 * mean_over_ranks(x.detach().mean(0)))
        return models.Block.forward(self, x) + self.codes[0]


class Prototypes(models.Block):
    """A block whose trainable prototypes are normalised at each use."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight))
        return super().forward(x) + self.prototypes(x)


class Renormalised(models.Block):
    """A block with an embedding that torch renormalises as it is read, and statistics in parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(4, WIDTH, max_norm=1.0)
        self.calls = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return super().forward(x) + self.places(torch.arange(4)) * self.calls.clone()


class Parametrized(models.Block):
    """A block with torch's own parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)
        self.down = parametrizations.spectral_norm(self.down)


KINDS = [Codebook, CodebookByData, Prototypes, Renormalised, Parametrized]


class Changing(models.Stack):
    """A stack of all of them, one used twice in a forward, and one that is no unit."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(kind() for kind in (*KINDS, models.Block))
        self.shared = Renormalised()
        self.outside = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.outside.mul_(1.5)
        x = self.shared(self.stem(x) * self.outside.clone())
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.outside.sub_(0.25)
        return self.head(self.shared(x))


def changed_alike(run: Run) -> None:
    model = models.build(Changing)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[*KINDS, models.Block])
    for step in range(3):
        for micro in range(1 + step % 2):
            loss = models.stack_loss(model, step, run.rank, micro)
            run.record(loss=loss)
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            run.record(evaluated=models.stack_loss(model, step, run.rank, 9))
        with run.gathered(writeback=True), torch.no_grad():
            model.head.weight.clamp_(-0.1, 0.1)
        with run.gathered():
            run.record(codes=[block.codes for block in model.blocks[:2]], outside=model.outside)


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "messages"])
def test_the_same_change_on_all_ranks_is_kept(shared_memory: bool) -> None:
    assert_matches(changed_alike, 2, STAGES, {"shared_memory": shared_memory})


class Drifting(models.Block):
    """A block with a frozen and a trainable parameter that `how` changes, and an embedding with `max_norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(CODES, WIDTH), requires_grad=False)
        self.places = nn.Embedding(8, WIDTH, max_norm=0.5)
        self.how: Callable[[Drifting], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            places = self.how(self) if self.how is not None else None
        return super().forward(x) + self.codes[0] + (0.0 if places is None else places)


def by_rank(block: Drifting) -> None:
    block.codes.mul_(1.0 + dist.get_rank())


def on_one_rank(block: Drifting) -> None:
    if dist.get_rank() == 1:
        block.up.weight.data[0] = 3.0


def by_batch(block: Drifting) -> Tensor:
    return block.places(torch.tensor([dist.get_rank()]))


BY_RANK: dict[str, tuple[Callable[[Drifting], Any], str]] = {
    "by rank": (by_rank, "blocks.1.codes"),
    "on one rank": (on_one_rank, "blocks.1.up.weight"),
    "max_norm of each rank's batch": (by_batch, "blocks.1.places.weight"),
}


def refused_by_rank(shared_memory: bool) -> list[tuple[str, str, list[float]]]:
    """Change what each stage holds in another way on each rank; return where, the error, and losses of steps after."""
    seen = []
    for stage in STAGES:
        for what, (how, _) in BY_RANK.items():
            model = models.build(models.Stack, depth=1)
            model.blocks.append(models.build(Drifting))
            model.blocks[1].places.requires_grad_(False)
            optimizer = models.sgd(model)
            zero = zs.shard(
                model,
                optimizer,
                stage=stage,
                units=[models.Block],
                settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S),
            )
            model.blocks[1].how = how
            text = "nothing was raised"
            try:
                models.stack_loss(model, 0, dist.get_rank()).backward()
                optimizer.step()
            except zs.RankMismatchError as error:
                text = str(error)
            model.blocks[1].how = None
            optimizer.zero_grad()
            with zero.gathered(writeback=True):
                pass
            losses = []
            for step in range(2):
                loss = models.stack_loss(model, step, 0)
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append((f"stage {stage}, {what}", text, losses))
    return seen


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "messages"])
def test_another_change_on_each_rank_is_an_error_that_names_the_parameter(shared_memory: bool) -> None:
    by_rank = run_ranks(refused_by_rank, 2, shared_memory, timeout_s=TIMEOUT_S)
    for where, text, losses in by_rank[0]:
        assert BY_RANK[where.partition(", ")[2]][1] in text, f"{where}: {text}"
        assert "gathered(writeback=True)" in text, f"{where}: {text}"
        assert "rank 0: " in text and "rank 1: " in text, f"{where}: {text}"
        assert all(loss == loss for loss in losses), where
    assert [one[2] for one in by_rank[0]] == [one[2] for one in by_rank[1]], "ranks compute with other parameters"


def between_steps(precision: str) -> list[tuple[str, bool]]:
    """Change parameters between steps, as clipping of weights does; tell where a step undid the change."""
    seen = []
    for stage in STAGES:
        model = models.build(models.Stack)
        model.stem.bias.requires_grad_(False)
        optimizer = models.sgd(model, lr=0.0)
        zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        models.stack_loss(model, 0, dist.get_rank()).backward()
        with zero.gathered(states=True):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with zero.gathered(writeback=stage == 3), torch.no_grad():
            if stage == 3:
                change(model)
        if stage < 3:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
        with zero.gathered():
            for name, p in model.named_parameters():
                is_changed = name.endswith("bias") or name == "head.weight"
                kept = p.detach().float().unique().tolist() == [0.25] if is_changed else p.equal(before[name])
                seen.append((f"stage {stage}: {name}", kept))
        zero.check_copies()
    return seen


def change(model: nn.Module) -> None:
    """Make some parameters a quarter, in both ways."""
    model.head.weight.data.clamp_(0.25, 0.25)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.fill_(0.25)


@pytest.mark.product
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_change_between_steps_is_not_undone(precision: str) -> None:
    for seen in run_ranks(between_steps, 2, precision, timeout_s=TIMEOUT_S):
        assert not [where for where, is_kept in seen if not is_kept]


def ended_by_an_exception(stage: int, who: str, writeback: bool) -> dict[str, Any]:
    """Change parameters in a context that an exception ends; then evaluate, train, and write them again."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    rank, seen = dist.get_rank(), dict[str, Any]()

    def train(step: int) -> None:
        models.stack_loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            models.stack_loss(model, 5, rank)

    train(0)
    average = zero.ema(0.5)
    with zero.gathered():
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(KeyError), zero.gathered(writeback=writeback, states=True), torch.no_grad():
        if who == "all" or who == str(rank):
            model.head.weight.mul_(3.0)
            model.stem.bias.data.fill_(0.5)
            optimizer.state[model.head.weight]["exp_avg"].fill_(7.0)
            optimizer.state[model.head.weight]["step"].fill_(7.0)
        raise KeyError("a file without a head")
    seen["evaluation"] = raised(evaluate)
    model.eval()
    seen["gradients"] = raised(lambda: models.stack_loss(model, 5, rank))
    model.train()
    seen["average"], seen["copies"] = raised(average.update), raised(zero.check_copies)
    seen["step"] = raised(lambda: train(1))
    seen["gathered"] = raised(lambda: zero.gathered(states=True).__enter__()) if seen["step"][:7] == "Runtime" else ""
    optimizer.zero_grad()
    if seen["gathered"]:
        with zero.gathered(writeback=True):
            model.load_state_dict(before)
        zero.check_copies()
        average.update()
        if who == "all":
            with average.swapped(), zero.gathered():
                assert_same(before, dict(model.named_parameters()))
        train(1)
        evaluate()
    with zero.gathered(states=True):
        seen["state"] = optimizer.state[model.head.weight]["exp_avg"].abs().max().item()
        seen["weight"] = model.head.weight.detach().clone()
    return seen


def without_an_exception() -> Tensor:
    """Return the head after two steps of `ended_by_an_exception`, in one process."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    for step in range(2):
        for rank in range(2):
            (models.stack_loss(model, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.head.weight.detach()


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_under_gathered_keeps_no_change(stage: int) -> None:
    cases = [(stage, who, writeback) for who in ("all", "0", "none") for writeback in (True, False)]
    told = ("evaluation", "gradients", "average")
    for (_, who, _), by_rank in run_cases(ended_by_an_exception, 2, cases, timeout_s=TIMEOUT_S).items():
        for rank, seen in enumerate(by_rank):
            assert seen["state"] < 1.0
            torch.testing.assert_close(seen["weight"], without_an_exception())
            if stage == 3 or who == "none":
                assert {seen[name] for name in (*told, "copies", "step")} == {"nothing was raised"}
                continue
            for text, kind in ((seen["step"], ""), (seen["gathered"], ""), (seen["copies"], "RankMismatch")):
                assert text.startswith(f"{kind or 'Runtime'}Error: [rank {rank}/2] Parameters were changed\n")
                assert "rank 0: under gathered(), which an exception ended: stem.bias, head.weight" in text
                assert "Enter `with zero.gathered(writeback=True):` again" in text
            if who == "0" and rank == 1:
                assert {seen[name] for name in told} == {"nothing was raised"}
            else:
                for name in told:
                    assert "2 parameter(s), 'stem.bias' first, were changed" in seen[name]


def states_after_failures(stage: int, kind: str) -> None:
    """Change states in contexts that fail, and require those from before."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model) if kind == "adamw" else zs.optim.Muon(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    models.stack_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()
    if kind == "adamw" or stage == 0:  # an owner can send no list
        with zero.gathered(states=True, writeback=True):
            optimizer.state[model.head.weight]["seen"] = [1.0]

    def look() -> dict[str, Any]:
        with zero.gathered(states=True):
            return copy.deepcopy(optimizer.state_dict())

    before = look()
    for writeback, has_exception in ((True, True), (False, True), (False, False)):
        # On one rank alone, as a file may be broken there.
        with pytest.raises((KeyError, RuntimeError)), zero.gathered(writeback=writeback, states=True):
            for state in (optimizer.state[p] for p in model.parameters() if dist.get_rank() or not has_exception):
                for value in state.values():
                    value.add_(3) if isinstance(value, Tensor) else value.append(3.0)
            if has_exception:
                raise KeyError("a state")
        assert_same(before["state"], look()["state"], f"{writeback=} {has_exception=}")


def groups_after_a_failure(stage: int) -> None:
    """Change the groups of an optimizer in a context that fails, and train as if nothing had been."""
    model, oracle = models.build(models.Stack), models.build(models.Stack)
    rate = torch.tensor(0.02)
    optimizer, single = (
        torch.optim.AdamW([{"params": [*one.parameters()][:-2], "lr": 0.01}, {"params": one.head.parameters()}], lr)
        for one, lr in ((model, rate), (oracle, 0.02))
    )
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))

    def train(step: int) -> None:
        models.stack_loss(model, step, dist.get_rank()).backward()
        for rank in range(2):
            (models.stack_loss(oracle, step, rank) / 2).backward()
        for one in (optimizer, single):
            one.step()
            one.zero_grad()

    def load() -> None:
        loaded = copy.deepcopy(optimizer.state_dict())
        loaded["param_groups"][0]["lr"] = 5.0
        optimizer.load_state_dict(loaded)

    def move() -> None:
        rate.fill_(5.0)
        optimizer.param_groups[0]["betas"] = (0.1, 0.1)
        optimizer.param_groups[1]["params"] += optimizer.param_groups.pop(0)["params"]

    train(0)
    groups = [*optimizer.param_groups]
    for change in (load, move):
        with pytest.raises(KeyError), zero.gathered(states=True, writeback=True):
            change()
            raise KeyError("a state")
        assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
        assert optimizer.param_groups[1]["lr"] is rate
    train(1)
    with zero.gathered():
        for parameter, expected in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), expected.detach())


@pytest.mark.product
def test_groups_are_as_before_a_context_that_fails() -> None:
    run_cases(groups_after_a_failure, 2, [(stage,) for stage in STAGES], timeout_s=TIMEOUT_S)


@pytest.mark.product
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_states_are_as_before_a_context_that_fails(kind: str) -> None:
    run_cases(states_after_failures, 2, [(stage, kind) for stage in STAGES], timeout_s=TIMEOUT_S)
