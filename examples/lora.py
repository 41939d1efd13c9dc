"""LoRA: train adapters on a frozen model

    torchrun --nproc-per-node 2 examples/lora.py

PEFT adds the adapters before `zs.shard`. The frozen base stays in bf16 and has neither gradients nor optimizer states;
at stage 3 each rank holds its part of it. The adapters are saved as PEFT saves them, and load in any program.
"""

from pathlib import Path

import peft
import torch
import transformers

import zeroshard as zs


def build() -> torch.nn.Module:
    """Return a tiny Llama in bf16 with adapters in fp32."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes)).to(torch.bfloat16)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(base, config)


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Return token ids (batch, sequence): counting upwards from a random number."""
    first = torch.randint(128, (8, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (first + torch.arange(24)) % 128


def main(target: str, steps: int = 30) -> tuple[list[float], int]:
    """Train and save the adapters; return the mean losses, and this rank's bytes of optimizer states."""
    mesh = zs.init(seed=0)
    model = build()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    zero = zs.shard(model, optimizer, stage=3)
    losses = []
    for step in range(steps):
        ids = batch_of(step, mesh.rank).to(mesh.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(zs.mean_across_ranks(loss.detach()).item())
    states_bytes = int(zero.memory().resident_bytes["states"])
    for _ in zero.on_first_rank():
        model.save_pretrained(target)
    if mesh.rank == 0:
        files = ", ".join(sorted(path.name for path in Path(target).iterdir()))
        print(
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {states_bytes:,} bytes of states on a rank; {target}: {files}"
        )
    return losses, states_bytes


if __name__ == "__main__":
    main("runs/adapters")
