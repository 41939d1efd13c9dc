"""The state besides inputs that a recomputation must restore: training modes, buffers, and generators of modules.

Owns the choice of the state that is recorded for a forward. It must not know what runs between a forward and its
recomputation.

Note: buffers that a forward changes
    A forward may change buffers: running statistics, the vectors of spectral norm, moving averages. Its recomputation
    must read the values from before the forward, and must not keep its own changes, or they would count twice.
    A buffer that the forward replaces by another tensor needs no copy: the old tensor still has the values. A buffer
    that the forward changes in place needs a copy from before. To avoid copies of all buffers, the first forward in
    each combination of training modes copies all of them, and records the modules whose buffers have a new version
    afterwards; later forwards copy the buffers of these modules only. All buffers of a module count together, because
    the kernels of batch norm do not increase the versions of running statistics, but `num_batches_tracked` has a new
    version. Torch's norms in training mode are always copied, because a rank may first use one in a later forward.
    If a later forward changes a buffer that was not copied, its recomputation raises an error: the old values are lost.
    Buffers that the forward leaves alone need no copy until ranks exchange buffers before its backward (`preserve`).
Note: generators
    A forward searches all attributes of all modules for generators if the number of attributes has changed since the
    forward before. Otherwise it reads only the attributes that held a generator or None at the last search. A
    generator that later replaces an attribute of another type is not found.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, Final, final

import torch
from torch import nn

from zeroshard.torch_private import BatchNorm, version_of, without_modes

__all__ = ["Kept", "Surroundings"]

Tensor = torch.Tensor

NORMS: Final = (BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Modules of torch with statistics that each forward in training mode changes."""


@final
class Surroundings:
    """The state of a module and its submodules that may differ between a forward and its recomputation.

    Args:
        what: begins an error: a rank, and a forward of the module.
        states: receives the state of each forward; holds them weakly.
    """

    def __init__(self, module: nn.Module, what: str, states: "weakref.WeakSet[Kept]") -> None:
        self._modules, self._what, self._states = dict(module.named_modules()), what, states
        self._norms = {name for name, one in self._modules.items() if isinstance(one, NORMS) and one._buffers}
        self._changed: dict[tuple[bool, ...], set[str]] = {}
        """Names of modules that may change buffers in place, by the training modes of all modules in a forward."""
        self._attributes = [vars(one) for one in self._modules.values()]
        self._places: list[tuple[Mapping[str, Any], str]] = []
        self._count = -1

    def keep(self) -> "Kept":
        """Record the state before a forward."""
        modes = tuple(module.training for module in self._modules.values())
        kept = Kept(self._modules, self._what, modes, self._generators(), self._changed.get(modes))
        self._states.add(kept)
        return kept

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that are attributes of the modules; see the note."""
        if (count := sum(map(len, self._attributes))) != self._count:
            self._count, kinds = count, (torch.Generator, NoneType)
            self._places = [
                (own, key) for own in self._attributes for key, one in own.items() if isinstance(one, kinds)
            ]
        found = (own.get(key) for own, key in self._places)
        return [one for one in found if isinstance(one, torch.Generator)]

    def note(self, kept: "Kept") -> None:
        """Record which buffers a finished forward changed."""
        if kept.modes not in self._changed:
            self._changed[kept.modes] = {name for name in self._norms if self._modules[name].training}
        self._changed[kept.modes] |= kept.settle()


@final
class Kept:
    """The state before one forward.

    Args:
        modules: modules by name.
        what: as of `Surroundings`.
        modes: whether each module is in training mode.
        generators: generators of the modules.
        changed: names of the modules whose buffers are copied; None for all.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        what: str,
        modes: tuple[bool, ...],
        generators: Sequence[torch.Generator],
        changed: set[str] | None,
    ) -> None:
        self._modules, self._what, self.modes = modules, what, modes
        self._generators = [(one, one.get_state()) for one in generators]
        self._buffers = {
            name: {key: (one, version_of(one)) for key, one in module._buffers.items() if one is not None}
            for name, module in modules.items()
            if module._buffers
        }
        self._copies = {
            name: {key: one.detach().clone() for key, (one, _) in buffers.items()}
            for name, buffers in self._buffers.items()
            if changed is None or name in changed
        }
        self._parameters = [
            (one, version_of(one))
            for module in modules.values()
            for one in module._parameters.values()
            if one is not None
        ]
        self._lost: nn.Module | None = None

    def settle(self) -> set[str]:
        """Drop copies of unchanged state; return the names of modules whose buffers changed.

        Raises:
            RuntimeError: the forward changed a parameter in place.
        """
        if any(version_of(one) != version for one, version in self._parameters):
            raise RuntimeError(
                f"{self._what}, which is recomputed, changed a parameter in place, as its recomputation would again. "
                "Make it a buffer, exclude its unit from activations='recompute', or leave out recompute=True."
            )
        changed = set()
        for name, buffers in self._buffers.items():
            if any(version_of(one) != version for one, version in buffers.values()):
                changed.add(name)
                if name not in self._copies:
                    self._lost = self._modules[name]
            elif all(self._modules[name]._buffers.get(key) is one for key, (one, _) in buffers.items()):
                self._copies.pop(name, None)
            else:
                self._copies[name] = {key: one for key, (one, _) in buffers.items()}
        return changed

    def preserve(self, written: Collection[int]) -> None:
        """Copy the buffers of modules that this forward left alone, and of which some are about to be written."""
        for name, buffers in self._buffers.items():
            now = self._copies.get(name) or {key: one for key, (one, _) in buffers.items()}
            if any(id(one) in written for one in now.values()):
                self._copies[name] = {key: one.detach().clone() for key, one in now.items()}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state for a recomputation, and the present state afterwards.

        Raises:
            RuntimeError: buffers changed that no previous forward had changed.
        """
        if self._lost is not None:
            names = ", ".join(self._lost._buffers)
            raise RuntimeError(
                f"{self._what}, which is recomputed, changed buffers ({names}) of a {type(self._lost).__name__} that "
                "no previous forward had changed, so their previous values are lost. Exclude its unit from "
                "activations='recompute', leave out recompute=True, or let its first forward change them, too."
            )
        modes = tuple(module.training for module in self._modules.values())
        states = [one.get_state() for one, _ in self._generators]
        buffers = {name: dict(self._modules[name]._buffers) for name in self._copies}
        try:
            self._set(self.modes, [state for _, state in self._generators])
            # Copied again, because the graph may be used twice.
            with without_modes():
                again = {name: {key: one.clone() for key, one in some.items()} for name, some in self._copies.items()}
            for name, copies in again.items():
                self._modules[name]._buffers.update(copies)
            yield
        finally:
            self._set(modes, states)
            for name, values in buffers.items():
                self._modules[name]._buffers.update(values)

    def _set(self, modes: tuple[bool, ...], states: list[Any]) -> None:
        for module, mode in zip(self._modules.values(), modes, strict=True):
            module.training = mode
        for (generator, _), state in zip(self._generators, states, strict=True):
            generator.set_state(state)
