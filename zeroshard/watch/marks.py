"""Marks in the stream of a device, and the thread that asks whether the device has passed them.

Owns the thread: a query may block, as while the driver frees memory, and no heartbeat may wait for it. It must not know
what marks stand for, but in words.
"""

import threading
import time
from collections.abc import Callable
from typing import final

__all__ = ["Marks"]


@final
class Marks:
    """The first and the last mark in the device's stream, as functions that return whether the device passed them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: list[tuple[Callable[[], bool], str]] = []
        self._since_s = 0.0
        self.is_polled = False
        """Whether a thread polls the marks."""

    def add(self, is_done: Callable[[], bool], what: str, now_s: float) -> None:
        """Replace the last mark; marks between the first and the last add no information."""
        with self._lock:
            self._since_s = self._since_s if self._marks else now_s
            self._marks[1:] = [(is_done, what)] if self._marks else []
            self._marks = self._marks or [(is_done, what)]

    def start_polling(self, stop: threading.Event, pause_s: float) -> threading.Thread:
        """Start a thread that drops marks which the device has passed, and return it; `stop` ends it."""
        self.is_polled = True
        thread = threading.Thread(target=self._poll_until, args=(stop, pause_s), daemon=True)
        thread.start()
        return thread

    def _poll_until(self, stop: threading.Event, pause_s: float) -> None:
        while not stop.is_set():
            if not self._poll():
                stop.wait(pause_s)

    def _poll(self) -> bool:
        """Drop the first mark if the device has passed it, and return whether it has. The query may block."""
        first = next(iter(self._marks), None)
        if first is None or not first[0]():
            return False
        with self._lock:
            # Only this thread drops marks, and `add` replaces later ones alone.
            del self._marks[0]
            self._since_s = time.monotonic()
        return True

    def first(self) -> tuple[str, float]:
        """Return the operation before the first mark, and the time of the last progress; empty without marks."""
        with self._lock:
            return (self._marks[0][1], self._since_s) if self._marks else ("", 0.0)
