"""Tools that look at storages: each entry of a `state_dict` has a storage of its own size, without a copy."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import STAGES, WATCHDOG_S, run_cases, seed
from zeroshard.whole.gathered import parameters_of


class Tied(nn.Module):
    """A head tied to its table, a transposed and a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 31, bias=False)
        self.head.weight = self.table.weight
        self.across = nn.Parameter(torch.randn(5, 3).t())
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x)
        for block in self.blocks:
            found = block(found)
        return self.head(found) + self.across.sum()  # type: ignore[no-any-return]


def sharded(stage: int, shared: bool) -> tuple[Any, torch.optim.Optimizer, Any]:
    seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
    return model, optimizer, zs.shard(model, optimizer, stage=stage, settings=settings)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(stage: int, shared: bool, folder: str) -> list[str]:
    """Write the model as other tools do, load it, and change a `state_dict`; return the errors. Runs on a rank."""
    model, optimizer, zero = sharded(stage, shared)
    train(model, optimizer)
    path = Path(folder) / f"{stage} {shared} {zero.mesh.rank}"
    path.mkdir()
    # Outside `gathered()` where parameters are whole.
    for context in [zero.gathered()] + [contextlib.nullcontext()] * zero._engine.units[0].spec.is_whole:
        with context:
            state = model.state_dict()
            for name, parameter in parameters_of(zero._engine).items():
                entry = state[name]
                assert entry.untyped_storage().nbytes() == entry.nbytes, name
                assert entry.data_ptr() == parameter.data_ptr() and entry.stride() == parameter.stride(), name
            assert state["head.weight"].untyped_storage()._cdata == state["table.weight"].untyped_storage()._cdata
            safetensors.torch.save_model(model, str(path / "whole.safetensors"))
            accelerator = accelerate.Accelerator(cpu=True)
            accelerator._models = [model]
            accelerator.save_state(str(path))
            written = io.BytesIO()
            torch.save(model.blocks[0].state_dict(), written)
            assert written.tell() < 4000, "other parameters of the bucket were written, too"
            before = {name: entry.clone() for name, entry in state.items()}
    train(model, optimizer)
    with zero.gathered(writeback=True):
        safetensors.torch.load_model(model, str(path / "whole.safetensors"))
        model.state_dict()["blocks.0.bias"].fill_(0.5)
    with zero.gathered():
        after = model.state_dict()
        assert [name for name in before if not torch.equal(before[name], after[name])] == ["blocks.0.bias"]
    errors = []
    try:
        with zero.gathered():
            model.state_dict()["across"].add_(1)
    except RuntimeError as error:
        errors.append(str(error))
    return errors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[Any]]:
    folder = str(tmp_path_factory.mktemp("files"))
    return run_cases(save_and_load, 2, [(stage, shared, folder) for stage in STAGES for shared in (True, False)])


@pytest.mark.product
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("stage", STAGES)
def test_entries_have_storages_of_their_own(found: dict[tuple[Any, ...], list[Any]], stage: int, shared: bool) -> None:
    """Writing back and versions still work: the change without `writeback` is an error."""
    ((errors, again),) = [by_rank for case, by_rank in found.items() if case[:2] == (stage, shared)]
    for told in (errors, again):
        assert len(told) == 1 and "1 parameter(s) or state(s), 'across' first" in told[0]


def keep(shared: bool) -> tuple[list[str], list[str], list[bool]]:
    """Keep a `state_dict` beyond `gathered()`; return warnings, what differs, and which memory is released after it."""
    model, optimizer, zero = sharded(3, shared)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with zero.gathered():
            state = model.state_dict()
            expected = {name: entry.clone() for name, entry in state.items()}
        with zero.gathered():
            pass
        filler = [torch.full((1000,), 7.0) for _ in range(100)]
        differs = [name for name in state if not torch.equal(state[name], expected[name])]
    train(model, optimizer)
    del state, filler
    train(model, optimizer)
    buckets = [bucket for unit in zero._engine.units for bucket in unit.buckets]
    return [str(one.message) for one in told], differs, [b.full.untyped_storage().nbytes() == 0 for b in buckets]


def test_a_state_dict_may_be_kept() -> None:
    """It was read after its memory had been released: with messages the process ended by SIGSEGV."""
    for (shared,), by_rank in run_cases(keep, 2, [(True,), (False,)]).items():
        for told, differs, released in by_rank:
            assert differs == []
            assert shared or all(released)
            assert bool(told) != shared
            assert all("A state_dict() is kept beyond gathered()" in text for text in told)
