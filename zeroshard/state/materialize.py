"""Models on the meta device: values for one unit after the other, so that no rank ever holds the whole model.

Owns where first values come from (an initializer, or a directory of safetensors) and in which order; it hands units
over by yielding their numbers and must not know buckets or collectives. Read `state/takeover.py` (`take_over`) first.

Note: order
    Modules are visited as `Module.apply` visits them, children before parents, which is also the order in which
    constructors finish. The draws from torch's generator are thus those of `model.to_empty(...)` and
    `model.apply(initializer)` in one process, and the values are the same, bit for bit. (A module object registered in
    two places is visited once.)
Note: when a unit is complete
    An initializer may write to modules below its own: blocks scale a weight, T5 draws its embedding once more from the
    root. So all initializers run on the meta device first, where they cost nothing, and what each touches is noted; a
    unit is handed over when the last that touches it is done. A rank so holds its shards, what the root, tied weights
    and late writers need, and one unit twice: as initialized and as its bucket. A write that was not foreseen raises:
    where parameters are kept whole it would otherwise succeed, on each rank with its own numbers.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroshard.core.parameter import METADATA, ReleasedParameter, ShardedParameter
from zeroshard.describe.units import UnitPlan
from zeroshard.torch_private import version_of
from zeroshard.tree import find
from zeroshard.wire.mesh import Mesh

__all__ = ["InitFn", "Weights", "check_source", "is_on_meta", "materialize"]

Tensor = torch.Tensor
InitFn = Callable[[nn.Module], object]

SLICE_BYTES = 64 * 2**20
"""What is read from a file at once."""


def is_on_meta(model: nn.Module) -> bool:
    """Tell whether a parameter or buffer of the model has no values yet."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


@final
class Weights:
    """The tensors of a directory of safetensors files, by name.

    Args:
        directory: holds `*.safetensors`; every rank must see it, and rank 0 reads the values.

    Raises:
        ValueError: no such file there, one that cannot be read, or a name in two files.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"weights={str(directory)!r} holds no *.safetensors file.")
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
            if twice := sorted(found.keys() & self._paths.keys()):
                raise ValueError(f"'{twice[0]}' is in {self._paths[twice[0]]} and in {path}; which one is meant?")
            self._paths.update(dict.fromkeys(found, path))
            self.shapes.update(found)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    @torch.no_grad()
    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, converted to its dtype, slice by slice."""
        with safe_open(self._paths[name], framework="pt") as file:
            if not target.ndim or not target.numel():
                target.copy_(file.get_tensor(name))
                return
            source, row_bytes = file.get_slice(name), target[0].nbytes
            rows = max(1, SLICE_BYTES // max(1, row_bytes))
            for first in range(0, len(target), rows):
                target[first : first + rows].copy_(source[first : first + rows])


def check_source(model: nn.Module, weights: str | Path | InitFn | None) -> Weights | InitFn | None:
    """Raise, before anything is changed, where a model's first values cannot be had; return where they come from.

    Raises:
        TypeError: `weights` is neither a directory nor a function.
        ValueError: a module of its own parameters or buffers that nothing initializes; names or shapes that differ
            between the model and the files; a source for a model that has values.
    """
    if not (weights is None or isinstance(weights, str | Path) or callable(weights)):
        raise TypeError(f"weights must be a directory or a function of a module; got {weights!r}.")
    if not is_on_meta(model):
        if weights is not None:
            raise ValueError(
                "weights= is for a model on the meta device; this one has values. Initialize or load it before "
                "zs.shard(), or build it under `with torch.device('meta'):`."
            )
        return None
    if callable(weights):
        return weights
    opened = None if weights is None else Weights(weights)
    if opened is not None:
        _check_names(model, opened)
    _check_initializers(model, opened)
    return opened


def _check_initializers(model: nn.Module, weights: Weights | None) -> None:
    initializers, tensors = _initializers(model), _by_identity(model)
    for name, module in model.named_modules():
        for key, tensor in _named(module):
            is_loaded = weights is not None and _find(weights, tensors[id(tensor)][1]) is not None
            if tensor.is_meta and not is_loaded and initializers[module] is None:
                raise ValueError(
                    f"Nothing initializes '{key}' of {_where(name, module)}, which is on the meta device: "
                    "the class has no reset_parameters(). Give it one, or pass zs.shard(..., weights=function of a "
                    "module), or, for parameters and persistent buffers, weights=directory."
                )


def _check_names(model: nn.Module, weights: Weights) -> None:
    known: set[str] = set()
    wanted = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    for tensor, names in _by_identity(model).values():
        known |= set(names)
        if not tensor.is_meta or id(tensor) not in wanted:
            continue
        found = _find(weights, names)
        if found is None:
            raise ValueError(
                f"{weights.directory} has no '{names[0]}' {tuple(tensor.shape)}. It must hold every parameter and "
                f"persistent buffer of the model under its name in state_dict(); it holds {len(weights.shapes)} "
                f"tensors, '{next(iter(weights.shapes), None)}' first."
            )
        if weights.shapes[found] != tuple(tensor.shape):
            raise ValueError(
                f"'{found}' has shape {weights.shapes[found]} in {weights.directory} and {tuple(tensor.shape)} in the "
                "model. Build the model from the configuration that the files were saved with."
            )
    surplus = [name for name in weights.shapes if name not in known]
    if surplus:
        raise ValueError(
            f"{weights.directory} holds {len(surplus)} tensor(s) that the model has not, '{surplus[0]}' first. Build "
            "the model that the files were saved from, or write a directory without them."
        )


def materialize(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    mesh: Mesh,
    source: Weights | InitFn | None = None,
) -> Iterator[int]:
    """Give a model's tensors values, and yield the number of each unit once it can be taken over.

    The caller takes the unit over before it asks for the next one. A model that has values yields its units in order.

    Args:
        source: what initializes the tensors of one module, or where values are read from. Without the first,
            Transformers' `_init_weights` does for its models, and each module's `reset_parameters` for the others;
            of what is read they are asked for what is not there, which can be non-persistent buffers only.

    Raises:
        ValueError: something is left unwritten, or an initializer replaced a parameter. The model is then half made and
            must be built again.
        RuntimeError: an initializer wrote where it did not on the meta device, to a unit that was handed over.
    """
    if not is_on_meta(model):
        yield from range(len(plans))
        return
    work = _Work(model, plans, mesh, source)
    try:
        for name, module in work.order:
            work.visit(name, module)
            for number in work.ready():
                yield number
                work.lock(number)
        work.check_all_written()
        for number in work.rest():
            yield number
            work.lock(number)
    finally:
        work.unlock()


@dataclass
class _Work:
    """What was visited, and what waits."""

    model: nn.Module
    plans: Sequence[UnitPlan]
    mesh: Mesh
    source: Weights | InitFn | None
    order: list[tuple[str, nn.Module]] = field(default_factory=list)
    _waits: list[set[int]] = field(default_factory=list)
    """For each unit the modules to visit, by identity, before it can be handed over."""
    _unwritten: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """By identity: what an initializer must write, and its version when it was filled with nothing."""
    _locked: list[nn.Parameter] = field(default_factory=list)
    _done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        names = {module: name for name, module in self.model.named_modules()}
        self.order = [(names[module], module) for module in _children_first(self.model, set())]
        self._names = {identity: known for identity, (_, known) in _by_identity(self.model).items()}
        self.weights = self.source if isinstance(self.source, Weights) else None
        modules, chosen = self.model.modules(), self.source
        self._initializers = dict.fromkeys(modules, chosen) if callable(chosen) else _initializers(self.model)
        self._meta = {id(m) for m in self.model.modules() if is_on_meta(m)}
        touches = self._foresee()
        for plan in self.plans:
            mine = {id(parameter) for _, parameter in plan.parameters}
            held = {id(m) for _, m in self.order if any(id(p) in mine for p in m._parameters.values())}
            self._waits.append(held | {module for module, touched in touches.items() if touched & mine})

    def _foresee(self) -> dict[int, set[int]]:
        """Run all initializers on the meta device; return which parameters each module's touches, by identity."""
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
                            # It cannot run without values (the real run tells why): it may touch all below it.
                            noted.seen |= {id(parameter) for parameter in module.parameters()}
                    self._check_kept(name, module, before)
                    touches[id(module)] = noted.seen
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for module, known in buffers:
            module._buffers.update(known)
        return touches

    def _has_left(self, module: nn.Module) -> bool:
        """Tell whether an initializer must write something of the module."""
        if self.weights is None:
            return True
        return any(t.is_meta and not _find(self.weights, self._names[id(t)]) for _, t in _named(module))

    def visit(self, name: str, module: nn.Module) -> None:
        """Make the module's own tensors real and write their values."""
        for waits in self._waits:
            waits.discard(id(module))
        if id(module) not in self._meta:
            return
        before = dict(module._parameters)
        to_load, is_left = [], self._has_left(module)
        for _, tensor in _named(module):
            found = _find(self.weights, self._names[id(tensor)]) if self.weights is not None else None
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
            # The other ranks get rank 0's values by broadcast in any case.
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
                f"{self.mesh} while {_where(name, module)} was initialized. An initializer may write to its own module "
                "and to modules below it, the same ones with values as without (it runs on the meta device first, "
                "to learn what it writes)."
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
        """Yield the units that can be handed over now."""
        for number, waits in enumerate(self._waits):
            if not waits and number not in self._done and self._is_written(number):
                self._done.add(number)
                yield number

    def _is_written(self, number: int) -> bool:
        identities = [id(p) for _, p in self.plans[number].parameters if id(p) in self._unwritten]
        for identity in identities:
            if not _is_written(*self._unwritten[identity]):
                return False
            del self._unwritten[identity]
        return True

    def rest(self) -> list[int]:
        """Return the units that were not handed over."""
        return [number for number in range(len(self.plans)) if number not in self._done]

    def check_all_written(self) -> None:
        """Raise if something has no values."""
        for name, module in self.model.named_modules():
            for key, tensor in _named(module):
                known = self._unwritten.get(id(tensor))
                if tensor.is_meta or (known is not None and not _is_written(*known)):
                    source = "weights=" if callable(self.source) else "its initializer"
                    raise ValueError(
                        f"{self.mesh} '{key}' of {_where(name, module)}, {tuple(tensor.shape)}, was on the "
                        f"meta device, and {source} did not write all of it. Every parameter and buffer needs values: "
                        "extend the function (module.reset_parameters() is torch's own for most modules), or give "
                        "weights= a directory."
                    )

    def lock(self, number: int) -> None:
        """Make late writes to a unit raise."""
        for _, parameter in self.plans[number].parameters:
            if parameter.__class__ is ShardedParameter:
                parameter.__class__ = ReleasedParameter
                self._locked.append(parameter)

    def unlock(self) -> None:
        """Let units that are kept whole be read again."""
        for parameter in self._locked:
            parameter.__class__ = ShardedParameter


def _where(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


@final
class _Touches(TorchFunctionMode):
    """Notes the parameters whose values operations read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            # A property's getter and setter: `data`, `shape` and their like.
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name not in METADATA:
            self.seen |= {id(parameter) for parameter in find((args, kwargs), nn.Parameter)}
        return func(*args, **(kwargs or {}))


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's own parameters and buffers."""
    return [(k, t) for k, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]


def _own(module: nn.Module, prefix: str) -> list[tuple[Tensor, list[str]]]:
    return [(tensor, [f"{prefix}.{key}" if prefix else key]) for key, tensor in _named(module)]


def _by_identity(model: nn.Module) -> dict[int, tuple[Tensor, list[str]]]:
    """Return every tensor with all its names: tied ones have several."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for tensor, names in _own(module, prefix):
            found.setdefault(id(tensor), (tensor, []))[1].extend(names)
    return found


def _find(weights: Weights, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in weights), None)


def _initializers(model: nn.Module) -> dict[nn.Module, InitFn | None]:
    """Return what initializes each module: its Transformers model's function, or a method of its own."""
    found: dict[nn.Module, InitFn | None] = {}

    def visit(module: nn.Module, owner: Any) -> None:
        if any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__):
            owner = module
        found[module] = owner._init_weights if owner is not None else _call_own
        if owner is None and _own_method(module) is None:
            found[module] = None
        for child in module.children():
            visit(child, owner)

    visit(model, None)
    return found


def _own_method(module: nn.Module) -> Callable[[], object] | None:
    # torch's attention and transformer have theirs under the second name.
    methods = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    return next((method for method in methods if callable(method)), None)


def _call_own(module: nn.Module) -> None:
    method = _own_method(module)
    assert method is not None
    method()


def _make_real(tensor: Tensor, device: torch.device, *, is_blank: bool) -> None:
    """Give a meta tensor memory; it stays the same object, with its attributes.

    Args:
        is_blank: fill it so that what nobody writes is found: with NaN, or the lowest integer.
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
    """Tell whether values came: no NaN is left, or, of integers, the tensor or its version has changed."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return not bool(tensor.detach().isnan().any())
    # Writes through `.data` leave the version alone.
    return not tensor.numel() or version_of(tensor) != version or bool((tensor != _blank(tensor.dtype)).any())
