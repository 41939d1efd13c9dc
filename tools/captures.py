"""What `zeroshard train` shows: on terminals of 80 and 200 columns, in a pipe, and with an error.

    python -m tools.captures        # run the commands, and keep what they show in benchmarks/results/captures.json
    python -m tools.tables          # write it into README.md, too

A terminal is a pseudo-terminal whose text is kept as it stands when the command has ended.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import circumstances, write_result

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
KEPT: Final = RESULTS / "captures.json"
PAGE: Final = RESULTS / "captures.md"
COMMAND: Final = ("zeroshard", "train", "--depth", "2", "--steps", "40", "--name", "first")
WRONG: Final = (*COMMAND, "--lr", "1e30")
SHOWN: Final = {
    "terminal of 80 columns": (COMMAND, 80),
    "terminal of 200 columns": (COMMAND, 200),
    "pipe": (COMMAND, None),
    "error of a rank, in a pipe": (WRONG, None),
}
"""Each capture with its command and the columns of its terminal; None for a pipe."""
CONTROL: Final = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)")


def screen_of(written: str) -> list[str]:
    r"""Return the lines that stand on a terminal after what was written: cursor up, return and erase are followed.

    >>> from tools.captures import screen_of
    >>> screen_of("step 1\r\x1b[2Kstep 2\n\x1b[1A\x1b[2Kend\n")
    ['end']
    """
    lines, row, column, at = [""], 0, 0, 0

    def put(text: str) -> int:
        line = lines[row].ljust(column)
        lines[row] = line[:column] + text + line[column + len(text) :]
        return column + len(text)

    for found in CONTROL.finditer(written):
        column, at = put(written[at : found.start()]), found.end()
        count, name, is_return, is_newline = found.groups()
        if name == "A":
            row = max(row - int(count or 1), 0)
        elif name == "K":
            lines[row] = ""
        elif is_return:
            column = 0
        elif is_newline:
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
    put(written[at:])
    return [line.rstrip() for line in lines if line.strip()]


def show(command: tuple[str, ...], columns: int | None, folder: Path) -> list[str]:
    """Run a command in a folder; return the lines that it shows on a terminal, or writes into a pipe."""
    called = [sys.executable, "-m", *command]
    about: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}}
    if columns is None:
        done = subprocess.run(called, **about, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.stdout.rstrip().splitlines()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(called, **about, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # the end of a terminal whose programs have ended
            pass
    os.close(ours)
    return screen_of(b"".join(parts).decode())


def page_of(kept: dict[str, Any]) -> str:
    """Return the captures as a page."""
    parts = [
        f"What `zeroshard train` shows. Made by `{kept['command']}` at commit {kept['commit'][:7]}, {kept['date']}, on "
        f"{kept['machine']['cores']} cores with a load average of {kept['load']:.0f}, which makes the times long."
    ]
    for name, one in kept["captures"].items():
        parts += [f"**In a {name}**" if name[0] in "tp" else f"**An {name}**"]
        parts += [f"```text\n$ {one['command']}\n{one['text']}\n```"]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the commands, and keep what they show."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    captures = {}
    for name, (command, columns) in SHOWN.items():
        with tempfile.TemporaryDirectory() as folder:
            lines = show(command, columns, Path(folder))
        captures[name] = {"command": " ".join(command), "columns": columns, "text": "\n".join(lines)}
        print(f"{name}: {len(lines)} lines", flush=True)
    kept = {**circumstances("tools.captures"), "load": os.getloadavg()[1], "captures": captures}
    write_result(KEPT, kept)
    PAGE.write_text(page_of(json.loads(KEPT.read_text())))


if __name__ == "__main__":
    main()
