"""User code catches an exception that torch calls no hooks for, such as KeyboardInterrupt, and goes on training.

Where all ranks are interrupted at one place, or there is one, losses are those of a run that was never interrupted;
where a single one is, all end in one error.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.models import WIDTH
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, randn
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.torch_private import innermost_hooks

STEPS = 4
PLACES = ("in a unit", "in a nested unit", "between units", "in a recomputation", "in a backward")


class Switch:
    """Raises once, at a place and step."""

    def __init__(self, place: str = "", kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.place, self.kind, self.is_armed = place, kind, False

    def at(self, place: str) -> None:
        """Raise, if this is the place and the step."""
        if self.is_armed and place == self.place:
            self.is_armed = False
            raise self.kind(f"planted {place}")


class Inner(nn.Module):
    """Two layers, and a place between them."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.up, self.down, self.switch = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), switch

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(x))
        is_again = torch._C._current_graph_task_id() != -1
        self.switch.at("in a recomputation" if is_again else "in a nested unit")
        return F.dropout(self.down(wide), 0.1, self.training)


class Block(nn.Module):
    """A block with a unit inside."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.norm, self.inner, self.switch = nn.LayerNorm(WIDTH), Inner(switch), switch

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(self.norm(x))
        if torch._C._current_graph_task_id() == -1:
            self.switch.at("in a unit")
        return x + inner


class Model(nn.Module):
    """A stack of them; `how` says whether user code recomputes blocks."""

    def __init__(self, switch: Switch, how: str) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, WIDTH), nn.ModuleList(Block(switch) for _ in range(3))
        self.head, self.switch = nn.Linear(WIDTH, 3), switch
        self.run = functools.partial(checkpoint, use_reentrant=False) if how == "user" else lambda f, x: f(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = self.run(block, x)
            if index == 1:
                self.switch.at("between units")
        if x.requires_grad:
            x.register_hook(lambda grad: self.switch.at("in a backward"))
        return self.head(x)


def train(place: str, how: str, stage: int, culprits: tuple[int, ...] = (0, 1), **options: Any) -> list[float]:
    """Return the losses of a training in which some ranks are interrupted in the third step, and repeat it."""
    switch = Switch(place, options.pop("kind", KeyboardInterrupt))
    torch.manual_seed(0)
    model = Model(switch, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    units = [*model.blocks, *(block.inner for block in model.blocks)]  # type: ignore[union-attr]
    activations = how if how not in ("user", "none") else None
    zero = zs.shard(model, optimizer, stage=stage, units=units, activations=activations, **options)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        switch.is_armed = step == 2 and zero.mesh.rank in culprits
        is_planted = switch.is_armed
        for _ in range(2):
            torch.manual_seed(step)
            try:
                loss = model(randn(4, 5, key=(step, zero.mesh.rank))).square().mean()
                loss.backward()
            except (KeyboardInterrupt, RuntimeError) as error:
                if "planted" not in str(error) or not is_planted:
                    raise
                optimizer.zero_grad()
                continue
            break
        assert not switch.is_armed or not is_planted or place == "nowhere", "the place was not reached"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


KINDS = (KeyboardInterrupt, RuntimeError)


def check(
    places: tuple[str, ...], how: str, stage: int, kinds: tuple[type[BaseException], ...] = KINDS, **options: Any
) -> None:
    """Compare with a training that is not interrupted. Runs on a rank."""
    expected = train("nowhere", how, stage, (), **options)
    for place in places:
        for kind in kinds:
            assert train(place, how, stage, kind=kind, **options) == expected, (place, kind)


@pytest.mark.parametrize("how", ["none", "user", "recompute", "recompute+compress", "compress"])
def test_one_rank_goes_on(how: str) -> None:
    recomputes = how in ("user", "recompute", "recompute+compress")
    for stage in (0, 3):
        check(tuple(p for p in PLACES if recomputes or p != "in a recomputation"), how, stage)


@pytest.mark.parametrize("activations", [None, "compress"])
def test_the_loss_before_has_its_backward(activations: str | None) -> None:
    switch = Switch("in a unit")
    model = Model(switch, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, units=[*model.blocks], activations=activations)
    model.eval()
    x = randn(4, 5, key=(0, 0))
    first = model(x).sum()
    switch.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    first.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    switch.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    optimizer.step()  # nothing has a gradient
    model(x).sum().backward()
    assert innermost_hooks() is None, "the hooks of a forward outlive it"
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(expected) == len([*model.parameters()])
    assert all(map(torch.equal, found, expected))


def test_a_model_may_catch_it_itself() -> None:
    class Trying(Model):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except KeyboardInterrupt:
                return super().forward(x)

    for activations in ("compress", "recompute"):
        losses = []
        for is_armed in (False, True):
            torch.manual_seed(0)
            switch = Switch("in a nested unit")
            model = Trying(switch, "none").eval()
            zs.shard(model, units=[*model.blocks], activations=activations)
            switch.is_armed = is_armed
            loss = model(randn(4, 5, key=(0, 0))).square().mean()
            assert not switch.is_armed
            loss.backward()
            losses.append([float(loss.detach()), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*losses, strict=True))


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_go_on(stage: int) -> None:
    # A rank alone has each kind in each place, with recomputation and without.
    for how, kind in zip(("none", "recompute"), KINDS, strict=True):
        places = [place for place in PLACES if how != "none" or place != "in a recomputation"]
        run_ranks(check, 2, tuple(places), how, stage, (kind,), timeout_s=TIMEOUT_S)


class Interrupted:
    """A wait that is interrupted before it is over."""

    def __init__(self, pending: Any, switch: Switch) -> None:
        self._pending, self._switch = pending, switch

    def wait(self) -> Any:
        """Wait, the second time."""
        self._switch.at("in a wait")
        return self._pending.wait()


def wait_twice(shared_memory: bool) -> None:
    """Interrupt all ranks in the wait for a gather. Runs on a rank."""
    losses = []
    for place in ("nowhere", "in a wait"):
        switch = Switch(place)
        torch.manual_seed(0)
        model = Model(switch, "none")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        settings = zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
        zero = zs.shard(model, optimizer, stage=3, units=[*model.blocks], settings=settings)
        comm = zero._engine.comm
        gather = comm.gather
        comm.gather = lambda *args, gather=gather, switch=switch: Interrupted(gather(*args), switch)  # type: ignore
        losses.append([one_step(model, optimizer, switch, step, zero.mesh.rank) for step in range(STEPS)])
        assert not switch.is_armed or place == "nowhere"
    assert losses[0] == losses[1]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, switch: Switch, step: int, rank: int) -> float:
    """Take a step; its forward begins anew where it is interrupted."""
    switch.is_armed = step == 2
    while True:
        torch.manual_seed(step)
        with contextlib.suppress(KeyboardInterrupt):
            loss = model(randn(4, 5, key=(step, rank))).square().mean()
            break
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_wait_that_is_interrupted_is_made_again(shared_memory: bool) -> None:
    run_ranks(wait_twice, 2, shared_memory, timeout_s=TIMEOUT_S)


def interrupt_one(how: str, place: str) -> None:
    """Interrupt rank 1 alone. Runs on a rank."""
    train(place, how, 3, (1,), settings=zs.Settings(watchdog_s=WATCHDOG_S))


@pytest.mark.product
@pytest.mark.parametrize("place", ["in a unit", "between units", "in a recomputation"])
def test_one_rank_of_two_alone_is_an_error_of_both(place: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(interrupt_one, 2, "recompute", place, timeout_s=TIMEOUT_S)
    assert set(failure.value.errors) == {0, 1}, failure.value
    for error in failure.value.errors.values():
        assert error.type_name == "RankMismatchError", error
        assert "rank 1" in error.message and "the beginning of a training forward" in error.message, error.message
