"""Each recomputation is compared with its forward, at every step: a difference is an error."""

import threading
import weakref
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.peaks import measure_peak
from tests.engine.test_guard import memory_of
from tests.oracle import STAGES, TIMEOUT_S, run_cases
from tests.rotation import third
from zeroshard.activations.recompute import SUMMED_NUMEL, are_alike, sums_of
from zeroshard.testing import run_ranks

WIDTH, CHANGES_AT = 8, 50


class Block(nn.Module):
    """Two layers of one shape. `mark` is raised by its owner between a forward and its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mark = 0


class OtherLayer(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh((self.second if self.mark else self.first)(x))


class OtherLastLayer(Block):
    """The other layer is the last that is used: nothing that is saved depends on its values."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.second if self.mark else self.first)(torch.tanh(x))


class OtherScalar(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x)) * (1.0 + self.mark)))


class OtherMask(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.where(torch.arange(WIDTH) > self.mark, self.second(self.first(x)), 0.0)


class OtherDraw(Block):
    """Draws once more, from torch's own generator, and drops other elements."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mark:
            torch.rand(1)
        return x + self.second(nn.functional.dropout(self.first(x), 0.5))


class OtherCount(Block):
    """Saves one tensor more or less, which torch itself finds, without the name of a rank or a module."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x) * (self.first(x) if self.mark else torch.tanh(self.first(x)))


class OtherIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.gather(torch.tanh(self.first(x)), 1, torch.arange(WIDTH).roll(self.mark).expand_as(x))


class Same(Block):
    """Changes nothing that is saved: the number of the factor is in the graph of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.5)) * (1.0 + self.mark)


DIFFERENT = (OtherLayer, OtherLastLayer, OtherScalar, OtherMask, OtherDraw, OtherCount, OtherIndex)
SEEN = {
    "OtherLayer": "used other parameters",
    "OtherLastLayer": "used other parameters",
    "OtherScalar": "saved other values",
    "OtherMask": "saved other values",
    "OtherDraw": "drew other random numbers",
    "OtherCount": "saved other tensors",
    "OtherIndex": "",
}
"""What the error says; nothing where a sum cannot tell."""


def train(kind: type[Block], stage: int, how: Any, shared: bool) -> tuple[int, str]:
    """Return the step at which training fails, and the error. Runs on a rank."""
    model, optimizer, zero = start(kind, stage, how, shared)
    for step in range(CHANGES_AT + 2):
        loss = model(torch.randn(4, WIDTH) + zero.mesh.rank).square().mean()
        try:
            model[1].mark = int(step >= CHANGES_AT)
            loss.backward()
            model[1].mark = 0
        except RuntimeError as error:
            return step, str(error)
        optimizer.step()
        optimizer.zero_grad()
    return -1, ""


def start(
    kind: type[Block], stage: int, how: Any, shared: bool, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, zs.Zero]:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options |= {"stage": stage, "activations": how, "units": [kind]}
    return model, optimizer, zs.shard(model, optimizer, settings=zs.Settings(shared_memory=shared), **options)


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [*DIFFERENT, Same], ids=lambda kind: kind.__name__)
def test_what_differs_at_step_50_is_an_error(kind: type[Block], stage: int) -> None:
    place = (*DIFFERENT, Same).index(kind)
    how = "recompute" if place % 2 else zs.Recomputed(every=2)
    found = run_ranks(train, 2, kind, stage, how, bool((place + stage) % 2), timeout_s=2 * TIMEOUT_S)
    for rank, (step, error) in enumerate(found):
        if kind is Same or not SEEN[kind.__name__]:
            assert (step, error) == (-1, "")
        else:
            assert step == CHANGES_AT, error
            assert SEEN[kind.__name__] in error
            assert error.startswith(f"[rank {rank}/2] The recomputation of '1' ("), error
            assert "activations='recompute'" in error


def on_a_device(stage: int, precision: str, culprit: int) -> tuple[str, bool]:
    """Differ on one rank; return the error, and whether the parameters are those before the step. Runs on a rank."""
    with memory_of("device"):
        model, optimizer, zero = start(OtherScalar, stage, "recompute", False, precision=precision)
        kept: dict[str, Tensor] = {}
        try:
            for step in range(4):
                with zero.gathered():
                    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
                loss = model(torch.randn(4, WIDTH).to(next(model.parameters()).dtype)).float().square().mean()
                model[1].mark = int(step == 2 and zero.mesh.rank == culprit)
                loss.backward()
                model[1].mark = 0
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            with zero.gathered():
                is_kept = all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
            return str(error), is_kept
    return "", False


def test_on_a_device_the_flag_is_read_with_finiteness_and_stops_the_update_on_all_ranks() -> None:
    cases = [(stage, precision, stage % 2) for stage in range(4) for precision in ("fp32", "fp16")]
    for (stage, precision, culprit), results in run_cases(
        on_a_device, 2, third(cases[::-1]), timeout_s=2 * TIMEOUT_S
    ).items():
        for rank, (error, is_kept) in enumerate(results):
            who = "The recomputation of '1' (OtherScalar)" if rank == culprit else "A recomputation on another rank"
            assert f"{who} saved other values than its forward" in error, (stage, precision, rank)
            assert is_kept


def test_a_recomputation_that_differs_on_a_device_without_a_step_is_known_before_the_next() -> None:
    """Flags of several backwards are added up."""
    with memory_of("device"):
        model, optimizer, _ = start(OtherScalar, 2, "recompute", False)
        for mark in (0, 1, 0):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            model[1].mark = mark
            loss.backward()
            model[1].mark = 0
        with pytest.raises(RuntimeError, match="saved other values than its forward"):
            optimizer.step()
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()


class Path(Block):
    """Saves less where `is_short`, and then computes with another mask."""

    is_short = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_short:
            x = torch.tanh(self.second(torch.tanh(x)))
        return x + torch.tanh(self.first(x) * (torch.arange(WIDTH) % 2 == self.mark))


def less(is_frozen: bool) -> str:
    """Train, then have a forward save less, and change the mask before its backward. Runs on a rank."""
    model, optimizer, _ = start(Path, 2, "recompute", False)
    for step in range(3):
        if step == 2:
            model[0].requires_grad_(not is_frozen)
            for block in model:
                block.is_short = not is_frozen
                block.second.requires_grad_(not is_frozen)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        try:
            model[1].mark = int(step == 2)
            loss.backward()
        except RuntimeError as error:
            return f"{step} {error}"
        model[1].mark = 0
        optimizer.step()
        optimizer.zero_grad()
    return ""


@pytest.mark.product
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_forward_that_saves_less_than_those_before_is_compared(is_frozen: bool) -> None:
    """Its last saved tensor has a lower number than those that were summed, and was not looked at."""
    for text in run_ranks(less, 1, is_frozen, timeout_s=TIMEOUT_S):
        assert text.startswith("2 "), text
        assert "gave other outputs than its forward" in text


class Beside(Block):
    """Another thread draws from torch's generator, where `mark` is 1 beside the recomputation alone."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mark:
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


class BesideDropout(Beside):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class BesideBranch(Beside):
    """Its last saved tensor does not depend on what it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5) + torch.tanh(self.second(x))


@pytest.mark.parametrize(
    ("kind", "how", "text"),
    [
        (Beside, "recompute", ""),
        (BesideDropout, "recompute", "drew other random numbers than its forward, or another thread"),
        (BesideBranch, "recompute", "gave other outputs than its forward"),
        (Beside, "recompute+compress-bf16", "drew other random numbers than its forward, or another thread"),
    ],
)
def test_another_thread_that_draws_is_no_difference_where_values_show_none(
    kind: type[Beside], how: str, text: str
) -> None:
    model = nn.Sequential(*(kind() for _ in range(2)))
    zs.shard(model, torch.optim.SGD(model.parameters()), stage=0, activations=how, units=[kind])
    for step in range(4):
        loss = model(torch.randn(64, WIDTH)).square().mean()
        model[1].mark = int(step == 2)
        with pytest.raises(RuntimeError, match=text) if step == 2 and text else nullcontext():
            loss.backward()
        model[1].mark = 0
        if step == 2 and text:
            break


def test_recomputed_modules_keep_one_state_of_random_numbers_each() -> None:
    """That of torch's checkpoint, until the backward; what is compared is a checksum."""
    ask, made = torch.get_rng_state, list[weakref.ref[Any]]()

    def noted() -> Tensor:
        state = ask()
        made.append(weakref.ref(state))
        return state

    model = nn.Sequential(*(Same() for _ in range(3)))
    zs.shard(model, torch.optim.SGD(model.parameters()), stage=0, activations="recompute")
    for _ in range(2):
        with patch.object(torch, "get_rng_state", noted):
            loss = model(torch.ones(2, WIDTH)).sum()
        assert len(made) > len(model)
        assert sum(one() is not None for one in made) == len(model)
        loss.backward()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_sums_of_outputs_take_little_memory(is_transposed: bool) -> None:
    """torch casts all of a tensor whose sum in fp64 it returns, which is the peak where an output is large."""
    torch.manual_seed(0)
    output = torch.randn(1, 1024, 5 * 1024)
    output = output.transpose(1, 2) if is_transposed else output
    sums = sums_of([output])
    assert sums is not None
    torch.testing.assert_close(sums, torch.stack((output.double().sum(), output.double().norm())))
    assert measure_peak(lambda: sums_of([output])).peak_bytes < 2.1 * 8 * SUMMED_NUMEL
    other = output.clone()
    other[0, -1, -1] += 1e-6
    again = sums_of([other])
    assert again is not None
    assert not are_alike(sums, again)
