"""What `zeroshard checkpoint export` writes is what transformers and peft load: all of it, or it is refused."""

import json
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import zeroshard as zs
from tests.oracle import seed
from zeroshard.checkpoint import contents
from zeroshard.checkpoint.folders import FolderReader, export
from zeroshard.testing import run_ranks

from . import tiny

WORLD, TIMEOUT_S = 2, 80.0


def adapted(**options: object) -> nn.Module:
    """Return a tiny model with a LoRA adapter that does something."""
    seed(99)
    wanted = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return peft.get_peft_model(tiny.kinds()["llama"].build(), peft.LoraConfig(**wanted))


def train_adapter(folder: str) -> torch.Tensor:
    """Train an adapter and a head, save a checkpoint and the adapter's configuration; return the logits."""
    kind = tiny.kinds()["llama"]
    model = adapted(modules_to_save=["lm_head"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    zero = zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=TIMEOUT_S))
    for step in range(3):
        model(**kind.batch(step, zero.mesh.rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.save(f"{folder}/step-3")
    if zero.mesh.rank == 0:
        model.peft_config["default"].save_pretrained(f"{folder}/config")
    with zero.gathered():
        return tiny.logits(model, kind)


@pytest.mark.rotates
def test_peft_loads_an_exported_adapter(tmp_path: Path) -> None:
    said = run_ranks(train_adapter, WORLD, str(tmp_path), timeout_s=TIMEOUT_S)[0]
    kind = tiny.kinds()["llama"]
    config = tmp_path / "config" / "adapter_config.json"
    target = export(tmp_path / "step-3", tmp_path / "adapter", config=config)
    assert sorted(path.name for path in target.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    seed(99)
    base = kind.build()
    assert not torch.equal(tiny.logits(base, kind), said)
    loaded = peft.PeftModel.from_pretrained(base, target)
    assert torch.equal(tiny.logits(loaded, kind), said)
    own = adapted(modules_to_save=["lm_head"])
    own.save_pretrained(tmp_path / "own")
    assert FolderReader(target / "adapter_model.safetensors").specs == (
        FolderReader(tmp_path / "own" / "adapter_model.safetensors").specs
    )
    # Without a description of it, or with that of another, nothing is written.
    described = json.loads(config.read_text())
    for changes, message in (
        (None, "give the adapter_config.json of a LoRA adapter"),
        ({"peft_type": "IA3"}, "give the adapter_config.json of a LoRA adapter"),
        ({"r": 4}, r"has LoRA rank 3, but the adapter_config.json has \['4'\]"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"'model\..*down_proj' is adapted or saved, but"),
        ({"target_modules": r".*\.(q|v)_proj"}, r"'model\..*down_proj' is adapted or saved, but"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, r"no tensor matches '.*k_proj'"),
        ({"modules_to_save": None}, r"'lm_head' is adapted or saved, but .* modules_to_save=\[\]"),
        ({"modules_to_save": ["lm_head", "norm"]}, r"no tensor matches '.*norm'"),
        ({"bias": "all"}, "cannot export an adapter with bias='all'"),
        ({"use_dora": True}, "cannot export an adapter with use_dora=True"),
    ):
        config.write_text(json.dumps(described | (changes or {})))
        with pytest.raises(zs.CheckpointError, match=message):
            export(tmp_path / "step-3", tmp_path / "other", config=config if changes else None)
    assert not (tmp_path / "other").exists()


def save_beside_a_norm(folder: Path, kind: type[torch.optim.Optimizer], *, model_only: bool = False) -> None:
    """Train an adapter and a norm for a step, and save a checkpoint and the adapter's configuration."""
    model = adapted()
    norm = next(p for name, p in model.named_parameters() if name.endswith("model.norm.weight"))
    norm.requires_grad_(True)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.05)
    zero = zs.shard(model, optimizer)
    model(**tiny.kinds()["llama"].batch(0, 0)).loss.backward()
    optimizer.step()
    assert zero.load(zero.save(folder / "step-1", model_only=model_only), model_only=model_only).extra == {}
    model.peft_config["default"].save_pretrained(folder)


@pytest.mark.parametrize("is_earlier", [False, True])
@pytest.mark.parametrize(
    ("kind", "model_only"),
    [(torch.optim.AdamW, False), (torch.optim.SGD, False), (zs.optim.Adafactor, False), (torch.optim.AdamW, True)],
)
def test_what_is_trained_beside_an_adapter_is_not_lost(
    kind: type[torch.optim.Optimizer],
    model_only: bool,
    is_earlier: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_earlier:
        monkeypatch.setattr(contents, "trained_beside", lambda names, trained: {})
    save_beside_a_norm(tmp_path, kind, model_only=model_only)
    write = partial(export, tmp_path / "step-1", tmp_path / "adapter", config=tmp_path / "adapter_config.json")
    if is_earlier and model_only:
        with pytest.warns(UserWarning, match="does not say which parameters were trained"):
            write()
        return
    with pytest.raises(zs.CheckpointError, match=r"'base_model\.model\.model\.norm\.weight' \(of 1\) was trained"):
        write()


AUTO = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}


@pytest.mark.product
@pytest.mark.parametrize("name", tiny.NAMES)
def test_transformers_loads_an_export_whole(name: str, tmp_path: Path) -> None:
    kind = tiny.kinds()[name]
    seed(5)
    model = kind.build()
    said = tiny.logits(model, kind)
    zs.shard(model).save(tmp_path / "step-1")
    kind.build().save_pretrained(tmp_path / "own")
    target = export(tmp_path / "step-1", tmp_path / "hf", config=tmp_path / "own" / "config.json")
    loaded, report = AUTO.get(name, AutoModelForCausalLM).from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(tiny.logits(loaded, kind), said)


class Wrapped(nn.Module):
    """A model of transformers inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.kinds()["gpt2"].build()


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    kinds = tiny.kinds()
    zs.shard(Wrapped()).save(tmp_path / "wrapped")
    zs.shard(kinds["gpt2"].build()).save(tmp_path / "plain")
    kinds["gpt2"].build().save_pretrained(tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    with pytest.raises(zs.CheckpointError, match=r"Of GPT2LMHeadModel, 'transformer\.wte\.weight' is not in the chec"):
        export(tmp_path / "wrapped", tmp_path / "hf", config=config)
    described = json.loads(config.read_text())
    for changes, message in (
        ({"n_layer": 3}, r"'transformer\.h\.2\..*' is not in the checkpoint"),
        ({"n_layer": 1}, r"'transformer\.h\.1\..*' is not in the model"),
        ({"n_positions": 17}, r"'transformer\.wpe\.weight' has shape \(16, 24\) in the checkpoint and \(17, 24\)"),
        ({"architectures": ["GPT2Model"]}, r"'wte\.weight' is not in the checkpoint"),
        ({"architectures": ["Nothing"]}, "transformers has no model of this architecture"),
        ({"model_type": "nothing"}, "describes no model that transformers knows"),
        ({"peft_type": "LORA"}, "describes an adapter of peft, but .* holds none"),
    ):
        config.write_text(json.dumps(described | changes))
        with pytest.raises(zs.CheckpointError, match=message):
            export(tmp_path / "plain", tmp_path / "hf", config=config)
    assert not (tmp_path / "hf").exists()
    config.write_text(json.dumps({key: value for key, value in described.items() if key != "architectures"}))
    export(tmp_path / "plain", tmp_path / "hf", config=config)
