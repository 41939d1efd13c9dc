"""Record one step of the real engine for the walk of the report page: stage 3, 4 ranks, bf16, recomputation.

    python -m tools.walk [PATH]

writes `zeroshard/report/assets/walk.json`, or PATH: the events of one step as `zero.trace` has them, what
`zero.memory()` says on each rank before the first and after each, and the units. `tests/report/test_walk.py` records
the step again and compares. What the page makes of it is in `zeroshard/report/walk.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from zeroshard.report.walk import RECORDING
from zeroshard.testing import run_ranks
from zeroshard.train.models.gpt import GPT, GPTConfig

RANKS = 4
DEPTH = 4
CONTEXT = 64
STEPS = 3  # the first steps agree on the order of events and make the optimizer's states; the last is recorded


def record() -> dict[str, Any]:
    """Train a small GPT on this rank and return its last step; every rank must call."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = GPT(GPTConfig(depth=DEPTH, context=CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero = zs.shard(
        model,
        optimizer,
        stage=3,
        precision="bf16",
        activations="recompute",
        settings=zs.Settings(shared_memory=False),  # ranks of one host would read each other's shards in place
    )
    measured: list[dict[str, int]] = []
    add = zero.trace.add

    def note(event: zs.Event) -> None:
        add(event)
        measured.append(dict(zero.memory().resident_bytes))

    zero.trace.add = note  # type: ignore[method-assign]
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        tokens = torch.randint(256, (1, CONTEXT + 1))
        measured[:] = [dict(zero.memory().resident_bytes)]
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    events = zero.trace.step_events(zero.trace.events[-1].step)
    if len(measured) != len(events) + 1:
        raise RuntimeError(f"{len(measured) - 1} moments were measured for {len(events)} events")
    return {
        "events": [[e.phase, e.kind, e.unit, e.nbytes, e.dtype] for e in events],
        "units": [
            [unit.name, unit.numel, sum(bucket.layout.shard_numel for bucket in unit.spec.buckets)]
            for unit in zero.units
        ],
        "measured": measured,
        "parameters_numel": sum(unit.numel for unit in zero.units),
    }


def recording() -> dict[str, Any]:
    """Record the step on `RANKS` gloo ranks and return one mapping for all of them.

    Raises:
        RuntimeError: ranks issued different events.
    """
    ranks = run_ranks(record, RANKS, timeout_s=120)
    if any(rank["events"] != ranks[0]["events"] for rank in ranks):
        raise RuntimeError("ranks issued different events")
    return {
        "model": f"GPT of {DEPTH} blocks, {ranks[0]['parameters_numel']:,} parameters, {CONTEXT} tokens a rank",
        "ranks": RANKS,
        "units": ranks[0]["units"],
        "events": ranks[0]["events"],
        "measured": [rank["measured"] for rank in ranks],
    }


def main() -> None:
    """Write the recording."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING
    text = json.dumps(recording(), indent=None, separators=(",", ":"))
    path.write_text(text.replace('],["', '],\n["').replace("},{", "},\n{") + "\n", "utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
