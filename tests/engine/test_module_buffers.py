"""Buffers that forwards change are those of rank 0 on all ranks, as under DistributedDataParallel, to the bit."""

import contextlib
import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.rotation import third
from zeroshard.testing import run_ranks

from ..oracle import STAGES, assert_same, randn, run_cases

WIDTH = 6
DDP = "DDP"


class Counting(nn.Module):
    """A block with statistics of each kind: of batch norms, replaced, counted, a flag, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        # As in BigGAN: kernels that leave versions alone, and names that say nothing.
        self.register_buffer("stored_mean", torch.zeros(WIDTH))
        self.register_buffer("stored_var", torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_started", torch.tensor(False), persistent=False)
        self.register_buffer("constant", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        y = F.batch_norm(y, self.stored_mean, self.stored_var, training=self.training)
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
                self.count += int(x[0, 0] > 0)
                self.is_started.fill_(bool(x[0, 1] > 0))
        return torch.tanh(y) + self.mean.sum() * self.constant[0]


def build(norms: bool = True) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    plain.register_buffer("constant", torch.ones(4))
    return nn.Sequential(*[Counting() if norms else copy.deepcopy(plain) for _ in range(3)], nn.Linear(WIDTH, 2))


def inputs(step: int, rank: int) -> Tensor:
    return randn(5, WIDTH, key=(step, rank, 7))


@dataclasses.dataclass
class Made:
    """A model that trains on this rank; `call` is its forward, and `no_sync` accumulates."""

    model: nn.Module
    call: Any
    optimizer: torch.optim.Optimizer
    no_sync: Any
    zero: Any = None


def make(how: Any, model: nn.Module, **options: Any) -> Made:
    """Make a model parallel: `DDP`, or a stage and whether ranks share memory."""
    parameters = options.pop("parameters_of", model).parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if how == DDP:
        ddp = nn.parallel.DistributedDataParallel(model)
        return Made(model, ddp, optimizer, ddp.no_sync)
    stage, shared_memory = how
    settings = zs.Settings(**{"shared_memory": shared_memory, "watchdog_s": 20.0, **options.pop("settings", {})})
    zero = zs.shard(model, optimizer, stage=stage, settings=settings, **options)
    return Made(model, model, optimizer, zero.no_sync, zero)


def losses(made: Made, step: int, rank: int, kind: str) -> None:
    """Make the forwards and backwards of one step."""
    if kind == "two forwards":
        (made.call(inputs(step, rank)).square().mean() + made.call(inputs(step, rank + 2)).mean()).backward()
        return
    for micro in range(1 if kind == "one" else 3):
        is_kept = kind == "no_sync" and micro < 2
        with made.no_sync() if is_kept else contextlib.nullcontext():
            made.call(inputs(10 * step + micro, rank)).square().mean().backward()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_buffers()}


def train(how: Any, kind: str, steps: int = 3, **options: Any) -> dict[str, Any]:
    """Train, and evaluate on one batch; DDP synchronizes buffers in the first forward after training."""
    rank = torch.distributed.get_rank()
    made = make(how, build(), **options)
    if kind == "accumulated":
        # DistributedDataParallel divides and sums earlier gradients again, so updates would differ in the last bits.
        made.optimizer.param_groups[0]["lr"] = 0.0
    seen = []
    for step in range(steps):
        losses(made, step, rank, kind)
        made.optimizer.step()
        made.optimizer.zero_grad()
        if how != DDP:
            seen.append(values(made.model))
    made.model.eval()
    with torch.no_grad():
        evaluated = made.call(inputs(99, 0))
    return {"evaluated": evaluated, "buffers": values(made.model), "seen": seen}


KINDS = ("one", "two forwards", "accumulated", "no_sync")
HOWS = [(stage, stage % 2 == 0) for stage in STAGES]
"""Each stage once, and each transport twice; `OTHERS` are the other halves."""
OTHERS = [(stage, not shared) for stage, shared in HOWS]
HOWS_OF = dict(zip(KINDS, (HOWS, OTHERS, HOWS, OTHERS), strict=True))


@functools.cache
def trained() -> dict[tuple[Any, ...], list[Any]]:
    return run_cases(train, 2, [(how, kind) for kind in KINDS for how in (DDP, *HOWS_OF[kind])], timeout_s=60.0)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_equals_ddps_on_every_rank(kind: str) -> None:
    expected = trained()[DDP, kind]
    for how in HOWS_OF[kind]:
        first, second = trained()[how, kind]
        assert_same(first["seen"], second["seen"], f"{how}, after each step")
        for found in (first, second):
            assert_same(expected[0]["evaluated"], found["evaluated"], str(how))
            assert_same(expected[0]["buffers"], found["buffers"], str(how))


class Calling(nn.Module):
    """Has methods that run its blocks: by themselves, and by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def step(self, x: Tensor) -> Tensor:
        return self.net(x)

    def whole(self, x: Tensor) -> Tensor:
        return self(x)


def recalibrate(how: Any, name: str) -> dict[str, Any]:
    """Train, make training forwards without a backward, and evaluate; return the bytes of buffers, too."""
    rank, named = (
        torch.distributed.get_rank(),
        {} if how == DDP else {"settings": {"forward_methods": ("step", "whole")}},
    )
    made = make(how, Calling(), **named)
    if name:
        made.call = getattr(made.model, name)
    for step in range(2):
        losses(made, step, rank, "one")
        made.optimizer.step()
        made.optimizer.zero_grad()
    for step in range(2, 5):
        made.call(inputs(step, rank))
    nbytes = 0 if how == DDP else made.zero.traffic().sent_bytes.get("buffers", 0)
    made.model.eval()
    with torch.no_grad():
        evaluated = made.call(inputs(99, 0))
    return {"evaluated": evaluated, "buffers": values(made.model), "sent": nbytes}


def test_forwards_by_a_method_without_a_backward_leave_equal_buffers() -> None:
    hows, names = [(stage, True) for stage in third([3, 0, 1])], ("", "step", "whole")
    found = run_cases(recalibrate, 2, [(DDP, ""), *((how, name) for how in hows for name in names)], timeout_s=60.0)
    for (how, name), ranks in found.items():
        for one in ranks:
            assert_same(found[DDP, ""][0]["evaluated"], one["evaluated"], f"{how} {name}")
            assert_same(found[DDP, ""][0]["buffers"], one["buffers"], f"{how} {name}")
        # A method that calls forward is one forward.
        assert how == DDP or [one["sent"] for one in ranks] == [one["sent"] for one in found[how, ""]]


def sent(how: Any, kind: str) -> tuple[list[int], list[int]]:
    """Train with batch norms, then in eval mode, then a model without; return the bytes of buffers of each step."""
    found = []
    for norms in (True, False):
        made = make(how, build(norms))
        for step in range(4):
            made.model.train(step < 2)
            before = made.zero.traffic().sent_bytes.get("buffers", 0)
            losses(made, step, torch.distributed.get_rank(), kind)
            made.optimizer.step()
            made.optimizer.zero_grad()
            found.append(made.zero.traffic().sent_bytes.get("buffers", 0) - before)
    return found[:4], found[4:]


def test_a_message_has_what_changed_and_nothing_changed_sends_nothing() -> None:
    cases = [(how, kind) for kind in ("one", "no_sync") for how in (OTHERS if kind == "one" else HOWS)]
    a_step = 3 * (5 * 4 * WIDTH + 8 + 8 + 1)
    for (how, _), (first, second) in run_cases(sent, 2, third(cases), timeout_s=60.0).items():
        assert all(nbytes <= a_step for nbytes in first[0][:2]), (how, first)
        assert sum(first[0][:2]) > 0, (how, first)
        assert first[0][2:] == [0, 0], (how, first)
        assert first[1] == [0] * 4, (how, first)
        assert second == ([0] * 4, [0] * 4), (how, second)


def recomputed(stage: int) -> list[dict[str, Any]]:
    return [train((stage, True), "no_sync", 2, activations=one) for one in (None, "recompute")]


def test_a_recomputation_changes_no_buffer() -> None:
    for (stage,), ranks in run_cases(
        recomputed, 2, third([(stage,) for stage in STAGES[::-1]]), timeout_s=60.0
    ).items():
        for kept, again in ranks:
            assert_same(kept, again, f"stage {stage}")


class Moving(nn.Module):
    """A block that reads a buffer, whose values its training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.3)
        return torch.tanh(self.linear(x + torch.tanh(self.mean)))


def read_later(stage: int, how: str) -> list[dict[str, Any]]:
    """Train with forwards in evaluation mode; the second takes others' buffers before the backward of the first."""
    found = []
    for activations in (None, "recompute"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Moving() for _ in range(3)), nn.Linear(WIDTH, 2))
        made = make((stage, True), model, settings={"buffers": how}, activations=activations)
        rank = torch.distributed.get_rank()
        with made.zero.no_sync():
            made.call(inputs(0, rank)).square().mean().backward()
        made.model[0].eval()
        losses = [made.call(inputs(step, rank)).square().mean() for step in (1, 2)]
        for loss in losses:
            loss.backward()
        made.optimizer.step()
        with made.zero.gathered():
            whole = {name: one.detach().clone() for name, one in model.named_parameters()}
            found.append({**values(model), **whole, "losses": torch.stack(losses).detach()})
    return found


def test_recomputations_read_what_their_forward_read() -> None:
    """Also where ranks take each other's buffers in between, by the forward after it."""
    cases = third([(stage, how) for stage in STAGES for how in ("rank 0", "mean")])
    for case, ranks in run_cases(read_later, 2, cases, timeout_s=60.0).items():
        for kept, again in ranks:
            assert_same(kept, again, str(case))


def read_in_backwards(stage: int, how: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Run two forwards that read statistics in which ranks differ, then their backwards and a step.

    Returns:
        Parameters after the step; statistics between the forwards and the step; statistics after the step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm := nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    made, rank = make((stage, True), model, settings={"buffers": how}), torch.distributed.get_rank()
    with torch.no_grad():
        made.call(inputs(0, rank))
    norm.eval()
    losses = [made.call(inputs(step, rank)).square().mean() for step in (1, 2)]
    before = values(norm)
    for loss in losses:
        loss.backward()
    made.optimizer.step()
    with made.zero.gathered():
        parameters = [one.detach().clone() for one in made.model.parameters()]
    return parameters, before, values(norm)


@pytest.mark.parametrize("stage", [0, 3])
def test_statistics_that_a_backward_reads_follow_at_the_step(stage: int) -> None:
    """Written before the second forward, they raised in the backward of the first, on all but the first rank."""
    kept, followed = (run_ranks(read_in_backwards, 2, stage, how, timeout_s=60.0) for how in ("own", "rank 0"))
    for (expected, own, _), (actual, before, after) in zip(kept, followed, strict=True):
        assert_same(own, before, "statistics before the step")
        assert_same(expected, actual, "parameters")
        assert_same(kept[0][1], after, "statistics after the step")
    assert not torch.equal(kept[0][1]["running_mean"], kept[1][1]["running_mean"])


def without_a_step(how: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Evaluate after a backward that no step follows."""
    made, rank = make(how, build()), torch.distributed.get_rank()
    for step in range(2):
        losses(made, step, rank, "one")
        if step == 0:
            made.optimizer.step()
            made.optimizer.zero_grad()
    made.model.eval()
    with torch.no_grad():
        return made.call(inputs(99, 0)), values(made.model)


def test_an_evaluation_needs_no_step_before_it() -> None:
    found = run_cases(without_a_step, 2, [(how,) for how in (DDP, *third(HOWS))], timeout_s=60.0)
    for (how,), ranks in found.items():
        assert_same([found[DDP,][0]] * 2, ranks, str(how))


def around_an_evaluation(how: Any) -> list[list[Tensor]]:
    """Return parameters after a step, without an evaluation between forward and backward, and with one."""
    kept = []
    for evaluates in (False, True):
        made, rank = make(how, build()), torch.distributed.get_rank()
        losses(made, 0, rank, "one")
        loss = made.call(inputs(1, rank)).square().mean()
        made.model.train(not evaluates)
        with torch.no_grad():
            made.call(inputs(2, 0)) if evaluates else None
        loss.backward()
        made.optimizer.step()
        with made.zero.gathered():
            kept.append([one.detach().clone() for one in made.model.parameters()])
    return kept


def test_an_evaluation_before_a_backward_changes_no_gradient() -> None:
    """It takes the statistics of the first rank, which autograd has saved for the backward in training mode."""
    for (how,), ranks in run_cases(around_an_evaluation, 2, third([(how,) for how in HOWS]), timeout_s=60.0).items():
        for without, evaluated in ranks:
            assert_same(without, evaluated, str(how))


def left_behind(writes: bool) -> dict[str, Tensor]:
    """Let a forward take others' statistics that an earlier one has read, and read them where ranks meet next."""
    made, rank = make((3, True), build()), torch.distributed.get_rank()
    for turn in range(3):
        for block in made.model[:3]:
            block.norm.train(turn == 1)
        with torch.set_grad_enabled(turn < 2):
            made.call(inputs(turn % 2, rank))
    with torch.no_grad():
        for block in made.model[:3] if writes else ():
            block.norm.running_mean.add_(1.0)
    with made.zero.gathered():
        return {name: one for name, one in values(made.model).items() if "norm" in name}


def test_what_waits_for_the_step_is_written_where_values_are_read() -> None:
    first, second = run_ranks(left_behind, 2, False, timeout_s=60.0)
    assert_same(first, second, "between ranks")
    own, other = run_ranks(left_behind, 2, True, timeout_s=60.0)
    name = "0.norm.running_mean"
    torch.testing.assert_close(own[name], first[name] + 1.0)
    # What user code wrote in between is not lost; it follows at a step.
    assert not torch.equal(other[name], first[name])


class Branch(nn.Module):
    """A model of which only the first rank runs the second norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(), Counting()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if torch.distributed.get_rank() == 0 else y


def unequal_use(how: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = make(how, Branch())
    for step in range(3):
        made.call(inputs(step, torch.distributed.get_rank())).square().mean().backward()
        made.optimizer.step()
    return values(made.model)


def test_a_rank_that_does_not_run_a_module_has_its_buffers() -> None:
    for (how,), (first, second) in run_cases(
        unequal_use, 2, third([(how,) for how in HOWS[::-1]]), timeout_s=60.0
    ).items():
        assert first["second.norm.num_batches_tracked"] == 3
        assert_same(first, second, str(how))


def means(how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return buffers before and after the step; what each rank has alone, then the mean."""
    made = make(how, build(), settings={"buffers": "mean"})
    made.call(inputs(0, torch.distributed.get_rank())).square().mean().backward()
    before = values(made.model)
    made.optimizer.step()
    return before, values(made.model)


def test_means_are_of_floating_point_buffers_alone() -> None:
    for (how,), ranks in run_cases(means, 2, third([(how,) for how in OTHERS[::-1]])).items():
        (one, found), (other, second) = ranks
        expected = {k: (one[k] + other[k]) / 2 if one[k].is_floating_point() else one[k] for k in one}
        assert_same(expected, found, str(how))
        assert_same(expected, second, str(how))


def own(how: Any) -> Tensor:
    made = make(how, build(), settings={"buffers": "own"})
    made.call(inputs(0, torch.distributed.get_rank())).square().mean().backward()
    made.optimizer.step()
    return values(made.model)["0.norm.running_mean"]


def test_own_buffers_stay() -> None:
    for ranks in run_cases(own, 2, [(how,) for how in HOWS[:2]]).values():
        assert not torch.equal(*ranks)


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Settings\(buffers=\) must be 'rank 0', 'own' or 'mean'; got 'first'"):
        zs.shard(nn.Linear(2, 2), settings=zs.Settings(buffers="first"))  # type: ignore[arg-type]


def resumed(how: Any, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train four steps; train two, save, load into another model, and train two more."""
    found, rank, path = [], torch.distributed.get_rank(), f"{folder}/{how}"
    for is_resumed in (False, True):
        made = make(how, build())
        if is_resumed:
            made.zero.load(path)
        for step in range(2 * is_resumed, 4):
            losses(made, step, rank, "accumulated")
            made.optimizer.step()
            made.optimizer.zero_grad()
            if step == 1 and not is_resumed:
                made.zero.save(path)
        found.append({**values(made.model), "evaluated": made.call(inputs(99, rank)).detach()})
    return found[0], found[1]


def test_a_resume_is_bitwise(tmp_path: Path) -> None:
    for case, ranks in run_cases(
        resumed, 2, third([(how, str(tmp_path)) for how in OTHERS[::-1]]), timeout_s=60.0
    ).items():
        for expected, found in ranks:
            assert_same(expected, found, str(case))


def copies(how: Any) -> dict[str, Tensor]:
    made = make(how, build(), mesh=2)
    losses(made, 0, torch.distributed.get_rank(), "one")
    made.optimizer.step()
    return values(made.model)


def test_copies_of_the_state_follow_too() -> None:
    for case, (first, *others) in run_cases(copies, 4, third([((3, False),), ((1, True),)])).items():
        for other in others:
            assert_same(first, other, str(case))


class Shaped(nn.Module):
    """A model with a buffer that has the length of its rank's inputs."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.register_buffer("cache", torch.zeros(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.detach().sum(1)
        return self.linear(x)


def shaped(how: Any, persistent: bool) -> str:
    made, rank = make(how, Shaped(persistent)), torch.distributed.get_rank()
    try:
        made.call(inputs(0, rank)[: 2 + rank]).sum().backward()
        made.optimizer.step()
    except zs.RankMismatchError as error:
        return str(error)
    return str(len(made.model.cache))


def test_shapes_that_differ_are_named_or_stay_own() -> None:
    cases = [(how, persistent) for how in ((0, True), (3, False)) for persistent in (True, False)]
    for (_, persistent), ranks in run_cases(shaped, 2, cases).items():
        if persistent:
            assert all("'cache' has other shapes on other ranks" in text and "rank 1: ((3,)" in text for text in ranks)
        else:
            assert ranks == ["2", "3"]


def ignored(how: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting())
    made = make(how, model, ignored=[model[1]], parameters_of=model[0])
    made.call(inputs(0, torch.distributed.get_rank())).square().mean().backward()
    made.optimizer.step()
    return [one.norm.running_mean.clone() for one in model]


def test_ignored_modules_keep_their_own() -> None:
    for first, second in run_cases(ignored, 2, [((0, True),), ((3, False),)]).values():
        assert torch.equal(first[0], second[0])
        assert not torch.equal(first[1], second[1])


def mode_changes(how: Any) -> list[dict[str, Tensor]]:
    """Train with norms in eval mode, then in training mode, then in eval mode again; return buffers after each step."""
    made, seen = make(how, build()), []
    for step in range(6):
        for module in made.model.modules():
            if isinstance(module, Counting | nn.BatchNorm1d):
                module.train(2 <= step < 4)
        losses(made, step, torch.distributed.get_rank(), "two forwards")
        made.optimizer.step()
        seen.append(values(made.model))
    return seen


def test_norms_that_begin_to_train_later_follow() -> None:
    for (how,), (first, second) in run_cases(
        mode_changes, 2, third([(how,) for how in HOWS[::-1]]), timeout_s=60.0
    ).items():
        assert_same(first, second, str(how))
        assert not torch.equal(first[1]["0.stored_mean"], first[2]["0.stored_mean"])


def trained_before(how: Any) -> list[dict[str, Tensor]]:
    """Train within `no_sync()`, evaluate with a backward that meets, and once more in another mode than its forward."""
    made = make(how, build())
    found = []
    for is_apart in (True, False):
        with made.no_sync() if is_apart else contextlib.nullcontext():
            loss = made.call(inputs(int(is_apart), torch.distributed.get_rank())).square().mean()
            made.model.eval()
            loss.backward()
        made.call(inputs(2, 0)).square().mean().backward()
        made.optimizer.step()
        found.append(values(made.model))
        made.model.train()
    return found


def test_norms_that_trained_before_the_vote_follow() -> None:
    """A vote in evaluation mode took running statistics for unchanged, so that ranks kept their own."""
    for (how,), (first, second) in run_cases(
        trained_before, 2, third([(how,) for how in HOWS[::-1]]), timeout_s=60.0
    ).items():
        assert_same(first, second, str(how))


def alone(how: Any) -> tuple[Any, ...]:
    """Evaluate on one rank alone in each step; return all buffers, and the bytes that evaluation sent."""
    made, rank = make(how, build()), torch.distributed.get_rank()
    sent, seen = 0, []
    for step in range(4):
        losses(made, step, rank, "two forwards")
        made.optimizer.step()
        made.optimizer.zero_grad()
        before = sum(made.zero.traffic().sent_bytes.values())
        made.model.eval()
        if rank == 1:
            made.model(inputs(99, 0))  # with gradients: the usual slip
            with torch.no_grad():
                made.model(inputs(99, 0))
        sent += sum(made.zero.traffic().sent_bytes.values()) - before
        made.model.train()
        seen.append(values(made.model))
    return seen, sent


def test_evaluation_on_one_rank_alone_sends_nothing() -> None:
    cases = [(how,) for how in OTHERS if how[0] < 3]
    for (how,), (first, second) in run_cases(alone, 2, third(cases[::-1]), timeout_s=60.0).items():
        assert_same(first[0], second[0], str(how))
        assert first[1] == second[1] == 0, how


def between(how: Any, folder: str) -> list[dict[str, Tensor]]:
    """Return the buffers between a backward and the step: in and after `gathered()`; when saved, and as loaded."""
    rank, found = torch.distributed.get_rank(), []
    made = make(how, build(), settings={"buffers": "mean"})
    losses(made, 0, rank, "one")
    with made.zero.gathered():
        found.append(values(made.model))
    found.append(values(made.model))
    made.optimizer.step()
    found.append(values(made.model))
    losses(made, 1, rank, "one")
    made.zero.save(f"{folder}/{how}")
    loaded = make(how, build())
    loaded.zero.load(f"{folder}/{how}")
    return [*found, values(made.model), values(loaded.model)]


def test_whole_values_and_checkpoints_between_backward_and_step_are_equal(tmp_path: Path) -> None:
    cases = [(how, str(tmp_path)) for how in ((0, True), (3, False))]
    for case, (first, second) in run_cases(between, 2, third(cases[::-1]), timeout_s=60.0).items():
        assert_same(first[:4], second[:4], str(case))
        assert_same([first[0]] * 2, first[1:3], str(case))
        persistent = {name: one for name, one in first[3].items() if "is_started" not in name}
        for found in (first, second):
            assert_same(persistent, {name: found[4][name] for name in persistent}, str(case))


class Part(nn.Module):
    """Statistics of the columns that this place of the tensor axis has; one of another length at each place."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(WIDTH, 2)
        self.register_buffer("mean", torch.zeros(WIDTH // 2))
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        mine = x.detach().chunk(2, 1)[self.place].mean(0)
        self.mean.lerp_(mine, 0.1)
        self.own = mine[: 1 + self.place].clone()
        return self.linear(x)


def at_places(how: Any, buffers: str) -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    made = make(how, Part(rank % 2), mesh=mesh, settings={"buffers": buffers})
    for step in range(3):
        made.call(inputs(step, rank // 2)).square().mean().backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    return values(made.model)


def test_each_place_of_the_tensor_axis_has_its_own() -> None:
    cases = [(how, buffers) for how in ((0, True), (3, False)) for buffers in ("rank 0", "mean")]
    for case, ranks in run_cases(at_places, 4, third(cases[::-1]), timeout_s=60.0).items():
        assert_same(ranks[:2], ranks[2:], str(case))
        assert not torch.equal(ranks[0]["mean"], ranks[1]["mean"])
        assert [len(one["own"]) for one in ranks] == [1, 2, 1, 2]


class Expanded(nn.Module):
    """A model with buffers of which several elements lie in one place, made by `expand()` in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.register_buffer("mean", torch.zeros(1).expand(4))
        self.register_buffer("rows", torch.zeros(2, 1).expand(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.rows = x.detach().mean().view(1).expand(4), x.detach()[:2, :1].expand(2, 3)
        return self.linear(x)


def expanded(how: Any, buffers: str, folder: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return buffers before a step; after it, after values were written back, and after a load."""
    made = make(how, Expanded(), settings={"buffers": buffers})
    made.call(inputs(0, torch.distributed.get_rank())).square().mean().backward()
    before = values(made.model)
    made.optimizer.step()
    found = [values(made.model)]
    with made.zero.gathered(writeback=True):
        pass
    found.append(values(made.model))
    made.zero.save(path := f"{folder}/{how}-{buffers}")
    made.call(inputs(1, 0))
    made.zero.load(path)
    return before, [*found, values(made.model)]


def test_expanded_buffers_follow_as_others(tmp_path: Path) -> None:
    cases = [(how, buffers, str(tmp_path)) for how in ((0, True), (3, False)) for buffers in ("rank 0", "mean")]
    for case, ((one, first), (other, second)) in run_cases(expanded, 2, third(cases[::-1])).items():
        expected = one if case[1] == "rank 0" else {name: (one[name] + other[name]) / 2 for name in one}
        assert_same([expected] * 3, first, str(case))
        assert_same([expected] * 3, second, str(case))


def one_rank_alone(how: Any, is_gathered: bool) -> str:
    """Run a training forward on one rank alone; at stage 3 its beginning is a place where ranks meet."""
    made, rank = make(how, build(), settings={"watchdog_s": 2.0}), torch.distributed.get_rank()
    losses(made, 0, rank, "one")
    made.optimizer.step()
    try:
        if rank == 1:
            made.call(inputs(1, rank))
        if is_gathered:
            with made.zero.gathered():
                pass
        losses(made, 2, rank, "one")
        made.optimizer.step()
    except zs.RankMismatchError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.product
@pytest.mark.parametrize(("how", "is_gathered"), [((1, True), True), ((2, False), False), ((3, False), True)])
def test_a_training_forward_on_one_rank_alone_is_named(how: Any, is_gathered: bool) -> None:
    place = "the beginning of a training forward"
    if how[0] < 3:
        place = "after a training forward of a model with buffers (every rank makes one, or none"
    for text in run_ranks(one_rank_alone, 2, how, is_gathered):
        assert place in text
        assert is_gathered == ("Ranks are at different places" in text), text
