"""Write what commands print into the pages that show it.

    python -m tools.commands

A block stands between `<!-- command: zeroshard ... -->` and `<!-- end -->`; what is there is replaced by the output of
that command. A test runs the same commands and compares.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs" / "plan.md", ROOT / "docs" / "one-gpu.md")
BLOCK = re.compile(r"(<!-- command: (zeroshard [^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return a page with the output of its commands."""
    return BLOCK.sub(lambda m: f"{m[1]}```text\n$ {m[2]}\n{printed(m[2])}```\n{m[3]}", text)


def printed(command: str) -> str:
    """Return what a command of zeroshard prints, or of that so many lines as `| head -N` behind it says."""
    command, _, head = command.partition(" | head -")
    program = "from zeroshard.cli import main; main()"
    run = [sys.executable, "-c", program, *shlex.split(command)[1:]]
    lines = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines(keepends=True)
    return "".join(lines[: int(head) if head else None])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
