"""DPO with TRL, the model and its reference sharded

    HF_HUB_OFFLINE=1 torchrun --nproc-per-node 2 examples/dpo.py

`ZeroMixin` before any trainer of TRL shards its model; here also the reference, which has no optimizer. All else is
TRL's own. Needs `pip install "zeroshard[transformers]" trl`.
"""

from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from zeroshard.integrations.transformers import ZeroMixin

WORDS = [f"w{number}" for number in range(60)]


class ShardedDPOTrainer(ZeroMixin, trl.DPOTrainer):
    """TRL's trainer, with `zero=`."""


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of sixty words, in place of a download."""
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def build() -> transformers.LlamaForCausalLM:
    """Return a tiny Llama."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=63, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **sizes)
    )


def pairs() -> Dataset:
    """Return prompts with a preferred answer and another one."""
    rows = [
        {"prompt": f"w{n} w{n + 1}", "chosen": f" w{n + 2} w{n + 3}", "rejected": f" w{n} w{n} w{n}"} for n in range(56)
    ]
    return Dataset.from_list(rows)


def main(folder: str, steps: int = 12) -> tuple[list[dict[str, Any]], int]:
    """Train; return what the trainer logged, and this rank's bytes of the reference's parameters."""
    args = trl.DPOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    options = {"args": args, "train_dataset": pairs(), "processing_class": tokenizer()}
    trainer = ShardedDPOTrainer(build(), ref_model=build(), **options, zero={"stage": 3})
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logged, int(trainer.reference.memory().resident_bytes["parameters"])


if __name__ == "__main__":
    main("runs/dpo")
