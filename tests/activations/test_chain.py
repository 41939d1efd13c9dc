"""Treatments of activations: passes are seen at every row, and cost nothing where no treatment is asked for."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
import zeroshard.activations
from tests import models
from tests.oracle import STAGES, TIMEOUT_S
from zeroshard.activations.chain import Held, Link
from zeroshard.describe.treatments import activations_of
from zeroshard.table.activations import Treated
from zeroshard.testing import run_ranks

STEPS = 2
WHOLE_STAGES = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is kept of a tensor."""

    tensor: Tensor
    dtype: torch.dtype


class Apart(Link):
    """Keeps each tensor in other memory, and counts by unit."""

    packed: Counter[int]
    unpacked: int

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        self.packed[unit] += len(held)
        for one in held:
            one.put(self, Kept(one.value.double().clone(), one.value.dtype))

    def restore(self, started: Any) -> Tensor:
        type(self).unpacked += 1
        return started.tensor.to(started.dtype)


class Negated(Link):
    """Works on what the link before it made."""

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        for one in held:
            one.put(self, dataclasses.replace(one.value, tensor=-one.value.tensor))

    def restore(self, started: Any) -> Any:
        return dataclasses.replace(started, tensor=-started.tensor)


LINKS: dict[type[Treated], Callable[..., Link]] = {
    zs.Compressed: lambda cell, comm: Apart(),
    zs.Offloaded: lambda cell, comm: Negated(),
}
BOTH = "compress+offload"


def train(stage: int, is_treated: bool, is_alone: bool = False) -> dict[str, Any]:
    """Train a stack of blocks; return what it came to, what was treated, and what was sent."""
    Apart.packed, Apart.unpacked = Counter(), 0
    zeroshard.activations.LINKS = LINKS
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    how = BOTH if is_treated else None
    zero = zs.shard(model, optimizer, stage=stage, activations=how, settings=zs.Settings(watchdog_s=10.0))
    losses = []
    for step in range(STEPS):
        loss = models.stack_loss(model, step, zero.mesh.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if is_alone and zero.mesh.rank == 0:
            with torch.no_grad():
                models.stack_loss(model, step, 0)
            models.stack_loss(model, step, 0)  # whose backward never comes
    with zero.gathered():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "weights": weights,
        "packed": set(Apart.packed),
        "unpacked": Apart.unpacked,
        "units": {unit.number for unit in zero.units},
        "sent": dict(zero.traffic().sent_bytes),
    }


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_chain_of_treatments_sees_every_unit_and_changes_no_bit(stage: int, world: int) -> None:
    plain = run_ranks(train, world, stage, False, timeout_s=TIMEOUT_S)
    treated = run_ranks(train, world, stage, True, timeout_s=TIMEOUT_S)
    for before, after in zip(plain, treated, strict=True):
        assert before["packed"] == set()
        assert after["packed"] == after["units"]
        assert after["unpacked"] > 0
        assert after["losses"] == before["losses"]
        assert all(torch.equal(after["weights"][name], weight) for name, weight in before["weights"].items())
        assert after["sent"] == before["sent"], "passes of a treatment agree on nothing more"


@pytest.mark.product
@pytest.mark.parametrize("stage", WHOLE_STAGES)
def test_a_rank_may_make_passes_alone_where_nothing_is_gathered(stage: int) -> None:
    together = run_ranks(train, 2, stage, True, timeout_s=TIMEOUT_S)
    alone = run_ranks(train, 2, stage, True, True, timeout_s=TIMEOUT_S)
    for before, after in zip(together, alone, strict=True):
        assert after["losses"] == before["losses"]
        assert all(torch.equal(after["weights"][name], weight) for name, weight in before["weights"].items())


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_no_module_tells_of_its_forward_where_nothing_asks_for_it(stage: int) -> None:
    model = models.build(models.Stack)
    zs.shard(model, models.adamw(model), stage=stage)  # one rank: all is whole
    assert all(not block._forward_pre_hooks and not block._forward_hooks for block in model.blocks)


def test_saved_tensor_hooks_are_set_only_with_a_treatment() -> None:
    seen = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
            return x * x

    for how in (None, "recompute", BOTH):
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), Watch())
        zs.shard(model, stage=0, activations=how, units=[model[0]])
        model(torch.ones(1, 3))
    assert seen == [False, True, True]


@pytest.mark.parametrize(
    ("activations", "error"),
    [
        ("recompute+ice", r"'recompute\+ice': there is no treatment 'ice'; known: keep, recompute, "),
        (3, r"takes names and cells such as zs.Recomputed\(\); got 3"),
        ([zs.Sharded()], r"takes names and cells such as zs.Recomputed\(\); got Sharded"),
        (
            "offload+compress",
            "each treatment may appear once, in the order recomputed.partitioned.compressed.offloaded",
        ),
        ("recompute+recompute", "each treatment may appear once"),
        ({"blocks.*": "recompute"}, r"names 'blocks\.\*', which matches no unit; units: \(root\)"),
        ({0: "recompute"}, "takes patterns of unit names, as strings; got 0"),
    ],
)
def test_what_is_no_treatment_is_refused(activations: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        zs.shard(nn.Linear(2, 2), activations=activations)


def test_a_row_and_a_column_cannot_both_be_asked_for() -> None:
    with pytest.raises(ValueError, match="Give activations= or a row that has them, not both"):
        zs.shard(nn.Linear(2, 2), residency="C1", activations="recompute")
    with pytest.raises(ValueError, match=r"zs\.Residency or one of C1, C2, C3, C4, C5; got 'C9'"):
        zs.shard(nn.Linear(2, 2), residency="C9")


@pytest.mark.parametrize(
    ("activations", "error"),
    [
        (
            {"block.*": "recompute"},
            r"names 'block\.\*', which matches no unit; units: \(root\), blocks\.0, blocks\.1, blocks\.2\.",
        ),
        ({"stem": "recompute"}, "names 'stem', which matches no unit"),
    ],
)
def test_a_pattern_that_fits_no_unit_is_refused(activations: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        zs.shard(models.build(models.Stack), activations=activations, units=[models.Block])


def test_recomputation_of_nothing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"no selected unit has a module with layers inside; units: \(root\), 0, 1\."):
        zs.shard(model, activations="recompute", units=[nn.Linear])


def test_recomputation_of_a_single_block_is_refused_with_a_remedy_of_the_command_line() -> None:
    """As `zeroshard train --depth 1 --activations recompute`, which has no units=."""
    with pytest.raises(ValueError, match=r"units: \(root\)\. .* use a model of two or more blocks \(a single one is"):
        zs.shard(models.build(models.Stack, depth=1), activations="recompute")
    zs.shard(models.build(models.Stack, depth=2), activations="recompute")


def test_the_root_is_named_as_it_is_shown() -> None:
    column = activations_of({"(root)": "offload"})
    assert column.of_unit("") == (zs.Offloaded(),)
    assert column.of_unit("blocks.0") == ()


@pytest.mark.parametrize("fraction", [0, 1.5, float("nan"), "1", None, True])
def test_a_fraction_that_is_none_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match=r"above 0 and at most 1"):
        zs.Offloaded(fraction)


@pytest.mark.parametrize("wire_bytes", [0, -1, 3.5, "1e6", None])
def test_a_number_of_bytes_that_is_none_is_refused(wire_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"wire_bytes=\) must be a number of bytes above 0"):
        zs.shard(nn.Linear(2, 2), settings=zs.Settings(wire_bytes=wire_bytes))
