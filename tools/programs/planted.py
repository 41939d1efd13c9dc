"""Mends taken back in a copy of the package, each with the seed of a wider program that must find it.

    python -m tools.programs --planted

Owns the changes and their seeds. A seed is of the drawing that `--wide` makes; where the drawing changes,
`--planted --search FIRST COUNT` runs the programs that have what a mend is about, and prints the first seed that finds
it. Read `tools/planted.py` first: its bugs have tests, these have programs.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.planted import ROOT, Bug, copy_to, misplaced, plant

from .wide import draw_wide

__all__ = ["MENDS", "Mend", "look_for_mends"]

LIMIT_S = 300.0
"""For one program, in processes of its own."""
SOME = 12
"""Programs of a search that one command runs."""


@dataclass(frozen=True)
class Mend:
    """A mend to take back.

    Args:
        changes: file below `zeroshard/`, the text there, and what stood there before.
        seed: of a program that finds it, at 2 ranks.
        about: features of the programs that can find it; of those in a tuple one is enough.
    """

    name: str
    changes: tuple[tuple[str, str, str], ...]
    seed: int
    about: tuple[str | tuple[str, ...], ...] = field(default=())

    @property
    def bugs(self) -> Iterator[Bug]:
        """The changes, as bugs without tests."""
        return (Bug(self.name, file, right, wrong, "") for file, right, wrong in self.changes)


_ELSEWHERE = ("states on the host", "states in files")
MENDS = (
    Mend(
        "gradients that were kept after a skipped step are looked at",
        (("update/optimizer.py", "grads.is_suspect = grads.has_any", "grads.is_suspect = False"),),
        5000004,
        ("fp16", "skipped, kept"),
    ),
    Mend(
        "updates on the host wait for the flags after a skipped step, too",
        (
            (
                "core/guard.py",
                "        self.skipped += 1\n",
                "        self.skipped += 1\n        self.updates_on_host = False\n",
            ),
        ),
        5000106,
        ("skipped, kept", "flags on a device", "fused", _ELSEWHERE),
    ),
    Mend(
        "buffers are those of rank 0",
        (("whole/module_buffers.py", "self._write(buffers, [message])", "pass"),),
        5000015,
        ("buffers of rank 0",),
    ),
    Mend(
        "each recomputation is compared with its forward",
        (
            (
                "activations/trail.py",
                "        self._versions.append(version_of(tensor))\n",
                "        self._versions.append(version_of(tensor))\n        return\n",
            ),
        ),
        5000043,
        ("recomputed otherwise",),
    ),
    Mend(
        "what an optimizer adds to its gradients stays, in the background and in pieces",
        (
            (
                "update/sources.py",
                "(self.entry.device, self.entry.dtype)",
                "(self.entry.device, self.entry.dtype, copy=True)",
            ),
            ("update/sources.py", "if left is not None and (left", "if False and (left"),
        ),
        5001450,
        ("nesterov", "foreach", "gradients kept", _ELSEWHERE),
    ),
    Mend(
        "copies of states of one element are compared",
        (
            (
                "whole/copies.py",
                "piece if piece.stride() == (1,) else piece.clone(memory_format=torch.contiguous_format)",
                "piece.contiguous()",
            ),
        ),
        5000294,
        ("states in files", "copies compared"),
    ),
)
"""What went wrong without a word, or raised where it should run."""


def look_for_mends(only: str, search: tuple[int, int] | None) -> None:
    """Take each mend back in a copy, and run its program, without and with the change; print what came of it.

    Args:
        only: a part of the names of the mends to take back.
        search: the first seed and how many; then the first program that finds a mend taken back is looked for.
    """
    mends = [mend for mend in MENDS if only in mend.name]
    if gone := [text for mend in mends for bug in mend.bugs if (text := misplaced(bug, ROOT))]:
        sys.exit("\n".join(gone))
    missed = []
    for mend in mends:
        with tempfile.TemporaryDirectory(prefix="zeroshard-mend-") as name:
            copy = copy_to(Path(name, "back"))
            for bug in mend.bugs:
                plant(bug, copy)
            if search is not None:
                seed = _search(mend, copy, *search)
            else:
                seed = mend.seed if not _bad(ROOT, [mend.seed]) and _bad(copy, [mend.seed]) else None
            shutil.rmtree(copy)
        print(f"{'MISSED' if seed is None else 'found '}  {mend.name}  (seed {seed})", flush=True)
        missed += [mend] if seed is None else []
    print(f"{len(mends) - len(missed)} of {len(mends)} mends that were taken back were found")
    sys.exit(1 if missed else 0)


def _search(mend: Mend, copy: Path, first: int, count: int) -> int | None:
    """Return the first seed of a range whose program finds the mend taken back."""
    seeds = [seed for seed in range(first, first + count) if _is_about(mend, draw_wide(seed, 2)["features"])]
    for start in range(0, len(seeds), SOME):
        # A program may be wrong without the change, too.
        for seed in _bad(copy, seeds[start : start + SOME]):
            if not _bad(ROOT, [seed]):
                return seed
    return None


def _is_about(mend: Mend, features: list[str]) -> bool:
    return all(any(one in features for one in ((some,) if isinstance(some, str) else some)) for some in mend.about)


def _bad(folder: Path, seeds: list[int]) -> list[int]:
    """Run programs with a copy of the package; return the seeds of those that went wrong."""
    code = (
        "import json, sys\n"
        "from tools.programs.ranks import BAD, examine\n"
        "from tools.programs.wide import draw_wide, with_untreated\n"
        "if __name__ == '__main__':\n"
        "    seeds = json.loads(sys.argv[1])\n"
        "    found = examine([with_untreated(draw_wide(seed, 2)) for seed in seeds], 2)\n"
        "    print([seed for seed, one in zip(seeds, found) if one.kind in BAD])\n"
    )
    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "some.py")
        script.write_text(code)
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, str(script), str(seeds)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S * len(seeds),
            check=True,
        )
    bad: list[int] = [int(seed) for seed in done.stdout.strip().splitlines()[-1].strip("[]").split(",") if seed]
    return bad
