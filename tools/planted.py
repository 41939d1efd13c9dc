"""Plant bugs in a copy of the package, one at a time, and see whether the tests that should find them do.

    python -m tools.planted
    python -m tools.planted --only flush

Owns the bugs, each with its test. A test that passes with its bug, or fails without it, makes the exit status 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import circumstances, write_result

__all__ = ["BUGS", "Bug", "main", "plant"]

ROOT = Path(__file__).parents[1]
COPIED = ("benchmarks", "tests", "tools", "zeroshard", "pyproject.toml")
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Bug:
    """A change of one place of a module, and the test that must fail for it.

    Args:
        file: below `zeroshard/`.
        right: what stands there, once.
        wrong: what is put instead.
        test: a test's address, as pytest takes it.
    """

    name: str
    file: str
    right: str
    wrong: str
    test: str


_DURABLE = "tests/checkpoint/test_durability.py"
BUGS = (
    Bug(
        "a file is not flushed",
        "checkpoint/writer.py",
        "                files.sync(self._descriptor)",
        "                pass",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "a checkpoint's names are not flushed",
        "checkpoint/commit.py",
        "        files.sync_folder(folder)",
        "        pass",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "the commit is not flushed",
        "checkpoint/attempt.py",
        "    files.rename(folder, path)\n    files.sync_folder(path.parent)",
        "    files.rename(folder, path)",
        f"{_DURABLE}::test_a_commit_is_on_the_disk_when_save_returns",
    ),
    Bug(
        "removed names are not flushed before files go",
        "checkpoint/commit.py",
        "    files.sync_folder(path.parent)\n    for name in",
        "    for name in",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "the rename comes before the manifest",
        "checkpoint/save.py",
        "                write_manifest(plan, folder, written)",
        "                publish(plan.path, folder)\n                write_manifest(plan, plan.path, written)\n"
        "                plan.path.rename(folder)",
        f"{_DURABLE}::test_a_cut_of_power_leaves_whole_checkpoints",
    ),
    Bug(
        "a rank's error is skipped",
        "checkpoint/together.py",
        "int(failure is not None)",
        "0",
        "tests/checkpoint/test_faults.py::test_each_file_operation_of_a_save_may_fail",
    ),
    Bug(
        "a background save's failure is skipped",
        "checkpoint/save.py",
        "            if most == Status.FAILED:",
        "            if most == Status.FAILED and waits is None:",
        "tests/checkpoint/test_background.py",
    ),
    Bug(
        "a written range is one element short",
        "checkpoint/inventory.py",
        "return (start - layout.offsets[index], stop - layout.offsets[index]) if stop > start else (0, 0)",
        "return (start - layout.offsets[index], stop - layout.offsets[index] - 1) if stop > start else (0, 0)",
        "tests/checkpoint/test_move.py::test_replicas_write_each_element_once",
    ),
    Bug(
        "a read range is one element short",
        "checkpoint/reader.py",
        "first, last = max(start, begin), min(stop, int(chunks.stop[place]))",
        "first, last = max(start, begin), min(stop, int(chunks.stop[place]) - (begin > 0))",
        "tests/checkpoint/test_move.py::test_every_layout_is_read_at_every_number_of_ranks",
    ),
    Bug(
        "elements may be in two files",
        "checkpoint/ranges.py",
        "is_wrong = (start != expected) | (stop <= start)",
        "is_wrong = (start > expected) | (stop <= start)",
        "tests/checkpoint/test_hostile.py::test_elements_in_two_places_are_named",
    ),
    Bug(
        "a checksum is not compared",
        "checkpoint/reader.py",
        "if (found := zlib.crc32(content)) != entry.crc32[block]:",
        "if (found := entry.crc32[block]) != entry.crc32[block]:",
        "tests/checkpoint/test_damage.py::test_every_flipped_bit_is_seen",
    ),
    Bug(
        "a rank does not check what it reads",
        "checkpoint/load.py",
        "                content.reader.verify_range(name, start, stop, is_state=is_state)",
        "                pass",
        "tests/checkpoint/test_damage.py::test_a_damaged_load_changes_nothing",
    ),
    Bug(
        "a file that changes meanwhile is read",
        "checkpoint/reader.py",
        "            if files.identity_of(descriptor) != self._identities[name]:",
        "            if files.identity_of(descriptor) is None:",
        "tests/checkpoint/test_damage.py::test_a_file_that_changes_during_a_load_is_noticed",
    ),
    Bug(
        "links are followed",
        "checkpoint/files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "tests/checkpoint/test_hostile.py::test_what_is_no_file_of_a_checkpoint_is_refused",
    ),
    Bug(
        "a generator's place is not checked",
        "checkpoint/generators.py",
        "    if not 0 <= place <= WORDS:",
        "    if not 0 <= place:",
        "tests/checkpoint/test_hostile.py::test_a_hostile_generator_is_refused",
    ),
    Bug(
        "retention keeps one less",
        "checkpoint/commit.py",
        "older[keep - 1 :]",
        "older[keep - 2 :]",
        "tests/checkpoint/test_retention.py",
    ),
    Bug(
        "a rank that is not ready for a reduction gives what it has",
        "core/order.py",
        "is_ready = pass_.is_closing or not self._comm.can_postpone or unit.is_complete()",
        "is_ready = True",
        "tests/engine/test_paths.py::test_neither_stage_nor_transport_nor_record_changes_bits",
    ),
    Bug(
        "the store listens on all interfaces",
        "testing.py",
        ", master_listen_fd=listener.detach()",
        "",
        "tests/faults/test_loopback.py::test_ranks_listen_on_loopback_alone",
    ),
)
"""What `docs/reliability.md` promises, broken; some in ways that only a cut of power or another disk would show."""


def plant(bug: Bug, folder: Path) -> None:
    """Put a bug into a copy of the package.

    Raises:
        ValueError: the code has changed, and the bug has no place, or several.
    """
    path = folder / "zeroshard" / bug.file
    text = path.read_text()
    if text.count(bug.right) != 1:
        raise ValueError(
            f"{bug.name}: {bug.right.strip()!r} is {text.count(bug.right)} times in {bug.file}, expected 1"
        )
    path.write_text(text.replace(bug.right, bug.wrong))


def main() -> None:
    """Run the tests without a bug, then with one after the other; print and write what came of it."""
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether the tests find them.")
    parser.add_argument("--only", default="", help="bugs with this text in their name")
    parser.add_argument("--output", type=Path, help="a file for what came of it, as JSON")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if arguments.only in bug.name]
    if not bugs:
        parser.error(f"--only: no bug has {arguments.only!r} in its name")
    with tempfile.TemporaryDirectory(prefix="zeroshard-planted-") as name:
        status = run_tests(copy_to(Path(name, "right")), sorted({bug.test for bug in bugs}))
        if status != PASSED:
            sys.exit(f"without a bug the tests end with status {status}")
        found = {bug.name: {"test": bug.test, "is_found": is_found(bug, Path(name))} for bug in bugs}
    missed = [name for name, one in found.items() if not one["is_found"]]
    print(f"{len(found) - len(missed)} of {len(found)} planted bugs were found")
    if arguments.output:
        write_result(arguments.output, circumstances("tools.planted") | {"bugs": found})
    sys.exit(1 if missed else 0)


def is_found(bug: Bug, folder: Path) -> bool:
    """Tell whether a bug's test fails with it."""
    copy = copy_to(folder / "wrong")
    plant(bug, copy)
    status = run_tests(copy, [bug.test])
    shutil.rmtree(copy)
    print(f"{'found ' if status == FAILED else 'MISSED'}  {bug.name}  ({bug.test})", flush=True)
    return status == FAILED


def copy_to(folder: Path) -> Path:
    """Copy what the tests need."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, tests: list[str]) -> int:
    """Run tests of a copy and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


if __name__ == "__main__":
    main()
