"""An axis "pipe": each place has a module of its own, passes stay at a place, and a step is one of all places.

The schedule here is the plainest one, a message forward and one back. The oracle is one process with the whole model.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import zeroshard as zs
from tests import models
from tests.errors import raised
from tests.rotation import third
from zeroshard.testing import RankFailure, run_ranks

TIMEOUT_S = 240
WATCHDOG_S = 120.0
STEPS = 4
CLIP = 0.05
CASES = [(stage, shared) for stage in range(4) for shared in (True, False)]


class Part(nn.Module):
    """The blocks of a `Stack` that are at one place, under their names in the whole model."""

    def __init__(self, whole: nn.Module, place: int) -> None:
        super().__init__()
        self.stem = whole.stem if place == 0 else nn.Identity()
        first = place * 2
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in range(first, first + 2)})
        self.head = whole.head if place == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def settings(**options: Any) -> zs.Settings:
    return zs.Settings(watchdog_s=WATCHDOG_S, **options)


def run_pass(part: nn.Module, mesh: DeviceMesh, step: int, data: int, *, scale: float = 1.0) -> float:
    """Run one micro-batch through both places, forward and backward; return the loss at the last place."""
    first, last = (int(rank) for rank in mesh["pipe"].mesh)
    if dist.get_rank() == first:
        out = part(models.features(step, data))
        dist.send(out.detach(), last)
        grad = torch.empty_like(out)
        dist.recv(grad, last)
        out.backward(grad)
        return 0.0
    given = torch.empty(4, models.WIDTH)
    dist.recv(given, first)
    given.requires_grad_()
    loss = F.mse_loss(part(given), models.targets(step, data)) * scale
    loss.backward()
    dist.send(given.grad, first)
    return loss.item()


def build(mesh: DeviceMesh) -> Part:
    torch.manual_seed(7)
    return Part(models.Stack(depth=4), mesh.get_local_rank("pipe"))


def train(sizes: tuple[int, int], cases: list[tuple[int, bool]], names: tuple[str, str]) -> list[dict[str, Any]]:
    """Train on a mesh of two axes, "pipe" and "shard" in any order."""
    mesh, found = init_device_mesh("cpu", sizes, mesh_dim_names=names), []
    for stage, shared in cases:
        part = build(mesh)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        zero = zs.shard(part, optimizer, stage=stage, mesh=mesh, settings=settings(shared_memory=shared))
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(run_pass(part, mesh, step, zero.mesh.rank))
            norms.append(zero.grad_norm().item())
            norms.append(nn.utils.clip_grad_norm_(part.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        zero.check_copies()
        place = str(zero.mesh)
        zero.detach()
        found.append({"losses": losses, "norms": norms, "where": place, "parameters": dict(part.named_parameters())})
    return found


def whole(ranks: int) -> dict[str, Any]:
    """Train the whole model in this process."""
    torch.manual_seed(7)
    model = models.Stack(depth=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        parts = [F.mse_loss(model(models.features(step, data)), models.targets(step, data)) for data in range(ranks)]
        (sum(parts) / ranks).backward()  # type: ignore[union-attr]
        losses.append([one.item() for one in parts])
        norms += [nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()] * 2
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "parameters": dict(model.named_parameters())}


def test_a_pipe_trains_as_one_process() -> None:
    expected, cases = whole(2), third(CASES)
    by_rank = run_ranks(train, 4, (2, 2), cases, ("pipe", "shard"), timeout_s=TIMEOUT_S)
    for number, case in enumerate(cases):
        for rank, found in enumerate(by_rank):
            actual, place, data = found[number], rank // 2, rank % 2
            assert actual["where"] == f"[rank {rank}/4: pipe {place}, shard {data}]"
            if place:
                assert actual["losses"] == pytest.approx([one[data] for one in expected["losses"]], rel=1e-5), case
            # One norm on all ranks, of the gradients of all places.
            assert actual["norms"] == by_rank[0][number]["norms"]
            assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
            for name, value in actual["parameters"].items():
                assert torch.allclose(value, expected["parameters"][name], rtol=1e-5, atol=1e-6), (case, name)
    held = {name for found in by_rank for name in found[0]["parameters"]}
    assert held == set(expected["parameters"])


def test_places_of_one_rank_and_axes_in_another_order() -> None:
    for world, sizes, names in ((2, (2, 1), ("pipe", "shard")), (4, (2, 2), ("shard", "pipe"))):
        expected = whole(world // 2)
        by_rank = run_ranks(train, world, sizes, [(3, True), (1, False)], names, timeout_s=TIMEOUT_S)
        for found in by_rank:
            for actual in found:
                assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-5)
                for name, value in actual["parameters"].items():
                    assert torch.allclose(value, expected["parameters"][name], rtol=1e-5, atol=1e-6), name


# -- a step is one of all places --------------------------------------------------------------------------------------


def overflow(stage: int, precision: Any, non_finite: str) -> tuple[list[float | None], bool, bool]:
    """Spoil a gradient of one place on one rank, in the second step; tell the scales, and which steps changed it."""
    mesh, is_bad = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard")), False
    part = build(mesh)
    if dist.get_rank() == 3:
        part.head.weight.register_hook(lambda grad: grad * float("inf") if is_bad else None)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    options = settings(non_finite=non_finite)
    zero = zs.shard(part, optimizer, stage=stage, precision=precision, mesh=mesh, settings=options)
    scales, values = [], []
    for step in range(3):
        is_bad = step == 1
        run_pass(part, mesh, step, zero.mesh.rank)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(zero.loss_scale)
        with zero.gathered():
            values.append([one.detach().clone() for one in part.parameters()])
    is_still = all(torch.equal(*pair) for pair in zip(values[0], values[1], strict=True))
    return scales, is_still, any(not torch.equal(*pair) for pair in zip(values[1], values[2], strict=True))


def test_what_is_not_finite_at_one_place_skips_the_step_of_all() -> None:
    for stage in (0, 3):
        scaled = run_ranks(overflow, 4, stage, zs.Precision(loss_scale="dynamic"), "raise", timeout_s=TIMEOUT_S)
        assert scaled == [([65536.0, 32768.0, 32768.0], True, True)] * 4
    assert run_ranks(overflow, 4, 1, "fp32", "skip", timeout_s=TIMEOUT_S) == [([None] * 3, True, True)] * 4
    with pytest.raises(RankFailure) as failure:
        run_ranks(overflow, 4, 2, "fp32", "raise", timeout_s=TIMEOUT_S)
    for rank, error in failure.value.errors.items():
        where = f"[rank {rank}/4: pipe {rank // 2}, shard {rank % 2}]"
        assert error.message.startswith(f"{where} The gradient of 'head.weight' is not finite"), error.message
    assert len(failure.value.errors) == 4


def tied() -> tuple[float, float]:
    """Let both places have one parameter; its gradients are summed over the places, as user code does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    torch.manual_seed(0)
    model = nn.ModuleDict({"tied": nn.Linear(4, 4, bias=False)})
    model[f"own {mesh.get_local_rank('pipe')}"] = nn.Linear(4, 4, bias=False)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, mesh=mesh, settings=settings())
    for one in model.values():
        one(torch.ones(1, 4)).sum().backward()
    return zero.grad_norm().item(), nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()


def test_a_parameter_at_two_places_counts_once() -> None:
    # Three matrices of 16 gradients of one, the tied one at both places.
    for norms in run_ranks(tied, 4, timeout_s=TIMEOUT_S):
        assert norms == pytest.approx((48**0.5, 48**0.5))


def places_differ() -> dict[str, str]:
    """Return the errors of what differs between places, or is done at one only."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard")), dict[str, str]()
    place = mesh.get_local_rank("pipe")

    def shard(model: nn.Module, **options: Any) -> zs.Zero:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + options.pop("rate", 0)))
        return zs.shard(model, optimizer, mesh=mesh, settings=settings(), **options)

    torch.manual_seed(place)
    found["reduction"] = raised(lambda: shard(build(mesh), reduction=("mean", "sum")[place]))
    found["shapes"] = raised(lambda: shard(nn.Sequential(nn.Linear(4, 4 + place))))
    found["modules"] = raised(lambda: shard(nn.ModuleDict({f"{place}": nn.Linear(4, 4 + (dist.get_rank() == 3))})))
    torch.manual_seed(place)
    found["values"] = raised(lambda: shard(nn.Sequential(nn.Linear(4, 4))))
    for case in ("rate", "step", "norm"):
        part = build(mesh)
        zero = shard(part, rate=place * (case == "rate"))
        run_pass(part, mesh, 0, zero.mesh.rank)
        if case == "rate" or (case == "step" and place == 0):
            found[case] = raised(zero.optimizers[0].step)
        elif case == "norm" and place == 0:
            found[case] = raised(zero.grad_norm)
        else:
            found[case] = raised(lambda zero=zero: zero.agree(True, "a batch?"))
    part = build(mesh)
    zero = shard(part)
    found["agree"] = str([zero.agree(rank != dist.get_rank()) for rank in range(5)])
    run_pass(part, mesh, 0, zero.mesh.rank)
    part.requires_grad_(place == 1)
    average = zero.ema(0.5)
    part.requires_grad_(True)
    run_pass(part, mesh, 0, zero.mesh.rank)
    zero.optimizers[0].step()
    found["average"] = raised(lambda: average.swapped().__enter__())
    run_pass(part, mesh, 0, zero.mesh.rank)
    found["single"] = raised(lambda: nn.utils.clip_grad_norm_(part.parameters(), 1.0, foreach=False))
    return found


DIFFER = {
    "reduction": r"rank 0: options: .*reduction=mean.*\n.*\n  rank 2: options: .*reduction=sum",
    "shapes": r"Places 0 and 1 of the pipe both have a parameter '0\.\w+': \(4.* on rank\(s\) 0, 1, and \(5.* 2, 3\.",
    "modules": r"(?s)given different models, options or versions.*rank 2: .*\(4, 4\).*rank 3: .*\(5, 4\)",
    "values": r"both have a parameter '0\.\w+': \(4.* with checksum .*Keep the names",
    "rate": r"different places of the program:\n(.*\n)*.*lr \[0\.1\](.*\n)*.*lr \[0\.2\]",
    "step": r"(?s)different places of the program:.*step 0 of optimizer 0.*agree",
    "norm": r"(?s)different places of the program:.*a 2-norm over the places of the pipe.*agree",
    "agree": r"\[False, False, False, False, True\]",
    "average": r"(?s)different places of the program:.*was trained; zero\.ema\(\) left it out.*rank 2: swapped",
    "single": r"The norm of one gradient \('\S+'\) says nothing of other places",
}


def test_what_differs_between_places_is_one_error() -> None:
    for rank, found in enumerate(run_ranks(places_differ, 4, timeout_s=TIMEOUT_S)):
        for case, words in DIFFER.items():
            assert re.search(words, found[case]), (case, found[case])
            assert case == "agree" or f"[rank {rank}/4: pipe {rank // 2}, shard {rank % 2}]" in found[case], found[case]


# -- what is about one place ------------------------------------------------------------------------------------------


def use_handle(folder: str) -> dict[str, Any]:
    """Use what the handle offers besides steps; return what each rank sees."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard")), dict[str, Any]()
    part, place = build(mesh), mesh.get_local_rank("pipe")
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    zero = zs.shard(part, optimizer, stage=2, mesh=mesh, settings=settings())
    average, before = zero.ema(0.5), [one.detach().clone() for one in part.parameters()]
    run_pass(part, mesh, 0, zero.mesh.rank)
    optimizer.step()
    average.update()
    after = [one.detach().clone() for one in part.parameters()]
    with average.swapped():
        values = zip(part.parameters(), before, after, strict=True)
        found["average"] = all(torch.equal(one, torch.lerp(old, new, 0.5)) for one, old, new in values)
    found["decay"] = raised(lambda: zero.ema(0.5 + 0.25 * place))
    found["first"] = []
    for _ in zero.on_first_rank(states=True):
        states = optimizer.state_dict()["state"]
        found["first"] = [len(part.state_dict()), len(states), states[0]["exp_avg"].shape == before[0].shape]
    zero.offload_states()
    zero.reload_states()
    zero.check_copies()
    path = zero.save(f"{folder}/step-1", asynchronous=True)
    zero.detach()
    found["saved"] = zs.latest(folder) == path
    return found


def test_the_handle_of_a_place(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(use_handle, 4, str(tmp_path), timeout_s=TIMEOUT_S)):
        assert found["average"] and found["saved"]
        assert re.search(r"(?s)different places of the program:.*decay=0\.5\).*decay=0\.75\)", found["decay"])
        assert found["first"] == ([14, 14, True] if rank % 2 == 0 else [])


# -- torch's stages ---------------------------------------------------------------------------------------------------


def stages() -> bool:
    """Run torch's GPipe on a mesh with the axis."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
    part, place = build(mesh), mesh.get_local_rank("pipe")
    zero = zs.shard(part, mesh=mesh, settings=settings())
    example = torch.zeros((4, 5) if place == 0 else (4, models.WIDTH), requires_grad=True)
    stage = PipelineStage(part, place, 2, torch.device("cpu"), input_args=(example,), output_args=(part_output(place),))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
    batch = torch.cat([models.features(0, 0), models.features(0, 1)])
    if place == 0:
        schedule.step(batch)
    else:
        schedule.step(target=torch.zeros(8, 3))
    return zero.grad_norm().item() > 0


def part_output(place: int) -> Tensor:
    return torch.zeros(4, models.WIDTH if place == 0 else 3, requires_grad=True)


def test_stages_of_torch_need_the_axis() -> None:
    assert run_ranks(stages, 2, timeout_s=TIMEOUT_S) == [True, True]


def first_forward() -> str:
    """Drive a handle without the axis by torch's stage; only the first place can, the other one waits for it."""
    part, place = Part(models.build(models.Stack, 4), 0), dist.get_rank()
    zs.shard(part, settings=settings())
    example = torch.zeros(4, 5, requires_grad=True)
    stage = PipelineStage(part, place, 2, torch.device("cpu"), input_args=(example,), output_args=(part_output(0),))
    text = raised(lambda: stage.forward_maybe_with_nosync(example))
    part(example)  # the model itself runs
    return text


def test_torchs_stage_without_the_axis_is_refused() -> None:
    for rank, text in enumerate(run_ranks(first_forward, 2, timeout_s=TIMEOUT_S)):
        assert text.startswith("RuntimeError:") and f"[rank {rank}/2] torch's PipelineStage runs a model" in text, text
        assert "an axis named 'pipe'" in text
