"""Checkpoints of other programs: FSDP2's train on here, DeepSpeed's and the Hub's load, and none runs code."""

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zeroshard as zs
from tests.oracle import randn, seed
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from . import small
from .rig import TIMEOUT_S
from .test_dcp import shard_by_fsdp2, whole

BEFORE, AFTER = 3, 3
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Rows that two ranks do not divide, tied weights, buffers, a scalar, a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.norm = nn.BatchNorm1d(5)
        self.head, self.twin = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.twin.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.twin(self.head(self.norm(x))) * self.scale


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that differ in an option."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for name, p in trained.items() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for name, p in trained.items() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(groups_of(model), lr=0.05, betas=(0.8, 0.9)),
    "SGD": lambda model: torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Make steps with one batch on all ranks, so that any number of ranks has the same gradients."""
    losses = []
    for number in steps:
        loss = model(randn(4, 5, key=(number,))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return whole parameters, buffers and states by name."""
    found = {name: whole(value) for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found.update(
            {f"{names[id(parameter)]}/{key}": whole(value) for key, value in state.items() if value is not None}
        )
    return found


def write_fsdp2(folder: str, kind: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Train under FSDP2, save in three layouts, train on."""
    seed(3)
    model = Net()
    shard_by_fsdp2(model)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(BEFORE))
    states, optim = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": states, "optim": optim}, "epoch": 7}, checkpoint_id=f"{folder}/nested")
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({**states, "optimizer": flat, "loader": {"step": torch.tensor(3)}}, checkpoint_id=f"{folder}/flat")
    dcp.save(states, checkpoint_id=f"{folder}/model")
    now = tensors_of(model, optimizer)
    losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    return now, losses, tensors_of(model, optimizer)


def go_on(path: str, kind: str, stage: int) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor], int]:
    """Load an imported checkpoint and train on."""
    seed(4)
    model = Net()
    optimizer = OPTIMIZERS[kind](model)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=8))
    loaded = zero.load(path)
    with zero.gathered(states=True):
        now = tensors_of(model, optimizer)
    losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    with zero.gathered(states=True):
        return now, losses, tensors_of(model, optimizer), loaded.step


@pytest.fixture(scope="module")
def of_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return the folder and the values of an FSDP2 run of 2 ranks, which is made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def run(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, run_ranks(write_fsdp2, 2, str(folder), kind, timeout_s=TIMEOUT_S)[0]
            for layout in ("nested", "flat"):
                import_checkpoint(folder / layout, folder / f"{layout}-step-3")
        return made[kind]

    return run


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_fsdp2s_checkpoint_trains_on(of_fsdp2: Callable[[str], tuple[Path, Any]], world: int, stage: int) -> None:
    kind = "SGD" if (world, stage) == (2, 3) else "AdamW"
    folder, (now, losses, after) = of_fsdp2(kind)
    layout = ("nested", "flat")[stage % 2]
    for found in run_ranks(go_on, world, str(folder / f"{layout}-step-3"), kind, stage, timeout_s=TIMEOUT_S):
        assert found[0].keys() == now.keys()
        assert found[3] == (BEFORE if kind == "AdamW" else 0)
        for name, value in now.items():
            assert torch.equal(found[0][name], value), name
        torch.testing.assert_close(found[1], losses, rtol=0, atol=1e-6)
        for name, value in after.items():
            torch.testing.assert_close(found[2][name], value, rtol=0, atol=1e-6, msg=name)


def test_both_layouts_are_one_checkpoint(of_fsdp2: Callable[[str], tuple[Path, Any]]) -> None:
    folder, _ = of_fsdp2("AdamW")
    assert small.command("diff", folder / "nested-step-3", folder / "flat-step-3") == (0, [], [])


def test_the_command_says_what_it_wrote(of_fsdp2: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = of_fsdp2("AdamW")
    code, lines, _ = small.command("import", folder / "nested", tmp_path / "step-1")
    assert code == 0
    assert "states of AdamW; load it with zero.load(path)" in lines[0]
    for source, options in (("model", []), ("nested", ["--model-only", "--model", "app.model"])):
        code, lines, _ = small.command("import", folder / source, tmp_path / source, *options)
        assert code == 0
        assert "model_only=True" in lines[0]
        zs.shard(Net()).load(tmp_path / source, model_only=True)
    code, _, problems = small.command("import", folder / "nested", tmp_path / "b", "--model", "model")
    assert code == 1
    assert "no tensors of a model at 'model'; there are ['app.model']" in problems[0]
    assert small.command("import", folder / "nested-step-3", tmp_path / "c")[0] == 1


def test_states_under_numbers_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(zs.CheckpointError, match=r"under numbers, not names.*--model-only"):
        import_checkpoint(tmp_path / "a", tmp_path / "b")
    import_checkpoint(tmp_path / "a", tmp_path / "b", model_only=True)
    verify(tmp_path / "b")


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adam])
def test_an_optimizer_is_recognized_or_asked_for(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """NAdam and RAdam have an option that tells Adam from AdamW, and were taken for Adam."""
    seed(3)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.05)
    train(model, optimizer, range(BEFORE))
    states, optim = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optim": optim}, checkpoint_id=tmp_path / "a", no_dist=True)
    seed(4)
    other = Net()
    again = kind(other.parameters(), lr=0.05)
    zero = zs.shard(other, again)
    named = None
    if kind is not torch.optim.Adam:
        named = kind.__name__
        with pytest.raises(zs.CheckpointError, match=r"of which class its optimizer is\. Give it with --optimizer"):
            import_checkpoint(tmp_path / "a", tmp_path / "b")
        taken = import_checkpoint(tmp_path / "a", tmp_path / "b", optimizer="Adam")
        with pytest.raises(zs.CheckpointError, match=r"\['Adam'\] .* here\. If an import .* with --optimizer CLASS"):
            zero.load(taken)
    zero.load(import_checkpoint(tmp_path / "a", tmp_path / "c", optimizer=named))
    steps = range(BEFORE, BEFORE + AFTER)
    assert train(other, again, steps) == train(model, optimizer, steps)


class Extra(nn.Linear):
    """Has extra state: a tensor alone, or one in a mapping."""

    def __init__(self, state: object) -> None:
        super().__init__(3, 2)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def test_extra_states_of_modules_are_named(tmp_path: Path) -> None:
    states = [torch.ones(99), {"seen": 3, "of": torch.ones(99)}]
    model = nn.Sequential(*map(Extra, states))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.warns(UserWarning, match=r"not imported: '0\._extra_state', '1\._extra_state'\. Set it after"):
        import_checkpoint(tmp_path / "a", tmp_path / "b")
    other = nn.Sequential(Extra(1), Extra(2))
    zs.shard(other).load(tmp_path / "b", model_only=True)
    assert [one.state for one in other] == [1, 2]
    assert torch.equal(other[1].weight, model[1].weight)


# -- DeepSpeed's zero_to_fp32, and older files of the Hub --------------------------------------------------------------


def test_state_dicts_of_torch_save_are_read(tmp_path: Path) -> None:
    seed(1)
    model = Net()
    values = model.state_dict()
    torch.save(values, tmp_path / "pytorch_model.bin")
    names = sorted(values)
    (parts := tmp_path / "parts").mkdir()
    homes = {}
    for number, some in enumerate((names[:4], names[4:]), 1):
        torch.save({name: values[name] for name in some}, parts / f"pytorch_model-{number:05}-of-00002.bin")
        homes.update(dict.fromkeys(some, f"pytorch_model-{number:05}-of-00002.bin"))
    index = parts / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    for number, source in enumerate((tmp_path / "pytorch_model.bin", tmp_path, parts)):
        other = Net()
        zero = zs.shard(other)
        zero.load(import_checkpoint(source, tmp_path / f"step-{number}"), model_only=True)
        with zero.gathered():
            assert all(torch.equal(other.state_dict()[name], value) for name, value in values.items())
    index.write_text(index.read_text().replace("00002-of", "00001-of"))
    with pytest.raises(zs.CheckpointError, match="is not in pytorch_model-00001"):
        import_checkpoint(parts, tmp_path / "wrong")


def test_deepspeeds_own_folder_is_refused_with_the_way(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(zs.CheckpointError, match=r"zero_to_fp32\.py"):
        import_checkpoint(tmp_path, tmp_path / "new")


def test_the_folder_above_names_what_it_has(tmp_path: Path) -> None:
    small_dcp(tmp_path / "step-7")
    with pytest.raises(zs.CheckpointError, match=r"nor \.metadata; name one of the 1 checkpoints .* such as step-7"):
        import_checkpoint(tmp_path, tmp_path / "new")
    with pytest.raises(zs.CheckpointError, match="the folder does not exist"):
        import_checkpoint(tmp_path / "none", tmp_path / "new")


# -- damage and malice ------------------------------------------------------------------------------------------------


class Runs:
    """Unpickled without care, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class SetsAttributes:
    """Unpickled, it sets attributes of a class of torch's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkStorageMetadata, (0, 0), (None, {"offsets": 1})


def small_dcp(folder: Path) -> Path:
    """Write a folder of torch.distributed.checkpoint with one tensor."""
    dcp.save({"weight": torch.arange(6.0)}, checkpoint_id=folder, no_dist=True)
    return folder / ".metadata"


def change(path: Path, how: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


def two_parts(metadata: Metadata) -> None:
    """Describe a tensor by parts that leave one element out and have one twice."""
    parts = [ChunkStorageMetadata(torch.Size([at]), torch.Size([3])) for at in (0, 2)]
    metadata.state_dict_metadata["weight"] = TensorStorageMetadata(TensorProperties(), torch.Size([6]), parts)


@pytest.mark.parametrize("value", ["runs", "sets", "class", "not metadata", "no pickle"])
def test_metadata_that_would_run_code_is_refused(tmp_path: Path, value: str) -> None:
    ran = tmp_path / "ran"
    path = small_dcp(tmp_path / "a")
    before = dict(vars(ChunkStorageMetadata))
    values = {
        "runs": pickle.dumps([Runs(ran)]),
        "sets": pickle.dumps(SetsAttributes()),
        # A pickle may set attributes of objects, not of classes: this one sets "__init__" of a class to None.
        "class": b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n(N}S'__init__'\nNst" + b"b.",
        "not metadata": pickle.dumps({"a": 1}),
        "no pickle": b"\x00\x01",
    }
    path.write_bytes(values[value])
    with pytest.raises(zs.CheckpointError, match=re.escape(f"{path}: ")):
        import_checkpoint(tmp_path / "a", tmp_path / "b")
    assert not ran.exists()
    assert dict(vars(ChunkStorageMetadata)) == before
    assert not (tmp_path / "b").exists()


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "is not a file of this folder": lambda m: [setattr(i, "relative_path", "../x") for i in m.storage_data.values()],
    "cannot be opened": lambda m: [setattr(i, "relative_path", "gone.distcp") for i in m.storage_data.values()],
    "ends at byte": lambda m: [setattr(i, "length", 10**9) for i in m.storage_data.values()],
    "lies nowhere": lambda m: [setattr(i, "offset", -1) for i in m.storage_data.values()],
    "elements once": two_parts,
    "cannot be read": lambda m: m.storage_data.clear(),
    "no tensors of a model": lambda m: m.state_dict_metadata.clear(),
    "way of names": lambda m: m.planner_data.update(weight=(1.5,)),
    "builtins.object": lambda m: m.planner_data.update(weight=(object,)),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_damaged_folder_is_refused(tmp_path: Path, message: str) -> None:
    change(small_dcp(tmp_path / "a"), CHANGES[message])
    with pytest.raises(zs.CheckpointError, match=re.escape(message)):
        import_checkpoint(tmp_path / "a", tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_tensor_that_would_run_code_is_refused(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = small_dcp(tmp_path / "a")
    torch.save([Runs(ran)], data := io.BytesIO())
    (tmp_path / "a" / "__0_0.distcp").write_bytes(data.getvalue())
    change(path, lambda m: [setattr(info, "length", len(data.getvalue())) for info in m.storage_data.values()])
    with pytest.raises(zs.CheckpointError, match="'weight' cannot be read"):
        import_checkpoint(tmp_path / "a", tmp_path / "b")
    torch.save({"weight": Runs(ran)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(zs.CheckpointError, match="cannot be read without running code"):
        import_checkpoint(tmp_path / "pytorch_model.bin", tmp_path / "b")
    for value in ({"step": 3}, [1], {1: torch.ones(1)}):
        torch.save(value, tmp_path / "other.pt")
        with pytest.raises(zs.CheckpointError, match="state dict of"):
            import_checkpoint(tmp_path / "other.pt", tmp_path / "b")
    assert not ran.exists()
    assert not (tmp_path / "b").exists()


def test_the_planted_pickles_do_run_where_nobody_looks(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Runs(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()
    assert pickle.loads(pickle.dumps(SetsAttributes())).offsets == 1
