"""Gradients as the user and the optimizer see them, and norms over all ranks.

Owns the tensor classes that `p.grad` answers with where no rank keeps whole gradients, and the one collective behind
every norm. It must not know hooks or passes. Read `core/buffer.py` ("the life of a gradient") first.

Note: two views of one gradient
    `parameter.grad` is a `LogicalGradient`: the parameter's global shape and no storage. It answers what clipping and
    `zero_grad` ask, and refuses everything else by name: what is in none of the lists below never reaches torch. It
    never lies in autograd's own slot, where the next backward would add to it. The optimizer's slice has a
    `MasterGradient` as `.grad`: this rank's elements, on which the update runs as on any tensor. Norms are answered for
    all ranks, since clipping by the optimizer's parameters must not be silently local; another reduction to a single
    number is refused.
"""

import weakref
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, final

import torch

from zeroshard.core.slot import Slot, slot_of
from zeroshard.core.states import Own, Scope, Sum
from zeroshard.torch_private import SCALER_CHECK, DisabledFunction, NoSubclasses, foreach_norm, without_storage
from zeroshard.tree import find

__all__ = ["LogicalGradient", "MasterGradient", "MasterSlice", "assign", "name_of", "part_of", "read"]

Tensor = torch.Tensor

METADATA = frozenset(
    """
    __dir__ __hash__ __len__ _backward_hooks _base _is_view _post_accumulate_grad_hooks dense_dim device dim dtype
    element_size get_device grad grad_dtype grad_fn has_names is_complex is_contiguous is_cpu is_cuda is_floating_point
    is_inference is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_same_size is_sparse is_sparse_csr is_xpu
    itemsize layout names nbytes ndim nelement numel output_nr requires_grad retains_grad shape size sparse_dim
    storage_offset stride volatile
    """.split()
)
"""Tensor attributes and methods that read no values, so that a tensor without storage answers them."""

NORMS = MappingProxyType(
    {
        "norm": ("p", "dim", "keepdim"),
        "linalg_norm": ("ord", "dim", "keepdim"),
        "linalg_vector_norm": ("ord", "dim", "keepdim"),
        "_foreach_norm": ("ord", "dtype"),
    }
)
"""The norms of torch, and the names of their arguments by position, behind the tensor."""

LINEAR = frozenset("mul_ div_ __imul__ __itruediv__ zero_ _foreach_mul_ _foreach_div_ _foreach_zero_".split())
ELEMENTWISE = frozenset(
    "clamp_ clamp_min_ clamp_max_ clip_ nan_to_num_ _foreach_clamp_min_ _foreach_clamp_max_".split()
)
"""Functions in place that treat each element by itself; those that are not linear need the sum over all ranks."""

SELF = frozenset("detach detach_ data requires_grad_ float double half bfloat16 to cpu cuda".split())
"""What returns the tensor itself, or an alias, where there is nothing to convert."""


@final
class LogicalGradient(torch.Tensor):
    """A gradient of the parameter's global shape whose elements are spread over ranks.

    Norms of any order (one collective for all parameters of the model, every rank asks), multiplication and division by
    a scalar, and zeroing work in place on this rank's elements. `full_tensor()` gathers the values; every rank must
    call it.
    """

    _slot: Slot
    _guard: "weakref.ref[LogicalGradient]"

    @staticmethod
    def __new__(cls, slot: Slot) -> "LogicalGradient":
        """Make the gradient of a slot's parameter."""
        bucket, parameter = slot.bucket, slot.parameter
        made: LogicalGradient = without_storage(  # type: ignore[assignment]
            cls, parameter.shape, parameter.stride(), bucket.dtypes.grad, bucket.device
        )
        made._slot = slot
        # torch.utils.swap_tensors would put other innards into it; torch refuses where there is a weak reference.
        made._guard = weakref.ref(made)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        # A setter has the name of its property, and a function may have been given the gradient beside other tensors.
        if args and func.__name__ not in ("__set__", "__delete__"):
            if name in METADATA or (name == "__format__" and not args[1]):
                with NoSubclasses():
                    return func(*args, **kwargs)
            if name in NORMS:
                return _norms(name, args, kwargs)
            if name in LINEAR or name in ELEMENTWISE:
                return _change(name, args, kwargs)
            if name in SELF and isinstance(args[0], cls) and _is_nothing_to_do(func, args, kwargs):
                return args[0]
        raise _refusal(name, _gradients_in((args, kwargs))[0])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise _refusal(str(func), _gradients_in((args, kwargs))[0])

    def full_tensor(self) -> Tensor:
        """Return the whole gradient as a plain tensor. Collective: all-gather of its bucket; every rank must call."""
        return _slot_of(self).living_owner().full_gradient(self._slot)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LogicalGradient('{self._slot.name}', shape={tuple(self.shape)}, dtype={self.dtype})"


@final
class MasterGradient(torch.Tensor):
    """This rank's elements of a gradient, flat; norms of it are norms of the whole gradient."""

    _slot: Slot

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Updates mix gradients with plain tensors; only what is asked of gradients themselves is answered here.
        name, kwargs = func.__name__, kwargs or {}
        if name == SCALER_CHECK:
            return _check_scaled(func, args)
        if name in NORMS and _gradients_in(args[:1]):
            return _norms(name, args, kwargs)
        first: Any = args[0] if args else None
        if (name in LINEAR or name in ELEMENTWISE) and _gradients_in(args[:1]) and _are_numbers(args, kwargs):
            return _change(name, args, kwargs)
        is_ours = isinstance(first, MasterGradient)
        if is_ours and name[-1] == "_" != name[0] and first.dtype != first._slot.bucket.dtypes.grad:
            raise _refusal(f"{name} on a copy in {first.dtype}", first)
        with NoSubclasses():
            result = func(*args, **kwargs)
        if is_ours and type(result) is Tensor and not result.ndim and name[:4] != "new_":
            raise _refusal(name, first)
        return result


@final
class MasterSlice(torch.nn.Parameter):
    """What an optimizer holds in place of a parameter: this rank's part of its master values, flat, possibly empty."""

    __torch_function__ = DisabledFunction  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:
        """This rank's elements of the reduced gradient; None where no rank used the parameter."""
        slot = slot_of(self)
        grads = slot.bucket.grads
        owner = slot.owner()
        if owner is not None and owner.unread is not None:
            owner.learn()
        if not slot.has_grad or (owner is not None and owner.is_skipping):
            return None
        part = part_of(slot)
        if grads.dtype != self.dtype:
            # Optimizers want one dtype: gradients held in another are converted for the update alone.
            wide = part.to(self.dtype).as_subclass(MasterGradient)
            wide._slot = slot
            return wide
        return part

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        slot = slot_of(self)
        if value is not None and value is not slot.master_grad:
            raise RuntimeError(
                f"The gradient of the optimizer's slice of '{slot.name}' cannot be replaced; assign a tensor of the "
                "parameter's shape to the parameter's own .grad, or change the slice's gradient in place."
            )
        if value is None:
            assign(slot, None)


def part_of(slot: Slot) -> Tensor:
    """Return this rank's elements of a gradient that is there, as they are held."""
    if slot.master_grad is None:
        part = slot.bucket.grads.part(slot.index)
        if not slot.bucket.spec.updates_all or slot.form.has_axis:
            part = part.as_subclass(MasterGradient)
            part._slot = slot
        slot.master_grad = part
    return slot.master_grad


def read(slot: Slot) -> Tensor | None:
    """Return what `parameter.grad` is: None, a view of what is held where that is all of it, or a logical gradient."""
    grads, owner = slot.bucket.grads, slot.owner()
    if owner is not None:
        owner.learn()  # before it is changed: it may be all that names the cause
    if not slot.has_grad:
        return None
    # What `no_sync` left to a later reduction may lie apart, and its norm is of one rank: a view would hide both.
    is_summed = grads.own[slot.index] is not Own.LOCAL and grads.scope is Scope.ALL
    waits = not is_summed and owner and len(owner.mesh.data_ranks) > 1
    spec = slot.bucket.spec
    is_plain = spec.holds_whole_gradients and spec.updates_all and not slot.form.has_axis and not waits
    if slot.grad_view is None or is_plain == isinstance(slot.grad_view, LogicalGradient):
        slot.grad_view = grads.view(slot.index) if is_plain else LogicalGradient(slot)
    return slot.grad_view


def assign(slot: Slot, value: Tensor | None) -> None:
    """Set `parameter.grad`: None forgets it; a tensor of the parameter's shape, equal on all ranks, replaces it."""
    owner = slot.owner()
    if owner is not None:
        owner.check_outside_backward("zero_grad() or an assignment to .grad")
        owner.learn()
        owner.catch_up()
        owner.gradients_changed()
    grads = slot.bucket.grads
    if value is None:
        _clear(slot)
    elif not isinstance(value, Tensor) or (value is not slot.grad_view and isinstance(value, LogicalGradient)):
        raise TypeError(
            f"The gradient of '{slot.name}' must be a plain tensor or None; got {type(value).__name__}. Of a gradient "
            "that is spread over ranks `full_tensor()` gathers the values; every rank must call it."
        )
    elif value is not slot.grad_view:
        shape, part = slot.bucket.places.shapes[slot.index], slot.form.part(value)
        if tuple(part.shape) != shape:
            raise RuntimeError(f"The gradient of '{slot.name}' must have shape {shape} here; got {tuple(part.shape)}.")
        _clear(slot)
        with torch.no_grad():
            grads.set_reduced(slot.index, part)


def _clear(slot: Slot) -> None:
    """Forget a gradient, and the views of it, whose memory may be gone."""
    slot.bucket.grads.clear(slot.index)
    slot.grad_view = slot.master_grad = None


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function that `__torch_function__` was given; for a getter or setter its property's."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
    return name


def _is_nothing_to_do(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a function of `SELF` would return the gradient as it is; a plain tensor shows it."""
    if "memory_format" in kwargs:
        return False
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    is_alias = name_of(func) in ("detach", "data")
    return is_alias or (func(probe, *args[1:], **kwargs) is probe and not probe.requires_grad)


def _norms(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a norm of all elements, for one gradient or for a list of them that may hold plain tensors."""
    several = name == "_foreach_norm"
    grads = list(args[0]) if several else [args[0]]
    first = _gradients_in((args, kwargs))[0]
    given = dict(zip(NORMS[name], args[1:], strict=False)) | kwargs
    p, dtype = given.get("ord", given.get("p")), given.get("dtype")
    flat = given.get("dim") is None and given.get("out") is None and len(args) <= 1 + len(NORMS[name])
    if name == "linalg_norm" and p is not None:
        flat &= first.ndim == (2 if p == "fro" else 1)  # all others are norms of a matrix
    flat &= dtype is None or torch.promote_types(first.dtype, dtype) == dtype
    p = 2.0 if p is None or (p == "fro" and name in ("norm", "linalg_norm")) else p
    if not flat or not isinstance(p, (int, float)) or _gradients_in((args[1:], kwargs)):
        raise _refusal(f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})", first)
    # Of the whole gradient, which all ranks know alike: a slice of 0 elements has a norm.
    empty = [g for g in _gradients_in(grads) if not g._slot.parameter.numel()]
    if empty and (p < 0 or p == float("inf")):
        raise _refusal(f"{name} of order {p:g}, which has no value for 0 elements,", empty[0])
    norms: list[Tensor] = []
    by_owner: dict[int, dict[str, Tensor]] = {}
    for grad in grads:
        if not isinstance(grad, (LogicalGradient, MasterGradient)):
            norms.append(torch.linalg.vector_norm(grad, p, dtype=dtype))
            continue
        slot = _slot_of(grad)
        owner = slot.living_owner()
        if id(owner) not in by_owner:
            by_owner[id(owner)] = owner.norms(float(p), dtype)
        # A copy: the owner answers the next request with the same number.
        norms.append(by_owner[id(owner)][slot.name].clone())
    return norms if several else norms[0].reshape((1,) * first.ndim if given.get("keepdim") else ())


def _change(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise function in place on this rank's elements of one gradient or of a list."""
    targets = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    if not _are_numbers(args, kwargs) or (name in LINEAR and kwargs):
        raise _refusal(f"{name} with anything but one number", _gradients_in((args, kwargs))[0])
    parts: list[Tensor] = []
    owner = _gradients_in(targets)[0]._slot.living_owner()
    owner.check_outside_backward("A change of gradients in place")
    owner.learn()
    for target in targets:
        is_ours = isinstance(target, (LogicalGradient, MasterGradient))
        if is_ours:
            parts += _local_parts(_slot_of(target), name)
        if not is_ours or (isinstance(target, MasterGradient) and target.dtype != target._slot.bucket.dtypes.grad):
            parts.append(target)
    with torch.no_grad(), NoSubclasses():
        if name.startswith("_foreach_"):
            getattr(torch, name)(parts, *args[1:], **kwargs)
        else:
            for part in parts:
                getattr(part, name)(*args[1:], **kwargs)
    return args[0]


def _are_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether all arguments behind the first are plain numbers, which mean the same for a part of a tensor."""
    return all(
        value is None
        or isinstance(value, (int, float))
        or (type(value) is Tensor and not value.ndim and not value.requires_grad)
        for value in (*args[1:], *kwargs.values())
    )


def _refusal(what: str, gradient: "LogicalGradient | MasterGradient") -> RuntimeError:
    """Return the error for a function that cannot be answered from this rank's elements."""
    slot = gradient._slot
    owner = slot.owner()
    return RuntimeError(
        f"{owner.mesh if owner else ''} The gradient of '{slot.name}' {tuple(slot.parameter.shape)} is spread over "
        f"ranks, so `{what}` cannot run on it here. Norms of all elements, clip_grad_norm_, clip_grad_value_, scaling "
        "by a number and zeroing work as they are; `p.grad.full_tensor()` gathers the values (every rank must call "
        "it), and assigning a tensor to `p.grad` replaces them. An optimizer that meets this gradient was built from "
        "sharded parameters: hand it to zero.attach(optimizer)."
    )


def _slot_of(gradient: "LogicalGradient | MasterGradient") -> Slot:
    """Return the slot of a gradient that is still the parameter's."""
    slot = gradient._slot
    if isinstance(gradient, LogicalGradient) and slot.grad_view is not gradient:
        raise RuntimeError(
            f"This gradient of '{slot.name}' is gone: zero_grad() forgot it, or another one was assigned. Read p.grad "
            "again, and keep norms or `p.grad.full_tensor()` of what is needed later."
        )
    return slot


def _check_scaled(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run torch.amp.GradScaler's check on this rank's elements, and let all ranks see the same overflow."""
    grads, found_inf, inverse_scale = args
    owner = _gradients_in(grads)[0]._slot.living_owner()
    if owner.loss_scale is not None:
        raise RuntimeError(
            "torch.amp.GradScaler and the engine's own loss scale would both divide the gradients. Use precision with "
            "loss_scale=None for GradScaler, or leave the scaler out."
        )
    owner.answer("the overflow check of GradScaler")
    with NoSubclasses():
        func(grads, found_inf, inverse_scale)
    owner.comm.flag(found_inf.view(1), "the overflow check of GradScaler").wait()


def _local_parts(slot: Slot, name: str) -> list[Tensor]:
    """Return this rank's tensors behind a gradient: reduced elements, and what lies apart and is not reduced yet."""
    if name in ELEMENTWISE:
        owner = slot.living_owner()
        owner.leave_passes(f"{name} of a gradient")
        owner.check_reduced(f"{name} of a gradient")
    parts = slot.bucket.grads.parts(slot.index)
    # A gradient of one number without dimensions promotes dtypes as such.
    is_number = not slot.parameter.ndim
    return [(p.reshape(()) if is_number and p.numel() else p).as_subclass(torch.Tensor) for p in parts]


def local_norms(slots: Iterable[Slot], p: float, dtype: torch.dtype | None, *, is_behind: bool = False) -> Tensor:
    """Return (number of slots,) fp64: each gradient's sum of |x|^p over this rank's elements; for orders without a sum
    the largest or smallest |x|, or how many are not 0.

    Args:
        dtype: what elements are converted to first; at least fp32 for a sum.
        is_behind: whether ranks have yet to agree on who used what; then a sum may be of nothing, and is zeros.
    """
    found: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    count, device = 0, None
    for place, slot in enumerate(slots):
        grads, count, device = slot.bucket.grads, place + 1, slot.bucket.device
        is_used = grads.sums[slot.index] is Sum.USED or (is_behind and grads.sums[slot.index] is Sum.UNUSED)
        part = grads.own_part(slot.index) if is_used and slot.form.is_counted else None
        if part is not None and part.numel():
            found.setdefault(part.dtype, []).append((place, part))
    out = torch.full((count,), float("inf") if p == -float("inf") else 0.0, dtype=torch.float64, device=device)
    for held, parts in found.items():
        # Rounded to two bytes on each rank the norm of the whole would be off by more than its own rounding.
        wide = torch.promote_types(held, dtype or torch.float32)
        norms = torch.stack([n.double() for n in foreach_norm([part for _, part in parts], p, dtype=wide)])
        out[[place for place, _ in parts]] = norms if p == 0 or abs(p) == float("inf") else norms**p
    return out


def total_norms(rows: Tensor, p: float) -> Tensor:
    """Return (number of slots,) the norms of whole gradients from what `local_norms` returned, a rank a row."""
    if abs(p) == float("inf"):
        return rows.amax(0) if p > 0 else rows.amin(0)
    total: Tensor = sum(rows[1:], start=rows[0])
    return total if p == 0 else total ** (1 / p)


def _gradients_in(value: Any) -> list["LogicalGradient | MasterGradient"]:
    return find(value, LogicalGradient, MasterGradient)
