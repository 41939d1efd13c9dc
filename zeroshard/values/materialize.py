"""Models on the meta device: initial values unit by unit, so that no rank holds the whole model.

Owns the source of initial values (an initializer, or a directory of safetensors: `weights.py`) and their order. It
yields the numbers of initialized units, and must not know buckets or collectives. Read `setup/takeover.py`
(`take_over`) first.

Note: order
    Modules are visited in the order of `Module.apply`, children before parents, which is also the order in which
    constructors finish. The draws from torch's generator therefore equal those of `model.to_empty(...)` and
    `model.apply(initializer)` in one process, and the values are equal bit for bit. (A module object registered in
    two places is visited once.)
Note: split parameters
    Where torch has split parameters on the meta device, plain ones stand in for them until their unit is complete
    (`parallel/standins.py`). A rank thus holds a unit whole, and then its own part.
Note: when a unit is complete
    An initializer may write to submodules: blocks scale a weight, T5 draws its embedding again from the root. All
    initializers therefore run on the meta device first, at no cost, to record the parameters that each touches. A unit
    is complete after the last initializer that touches it. A rank thus holds its shards, the parameters of the root,
    tied weights and late writers, and one unit twice: as initialized and as its bucket. A write that was not recorded
    raises: for whole parameters it would otherwise succeed, with different numbers on each rank.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroshard.core.parameter import METADATA
from zeroshard.core.slot import slot_of
from zeroshard.describe.units import UnitPlan
from zeroshard.torch_private import version_of
from zeroshard.transformers_files import is_of_transformers
from zeroshard.tree import find
from zeroshard.values.weights import Weights, own_tensors, tensors_of
from zeroshard.wire.mesh import Mesh

__all__ = ["InitFn", "Share", "StandIns", "check_source", "in_order", "initializers_of", "is_on_meta", "materialize"]

Tensor = torch.Tensor
InitFn = Callable[[nn.Module], object]


Share = Callable[[Tensor, str], None]
"""Overwrites a tensor with the values of rank 0; takes what it is, for errors. Collective: broadcast."""


class StandIns(Protocol):
    """Plain parameters in the place of those that torch has split: see `parallel/standins.py`."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what stands in for a parameter, or the parameter itself."""

    def split(self, parameters: Sequence[tuple[str, nn.Parameter]] | None = None) -> None:
        """Give parameters their parts of the values, and put them back; by default all that are left."""

    def end(self) -> None:
        """Put all parameters back, without values."""


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of the model is on the meta device."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def check_source(
    model: nn.Module, weights: str | Path | InitFn | Weights | None, *, compares: bool = True
) -> Weights | InitFn | None:
    """Raise, before any change, if a model's initial values are not available; return their source.

    Args:
        compares: as in `Weights.check`.

    Raises:
        TypeError: `weights` is neither a directory nor a function.
        ValueError: no initializer writes a module's own parameters or buffers; names or shapes differ between the
            model and the files; the model already has values.
    """
    if not (weights is None or isinstance(weights, str | Path | Weights) or callable(weights)):
        raise TypeError(f"weights must be a directory or a function of a module; got {weights!r}.")
    if not is_on_meta(model):
        if weights is not None:
            raise ValueError(
                "weights= is for a model on the meta device; this one has values. Initialize or load it before "
                "zs.shard(), or build it under `with torch.device('meta'):`."
            )
        return None
    if callable(weights) or isinstance(weights, Weights):
        return weights
    opened = None if weights is None else Weights(weights, model)
    if opened is not None:
        opened.check(model, compares=compares)
    _check_initializers(model, opened)
    return opened


def _check_initializers(model: nn.Module, weights: Weights | None) -> None:
    initializers, tensors = initializers_of(model), tensors_of(model)
    for name, module in model.named_modules():
        for key, tensor in own_tensors(module):
            is_loaded = weights is not None and weights.find(tensors[id(tensor)][1]) is not None
            if tensor.is_meta and not is_loaded and initializers[module] is None:
                raise ValueError(
                    f"Nothing initializes '{key}' of {_where(name, module)}, which is on the meta device: "
                    "the class has no reset_parameters(). Give it one, or pass zs.shard(..., weights=function of a "
                    "module), or, for parameters and persistent buffers, weights=directory."
                )


def materialize(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    mesh: Mesh,
    standins: StandIns,
    source: Weights | InitFn | None = None,
    ignored: Collection[int] = (),
) -> Iterator[int]:
    """Initialize a model's tensors, and yield the number of each unit when it is complete.

    The caller takes over a unit before it requests the next one. A model that has values yields its units in order.
    Only rank 0 reads values from files; the other ranks receive them from rank 0.

    Args:
        standins: of the model; put back at the end.
        ignored: parameters in no unit, by identity; existing values are kept.
        source: a function that initializes the tensors of a module, or the files to read. Without a function,
            Transformers' `_init_weights` initializes its models, and `reset_parameters` the other modules; with
            files, these initialize only the tensors missing in the files, which can be only non-persistent buffers.

    Raises:
        ValueError: a tensor was not written, or an initializer replaced a parameter. The model is then incomplete and
            must be built again.
        RuntimeError: an initializer wrote to a completed unit, which it did not touch on the meta device.
    """
    if not is_on_meta(model):
        yield from range(len(plans))
        return
    # Initializers write a whole module, even if only a part of it lacks values.
    kept = [(p, p.detach().clone()) for p in model.parameters() if id(p) in ignored and not p.is_meta]
    with ExitStack() as at_the_end:
        at_the_end.callback(lambda: [parameter.detach().copy_(values) for parameter, values in kept])
        at_the_end.callback(standins.end)
        work = _Work(model, plans, mesh, standins, source)
        at_the_end.callback(work.unlock)
        for name, module in work.order:
            work.visit(name, module)
            for number in work.ready():
                yield from work.give(number)
        work.check_all_written()
        for number in work.rest():
            yield from work.give(number)
        standins.split()


@dataclass
class _Work:
    """Visited modules, and units that are not complete."""

    model: nn.Module
    plans: Sequence[UnitPlan]
    mesh: Mesh
    standins: StandIns
    source: Weights | InitFn | None
    order: list[tuple[str, nn.Module]] = field(default_factory=list)
    _waits: list[set[int]] = field(default_factory=list)
    """For each unit, the modules to visit before it is complete, by identity."""
    _unwritten: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """By identity: a tensor that an initializer must write, and its version after it was blanked."""
    _locked: list[tuple[nn.Parameter, type[nn.Parameter]]] = field(default_factory=list)
    _done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        names = {module: name for name, module in self.model.named_modules()}
        self.order = [(names[module], module) for module in in_order(self.model, set())]
        self._names = {identity: known for identity, (_, known) in tensors_of(self.model).items()}
        self.weights = self.source if isinstance(self.source, Weights) else None
        modules, chosen = self.model.modules(), self.source
        self._initializers = dict.fromkeys(modules, chosen) if callable(chosen) else initializers_of(self.model)
        self._meta = {id(m) for m in self.model.modules() if is_on_meta(m)}
        touches = self._foresee()
        for plan in self.plans:
            mine = {id(self.standins.of(parameter)) for _, parameter in plan.parameters}
            held = {id(m) for _, m in self.order if any(id(p) in mine for p in m._parameters.values())}
            self._waits.append(held | {module for module, touched in touches.items() if touched & mine})

    def _foresee(self) -> dict[int, set[int]]:
        """Run all initializers on the meta device; return the parameters that each module's touches, by identity."""
        touches: dict[int, set[int]] = {}
        buffers = [(module, dict(module._buffers)) for _, module in self.order]
        numpy_state, python_state = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices=[]):
            for name, module in self.order:
                if id(module) in self._meta and self._has_left(module):
                    with _Touches() as noted:
                        before = dict(module._parameters)
                        try:
                            self._initialize(name, module)
                        except Exception:
                            # The initializer needs values (the real run gives the error): assume all submodules.
                            noted.seen |= {id(parameter) for parameter in module.parameters()}
                    self._check_kept(name, module, before)
                    touches[id(module)] = noted.seen
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for module, known in buffers:
            module._buffers.update(known)
        return touches

    def _has_left(self, module: nn.Module) -> bool:
        """Return whether an initializer must write a tensor of the module."""
        if self.weights is None:
            return True
        return any(t.is_meta and not self.weights.find(self._names[id(t)]) for _, t in own_tensors(module))

    def visit(self, name: str, module: nn.Module) -> None:
        """Allocate the module's own tensors and write their values."""
        for waits in self._waits:
            waits.discard(id(module))
        if id(module) not in self._meta:
            return
        before = dict(module._parameters)
        to_load, is_left = [], self._has_left(module)
        for _, tensor in own_tensors(module):
            found = self.weights.find(self._names[id(tensor)]) if self.weights is not None else None
            if tensor.is_meta:
                _make_real(tensor, self.mesh.device, is_blank=found is None)
                if found is None:
                    self._unwritten[id(tensor)] = (tensor, version_of(tensor))
            if found is not None:
                to_load.append((found, tensor))
        if is_left:
            self._initialize(name, module)
            self._check_kept(name, module, before)
        for found, tensor in to_load:
            # The other ranks receive rank 0's values by broadcast.
            if self.weights is not None and self.mesh.rank == 0:
                self.weights.read(found, tensor)

    def _initialize(self, name: str, module: nn.Module) -> None:
        initializer = self._initializers[module]
        if initializer is None:
            return
        try:
            with torch.no_grad(), torch.device(self.mesh.device):
                initializer(module)
        except Exception as error:
            error.add_note(
                f"{self.mesh} while {_where(name, module)} was initialized. An initializer may write only to its own "
                "module and submodules, and must write the same tensors as on the meta device, where it runs first."
            )
            raise

    def _check_kept(self, name: str, module: nn.Module, before: dict[str, nn.Parameter | None]) -> None:
        replaced = [key for key, parameter in module._parameters.items() if before.get(key) is not parameter]
        if replaced:
            raise ValueError(
                f"The initializer of {_where(name, module)} replaced the parameter '{replaced[0]}', so an "
                "optimizer would hold the old one. Write the values in place: torch.nn.init, copy_()."
            )
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._names:
                module._buffers[key] = buffer.to(self.mesh.device)

    def ready(self) -> Iterator[int]:
        """Yield the units that are complete now."""
        for number, waits in enumerate(self._waits):
            if not waits and number not in self._done and self._is_written(number):
                self._done.add(number)
                yield number

    def _is_written(self, number: int) -> bool:
        identities = [id(self.standins.of(p)) for _, p in self.plans[number].parameters]
        for identity in identities:
            if identity in self._unwritten:
                if not _is_written(*self._unwritten[identity]):
                    return False
                del self._unwritten[identity]
        return True

    def rest(self) -> list[int]:
        """Return the units that were not yielded."""
        return [number for number in range(len(self.plans)) if number not in self._done]

    def check_all_written(self) -> None:
        """Raise if a tensor was not written."""
        for name, module in self.model.named_modules():
            for key, tensor in own_tensors(module):
                known = self._unwritten.get(id(tensor))
                if tensor.is_meta or (known is not None and not _is_written(*known)):
                    source = "weights=" if callable(self.source) else "its initializer"
                    raise ValueError(
                        f"{self.mesh} '{key}' of {_where(name, module)}, {tuple(tensor.shape)}, was on the "
                        f"meta device, and {source} did not write all its elements. Every parameter and buffer "
                        "needs values: extend the function (module.reset_parameters() is torch's own for most "
                        "modules), or give weights= a directory."
                    )

    def give(self, number: int) -> Iterator[int]:
        """Yield a unit that is complete; later writes to its parameters raise."""
        self.standins.split(self.plans[number].parameters)
        yield number
        for _, parameter in self.plans[number].parameters:
            gathered, released = slot_of(parameter).form.classes
            if parameter.__class__ is gathered:
                parameter.__class__ = released
                self._locked.append((parameter, gathered))

    def unlock(self) -> None:
        """Restore access to units that are kept whole."""
        for parameter, gathered in self._locked:
            parameter.__class__ = gathered


def _where(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


@final
class _Touches(TorchFunctionMode):
    """Records the parameters whose values operations read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            # The getter or setter of a property such as `data` or `shape`.
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name not in METADATA:
            self.seen |= {id(parameter) for parameter in find((args, kwargs), nn.Parameter)}
        return func(*args, **(kwargs or {}))


def in_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module's modules that are not in `seen`, each once, in the order of `Module.apply`."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from in_order(child, seen)
    yield module


def initializers_of(model: nn.Module) -> dict[nn.Module, InitFn | None]:
    """Return the initializer of each module: that of its Transformers model, or a method of its own."""
    found: dict[nn.Module, InitFn | None] = {}

    def visit(module: nn.Module, owner: Any) -> None:
        if is_of_transformers(module):
            owner = module
        found[module] = owner._init_weights if owner is not None else _call_own
        if owner is None and _own_method(module) is None:
            found[module] = None
        for child in module.children():
            visit(child, owner)

    visit(model, None)
    return found


def _own_method(module: nn.Module) -> Callable[[], object] | None:
    # torch's attention and transformer use the second name.
    methods = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    return next((method for method in methods if callable(method)), None)


def _call_own(module: nn.Module) -> None:
    method = _own_method(module)
    assert method is not None
    method()


def _make_real(tensor: Tensor, device: torch.device, *, is_blank: bool) -> None:
    """Allocate a meta tensor in place, as the same object with its attributes.

    Args:
        is_blank: whether to fill the tensor with NaN or the lowest integer, to detect unwritten elements.
    """
    strides = torch.empty_like(tensor, memory_format=torch.preserve_format).stride()
    real = torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=device)
    if is_blank:
        real.fill_(_blank(real.dtype))
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        real.__class__ = tensor.__class__
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)


def _blank(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_written(tensor: Tensor, version: int) -> bool:
    """Return whether a tensor was written: no NaN is left; for integers, the tensor or its version has changed."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return not bool(tensor.detach().isnan().any())
    # Writes through `.data` do not change the version.
    return not tensor.numel() or version_of(tensor) != version or bool((tensor != _blank(tensor.dtype)).any())
