"""P_a: inputs of recomputed modules are divided over the ranks along the tensor axis, and nothing else changes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, assert_same, randn
from zeroshard.activations.chain import Held
from zeroshard.activations.partition import Axis, Partition
from zeroshard.testing import RankFailure, run_ranks

WIDTH, DEPTH, BATCH, LENGTH = 16, 3, 4, 32
INPUT_BYTES = BATCH * LENGTH * WIDTH * 4
PLAN = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
PLAN |= {"qkv": ColwiseParallel(), "out": RowwiseParallel()}


class Block(nn.Module):
    """Attention and an MLP, whose projections are split over the tensor axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), models.Block(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # Heads outermost, so that each rank has whole heads.
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 4)).permute(3, 0, 2, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(y.transpose(1, 2).flatten(2)))


SEQUENCE_PLAN = {
    "norm": SequenceParallel(),
    "mlp.norm": SequenceParallel(),
    "qkv": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
    "out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    parameters: dict[str, Tensor]
    kept: list[int]
    """Bytes of checkpointed inputs after each forward, of those that were divided."""
    sent: int
    """Bytes of activations that this rank sent in a step."""
    reduced: int
    """Bytes of activations that torch summed along the tensor axis in a step."""


class Reductions(TorchDispatchMode):
    """Counts the bytes of DTensor's all-reduces, and of its gathers and reduce-scatters, which send half as much."""

    nbytes = parts_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        functions = torch.ops._c10d_functional
        if func is functions.all_reduce.default:
            self.nbytes += args[0].nbytes
        elif func in (functions.all_gather_into_tensor.default, functions.reduce_scatter_tensor.default):
            self.parts_bytes += max(args[0].nbytes, result.nbytes)
        return result


def train(other: str, stage: int, activations: Any, early_stop: bool = True, steps: int = 2) -> Trained:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(other, "tensor"))
    model = models.build(Net)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    zero = zs.shard(
        model,
        optimizer,
        stage=stage,
        mesh=mesh,
        units=[Block],
        activations=activations,
        settings=zs.Settings(watchdog_s=WATCHDOG_S),
    )
    losses, kept = [], []
    with set_checkpoint_early_stop(early_stop):
        for step in range(steps):
            before = zero.traffic().sent_bytes.get("activations", 0)
            with Reductions() as calls:
                loss = model(randn(BATCH, LENGTH, WIDTH, key=(step, mesh.get_local_rank(other)))).square().mean()
                kept.append(zero.memory().resident_bytes.get("activations", 0))
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    sent = zero.traffic().sent_bytes.get("activations", 0) - before
    with zero.gathered():
        weights = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
    return Trained(losses, weights, kept, sent, calls.nbytes)


WAYS = (
    "recompute+partition",
    (zs.Recomputed(every=2), zs.Partitioned()),
    "recompute+partition+offload",
    "recompute",
    "compress",
)


def train_all(other: str, stage: int) -> list[Trained]:
    """Return what treatments came to, without one first."""
    # All of them where nothing is sharded and where all is. Between the two, and over copies, whose axis "shard" has
    # one rank, what is left to show is that the parts of inputs keep out of the way of gradients and states.
    ways = WAYS if other == "shard" and stage in (0, 3) else WAYS[: 1 + 2 * (stage == 3)]
    return [train(other, stage, how) for how in (None, *ways)]


@pytest.mark.product
@pytest.mark.parametrize(
    ("other", "stage"), [*(("shard", stage) for stage in STAGES), ("replicate", 0), ("replicate", 3)]
)
def test_partition_changes_no_bit(other: str, stage: int) -> None:
    for rank, (expected, *ways) in enumerate(run_ranks(train_all, 4, other, stage, timeout_s=2 * TIMEOUT_S)):
        for way, actual in zip(WAYS, ways, strict=False):
            where = f"[rank {rank}/4] way {way}"
            assert actual.losses == expected.losses, where
            assert_same(expected.parameters, actual.parameters, where)


@pytest.mark.product
@pytest.mark.parametrize("early_stop", [True, False])
def test_bytes_kept_and_sent_are_those_of_the_paper(early_stop: bool) -> None:
    """Source: Rajbhandari et al. 2020, section 8: 12 messages a block without stopping early, 10 with it."""
    kept, parts = (
        run_ranks(train, 4, "shard", 2, how, early_stop, timeout_s=TIMEOUT_S)
        for how in ("recompute", "recompute+partition")
    )
    for one, two in zip(kept, parts, strict=True):
        # The head keeps its input whole: a layer by itself is not recomputed.
        assert [nbytes - INPUT_BYTES for nbytes in one.kept] == [DEPTH * INPUT_BYTES] * 2
        assert [nbytes - INPUT_BYTES for nbytes in two.kept] == [DEPTH * INPUT_BYTES // 2] * 2
        # An all-reduce sends 2 (T-1)/T of what it sums, a gather (T-1)/T.
        assert one.sent == 0
        assert two.sent == DEPTH * INPUT_BYTES // 2
        assert two.reduced == one.reduced == DEPTH * (5 if early_stop else 6) * INPUT_BYTES
        assert two.sent * (10 if early_stop else 12) == 2 * two.reduced // 2


class Split(nn.Module):
    """A block that is given its part of a sequence, as with sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.full_tensor() if isinstance(x, DTensor) else x)


def refuse(case: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(Split(), Split())
    zs.shard(model, mesh=mesh, units=[Split], activations="recompute+partition")
    x = randn(BATCH, LENGTH, WIDTH, key=(mesh.get_local_rank("tensor") if case == "seeds" else 0,)).requires_grad_()
    model(DTensor.from_local(x, mesh["tensor"], [Shard(1)]) if case == "sequence" else x)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("seeds", r"input 0 of the recomputed module in unit 1 of shape \(4, 32, 16\) has other values there"),
        ("sequence", r"input 0 of the recomputed module in unit 1 is a DTensor with placements \(Shard\(dim=1\),\)"),
    ],
)
def test_inputs_that_differ_along_the_tensor_axis_are_refused_by_name(case: str, error: str) -> None:
    with pytest.raises(RankFailure, match=error):
        run_ranks(refuse, 2, case, timeout_s=TIMEOUT_S)


def test_a_mesh_without_the_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="over the ranks along the axis 'tensor', but the mesh has no such axis"):
        zs.shard(models.build(Net), activations="recompute+partition")
    with pytest.raises(
        ValueError, match=r"Only inputs of recomputed modules can be partitioned: 'recompute\+partition'"
    ):
        zs.shard(models.build(Net), activations="partition")


def train_in_parts() -> tuple[int, int]:
    """Return the bytes of inputs that sequence parallelism keeps, and of what it gathers and scatters in a step."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    model = models.build(Net).requires_grad_(True)
    model.head.requires_grad_(False)  # a plain layer would need the whole sequence for its gradient
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], SEQUENCE_PLAN)
    settings = zs.Settings(compare_inputs=False)  # each rank has a part of the sequence
    zero = zs.shard(model, stage=2, mesh=mesh, units=[Block], activations="recompute", settings=settings)
    whole = randn(BATCH, LENGTH, WIDTH, key=(0,))
    for _ in range(2):  # the first recomputation is compared, and runs to its end
        with Reductions() as calls:
            loss = model(whole.chunk(2, dim=1)[mesh.get_local_rank("tensor")]).square().mean()
            kept = zero.memory().resident_bytes["activations"]
            loss.backward()
    assert calls.nbytes == DEPTH * 4 * WIDTH * 4, "the gradients of norms, which each rank has for its part"
    return kept, calls.parts_bytes


def test_sequence_parallelism_keeps_and_sends_as_much() -> None:
    """Its successor divides all that lies between products, too: Korthikanti et al. 2022."""
    for kept, parts_bytes in run_ranks(train_in_parts, 2, timeout_s=TIMEOUT_S):
        assert kept - INPUT_BYTES // 2 <= DEPTH * INPUT_BYTES // 2
        # A gather or a scatter sends half of what an all-reduce does: 11 here; 5 all-reduces and a gather there.
        assert parts_bytes == DEPTH * 11 * INPUT_BYTES


def drop_a_loss(stage: int, shared: bool, keeps: bool) -> list[Tensor]:
    """Run a forward before the one that is propagated, and free its graph; with `keeps` rank 0 does so later."""
    kept = []
    torch.manual_seed(0)
    model = nn.Sequential(*(models.Block(WIDTH) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    settings = zs.Settings(shared_memory=shared, watchdog_s=WATCHDOG_S)
    options = {"stage": stage, "mesh": mesh, "activations": "recompute+partition", "units": [models.Block]}
    zs.shard(model, optimizer, settings=settings, **options)
    for step in range(4):
        x = randn(BATCH * LENGTH, WIDTH, key=[step])
        dropped = model(x).square().mean()
        if keeps and dist.get_rank() == 0:
            kept.append(dropped)
            del kept[: step - 1]
        if keeps:
            del dropped
        model(x).square().mean().backward()
        dropped = None
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize(("stage", "shared", "keeps"), [(0, True, False), (2, False, False), (3, False, True)])
def test_graphs_of_other_forwards_may_live_as_long_as_they_like(stage: int, shared: bool, keeps: bool) -> None:
    """A gather ahead of use for a forward that no rank, or only one rank, has still: the ranks waited for ever."""
    first, second = run_ranks(drop_a_loss, 2, stage, shared, keeps, timeout_s=TIMEOUT_S)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("numel", [1024, 1025, 1535])
def test_parts_of_any_length_make_the_whole(numel: int) -> None:
    """Three ranks in one process: the parts of all are what a gather finds."""
    whole, parts = randn(numel, key=(5,)), dict[int, Tensor]()
    for place in (1, 2, 0):

        def gather(full: Tensor, number: int, kind: str, what: str, place: int = place) -> Callable[[], None]:
            rows = full.view(3, -1)
            if kind == "agree":
                rows[:] = rows[place].clone()
            else:
                parts[place] = rows[place].clone()
            return lambda: rows.copy_(torch.stack([*map(parts.__getitem__, range(3))])) if len(parts) == 3 else None

        link, held = Partition(Axis(3, place, f"[rank {place}/3]", gather)), Held(whole, True)
        link.treat([held], 0, None)
        started = link.start(held.value)
    assert_same(link.restore(started), whole)
