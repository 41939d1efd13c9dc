"""What fine-tuning takes from disk to the saved model: the sharded Trainer beside DDP and FSDP2, and beside its plan.

    python -m benchmarks.trainer_memory --output benchmarks/results/trainer_memory.json

Each contestant reads a GPT-2 of 124M parameters from a local folder, trains a step with AdamW, and saves the model for
`from_pretrained`, on 2 ranks of this host, in processes of its own. The peak is of torch's CPU allocator. The sharded
Trainer runs by messages: memory that ranks share is not the allocator's. The plan is `zs.plan`'s of the training step.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from benchmarks.peaks import measure_peak
from zeroshard.integrations.transformers import Trainer, on_meta
from zeroshard.table.sizes import size_text
from zeroshard.testing import run_ranks

__all__ = ["CONTESTANTS", "main"]

BATCH, SEQUENCE, RANKS = 2, 256, 2
CPU: Final = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)
"""Of which the plan of memory uses that it is one."""


def data(config: Any) -> list[dict[str, torch.Tensor]]:
    """Return the windows of one step of all ranks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (BATCH * RANKS, SEQUENCE), generator=generator)
    return [{"input_ids": one, "labels": one} for one in ids]


def arguments(folder: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder / "run"), max_steps=1, per_device_train_batch_size=BATCH, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, max_grad_norm=0.0, optim="adamw_torch",
    )  # fmt: skip


def sharded(folder: Path, stage: int) -> None:
    """Train with this package's Trainer."""
    model = on_meta(folder / "model")
    zero = {"stage": stage, "weights": folder / "model", "settings": zs.Settings(shared_memory=False)}
    trainer = Trainer(model, arguments(folder), train_dataset=data(model.config), zero=zero)
    trainer.train()
    trainer.save_model(str(folder / "saved"))


def ddp(folder: Path, _: int) -> None:
    """Train with the stock Trainer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = transformers.Trainer(model, arguments(folder), train_dataset=data(model.config))
    trainer.train()
    trainer.save_model(str(folder / "saved"))


def fsdp2(folder: Path, _: int) -> None:
    """Train with `fully_shard` of each block, in a loop of one step: the stock Trainer does not use it on a CPU."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    rows = data(model.config)[dist.get_rank() :: RANKS]
    ids = torch.stack([row["input_ids"] for row in rows])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "saved", state_dict=whole)


CONTESTANTS: Final[Mapping[str, tuple[Callable[[Path, int], None], int]]] = MappingProxyType(
    {
        "zeroshard, stage 3": (sharded, 3),
        "zeroshard, stage 2": (sharded, 2),
        "DDP": (ddp, 0),
        "FSDP2, read whole": (fsdp2, 3),
    }
)


def measure(folder: Path, name: str) -> tuple[int, tuple[str, ...]]:
    """Return the peak of this rank, and the operations at that moment."""
    run, stage = CONTESTANTS[name]
    measured = measure_peak(lambda: run(folder, stage))
    return measured.peak_bytes, measured.at[-1:]


def plan_of(folder: Path, stage: int) -> int:
    """Return the peak that `zs.plan` predicts for a first step."""
    model = on_meta(folder / "model")
    model.train()
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    plan = zs.plan(
        model, world_size=RANKS, stage=stage, inputs={"input_ids": ids, "labels": ids}, shared_memory=False,
        loss=lambda output: output.loss, device=CPU, precision="fp32",
    )  # fmt: skip
    return plan.first.peak[0]


def main() -> None:
    """Measure all, print and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="contestants with this text in their name")
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, (_, stage) in CONTESTANTS.items():
        if given.only not in name:
            continue
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            config = transformers.GPT2Config(n_layer=given.layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            torch.manual_seed(0)
            transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
            found = run_ranks(measure, RANKS, folder, name, timeout_s=600)
            planned = plan_of(folder, stage) if name.startswith("zeroshard") else None
        peaks = [peak for peak, _ in found]
        rows[name] = {"peak_bytes by rank": peaks, "at": [" ".join(at) for _, at in found], "planned_bytes": planned}
        said = "" if planned is None else f", plan {size_text(planned)}: {max(peaks) / planned:.3f}"
        print(f"{name}: {', '.join(map(size_text, peaks))}{said} {found[0][1]}", flush=True)
    if given.output is not None:
        known = circumstances("benchmarks.trainer_memory", ("torch", "transformers"))
        write_result(given.output, known | {"batch": BATCH, "sequence": SEQUENCE, "contestants": rows})


if __name__ == "__main__":
    main()
