"""Numbers in a file: what is written and read is what was asked for, and what lies beside it stays."""

from pathlib import Path

import pytest
import torch

from zeroshard.store.disk import BLOCK_BYTES, Array, Disk
from zeroshard.store.stored import StoredTensor

NUMEL = 3000
"""Of four bytes: three blocks, the last in part."""


@pytest.fixture
def array(tmp_path: Path) -> Array:
    array = Disk(tmp_path).array(NUMEL, torch.float32)
    array.write(0, torch.arange(NUMEL))
    return array


@pytest.mark.parametrize("start", [0, 7, 2000, BLOCK_BYTES // 4 - 3])
@pytest.mark.parametrize("numel", [0, 1, 17, 1500])
def test_what_lies_beside_what_is_written_stays(array: Array, start: int, numel: int) -> None:
    expected = torch.arange(float(NUMEL))
    expected[start : start + numel] = -1.0
    array.write(start, torch.full((len(expected[start : start + numel]),), -1.0))
    assert torch.equal(array.read(0, NUMEL), expected)
    assert torch.equal(array.read(start, start + 5), expected[start : start + 5])


def test_a_part_of_a_part_is_read_and_written_in_its_place(array: Array) -> None:
    whole, expected = StoredTensor(array, 0, NUMEL), torch.arange(float(NUMEL))
    part, expected_part = whole[1000:2500][10:40], expected[1000:2500][10:40]
    assert torch.equal(part + 0, expected_part)
    part.copy_(torch.full((30,), -1.0))
    whole[2900:].mul_(2.0)
    expected_part.fill_(-1.0)
    expected[2900:].mul_(2.0)
    assert torch.equal(whole + 0, expected)
    assert [one.start for one in part.split(16)] == [1010, 1026]
