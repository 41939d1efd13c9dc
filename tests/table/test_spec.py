"""Units and buckets as data: what follows from a row of the table, and bytes by name of dtype."""

from dataclasses import replace

import pytest
import torch

import zeroshard as zs
from zeroshard.table.bytes import step_bytes
from zeroshard.table.cells import Sharded
from zeroshard.table.layout import plan_layout
from zeroshard.table.spec import BucketSpec, Formats, Message, UnitSpec, itemsize
from zeroshard.table.stages import STAGES
from zeroshard.table.wires import HostWire, Messages, Native, Silence, Wire

FP32 = Formats("float32", "float32", "float32", "float32", "float32")
BF16 = Formats("bfloat16", "bfloat16", "float32", "float32", "float32")


def bucket(stage: int, formats: Formats = FP32, numels: tuple[int, ...] = (100, 28), ranks: int = 4, copies: int = 1):
    layout = plan_layout(numels, itemsize(formats.param), ranks, copies)
    names = tuple(f"p{place}" for place in range(len(numels)))
    return BucketSpec("block", 0, names, layout, formats, STAGES[stage], min(1, ranks - 1), copies)


@pytest.mark.parametrize("dtype", sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
def test_bytes_of_an_element_are_those_of_torch(dtype: torch.dtype) -> None:
    assert itemsize(str(dtype).removeprefix("torch.")) == dtype.itemsize


# What is whole, gathered, published; whether all is updated; bytes sent for a gather, a reduction and a publication.
CONSEQUENCES = {
    0: (True, False, False, True, 0, 8, 0),
    1: (True, False, True, False, 0, 4, 4),
    2: (True, False, True, False, 0, 4, 4),
    3: (False, True, False, False, 4, 4, 0),
}


@pytest.mark.parametrize("stage", CONSEQUENCES)
def test_the_four_rows(stage: int) -> None:
    one = bucket(stage)
    sent = [one.sent_bytes(kind) // (3 * one.layout.shard_numel) for kind in ("gather", "reduce", "publish")]
    found = (one.is_whole, one.is_gathered, one.is_published, one.updates_all, *sent)
    assert found == CONSEQUENCES[stage]
    assert one.holds_whole_gradients == (stage < 2)


def test_one_rank_keeps_all_and_sends_nothing() -> None:
    for stage in STAGES:
        one = bucket(stage, ranks=1)
        assert (one.is_whole, one.updates_all, one.holds_whole_gradients, one.is_published) == (True, True, True, False)
        assert [one.sent_bytes(kind) for kind in ("gather", "reduce", "publish")] == [0, 0, 0]


def test_what_no_optimizer_updates_is_not_published_and_what_is_frozen_not_reduced() -> None:
    layout = plan_layout([64], 4, 2)
    parts = [
        BucketSpec("", place, ("p",), layout, FP32, STAGES[1], 0, 1, is_trained=trained, is_updated=updated)
        for place, (trained, updated) in enumerate([(True, True), (False, False)])
    ]
    unit = UnitSpec(0, "", tuple(parts))
    assert [one.number for one in unit.reduced] == [0]
    assert unit.sent_bytes("publish") == unit.sent_bytes("reduce") == 32 * 4


def test_a_gradient_is_taken_over_only_where_it_fills_the_bucket_in_its_own_dtype() -> None:
    assert bucket(3, numels=(64,)).adopts
    assert not bucket(3, numels=(65,)).adopts  # padded
    assert not bucket(1, numels=(64,)).adopts  # held whole
    assert not bucket(3, BF16, (128,)).adopts  # held in another dtype


def within(wire: Wire, one: BucketSpec) -> list[Message]:
    """Return the buffers of a step's first sum over the ranks of one replica."""
    return wire.apart(one, is_first=True) + wire.among_shards(one)


def test_buffers_of_a_reduction() -> None:
    plain, rounded, alone = bucket(3), bucket(3, BF16), bucket(3, numels=(64,))
    shard = plain.layout.shard_numel
    assert within(Silence(), plain) == within(Native(), plain) == within(HostWire(8), plain) == []
    assert within(Messages(), plain) == [(shard, "float32")] * 3
    assert within(Messages(), rounded) == [(rounded.layout.shard_numel, "bfloat16")] * 6
    assert (Native().lands_as(rounded), Native().lands_as(bucket(2, BF16)), Native().lands_as(bucket(1, BF16))) == (
        *("bfloat16", "bfloat16"),
        "float32",  # held whole
    )
    assert within(Native(), rounded) == [(rounded.layout.shard_numel, "float32")]
    assert within(Native(accumulates=True), rounded) == [(rounded.layout.full_numel, "bfloat16")]
    assert within(HostWire(8), alone) == [(4 * 8, "float32")]


def test_the_sum_of_a_replica_is_apart_where_held_gradients_cannot_take_it() -> None:
    whole, own = bucket(1, copies=2), bucket(3, copies=2)
    assert Messages().among_copies(whole) == [(whole.layout.shard_numel // 2, "float32")]
    apart = [(whole.layout.shard_numel, "float32")]
    for wire in (Messages(), HostWire(8), Native()):
        assert wire.apart(whole, is_first=True) == wire.apart(whole, is_first=False) == apart
        assert (wire.apart(own, is_first=True), wire.apart(own, is_first=False)) == ([], apart)
        assert wire.apart(bucket(3), is_first=False) == []


class Elsewhere(zs.Sharded.__base__):  # type: ignore[misc, name-defined]
    """A cell of another class that keeps what `Sharded` keeps."""

    word = "elsewhere"

    def kept_range(self, layout, rank):
        return layout.shard_range(rank)


def test_rows_are_valid_by_what_their_cells_keep_and_not_by_class() -> None:
    row = zs.Residency(states=Elsewhere(), gradients=zs.Sharded())
    assert str(row.states) == "elsewhere"
    with pytest.raises(ValueError, match="states=replicated, gradients=elsewhere"):
        zs.Residency(gradients=Elsewhere())


@pytest.mark.parametrize(("until", "gathers"), [("use", 2), ("backward", 1), ("step", 1)])
def test_a_held_unit_is_gathered_once_a_step(until: str, gathers: int) -> None:
    row = replace(STAGES[3], parameters=Sharded(until=until))  # type: ignore[arg-type]
    one = replace(bucket(3), row=row)
    unit = UnitSpec(0, "block", (one,))
    assert step_bytes([unit]) == (gathers + 1) * 4 * 3 * one.layout.shard_numel
