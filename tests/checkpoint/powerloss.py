"""What a disk may hold after a loss of power: every legal outcome of a recorded list of file operations.

Owns the recorder, the model of a disk, and what is required of each outcome. `test_powerloss.py` and
`tools/powerloss.py` run it.

Note: the model
    A file's bytes are safe once the file is flushed, a change of a folder's names once that folder is. What is not safe
    may be there or not, each change by itself, whatever the order in which it was made: file systems differ in what
    they order, and each one's outcomes are among these. Of bytes that are not safe a file may have none, a part, zeros
    of the right length, or zeros in either half. A rename may leave both names, but never neither.
"""

import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import files
from zeroshard.checkpoint.manifest import LATEST

RECORDED = ("create", "write", "sync", "rename", "sync_folder", "make_folder", "remove", "remove_tree")
KEPT = 2

Operation = tuple[int, str, tuple[Any, ...]]
Tree = frozenset[tuple[str, bytes | None]]
"""The paths on a disk, each with its bytes; None for a folder."""


class Recorder:
    """Notes the file operations of this process below a folder, each with its time; the clock is that of all processes.

    An operation that changes something is noted when it begins, one that flushes when it is done.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.operations = root, list[Operation]()
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Recorder":
        self.originals = {name: getattr(files, name) for name in RECORDED}
        for name, original in self.originals.items():
            setattr(files, name, self._recorded(name, original))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, original in self.originals.items():
            setattr(files, name, original)

    def note(self, kind: str, *args: Any) -> None:
        """Note what is no file operation: "returned" with a path that the caller was told is committed."""
        with self._lock:
            self.operations.append((time.monotonic_ns(), kind, args))

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            if name in ("sync", "sync_folder"):
                result = original(*args)
                self.note(name, self._paths[args[0]] if name == "sync" else self._below(args[0]))
                return result
            if name == "write":
                begin, path = time.monotonic_ns(), self._paths[args[0]]
                count = original(*args)
                with self._lock:
                    self.operations.append((begin, name, (path, bytes(args[1][:count]))))
                return count
            if name == "remove_tree":
                for path in sorted(args[0].rglob("*")) if args[0].is_dir() else []:
                    self.note("remove", self._below(path))
                if args[0].exists():
                    self.note("remove", self._below(args[0]))
                return original(*args)
            self.note(name, *(self._below(arg) for arg in args if isinstance(arg, Path)))  # and not their modes
            result = original(*args)
            if name == "create":
                self._paths[result] = self._below(args[0])
            return result

        return operation

    def _below(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path != self.root else ""


def merged(traces: Sequence[Sequence[Operation]]) -> list[Operation]:
    """Return the operations of several processes in the order of their times."""
    return sorted(itertools.chain.from_iterable(traces), key=lambda operation: operation[0])


# -- the disk ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class File:
    """A file: the bytes that are safe, and those behind them that are not."""

    safe: bytes = b""
    unsafe: bytes = b""

    def outcomes(self) -> list[bytes]:
        """Return what it may hold."""
        size = len(self.unsafe)
        half, zeros = size // 2, bytes(size)
        parts = {self.unsafe[:end] for end in (0, 1, half, size - 1, size) if end >= 0}
        parts |= {zeros, self.unsafe[:half] + zeros[half:], zeros[:half] + self.unsafe[half:]}
        return [self.safe + part for part in sorted(parts)]


@dataclass(eq=False)
class Folder:
    """A folder: the names that are safe."""

    safe: "dict[str, File | Folder]" = field(default_factory=dict)
    live: "dict[str, File | Folder]" = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """A change of a folder's names that is not safe: a name for something, or a name less.

    Args:
        after: the change that is there wherever this one is: the new name of what is renamed.
    """

    folder: Folder
    name: str
    target: File | Folder | None
    after: "Change | None" = None


@dataclass(frozen=True)
class Moment:
    """What is required of a loss of power at one moment: of each path its bytes, and those that must be there."""

    right: Mapping[str, Tree]
    required: frozenset[str]


class Disk:
    """Follows operations, and says what the disk may hold if the power is lost now.

    A path is committed once its rename from a hidden name is safe; what it holds then is what it must always hold.
    """

    def __init__(self) -> None:
        self.root = Folder()
        self.changes: list[Change] = []
        self.right: dict[str, Tree] = {}
        self._committed: list[str] = []
        self._taken_away: set[str] = set()
        self._commits: list[tuple[str, Change]] = []

    def follow(self, kind: str, args: tuple[Any, ...]) -> None:
        """Take over one operation."""
        getattr(self, f"_{kind}")(*args)
        unsafe = set(map(id, self.changes))
        self._committed += [path for path, change in self._commits if id(change) not in unsafe]
        self._commits = [(path, change) for path, change in self._commits if id(change) in unsafe]

    def moment(self) -> Moment:
        """Return what is required now: all that is committed and not taken away, and in any case the newest."""
        kept = [path for path in self._committed if path not in self._taken_away] + self._committed[-KEPT:]
        return Moment(dict(self.right), frozenset(kept))

    def outcomes(self, most: int, samples: int, draw: random.Random) -> Iterator[tuple[Tree, bool]]:
        """Yield what the disk may hold now, and whether it was drawn by chance.

        Args:
            most: so many changes and files that are not safe are tried in every combination.
            samples: how many combinations are drawn of more.
        """
        loose = [file for file in _files(self.root) if file.unsafe]
        if len(self.changes) + len(loose) <= most:
            for is_made in itertools.product((False, True), repeat=len(self.changes)):
                if self._is_legal(is_made):
                    for contents in itertools.product(*(file.outcomes() for file in loose)):
                        yield self._tree(is_made, loose, contents), False
            return
        for _ in range(samples):
            is_made = tuple(draw.random() < 0.5 for _ in self.changes)
            contents = tuple(draw.choice(file.outcomes()) for file in loose)
            if self._is_legal(is_made):
                yield self._tree(is_made, loose, contents), True

    def _is_legal(self, is_made: tuple[bool, ...]) -> bool:
        made = {id(change) for change, is_there in zip(self.changes, is_made, strict=True) if is_there}
        waiting = {id(change) for change in self.changes} - made
        return not any(id(change.after) in waiting for change in self.changes if id(change) in made)

    def _tree(self, is_made: tuple[bool, ...], loose: Sequence[File], contents: Sequence[bytes]) -> Tree:
        names: dict[int, dict[str, File | Folder]] = {}
        for change, is_there in zip(self.changes, is_made, strict=True):
            if is_there:
                of_folder = names.setdefault(id(change.folder), dict(change.folder.safe))
                if change.target is None:
                    of_folder.pop(change.name, None)
                else:
                    of_folder[change.name] = change.target
        held = {id(file): content for file, content in zip(loose, contents, strict=True)}
        return frozenset(_walk(self.root, "", lambda f: names.get(id(f), f.safe), lambda f: held.get(id(f), f.safe)))

    # -- operations ---------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> Any:
        place: Any = self.root
        for part in Path(path).parts:
            place = place.live[part]
        return place

    def _change(self, path: str, target: File | Folder | None, after: Change | None = None) -> Change:
        folder, name = self._find(str(Path(path).parent)), Path(path).name
        if target is None:
            folder.live.pop(name)
        else:
            folder.live[name] = target
        self.changes.append(Change(folder, name, target, after))
        return self.changes[-1]

    def _make_folder(self, path: str) -> None:
        self._change(path, Folder())

    def _create(self, path: str) -> None:
        self._change(path, File())

    def _write(self, path: str, data: bytes) -> None:
        self._find(path).unsafe += data

    def _sync(self, path: str) -> None:
        file = self._find(path)
        file.safe, file.unsafe = file.safe + file.unsafe, b""

    def _rename(self, source: str, target: str) -> None:
        moved = self._find(source)
        added = self._change(target, moved)
        self._change(source, None, added)
        if isinstance(moved, Folder) and not Path(target).name.startswith("."):
            self.right[target] = frozenset(_walk(moved, "", lambda f: f.live, lambda f: f.safe + f.unsafe))
            self._commits.append((target, added))
        elif isinstance(moved, Folder):
            self._taken_away.add(source)

    def _remove(self, path: str) -> None:
        self._change(path, None)

    def _sync_folder(self, path: str) -> None:
        folder = self._find(path)
        for change in self.changes:
            if change.folder is folder:
                if change.target is None:
                    folder.safe.pop(change.name, None)
                else:
                    folder.safe[change.name] = change.target
        self.changes = [change for change in self.changes if change.folder is not folder]

    def _returned(self, path: str) -> None:
        assert path in self._committed, f"{path} was said to be committed, and a loss of power may take it back"


def _files(folder: Folder) -> Iterator[File]:
    for entry in folder.live.values():
        if isinstance(entry, Folder):
            yield from _files(entry)
        else:
            yield entry


def _walk(
    folder: Folder, above: str, names: Callable[[Folder], Mapping[str, Any]], content: Callable[[File], bytes]
) -> Iterator[tuple[str, bytes | None]]:
    for name, entry in names(folder).items():
        path = f"{above}/{name}" if above else name
        yield path, None if isinstance(entry, Folder) else content(entry)
        if isinstance(entry, Folder):
            yield from _walk(entry, path, names, content)


# -- what is required -------------------------------------------------------------------------------------------------


def check_tree(tree: Tree, moment: Moment) -> None:
    """Require of one outcome that what has a final name is whole and right, and that nothing committed is lost."""
    paths = dict(tree)
    for path, right in moment.right.items():
        if path in paths:
            held = frozenset((name[len(path) + 1 :], data) for name, data in tree if name.startswith(f"{path}/"))
            wrong = sorted(name for name, _ in held ^ right)
            assert not wrong, f"{path} has its name, and is not whole: {wrong}"
    lost = sorted(path for path in moment.required if path not in paths)
    assert not lost, f"committed, and lost: {lost}"
    for path, data in tree:
        if data is None or Path(path).name != LATEST:
            continue
        assert data.decode().strip() in {Path(right).name for right in moment.right}, f"LATEST says {data!r}"


def lay_out(tree: Tree, root: Path) -> None:
    """Put an outcome on the disk, in an empty folder."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path, data in sorted(tree, key=lambda entry: entry[0]):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


@dataclass
class Counts:
    """How much was tried.

    Args:
        moments: at which the power was lost: after each operation.
        outcomes: combinations of what was not safe, over all moments.
        drawn: of these, drawn by chance, because there were too many.
        states: distinct contents of the disk.
        started: of these, laid out on a disk for the next run to start on. Of states that differ only in the bytes of
            files in hidden folders, which nothing reads, one.
    """

    moments: int = 0
    outcomes: int = 0
    drawn: int = 0
    states: int = 0
    started: int = 0


def try_all(
    operations: Sequence[Operation],
    root: Path,
    start: Callable[[Path, Moment], None],
    *,
    most: int = 12,
    samples: int = 2000,
    starts: int | None = None,
    seed: int = 1,
) -> Counts:
    """Lose the power after each operation, in every way; require that nothing is lost, and have the next run start.

    Args:
        root: an empty folder for the outcomes.
        start: starts the next run on an outcome.
        most, samples: see `Disk.outcomes`.
        starts: how many of the distinct states the next run is started on, drawn by chance; None for all.
    """
    disk, draw, counts = Disk(), random.Random(seed), Counts()
    states: dict[tuple[Tree, frozenset[str]], Moment] = {}
    for _, kind, args in operations:
        disk.follow(kind, args)
        moment, counts.moments = disk.moment(), counts.moments + 1
        for tree, is_drawn in disk.outcomes(most, samples, draw):
            counts.outcomes += 1
            counts.drawn += is_drawn
            if (tree, moment.required) not in states:
                check_tree(tree, moment)
                states[tree, moment.required] = moment
    counts.states = len({tree for tree, _ in states})
    alike = {
        frozenset(_shown(path, data) for path, data in tree): (tree, moment) for (tree, _), moment in states.items()
    }
    chosen = list(alike.values())
    for tree, moment in chosen if starts is None else draw.sample(chosen, min(starts, len(chosen))):
        lay_out(tree, root)
        start(root, moment)
        counts.started += 1
    return counts


def _shown(path: str, data: bytes | None) -> tuple[str, bytes | None]:
    """Return an entry of a disk without the bytes that nothing reads."""
    is_hidden = any(part.startswith(".") for part in Path(path).parts)
    return path, b"" if is_hidden and data is not None else data
