"""What `zs.plan` says of this project's own runs on the CPU, beside what torch's allocator hands out in them.

    python -m benchmarks.predicted

Owns the matrix of configurations and the comparison. `benchmarks/peaks.py` measures: each rank adds up the profiler's
memory events, so nothing of what is judged comes from the engine's own count. Resident bytes are those of the tensors
that are there between steps. Every rank of a run is compared with the plan of its own place.
"""

import argparse
import gc
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

import zeroshard as zs
from benchmarks.peaks import measure_peak
from zeroshard.testing import run_ranks
from zeroshard.train.models.gpt import GPT, Block, GPTConfig

__all__ = ["Case", "Found", "compare", "measure", "predict"]

RESULT = Path(__file__).parent / "results" / "predicted.json"
STEPS = 3
COLUMNS = ("parameters", "gradients", "states", "padding", "transient")
TRIES = 5
LOST_BYTES = 1 << 14
STEP, END = "step", "between steps"


@final
@dataclass(frozen=True)
class Case:
    """One configuration."""

    stage: int = 3
    ranks: int = 2
    activations: str = "keep"
    shared_memory: bool = True
    precision: str = "fp32"
    tensor: int = 1
    micro_batches: int = 1
    depth: int = 6
    width: int = 384
    context: int = 256
    batch: int = 2

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", f"{self.ranks} ranks", self.activations]
        parts += ["memory of the host" if self.shared_memory else "messages"] * (self.ranks > 1)
        parts += [self.precision] * (self.precision != "fp32") + [f"tensor {self.tensor}"] * (self.tensor > 1)
        return ", ".join(parts + [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1))


@final
@dataclass(frozen=True)
class Found:
    """What a rank has, measured or predicted.

    Args:
        resident_bytes: by column.
        allocated_bytes: of torch's allocator between steps.
        peak_bytes: of torch's allocator at most, in a steady step.
        first_bytes: the same in the first step.
        at: where the peak was.
        lost_bytes: of blocks whose end the profiler did not see, of those that are gone at the end.
    """

    resident_bytes: dict[str, int]
    allocated_bytes: int
    peak_bytes: int
    first_bytes: int
    at: str
    lost_bytes: int = 0


def make_model(case: Case) -> GPT:
    """Return the model of a case."""
    return GPT(GPTConfig(case.depth, case.context))


def make_inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a micro-batch."""
    torch.manual_seed(0)
    size = (case.batch, case.context)
    return torch.randint(256, size), torch.randint(256, size)


def measure_rank(case: Case) -> Found:
    """Train on this rank, and return what it took."""
    torch.set_num_threads(1)
    resident: dict[str, int] = {}
    train(replace(case, depth=1, context=16), {})  # what torch makes once in a process
    measured = measure_peak(lambda: run(case, resident))
    lost_bytes = sum(block.nbytes for block in measured.blocks)
    live, levels = 0, dict[str, list[int]]()
    where: dict[str, tuple[int, str]] = {}
    for block in measured.blocks:
        live += block.nbytes
        for name in block.operations:
            if name.startswith((STEP, END)):
                levels.setdefault(name, []).append(live)
                at = " > ".join(block.operations[-2:])
                where[name] = max(where.get(name, (0, "")), (live, at))
    last = f"{STEP} {STEPS - 1}"
    return Found(resident, levels[END][-1] - 4, max(levels[last]), max(levels[f"{STEP} 0"]), where[last][1], lost_bytes)


def run(case: Case, resident: dict[str, int]) -> None:
    """Train, and let go of everything."""
    train(case, resident)
    gc.collect()


def train(case: Case, resident: dict[str, int]) -> list[Any]:
    """Train as a user would; return what keeps everything alive."""
    torch.manual_seed(0)
    model, inputs = make_model(case), make_inputs(case)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(
        model,
        optimizer,
        stage=case.stage,
        units=[Block],
        activations=case.activations,
        precision=case.precision,
        settings=zs.Settings(shared_memory=case.shared_memory),
    )
    for step in range(STEPS):
        with record_function(f"{STEP} {step}"):
            for _ in range(case.micro_batches):
                (model(*inputs) / case.micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with record_function(END):
        marker = torch.empty(1)
    held = zero.memory().resident_bytes
    resident.update({column: held[column] for column in COLUMNS})
    resident["parameters"] += sum(buffer.nbytes for buffer in model.buffers())
    return [model, inputs, optimizer, zero, marker]


def measure(case: Case) -> list[Found]:
    """Return what each rank took.

    Raises:
        RuntimeError: the profiler missed the end of blocks, as it sometimes does, in each of several runs.
    """
    for _ in range(TRIES):
        found = [measure_rank(case)] if case.ranks == 1 else run_ranks(measure_rank, case.ranks, case, timeout_s=600)
        if all(abs(one.lost_bytes) < LOST_BYTES for one in found):
            return found
    raise RuntimeError(f"{case}: the profiler missed the end of {max(one.lost_bytes for one in found):,} bytes")


def predict(case: Case) -> Found:
    """Return what `zs.plan` says of the first rank."""
    with torch.device("meta"):
        model = make_model(case)
    plan = zs.plan(
        model,
        world_size=case.ranks,
        device=zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1),
        batch=case.batch,
        seq=case.context,
        stage=case.stage,
        precision=case.precision,
        activations=case.activations,
        tensor=case.tensor,
        micro_batches=case.micro_batches,
        shared_memory=case.shared_memory,
        inputs=make_inputs(case),
        units=[Block],
    )
    film = plan.film
    inside = sum(film.resident_bytes.values()) - film.resident_mapped_bytes
    resident = {column: film.resident_bytes[column] for column in COLUMNS}
    place = max(range(len(film.live)), key=film.live.__getitem__)
    return Found(resident, inside, film.allocated_bytes, plan.first.allocated_bytes, film.events[place].what)


def compare(case: Case) -> tuple[Found, list[Found]]:
    """Return what was predicted, and what each rank took."""
    return predict(case), measure(case)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in asdict(Case()).items():
        parser.add_argument(f"--{name}", type=type(default) if not isinstance(default, bool) else int, default=default)
    case = Case(**vars(parser.parse_args()))
    p, ms = compare(case)
    print(case)
    for m in ms:
        print(
            p.peak_bytes,
            m.peak_bytes,
            f"{p.peak_bytes / m.peak_bytes - 1:+.3%}",
            "first",
            f"{p.first_bytes / m.first_bytes - 1:+.3%}",
            "between",
            p.allocated_bytes,
            m.allocated_bytes,
            p.allocated_bytes - m.allocated_bytes,
            m.at,
            "|",
            p.at,
        )
        print(p.resident_bytes, m.resident_bytes, p.resident_bytes == m.resident_bytes)


if __name__ == "__main__":
    main()
