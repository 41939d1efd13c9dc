"""Batches: the order in which tokens are read, and how many are scored."""

import pytest
import torch

from zeroshard.train.data import IGNORED, count_scored, heldout_batches, training_batch


def _batch(**place):
    text = torch.arange(251, dtype=torch.uint8).repeat(4)
    return training_batch(text, **{"seed": 3, "step": 5, "batch": 12, "context": 16} | place)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7])
def test_global_batch_does_not_depend_on_the_rank_count(world_size):
    inputs, targets = _batch()
    parts = [_batch(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    sizes = {len(part[0]) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_batch_is_a_function_of_seed_and_step():
    first = _batch()[0]
    assert torch.equal(first, _batch()[0])
    assert not torch.equal(first, _batch(step=6)[0])
    assert not torch.equal(first, _batch(seed=4)[0])


def test_target_is_the_byte_after_its_input():
    inputs, targets = _batch()
    assert inputs.shape == targets.shape == (12, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (inputs + 1) % 251)


def test_training_batches_reach_both_ends_of_the_text():
    text = torch.arange(20, dtype=torch.uint8)
    seen = torch.cat([training_batch(text, seed=0, step=k, batch=8, context=16)[1].flatten() for k in range(50)])
    assert (seen.min(), seen.max()) == (1, 19)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("numel", [200, 97, 13])
def test_each_heldout_byte_but_the_first_is_a_target_once(world_size, numel):
    text = torch.arange(numel, dtype=torch.uint8)
    ranks = [
        list(heldout_batches(text, batch=2, context=8, scored=numel - 1, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    targets = torch.cat([t.flatten() for batches in ranks for _, t in batches])
    inputs = torch.cat([x.flatten() for batches in ranks for x, _ in batches])
    is_scored = targets != IGNORED
    assert sorted(targets[is_scored].tolist()) == list(range(1, numel))
    assert torch.equal(targets[is_scored], inputs[is_scored] + 1)
    assert all(x.shape == t.shape == (2, 8) for batches in ranks for x, t in batches)


def test_scored_tokens_stop_at_the_limit():
    tokens = torch.arange(200, dtype=torch.uint8)
    assert count_scored(torch.arange(1, 201)) == (199, 199)
    assert count_scored(torch.arange(1, 201), 50) == (50, 50)
    assert count_scored(torch.arange(1, 201), 500) == (199, 199)
    targets = torch.cat([t.flatten() for _, t in heldout_batches(tokens, batch=2, context=8, scored=50)])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, 51))


@pytest.mark.parametrize(
    ("limit", "scored"),
    [(0, (6, 11)), (3, (1, 3)), (4, (3, 4)), (9, (3, 4)), (10, (4, 10)), (1, (1, 3)), (11, (6, 11))],
)
def test_scored_bytes_are_those_of_the_tokens(limit, scored):
    # The first token, of two bytes, is never scored; the fourth and the last one end documents.
    assert count_scored(torch.tensor([2, 5, 6, 6, 12, 13, 13]), limit) == scored


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_batches_do_not_depend_on_how_tokens_are_kept(dtype):
    tokens = torch.arange(100).to(dtype)
    expected = training_batch(torch.arange(100), seed=0, step=0, batch=2, context=8)
    got = training_batch(tokens, seed=0, step=0, batch=2, context=8)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    (inputs, targets), *_ = heldout_batches(tokens, batch=2, context=8, scored=99)
    assert torch.equal(inputs.flatten(), torch.arange(16))
    assert torch.equal(targets, inputs + 1)
