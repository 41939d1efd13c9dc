"""Islands over a slow cable: what they send by the transport's count and by the cable's, and for what they wait.

    python -m benchmarks.islands_link            # as root, on Linux with `ip` and `tc`
    python -m benchmarks.islands_link --table

Owns two network namespaces with two ranks in each, a veth cable between them, and its rate. Ranks wait for commands, so
that the cable's counters can be read, and its rate changed, between steps. The model is the GPT of 8M parameters, on
short sequences, so that a step takes less than an exchange.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import torch

import zeroshard as zs
from benchmarks.cases import CASES, make_batch, make_model
from benchmarks.machine import circumstances, put_table, write_result
from zeroshard.table.sizes import MIB

CASE: Final = "gpt-8m"
TOKENS: Final = 32
EVERY: Final = 10
RATE: Final = 100e6
"""Bits per second."""
PLACES: Final = (("zsa", "10.213.7.1"), ("zsb", "10.213.7.2"))
"""Name of each namespace, and its end of the cable."""
PORT: Final = "29513"
RANKS: Final = 4
RESULT: Final = Path(__file__).parent / "results" / "islands_link.json"
PAGE: Final = Path(__file__).parents[1] / "docs" / "outer.md"
MODES: Final[Mapping[str, Callable[[], dict[str, Any]]]] = MappingProxyType(
    {
        "32 bits": lambda: {"mesh": 2, "outer": zs.Outer(every=EVERY)},
        "8 bits": lambda: {"mesh": 2, "outer": zs.Outer(every=EVERY, bits=8)},
        "4 bits": lambda: {"mesh": 2, "outer": zs.Outer(every=EVERY, bits=4)},
        "fragments": lambda: {"mesh": 2, "outer": zs.Outer(every=8 * EVERY, fragments=4, delay=15)},
        "replicas=2": lambda: {"mesh": 2},
        # One host has both namespaces, so its memory would take what the cable is to carry.
        "stage 3": lambda: {"settings": zs.Settings(shared_memory=False)},
    }
)


def work(mode: str) -> None:
    """Do what standard input says: so many steps for each line; answer with their seconds and all bytes sent so far."""
    torch.set_num_threads(1)
    ranks = zs.init(seed=0)
    model = make_model(CASES[CASE])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zero = zs.shard(model, optimizer, stage=3, **MODES[mode]())
    number = 0
    _tell({"ready": True})
    for line in sys.stdin:
        took_s = []
        for _ in range(int(line)):
            batch = make_batch(CASES[CASE], 1, ranks.rank, number)[:, : TOKENS + 1]
            start_s = time.perf_counter()
            model(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            took_s.append(round(time.perf_counter() - start_s, 5))
            number += 1
        _tell({"took_s": took_s, "sent": dict(zero.traffic().sent_bytes)})


def _tell(found: Mapping[str, Any]) -> None:
    print("\n" + json.dumps(found), flush=True)


@final
class Cable:
    """Two namespaces, and the cable between them."""

    def __enter__(self) -> "Cable":
        self.remove()
        _run("ip link add zsva type veth peer name zsvb")
        for (name, address), end in zip(PLACES, ("zsva", "zsvb"), strict=True):
            _run(f"ip netns add {name}")
            _run(f"ip link set {end} netns {name}")
            for command in (f"addr add {address}/24 dev {end}", f"link set {end} up", "link set lo up"):
                _run(f"ip -n {name} {command}")
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove all of it; what is not there is no error."""
        for name, _ in PLACES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "zsva"], check=False, capture_output=True)

    def limit(self, *, is_slow: bool) -> None:
        """Give both directions the rate, or none."""
        for (name, _), end in zip(PLACES, ("zsva", "zsvb"), strict=True):
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", end, "root"], check=False, capture_output=True)
            if is_slow:
                _run(f"tc -n {name} qdisc add dev {end} root tbf rate {RATE:.0f} burst 128kb latency 400ms")

    def sent_bytes(self) -> int:
        """Return what both ends have sent."""
        return sum(
            json.loads(_run(f"ip -n {name} -s -j link show {end}"))[0]["stats64"]["tx"]["bytes"]
            for (name, _), end in zip(PLACES, ("zsva", "zsvb"), strict=True)
        )


@final
class Launch:
    """Four ranks, two in each namespace."""

    def __init__(self, mode: str) -> None:
        self._ranks = [self._start(mode, rank) for rank in range(RANKS)]
        self._hear()

    def _start(self, mode: str, rank: int) -> "subprocess.Popen[str]":
        (name, _), end = PLACES[2 * rank // RANKS], ("zsva", "zsvb")[2 * rank // RANKS]
        place: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "WORLD_SIZE": RANKS,
            "LOCAL_WORLD_SIZE": RANKS // 2,
        }
        place |= {"MASTER_ADDR": PLACES[0][1], "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.islands_link", "--work", mode],
            env=os.environ | {key: str(value) for key, value in place.items()} | {"GLOO_SOCKET_IFNAME": end},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Let all ranks make steps, and return what each tells."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{count}\n")
            rank.stdin.flush()
        return self._hear()

    def _hear(self) -> list[dict[str, Any]]:
        found = []
        for rank in self._ranks:
            assert rank.stdout is not None
            found.append(json.loads(next(line for line in rank.stdout if line.startswith("{"))))
        return found

    def end(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def sent_across(told: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes that ranks have sent to the other island."""
    return sum(one["sent"].get("replicate", 0) for one in told)


def count_bytes(mode: str, steps: int, cable: Cable) -> dict[str, Any]:
    """Return the bytes of some steps, by the transport and by the cable, between exchanges and in them."""
    launch, every = Launch(mode), EVERY if "bits" in mode else 1
    try:
        told = launch.steps(EVERY)
        found = {"between": 0, "in": 0, "cable between": 0, "cable in": 0, "between_s": 0.0}
        for _ in range(steps // every):
            for kind, count in (("between", every - 1), ("in", 1)):
                start, on_cable, start_s = sent_across(told), cable.sent_bytes(), time.monotonic()
                told = launch.steps(count)
                found[kind] += sent_across(told) - start
                found[f"cable {kind}"] += cable.sent_bytes() - on_cable
                found["between_s"] += (time.monotonic() - start_s) * (kind == "between")
    finally:
        launch.end()
    return {**found, "steps": steps}


def time_link(rounds: int, cable: Cable) -> dict[str, Any]:
    """Return the seconds of steps and exchanges with and without the slow cable, in turn."""
    launch = Launch("32 bits")
    between: dict[bool, list[float]] = {True: [], False: []}
    exchanges: dict[bool, list[float]] = {True: [], False: []}
    sent = []
    try:
        launch.steps(2 * EVERY)
        for number in range(2 * rounds):
            is_slow = bool(number % 2)
            cable.limit(is_slow=is_slow)
            steps_s = [max(times) for times in zip(*(one["took_s"] for one in launch.steps(EVERY - 1)), strict=True)]
            before = cable.sent_bytes()
            exchange_s = max(one["took_s"][0] for one in launch.steps(1))
            sent.append((cable.sent_bytes() - before) / 2)
            between[is_slow].append(statistics.median(steps_s))
            exchanges[is_slow].append(exchange_s)
    finally:
        launch.end()
        cable.limit(is_slow=False)
    return {"between_s": between[True], "between_free_s": between[False], "exchange_s": exchanges[True]} | {
        "exchange_free_s": exchanges[False],
        "cable_bytes_a_direction": statistics.median(sent),
    }


def time_overlap(rounds: int, cable: Cable) -> dict[str, Any]:
    """Return the seconds of whole intervals of fragments with and without the slow cable, in turn."""
    found: dict[bool, list[float]] = {True: [], False: []}
    launch, sent = Launch("fragments"), []
    try:
        launch.steps(8 * EVERY)
        for number in range(2 * rounds):
            is_slow = bool(number % 2)
            cable.limit(is_slow=is_slow)
            before = cable.sent_bytes()
            found[is_slow].append(max(sum(one["took_s"]) for one in launch.steps(8 * EVERY)))
            sent.append((cable.sent_bytes() - before) / 2)
    finally:
        launch.end()
        cable.limit(is_slow=False)
    return {"slow_s": found[True], "free_s": found[False], "cable_bytes_a_direction": statistics.median(sent)}


def time_others(mode: str, cable: Cable) -> list[float]:
    """Return the seconds of three steps over the slow cable."""
    launch = Launch(mode)
    try:
        launch.steps(2)
        cable.limit(is_slow=True)
        return [max(times) for times in zip(*(one["took_s"] for one in launch.steps(3)), strict=True)]
    finally:
        launch.end()
        cable.limit(is_slow=False)


def table_of(result: Mapping[str, Any]) -> str:
    """Return the tables for the page."""
    counted = result["bytes"]
    steps = next(one["steps"] for one in counted.values())
    lines = [f"| over {steps} steps | MiB by the transport | of gradients | MiB by the cable |"]
    lines.append("|---|---:|---:|---:|")
    whole = counted["replicas=2"]["in"]
    for mode, one in counted.items():
        name = "gradients in each step" if mode == "replicas=2" else f"every {EVERY}, {mode}"
        parts = f"1 / {whole / one['in']:.2f}"
        lines.append(f"| {name} | {one['in'] / MIB:,.1f} | {parts} | {one['cable in'] / MIB:,.1f} |")
    quiet = [one for mode, one in counted.items() if mode != "replicas=2"]
    heartbeats = sum(one["cable between"] for one in quiet) / sum(one["between_s"] for one in quiet)
    sent = sum(one["between"] for one in quiet)
    lines += ["", f"Between exchanges: {sent} bytes by the transport, and {heartbeats:,.0f} a second by the cable."]
    if link := result.get("link"):
        step_s, free_s = (statistics.median(link[key]) for key in ("between_s", "between_free_s"))
        ideal_s = 8 * link["cable_bytes_a_direction"] / RATE
        took_s = statistics.median(link["exchange_s"]) - step_s
        more_s = statistics.median(link["exchange_s"]) - statistics.median(link["exchange_free_s"])
        lines += [
            "",
            f"At {RATE / 1e6:.0f} Mbit/s, {len(link['between_s'])} rounds: a step between exchanges takes "
            f"{step_s / free_s:.2f} of one without the limit, an exchange {took_s:.2f} s, {took_s / ideal_s:.2f} "
            f"of bytes over rate, and {more_s / ideal_s:.2f} less what it takes without the limit.",
        ]
    if overlap := result.get("overlap"):
        ideal_s = 8 * overlap["cable_bytes_a_direction"] / RATE
        more_s = statistics.median(overlap["slow_s"]) - statistics.median(overlap["free_s"])
        exposed = f"{more_s / ideal_s:.0%}" if more_s > 0 else "nothing (within noise)"
        lines.append(f"With four fragments and a delay of 15 steps, {exposed} of the transfer is exposed.")
    if others := result.get("others"):
        told = ", ".join(f"{name} {statistics.median(took_s):.1f} s" for name, took_s in others.items())
        lines.append(f"A step that waits for the cable: {told}.")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=100, help="of which bytes are counted")
    parser.add_argument("--rounds", type=int, default=24, help="with and without the limit; 0 to count bytes alone")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="write the tables into the page from the file, and stop")
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    if options.table:
        text = PAGE.read_text()
        PAGE.write_text(put_table(text, "link", table_of(json.loads(options.out.read_text()))))
        return
    result: dict[str, Any] = {"circumstances": circumstances("benchmarks.islands_link")}
    with Cable() as cable:
        result["bytes"] = {
            mode: count_bytes(mode, options.steps, cable) for mode in ("replicas=2", "32 bits", "8 bits", "4 bits")
        }
        write_result(options.out, result)
        if options.rounds:
            result["link"] = time_link(options.rounds, cable)
            write_result(options.out, result)
            result["overlap"] = time_overlap(-(-options.rounds // 6), cable)
            result["others"] = {mode: time_others(mode, cable) for mode in ("replicas=2", "stage 3")}
            write_result(options.out, result)
    print(table_of(result))


if __name__ == "__main__":
    main()
