"""What compression of activations saves and costs, and what rounding them does to a loss curve.

    python -m benchmarks.compress

Owns the models, the batches and `results/compress.json`. Each number is of one process: compression knows no ranks.
Bytes are those of the storages that autograd keeps of one forward, parameters aside, as the link counts them. Curves
are of a small GPT on the text of this repository's documentation, the same batches for all.
"""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from benchmarks.resnet import ResNet18
from zeroshard.activations.compress import Compress
from zeroshard.train.models.gpt import GPT, GPTConfig

HOW = ("keep", "compress", "compress-bf16", "compress-fp8", "compress-int8")
STEPS = 300
WINDOW = 25
Batch = tuple[Tensor, Tensor]


def text_batches(config: GPTConfig, rows: int) -> Iterator[Batch]:
    """Yield windows of the documentation at random places, always the same ones."""
    files = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    data = torch.frombuffer(bytearray(b"".join(one.read_bytes() for one in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - config.context - 1, (rows, 1), generator=generator)
        windows = data[starts + torch.arange(config.context + 1)]
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def link_of(zero: Any) -> Compress | None:
    """Return the link that compresses a model's activations."""
    treatment = zero._engine.saved._treatment
    return None if treatment is None else treatment._links[0][0]


def train(make: Callable[[], nn.Module], batches: Iterator[Batch], how: str, steps: int, rate: float) -> dict[str, Any]:
    """Train, and return losses, seconds a step and bytes by encoding of the first and of the last step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    zero = zs.shard(model, optimizer, stage=0, activations=how)
    losses, seconds, saved = [], [], []
    for _ in range(steps):
        batch = next(batches)
        begin = time.perf_counter()
        loss = model(*batch)
        if (link := link_of(zero)) is not None:
            saved.append(link.saved())
        loss.backward()
        seconds.append(time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses, "seconds": seconds}
    for name, counts in (("first", saved[:1]), ("last", saved[-1:])):
        for one in counts:
            before, after = (sum(pair[side] for pair in one.values()) for side in (0, 1))
            found[name] = {"ratio": round(before / after, 3), "before": before, "after": after, "by": one}
    return found


def curves() -> dict[str, Any]:
    """Train a GPT in each way."""
    config = GPTConfig(2, context=64)
    found: dict[str, Any] = {}
    for how in HOW:
        result = train(lambda: GPT(config), text_batches(config, 8), how, STEPS, config.learning_rate)
        losses = result.pop("losses")
        result["loss"] = [round(statistics.fmean(losses[at : at + WINDOW]), 4) for at in range(0, len(losses), WINDOW)]
        result["equals_keep"] = losses == (kept := found.setdefault("_", losses))
        result["largest_difference"] = round(max(abs(a - b) for a, b in zip(losses, kept, strict=True)), 4)
        del result["seconds"]
        found[how] = result
    del found["_"]
    return found


def costs(make: Callable[[], nn.Module], batch: Batch, steps: int = 5) -> dict[str, Any]:
    """Return bytes of one forward, and the median of each way's forward and backward over that without treatment.

    The ways take turns, so that other programs on the machine slow them all.
    """
    torch.manual_seed(0)
    first = make()
    models = {}
    for how in HOW:
        model = copy.deepcopy(first)
        models[how] = model, zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=0, activations=how)
    seconds: dict[str, list[float]] = {how: [] for how in HOW}
    for _, how in itertools.product(range(steps), HOW):
        model, _ = models[how]
        begin = time.perf_counter()
        model(*batch).backward()
        seconds[how].append(time.perf_counter() - begin)
        model.zero_grad()
    found = {}
    for how in HOW[1:]:
        saved = link_of(models[how][1]).saved()  # type: ignore[union-attr]
        before, after = (sum(pair[side] for pair in saved.values()) for side in (0, 1))
        ratios = [a / b for a, b in zip(seconds[how][1:], seconds["keep"][1:], strict=True)]
        found[how] = {
            "ratio": round(before / after, 3),
            "before": before,
            "after": after,
            "by": saved,
            "time": round(statistics.median(ratios), 3),
        }
    return found


def main() -> None:
    """Measure, and write the result."""
    zs.init()
    config = GPTConfig(8, context=256)
    images = torch.randn(8, 3, 112, 112), torch.randint(1000, (8,))

    def gpt() -> nn.Module:
        model = GPT(config)
        for block in model.blocks:
            nn.init.normal_(block.mlp.down.weight, std=0.02)  # type: ignore[union-attr, arg-type]
        return model

    result = {
        "resnet-18": costs(ResNet18, images),
        "gpt": costs(gpt, next(text_batches(config, 4))),
        "curves": curves(),
    }
    write_result(
        Path(__file__).parent / "results" / "compress.json", {**circumstances("benchmarks.compress"), **result}
    )


if __name__ == "__main__":
    main()
