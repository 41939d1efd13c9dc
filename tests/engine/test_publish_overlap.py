"""On a device, parameters that stages 1 and 2 publish arrive beside the next forward; whatever reads them waits.

Values that have not arrived are NaN on the emulated device (`tools/emulated.py`), which here ends no collective before
its wait.
"""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zeroshard as zs
from tests.oracle import TIMEOUT_S
from tools.emulated import Device, gpu
from zeroshard.core.states import Presence
from zeroshard.outer.island_model import ModelShards
from zeroshard.testing import run_ranks
from zeroshard.wire.comm import Pending
from zeroshard.wire.nccl import NcclComm

BLOCKS, WIDTH, STEPS = 4, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Extension(Block):
    """Reads its parameters as extensions in C++ do: their class is not asked."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x + torch.tanh(nn.functional.linear(x, self.inner.weight, self.inner.bias))


class Stack(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def shard(model: nn.Module, stage: int, **options: Any) -> tuple[zs.Zero, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zs.shard(model, optimizer, stage=stage, units=[Block], settings=zs.Settings(watchdog_s=30), **options)
    return zero, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, zero: zs.Zero, number: int) -> float:
    loss = model(batch_of(zero.mesh.rank, number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def coming(zero: zs.Zero) -> list[str]:
    return [unit.name for unit in zero.units if unit.presence is Presence.COMING]


def slow(device: Device) -> None:
    device.eagerness = 0.0


# -- order ------------------------------------------------------------------------------------------------------------


def train(stage: int, block: type[Block], micro_batches: int) -> dict[str, Any]:
    """Return what a step and the forward behind it issued, waited for and computed, and the parameters."""
    found: list[tuple[str, int]] = []
    plain = NcclComm.gather

    def gather(self: NcclComm, full: Tensor, tag: Any, kind: str = "gather", axis: Any = "shard") -> Pending:
        pending = plain(self, full, tag, kind, axis)
        if kind != "gather":
            return pending
        found.append(("issue", tag.bucket))

        def wait() -> bool:
            found.append(("wait", tag.bucket))
            return pending.wait()

        return Pending(wait)

    with gpu(stage) as device, patch.object(NcclComm, "gather", gather):
        slow(device)
        zero, optimizer = shard(model := Stack(block), stage)
        for number, one in enumerate(model.blocks, 1):
            one.register_forward_hook(lambda *_, number=number: found.append(("compute", number)))
        for number in range(STEPS):
            for micro in range(micro_batches):
                if micro == 0:
                    found.append(("forward", 0))
                model(batch_of(zero.mesh.rank, micro_batches * number + micro)).square().mean().backward()
            found.append(("step", 0))
            optimizer.step()
            optimizer.zero_grad()
            assert len(coming(zero)) == BLOCKS + 1
        with zero.gathered():
            parameters = [p.detach().clone() for p in model.parameters()]
        assert not device.host_waits
    return {"found": found, "parameters": parameters}


def alone(micro_batches: int) -> list[Tensor]:
    """Train on the data of two ranks in one process."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        for micro in range(micro_batches):
            for rank in range(2):
                (model(batch_of(rank, micro_batches * number + micro)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("block", [Block, Extension])
@pytest.mark.parametrize("stage", [1, 2])
def test_each_unit_is_waited_for_at_its_entry(stage: int, block: type[Block], micro_batches: int) -> None:
    expected = alone(micro_batches)
    for rank in run_ranks(train, 2, stage, block, micro_batches, timeout_s=TIMEOUT_S):
        events = rank["found"]
        begin = events.index(("step", 0))
        until = events.index(("forward", 0), begin)
        assert [kind for kind, _ in events[begin + 1 : until]] == ["issue"] * (BLOCKS + 1)
        issued = [bucket for _, bucket in events[begin + 1 : until]]
        behind = events[until + 1 : until + 1 + 2 * BLOCKS + 1]
        # The root, then each block in front of its own computation, behind that of the block before.
        assert behind == [("wait", issued[0])] + [
            pair for number in range(1, BLOCKS + 1) for pair in (("wait", issued[number]), ("compute", number))
        ]
        for one, other in zip(rank["parameters"], expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)


# -- reads ------------------------------------------------------------------------------------------------------------


def averaged(model: nn.Module, zero: zs.Zero, path: Path) -> list[Tensor]:
    average = torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Linear(2, 2)))
    average.module = copy.deepcopy(model)
    average.update_parameters(model)
    average.update_parameters(model)
    return list(average.module.parameters())


def own_average(model: nn.Module, zero: zs.Zero, path: Path) -> list[Tensor]:
    average = zero.ema(0.5)
    average.update()
    with average.swapped():
        return [p.detach().clone() for p in model.parameters()]


def saved(model: nn.Module, zero: zs.Zero, path: Path) -> list[Tensor]:
    zero.save(path)
    with zero.gathered(writeback=True):
        for p in model.parameters():
            p.data.zero_()
    zero.load(path)
    return [p.detach().clone() for p in model.parameters()]


def written(model: nn.Module, zero: zs.Zero, path: Path) -> list[Tensor]:
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    return list(torch.load(file).values())


def called(model: nn.Module, zero: zs.Zero, path: Path) -> list[Tensor]:
    return [functional_call(model, {"head.weight": torch.eye(WIDTH)}, (batch_of(0, 0),), tie_weights=False)]


READS: dict[str, Callable[[nn.Module, zs.Zero, Path], list[Tensor]]] = {
    "sum": lambda model, *_: [p.sum() for p in model.parameters()],
    "data": lambda model, *_: [p.data.clone() for p in model.parameters()],
    "detach": lambda model, *_: [p.detach().clone() for p in model.parameters()],
    "index": lambda model, *_: [p[0] for p in model.parameters()],
    "item": lambda model, *_: [torch.tensor(p.flatten()[-1].item()) for p in model.parameters()],
    "numpy": lambda model, *_: [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
    "tolist": lambda model, *_: [torch.tensor(p.tolist()) for p in model.parameters()],
    "data_ptr": lambda model, *_: [torch.frombuffer((p.data_ptr(), bytearray(p.detach().numpy()))[1], dtype=p.dtype)
                                   for p in model.parameters()],
    "out": lambda model, *_: [torch.no_grad()(torch.add)(p, 1, out=torch.empty_like(p)) for p in model.parameters()],
    "copy to another": lambda model, *_: [torch.empty(p.shape).copy_(p.detach()) for p in model.parameters()],
    "foreach norm": lambda model, *_: list(torch._foreach_norm(list(model.parameters()))),
    "vector": lambda model, *_: [nn.utils.parameters_to_vector(model.parameters())],
    "state_dict": lambda model, *_: [value.clone() for value in model.state_dict().values()],
    "state_dict of a submodule": lambda model, *_: [v.clone() for v in model.blocks[1].inner.state_dict().values()],
    "deepcopy": lambda model, *_: list(copy.deepcopy(model).parameters()),
    "deepcopy of a submodule": lambda model, *_: list(copy.deepcopy(model.blocks[2].inner).parameters()),
    "pickle": lambda model, *_: [pickle.loads(pickle.dumps(p)) for p in model.parameters()],
    "torch.save": written,
    "functional_call": called,
    "a submodule alone": lambda model, *_: [model.blocks[3](batch_of(0, 0)), model.blocks[0].inner(batch_of(0, 0))],
    "evaluation": lambda model, *_: [torch.no_grad()(model)(batch_of(0, 0))],
    "inference": lambda model, *_: [torch.inference_mode()(model)(batch_of(0, 0)).clone()],
    "grad of a loss": lambda model, *_: list(
        torch.autograd.grad(model(batch_of(0, 0)).sum(), [*model.parameters()])
    ),
    "average": averaged,
    "zero.ema": own_average,
    "zero.save": saved,
    "new_tensor": lambda model, *_: [p.new_tensor(p) for p in model.parameters()],
    "compiled": lambda model, *_: [torch.compile(model, backend="aot_eager")(batch_of(0, 0))],
    "compiled function": lambda model, *_: [
        torch.compile(lambda x: x @ model.blocks[1].inner.weight, backend="aot_eager")(batch_of(0, 0))
    ],
}  # fmt: skip


def read_all(stage: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with gpu(stage) as device:
        slow(device)
        zero, optimizer = shard(model := Stack(), stage)
        for number, (name, read) in enumerate(READS.items()):
            step(model, optimizer, zero, number)
            was_coming = len(coming(zero))
            first = [one.detach().clone() for one in read(model, zero, Path(folder) / f"{number}")]
            zero._engine.await_published()
            second = [one.detach().clone() for one in read(model, zero, Path(folder) / f"{number} again")]
            is_equal = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first, second, strict=True))
            found[name] = (was_coming, len(first) > 0 and is_equal)
        assert not device.host_waits
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_whatever_reads_a_parameter_waits(stage: int, tmp_path: Path) -> None:
    for rank in run_ranks(read_all, 2, stage, str(tmp_path), timeout_s=2 * TIMEOUT_S):
        # Once anything was compiled, a step waits: graphs read parameters where no class is asked.
        assert rank == dict.fromkeys(READS, (BLOCKS + 1, True)) | {"compiled function": (0, True)}


# -- what follows a step ----------------------------------------------------------------------------------------------


def follow(stage: int) -> dict[str, bool]:
    """Return what is right after other steps than a loop's."""
    found = {}
    with gpu(stage) as device:
        slow(device)
        torch.manual_seed(0)
        model = Stack()
        first = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)
        second = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
        zero = zs.shard(model, [first, second], stage=stage, units=[Block])
        plain = Stack()
        others = [torch.optim.SGD(plain.parameters(), lr=0.1)]

        def both(number: int) -> bool:
            for rank in range(2):
                (plain(batch_of(rank, number)).square().mean() / 2).backward()
            for one in others:
                one.step()
            plain.zero_grad()
            model(batch_of(zero.mesh.rank, number)).square().mean().backward()
            first.step()
            second.step()
            model.zero_grad()
            return bool(coming(zero))

        def are_equal() -> bool:
            return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))  # noqa: B905

        found["two optimizers of a bucket"] = both(0) and are_equal()
        both(1)
        with torch.no_grad():
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                own.mul_(0.5)
                other.mul_(0.5)
        found["a change in place behind a step"] = both(2) and are_equal()
        both(3)
        x, were_coming = torch.ones(2), coming(zero)
        is_same = all(x.to(p) is x for p in model.parameters())
        found["what asks a parameter for its dtype"] = is_same and coming(zero) == were_coming != []
        zero.check_copies()
        found["copies"] = not coming(zero) and are_equal()
        both(4)
        model.blocks[0].requires_grad_(False)
        plain.blocks[0].requires_grad_(False)
        found["a unit that is frozen since"] = both(5) and are_equal()
        with patch.object(NcclComm, "close"):  # torch cannot destroy groups that are written in Python
            zero.detach()
        found["detached"] = all(type(p) is nn.Parameter for p in model.parameters()) and are_equal()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_what_follows_a_step_waits(stage: int) -> None:
    for rank in run_ranks(follow, 2, stage, timeout_s=TIMEOUT_S):
        assert all(rank.values()), rank


def weight_of_a_model_that_is_gone() -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=2)
    for _ in range(2):
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[0].weight


def outlive() -> tuple[bool, bool]:
    """Return whether a parameter is right that outlives its model, and whether it had to wait."""
    with gpu(0) as device:
        slow(device)
        weight = weight_of_a_model_that_is_gone()
        gc.collect()
        has_waited = type(weight).__name__ == "ReleasedParameter"
        found = weight.detach().clone()
        device._unwaited.clear()  # nobody has the other one
    return torch.allclose(found, weight_of_a_model_that_is_gone().detach()), has_waited


def test_parameters_that_outlive_their_model_arrive() -> None:
    assert run_ranks(outlive, 2, timeout_s=TIMEOUT_S) == [(True, True)] * 2


def write_an_islands_values() -> list[bool]:
    with gpu(0) as device:
        slow(device)
        zero, optimizer = shard(model := Stack(), 2)
        step(model, optimizer, zero, 0)
        shards = ModelShards(zero._engine, [optimizer])
        shards.write(np.full(shards.numel, 0.25, dtype=shards.dtype))
        return [bool((p == 0.25).all()) for p in model.parameters()]


def test_values_of_an_island_are_written_behind_what_a_step_sends() -> None:
    assert all(map(all, run_ranks(write_an_islands_values, 2, timeout_s=TIMEOUT_S)))


# -- compiled ---------------------------------------------------------------------------------------------------------


def compiled(what: str) -> tuple[list[float], list[int]]:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    losses, graphs = [], []
    with gpu(0) as device:
        slow(device)
        model = Stack()
        targets = {"nothing": [], "model": [model]}.get(what, [*model.blocks])
        for module in targets:
            module.compile(backend="aot_eager", fullgraph="whole" in what)
        zero, optimizer = shard(model, 2)
        for number in range(5):
            losses.append(step(model, optimizer, zero, number))
            graphs.append(int(counters["stats"]["unique_graphs"]))
        zero._engine.await_published()
    return losses, graphs


def test_compiled_forwards_wait_and_settle() -> None:
    runs = {
        what: run_ranks(partial(compiled, what), 2, timeout_s=2 * TIMEOUT_S)[0]
        for what in ("nothing", "blocks", "blocks, each a whole graph", "model")
    }
    for what in ("blocks", "blocks, each a whole graph", "model"):
        losses, graphs = runs[what]
        assert losses == pytest.approx(runs["nothing"][0], rel=1e-5)
        assert graphs[-1] == graphs[2], graphs
    # The model is one graph behind the hook at its entry.
    assert runs["model"][1][-1] == 1
