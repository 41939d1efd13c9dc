"""All that one GPU can show within some minutes, the most valuable first: one command, one JSON file.

    python -m benchmarks.gpu_all --minutes 28 --output benchmarks/results/gpu_all.json
    python -m benchmarks.gpu_all --device cpu --minutes 5 --output all.json   # the script itself

Owns the order of the parts and their time; each part is a command of its own, with its own file beside the output.
The same command resumes with the parts that are left. Read `PARTS` first.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from benchmarks.machine import circumstances, write_result

__all__ = ["PARTS", "main"]


@final
@dataclass(frozen=True)
class Part:
    """A command that writes a file.

    Args:
        out: the option that names the file.
        most_s: seconds that it takes at most on an H100; it does not begin with less time left than half of them.
        resumes: whether it takes --resume and --minutes.
    """

    name: str
    command: str
    out: str = "--output"
    most_s: float = 60.0
    resumes: bool = True


PARTS: Final = (
    Part("check", "benchmarks.gpu_check --jobs 8", "--out", 120),
    Part("ranks_8", "benchmarks.gpu --only 'rank 0 of 8' --steps 15", most_s=50),
    Part("ranks_64", "benchmarks.gpu --only 'rank 0 of 64' --steps 10", most_s=40),
    Part("one_rank", "benchmarks.gpu --only one --steps 15", most_s=150),
    Part("optimizer", "benchmarks.gpu --only optimizer --steps 20", most_s=20),
    Part("offload", "benchmarks.gpu_offload --depths 16 --minutes 0.6", most_s=120, resumes=False),
)
"""In the order of their value. One rank includes the treatments of activations."""
CPU: Final = {
    "offload": "benchmarks.gpu_offload --depths 2 --entrant 'zeroshard, states' --entrant 'FSDP2 CPUOffloadPolicy'"
}
"""Commands that the CPU has no time or library for as they are."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts while there is time, and write what they found; return 1 if a part failed or is left."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_all", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=28.0, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--output", type=Path, required=True, help="the result file; the parts' are beside it")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs the script itself, with tiny sizes")
    end_s, found = time.monotonic() + 60 * options.minutes, dict[str, Any]()
    for part in PARTS:
        path = options.output.with_name(f"{options.output.stem}.{part.name}.json")
        if options.only is None or part.name in options.only:
            found[part.name] = run(part, path, options.device, end_s - time.monotonic())
            result = {**circumstances("benchmarks.gpu_all"), "parts": found}
            if path.exists():
                found[part.name]["found"] = json.loads(path.read_text())
            write_result(options.output, result)
    return int(any(one["status"] != 0 for one in found.values()))


def run(part: Part, path: Path, device: str, left_s: float) -> dict[str, Any]:
    """Run a part within the time that is left; return its command, status (None if it had no time) and seconds."""
    words = shlex.split(CPU.get(part.name, part.command) if device == "cpu" else part.command)
    command = [sys.executable, "-m", *words, part.out, str(path), "--device", device]
    if part.resumes:
        command += ["--resume", "--minutes", f"{left_s / 60:.2f}"]
    shown = shlex.join(["python", *command[1:]]).replace(str(path), path.name)
    if left_s < part.most_s / 2 and device == "cuda":
        print(f"{part.name}: no time is left", flush=True)
        return {"command": shown, "status": None, "wall_s": 0.0}
    begin_s = time.monotonic()
    try:
        status: int | None = subprocess.run(command, timeout=left_s, check=False).returncode
    except subprocess.TimeoutExpired:
        status = None
    wall_s = round(time.monotonic() - begin_s, 1)
    print(f"{part.name}: {'ended with ' + str(status) if status else 'done'}, {wall_s} s", flush=True)
    return {"command": shown, "status": status, "wall_s": wall_s}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
