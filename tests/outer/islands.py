"""Islands of numpy arrays in threads, a mailbox, and a sequential oracle of their exchanges."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroshard.outer.island_exchange import Island, Values
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_source import open_mailbox
from zeroshard.outer.serve import Mailbox

SECRET = b"a secret of the tests"


class Arrays(Values):
    """Values that are an array; several ranks are threads that meet at a barrier."""

    def __init__(
        self,
        values: np.ndarray,
        rank: int = 0,
        ranks: int = 1,
        facts: dict[str, Any] | None = None,
        meeting: Any = None,
    ) -> None:
        super().__init__(rank, ranks, values.size, values.dtype.str, facts or {})
        self.values, self._meeting = values, meeting

    def read(self) -> np.ndarray:
        return self.values.copy()

    def write(self, values: np.ndarray) -> None:
        self.values[:] = values

    def texts(self, text: str) -> list[str]:
        return [text] if self._meeting is None else self._meeting.texts(self.rank, text)


class Meeting:
    """The all-gather of threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._texts = threading.Barrier(ranks, timeout=60), [""] * ranks

    def texts(self, rank: int, text: str) -> list[str]:
        self._texts[rank] = text
        self._barrier.wait()
        found = list(self._texts)
        self._barrier.wait()
        return found


def secret_in(folder: Path) -> Path:
    """Write the secret, once, though several threads ask."""
    path, own = folder / "secret", folder / f"secret-{threading.get_ident()}"
    if not path.exists():
        own.write_bytes(SECRET)
        own.chmod(0o600)
        own.rename(path)
    return path


def mailbox(folder: Path, address: str = "127.0.0.1:0", **options: Any) -> Mailbox:
    """Return a mailbox with a folder and short limits."""
    return Mailbox(address, SECRET, folder / "mailbox", **({"gone_s": 3.0} | options))


def options_of(box: Mailbox, folder: Path, name: str, islands: int = 2, **options: Any) -> IslandOptions:
    """Return the options of an island."""
    given = {"every": 1, "staleness": 0, "patience_s": 1.0, "arrive_s": 20.0} | options
    return IslandOptions(name, islands, address=box.address, secret_file=secret_in(folder), **given)


def island(box: Mailbox, folder: Path, name: str, values: np.ndarray, islands: int = 2, **options: Any) -> Island:
    """Let an island of one rank join."""
    asked = options_of(box, folder, name, islands, **options)
    arrays = Arrays(values)
    return Island(asked, arrays, open_mailbox(asked, arrays))


def start_values(name: str, numel: int = 1000, dtype: str = "<f4") -> np.ndarray:
    """Return the values that an island of this name has before it joins."""
    return np.random.default_rng(sum(map(ord, name))).standard_normal(numel).astype(dtype)


def at_once(*actions: Callable[[], Any], limit_s: float = 60.0) -> list[Any]:
    """Run functions in threads and return their results; raise what one of them raised."""
    results: list[Any] = [None] * len(actions)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = actions[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(actions))]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < end_s:
        time.sleep(0.01)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "an island hangs"
    return results


def same(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether two arrays have the same bits."""
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


def mean_in_order(start: np.ndarray, changes: Iterable[Sequence[np.ndarray]]) -> np.ndarray:
    """The oracle of a synchronous run: add the mean of each exchange's changes, summed in the order of islands."""
    values = start.copy()
    for first, *others in changes:
        total = first.copy()
        for other in others:
            total += other
        values += total * values.dtype.type(1.0 / (1 + len(others)))
    return values
