"""Trainers of TRL with sharded models: the losses and norms of their own DDP, and references that are sharded, too."""

import os
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.oracle import WATCHDOG_S, seed
from tests.rotation import third
from zeroshard.integrations.transformers import ZeroMixin
from zeroshard.table.settings import Settings
from zeroshard.testing import run_ranks

from . import tiny

TIMEOUT_S = 300
STEPS = 4
WORDS = [f"w{number}" for number in range(tiny.VOCABULARY - 3)]
KINDS = ("sft", "sft, packed", "sft, adapters", "dpo", "dpo, adapters", "dpo, synced", "reward", "grpo", "rloo")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(7 * first + 3 * place) % len(WORDS)] for place in range(count))


def built(kind: type = transformers.LlamaForCausalLM, **more: Any) -> Any:
    seed(99)
    config = tiny.llama()
    config.max_position_embeddings = 64
    for name, value in {"pad_token_id": 0, "eos_token_id": 1, **more}.items():
        setattr(config, name, value)
    return kind(config)


def trainer_of(kind: str, stage: int | None, folder: Path, **changes: Any) -> Any:
    """Return a trainer of TRL: the stock one for None.

    Args:
        changes: of the arguments of training.
    """
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    name, _, how = kind.partition(", ")
    stock, config = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }[name]
    options: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "bf16": False,
        "learning_rate": 1e-3, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2, "gradient_checkpointing": False,
        "report_to": [], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    more: dict[str, Any] = {"processing_class": tokenizer()}
    model = built(transformers.LlamaForSequenceClassification, num_labels=1) if name == "reward" else built()
    if how == "adapters":
        more["peft_config"] = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    if name == "sft":
        rows = [{"prompt": words(place, 3), "completion": " " + words(place + 1, 4)} for place in range(32)]
        if how == "packed":
            rows = [{"text": words(place, 4 + place % 5)} for place in range(64)]
            options |= {"packing": True, "max_length": 16, "packing_strategy": "wrapped"}
    elif name == "dpo":
        rows = [
            {"prompt": words(place, 3), "chosen": " " + words(place + 1, 4), "rejected": " " + words(place + 2, 3)}
            for place in range(32)
        ]
        if how != "adapters":
            more["ref_model"] = built()
        if how == "synced":
            options |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "learning_rate": 1e-2}
    elif name == "reward":
        rows = [{"chosen": words(place, 5), "rejected": words(place + 3, 4)} for place in range(32)]
    else:
        # One epoch: TRL's sampler begins again where a training resumes, so that later epochs draw in another order.
        rows = [{"prompt": words(place, 3)} for place in range(96)]
        options |= {"num_generations": 4, "max_completion_length": 8, "beta": 0.1, "per_device_train_batch_size": 4}
        more["reward_funcs"] = lambda completions, **_: [float(len(one) % 7) for one in completions]
        # The trainer reads its reference from the same folder.
        model = transformers.LlamaForCausalLM.from_pretrained(folder.parent / "start")
    given = {"args": config(str(folder), **options | changes), "train_dataset": Dataset.from_list(rows), **more}
    if "eval_strategy" in changes:
        given["eval_dataset"] = Dataset.from_list(rows[:8])
    if stage is None:
        return stock(model, **given)
    made = type(f"Sharded{stock.__name__}", (ZeroMixin, stock), {})
    return made(model, **given, zero={"stage": stage, "settings": Settings(watchdog_s=WATCHDOG_S)})


def train(kind: str, stages: list[int | None], folder: Path) -> list[tuple[list[float], list[float], int | None]]:
    """Return losses, norms, and the bytes of a reference's parameters on this rank, by stage."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = []
    for stage in stages:
        seed(5)
        trainer = trainer_of(kind, stage, folder / str(stage))
        trainer.train()
        told = [one for one in trainer.state.log_history if "loss" in one]
        reference = getattr(trainer, "reference", None)
        nbytes = None if reference is None else reference.memory().resident_bytes["parameters"]
        found.append(([one["loss"] for one in told], [one["grad_norm"] for one in told], nbytes))
    return found


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_trl_computes_what_ddp_computes(kind: str, tmp_path: Path) -> None:
    built().save_pretrained(tmp_path / "start")
    whole = sum(one.nbytes for one in built().parameters())
    stages = [None, *third([3, 1, 2, 0])]
    for (losses, norms, _), *sharded in run_ranks(train, 2, kind, stages, tmp_path, timeout_s=TIMEOUT_S):
        assert len(losses) == STEPS and max(norms) > 0
        for stage, found in zip(stages[1:], sharded, strict=True):
            assert found[0] == losses, stage
            assert found[1] == pytest.approx(norms, rel=1e-5), stage
            if kind in ("dpo", "dpo, synced", "grpo", "rloo"):
                assert found[2] == pytest.approx(whole / (2 if stage == 3 else 1), rel=0.01), stage


def generate(stage: int | None, folder: Path) -> list[list[list[int]]]:
    """Train with GRPO, where ranks generate up to 5 and 12 tokens; return the tokens of each call of the reward."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    seed(5)
    told: list[list[list[int]]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        told.append(completion_ids)
        return [float(len(one) % 7) for one in completion_ids]

    trainer = trainer_of("grpo", stage, folder, max_steps=3, max_completion_length=5 + 7 * int(os.environ["RANK"]))
    trainer.reward_funcs[0] = reward
    trainer.train()
    return told


@pytest.mark.product
def test_ranks_of_grpo_generate_the_tokens_of_whole_models(tmp_path: Path) -> None:
    """With DDP each rank generates by itself."""
    built().save_pretrained(tmp_path / "start")
    whole, sharded = (run_ranks(generate, 2, stage, tmp_path / str(stage)) for stage in (None, 3))
    assert sharded == whole
    assert [max(len(one) for told in rank for one in told) for rank in whole] == [5, 12]
