"""`zeroshard train --optimizer`: who gets which optimizer, at which rate, and runs of those that are sharded."""

from pathlib import Path

import pytest
import torch

import zeroshard as zs
from tests.oracle import TIMEOUT_S
from zeroshard.testing import run_ranks
from zeroshard.train.config import Config, load_config
from zeroshard.train.models.language import make_gpt
from zeroshard.train.optimizers import MAKERS, make_optimizer

CLASSES = {
    "adamw": torch.optim.AdamW, "adamw8bit": zs.optim.AdamW8bit, "adafactor": zs.optim.Adafactor,
    "lion": zs.optim.Lion, "muon": zs.optim.Muon, "sgd": torch.optim.SGD,
}  # fmt: skip


def config_of(optimizer: str, *more: str) -> Config:
    return load_config(overrides=["model.depth=1", f"train.optimizer={optimizer}", *more])


@pytest.mark.parametrize("name", list(CLASSES))
def test_groups_and_rates_follow_the_optimizer(name: str) -> None:
    assert set(CLASSES) == set(MAKERS)
    config = config_of(name)
    language = make_gpt(config.gpt)
    optimizer = make_optimizer(config.train, language)
    assert type(optimizer) is CLASSES[name]
    entries = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, entries)) == sorted(map(id, language.module.parameters()))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == set(map(id, language.decayed()))
    named = {id(p): name for name, p in language.module.named_parameters()}
    if name == "muon":
        moved = [named[id(p)] for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]
        assert moved == [
            f"blocks.0.{part}.weight" for part in ("attention.qkv_by_head", "attention.out", "mlp.up", "mlp.down")
        ]
        rates = {group["use_muon"]: group["lr"] for group in optimizer.param_groups}
        assert rates[False] == pytest.approx(config_of("adamw").train.learning_rate)
        assert rates[True] > rates[False]
    assert config_of(name, "train.learning_rate=0.125").train.learning_rate == 0.125


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.optimizer='adam'"):
        config_of("adam")


def losses_of(name: str, folder: str, stage: int) -> list[float]:
    """Train on the first bytes of a text for ten steps; return the losses."""
    config = config_of(name, f"zero.stage={stage}")
    torch.manual_seed(1)
    language = make_gpt(config.gpt)
    optimizer = make_optimizer(config.train, language)
    zero = zs.shard(language.module, optimizer, stage=stage)
    tokens = torch.arange(33).repeat(4, 1) * 7 % 256
    losses = []
    for _ in range(10):
        loss = language.compute_loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(language.module.parameters(), config.train.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zero.save(Path(folder) / f"{name}-{stage}")
    zero.load(Path(folder) / f"{name}-{stage}")
    return losses


@pytest.mark.product
@pytest.mark.parametrize("name", ["adafactor", "adamw8bit", "lion", "muon", "sgd"])
def test_losses_fall_alike_on_one_rank_and_on_two(name: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(losses_of, 1, name, str(tmp_path / "1"), 0, timeout_s=TIMEOUT_S, process_group=False)
    together = run_ranks(losses_of, 2, name, str(tmp_path / "2"), 3, timeout_s=TIMEOUT_S)
    assert alone[-1] < alone[0] - 0.2
    assert together[0] == pytest.approx(alone, rel=0.01)
