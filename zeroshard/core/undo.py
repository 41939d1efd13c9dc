"""The end of a sharded model: what `zs.shard` registered or replaced on the user's objects, to take it back.

Owns the list. Whoever registers a hook or replaces an attribute of a model or an optimizer adds it here;
`whole/detach.py` takes all of it back.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, final

from torch.utils.hooks import RemovableHandle

__all__ = ["DETACHED", "Ending", "Undo"]

MISSING: Final = object()
DETACHED: Final = (
    "This model was detached by zero.detach(), so its handle, averages and earlier graphs no longer work. The model "
    "and its optimizers are plain: use them directly, or call zs.shard() again."
)


class Ending:
    """An object that is emptied when its model is detached; whoever still holds it learns why it does not work."""

    def end(self) -> None:
        """Release everything that this object holds."""
        vars(self).clear()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or vars(self):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        raise RuntimeError(DETACHED)


@final
class Undo:
    """The changes of one model and its optimizers, in order."""

    def __init__(self) -> None:
        self._changes: list[Callable[[], object]] = []

    def add(self, take_back: Callable[[], object]) -> None:
        """Add a function that takes a change back."""
        self._changes.append(take_back)

    def keep(self, handle: RemovableHandle) -> RemovableHandle:
        """Add a registered hook, and return its handle."""
        self.add(handle.remove)
        return handle

    def put(self, place: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Replace a value, such as an attribute in `vars(object)`; a value that user code sets later stays."""
        before, place[key] = place.get(key, MISSING), value

        def take_back() -> None:
            if place.get(key) is not value:
                return
            if before is MISSING:
                del place[key]
            else:
                place[key] = before

        self.add(take_back)

    @contextmanager
    def apart(self) -> Iterator["Undo"]:
        """Record the changes of the context in a part, which may be taken back before the others."""
        before, part = self._changes, Undo()
        self._changes = part._changes
        try:
            yield part
        finally:
            self._changes = before
            self.add(part.run)

    def run(self) -> None:
        """Take all changes back, the last one first."""
        while self._changes:
            self._changes.pop()()
