"""Gradients as the user and the optimizer see them, and norms over all ranks.

Owns the tensor classes of `p.grad` for gradients that no rank keeps in full, and the single collective of all norms. It
must not know hooks or passes. Read `core/grads.py` ("the life of a gradient") first.

Note: two views of one gradient
    `parameter.grad` is a `LogicalGradient`, with the parameter's global shape and no storage. It supports the
    operations of clipping and `zero_grad`; every function outside the lists below raises an error with its name. It is
    never in autograd's own slot, where the next backward would add to it. The optimizer's slice has a `MasterGradient`
    as `.grad`: this rank's elements, on which the update runs as on any tensor. Its norms are global, because clipping
    by the optimizer's parameters must not be silently local; other reductions to a single number raise an error. Code
    outside an update gets no plain tensor of it: an alias (`.detach()`, `.data`) is a `MasterGradient`, and all else
    that is computed from it (`.clone()`, `.abs()`) is `LocalElements`, which refuse norms, too.
Note: gradients are no views
    Gradients share the memory of their bucket, but are no views for autograd, which refuses `detach_()` of a view:
    old training loops begin with `p.grad.detach_()`. They come from `detach()`, and so share the version of the memory.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, final

import torch

from zeroshard import torch_private
from zeroshard.core import elements
from zeroshard.core.buffer import Bucket
from zeroshard.core.norms import norms_of, refuse_ignored
from zeroshard.core.slot import Slot
from zeroshard.core.states import Own, Scope, Sum
from zeroshard.torch_private import SCALER_CHECK, NoSubclasses, is_read_for_tracing, version_of
from zeroshard.tree import find

__all__ = ["LogicalGradient", "MasterGradient", "assign", "master_gradient", "name_of", "part_of", "read"]

Tensor = torch.Tensor
LOCAL, SENT, UNUSED, USED, ALL = Own.LOCAL, Own.SENT, Sum.UNUSED, Sum.USED, Scope.ALL

METADATA = frozenset(
    """
    __dir__ __hash__ __len__ _backward_hooks _base _has_compatible_shallow_copy_type _is_view _parse_to
    _post_accumulate_grad_hooks dense_dim device dim dtype element_size get_device grad grad_dtype grad_fn has_names
    is_complex is_contiguous is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_mkldnn is_mps is_nested
    is_quantized is_same_size is_sparse is_sparse_csr is_xpu itemsize layout names nbytes ndim nelement numel output_nr
    requires_grad retains_grad shape size sparse_dim storage_offset stride volatile
    """.split()
)
"""Tensor attributes and methods that read no values, which a tensor without storage supports."""

NORMS = MappingProxyType(
    {
        "norm": ("p", "dim", "keepdim"),
        "linalg_norm": ("ord", "dim", "keepdim"),
        "linalg_vector_norm": ("ord", "dim", "keepdim"),
        "_foreach_norm": ("ord", "dtype"),
    }
)
"""The norms of torch, with the names of their positional arguments after the tensor."""

SCALINGS = ("mul_", "div_", "neg_", "zero_")
LINEAR = frozenset([*SCALINGS, *(f"_foreach_{name}" for name in SCALINGS), "__imul__", "__itruediv__"])
ELEMENTWISE = frozenset(
    "clamp_ clamp_min_ clamp_max_ clip_ nan_to_num_ _foreach_clamp_min_ _foreach_clamp_max_".split()
)
"""Element-wise in-place functions; nonlinear functions need the sum over all ranks."""

CONVERSIONS = frozenset("bfloat16 cpu cuda double float half to type".split())
"""Functions that return the tensor itself without a conversion."""
SELF = CONVERSIONS | {"detach", "detach_", "data", "requires_grad_"}
"""Functions that return the tensor itself or an alias without a conversion."""
ALIASES = frozenset("contiguous data detach flatten ravel reshape reshape_as view view_as".split())
"""Functions whose result is this rank's elements of a gradient in the same memory, if its dtype is the gradient's."""
NUMBERS = frozenset("__bool__ __complex__ __float__ __index__ __int__ item".split())
"""Functions that return the element of a tensor with one element."""
REDUCTIONS = frozenset("all amax amin any cumsum histc mean median norm normalize prod softmax std sum var".split())
"""Functions that combine elements, also into tensors."""


@final
class LogicalGradient(torch.Tensor):
    """A gradient with the parameter's global shape, whose elements are distributed over ranks.

    It supports norms of any order (one collective for all parameters of the model; every rank must call), in-place
    multiplication and division by a scalar, and zeroing. `full_tensor()` gathers the values; every rank must call it.
    """

    _slot: Slot
    _guard: "weakref.ref[LogicalGradient]"

    @staticmethod
    def __new__(cls, slot: Slot) -> "LogicalGradient":
        """Create the gradient of a slot's parameter."""
        made: LogicalGradient = torch_private.without_storage(  # type: ignore[assignment]
            cls, slot.shape, slot.stride, slot.bucket.dtypes.grad, slot.bucket.device
        )
        made._slot = slot
        # torch.utils.swap_tensors would replace its content; torch refuses if a weak reference exists.
        made._guard = weakref.ref(made)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        # A setter has the name of its property, and the gradient may be one of several tensor arguments.
        if args and func.__name__ not in ("__set__", "__delete__"):
            if name in METADATA or (name == "__format__" and not args[1]):
                with NoSubclasses():
                    return func(*args, **kwargs)
            if name in NORMS:
                return _norms(name, args, kwargs)
            if name in LINEAR or name in ELEMENTWISE:
                return _change(name, args, kwargs)
            if name in SELF and isinstance(args[0], cls) and is_nothing_to_do(func, args, kwargs):
                return args[0]
            if isinstance(args[0], cls) and (found := _look(name, func, args, kwargs)) is not None:
                return found
        elif name == "data" and args[0] is args[1]:
            return None  # model.to() assigns the same tensor if nothing changes
        raise _refusal(name, _gradients_in((args, kwargs))[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refusal(str(func), _gradients_in((args, kwargs))[0])

    def full_tensor(self) -> Tensor:
        """Return the full gradient as a plain tensor. Collective: all-gather of its bucket; every rank must call."""
        return _slot_of(self).living_owner().full_gradient(self._slot)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LogicalGradient('{self._slot.name}', shape={tuple(self.shape)}, dtype={self.dtype})"


@final
class MappedGradient(torch.Tensor):
    """An element-wise function of a logical gradient, as returned by `grad.abs()`; it supports reductions."""

    _source: LogicalGradient
    _maps: tuple[Callable[[Tensor], Tensor], ...]

    @staticmethod
    def __new__(
        cls, source: LogicalGradient, maps: tuple[Callable[[Tensor], Tensor], ...], dtype: torch.dtype
    ) -> "MappedGradient":
        """Create the function of a gradient, without a computation."""
        slot = source._slot
        made: MappedGradient = torch_private.without_storage(  # type: ignore[assignment]
            cls, slot.shape, slot.stride, dtype, slot.bucket.device
        )
        made._source, made._maps = source, maps
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if args and isinstance(args[0], cls) and func.__name__ not in ("__set__", "__delete__"):
            if name in METADATA:
                with NoSubclasses():
                    return func(*args, **kwargs)
            if (found := _look(name, func, args, kwargs)) is not None:
                return found
        raise _refusal(f"{name} of a function of each element", find((args, kwargs), cls)[0]._source)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refusal(str(func), find((args, kwargs), cls)[0]._source)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MappedGradient({self._source!r})"


class _OfSlice(torch.Tensor):
    """This rank's elements of a gradient, or what is computed from them."""

    _slot: Slot

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


@final
class LocalElements(_OfSlice):
    """What code outside an update computes from this rank's elements of a gradient: no reduction of it is global."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        source: LocalElements = find((args, kwargs), cls)[0]
        with NoSubclasses():
            result = func(*args, **kwargs)
        if (owner := source._slot.owner()) is not None and owner.is_updating:
            return result  # a state that a hook has made
        if name in NUMBERS:
            raise _refusal(f"{name} of a function of each element", source)
        return _local(name, result, args, source)


@final
class MasterGradient(_OfSlice):
    """This rank's elements of a gradient, flat; norms are those of the full gradient."""

    is_sparse = False  # optimizers ask each gradient, and `__torch_function__` takes microseconds to answer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Updates mix gradients with plain tensors; only functions of the gradient itself are intercepted.
        name, kwargs = func.__name__, kwargs or {}
        if name == SCALER_CHECK:
            return _check_scaled(func, args)
        if name in NORMS and _gradients_in(args[:1]):
            return _norms(name, args, kwargs)
        first: Any = args[0] if args else None
        if (name in LINEAR or name in ELEMENTWISE) and _gradients_in(args[:1]) and elements.are_numbers(args, kwargs):
            return _change(name, args, kwargs)
        is_ours, is_list = isinstance(first, MasterGradient), name[:9] == "_foreach_" and name[-1] == "_"
        targets = first if is_list and isinstance(first[0], MasterGradient) else [first] if is_ours else ()
        if is_ours:
            first._slot.bucket.grads.landing.wait()  # it may have been read before the last backward
        with NoSubclasses():
            copies = [(one, version_of(one)) for one in targets if _is_copy(one)]
            result: Any = func(*args, **kwargs)
            for one, version in copies:
                if version_of(one) != version:
                    part_of(one._slot).copy_(one)
        if is_ours and type(result) is Tensor and not result.ndim and name[:4] != "new_":
            raise _refusal(name, first)
        if isinstance(result, (Tensor, list, tuple)) and result is not first and not is_list:
            source = first if is_ours else find((args, kwargs), MasterGradient)[0]
            if (owner := source._slot.owner()) is None or not owner.is_updating:
                if is_ours and name_of(func) in ALIASES and isinstance(result, Tensor) and result.dtype == first.dtype:
                    return master_gradient(result, first._slot)
                return _local(name_of(func), result, args, source)
        return result


def _local(name: str, result: Any, args: Sequence[Any], source: "MasterGradient | LocalElements") -> Any:
    """Mark what a function of this rank's elements has returned; raise if it combines these elements alone."""
    if name == "as_subclass" or name[:4] == "new_" or name[-5:] == "_like":
        return result  # a plain tensor was asked for, or no value is in it
    if type(result) is Tensor and not any(result is one for one in args):
        if not result.ndim or name in REDUCTIONS:
            raise _refusal(f"{name} of this rank's elements", source)
        result = result.as_subclass(LocalElements)
        result._slot = source._slot
    elif isinstance(result, (list, tuple)) and any(type(one) is Tensor for one in result):
        result = type(result)([_local(name, one, find(args, Tensor), source) for one in result])
    return result


def part_of(slot: Slot) -> Tensor:
    """Return this rank's elements of an existing gradient, in the held dtype."""
    slot.bucket.grads.landing.wait()
    if slot.master_grad is None:
        part = slot.bucket.grads.part(slot.index)
        slot.master_grad = part.detach() if slot.is_whole else master_gradient(part, slot)
    return slot.master_grad


def _is_copy(value: Tensor) -> bool:
    """Tell whether a value is a gradient of a slice that was converted for the update."""
    return isinstance(value, MasterGradient) and (wide := value._slot.wide) is not None and wide[1] is value


def master_gradient(part: Tensor, slot: Slot) -> MasterGradient:
    """Return this rank's elements of a gradient as optimizers see them."""
    made: MasterGradient = part.detach()  # type: ignore[assignment]
    made.__class__, made._slot = MasterGradient, slot
    return made


def read(slot: Slot) -> Tensor | None:
    """Return the value of `parameter.grad`: None, a view of a fully held gradient, or a logical gradient."""
    grads, index = slot.bucket.grads, slot.index
    if (owner := slot.owner()) is not None and owner.unread is not None:
        owner.read_answer(is_needed=False)
    if grads.sums[index] is not USED and grads.own[index] is not SENT and not slot.has_grad:
        return None
    is_plain = slot.is_whole
    if is_plain and (grads.own[index] is LOCAL or grads.scope is not ALL):
        # An unreduced gradient of `no_sync` may be in another buffer, with the norm of one rank: a view would hide
        # both.
        is_plain = owner is None or len(owner.mesh.data_ranks) == 1
    if (view := slot.grad_view) is None or is_plain is isinstance(view, LogicalGradient):
        slot.spare, spare = None, slot.spare
        slot.grad_view = view = grads.view(index) if is_plain else LogicalGradient(slot) if spare is None else spare
    return view if is_plain or not is_read_for_tracing() else None


def assign(slot: Slot, value: Tensor | None) -> None:
    """Set `parameter.grad`: None drops it; a tensor of the parameter's shape, equal on all ranks, replaces it."""
    if (owner := slot.owner()) is not None:
        owner.change_gradients("zero_grad() or an assignment to .grad", is_forgotten=value is None)
    grads = slot.bucket.grads
    if value is None:
        _clear(slot)
    elif not isinstance(value, Tensor) or (value is not slot.grad_view and isinstance(value, LogicalGradient)):
        raise TypeError(
            f"The gradient of '{slot.name}' must be a plain tensor or None; got {type(value).__name__}. For a gradient "
            "that is distributed over ranks, `full_tensor()` gathers the values; every rank must call it."
        )
    elif value is not slot.grad_view:
        shape, part = slot.bucket.places.shapes[slot.index], slot.form.part(value)
        if tuple(part.shape) != shape:
            raise RuntimeError(f"The gradient of '{slot.name}' must have shape {shape} here; got {tuple(part.shape)}.")
        _clear(slot)
        with torch.no_grad():
            grads.set_reduced(slot.index, part)
        if owner is not None:
            owner.assigned.add(slot)


def _clear(slot: Slot) -> None:
    """Drop a gradient, and its views, whose memory may be freed."""
    slot.bucket.grads.clear(slot.index)
    slot.master_grad = slot.wide = None
    held, slot.grad_view = [slot.grad_view], None
    view, count = _references(held)
    # A gradient that user code still holds must raise on use; an unreferenced one is reused in the next step.
    if count == _ALONE and isinstance(view, LogicalGradient):
        slot.spare = view


def _references(held: list[Any]) -> tuple[Any, int]:
    """Return the only item of a list and the references to it."""
    one = held.pop()
    return one, sys.getrefcount(one)


_ALONE = _references([object()])[1]
"""The reference count of an object without other references, which depends on the Python version."""


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function in `__torch_function__`; for a getter or setter, the name of its property."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
    return name


def is_nothing_to_do(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of `SELF` would return the gradient unchanged, by a test on a plain tensor."""
    if "memory_format" in kwargs:
        return False
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    if (name := name_of(func)) in ("detach", "data"):
        return True
    made = func(probe, *args[1:], **kwargs)
    # torch copies a tensor from "cpu" to "cpu:0", and reports "cpu" for the copy.
    is_asked = kwargs.get("copy") or len(args) > 4  # after the tensor: device, dtype, non_blocking, copy
    is_copy = name == "to" and not is_asked and (made.dtype, made.device) == (probe.dtype, probe.device)
    return (made is probe or is_copy) and not probe.requires_grad


def _look(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Compute a reduction over all elements of a gradient or of its element-wise function; otherwise return None.

    Collective: see `elements.answer`.
    """
    first = args[0]
    source, maps = (first._source, first._maps) if isinstance(first, MappedGradient) else (first, ())
    if name in elements.MAPS and elements.are_numbers(args, kwargs):
        probe = func(torch.empty(0, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
        if not isinstance(probe, Tensor):
            return None
        return MappedGradient(source, (*maps, lambda values: func(values, *args[1:], **kwargs)), probe.dtype)
    is_asked = name in elements.QUESTIONS or name == "histc"
    if not is_asked or (name in elements.EXTREMES and not first.numel()):
        return None
    return elements.answer(name, _slot_of(source), maps, first.dtype, args[1:], kwargs)


def _norms(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a norm of all elements, for one gradient or for a list that may include plain tensors."""
    several = name == "_foreach_norm"
    grads = list(args[0]) if several else [args[0]]
    ours = [grad for grad in grads if isinstance(grad, OURS)]
    first = ours[0] if ours else _gradients_in((args, kwargs))[0]
    refuse_ignored(name, grads, ours)
    given = dict(zip(NORMS[name], args[1:], strict=False)) | kwargs
    p, dtype = given.get("ord", given.get("p")), given.get("dtype")
    flat = given.get("dim") is None and given.get("out") is None and len(args) <= 1 + len(NORMS[name])
    if name == "linalg_norm" and p is not None:
        flat &= first.ndim == (2 if p == "fro" else 1)  # other orders are matrix norms
    flat &= dtype is None or torch.promote_types(first.dtype, dtype) == dtype
    p = 2.0 if p is None or (p == "fro" and name in ("norm", "linalg_norm")) else p
    if not flat or not isinstance(p, (int, float)) or _gradients_in((args[1:], kwargs)):
        raise _refusal(f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})", first)
    # The full gradient decides, equally on all ranks: an empty slice has a norm.
    if (p < 0 or p == float("inf")) and (empty := [grad for grad in ours if not grad._slot.shape.numel()]):
        raise _refusal(f"{name} of order {p:g}, which has no value for 0 elements,", empty[0])
    slots = [_slot_of(grad) for grad in ours]
    norms = norms_of(slots, float(p), dtype)
    if several or isinstance(first, LogicalGradient):
        norms = slots[0].living_owner().norms_of_places(norms, slots, float(p), several)
    found = iter(norms)
    norms = [next(found) if isinstance(g, OURS) else torch.linalg.vector_norm(g, p, dtype=dtype) for g in grads]
    return norms if several else norms[0].reshape((1,) * first.ndim if given.get("keepdim") else ())


def _change(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise in-place function on this rank's elements of one gradient or a list."""
    targets = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    if not elements.are_numbers(args, kwargs) or (name in LINEAR and kwargs):
        raise _refusal(f"{name} with anything but one number", _gradients_in((args, kwargs))[0])
    ours = [target for target in targets if isinstance(target, OURS)]
    owner = ours[0]._slot.living_owner()
    owner.check_outside_backward("A change of gradients in place")
    owner.learn()
    parts: list[Tensor] = _local_parts([_slot_of(target) for target in ours], name)
    parts += [one for one in targets if not isinstance(one, OURS) or one.dtype != one._slot.bucket.dtypes.grad]
    with torch.no_grad(), NoSubclasses():
        for device in {part.device: None for part in parts}:
            # A scalar may be on the device while gradients are on the host.
            rest = [one.to(device) if isinstance(one, Tensor) else one for one in args[1:]]
            mine = [part for part in parts if part.device == device]
            if name.startswith("_foreach_"):
                getattr(torch, name)(mine, *rest, **kwargs)
            else:
                for part in mine:
                    getattr(part, name)(*rest, **kwargs)
    return args[0]


def _refusal(what: str, gradient: "LogicalGradient | MasterGradient | LocalElements") -> RuntimeError:
    """Return the error for a function that cannot run on this rank's elements; inside a backward, that is the cause."""
    slot = gradient._slot
    if (owner := slot.owner()) is not None:
        owner.check_outside_backward(f"`{what}` with the gradient of '{slot.name}', as in an optimizer's step,")
    return RuntimeError(
        f"{owner.mesh if owner else ''} The gradient of '{slot.name}' {tuple(slot.parameter.shape)} is distributed "
        f"over ranks, so `{what}` cannot run on it here. Norms of all elements, clip_grad_norm_, clip_grad_value_, "
        "scaling by a number and zeroing work; `p.grad.full_tensor()` gathers the values (every rank must call it), "
        "and assigning a tensor to `p.grad` replaces them. If an optimizer raised this error, it was built from "
        "sharded parameters: pass it to zero.attach(optimizer)."
    )


def _slot_of(gradient: "LogicalGradient | MasterGradient") -> Slot:
    """Return the slot of a gradient that is still valid."""
    slot = gradient._slot
    if isinstance(gradient, LogicalGradient) and slot.grad_view is not gradient:
        raise RuntimeError(
            f"This gradient of '{slot.name}' is no longer valid: zero_grad() dropped it, or another gradient was "
            "assigned. Read p.grad again; to keep values, keep norms or `p.grad.full_tensor()`."
        )
    return slot


def _check_scaled(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run torch.amp.GradScaler's check on this rank's elements, and share an overflow with all ranks."""
    grads, found_inf, inverse_scale = args
    owner = _gradients_in(grads)[0]._slot.living_owner()
    if owner.loss_scale is not None:
        raise RuntimeError(
            "torch.amp.GradScaler and the engine's own loss scale would both divide the gradients. Use a precision "
            "with loss_scale=None for GradScaler, or remove the scaler."
        )
    owner.answer("the overflow check of GradScaler")
    with NoSubclasses():
        func(grads, found_inf, inverse_scale)
    owner.comm.across.flag(found_inf.view(1), "the overflow check of GradScaler")


def _local_parts(slots: Sequence[Slot], name: str) -> list[Tensor]:
    """Return this rank's tensors of gradients: reduced elements, and unreduced elements in other buffers."""
    by_bucket: dict[Bucket, list[Slot]] = {}
    for slot in slots:
        by_bucket.setdefault(slot.bucket, []).append(slot)
    for owner in {slots[0].living_owner() for slots in by_bucket.values()} if name in ELEMENTWISE else ():
        owner.leave_passes(f"{name} of a gradient")
        owner.check_reduced(f"{name} of a gradient")
    found: list[Tensor] = []
    for bucket, some in by_bucket.items():
        if all(slot.shape for slot in some):
            found += bucket.grads.parts_of_all([slot.index for slot in some])
            continue
        for slot in some:
            parts = bucket.grads.parts(slot.index)
            # A 0-d gradient follows the dtype promotion of scalars.
            found += parts if slot.shape else [p.reshape(()) if p.numel() else p for p in parts]
    return found


OURS = (LogicalGradient, MasterGradient)


def _gradients_in(value: Any) -> list["LogicalGradient | MasterGradient"]:
    return find(value, LogicalGradient, MasterGradient)
