"""How much of the code that a published result speaks of has changed since it was measured.

    python -m tools.ages             # a line for each result, the oldest first
    python -m tools.ages --write     # the list of old results in benchmarks/results/README.md
    python -m tools.ages --fill      # hashes of the code for results that have a commit alone

A result names the commit that it measured, and carries a hash of each room of the package as it was. A room whose hash
is today's has not changed; of the others git counts the lines that were added and removed since that commit. A result
is old if these are more than `LIMIT_LINES` lines of the rooms that it speaks of. The README says so beside its numbers,
and benchmarks/results/README.md lists every old result; `make check` fails if either does not.

Owns that count, and which rooms a result speaks of.
"""

import argparse
import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import hash_of, room_of, write_result

__all__ = ["LIMIT_LINES", "changed_lines", "listed", "main", "note", "results", "rooms_of"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- made by tools.ages -->\n", "<!-- end -->\n"
LIMIT_LINES: Final = 2000
"""A sixth of the engine, about."""
ENGINE: Final = ("activations", "core", "describe", "setup", "store", "table", "update", "values", "whole", "wire")
CHECKPOINTS: Final = ("checkpoint", "values", "whole")
SPEAKS_OF: Final[Mapping[str, Sequence[str]]] = {
    "captures": ("account", "train"),
    "checkpoint_speed": CHECKPOINTS,
    "damage": CHECKPOINTS,
    "explore": ("core",),
    "fuzz": CHECKPOINTS,
    "meta_memory": ("setup", "values"),
    "pipelines": (*ENGINE, "parallel"),
    "powerloss": CHECKPOINTS,
    "predicted_others": (*ENGINE, "plan"),
    "scorecard": ("evidence", "plan"),
    "predicted": (*ENGINE, "plan"),
    "torture": (*ENGINE, "checkpoint"),
    "trainer_memory": (*ENGINE, "integrations"),
    "trainers": (*ENGINE, "integrations"),
    "trainers-oldest": (*ENGINE, "integrations"),
}
"""Rooms by result; a result that is not listed speaks of the engine."""
_MOVED = re.compile(r"\{.* => (.*)\}")


def rooms_of(name: str) -> Sequence[str]:
    """Return the rooms of the package that a result speaks of, by the name of its file."""
    return SPEAKS_OF.get(name.removesuffix(".json"), ENGINE)


def results() -> dict[str, dict[str, Any]]:
    """Return the published results that name a commit, by file."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: one for name, one in found.items() if _commit(one)}


def _commit(result: Mapping[str, Any]) -> str:
    words = str(result.get("commit", "")).split()
    return words[0] if words else ""


def changed_lines(name: str, result: Mapping[str, Any]) -> int | None:
    """Return how many lines of the rooms that a result speaks of were added or removed since; None without history."""
    moved = [room for room in rooms_of(name) if result.get("code", {}).get(room) != _today(room)]
    if not moved:
        return 0
    return _count(_commit(result), moved)


@functools.cache
def _today(room: str) -> str:
    return hash_of({str(path): path.read_bytes() for path in (ROOT / "zeroshard" / room).rglob("*.py")})


def _count(commit: str, rooms: Sequence[str]) -> int | None:
    changed = _changes_since(commit)
    return None if changed is None else sum(changed.get(room, 0) for room in rooms)


@functools.cache
def _changes_since(commit: str) -> Mapping[str, int] | None:
    """Return the lines added and removed by room; a file that moved counts with what changed in it."""
    try:
        text = _git("diff", "--numstat", "-M", commit, "--", "zeroshard")
    except subprocess.CalledProcessError:
        return None
    found: Counter[str] = Counter()
    for line in text.splitlines():
        added, removed, path = line.split("\t")
        now = _MOVED.sub(r"\1", path).replace("//", "/").rpartition(" => ")[2]
        if now.endswith(".py"):
            found[room_of(Path(now).relative_to("zeroshard"))] += int(added) + int(removed)
    return found


def note(name: str) -> str:
    """Return what stands beside the numbers of a result: "" while it is not old."""
    lines = changed_lines(name, json.loads((RESULTS / name).read_text()))
    return f"; over {LIMIT_LINES:,} lines of this code have changed since" if (lines or 0) > LIMIT_LINES else ""


def listed() -> str:
    """Return the list of old results."""
    old = {name: one for name, one in results().items() if (changed_lines(name, one) or 0) > LIMIT_LINES}
    return "".join(f"- [{name}]({name}), commit {_commit(one)[:7]}\n" for name, one in old.items()) or "None is.\n"


def filled(text: str) -> str:
    """Return the page with the list in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + listed() + "\n" + END + rest.split(END)[1]


def fill(name: str, result: dict[str, Any]) -> bool:
    """Give a result the hashes of the rooms at its commit; tell whether git knows that commit."""
    try:
        paths = _git("ls-tree", "-r", "--name-only", _commit(result), "zeroshard").splitlines()
    except subprocess.CalledProcessError:
        return False
    texts: dict[str, dict[str, bytes]] = {}
    for path in paths:
        if path.endswith(".py") and (room := room_of(Path(path).relative_to("zeroshard"))):
            shown = subprocess.run(
                ["git", "show", f"{_commit(result)}:{path}"], cwd=ROOT, capture_output=True, check=True
            )
            texts.setdefault(room, {})[str(ROOT / path)] = shown.stdout
    write_result(RESULTS / name, {**result, "code": {room: hash_of(found) for room, found in sorted(texts.items())}})
    return True


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the ages, write the list, or fill in hashes."""
    parser = argparse.ArgumentParser(description="Say how old published results are.")
    parser.add_argument("--write", action="store_true", help=f"write the list in {PAGE.relative_to(ROOT)}")
    parser.add_argument("--fill", action="store_true", help="give results without hashes those of their commit")
    arguments = parser.parse_args()
    if arguments.fill:
        for name, one in results().items():
            if "code" not in one and not fill(name, one):
                print(f"{name}: git does not know commit {_commit(one)[:7]}")
    elif arguments.write:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        ages = [(changed_lines(name, one), name, _commit(one)[:7]) for name, one in results().items()]
        for lines, name, commit in sorted(ages, key=lambda age: -(age[0] or 0)):
            told = "no history" if lines is None else f"{lines:,} lines"
            print(f"{told:>14}  {name} (commit {commit}){'  OLD' if (lines or 0) > LIMIT_LINES else ''}")


if __name__ == "__main__":
    main()
