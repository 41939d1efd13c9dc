"""Tensor parallelism beside sharding: 2 x 2 ranks against a single process that knows neither.

torch's `parallelize_module` splits layers over the axis "tensor"; `zs.shard(mesh=...)` shards what each rank holds of
them over the axis "shard". Ranks along "tensor" see the same data.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import zeroshard as zs
from tests import oracle
from tests.engine.test_precision_by_module import ByModule
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Casts, assert_same, randn, run_cases, single_run
from tests.rotation import third
from zeroshard.testing import RankFailure, run_ranks

WORLD = 4
WIDTH, HEADS, BLOCKS = 16, 4, 2
STEPS = 4
CLIP = 0.5
AXES = ("shard", "tensor")


class Block(nn.Module):
    """Attention and an MLP; the norms are plain parameters, which each rank along "tensor" has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, path: Sequence[int] = range(BLOCKS)) -> Tensor:
        for number in path:
            x = self.blocks[number](x)
        return self.head(x)


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {
    name: RowwiseParallel() for name in ("out", "down")
}


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(
    model: nn.Module, step: int, place: int, dtype: torch.dtype = torch.float32, path: Sequence[int] = range(BLOCKS)
) -> Tensor:
    """Return the loss on the data of one place along "shard", which takes the blocks of a path."""
    return model(randn(3, 5, WIDTH, key=(step, place), dtype=dtype), path=path).float().square().mean()


def path_of(step: int, place: int) -> list[int]:
    """Return blocks that differ by step and place, as those of experts do; in some steps no rank uses a block."""
    return [block for block in range(BLOCKS) if (step * (block + 1) + place + block) % 3]


def parallel(axes: tuple[str, ...] = AXES, dtype: torch.dtype = torch.float32) -> tuple[Net, Any]:
    """Return the model, split over the axis "tensor", and the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    model = build().to(dtype)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    return model, mesh


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained; all that the engine and the oracle have in common."""

    dtype: torch.dtype
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    precision: str = "fp32"
    tolerance: float = 1e-6
    """In losses and norms, relative; and of each parameter in the 2-norm."""
    path: Callable[[int, int], Sequence[int]] = lambda step, place: range(BLOCKS)


CASES = {
    "sgd": Case(torch.float32, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    # Keys' biases have no true gradient, and AdamW in fp32 would make steps of what rounding leaves there.
    "adamw-fp64": Case(torch.float64, lambda p: torch.optim.AdamW(p, lr=0.01)),
    # A row-wise layer rounds each rank's part of its sum to bfloat16, then their sum: units of the last place, 2^-8.
    "bf16": Case(torch.float32, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "bf16", 2**-6),
    # A unit is reduced before the gradients of one rank arrive, which another pass had led all ranks to expect.
    "paths": Case(torch.float32, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), path=path_of),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def train(name: str, stage: int, axes: tuple[str, ...] = AXES) -> Trained:
    case = CASES[name]
    model, mesh = parallel(axes, case.dtype)
    before = dict(model.named_parameters())
    optimizer = case.optimizer(list(model.parameters()))
    zero = zs.shard(
        model, optimizer, stage=stage, precision=case.precision, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S)
    )
    losses, norms = [], []
    for step in range(STEPS):
        place = mesh.get_local_rank("shard")
        loss = loss_of(model, step, place, case.dtype, case.path(step, place))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for key, parameter in model.named_parameters():
        assert parameter is before[key]
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor) == (key.split(".")[-2] in PLAN)
    with zero.gathered():
        return Trained(losses, norms, {key: whole(p) for key, p in model.named_parameters()})


def alone(name: str) -> list[Trained]:
    """Train in one process, and return what each place along "shard" should see."""
    case = CASES[name]
    found = single_run(
        oracle.Case(
            build=lambda: build().to(case.dtype),
            loss=lambda model, step, place: loss_of(model, step, place, case.dtype, case.path(step, place)),
            optimizer=lambda model: case.optimizer(list(model.parameters())),
            steps=STEPS,
            clip=CLIP,
        ),
        2,
        Casts(torch.bfloat16) if case.precision == "bf16" else None,
    )
    return [Trained(losses, found["norms"], found["parameters"]) for losses in found["losses"]]


def all_stages(name: str) -> list[Trained]:
    return [train(name, stage) for stage in STAGES]


def assert_close(expected: Trained, actual: Trained, tolerance: float, where: str) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance), where
    assert actual.norms == pytest.approx(expected.norms, rel=tolerance), where
    assert_same(expected.parameters, actual.parameters, where, relative=tolerance)


@pytest.mark.product
@pytest.mark.parametrize("name", CASES)
def test_training_equals_a_single_process(name: str) -> None:
    expected = alone(name)
    by_rank = run_ranks(all_stages, WORLD, name, timeout_s=TIMEOUT_S)
    for rank, results in enumerate(by_rank):
        for stage, actual in enumerate(results):
            where = f"[rank {rank}/{WORLD}] stage {stage}"
            assert_close(expected[rank // 2], actual, CASES[name].tolerance, where)
            assert actual.norms == by_rank[0][0].norms, f"{where}: norms differ between ranks or stages"
            assert_same(dataclasses.asdict(results[0]), dataclasses.asdict(actual), f"{where} against stage 0")
    assert by_rank[0][0].losses[-1] < by_rank[0][0].losses[0]


def tensor_first() -> list[Trained]:
    return [train("sgd", stage, ("tensor", "shard")) for stage in (2, 3)]


@pytest.mark.rotates
def test_axes_may_come_in_any_order() -> None:
    expected = alone("sgd")
    for rank, results in enumerate(run_ranks(tensor_first, WORLD, timeout_s=TIMEOUT_S)):
        for actual in results:
            assert_close(expected[rank % 2], actual, 1e-6, f"[rank {rank}/{WORLD}]")


def test_ranks_along_axes() -> None:
    axes = (("replicate", 2), ("tensor", 2), ("shard", 3))
    mesh = zs.Mesh(10, 12, 0, torch.device("cpu"), axes)
    assert (mesh.shard_ranks, mesh.shard_rank, mesh.shard_size) == ((9, 10, 11), 1, 3)
    assert (mesh.replica_ranks, mesh.replicas) == ((4, 10), 2)
    assert mesh.tensor_ranks == (7, 10)
    assert mesh.data_ranks == (3, 4, 5, 9, 10, 11)
    assert mesh.along("shard", "tensor") == (6, 7, 8, 9, 10, 11)
    # Errors name the place where there is more than one axis, or where the launch has other ranks.
    part = dataclasses.replace(mesh, ranks=tuple(range(20, 32)), launched=40)
    assert (str(mesh), str(part)) == (
        "[rank 10/12: replicate 1, tensor 1, shard 1]",
        "[rank 30/40: replicate 1, tensor 1, shard 1]",
    )
    plain = zs.Mesh(1, 3, 0, torch.device("cpu"))
    assert (str(plain), str(dataclasses.replace(plain, axes=(("replicate", 1), ("shard", 3))))) == (
        "[rank 1/3]",
        "[rank 1/3]",
    )
    assert str(dataclasses.replace(plain, axes=(("shard", 3),), ranks=(7, 5, 6), launched=8)) == "[rank 5/8: shard 1]"
    assert (plain.shard_ranks, plain.replica_ranks, plain.tensor_ranks, plain.data_ranks) == (
        (0, 1, 2),
        (1,),
        (1,),
        (0, 1, 2),
    )


# -- gradients and norms ---------------------------------------------------------------------------------------------


class Sequenced(nn.Module):
    """An MLP between sequence-parallel ends: each rank along "tensor" normalizes a part of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def build_sequenced() -> Sequenced:
    torch.manual_seed(0)
    return Sequenced()


def shard_by_sgd(model: nn.Module, mesh: Any, stage: int, **options: Any) -> zs.Zero:
    optimizer, settings = torch.optim.SGD(model.parameters(), lr=0.1), zs.Settings(watchdog_s=WATCHDOG_S, **options)
    return zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings)


def pending_sums(stage: int) -> dict[str, Tensor]:
    """Return whole gradients, of a norm whose gradient torch leaves as a pending sum among them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    model = build_sequenced()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
    arrived = []
    model.norm.weight.register_hook(lambda grad: arrived.append(grad.placements))
    shard_by_sgd(model, mesh, stage, compare_inputs=False)
    x = randn(2, 6, WIDTH, key=(mesh.get_local_rank("shard"),))
    model(x.chunk(2, dim=1)[mesh.get_local_rank("tensor")]).square().mean().backward()
    assert arrived == [(Partial(),)]
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad.shape == p.shape for grad, p in zip(grads.values(), model.parameters(), strict=True))
    return {name: grad.full_tensor() for name, grad in grads.items()}


def test_gradients_with_a_pending_sum_are_summed_along_the_axis() -> None:
    model = build_sequenced()
    for place in range(2):
        (model(randn(2, 6, WIDTH, key=(place,))).square().mean() / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for (stage,), by_rank in run_cases(pending_sums, WORLD, third([(3,), (0,)]), timeout_s=3 * TIMEOUT_S).items():
        for actual in by_rank:
            assert_same(expected, actual, f"stage {stage}", relative=1e-6)


ORDERS = (1.0, 2.0, float("inf"))


def norms() -> list[list[float]]:
    """Return, by stage, norms asked of the handle, of gradients and of the optimizer's slices, and after clipping."""
    results = []
    for stage in STAGES:
        model, mesh = parallel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        loss_of(model, 0, mesh.get_local_rank("shard")).backward()
        found = [float(zero.grad_norm(p)) for p in ORDERS]
        found += [float(torch.stack([q.grad.norm(p) for q in model.parameters()]).norm(p)) for p in ORDERS]
        slices = [entry for group in optimizer.param_groups for entry in group["params"]]
        found += [float(torch.nn.utils.clip_grad_norm_(slices, 0.01, p)) for p in ORDERS[1:2]]
        results.append([*found, float(zero.grad_norm())])
    return results


def test_norms_count_what_is_split_over_all_ranks_and_what_is_alike_once() -> None:
    model = build()
    for place in range(2):
        (loss_of(model, 0, place) / 2).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = [float(flat.norm(p)) for p in ORDERS]
    by_rank = run_ranks(norms, WORLD, timeout_s=TIMEOUT_S)
    for results in by_rank:
        assert results == by_rank[0]
        for found in results:
            assert found == pytest.approx([*expected, *expected, expected[1], 0.01], rel=2e-6)


# -- what is seen on one rank is known on all ------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero) -> list[Tensor]:
    with zero.gathered(states=True):
        states = [whole(v) for s in optimizer.state_dict()["state"].values() for v in s.values() if v is not None]
        return [whole(p) for p in model.parameters()] + states


SPOILED = ("blocks.0.norm.weight", "blocks.0.q.weight", "blocks.1.down.bias")
"""A plain parameter, a DTensor that is split, and one that each rank has alike."""
SPOILED_ON = [(rank, name) for name, ranks in zip(SPOILED, ((0, 3), (1, 2), (0, 3)), strict=True) for rank in ranks]
"""Each rank, and each kind of parameter at both places along each axis."""


def overflow(stage: int) -> list[tuple[bool, bool, float]]:
    """Let the gradient of one parameter overflow on one rank, for the places of `SPOILED_ON`."""
    model, mesh = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spoiled: tuple[int, str] | None = None

    def spoil(name: str) -> Callable[[Tensor], Tensor | None]:
        return lambda grad: grad * float("inf") if spoiled == (dist.get_rank(), name) else None

    for name in SPOILED:
        model.get_parameter(name).register_hook(spoil(name))
    zero = zs.shard(
        model, optimizer, stage=stage, precision="fp16", mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S)
    )

    def step() -> list[Tensor]:
        (1e-2 * loss_of(model, 0, mesh.get_local_rank("shard"))).backward()  # far from overflow at the first scale
        optimizer.step()
        optimizer.zero_grad()
        return state_of(model, optimizer, zero)

    seen = []
    after = step()
    for place in SPOILED_ON:
        before, scale, spoiled = after, zero.loss_scale, place
        skipped, halved, spoiled = step(), zero.loss_scale, None
        after = step()
        is_skipped = all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
        has_moved = any(not torch.equal(a, b) for a, b in zip(skipped, after, strict=True))
        seen.append((is_skipped, has_moved, halved / scale))
    return seen


@pytest.mark.rotates
def test_an_overflow_on_any_rank_skips_the_step_on_all() -> None:
    for stage, by_rank in run_cases(overflow, WORLD, third([(3,), (0,)]), timeout_s=3 * TIMEOUT_S).items():
        assert by_rank == [[(True, True, 0.5)] * len(SPOILED_ON)] * WORLD, stage


def with_grad_scaler() -> list[list[tuple[float, bool]]]:
    """Return, by stage and step, torch's own scale after it, and whether parameters moved; one rank overflows once."""
    results = []
    for stage in (0, 3):
        model, mesh = parallel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for step in range(3):
            before = state_of(model, optimizer, zero)
            is_bad = step == 1 and dist.get_rank() == WORLD - 1
            loss = loss_of(model, step, mesh.get_local_rank("shard"))
            scaler.scale(loss).backward()
            if is_bad:
                # Along "tensor" the other rank sees nothing of this.
                model.blocks[1].up.weight.grad.mul_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = state_of(model, optimizer, zero)
            seen.append((scaler.get_scale(), any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))))
        results.append(seen)
    return results


@pytest.mark.rotates
def test_the_users_grad_scaler_agrees_along_all_axes() -> None:
    for results in run_ranks(with_grad_scaler, WORLD, timeout_s=TIMEOUT_S):
        assert results == [[(1024.0, True), (512.0, False), (512.0, True)]] * 2


def not_a_number(stage: int, bad_rank: int) -> str:
    model, mesh = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_bad = dist.get_rank() == bad_rank
    model.blocks[1].up.weight.register_hook(lambda grad: grad * float("nan") if is_bad else None)
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    before = state_of(model, optimizer, zero)
    loss_of(model, 0, mesh.get_local_rank("shard")).backward()
    with pytest.raises(RuntimeError, match="is not finite; nothing was changed on any rank") as error:
        optimizer.step()
    optimizer.zero_grad()
    assert_same(before, state_of(model, optimizer, zero))
    return str(error.value)


def test_a_gradient_that_is_no_number_on_one_rank_raises_on_all() -> None:
    cases = [(0, 1), (1, 2), (3, 3)]
    for case, by_rank in run_cases(not_a_number, WORLD, third(cases), timeout_s=3 * TIMEOUT_S).items():
        assert all("'blocks.1.up.weight'" in text for text in by_rank), case


def apart(fault: str) -> None:
    model, mesh = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_odd = dist.get_rank() == WORLD - 1
    if fault == "model" and is_odd:
        model.head.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    zero = zs.shard(model, optimizer, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    if fault == "pass" and is_odd:
        zero.grad_norm()
    loss_of(model, 0, mesh.get_local_rank("shard"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [("model", r"rank 3: parameter 'head.weight'.* frozen"), ("pass", "rank 3: .*a 2-norm of gradients")],
)
def test_a_rank_of_another_place_along_the_axis_that_differs_is_named_on_all(fault: str, words: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(apart, WORLD, fault, timeout_s=TIMEOUT_S)
    assert sorted(failure.value.errors) == list(range(WORLD))
    for error in failure.value.errors.values():
        assert error.type_name == "RankMismatchError"
        assert re.search(words, error.message), error.message


# -- bytes -----------------------------------------------------------------------------------------------------------


class Squares(nn.Module):
    """Square weights, two of which are split: every shard of every part is a multiple of 64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def count_bytes() -> list[tuple[dict[str, int], dict[str, int], dict[str, int], int]]:
    results = []
    for stage in STAGES:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        model = Squares()
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
        memory, traffic = zero.memory(), zero.traffic()
        sent = {kind: traffic.sent_bytes.get(kind, 0) for kind in ("gather", "reduce")}
        results.append((memory.resident_bytes, memory.predicted_bytes, sent, traffic.predicted_step_bytes))
    return results


@pytest.mark.rotates
def test_bytes_are_the_formulas_of_the_local_tensors() -> None:
    local = 3 * (32 * 32 + 2 * 32 * 32 // 2) * 4  # of each block two weights are split in halves and one is not
    n = 2  # ranks along "shard"
    held = {
        0: (local, local, 2 * local),
        1: (local, local, 2 * local // n),
        2: (local, local // n, 2 * local // n),
        3: (local // n, local // n, 2 * local // n),
    }
    for results in run_ranks(count_bytes, WORLD, timeout_s=TIMEOUT_S):
        for stage, (resident, predicted, sent, step_bytes) in enumerate(results):
            assert tuple(resident[column] for column in ("parameters", "gradients", "states")) == held[stage]
            assert {**resident, "transient": 0} == {**predicted, "transient": 0}
            each = local * (n - 1) // n
            gathered = [0, each, each, 2 * each - each // 3][stage]  # the last of three blocks stays for its backward
            reduced = [2, 1, 1, 1][stage] * each
            assert sent == {"gather": 2 * gathered, "reduce": 2 * reduced}
            assert step_bytes == gathered + reduced


# -- parameters, states, checkpoints ---------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda p: p + 1,
    "in place": lambda p: p.detach().mul_(2),
    "to_local": lambda p: p.to_local(),
    "full_tensor": lambda p: p.full_tensor(),
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "data": lambda p: p.data,
    "norm": lambda p: p.norm(),
    "copy": copy.deepcopy,
    "linear": lambda p: F.linear(distribute_tensor(torch.ones(1, p.shape[1]), p.device_mesh, [Replicate()]), p),
}


def read_released() -> dict[str, str]:
    model, mesh = parallel()
    zero = zs.shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        stage=3,
        mesh=mesh,
        settings=zs.Settings(watchdog_s=WATCHDOG_S),
    )
    parameter = model.blocks[1].up.weight
    texts = {}
    for name, read in READS.items():
        with pytest.raises(RuntimeError) as error:
            read(parameter)
        texts[name] = str(error.value)
    # What reads no values is answered.
    assert (tuple(parameter.shape), parameter.placements) == ((4 * WIDTH, WIDTH), (Shard(0),))
    assert (parameter.requires_grad, parameter.is_leaf, parameter.dtype) == (True, True, torch.float32)
    assert "blocks.1.up.weight" in repr(parameter)
    with zero.gathered(writeback=True):
        for read in READS.values():
            read(parameter)
    return texts


def test_reading_a_released_parameter_raises_and_names_it() -> None:
    for texts in run_ranks(read_released, WORLD, timeout_s=TIMEOUT_S):
        for name, text in texts.items():
            assert "'blocks.1.up.weight' (64, 16)" in text, name
            assert "with zero.gathered():" in text, name


def convert(stage: int) -> None:
    model, mesh = parallel()
    shard_by_sgd(model, mesh, stage)
    with pytest.raises(RuntimeError, match="released here" if stage == 3 else "Couldn't swap Linear.weight"):
        model.blocks[0].up.half()
    loss_of(model, 0, 0).backward()  # nothing was changed


def test_conversions_are_refused() -> None:
    run_cases(convert, WORLD, third([(3,), (2,)]), timeout_s=3 * TIMEOUT_S)


def compiled(stage: int, when: str) -> None:
    """Train with compiled blocks as without."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    runs = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, mesh = parallel()
        blocks = list(model.blocks) if is_compiled else []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for block in blocks if when == "before" else []:
            block.compile(backend="aot_eager")  # inductor's code would need a C++ compiler
        zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        for block in blocks if when == "after" else []:
            block.compile(backend="aot_eager")
        losses, graphs = [], []
        for step in range(STEPS):
            loss = loss_of(model, step, mesh.get_local_rank("shard"))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(int(counters["stats"]["unique_graphs"]))
        runs.append(losses)
    # aot_eager runs the kernels of eager. The input of the first block needs no gradient, that of the second one does.
    assert runs[1] == runs[0]
    assert graphs == [2] * STEPS


@pytest.mark.rotates
def test_blocks_with_split_parameters_are_compiled() -> None:
    run_cases(compiled, WORLD, third([(3, "after"), (2, "before"), (0, "after")]), timeout_s=3 * TIMEOUT_S)


class Dropping(Net):
    """A model that drops elements between a column-wise and a row-wise layer, by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def draws(what: str) -> None:
    """Compile a module that draws random numbers, in the model or around it; draw outside compiled modules."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    model = Dropping()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    run: Any = model
    zero = zs.shard(model, stage=3, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    torch.manual_seed(zero.mesh.rank // 2)
    match what:
        case "module":
            model.compile(backend="eager")
        case "call":
            run = torch.compile(model, backend="eager")
        case "outside":
            model.blocks[0].compile(backend="eager")
    x = randn(3, 5, WIDTH, key=(0, zero.mesh.rank // 2))
    if what == "outside":
        run(x)
        return
    model.eval()
    run(x)
    model.train()
    with pytest.raises(RuntimeError, match=r"'Dropping' is compiled, .* drew random numbers, .* Set its dropout to 0"):
        run(x)


@pytest.mark.rotates
def test_compiled_code_with_split_parameters_draws_no_random_numbers() -> None:
    run_cases(draws, WORLD, third([("module",), ("call",), ("outside",)]), timeout_s=3 * TIMEOUT_S)


def state_round(stage: int) -> None:
    """Take over states, read and change whole values, average, copy: all of it in the values of the whole model."""
    model, mesh = parallel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    expected = {name: whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    start = {name: whole(p) for name, p in model.named_parameters()}
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    average = zero.ema(0.5)

    with zero.gathered(states=True):
        saved = copy.deepcopy(optimizer.state_dict())
        states = {name: whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
        assert_same(expected, states)
        assert_same(start, {name: whole(value) for name, value in model.state_dict().items()})
        plain = copy.deepcopy(model)
        assert {type(p) for p in plain.parameters()} == {nn.Parameter, DTensor}
        assert torch.equal(loss_of(plain, 0, 0), loss_of(model, 0, 0))

    loss_of(model, 0, mesh.get_local_rank("shard")).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update()
    with zero.gathered():
        now = {name: whole(p) for name, p in model.named_parameters()}
    with average.swapped(), zero.gathered():
        mean = {name: whole(p) for name, p in model.named_parameters()}
    assert_same({name: torch.lerp(start[name], now[name], 0.5) for name in now}, mean, relative=1e-6)

    with zero.gathered(writeback=True, states=True), torch.no_grad():
        optimizer.load_state_dict(saved)
        for name, p in model.named_parameters():
            p.copy_(like(p, start[name]))
        # What counts is rank 0's, and of what is split each first rank's along "shard".
        for p in model.parameters():
            if dist.get_rank() not in ((0, 1) if is_split(p) else (0,)):
                p.zero_()
                optimizer.state[p]["exp_avg"].fill_(7.0)
    with zero.gathered(states=True):
        assert_same(start, {name: whole(p) for name, p in model.named_parameters()})
        assert_same(expected, {name: whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()})


def like(parameter: Tensor, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def is_split(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements != (Replicate(),)


def test_whole_parameters_and_states_are_those_of_the_whole_model() -> None:
    run_cases(state_round, WORLD, third([(3,), (1,)]), timeout_s=3 * TIMEOUT_S)


def start_apart(stage: int) -> tuple[dict[str, Tensor], Tensor]:
    """Build another model on each rank; return the whole of what it starts with, and a buffer."""
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    model = Net()
    model.register_buffer("shift", torch.randn(3))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    zero = zs.shard(model, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    with zero.gathered():
        return {name: whole(p) for name, p in model.named_parameters()}, model.shift.clone()


def test_all_ranks_start_with_the_values_of_rank_0() -> None:
    torch.manual_seed(0)
    model = Net()
    expected = {name: p.detach() for name, p in model.named_parameters()}, torch.randn(3)
    for by_rank in run_cases(start_apart, WORLD, third([(3,), (0,)]), timeout_s=3 * TIMEOUT_S).values():
        for actual in by_rank:
            assert_same(expected, actual)


def plain_values(stage: int) -> None:
    """Give plain tensors of the whole shape where torch would want DTensors."""
    model, mesh = parallel()
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    weight = model.blocks[0].up.weight
    loss_of(model, 0, 0).backward()
    with pytest.raises(ValueError, match=r"placements .* got a plain tensor of shape \(64, 16\)"):
        weight.grad = torch.ones(4 * WIDTH, WIDTH)
    weight.grad = like(weight, torch.ones(4 * WIDTH, WIDTH))
    assert torch.equal(weight.grad.full_tensor(), torch.ones(4 * WIDTH, WIDTH))
    optimizer.step()
    with pytest.raises(ValueError, match="Expected a DTensor with placements"):  # noqa: SIM117
        with zero.gathered(states=True, writeback=True):
            optimizer.state[weight]["exp_avg"] = torch.ones(4 * WIDTH, WIDTH)


def test_plain_values_for_a_split_parameter_are_refused() -> None:
    run_ranks(plain_values, WORLD, 2, timeout_s=TIMEOUT_S)


# -- parameters with rules of their own ------------------------------------------------------------------------------

IGNORED = ("blocks.0.up.*", "head.*")
"""A split layer, and one that each rank has whole."""


def with_ignored(stage: int) -> dict[str, Tensor]:
    """Train with parameters that each rank updates itself; all ranks have the same data, so they stay alike."""
    model, mesh = parallel()
    own = [p for name, p in model.named_parameters() if name.startswith(("blocks.0.up.", "head."))]
    ids = set(map(id, own))
    optimizer = torch.optim.SGD([p for p in model.parameters() if id(p) not in ids], lr=0.05, momentum=0.9)
    zero = zs.shard(
        model, optimizer, stage=stage, mesh=mesh, ignored=IGNORED, settings=zs.Settings(watchdog_s=WATCHDOG_S)
    )
    other = torch.optim.SGD(own, lr=0.05, momentum=0.9)
    for step in range(3):
        loss_of(model, step, 0).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    zero.check_copies()
    with zero.gathered():
        return {name: whole(p) for name, p in model.named_parameters()}


def test_ignored_parameters_of_split_models_are_each_ranks_own() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        loss_of(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for by_rank in run_cases(with_ignored, WORLD, third([(3,), (0,), (2,)]), timeout_s=3 * TIMEOUT_S).values():
        for actual in by_rank:
            assert_same(expected, actual, relative=1e-6)


BY_MODULE = {"": "bf16", nn.LayerNorm: "fp32", "blocks.1.down": "fp32", "blocks.0.q": "fp32"}
OWN = tuple((f"blocks.{n}.{name}", torch.float32, torch.bfloat16) for n in range(BLOCKS) for name in ("norm", "norm2"))
SPLIT_OWN = tuple((name, torch.float32, torch.bfloat16) for name in ("blocks.1.down", "blocks.0.q"))


def by_module(stage: int) -> tuple[list[float], dict[str, torch.dtype], dict[str, Tensor]]:
    """Train with split layers that have a precision of their own."""
    model, mesh = parallel()
    optimizer = CASES["bf16"].optimizer(list(model.parameters()))
    zero = zs.shard(
        model, optimizer, stage=stage, precision=BY_MODULE, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S)
    )
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, mesh.get_local_rank("shard"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with zero.gathered():
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        return losses, dtypes, {name: whole(p) for name, p in model.named_parameters()}


def test_split_modules_may_have_a_precision_of_their_own() -> None:
    casts = ByModule(torch.bfloat16, own=(*OWN, *SPLIT_OWN))
    case = oracle.Case(build=build, loss=loss_of, optimizer=lambda m: CASES["bf16"].optimizer(list(m.parameters())))
    found = single_run(dataclasses.replace(case, steps=STEPS), 2, casts)
    for by_rank in run_cases(by_module, WORLD, third([(3,), (0,), (1,)]), timeout_s=3 * TIMEOUT_S).values():
        for rank, (losses, dtypes, parameters) in enumerate(by_rank):
            assert dtypes == {name: p.dtype for name, p in found["parameters"].items()}
            assert dtypes["blocks.1.down.weight"] is dtypes["blocks.0.q.bias"] is torch.float32
            assert losses == pytest.approx(found["losses"][rank // 2], rel=2**-6)
            assert_same(found["parameters"], parameters, relative=2**-6)


# -- what does not fit -----------------------------------------------------------------------------------------------


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def refuse(case: str) -> str:
    """Return the error of one thing that does not fit; the model must be as it was."""
    mesh = mesh_of((2, 2), AXES)
    model = build()
    given: Any = mesh
    if case == "names":
        given = mesh_of((2, 2), ("dp", "tp"))
    elif case == "no names":
        given = mesh_of((4,), None)
    elif case == "no shards":
        given = mesh_of((4,), ("replicate",))
    elif case == "too small":
        model.head = nn.Linear(WIDTH, 1)
    elif case == "buffer":
        model.head.register_buffer("scale", distribute_tensor(torch.ones(2), mesh["tensor"], [Shard(0)]))
    elif case == "without mesh":
        given = None
    elif case == "one rank":
        given = mesh = mesh_of((4, 1), AXES)
    if case in ("too small", "without mesh", "other mesh", "one rank"):
        parallelize_module(model, mesh["shard" if case == "other mesh" else "tensor"], {"head": ColwiseParallel()})
    kept = {name: type(p) for name, p in model.named_parameters()}
    with pytest.raises((ValueError, TypeError)) as error:
        zs.shard(model, mesh=given, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    assert {name: type(p) for name, p in model.named_parameters()} == kept
    return str(error.value)


REFUSALS = {
    "names": r"replicate, shard, tensor, pipe; got \('dp', 'tp'\)",
    "no names": "got no names",
    "no shards": r"axes \(replicate 4\) of 4 ranks leave one rank per replica",
    "too small": r"'head.weight' \(1, 16\) has no part for 1 of 2 ranks: .* up to 1 of the 1 indices of dimension 0",
    "other mesh": r"'head.weight' is a DTensor over ranks \(0, 2\), and the axis 'tensor' of mesh= has \(0, 1\)",
    "buffer": "Buffer 'head.scale' is a DTensor",
    "without mesh": r"'head.weight' is a DTensor, but the mesh has no axis 'tensor' of two .*mesh=.*parallelize_module",
    "one rank": "leave that call out where the axis has one rank",
}


def refuse_all() -> dict[str, str]:
    return {case: refuse(case) for case in REFUSALS}


def test_what_does_not_fit_is_refused_by_name() -> None:
    first, *_ = by_rank = run_ranks(refuse_all, WORLD, timeout_s=TIMEOUT_S)
    for case, words in REFUSALS.items():
        assert re.search(words, first[case]), f"{case}: {first[case]}"
    # Each rank says it of its own places.
    assert all("head" in texts["other mesh"] and texts["too small"] == first["too small"] for texts in by_rank)
