"""Checkpoints of pipes: one folder of the whole model, whose parts lie at the places, from any layout to any other.

The oracle is one process with the whole model, which reads what a pipe wrote.
"""

import functools
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import zeroshard as zs
from tests import models
from tests.engine.test_pipe import run_pass
from tests.errors import raised
from tests.oracle import assert_same
from tests.rotation import is_whole, third
from zeroshard.checkpoint.reader import read_manifest
from zeroshard.checkpoint.verify import latest, verify
from zeroshard.testing import RankFailure, run_ranks

from .faulty import Failing, refuse
from .test_faults import die
from .wholes import whole_of

pytestmark = pytest.mark.timeout(400)
TIMEOUT_S = 240
WATCHDOG_S = 60.0
WORLD = 4
SETTINGS = zs.Settings(watchdog_s=WATCHDOG_S)
DEPTH = 4
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(models.Block):
    """A block with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("level", torch.randn(3))


class Part(nn.Module):
    """The stem and the blocks before `cut`, or the other blocks and the head, under their names in the whole model."""

    def __init__(self, whole: models.Stack, place: int, cut: int) -> None:
        super().__init__()
        self.stem = whole.stem if place == 0 else nn.Identity()
        blocks = range(cut) if place == 0 else range(cut, DEPTH)
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in blocks})
        self.head = whole.head if place == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        y: Tensor = self.head(x)
        return y


def grouped(model: nn.Module) -> list[Optimizer]:
    """Return two optimizers, one of which has two groups."""
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    matrices = [p for p in named.values() if p.ndim > 1]
    biases = [p for name, p in named.items() if p.ndim < 2 and "norm" not in name]
    return [AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": biases}], lr=0.01), SGD(norms, lr=0.01)]


OPTIMIZERS = {
    "grouped": grouped,
    "momentum": lambda model: [SGD(model.parameters(), lr=0.01, momentum=0.9)],
    "whole": lambda model: [Adafactor(model.parameters(), lr=0.01)],
}
Layout = tuple[tuple[tuple[str, int], ...], int, int]
"""The axes of a mesh with their sizes, the stage, and the block at which a pipe is cut."""
AXES: list[tuple[tuple[str, int], ...]] = [
    (("pipe", 2), ("shard", 2)),
    (("shard", 2), ("pipe", 2)),
    (("pipe", 2), ("tensor", 2)),
    (("shard", 2), ("tensor", 2)),
    (("pipe", 2), ("shard", 1)),
    (("shard", 4),),
    (("shard", 3),),
    (("shard", 2),),
]
LAYOUTS: list[Layout] = [
    (axes, stage, 1 + (stage + place) % 3) for place, axes in enumerate(AXES) for stage in range(4)
]
PIPES = [layout for layout in LAYOUTS if "pipe" in dict(layout[0])]


def laid(axes: tuple[tuple[str, int], ...]) -> DeviceMesh | None:
    """Return the mesh of the first ranks; None on the others."""
    names, sizes = zip(*axes, strict=True)
    numbers = torch.arange(torch.Size(sizes).numel())
    mesh = DeviceMesh("cpu", numbers.view(sizes), mesh_dim_names=names)
    return mesh if dist.get_rank() < len(numbers) else None


class Run:
    """A model, or a place's part of it, with its optimizers in a layout."""

    def __init__(self, mesh: DeviceMesh | None, layout: Layout, kind: str, seed: int, **options: Any) -> None:
        axes, stage, cut = layout
        torch.manual_seed(seed)
        whole = models.Stack(DEPTH, kind=Block)
        self.mesh, self.is_pipe = mesh, "pipe" in dict(axes)
        self.model = Part(whole, mesh.get_local_rank("pipe"), cut) if mesh and self.is_pipe else whole
        for block in self.model.modules() if mesh and "tensor" in dict(axes) else ():
            if isinstance(block, Block):
                parallelize_module(block, mesh["tensor"], PLAN)
        self.optimizers = OPTIMIZERS[kind](self.model)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, **options.pop("settings", {}))
        self.zero = zs.shard(self.model, self.optimizers, stage=stage, mesh=mesh, settings=settings, **options)

    def train(self, steps: range) -> list[float]:
        """Train on the same data on all ranks; return the losses, which the first place of a pipe does not know."""
        losses = []
        for step in steps:
            if self.mesh and self.is_pipe:
                losses.append(run_pass(self.model, self.mesh, step, 0))
            else:
                loss = F.mse_loss(self.model(models.features(step, 0)), models.targets(step, 0))
                loss.backward()
                losses.append(loss.item())
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses if not self.is_pipe or self.mesh.get_local_rank("pipe") else []

    def values(self) -> dict[str, Any]:
        """Return the parameters, buffers and states of this rank's place."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return buffers | whole_of(self.zero, self.model, *self.optimizers)


# -- moves ------------------------------------------------------------------------------------------------------------

Found = tuple[dict[str, Any], list[float]]


def move(folder: str, kind: str, pairs: list[tuple[Layout, Layout]], options: dict[str, Any]) -> list[list[Found]]:
    """Save in one layout and load in another; return values and next losses of both where ranks have them."""
    result = []
    for number, (first, second) in enumerate(pairs):
        path, found = f"{folder}/step-{number}", []
        if (mesh := laid(first[0])) is not None:
            run = Run(mesh, first, kind, seed=1, **options)
            run.train(range(2))
            run.zero.save(path, {"place": number}, asynchronous=bool(number % 2))
            values = run.values()
            run.zero.wait()
            found.append((values, run.train(range(2, 4))))
        dist.barrier()
        if (mesh := laid(second[0])) is not None:
            run = Run(mesh, second, kind, seed=2, **options)
            assert run.zero.load(path).extra == {"place": number}
            values = run.values()
            found.append((values, run.train(range(2, 4))))
        result.append(found)
    return result


def check_moves(
    tmp_path: Path, kind: str, pairs: list[tuple[Layout, Layout]], world: int = WORLD, **options: Any
) -> None:
    by_rank = run_ranks(move, world, str(tmp_path), kind, pairs, options, timeout_s=TIMEOUT_S * (1 + len(pairs) // 8))
    for number, pair in enumerate(pairs):
        verify(path := tmp_path / f"step-{number}")
        alone = Run(None, ((), 1, 0), kind, seed=3)
        assert alone.zero.load(path).step == number
        expected, losses, named = alone.values(), alone.train(range(2, 4)), set[str]()
        for found in (found for rank in by_rank for found in rank[number]):
            values, next_losses = found
            named |= values.keys()
            assert_same({name: expected[name] for name in values}, values, str(pair))
            assert not next_losses or next_losses == pytest.approx(losses, rel=1e-5), pair
        assert named == expected.keys(), pair


def drawn(kind: str, count: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts, of which one at least is a pipe."""
    draw = random.Random(kind)
    can = [one for one in LAYOUTS if kind != "whole" or "tensor" not in dict(one[0])]
    pairs = [(draw.choice([one for one in PIPES if one in can]), draw.choice(can)) for _ in range(count)]
    return [pair if draw.random() < 0.7 else (pair[1], pair[0]) for pair in pairs]


@pytest.mark.product
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_layout_is_read_by_any_other(kind: str, tmp_path: Path) -> None:
    """30 moves of each kind of optimizers; a rotation has five of them."""
    check_moves(tmp_path, kind, drawn(kind, 30) if is_whole() else third(drawn(kind, 30))[1:6])


@pytest.mark.rotates
def test_three_axes_on_eight_ranks(tmp_path: Path) -> None:
    copies, parts = (("pipe", 2), ("replicate", 2), ("shard", 2)), (("shard", 2), ("pipe", 2), ("tensor", 2))
    pairs = [((copies, 1, 1), (parts, 3, 3)), ((parts, 0, 2), (copies, 2, 1))]
    check_moves(tmp_path, "momentum", pairs, 8)


def test_offload_and_messages(tmp_path: Path) -> None:
    check_moves(tmp_path, "momentum", [(PIPES[2], LAYOUTS[-1])], offload="host", settings={"shared_memory": False})


def test_generators_and_the_loss_scale_come_back(tmp_path: Path) -> None:
    by_rank = run_ranks(resume, WORLD, str(tmp_path / "step-2"), timeout_s=TIMEOUT_S)
    assert len({str(draws) for _, draws, _ in by_rank}) == WORLD
    for before, after, scales in by_rank:
        assert before == after
        assert scales == [2.0**15, 2.0**15]


def resume(path: str) -> tuple[list[float], list[float], list[float | None]]:
    """Save and load with fp16, after an overflow; return numbers drawn after the save and the load, and scales."""
    axes, options = PIPES[0][0], {"precision": zs.Precision(loss_scale="dynamic")}
    mesh = laid(axes)
    run = Run(mesh, (axes, 2, 2), "grouped", seed=1, **options)
    bad = run.model.head.weight.register_hook(lambda grad: grad * float("inf")) if dist.get_rank() == 3 else None
    run.train(range(1))
    if bad is not None:
        bad.remove()
    torch.manual_seed(dist.get_rank())
    run.zero.save(path)
    before, scale = torch.rand(3).tolist(), run.zero.loss_scale
    other = Run(mesh, (axes, 1, 1), "grouped", seed=2, **options)
    other.zero.load(path)
    return before, torch.rand(3).tolist(), [scale, other.zero.loss_scale]


# -- what several places have -----------------------------------------------------------------------------------------


class Noting(nn.Linear):
    """A linear layer with extra state."""

    note = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state["note"]


class Tied(nn.Module):
    """A linear layer that both places have, and one that only this place has."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.tied = Noting(4, 4)
        self.tied.register_buffer("shift", torch.ones(2))
        self.add_module(f"own{place}", Noting(4, 4))
        if place:  # a head that is tied to the embedding
            self.head = nn.Linear(4, 4, bias=False)
            self.head.weight = self.tied.weight


def tied(folder: str) -> dict[str, str]:
    """Save what both places have, equal and different in each way; return the errors."""
    mesh, found = laid(PIPES[0][0]), dict[str, str]()
    assert mesh is not None
    place = mesh.get_local_rank("pipe")
    torch.manual_seed(1)
    model = Tied(place)
    optimizer = AdamW([{"params": list(model.parameters())}, {"params": []}], lr=0.01)
    zero = zs.shard(model, optimizer, stage=2, mesh=mesh, settings=SETTINGS)
    (model.tied(torch.ones(1, 4)) + getattr(model, f"own{place}")(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    getattr(model, f"own{place}").note = 2 + place
    zero.save(f"{folder}/step-1")

    def save(case: str, path: str = "step-2", extra: int = 0) -> None:
        found[case] = raised(lambda: zero.save(f"{folder}/{path}", {"number": extra}))
        assert not [name for name in os.listdir(folder) if name not in ("LATEST", "step-1")], case

    def change(case: str, *, states: bool = False) -> None:
        """Change one value at place 1, save, and change it back."""
        for back in (False, True):
            with zero.gathered(states=states, writeback=True), torch.no_grad():
                value = optimizer.state[model.tied.weight]["exp_avg"] if states else model.tied.weight
                value[3, 2] += (1 - 2 * back) * place
            if not back:
                save(case)

    change("value")
    change("state", states=True)
    masters = [master for master in optimizer.param_groups[0]["params"] if optimizer.state.get(master)]
    for step in (1, -1):
        for master in masters:
            optimizer.state[master]["step"] += step * place
        if step > 0:
            save("counter")
    model.tied.shift += place
    save("buffer")
    model.tied.shift -= place
    model.tied.note += place
    save("module")
    original, model.tied.shift = model.tied.shift, torch.ones(2 + place)
    save("shape of a buffer")
    model.tied.shift = original
    optimizer.param_groups[1]["weight_decay"] += place
    save("options")
    optimizer.param_groups[1]["weight_decay"] -= place
    save("extra", extra=place)
    save("path", path=f"step-{2 + place}")
    groups = optimizer.param_groups
    optimizer.param_groups = groups[: 2 - place]
    save("groups")
    optimizer.param_groups = groups
    getattr(model, f"own{place}").note = 0
    zero.load(f"{folder}/step-1")
    zero.save(f"{folder}/step-2")
    return found


PLACES = r"place 0 of the pipe \(ranks 0, 1\).*place 1 of the pipe \(ranks 2, 3\)"
TIED = {
    "value": rf"'tied\.weight' has different values at {PLACES}.*Nothing was committed",
    "state": rf"'0/exp_avg/tied\.weight' has different values at {PLACES}",
    "counter": rf"the state of 'tied\.\w+' in optimizer 0 is .*{PLACES}",
    "module": rf"get_extra_state\(\) of module 'tied' is {{'note': 1}} at {PLACES.split('.*')[1]}, and {{'note': 0}}",
    "buffer": rf"'tied\.shift' has different values at {PLACES}",
    "shape of a buffer": rf"'tied\.shift' is F32 \(2,\) at {PLACES.split('.*')[0]}, and F32 \(3,\) at place 1",
    "options": rf"the options of group 1 of optimizer 0 are .*'weight_decay': 0\.01.* at {PLACES}",
    "extra": r"extra, or the optimizers' hyper-parameters or step counters, differ between ranks",
    "path": r"ranks were given different paths, steps or options",
    "groups": rf"the number of groups of optimizer 0 is 2 at {PLACES}",
}


def test_what_two_places_have_is_saved_once_and_must_be_equal(tmp_path: Path) -> None:
    by_rank = run_ranks(tied, WORLD, str(tmp_path), timeout_s=TIMEOUT_S)
    for case, words in TIED.items():
        assert {found[case] for found in by_rank} == {by_rank[0][case]}, case
        assert re.search(f"CheckpointError: .*{words}", by_rank[0][case]), (case, by_rank[0][case])
    for path in (tmp_path / "step-1", tmp_path / "step-2"):
        verify(path)
        manifest, _ = read_manifest(path)
        assert [spec.name for spec in manifest.tensors].count("tied.weight") == 1
        assert manifest.aliases == {"head.weight": "tied.weight"}
    # One process has the model as a whole.
    model = Tied(1)
    model.own0 = Noting(4, 4)
    optimizer = AdamW([{"params": list(model.parameters())}, {"params": []}])
    zero = zs.shard(model, optimizer)
    zero.load(tmp_path / "step-2")
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert [one.note for one in (model.tied, model.own0, model.own1)] == [0, 2, 3]


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(folder: str) -> dict[str, str]:
    """Return the errors of saves and loads that one place makes alone, and of checkpoints of something else."""
    mesh, found, rank = laid(PIPES[0][0]), dict[str, str](), dist.get_rank()
    assert mesh is not None
    place = mesh.get_local_rank("pipe")
    for case in ("save", "load"):
        zero = Run(mesh, PIPES[0], "momentum", seed=1).zero
        act = functools.partial(getattr(zero, case), f"{folder}/x") if place else functools.partial(zero.agree, True)
        found[f"{case} at one place"] = raised(act)
    run = Run(mesh, PIPES[0], "momentum", seed=1)
    run.train(range(1))
    path = run.zero.save(f"{folder}/whole")
    part = zs.shard(Part(models.build(models.Stack, DEPTH), place, 2), mesh=mesh["shard"], settings=SETTINGS)
    part.save(f"{folder}/part-{place}")
    before = run.values()

    def load(case: str, path: str | Path, **options: bool) -> None:
        found[case] = raised(lambda: run.zero.load(path, **options))
        assert_same(before, run.values(), case)

    dist.barrier()
    load("a part", f"{folder}/part-0", model_only=True)
    load("different", f"{folder}/part-{place}", model_only=True)
    for case, act in {
        "missing": lambda: os.rename(path / FILE, path / "away"),
        "doubled": lambda: shutil.copy(path / FILE, path / FILE.replace("00003-of", "00005-of")),
        "another's": lambda: shutil.copy(path / FILE.replace("00003-of", "00001-of"), path / FILE),
    }.items():
        if rank == 0:
            act()
        dist.barrier()
        load(case, path)
        dist.barrier()
        if rank == 0 and case == "missing":
            os.rename(path / "away", path / FILE)
        elif rank == 0 and case == "doubled":
            os.remove(path / FILE.replace("00003-of", "00005-of"))
        dist.barrier()
    return found


FILE = "params-00003-of-00004.safetensors"
REFUSED = {
    "save at one place": r"(?s)different places of the program:.*agree\(''\).*zero\.save\(\)",
    "load at one place": r"(?s)different places of the program:.*agree\(''\).*zero\.load\(\)",
    "a part": r"'blocks\.\d\.\S+' is in the model and not in the checkpoint.*Nothing in memory was changed",
    "different": r"(?s)different places of the program:.*part-0.*part-1",
    "missing": rf"{FILE}: cannot be (read|opened).*Nothing in memory was changed",
    "doubled": r"params-00005-of-00004\.safetensors: is not of this checkpoint.*Nothing in memory was changed",
    "another's": rf"{FILE}: .*Nothing in memory was changed",
}


def test_bad_input_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    by_rank = run_ranks(refused, WORLD, str(tmp_path), timeout_s=TIMEOUT_S)
    for case, words in REFUSED.items():
        for found in by_rank:
            assert re.search(words, found[case]), (case, found[case])
            assert "different places" in words or found[case] == by_rank[0][case]


# -- faults -----------------------------------------------------------------------------------------------------------


def fail(folder: str, culprit: int) -> tuple[list[str], list[str]]:
    """Save and load again and again; the n-th file operation of one rank fails. Return the errors of both."""
    mesh = laid(PIPES[0][0])
    run = Run(mesh, (PIPES[0][0], 2, 2), "momentum", seed=1)
    run.train(range(1))
    is_culprit, saves, loads = dist.get_rank() == culprit, list[str](), list[str]()
    for place in range(1, 60):
        target, text = Path(folder, f"step-{place}"), ""
        with Failing(place if is_culprit else -1, refuse) as failing:
            try:
                run.zero.save(target, asynchronous=bool(place % 2))
                run.zero.wait()
            except zs.CheckpointError as error:
                text = str(error)
        dist.barrier()
        assert target.exists() != bool(text) or "committing" in text
        assert not [name for name in os.listdir(folder) if name.startswith(".tmp-step")]
        saves.append(text)
        if not run.zero.agree(not is_culprit or failing.count >= place):
            break
    before, newest = run.values(), zs.latest(folder)
    run.train(range(1, 2))
    after = run.values()
    for place in range(1, 200, 3):
        with Failing(place if is_culprit else -1, refuse) as failing:
            loads.append(raised(lambda: run.zero.load(newest)).partition(": ")[2])
        if "Nothing in memory was changed" in loads[-1]:
            assert_same(after, run.values(), f"operation {place}")
        if not run.zero.agree(not is_culprit or failing.count >= place):
            break
    assert_same(before, run.values(), "the last load")
    return saves, loads


def test_a_failure_at_one_place_ends_in_one_error_on_all(tmp_path: Path) -> None:
    by_rank = run_ranks(fail, WORLD, str(tmp_path), 3, timeout_s=2 * TIMEOUT_S)
    assert all(texts == by_rank[0] for texts in by_rank)
    saves, loads = by_rank[0]
    assert sum("failed on rank 3" in text and "Errno" in text for text in saves) > 8
    assert sum("Nothing in memory was changed" in text for text in loads) > 8
    assert saves[-1] == loads[-1] == ""
    for path in tmp_path.glob("step-*"):
        verify(path)


def save_until_killed(folder: str, culprit: int, after: int, options: dict[str, Any]) -> None:
    run = Run(laid(PIPES[0][0]), PIPES[0], "momentum", seed=1)
    run.train(range(1))
    run.zero.save(f"{folder}/step-1", **options)
    run.zero.wait()
    with Failing(after if dist.get_rank() == culprit else -1, die):
        for step in range(2, 100):
            run.train(range(step - 1, step))
            run.zero.save(f"{folder}/step-{step}", **options)


@pytest.mark.product
@pytest.mark.parametrize("options", [{}, {"asynchronous": True}], ids=str)
@pytest.mark.parametrize(("culprit", "after"), [(3, 2), (0, 24), (2, 9)])
def test_a_kill_at_one_place_loses_no_checkpoint(
    tmp_path: Path, culprit: int, after: int, options: dict[str, Any]
) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(save_until_killed, WORLD, str(tmp_path), culprit, after, options, timeout_s=TIMEOUT_S)
    assert caught.value.errors[culprit].type_name == "SIGKILL", caught.value
    found = latest(tmp_path)
    assert found is not None
    for path in tmp_path.glob("step-*"):
        verify(path)
    alone = Run(None, ((), 3, 0), "momentum", seed=2)
    assert alone.zero.load(found).step == int(found.name.removeprefix("step-"))
