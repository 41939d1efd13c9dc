"""Islands that exchange through a mailbox: speed with one that is slow, with stalls, and while islands are killed.

    python -m benchmarks.islands speed --seconds 40 --every 20
    python -m benchmarks.islands kills --count 100 --seconds 3

Each island is a launch of one rank, in a process of its own, that trains a small language model of bytes on the text of
Python's help; the mailbox is a process, too. A step is padded by sleeping to a given time, so that the machine's other
work matters less, and "twice as slow" is known exactly. Processes that start and work beside an island take cores from
it; the kernel tells for how long it was ready to run and had to queue, which is told apart.
"""

import argparse
import json
import logging
import multiprocessing
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.outer.island_log import read_log

__all__ = ["main"]

CONTEXT, BATCH, WARMUP, LOSS_EVERY = 16, 32, 30, 25
PRELOAD = ("torch", "torch._dynamo", "zeroshard.handle", "zeroshard.outer.mailed")
SERVER = """
import sys
from pathlib import Path
from zeroshard.outer.mailbox_wire import read_secret
from zeroshard.outer.serve import Mailbox

with Mailbox("127.0.0.1:0", read_secret(sys.argv[1]), Path(sys.argv[2]), gone_s=5.0) as box:
    print(box.address, flush=True)
    box.wait()
"""


@dataclass(frozen=True)
class Job:
    """What one island does.

    Args:
        step_s: seconds of a step, the shortest.
        stall: the probability that a step takes `stall_s` more.
        until_s: the time (monotonic) at which it ends; it then leaves.
    """

    outer: zs.Outer
    seed: int
    step_s: float
    stall: float
    stall_s: float
    until_s: float
    record: str


class Bytes(nn.Module):
    """Predicts the next byte from the 16 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 24)
        self.hidden = nn.Linear(24 * CONTEXT, 128)
        self.head = nn.Linear(128, 256)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(context).flatten(1))))


def text() -> torch.Tensor:
    """Return the bytes of Python's help."""
    joined = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()


def loss_of(model: nn.Module, data: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats at some places of the text."""
    context = torch.stack([data[place : place + CONTEXT] for place in places.tolist()])
    return nn.functional.cross_entropy(model(context), data[places + CONTEXT])


def queueing_s() -> float:
    """Return for how many seconds this thread was ready to run, and no core was free."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def train(job: Job) -> None:
    """Train one island until its time is over, and write what happened, a line for each step."""
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = text()
    cut = int(0.9 * len(data)) - CONTEXT
    held_out = torch.randint(cut, len(data) - CONTEXT - 1, (512,), generator=torch.Generator().manual_seed(1))
    model = Bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zero = zs.shard(model, optimizer, stage=3, outer=job.outer)
    draw, stalls, steps = torch.Generator().manual_seed(job.seed), random.Random(job.seed), 0
    with Path(job.record).open("a", encoding="utf-8") as file:
        while (begun_s := time.monotonic()) < job.until_s:
            queued_s = queueing_s()
            # An island that comes back has new states of its optimizer: their first steps are short.
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (steps + 1) / WARMUP)
            loss = loss_of(model, data, torch.randint(0, cut, (BATCH,), generator=draw))
            loss.backward()
            pause_s = job.step_s + job.stall_s * (stalls.random() < job.stall) - (time.monotonic() - begun_s)
            time.sleep(max(pause_s, 0.0))
            computed_s = time.monotonic()
            optimizer.step()
            optimizer.zero_grad()
            end_s = time.monotonic()
            steps += 1
            row: dict[str, Any] = {"at": end_s, "took": end_s - begun_s, "step": end_s - computed_s}
            row["queued"] = queueing_s() - queued_s
            if steps % LOSS_EVERY == 0:
                with torch.no_grad():
                    row["loss"] = loss_of(model, data, held_out).item()
            file.write(json.dumps(row) + "\n")
            file.flush()
    zero.finish()


class Run:
    """A mailbox in a process, and launches of islands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.secret = folder / "secret"
        self.secret.write_bytes(b"a secret of the benchmark")
        self.secret.chmod(0o600)
        command = [sys.executable, "-c", SERVER, str(self.secret), str(folder / "mailbox")]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self.address = self._server.stdout.readline().strip()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))

    def launch(self, name: str, until_s: float, seed: int, step_s: float, **options: Any) -> Any:
        """Start an island, and return its process."""
        stall = {key: options.pop(key, 0.0) for key in ("stall", "stall_s")}
        outer = zs.Outer(
            address=self.address, secret_file=self.secret, island=name, islands=2, log=self._folder / "log", **options
        )
        job = Job(outer, seed, step_s, until_s=until_s, record=str(self._folder / f"{name}.jsonl"), **stall)
        process = self._context.Process(target=train, args=(job,))
        process.start()
        return process

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return what an island has written; a kill may have cut a line."""
        lines = (self._folder / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def took(self, name: str) -> list[dict[str, Any]]:
        """Return what an island took in, by its log."""
        return [entry.about for entry in read_log(self._folder / "log" / f"{name}-0") if entry.what == "took"]

    def end(self) -> None:
        """End the mailbox."""
        self._server.kill()
        self._server.communicate()


def run_pair(seconds: float, steps_s: Sequence[float], **options: Any) -> dict[str, Any]:
    """Train two islands for so long; return speeds, waits, and losses over time."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-islands-") as name:
        run = Run(Path(name))
        try:
            until_s = time.monotonic() + 6.0 + seconds
            processes = [
                run.launch(n, until_s, seed, s, **options) for seed, n, s in zip((1, 2), "ab", steps_s, strict=True)
            ]
            for process in processes:
                process.join()
            rows = {n: run.rows(n) for n in "ab"}
            logs = {n: run.took(n) for n in "ab"}
        finally:
            run.end()
    begin_s = max(found[0]["at"] for found in rows.values())
    rows = {n: [row for row in found if begin_s <= row["at"] <= begin_s + seconds] for n, found in rows.items()}
    steps = {n: len(found) for n, found in rows.items()}
    for log in logs.values():
        counted = [tuple(change[:2]) for about in log for change in about["changes"]]
        assert len(counted) == len(set(counted)), "a change was counted twice"
    losses = {n: [(round(row["at"] - begin_s, 2), row["loss"]) for row in rows[n] if "loss" in row] for n in "ab"}
    half_s = begin_s + seconds / 2
    return {
        "tokens_per_s": BATCH * sum(steps.values()) / seconds,
        "late_tokens_per_s": BATCH * sum(row["at"] > half_s for n in "ab" for row in rows[n]) / (seconds / 2),
        "steps": steps,
        "longest_lead": {n: max((about["lead"] for about in log), default=0) for n, log in logs.items()},
        "waited_s": {n: round(sum(about["wait_s"] for about in log), 2) for n, log in logs.items()},
        "losses": losses,
        "times": times_of(rows["a"]),
        "first_s": first_lead(rows["a"], begin_s, steps_s[0]),
    }


def first_lead(rows: Sequence[dict[str, Any]], begin_s: float, step_s: float) -> float:
    """Return after how many seconds an island first waited for longer than two of its steps."""
    return next((round(row["at"] - begin_s, 2) for row in rows if row["took"] > 3 * step_s), -1.0)


def seconds_to(losses: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return when a loss was first reached."""
    return next((at for at, value in losses if value <= loss), None)


def measure_speed(seconds: float, every: int) -> dict[str, Any]:
    """Compare BSP, SSP and ASP with one island twice as slow, and with stalls of both."""
    found: dict[str, Any] = {}
    modes = (("BSP", 0), ("SSP 4", 4), ("ASP", None))
    for name, staleness in modes:
        found[name] = run_pair(seconds, (0.04, 0.08), every=every, staleness=staleness)
        print(line_of(name, found[name]), flush=True)
    for name, staleness in modes:
        stalled = run_pair(seconds, (0.03, 0.03), every=every, staleness=staleness, stall=0.05, stall_s=0.3)
        found[f"{name}, stalls"] = stalled
        print(line_of(f"{name}, stalls", stalled), flush=True)
    goal = max(min(value for _, value in one["losses"]["a"]) for one in found.values()) + 0.02
    for name, one in found.items():
        one["loss"], one["seconds_to_loss"] = goal, seconds_to(one["losses"]["a"], goal)
        print(f"{name}: {one['seconds_to_loss']} s to a held-out loss of {goal:.2f} nats a byte on the fast island")
    for suffix in ("", ", stalls"):
        for name in ("SSP 4", "ASP"):
            ratio = found[name + suffix]["tokens_per_s"] / found[f"BSP{suffix}"]["tokens_per_s"]
            late = found[name + suffix]["late_tokens_per_s"] / found[f"BSP{suffix}"]["late_tokens_per_s"]
            print(f"{name}{suffix}: {ratio:.2f} of BSP's tokens/s, {late:.2f} in the second half")
    return found


def write_plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the held-out loss of the first island over seconds, and over the tokens of both islands by then."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharey=True)
    for name, one in found.items():
        over_time, over_tokens = axes[int("stalls" in name)]
        times, losses = zip(*one["losses"]["a"], strict=True)
        both = [at for island in "ab" for at, _ in one["losses"][island]]
        over_time.plot(times, losses, label=name)
        over_tokens.plot([BATCH * LOSS_EVERY * sum(at <= end for at in both) for end in times], losses, label=name)
    for row in axes:
        for one, label in zip(row, ("seconds", "tokens of both islands"), strict=True):
            one.set(xlabel=label, ylabel="held-out loss, nats a byte")
            one.legend()
    figure.savefig(path, dpi=90)


def line_of(name: str, one: dict[str, Any]) -> str:
    """Return a result in one line."""
    return (
        f"{name}: {one['tokens_per_s']:,.0f} tokens/s ({one['late_tokens_per_s']:,.0f} in the second half), steps "
        f"{one['steps']}, waited {one['waited_s']} s, longest lead {one['longest_lead']}, first long wait at "
        f"{one['first_s']} s"
    )


def measure_kills(count: int, step_s: float, every: int, longest_s: float) -> dict[str, Any]:
    """Kill one of two islands again and again at random moments; it joins again each time. Look at the other one.

    Args:
        longest_s: of the time between two kills.
    """
    draw, kills = random.Random(1), 0
    with tempfile.TemporaryDirectory(prefix="zeroshard-islands-") as name:
        run = Run(Path(name))
        try:
            lasting = run.launch("a", time.monotonic() + 1e6, 1, step_s, every=every, staleness=None)
            while kills < count and lasting.is_alive():
                killed = run.launch("b", time.monotonic() + 1e6, 2 + kills, step_s, every=every, staleness=None)
                time.sleep(draw.uniform(0.5, longest_s))
                killed.kill()
                killed.join()
                kills += 1
            assert lasting.is_alive(), "the lasting island has ended"
            time.sleep(1.0)
            lasting.kill()
            lasting.join()
            rows, log = run.rows("a"), run.took("a")
            comebacks = len(run.rows("b"))
        finally:
            run.end()
    counted = [tuple(change[:2]) for about in log for change in about["changes"]]
    of_killed = [version for version, name in counted if name == "b"]
    return {
        "kills": kills,
        "steps": len(rows),
        "steps_of_the_killed": comebacks,
        **times_of(rows),
        "changes_of_the_killed": len(of_killed),
        "counted_twice": len(counted) - len(set(counted)),
        "in_order": of_killed == sorted(of_killed),
        "loss": [row["loss"] for row in rows if "loss" in row][-1],
    }


def times_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the times of steps: whole ones, and of them `optimizer.step()`, which exchanges."""
    took_s = [row["took"] for row in rows[1:]]
    median_s = statistics.median(took_s)
    running_s = [row["took"] - min(row["queued"], max(0.0, row["took"] - median_s)) for row in rows[1:]]
    return {
        "longest_s": max(took_s),
        "median_s": median_s,
        "longest_over_median": max(took_s) / median_s,
        "longest_without_queueing_over_median": max(running_s) / median_s,
        "longest_optimizer_step_s": max(row["step"] for row in rows[1:]),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Measure islands that exchange through a mailbox.")
    parser.add_argument("what", choices=("speed", "kills"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run; between kills, the longest")
    parser.add_argument("--every", type=int, default=5, help="steps between exchanges")
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument("--output", type=Path, help="a file for the results, as JSON; plots go beside it")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        found = measure_speed(arguments.seconds, arguments.every)
    else:
        found = measure_kills(arguments.count, 0.05, arguments.every, arguments.seconds)
        undisturbed = run_pair(found["steps"] * found["median_s"], (0.05, 0.05), every=arguments.every, staleness=None)
        found["undisturbed"] = undisturbed["times"] | {"loss": undisturbed["losses"]["a"][-1][1]}
        print(json.dumps(found, indent=1))
    if arguments.output:
        if arguments.what == "speed":
            write_plot(found, arguments.output.with_suffix(".png"))
        write_result(arguments.output, circumstances("benchmarks.islands") | {"results": found})


if __name__ == "__main__":
    main()
