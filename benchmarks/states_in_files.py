"""Optimizer states and parameters in a file: the memory that they take, and the speed of an update and of the disk.

    python -m benchmarks.states_in_files --folder /scratch
    python -m benchmarks.states_in_files --folder /scratch --parameters   # parameters, too; memory alone

Owns the comparison. A GPT of 124M parameters (768 wide, 12 blocks, 50,257 tokens, the head tied to the embedding, whose
states alone are 295 MiB) trains in fp32 on one rank, in a process of its own for each place: without states (SGD), with
AdamW's in memory, in a file; or at stage 3 with states and parameters in a file. Resident memory is what the kernel
counts as the process's own (Rss without files and shared memory), between steps and at most during `optimizer.step()`.
Memory for states is what is above the run without any. The disk is read and written in turn with the updates: the same
bytes, one after the other, past the kernel's cache in blocks of 8 MiB by one thread.
"""

import argparse
import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.store import file_calls
from zeroshard.store.disk import buffer_of
from zeroshard.train.models.gpt import GPT, GPTConfig

RESULT = Path(__file__).parent / "results" / "states_in_files.json"
OF_PARAMETERS = Path(__file__).parent / "results" / "parameters_in_files.json"
PLACES = ("none", "memory", "file")
PARAMETERS = ("none", "file", "parameters")
"""Places of the comparison with `--parameters`."""
BLOCK_BYTES = 8 << 20
POLL_S = 0.002


class Gpt124M(GPTConfig):
    """The shape of GPT-2's smallest model."""

    width = 768  # type: ignore[assignment]


def resident_bytes() -> int:
    """Return the resident memory of this process, without pages that the kernel caches of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Most:
    """The most resident memory while a context is open, looked at every 2 ms."""

    def __enter__(self) -> "Most":
        self.nbytes, self._is_over = resident_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.nbytes = max(self.nbytes, resident_bytes())

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()


def sequential_s(folder: Path, nbytes: int) -> tuple[float, float]:
    """Return the seconds that reading, and writing, so many bytes take, one block after the other."""
    plain = file_calls.make(folder)
    file_calls.reserve(plain, 0, nbytes)
    direct = file_calls.opened_directly(plain) or plain
    buffer = memoryview(buffer_of(BLOCK_BYTES).numpy())
    found = []
    for act in (
        file_calls.write_at,
        file_calls.read_at,
        file_calls.write_at,
    ):  # a block that was never written is read without the disk
        start = time.perf_counter()
        for offset in range(0, nbytes, BLOCK_BYTES):
            act(direct, buffer[: min(BLOCK_BYTES, nbytes - offset)], offset)
        found.append(time.perf_counter() - start)
    os.close(plain)
    if direct != plain:
        os.close(direct)
    return found[1], found[2]


def train(place: str, folder: Path, steps: int, context: int, staging_bytes: int) -> dict[str, Any]:
    """Train in this process; return times of updates, resident memory and a digest of the parameters."""
    torch.manual_seed(0)
    # Every block goes back to the kernel when it is freed, so that resident memory is what is used.
    ctypes.CDLL(None).mallopt(-3, 65536)
    model = GPT(Gpt124M(12, context, 50257))
    if place == "none":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    is_whole, offload = place != "parameters", None
    if place in ("file", "parameters"):
        offload = zs.Offload(to=folder, staging_bytes=staging_bytes, parameters=float(not is_whole))
    zero = zs.shard(model, optimizer, offload=offload, stage=0 if is_whole else 3)
    tokens = torch.randint(50257, (1, context + 1))
    between, most, update_s, moved, disk_s, passes_moved = [], [], [], [], [], []
    disk: Any = None if (filed := zero._stores.filed) is None else filed.disk
    for step in range(steps):
        begun_bytes = 0 if disk is None else disk.moved_bytes
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        before = 0 if disk is None else disk.moved_bytes
        passes_moved.append(before - begun_bytes)
        held = resident_bytes()
        with Most() as peak:
            start = time.perf_counter()
            optimizer.step()
            update_s.append(time.perf_counter() - start)
        moved.append(0 if disk is None else disk.moved_bytes - before)
        most.append(peak.nbytes - held)
        optimizer.zero_grad()
        between.append(resident_bytes())
        if disk is not None and step:
            disk_s.append(sum(sequential_s(folder, moved[-1] // 2)))
    digest = hashlib.sha256()
    with zero.gathered():
        for parameter in model.parameters():
            digest.update(parameter.detach().clone().numpy().tobytes())
    return {
        "between_bytes": between[-1],
        "above_in_step_bytes": max(most[1:]),
        "update_s": update_s[1:],
        "moved_bytes": moved[1:],
        "passes_moved_bytes": passes_moved[1:],
        "disk_s": disk_s,
        "is_direct": disk is not None and disk.is_direct,
        "file_bytes": zero.memory().resident_bytes.get("file", 0),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sha256": digest.hexdigest(),
    }


def main() -> None:
    """Run each place in a process of its own, print a table and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--staging", type=int, default=16 << 20, help="bytes of buffers")
    parser.add_argument("--parameters", action="store_true", help="compare parameters in a file instead of states")
    parser.add_argument("--place", choices=(*PLACES, "parameters"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.place:
        print(json.dumps(train(given.place, folder, given.steps, given.context, given.staging)))
        return
    rest = ["--folder", str(folder), "--steps", str(given.steps), "--context", str(given.context)]
    rest += ["--staging", str(given.staging)]
    found = {}
    for place in PARAMETERS if given.parameters else PLACES:
        command = [sys.executable, "-m", "benchmarks.states_in_files", *rest, "--place", place]
        found[place] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    none, filed = found["none"], found["file"]
    if given.parameters:
        write(OF_PARAMETERS, given.folder, memory_of_parameters(found), found)
        return
    ratios = [disk_s / update_s for disk_s, update_s in zip(filed["disk_s"], filed["update_s"], strict=True)]
    summary = {
        "states_between_bytes": filed["between_bytes"] - none["between_bytes"],
        "states_in_step_bytes": filed["between_bytes"] + filed["above_in_step_bytes"] - none["between_bytes"],
        "states_in_memory_bytes": found["memory"]["between_bytes"] - none["between_bytes"],
        "throughput_of_sequential": statistics.median(ratios),
        "is_bitwise_equal": filed["sha256"] == found["memory"]["sha256"],
    }
    write(RESULT, given.folder, summary, found)


def memory_of_parameters(found: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of states and parameters in a file, beside the parameters in memory."""
    none, both = found["none"], found["parameters"]
    nbytes = 4 * none["parameters"]
    return {
        "parameters_in_memory_bytes": nbytes,
        # The run without states holds the parameters in memory.
        "states_and_parameters_between_bytes": both["between_bytes"] - none["between_bytes"] + nbytes,
        "read_in_passes_bytes": both["passes_moved_bytes"][-1],
        "is_bitwise_equal": found["file"]["sha256"] == both["sha256"],
    }


def write(result: Path, folder: Path, summary: dict[str, Any], found: dict[str, Any]) -> None:
    """Print a summary, and write the result."""
    # The command names the disk by a word: folders of machines say nothing to others.
    about = circumstances("benchmarks.states_in_files")
    about["command"] = about["command"].replace(str(folder), "/scratch")
    write_result(result, {**about, "summary": summary, "places": found})
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
