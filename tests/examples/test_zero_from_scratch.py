"""The method in plain torch.distributed trains to the bits of `zs.shard`, at each stage."""

import ast

import pytest
import torch

import zeroshard as zs
from examples import zero_from_scratch
from tests.contract.source import REPOSITORY
from zeroshard.testing import run_ranks

STEPS = 4


def train_both(rank_count: int) -> list[tuple[int, bool, bool]]:
    """Train at each stage from scratch and with zeroshard; return whether losses and parameters are equal."""
    found = []
    for stage in (1, 2, 3):
        losses, parameters = zero_from_scratch.train(stage, STEPS)
        model = zero_from_scratch.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero = zs.shard(model, optimizer, stage=stage)
        assert zero.mesh.world_size == rank_count
        curve = []
        for step in range(STEPS):
            batch = zero_from_scratch.batch_of(step, zero.mesh.rank)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        with zero.gathered():
            pairs = zip(model.parameters(), parameters, strict=True)
            are_equal = all(torch.equal(ours.detach(), theirs) for ours, theirs in pairs)
        start = zip(zero_from_scratch.build().parameters(), parameters, strict=True)
        assert not any(torch.equal(first, trained) for first, trained in start)
        found.append((stage, curve == losses, are_equal))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_all_stages_have_the_bits_of_zeroshard(world: int) -> None:
    for found in run_ranks(train_both, world, world):
        assert found == [(1, True, True), (2, True, True), (3, True, True)]


def test_it_is_short_and_plain() -> None:
    text = (REPOSITORY / "examples" / "zero_from_scratch.py").read_text()
    assert len(text.splitlines()) <= 150
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in imports for alias in node.names}
    assert {str(name).partition(".")[0] for name in names} == {"torch"}
