"""Chunks of a pipeline that run again before their backward: the bits of chunks that keep everything."""

import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests.rotation import is_whole, third
from zeroshard.testing import run_ranks

TIMEOUT_S = 300
SETTINGS = zs.Settings(watchdog_s=60.0)
MICRO, STEPS, DEPTH, ROWS = 4, 3, 4, 8
Case = tuple[str, int, str]
"""A schedule, a stage, the treatment of activations inside chunks."""
CASES = [*product(("gpipe", "1f1b", "interleaved"), range(4), ("keep", "recompute"))]


class Block(nn.Module):
    """Draws random numbers, has running statistics and a mean of its own, changes its input in place, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(6))
        self.calls, self.fails_at, self.drifts, self.is_in_place = 0, 0, False, False
        self.alive = weakref.WeakSet[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ArithmeticError("planted")
        inside = torch.tanh(self.linear(x.mul_(0.9) if self.is_in_place else x * 0.9))
        self.mean.lerp_(inside.detach().mean(0), 0.1)
        if inside.requires_grad:
            self.alive.add(inside)
        return self.dropout(self.norm(inside)) + 0.1 * self.calls * self.drifts


def batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data)
    return torch.randn(MICRO * ROWS, 6, generator=generator), torch.randn(MICRO * ROWS, 6, generator=generator)


def made(mesh: DeviceMesh, **options: Any) -> tuple[zs.Pipeline, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, loss=F.mse_loss, settings=SETTINGS, **options)
    return pipe, model, optimizer


def train(cases: list[Case], places: int, data: int) -> list[list[dict[str, Any]]]:
    mesh, found = init_device_mesh("cpu", (places, data), mesh_dim_names=("pipe", "shard")), []
    for (schedule, stage, activations), recompute in product(cases, (False, True)):
        pipe, model, optimizer = made(
            mesh, schedule=schedule, stage=stage, activations=activations, recompute=recompute
        )
        for block in model[1:] if activations == "keep" else ():
            block.is_in_place = True
        values: dict[str, Any] = {}
        for step in range(STEPS):
            values[f"loss {step}"] = pipe.step(*batch(step, pipe.zero.mesh.rank))
            optimizer.step()
            optimizer.zero_grad()
        values["generator"] = torch.get_rng_state()
        calls = sum(block.calls for block in model)
        pipe.zero.detach()
        values |= {name: one.detach() for name, one in [*model.named_parameters(), *model.named_buffers()]}
        found.append((values, calls))
    return [found[at : at + 2] for at in range(0, len(found), 2)]


@pytest.mark.parametrize(("places", "data"), [(2, 1), (2, 2)])
def test_chunks_that_run_again_have_the_bits_of_chunks_that_keep(places: int, data: int) -> None:
    cases = CASES if is_whole() else third(CASES[data % 2 :: 2])
    for rank, found in enumerate(run_ranks(train, places * data, cases, places, data, timeout_s=TIMEOUT_S)):
        for case, ((kept, calls), (again, more_calls)) in zip(cases, found, strict=True):
            assert kept.keys() == again.keys()
            for name, value in kept.items():
                assert torch.equal(value, again[name]), (case, rank, name)
            # The last place of 1F1B goes back at once.
            assert (more_calls > calls) == (case[0] != "1f1b" or rank // data == 0), (case, rank)


def train_cut_at(name: str) -> list[list[Tensor]]:
    """Return the values after a step of a pipeline that is cut there, without and with recomputation."""
    mesh, found = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard")), []
    for activations in ("keep", "recompute"):
        pipe, model, optimizer = made(mesh, cut=[name], stage=3, activations=activations)
        pipe.step(*batch(0, 0))
        optimizer.step()
        calls = sum(block.calls for block in model)
        pipe.zero.detach()
        found.append([torch.tensor(calls), *(one.detach() for one in model.parameters())])
    return found


@pytest.mark.parametrize("name", ["1", "3"])
def test_the_only_block_of_a_place_is_recomputed(name: str) -> None:
    for kept, again in run_ranks(train_cut_at, 2, name, timeout_s=TIMEOUT_S):
        assert again[0] == 2 * kept[0]
        assert all(map(torch.equal, kept[1:], again[1:]))


def alive(places: int) -> tuple[int, int]:
    """Return the most graphs of a block that are alive at once, without and with recomputation."""
    mesh = init_device_mesh("cpu", (places, 1), mesh_dim_names=("pipe", "shard"))
    most = []
    for recompute in (False, True):
        pipe, model, _ = made(mesh, schedule="gpipe", recompute=recompute)
        block, counts = next(one for one in model if list(one.parameters())), []
        block.register_forward_hook(lambda block, *_, counts=counts: counts.append(len(block.alive)))
        pipe.step(*batch(0, 0))
        most.append(max(counts))
    return most[0], most[1]


def test_one_micro_batch_is_whole_at_a_time() -> None:
    # While the second one is recomputed, the first one's graph is freed.
    assert run_ranks(alive, 2, 2, timeout_s=TIMEOUT_S) == [(MICRO, 1), (MICRO, 1)]


# -- faults -----------------------------------------------------------------------------------------------------------


def fail(number: int) -> list[str]:
    """Raise in a recomputation on one rank, then in another step see results that drift; then all is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    pipe, model, optimizer = made(mesh, schedule="gpipe", stage=3, recompute=True)
    here, found = next(one for one in model if list(one.parameters())), []
    is_chosen = torch.distributed.get_rank() == number
    for what in ("raises", "drifts"):
        here.fails_at = here.calls + MICRO + 1 if what == "raises" and is_chosen else 0
        here.drifts = what == "drifts" and is_chosen
        try:
            pipe.step(*batch(0, pipe.zero.mesh.rank))
            found.append("nothing")
        except Exception as error:
            found.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        here.drifts = False
    assert all(p.grad is None for p in model.parameters())
    loss = pipe.step(*batch(1, pipe.zero.mesh.rank))
    optimizer.step()
    return [*found, str(loss.isfinite().item())]


@pytest.mark.parametrize("number", [0, 3])
def test_an_error_when_a_chunk_runs_again_is_one_on_all_ranks(number: int) -> None:
    for rank, (raised, drifted, is_right) in enumerate(run_ranks(fail, 4, number, timeout_s=TIMEOUT_S)):
        kinds = ("ArithmeticError", "RuntimeError") if rank == number else ("RankMismatchError",) * 2
        assert raised.startswith(kinds[0])
        assert f"pipe {number // 2}, shard" in raised
        assert "Micro-batch 1: ArithmeticError: planted" in raised
        assert drifted.startswith(kinds[1])
        assert "gave other results when it ran again for its backward" in drifted
        assert is_right == "True"


def refuse() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
    with pytest.raises(TypeError) as caught:
        made(mesh, recompute="blocks")
    return str(caught.value)


def test_another_value_is_refused() -> None:
    text = "recompute must be True or False; got 'blocks'. Treatments of blocks are activations=."
    assert run_ranks(refuse, 2, timeout_s=TIMEOUT_S) == [text, text]
