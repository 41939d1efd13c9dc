"""Updates of states in the backward beside updates after `step()`: step times, memory, and the price of rejections.

    OMP_NUM_THREADS=1 python -m benchmarks.in_backward

Owns the comparison. A GPT trains in fp32 on one rank of a CPU, with AdamW's states on the host. Four copies of it step
in turn, in an order that changes from round to round: with `update="step"` and `clip_grad_norm_`, and with
`update="in-backward"`, each with a limit that no norm reaches ("taken"), and with one that each norm exceeds, so that
each update is made again ("rejected"). The update thread needs a core beside those that compute. At the end the
parameters of the pairs must be equal, bit for bit.
"""

import argparse
import hashlib
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.train.models.gpt import GPT, GPTConfig
from zeroshard.update.in_backward import InBackward

RESULT = Path(__file__).parent / "results" / "in_backward.json"
LIMITS = {"taken": 1e6, "rejected": 1e-3}
UPDATES = ("step", "in-backward")
PARTS = ("forward", "backward", "step", "all")


class Copy:
    """One of the models that are compared.

    Args:
        update: of `zs.Offload`.
        max_norm: what gradients are clipped to.
    """

    def __init__(self, config: GPTConfig, update: str, max_norm: float) -> None:
        torch.manual_seed(0)
        self.max_norm, self.is_ahead = max_norm, update == "in-backward"
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        offload = zs.Offload(update=update, max_norm=max_norm if self.is_ahead else None)
        self.zero = zs.shard(self.model, self.optimizer, stage=2, offload=offload)
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def advance(self, tokens: torch.Tensor, *, is_noted: bool) -> None:
        """Make a step."""
        moments = [time.perf_counter()]
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        if not self.is_ahead:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        moments.append(time.perf_counter())
        self.optimizer.zero_grad()
        if is_noted:
            took = [after - before for before, after in itertools.pairwise(moments)]
            for part, seconds in zip(PARTS, (*took, moments[-1] - moments[0]), strict=True):
                self.seconds[part].append(seconds)

    def result(self) -> dict[str, Any]:
        """Return medians and minima in seconds, bytes on the host, and what came of the updates."""
        source = self.zero._sharded[0].source
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return {
            "median_s": {part: statistics.median(seconds) for part, seconds in self.seconds.items()},
            "least_s": {part: min(seconds) for part, seconds in self.seconds.items()},
            "host_bytes": self.zero.memory().resident_bytes["host"],
            "updates": dict(source.counts) if isinstance(source, InBackward) else {},
            "sha256": digest.hexdigest(),
        }


def main() -> None:
    """Train, print a table and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    config = GPTConfig(given.depth, given.context, given.vocabulary)
    copies = {(limit, update): Copy(config, update, LIMITS[limit]) for limit in LIMITS for update in UPDATES}
    names = [*copies]
    for number in range(given.rounds + 2):
        tokens = torch.randint(given.vocabulary, (given.batch, given.context + 1))
        for place in range(len(names)):
            # The first step makes the states, the second one touches the copies for the first time.
            copies[names[(place + number) % len(names)]].advance(tokens, is_noted=number >= 2)
    results = {"/".join(name): one.result() for name, one in copies.items()}
    for limit in LIMITS:
        plain, ahead = (results[f"{limit}/{update}"] for update in UPDATES)
        assert plain["sha256"] == ahead["sha256"], f"{limit}: the parameters differ"
        print(f"{limit:9}" + "".join(f"{part:>22}" for part in PARTS))
        for which in ("median_s", "least_s"):
            cells = (f"{1e3 * plain[which][part]:8.1f} -> {1e3 * ahead[which][part]:8.1f}" for part in PARTS)
            print(f"{which[:-2]:9}" + "".join(f"{cell:>22}" for cell in cells) + "  ms")
        print(f"{'':9} host bytes {plain['host_bytes']:,} -> {ahead['host_bytes']:,}; updates {ahead['updates']}")
    write_result(
        RESULT,
        {
            **circumstances("benchmarks.in_backward"),
            "settings": vars(given) | {"threads": torch.get_num_threads()},
            "parameters": sum(p.numel() for p in next(iter(copies.values())).model.parameters()),
            "results": results,
        },
    )


if __name__ == "__main__":
    main()
