"""LoRA adapters on a frozen base of another dtype: only they have states, by formula; they are saved and reloaded."""

import functools
from pathlib import Path

import peft
import torch
from torch import nn

import zeroshard as zs
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, assert_matches, assert_same, seed
from zeroshard.testing import run_ranks

from . import tiny

WORLD = 2


def with_adapters(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model whose own parameters are frozen and have `dtype`; adapters have fp32."""
    seed(99)
    base = tiny.kinds()["llama"].build().to(dtype)
    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(base, config)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(run: Run, folder: str) -> None:
    """Train the adapters, and save them as PEFT does."""
    kind = tiny.kinds()["llama"]
    model = with_adapters()
    model.train()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    run.shard(model, optimizer)
    for step in range(3):
        seed(step, run.rank)
        loss = model(**kind.batch(step, run.rank)).loss
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)
    with run.gathered():
        run.record(logits=tiny.logits(model, kind), adapters=peft.get_peft_model_state_dict(model))
        if run.rank == 0:
            model.save_pretrained(Path(folder) / str(getattr(run, "stage", "plain")))


def test_adapters_train_as_without_sharding_and_reload(tmp_path: Path) -> None:
    by_rank = assert_matches(functools.partial(train, folder=str(tmp_path)), WORLD, STAGES)
    kind = tiny.kinds()["llama"]
    for stage, result in by_rank[0].items():
        said = result["records"][-1]["logits"]
        plain = with_adapters()
        peft.set_peft_model_state_dict(plain, result["records"][-1]["adapters"])
        assert_same(said, tiny.logits(plain, kind), f"state dict of stage {stage}")
        base = with_adapters().unload()
        saved = peft.PeftModel.from_pretrained(base, tmp_path / str(stage))
        assert_same(said, tiny.logits(saved, kind), f"files of stage {stage}")


def count() -> list[tuple[dict[str, int], dict[str, int], int]]:
    """Return, by stage, bytes held after a step, bytes predicted, and how many tensors of state there are."""
    kind, found = tiny.kinds()["llama"], []
    for stage in STAGES:
        model = with_adapters()
        optimizer = torch.optim.AdamW(trained(model))
        zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        model(**kind.batch(0, zero.mesh.rank)).loss.backward()
        optimizer.step()
        memory = zero.memory()
        found.append((memory.resident_bytes, memory.predicted_bytes, len(optimizer.state)))
    return found


def test_bytes_follow_the_formula() -> None:
    model = with_adapters()
    adapters = sum(p.numel() for p in trained(model))
    frozen = sum(p.numel() for p in model.parameters()) - adapters
    assert 0 < adapters < frozen
    by_rank = run_ranks(count, WORLD, timeout_s=TIMEOUT_S)
    for number, stage in enumerate(STAGES):
        copies = [WORLD if stage < column else 1 for column in (1, 2, 3)]
        held = [ranks[number][0] for ranks in by_rank]
        sums = [sum(one[column] for one in held) for column in ("states", "gradients", "parameters")]
        whole = [8 * adapters, 4 * adapters, 4 * adapters + 2 * frozen]
        assert sums == [nbytes * n for nbytes, n in zip(whole, copies, strict=True)], f"stage {stage}"
        for resident, predicted, states in (ranks[number] for ranks in by_rank):
            assert {c: predicted[c] for c in resident if c != "transient"} == {
                c: n for c, n in resident.items() if c != "transient"
            }
            assert states == len(trained(model))
