"""What Transformers reads of a mask before it leaves the mask out.

Owns the values of a trace's tensors, as far as they follow from its inputs, and the names that Transformers does not
publish; `tests/plan/test_masks.py` holds them against the installed release. It must not know events or phases. Imports
nothing of Transformers: no model of it runs where nobody has imported it.

Note: why values
    Attention needs no mask if it is causal, or whole, and no sequence is padded or packed. Transformers reads masks and
    positions to know, but not those of fake tensors: a trace would have masks of all pairs of tokens, and repeated keys
    and values. Here it reads them in a trace, too. What it reads follows from inputs, and from tensors that are made
    without others; where inputs have no values, no sequence is padded or packed.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor

from zeroshard.torch_private import storage_of, without_modes
from zeroshard.tree import find, map_tensors

__all__ = ["Masks"]

MODULES: Final = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""The modules of Transformers that read masks."""
ASKED: Final = "is_tracing"
"""The function by which they ask whether a tensor is fake."""
MOST_BYTES: Final = 1 << 23
"""Of a storage whose values are followed; Transformers reads nothing that has a row and a column for each token."""


@final
class Masks:
    """The values of small tensors of a trace, which Transformers' masks depend on."""

    def __init__(self) -> None:
        self.are_read = False
        """Whether Transformers is there to read masks; without it no operation needs to be followed."""
        self._values: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}  # by storage

    def begin(self, inputs: Sequence[Tensor], fakes: Sequence[Tensor]) -> None:
        """Copy the values of a trace's inputs, where they have some."""
        for one, fake in zip(inputs, fakes, strict=True):
            if type(one) is Tensor and not one.is_meta and one.untyped_storage().nbytes() <= MOST_BYTES:
                with without_modes():
                    self._keep(fake, one.untyped_storage().clone().cpu())

    @contextmanager
    def read(self, mode: object) -> Iterator[None]:
        """Return a context in which Transformers reads masks of fake tensors.

        Args:
            mode: of these tensors. Those of other modes, as of a compilation in another thread, stay unread.
        """
        modules = [vars(sys.modules[name]) for name in MODULES if name in sys.modules]
        placed = [(names, _Reading(names[ASKED], mode)) for names in modules if ASKED in names]
        self.are_read = bool(placed)
        for names, reading in placed:
            names[ASKED] = reading
        try:
            yield
        finally:
            for names, reading in placed:
                reading.mode = None
                # Another trace may have begun since; then its end puts the function back.
                while isinstance(now := names[ASKED], _Reading) and now.mode is None:
                    names[ASKED] = now.before

    def follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Compute the values of an operation's results, if all of its arguments have values.

        Args:
            given: the tensors in the arguments.
            made: the tensors in the results.
        """
        known = [self._of(one) for one in given]
        if func.is_view or (given and all(one is None for one in known)):
            return
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        is_small = all(one.untyped_storage().nbytes() <= MOST_BYTES and not one.is_meta for one in made)
        values = list[Tensor]()
        if is_small and not is_drawn and all(one is not None for one in known):
            # Values that a run would refuse are no matter of a plan.
            with without_modes(), suppress(Exception):
                values = find(func(*map_tensors(args, self._of), **map_tensors(kwargs, self._of)), Tensor)
        if len(values) == len(made):
            for one, value in zip(made, values, strict=True):
                self._keep(one, value.untyped_storage())
        elif func._schema.is_mutable:
            changes = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
            for one in find([*compress(args, changes), *kwargs.values()], Tensor):
                self._values.pop(storage_of(one), None)

    def answer(self, tensor: Tensor) -> Any:
        """Return the value of a tensor that Transformers reads to decide on a mask; None if it is read elsewhere."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _module_of(frame).partition(".")[0] in ("torch", "zeroshard"):
            frame = frame.f_back
        if frame is None or _module_of(frame) not in MODULES:
            return None
        value = self._of(tensor)
        with without_modes():
            return True if value is None else value.item()

    def _of(self, fake: Tensor) -> Tensor | None:
        """Return the values of a tensor, in memory that it shares with those of its views."""
        _, storage = self._values.get(storage_of(fake), (None, None))
        if storage is None or storage.nbytes() != fake.untyped_storage().nbytes():
            return None
        with without_modes():
            value = torch.empty(0, dtype=fake.dtype, device="cpu")
            return value.set_(storage, fake.storage_offset(), fake.shape, fake.stride())

    def _keep(self, fake: Tensor, values: torch.UntypedStorage) -> None:
        key, storage = storage_of(fake), fake.untyped_storage()
        self._values[key] = weakref.ref(storage, lambda _: self._values.pop(key, None)), values


@final
class _Reading:
    """Stands for Transformers' `is_tracing`: tensors of a trace are not traced.

    Args:
        before: the function.
        mode: of the tensors; None when the trace is over.
    """

    def __init__(self, before: Any, mode: object) -> None:
        self.before, self.mode = before, mode

    def __call__(self, tensor: Any = None) -> bool:
        is_own = self.mode is not None and getattr(tensor, "fake_mode", None) is self.mode
        return False if is_own else self.before(tensor)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
