"""A model that no rank could hold: built on the meta device, materialized into shards, trained for one step.

    torchrun --nproc-per-node 4 -m benchmarks.meta_memory

Shows the most resident memory of each rank (`VmHWM`, counted from before the model is made) beside what
`zero.memory()` predicts, and writes both to `benchmarks/results/meta_memory.json`. On 4 ranks it takes 12 GiB.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.table.sizes import size_text

RESULT = Path(__file__).parent / "results" / "meta_memory.json"


class Net(nn.Module):
    """A stack of torch's own transformer layers between two small ones."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, 64) to the same shape."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak_bytes() -> int:
    """Return the most memory that was resident since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Begin to count anew; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def main() -> None:
    """Run on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--depth", type=int, default=25)
    width, depth = (sizes := parser.parse_args()).width, sizes.depth
    mesh = zs.init(seed=0)
    small = nn.Linear(8, 8)  # what torch loads at the first pass and update is no part of the model
    optimizer = torch.optim.AdamW(small.parameters(), fused=True)
    small(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = forget_peak()

    with torch.device("meta"):
        model = Net(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    start_s = time.perf_counter()
    zero = zs.shard(model, optimizer, stage=3, precision="bf16")
    made_s, made_bytes = time.perf_counter() - start_s, peak_bytes() - before
    x = torch.randn(1, 8, 64)
    start_s = time.perf_counter()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    step_s = time.perf_counter() - start_s
    memory = zero.memory()
    mine = [made_bytes, peak_bytes() - before, sum(memory.predicted_bytes.values()), sum(memory.peak_bytes.values())]
    rows = [torch.zeros(4, dtype=torch.int64) for _ in range(mesh.world_size)]
    dist.all_gather(rows, torch.tensor(mine))
    if mesh.rank == 0:
        ranks = [dict(zip(("peak_to_shard", "peak", "predicted", "ledger"), row.tolist(), strict=True)) for row in rows]
        parameters = sum(unit.numel for unit in zero.units)
        largest = max(unit.numel for unit in zero.units)
        result = {
            **circumstances("benchmarks.meta_memory"),
            "parameters_numel": parameters,
            "largest_unit_numel": largest,
            "bytes_by_rank": ranks,
            "predicted_by_column": memory.predicted_bytes,
            "loss": loss.item(),
            "shard_s": made_s,
            "step_s": step_s,
        }
        write_result(RESULT, result)
        print(f"{parameters / 1e9:.3f}B parameters, loss {loss.item():.4f}, shard {made_s:.0f} s, step {step_s:.0f} s")
        for rank, row in enumerate(ranks):
            ratio = row["peak"] / row["predicted"]
            print(f"rank {rank}: {', '.join(f'{k} {size_text(v)}' for k, v in row.items())}; ratio {ratio:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
