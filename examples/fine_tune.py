"""Fine-tune a model from a local folder

    torchrun --nproc-per-node 2 examples/fine_tune.py [FOLDER]

FOLDER holds a causal model of Transformers with safetensors files, as `save_pretrained` writes it. Without FOLDER the
example makes a tiny Llama. The model starts on the meta device, so no rank ever holds all of it: `zs.shard` reads each
unit's values from the files. Replace `batch_of` by your tokenized text.

The result is a folder for `from_pretrained`. For a run with text files, resuming and evaluation, without a program of
your own, there is `zeroshard train --model hf:FOLDER`.
"""

import sys
from pathlib import Path

import torch
import transformers

import zeroshard as zs


def make_tiny(folder: Path) -> None:
    """Write a tiny Llama with random weights, in place of a download."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def batch_of(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    """Return token ids (batch, sequence): counting upwards from a random number."""
    first = torch.randint(vocabulary, (8, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (first + torch.arange(32)) % vocabulary


def main(source: str, target: str, steps: int = 40) -> list[float]:
    """Train, export, and return the mean losses."""
    mesh = zs.init(seed=0)
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zero = zs.shard(model, optimizer, stage=3, weights=source)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        ids = batch_of(step, mesh.rank, config.vocab_size).to(mesh.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(zs.mean_across_ranks(loss.detach()).item())
        if mesh.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    for _ in zero.on_first_rank():  # rank 0 alone, with whole parameters
        model.save_pretrained(target)
    return losses


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else "runs/tiny-llama"
    if len(sys.argv) == 1 and not Path(given).exists() and zs.init().rank == 0:
        make_tiny(Path(given))
    zs.mean_across_ranks(torch.zeros(()))  # all ranks wait until the folder is there
    main(given, "runs/fine-tuned")
