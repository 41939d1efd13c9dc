"""LoRA by `zeroshard train`: the setting, the first values, and training as peft's own loop under DDP."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from zeroshard.checkpoint.folders import export
from zeroshard.testing import run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.corpus import open_corpus, prepare_corpus
from zeroshard.train.data import training_batch
from zeroshard.train.loop import train
from zeroshard.train.models.hf import load_hf
from zeroshard.train.models.lora import lora_of
from zeroshard.train.run import learning_rate_factor
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import load_tokenizer
from zeroshard.train.using import continue_prompt, load_run, score

from .test_hf import VOCABULARY, _Nobody, _save

STEPS, BATCH, CONTEXT, RATE = 4, 4, 16, 0.01
TEXT = "The class statement defines a class; a class is an object. " * 3
LORA = "rank=16,alpha=32,targets=q_proj+v_proj"


def settings(folder: str, *more: str) -> list[str]:
    """Return the settings of a run of four steps."""
    return [
        f"model.source=hf:{folder}", f"model.lora={LORA}", f"model.context={CONTEXT}", f"train.batch={BATCH}",
        f"train.steps={STEPS}", f"lr={RATE}", "train.eval_bytes=200", "run.sample_bytes=0", f"run.folder={folder}/runs",
        "zero.watchdog_s=20", *more,
    ]  # fmt: skip


def first_adapters(folder: str) -> dict[str, torch.Tensor]:
    """Return the adapters that a run draws with its seed, by the names of peft's model."""
    torch.manual_seed(1)
    language = load_hf(folder, context=CONTEXT, vocabulary=VOCABULARY, lora=LORA)
    zs.shard(language.module, stage=0, weights=language.weights)
    return {name: value.clone() for name, value in language.module.state_dict().items() if "lora_" in name}


def own_loop(folder: str, adapters: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with peft and DDP alone; return the losses and the trained adapters. Runs on a rank."""
    mesh = zs.init(seed=1)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    model.load_state_dict(adapters, strict=False)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    tokenizer, source = load_tokenizer(folder), open_source()
    cache = Path(folder) / "own" / str(mesh.rank)
    key = prepare_corpus(source, tokenizer, heldout_fraction=0.1, folder=cache)
    tokens, losses = open_corpus(cache, key, "own").train, []
    for step in range(STEPS):
        factor = learning_rate_factor(step, steps=STEPS, warmup_fraction=0.05, final_fraction=0.1)
        optimizer.param_groups[0]["lr"] = RATE * factor
        inputs, targets = training_batch(
            tokens, seed=1, step=step, batch=BATCH, context=CONTEXT, rank=mesh.rank, world_size=mesh.world_size
        )
        logits = ddp(input_ids=inputs).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(zs.mean_across_ranks(loss.detach())))
    return losses, {name: value for name, value in model.state_dict().items() if "lora_" in name}


def run(folder: str, stage: int) -> None:
    """Train as `zeroshard train` does. Runs on a rank."""
    train(
        load_config(overrides=settings(folder, "run.ranks=2", f"zero.stage={stage}", f"run.name=s{stage}")), _Nobody()
    )


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.rotates)])
def test_a_run_is_pefts_own_loop_and_its_adapter_loads_in_peft(stage: int, tmp_path: Path) -> None:
    folder = _save(tmp_path, has_weights=True)
    (losses, expected), _ = run_ranks(own_loop, 2, folder, first_adapters(folder))
    run_ranks(run, 2, folder, stage)
    lines = [json.loads(line) for line in (tmp_path / f"runs/s{stage}/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == pytest.approx(losses, abs=1e-5)
    adapter = export(zs.latest(tmp_path / f"runs/s{stage}"), tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, adapter).state_dict()
    assert len(expected) == 8 and all(value.abs().max() > 0 for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model, with a run that trained its adapter, and a text."""
    root = tmp_path_factory.mktemp("tuned")
    train(load_config(overrides=settings(_save(root, has_weights=True), "run.ranks=1", "run.name=tuned")), _Nobody())
    (root / "text.txt").write_text(TEXT)
    return root


def use(folder: str, stage: int) -> tuple[str, dict[str, float]]:
    """Return what a run's model writes, and what it scores. Runs on a rank."""
    with load_run(Path(folder) / "runs" / "tuned", stage=stage) as loaded:
        text = continue_prompt(loaded, "The ", tokens=12, temperature=0.7, seed=3)
        return text, dict(score(loaded, str(Path(folder) / "text.txt"), "", column="text"))


@pytest.fixture(scope="module")
@torch.no_grad()
def plainly(tuned: Path) -> tuple[str, float]:
    """Return the same text, and nats a token, from peft's model and the tokenizer of Transformers in this process."""
    base = transformers.AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    adapter = export(zs.latest(tuned / "runs" / "tuned"), tuned / "adapter")
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    ids = tokenizer("The ", add_special_tokens=False, return_tensors="pt").input_ids[0]
    draw = torch.Generator().manual_seed(3)
    for _ in range(12):
        logits = model(input_ids=ids[None, -CONTEXT:]).logits[0, -1]
        ids = torch.cat([ids, torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=draw)])
    data, nats = tokenizer(TEXT, add_special_tokens=False, return_tensors="pt").input_ids[0], 0.0
    for start in range(0, len(data) - 1, CONTEXT):  # windows without an overlap
        inputs, targets = data[start : start + CONTEXT], data[start + 1 : start + CONTEXT + 1]
        logits = model(input_ids=inputs[None, : len(targets)]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return tokenizer.decode(ids), nats / (len(data) - 1)


@pytest.mark.parametrize("stage", [3, *(pytest.param(n, marks=pytest.mark.rotates) for n in (0, 1, 2))])
def test_a_tuned_model_writes_and_scores_as_pefts_does(stage: int, tuned: Path, plainly: tuple[str, float]) -> None:
    text, nats = plainly
    for told, scores in run_ranks(use, 2, str(tuned), stage):
        assert told == text
        assert scores["nats_per_token"] == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("16", "'16' is no part of LoRA; write rank=16"),
        ("rank=x", "rank='x' is not a number"),
        ("rank=0", "at least 1"),
        ("alpha=3", "needs a rank"),
        ("rank=1,dropout=1", "below 1"),
        ("rank=1,r=2", "'r=2' is no part of LoRA"),
    ],
)
def test_what_is_no_lora_is_refused(asked: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lora_of(asked)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.source=gpt", "give --model hf:DIR"),
        ("train.optimizer=muon", "use an element-wise optimizer"),
        ("run.tensor=2", "adapters are not split"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(overrides=[*settings(str(tmp_path), "run.ranks=2"), override])


def test_targets_that_the_model_has_not_are_named(tmp_path: Path) -> None:
    folder = _save(tmp_path, has_weights=True)
    with pytest.raises(ValueError, match=r"model\.lora=rank=2,targets=wq: "):
        load_hf(folder, context=CONTEXT, vocabulary=VOCABULARY, lora="rank=2,targets=wq")
