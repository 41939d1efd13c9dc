"""Bytes held and bytes sent are those of the residency table (docs/design.md), to the byte.

`Even` has parameters whose shards need no padding at 2, 3 and 4 ranks, so that the formulas hold on each rank; `Odd`
needs padding, so that they hold for the sum over ranks and padding is counted apart.
"""

import functools
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.oracle import STAGES, TIMEOUT_S, Sharded, randn
from zeroshard.table.layout import plan_layout
from zeroshard.table.pool import choose_buffer
from zeroshard.table.trace import Ledger
from zeroshard.testing import run_ranks
from zeroshard.wire.buffers import Pool
from zeroshard.wire.comm import Tag
from zeroshard.wire.memory import OwnMemory

EVEN = 48  # 48 * 48 elements are whole cache lines for 2, 3 and 4 ranks alike
BYTES = 4
STATE_BYTES = 8  # two moments in fp32; in fp32 the parameters are their own master weights


def even_loss(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    return model(randn(3, EVEN, key=(11, step, rank, micro))).square().mean()


def factors(stage: int, world: int) -> dict[str, float]:
    """Return bytes of a parameter, on one rank, by column. Source: Rajbhandari et al. 2020, figure 1, for fp32."""
    table = {
        0: {"parameters": BYTES, "gradients": BYTES, "states": STATE_BYTES},
        1: {"parameters": BYTES, "gradients": BYTES, "states": STATE_BYTES / world},
        2: {"parameters": BYTES, "gradients": BYTES / world, "states": STATE_BYTES / world},
        3: {"parameters": BYTES / world, "gradients": BYTES / world, "states": STATE_BYTES / world},
    }
    return table[stage]


def train(
    run: Sharded, kind: type[nn.Module], steps: int, loss: Callable[..., Tensor] = even_loss
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model and take some steps; return it and its optimizer."""
    model = models.build(kind)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(steps):
        loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def measure(kind: type[nn.Module], loss: Callable[..., Tensor], stage: int) -> tuple[int, Any, Any, Any]:
    """Return the model's numel, and resident, peak and predicted bytes where the third step has all its gradients."""
    run = Sharded(stage)
    model, _ = train(run, kind, 2, loss)
    numel = sum(p.numel() for p in model.parameters())
    loss(model, 2, run.rank).backward()
    memory = run.zeros[0].memory()
    return numel, memory.resident_bytes, memory.peak_bytes, memory.predicted_bytes


def measured(kind: type[nn.Module], loss: Callable[..., Tensor], stage: int, world: int) -> list[Any]:
    """Measure a model on each rank."""
    return run_ranks(measure, world, kind, loss, stage, timeout_s=TIMEOUT_S, process_group=world > 1)


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_resident_bytes_are_exact_on_each_rank(stage: int, world: int) -> None:
    by_rank = measured(models.Even, even_loss, stage, world)
    for rank, (numel, resident, _, predicted) in enumerate(by_rank):
        for column, each in factors(stage, world).items():
            where = f"[rank {rank}/{world}] {column}"
            assert resident[column] == round(each * numel), f"{where}: {resident[column]}, formula {each * numel}"
            assert predicted[column] == resident[column], f"{where}: predicted {predicted[column]}"
        steps = 4 * len(list(models.Even().parameters()))  # AdamW's step counter of each parameter
        assert resident["padding"] <= steps, f"padding {resident['padding']} bytes in a model that needs none"
        assert predicted["padding"] == resident["padding"]


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_resident_bytes_are_exact_over_all_ranks_padding_aside(stage: int, world: int) -> None:
    by_rank = measured(models.GPT, models.gpt_loss, stage, world)
    numel = by_rank[0][0]
    for column, each in factors(stage, world).items():
        total = sum(resident[column] for _, resident, _, _ in by_rank)
        assert total == round(each * world * numel), f"{column}: {total}, formula {each * world * numel}"
    for rank, (_, resident, _, predicted) in enumerate(by_rank):
        for column in ("parameters", "gradients", "states", "padding"):
            assert resident[column] == predicted[column], (
                f"[rank {rank}/{world}] {column}, predicted {predicted[column]}"
            )


def measure_storages(stage: int) -> tuple[int, int, int]:
    """Return numel, and the bytes of parameters and states that live in this process, counted without the engine."""
    run = Sharded(stage, {"shared_memory": False})
    model, optimizer = train(run, models.Even, 2)
    numel = sum(p.numel() for p in model.parameters())
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim > 0]
    return numel, storage_bytes([*model.parameters(), *masters]), storage_bytes(states)


def storage_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of all storages behind some tensors, each counted once."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_storages_hold_what_the_ledger_says(stage: int) -> None:
    """The ledger is the engine's own: look at the storages themselves, too."""
    for world in (2, 4):
        for numel, parameters, states in run_ranks(measure_storages, world, stage, timeout_s=TIMEOUT_S):
            each = factors(stage, world)
            assert parameters == round(each["parameters"] * numel)
            assert states == round(each["states"] * numel)


def whole_units(stage: int) -> tuple[list[int], dict[str, int], dict[str, int], int]:
    """Return how many blocks are whole at each call of a hook, peak and predicted bytes, and a block's bytes."""
    run = Sharded(stage, {"shared_memory": False})
    model = models.build(models.Even, depth=8)
    counts: list[int] = []

    def count(*args: Any) -> None:
        counts.append(sum(storage_bytes(list(block.parameters())) > 0 for block in model.blocks))

    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for block in model.blocks:
        block.first.register_forward_hook(count)
        block.second.register_full_backward_hook(count)
        block.first.register_full_backward_hook(count)
    for step in range(4):
        even_loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    block_bytes = sum(p.numel() for p in models.EvenBlock(EVEN).parameters()) * BYTES
    memory = run.zeros[0].memory()
    return counts, memory.peak_bytes, memory.predicted_bytes, block_bytes


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 4])
def test_at_most_two_units_besides_the_root_are_whole(world: int) -> None:
    for counts, peak, predicted, block_bytes in run_ranks(whole_units, world, 3, timeout_s=TIMEOUT_S):
        assert len(counts) == 4 * 3 * 8, "the hooks did not run"
        assert max(counts) == 2, f"blocks whole at each hook: {counts}"
        assert peak["transient"] >= 2 * block_bytes + EVEN * EVEN * BYTES, f"peak {peak}"
        assert peak["transient"] <= predicted["transient"] * 1.05, (
            f"{peak['transient']}, predicted {predicted['transient']}"
        )


def trace_counts(kind: type[nn.Module], options: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """Return, for each step, the most units besides the root that are whole by the trace, and which are pinned."""
    run = Sharded(3)
    model = models.build(kind)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, **options)
    zero = run.zeros[0]
    loss = models.gpt_loss if kind is models.GPT else models.stack_loss
    found = []
    for step in range(3):
        loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in sorted({event.step for event in zero.trace.events}):
        events = zero.trace.step_events(step)
        pinned = {event.unit for event in events if event.is_pinned}
        root = zero.units[0].name
        now: Counter[str] = Counter()
        most = 0
        for event in events:
            if event.unit not in pinned | {root}:
                now[event.unit] += {"gather": 1, "release": -1}.get(event.kind, 0)
                most = max(most, sum(now.values()))
        assert not +now, f"step {step}: never released {dict(+now)}"
        found.append((most, sorted(pinned - {root})))
    return found


class Twice(models.Stack):
    """A stack that runs its first block again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(x)


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_the_trace_shows_two_units_and_names_those_that_stay(world: int) -> None:
    for found in run_ranks(trace_counts, world, models.Stack, {}, timeout_s=TIMEOUT_S):
        # The last block stays for its backward, which the trace knows from the second step on.
        assert [pinned for _, pinned in found] == [[], ["blocks.2"], ["blocks.2"]]
        assert max(most for most, _ in found) == 2, found
    for found in run_ranks(trace_counts, world, Twice, {}, timeout_s=TIMEOUT_S):
        # That a block runs again is known from the first step on, and said in the trace of those after it.
        assert [(most, pinned) for most, pinned in found[1:]] == [(1, ["blocks.0", "blocks.2"])] * 2, found


def grow(stage: int) -> list[tuple[int, int, int]]:
    """Return bytes of tensors, number of objects and peak bytes, at some of a hundred steps."""
    run = Sharded(stage)
    model = models.build(models.Even, depth=2)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    found = []
    for step in range(100):
        even_loss(model, step, run.rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            with torch.no_grad():
                even_loss(model, 1000 + step, run.rank)
        if step in (19, 59, 99):
            time.sleep(0.1)  # a worker of gloo drops the last small message a moment after it was received
            gc.collect()
            objects = gc.get_objects()
            held = storage_bytes([thing for thing in objects if isinstance(thing, Tensor)])
            peak = sum(run.zeros[0].memory().peak_bytes.values())
            found.append((held, len(objects), peak))
            del objects
    return found


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_grows_over_a_hundred_steps(stage: int) -> None:
    for rank, (early, middle, late) in enumerate(run_ranks(grow, 2, stage, timeout_s=TIMEOUT_S)):
        # A message of a few bytes may still be alive when an early count is taken, so less is no finding.
        assert late[0] <= middle[0] <= early[0], f"[rank {rank}/2] bytes of tensors: {early[0]}, {middle[0]}, {late[0]}"
        # Python's own caches move the count by a few objects; one object a step would be forty.
        assert abs(late[1] - middle[1]) < 20, f"[rank {rank}/2] objects: {early[1]}, {middle[1]}, {late[1]}"
        assert late[2] == early[2], f"[rank {rank}/2] peak bytes: {early[2]}, {late[2]}"


def unreduced(stage: int) -> list[dict[str, int]]:
    """Return resident bytes before a backward, after one under `no_sync`, and after the reduction."""
    run = Sharded(stage)
    model = models.build(models.Even)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    zero = run.zeros[0]
    even_loss(model, 0, run.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = [zero.memory().resident_bytes]
    with zero.no_sync():
        even_loss(model, 1, run.rank, 0).backward()
    found.append(zero.memory().resident_bytes)
    even_loss(model, 1, run.rank, 1).backward()
    found.append(zero.memory().resident_bytes)
    return found


@pytest.mark.product
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_shows_what_no_sync_keeps(stage: int) -> None:
    numel = sum(p.numel() for p in models.Even().parameters())
    for before, during, after in run_ranks(unreduced, 2, stage, timeout_s=TIMEOUT_S):
        assert during["transient"] >= numel * BYTES, f"{during}, with whole gradients of {numel} elements"
        assert during["transient"] > before["transient"]
        assert after["gradients"] == numel * BYTES // 2, f"{after['gradients']} bytes of gradients after the reduction"


def forget(stage: int, options: dict[str, Any], is_clipped: bool) -> list[tuple[int, int]]:
    """Return bytes with gradients, without, and so on: of gradients by the engine, of all tensors by their storages."""
    run = Sharded(stage, options)
    model = models.build(models.Even)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    found = []
    for step in range(3):
        even_loss(model, step, run.rank).backward()
        if is_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(count_gradients(run.zeros[0]))
        optimizer.zero_grad()
        found.append(count_gradients(run.zeros[0]))
    return found


def count_gradients(zero: Any) -> tuple[int, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    return zero.memory().resident_bytes["gradients"], storage_bytes(tensors)


@pytest.mark.product
@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_gives_the_memory_of_gradients_back(stage: int, shares_memory: bool, is_clipped: bool) -> None:
    options = {"shared_memory": shares_memory}
    for found in run_ranks(forget, 2, stage, options, is_clipped, timeout_s=TIMEOUT_S):
        for (held, with_them), (left, without) in zip(found[2::2], found[3::2], strict=True):
            assert held == factors(stage, 2)["gradients"] * sum(p.numel() for p in models.Even().parameters())
            if shares_memory and stage < 2:
                assert left == held, "other ranks read whole gradients where they lie, so these stay"
            else:
                assert left == 0
                assert with_them - without >= held, f"storages: {with_them}, then {without} bytes"


def test_a_whole_gradient_that_the_user_keeps_outlives_zero_grad() -> None:
    run = Sharded(0)
    model = models.build(models.Even)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    even_loss(model, 0, 0).backward()
    kept = model.stem.weight.grad
    assert kept is not None
    before = kept.clone()
    optimizer.zero_grad()
    even_loss(model, 1, 0).backward()
    assert torch.equal(kept, before)
    assert not torch.equal(model.stem.weight.grad, before)


@pytest.mark.parametrize(
    ("free", "numel", "use", "replace"),
    [
        ([], 8, None, None),
        ([8], 8, 0, None),
        ([16, 12, 9], 8, 2, None),
        ([16], 8, 0, None),
        ([17], 8, None, None),  # a small part of a large buffer would keep it from others
        ([4, 7], 8, None, 1),
        ([3], 8, None, None),
        ([7, 17], 8, None, 0),
    ],
)
def test_a_pooled_buffer_fits_or_is_replaced(free: list[int], numel: int, use: int | None, replace: int | None) -> None:
    assert choose_buffer(free, numel) == (use, replace)


def test_a_buffer_is_freed_before_the_one_that_replaces_it_is_made() -> None:
    cpu, made, were_there = torch.device("cpu"), list[weakref.ref[Tensor]](), list[bool]()

    def zeros(memory: OwnMemory, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        were_there.extend(one() is not None for one in made)
        tensor = torch.zeros(numel, dtype=dtype, device=device)
        made.append(weakref.ref(tensor))
        return tensor

    with patch.object(OwnMemory, "zeros", zeros):
        pool = Pool(OwnMemory(), Ledger(), keeps=True)
        pool.give(pool.take(1000, torch.float32, cpu))
        pool.take(1200, torch.float32, cpu)
    assert were_there == [False]


class Mixed(models.Even):
    """Blocks of three sizes, so that no two neighbours want buffers of one size."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(models.EvenBlock(EVEN, EVEN + 16 * (place % 3)) for place in range(7))


def pooled(options: dict[str, Any]) -> tuple[int, int, int]:
    """Return the bytes that pools keep after some steps of stage 2, the most they had, and what was predicted."""
    run = Sharded(2, options)
    train(run, Mixed, 4)
    memory = run.zeros[0].memory()
    columns = memory.resident_bytes, memory.peak_bytes, memory.predicted_bytes
    return tuple(column["transient"] for column in columns)  # type: ignore[return-value]


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_units_of_about_one_size_share_buffers(world: int) -> None:
    largest = BYTES * sum(p.numel() for p in models.EvenBlock(EVEN, EVEN + 32).parameters())
    stem = BYTES * EVEN * EVEN
    for kept, most, predicted in run_ranks(pooled, world, {"shared_memory": True}, timeout_s=TIMEOUT_S):
        assert kept == largest + stem, "one unit's gradients, and what the stem's are shown in"
        assert most == predicted == kept + stem, "the stem's gradient itself, which autograd made"
    for kept, most, predicted in run_ranks(pooled, world, {"shared_memory": False}, timeout_s=TIMEOUT_S):
        # Which buffers are free when depends on when the root's gradients land; the prediction has them land first.
        assert kept <= most <= predicted <= 2 * 2 * largest + 2 * stem, "of two units, whole and received"


def traffic(stage: int, micros: int, is_unsynced: bool) -> tuple[int, int, list[int], int, int]:
    """Return the bytes of the model and of what its forward uses last, those that three steps sent, and predicted."""
    run = Sharded(stage)
    model = models.build(models.Even)
    whole = sum(p.numel() for p in model.parameters()) * BYTES
    last = sum(p.numel() for p in (*model.stem.parameters(), *model.blocks[-1].parameters())) * BYTES
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    zero = run.zeros[0]
    sent = []
    for step in range(3):
        before = zero.traffic().sent_bytes
        for micro in range(micros):
            if is_unsynced and micro < micros - 1:
                with zero.no_sync():
                    even_loss(model, step, run.rank, micro).backward()
            else:
                even_loss(model, step, run.rank, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = zero.traffic().sent_bytes
        sent.append(sum(after.get(kind, 0) - before.get(kind, 0) for kind in ("gather", "reduce")))
    counted = sum(event.nbytes for event in zero.trace.step_events(max(event.step for event in zero.trace.events)))
    return whole, last, sent, zero.traffic().predicted_step_bytes, counted


SENT = {  # elements of the model a rank and step, by stage, for G micro-batches, where a backward gathers all again
    (0, False): lambda micros: 2 * micros,
    (1, False): lambda micros: micros + 1,
    (2, False): lambda micros: micros + 1,
    (3, False): lambda micros: 3 * micros,
    (0, True): lambda micros: 2,
    (1, True): lambda micros: 2,
    (2, True): lambda micros: 2,
    (3, True): lambda micros: 2 * micros + 1,
}


MICROS = ((1, False), (3, False), (3, True))


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("micros", "is_unsynced"), MICROS, ids=["one", "three", "three-unsynced"])
def test_traffic_is_exact(stage: int, world: int, micros: int, is_unsynced: bool) -> None:
    by_rank = run_ranks(traffic, world, stage, micros, is_unsynced, timeout_s=TIMEOUT_S)
    for rank, (whole, last, sent, predicted, counted) in enumerate(by_rank):
        # A backward finds the root and the last block gathered.
        kept = last * (stage == 3)
        expected = (SENT[stage, is_unsynced](micros) * whole - micros * kept) * (world - 1) // world
        assert sent == [expected] * 3, f"[rank {rank}/{world}] {sent} bytes in three steps, formula {expected}"
        assert counted == expected, f"[rank {rank}/{world}] the trace counts {counted} bytes, formula {expected}"
        assert predicted == (SENT[stage, False](1) * whole - kept) * (world - 1) // world


def test_one_rank_sends_nothing() -> None:
    for stage in STAGES:
        ((_, _, sent, predicted, _),) = run_ranks(traffic, 1, stage, 1, False, timeout_s=TIMEOUT_S, process_group=False)
        assert sent == [0, 0, 0]
        assert predicted == 0


def wire_bytes(stage: int) -> tuple[int, int]:
    """Return what torch's own send functions were handed in one step, and what the engine says it sent."""
    import torch.distributed as dist

    run = Sharded(stage, {"shared_memory": False})
    model = models.build(models.Even)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    zero = run.zeros[0]

    def step_once(step: int) -> None:
        even_loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(2):
        step_once(step)
    handed = 0
    isend = dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal handed
        handed += tensor.nbytes * (kwargs["tag"] < Tag.VOTES)  # what ranks tell one another is no value
        return isend(tensor, *args, **kwargs)

    before = zero.traffic().sent_bytes
    dist.isend = counting
    try:
        step_once(2)
    finally:
        dist.isend = isend
    after = zero.traffic().sent_bytes
    return handed, sum(after.get(kind, 0) - before.get(kind, 0) for kind in ("gather", "reduce"))


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_counted_bytes_are_those_handed_to_torch(stage: int) -> None:
    for handed, said in run_ranks(wire_bytes, 2, stage, timeout_s=TIMEOUT_S):
        assert handed == said > 0


def test_padding_of_a_gpt2_xl_block_at_512_ranks_is_under_a_thousandth() -> None:
    width = 1600
    numels = (
        width,
        width,
        width * 3 * width,
        3 * width,
        width * width,
        width,
        width,
        width,
        width * 4 * width,
        4 * width,
        4 * width * width,
        width,
    )
    layout = plan_layout(numels, BYTES, 512)
    padding = layout.full_numel / sum(numels) - 1
    assert 0 <= padding < 1e-3, f"{padding:.2%} padding"
    assert sum(layout.owned_numel(*layout.shard_range(rank)) for rank in range(512)) == sum(numels)


def frozen(stage: int) -> tuple[int, int, Any]:
    """Return the numel of all and of trainable parameters, and resident bytes, of a model with a frozen block."""
    run = Sharded(stage)
    model = models.build(models.Even)
    model.blocks[0].requires_grad_(False)
    numels = [(p.numel(), p.requires_grad) for p in model.parameters()]
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        even_loss(model, step, run.rank).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    memory = run.zeros[0].memory().resident_bytes
    return sum(n for n, _ in numels), sum(n for n, is_trained in numels if is_trained), memory


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_hold_neither_gradients_nor_states(stage: int) -> None:
    for every, trained, resident in run_ranks(frozen, 2, stage, timeout_s=TIMEOUT_S):
        each = factors(stage, 2)
        assert resident["parameters"] == round(each["parameters"] * every)
        assert resident["gradients"] == round(each["gradients"] * trained)
        assert resident["states"] == round(each["states"] * trained)


def frozen_traffic(stage: int, blocks: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes that a step sends and those predicted, for a model of which these blocks alone are trained."""
    run = Sharded(stage)
    model = models.build(models.Even)
    model.requires_grad_(False)
    for number in blocks:
        model.blocks[number].requires_grad_()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    run.shard(model, optimizer, units=[models.EvenBlock])
    zero, sent = run.zeros[0], [0]
    for step in range(3):
        even_loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(sum(nbytes for kind, nbytes in zero.traffic().sent_bytes.items() if kind not in ("agree", "start")))
    table = [line.split()[-1].replace(",", "") for line in zero.summary().splitlines()[2 : 3 + len(zero.units)]]
    assert sum(map(int, table[:-1])) == int(table[-1])
    return sent[-1] - sent[-2], zero.traffic().predicted_step_bytes


@pytest.mark.product
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("blocks", [(2,), (0, 1), (3,)], ids=str)
def test_units_before_the_first_trained_one_are_gathered_once(stage: int, blocks: tuple[int, ...]) -> None:
    for sent, predicted in run_ranks(frozen_traffic, 2, stage, blocks, timeout_s=TIMEOUT_S):
        assert sent == predicted


def functional_model(stage: int) -> dict[str, int]:
    """Return resident bytes of a model that ties its embedding: shared parameters count once."""
    run = Sharded(stage)
    model = models.build(functools.partial(models.GPT, tied=True))
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    F.cross_entropy(model(models.tokens(0, run.rank)).flatten(0, 1), models.tokens(0, run.rank).flatten()).backward()
    return run.zeros[0].memory().resident_bytes


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_tied_parameters_count_once(stage: int) -> None:
    numel = sum(p.numel() for p in models.GPT(tied=True).parameters())
    total = sum(resident["parameters"] for resident in run_ranks(functional_model, 2, stage, timeout_s=TIMEOUT_S))
    assert total == round(factors(stage, 2)["parameters"] * 2 * numel)
