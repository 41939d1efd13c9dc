"""torch's default dtype and default device are the caller's: the engine neither needs nor follows them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.rotation import third
from zeroshard import torch_checks

from ..oracle import STAGES, assert_same, run_cases

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "AdamW8bit": lambda parameters: zs.optim.AdamW8bit(parameters, lr=0.01),
    "Lion": lambda parameters: zs.optim.Lion(parameters, lr=0.01),
    "Muon": lambda parameters: zs.optim.Muon(parameters, lr=0.01),
}
DEFAULTS = (torch.float32, torch.float64, torch.bfloat16, "meta")


@contextlib.contextmanager
def defaults(value: torch.dtype | str) -> Iterator[None]:
    """Set torch's default dtype, or its default device."""
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    else:
        torch.set_default_device(value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def train(value: Any, stage: int, name: str, shared_memory: bool, folder: str) -> dict[str, torch.Tensor]:
    """Train a model in fp32, save and load it, and return its values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    torch_checks.check_torch.cache_clear()
    with defaults(value):
        optimizer = OPTIMIZERS[name](model.parameters())
        settings = zs.Settings(shared_memory=shared_memory, watchdog_s=20.0)
        zero = zs.shard(model, optimizer, stage=stage, settings=settings)
        for step in range(4):
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                zero.save(f"{folder}/{value}-{stage}-{name}-{shared_memory}")
        zero.load(f"{folder}/{value}-{stage}-{name}-{shared_memory}")
        model(x).square().mean().backward()
        optimizer.step()
        zero.check_copies()
        with zero.gathered():
            return {key: one.clone() for key, one in model.state_dict().items()}


def test_defaults_change_no_bit(tmp_path: Path) -> None:
    kinds = third([(stage, name, stage in (0, 3)) for stage, name in zip(STAGES, OPTIMIZERS, strict=True)][::-1])
    cases = [(value, *kind, str(tmp_path)) for kind in kinds for value in DEFAULTS]
    found = run_cases(train, 2, cases, timeout_s=60.0)
    for kind in kinds:
        for value in DEFAULTS[1:]:
            case = (value, *kind, str(tmp_path))
            assert_same(found[DEFAULTS[0], *kind, str(tmp_path)], found[case], str(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_the_default_dtype_trains(dtype: torch.dtype) -> None:
    with defaults(dtype):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        zs.shard(model, optimizer)
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        assert loss.dtype == model.weight.dtype == dtype


def test_a_model_made_on_the_default_device_meta_starts() -> None:
    with defaults("meta"):
        model = nn.Linear(4, 2)
        zs.shard(model, torch.optim.SGD(model.parameters()))
        assert model(torch.ones(2, 4, device="cpu")).isfinite().all()
