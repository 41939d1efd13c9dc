"""verify, ls, diff, export and import: without torch, and with transformers on the other side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import zeroshard as zs
from tests.contract.source import REPOSITORY
from zeroshard.checkpoint.diff import as_floats, diff
from zeroshard.checkpoint.folders import FolderReader, export
from zeroshard.checkpoint.imports import import_checkpoint
from zeroshard.checkpoint.verify import list_checkpoints, verify
from zeroshard.cli import main
from zeroshard.testing import run_ranks

from . import rig, small
from .rig import TIMEOUT_S, Trainer

# The package's own `__init__` imports torch; a bare one in its place shows what these modules import themselves.
WITHOUT_TORCH = """
import sys, types
package = types.ModuleType("zeroshard")
package.__path__ = [{package!r}]
sys.modules["zeroshard"] = package
sys.modules["torch"] = None
from zeroshard.checkpoint import checkpoint_commands, diff, folders, verify
{planted}
verify.verify({path!r})
assert diff.diff({path!r}, {path!r}) == []
folders.export({path!r}, {target!r})
print("torch" in sys.modules and sys.modules["torch"])
"""


def run_without_torch(path: Path, target: Path, planted: str = "") -> subprocess.CompletedProcess[str]:
    program = WITHOUT_TORCH.format(
        package=str(REPOSITORY / "zeroshard"), path=str(path), target=str(target), planted=planted
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)


def test_the_tools_need_no_torch(tmp_path: Path) -> None:
    done = run_without_torch(small.write(tmp_path), tmp_path / "exported")
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.rotates
def test_an_import_of_torch_would_be_found(tmp_path: Path) -> None:
    done = run_without_torch(small.write(tmp_path), tmp_path / "exported", "from zeroshard.checkpoint import values")
    assert done.returncode == 1
    assert "import of torch halted" in done.stderr


def test_differences_are_counted(tmp_path: Path) -> None:
    trainer = small.Small(1).train(1)
    one = trainer.zero.save(tmp_path / "step-1", {"a": 1})
    with trainer.zero.gathered(writeback=True), torch.no_grad():
        trainer.model.weight[0, 1] += 0.5
    other = trainer.zero.save(tmp_path / "step-2", {"a": 2})
    found = {difference.name: difference.what for difference in diff(one, other)}
    assert found == {
        "weight": "1 of 2 elements differ, by at most 0.5",
        "step": "1 and 2",
        "extra.json": "what the program gave, or hyper-parameters and counters, differ",
    }
    assert diff(one, one) == []


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "I64", "U8", "BOOL", "C64"])
def test_numbers_are_read_as_torch_reads_them(dtype: str) -> None:
    from zeroshard.checkpoint.values import bytes_of, tensor_of

    kind = tensor_of(bytearray(8), dtype).dtype
    values = torch.tensor([0.0, 1.0, 2.5, 100.0]).to(kind)
    expected = values.abs().double() if kind.is_complex else values.double()
    assert as_floats(bytearray(bytes_of(values)), dtype).tolist() == expected.tolist()


def tiny_gpt2(key: int) -> GPT2LMHeadModel:
    torch.manual_seed(key)
    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def export_gpt2(folder: str) -> torch.Tensor:
    """Save a sharded GPT-2; return its logits."""
    model = tiny_gpt2(3)
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    zero.save(f"{folder}/step-1")
    with zero.gathered(), torch.no_grad():
        return model(torch.arange(9)[None]).logits


@pytest.mark.rotates
def test_transformers_reads_an_export_and_its_files_are_imported(tmp_path: Path) -> None:
    logits = run_ranks(export_gpt2, 2, str(tmp_path), timeout_s=TIMEOUT_S)[0]
    tiny_gpt2(3).config.save_pretrained(tmp_path)
    target = export(tmp_path / "step-1", tmp_path / "hf", config=tmp_path / "config.json", file_bytes=4000)
    assert len(list(target.glob("model-*.safetensors"))) > 2
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.arange(9)[None]).logits, logits)
    # And back: what transformers writes is read by two ranks, in slices, and as a checkpoint.
    model.save_pretrained(tmp_path / "again")
    for way in ("folder", "checkpoint"):
        for got in run_ranks(import_gpt2, 2, str(tmp_path), way, timeout_s=TIMEOUT_S):
            assert torch.equal(got, logits)


def import_gpt2(folder: str, way: str) -> torch.Tensor:
    model = tiny_gpt2(4)
    zero = zs.shard(model, stage=3)
    if way == "folder":
        zero.load(f"{folder}/again", model_only=True)
    else:
        path = Path(folder, f"imported-{zero.mesh.rank}")
        if zero.mesh.rank == 0:
            import_checkpoint(f"{folder}/again", path)
        dist.barrier()
        zero.load(Path(folder, "imported-0"), model_only=True)
    with zero.gathered(), torch.no_grad():
        return model(torch.arange(9)[None]).logits


def export_zoo(folder: str) -> dict[str, torch.Tensor]:
    trainer = Trainer.make(1)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/step-1")
    with trainer.zero.gathered():
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.rotates
def test_an_export_is_row_major_and_imports_into_other_strides(tmp_path: Path) -> None:
    """The convolution is channels-last in memory, and plain in the exported file."""
    expected = run_ranks(export_zoo, 3, str(tmp_path), timeout_s=TIMEOUT_S)[0]
    reader = FolderReader(export(tmp_path / "step-1", tmp_path / "plain"))
    assert set(expected) - set(reader.specs) == {"head.weight"}
    for name, spec in reader.specs.items():
        assert (
            bytes(reader.read(name, 0, spec.numel))
            == expected[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    for got in run_ranks(import_zoo, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def import_zoo(folder: str) -> dict[str, torch.Tensor]:
    trainer = Trainer.make(3, key=4)
    trainer.zero.load(f"{folder}/plain", model_only=True)
    with trainer.zero.gathered():
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}


class Tied(nn.Module):
    """Two linear layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight


def test_tied_names_in_a_folder_must_hold_the_same(tmp_path: Path) -> None:
    model = Tied()
    zero = zs.shard(model)
    values = {name: torch.randn(tensor.shape) for name, tensor in Tied().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(zs.CheckpointError, match=r"'other.weight' is tied to 'one.weight' in the model, and has other"):
        zero.load(tmp_path, model_only=True)
    values["other.weight"] = values["one.weight"].clone()
    save_file(values, tmp_path / "model.safetensors")
    assert zero.load(tmp_path, model_only=True) == zs.Loaded(0, {})
    with zero.gathered():
        assert torch.equal(model.other.weight, values["one.weight"])
    with pytest.raises(zs.CheckpointError, match=r"has no manifest.json"):
        zero.load(tmp_path)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_tied_name_in_a_folder_may_be_any(is_imported: bool, tmp_path: Path) -> None:
    values = {name: torch.randn(tensor.shape) for name, tensor in Tied().state_dict().items() if name != "one.weight"}
    save_file(values, path := tmp_path / "model.safetensors")
    if is_imported:
        path = import_checkpoint(path, tmp_path / "step-1")
    model = Tied()
    zero = zs.shard(model, stage=3)
    zero.load(path, model_only=True)
    with zero.gathered():
        assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items() if name in values)
        assert model.one.weight is model.other.weight


def test_a_buffer_may_lie_in_memory_as_it_likes(tmp_path: Path) -> None:
    def made(first: int) -> tuple[nn.Module, zs.Zero]:
        model = nn.Linear(2, 2)
        model.register_buffer("turned", torch.arange(first, first + 6).reshape(2, 3).t())
        model.register_buffer("sliced", torch.arange(first, first + 6.0)[::2])
        return model, zs.shard(model)

    model, zero = made(0)
    zero.save(tmp_path / "a")
    other, twin = made(10)
    twin.load(tmp_path / "a")
    assert torch.equal(other.turned, model.turned)
    assert torch.equal(other.sliced, model.sliced)
    assert other.turned.stride() == (1, 3)


def test_a_dtype_is_cast_only_on_demand(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).bfloat16()
    zero = zs.shard(model)
    zero.save(tmp_path / "a")
    wide = nn.Linear(3, 2)
    other = zs.shard(wide)
    with pytest.raises(zs.CheckpointError, match=r"'bias' is F32 in the model and BF16 in the checkpoint \(cast=True"):
        other.load(tmp_path / "a")
    other.load(tmp_path / "a", cast=True)
    with zero.gathered(), other.gathered():
        assert torch.equal(wide.weight, model.weight.float())


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    path, seen = small.write(tmp_path), []
    verify(path, lambda done, total: seen.append((done, total)))
    total = sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_commands(tmp_path: Path) -> None:
    tmp_path = tmp_path / "all" / "runs"
    tmp_path.mkdir(parents=True)
    one, other = small.write(tmp_path, 1), small.write(tmp_path, 2)
    code, lines, _ = small.command("ls", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in lines] == ["step-1", "step-2"]
    assert "step        2" in lines[1]
    assert small.command("ls", tmp_path.parent)[1] == [f"{tmp_path.name}/{line}" for line in lines]
    assert small.command("ls", one)[1] == lines[:1]
    (tmp_path / "empty" / "below").mkdir(parents=True)
    assert small.command("ls", tmp_path / "empty")[1] == [
        f"{tmp_path}/empty: no checkpoints, neither here nor in folders below"
    ]
    code, lines, _ = small.command("verify", one, other)
    assert (code, [line.partition(": ")[2][:5] for line in lines]) == (0, ["whole", "whole"])
    assert small.command("diff", one, one)[:2] == (0, [])
    code, lines, _ = small.command("diff", one, other)
    assert code == 1
    assert "step: 1 and 2" in lines
    assert small.command("export", one, tmp_path / "hf")[0] == 0
    assert json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"].keys() == {
        "bias",
        "count",
        "weight",
    }
    assert small.command("import", tmp_path / "hf", tmp_path / "step-3")[0] == 0
    verify(tmp_path / "step-3")
    (one / "extra.json").write_bytes(b"")
    for command in (("verify", one), ("diff", one, other), ("export", one, tmp_path / "x"), ("import", one, other)):
        code, lines, problems = small.command(*command)
        assert (code, lines, len(problems)) == (2 if command[0] == "diff" else 1, [], 1), command
    assert not (tmp_path / "x").exists()


def test_the_command_line_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small.write(tmp_path)
    for arguments, status in ((["ls", tmp_path], 0), (["verify", path], 0), (["verify", tmp_path / "none"], 1)):
        monkeypatch.setattr(sys, "argv", ["zeroshard", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code or 0) == status
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["step-2", f"{path}:"]
    assert err == f"zeroshard: {tmp_path / 'none'}: is not a checkpoint: the folder does not exist.\n"


def test_a_list_shows_what_is_damaged(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    (tmp_path / "else").mkdir()
    (path / "manifest.json").write_bytes(b"x")
    (one,) = list_checkpoints(tmp_path)
    assert "manifest.json: its last line is not a checksum" in one.problem
    with pytest.raises(zs.CheckpointError, match="the folder does not exist"):
        list_checkpoints(tmp_path / "nowhere")


def test_a_folder_that_is_a_checkpoint_has_no_latest_one(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    for one, said in ((path, r"this is a checkpoint\. Load it, or"), (path / "manifest.json", "this is a file")):
        with pytest.raises(zs.CheckpointError, match=said):
            zs.latest(one)


def test_sizes_of_the_export_are_what_the_rig_has() -> None:
    model, _ = rig.build()
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.convolution.weight.is_contiguous()


def test_differences_of_all_pieces_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.diff.PIECE_NUMEL", 1)
    trainer = small.Small(1).train(1)
    one = trainer.zero.save(tmp_path / "step-1")
    with trainer.zero.gathered(writeback=True), torch.no_grad():
        trainer.model.weight += torch.tensor([[0.25, 0.5]])
    (found,) = diff(one, trainer.zero.save(tmp_path / "other"))
    assert (found.name, found.what) == ("weight", "2 of 2 elements differ, by at most 0.5")
