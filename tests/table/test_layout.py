"""Where elements lie: whatever the sizes and the number of ranks, each has one place and one owner."""

import random

import pytest

from zeroshard.table.layout import ALIGN_BYTES, Layout, plan_layout

DRAWS = 2000


def draw(number: int) -> tuple[Layout, int]:
    """Return a layout and the equal pieces that its shards fall into."""
    r = random.Random(number)
    numels = [r.choice([0, 1, r.randrange(100), r.randrange(5000)]) for _ in range(r.randrange(1, 12))]
    pieces = r.choice([1, 1, 2, 3, 8])
    return plan_layout(numels, r.choice([1, 2, 4, 8, 16]), r.choice([1, 2, 3, 4, 7, 64, 513]), pieces), pieces


@pytest.mark.parametrize("start", range(0, DRAWS, DRAWS // 4))
def test_each_element_has_one_place_and_one_owner(start: int) -> None:
    for number in range(start, start + DRAWS // 4):
        layout, pieces = draw(number)
        align = max(1, ALIGN_BYTES // layout.itemsize)
        ends = [offset + numel for offset, numel in zip(layout.offsets, layout.numels, strict=True)]
        assert all(offset % align == 0 for offset in layout.offsets), number
        assert all(end <= after for end, after in zip(ends, layout.offsets[1:], strict=False)), number
        assert max(ends) <= layout.full_numel, number
        assert layout.shard_numel % (align * pieces) == 0, number
        shards = [layout.shard_range(rank) for rank in range(layout.world_size)]
        assert [0, *(stop for _, stop in shards)] == [*(start for start, _ in shards), layout.full_numel], number
        for index, numel in enumerate(layout.numels):
            parts = [layout.overlap(index, *shard) for shard in shards]
            assert sum(stop - start for start, stop in parts) == numel, number
            for (first, last), (start_, stop) in zip(parts, shards, strict=True):
                assert start_ <= first <= last <= stop, number
        assert sum(layout.owned_numel(*shard) for shard in shards) == layout.numel == sum(layout.numels), number


def test_padding_is_bounded() -> None:
    for number in range(DRAWS):
        layout, pieces = draw(number)
        align = max(1, ALIGN_BYTES // layout.itemsize)
        between, at_the_end = (align - 1) * len(layout.numels), (align * pieces + 1) * layout.world_size
        assert layout.full_numel - layout.numel <= between + at_the_end, number


@pytest.mark.parametrize("ranks", [8, 512])
def test_a_large_model_is_padded_by_less_than_a_thousandth(ranks: int) -> None:
    # A block of GPT-2 small, fp32.
    block = [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    layout = plan_layout(block, 4, ranks)
    assert layout.full_numel - layout.numel < layout.numel / 1000


def test_a_known_layout() -> None:
    # 16 numbers of 4 bytes are 64 bytes: 5 numbers take 16 places, 17 take 32.
    assert plan_layout([5, 17], 4, 2) == Layout(2, 4, (5, 17), (0, 16), 32)
    assert plan_layout([5, 17], 4, 2, pieces=3) == Layout(2, 4, (5, 17), (0, 16), 48)
    assert plan_layout([], 4, 2) == Layout(2, 4, (), (), 0)
