"""Gradients as the user and the optimizer see them, and norms over all ranks.

Owns the tensor classes that `p.grad` answers with where no rank keeps whole gradients, and the one collective behind
every norm. It must not know hooks or passes. Read `core/buffer.py` ("the life of a gradient") first.

Note: two views of one gradient
    `parameter.grad` is a `LogicalGradient`: the parameter's global shape and no storage. It answers what clipping and
    `zero_grad` ask, and refuses everything else by name. It never lies in autograd's own slot, where the next backward
    would add to it. The optimizer's slice has a `MasterGradient` as `.grad`: this rank's elements, on which the update
    runs as on any tensor; only norms are answered for all ranks, since clipping by the optimizer's parameters must not
    be silently local.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast, final

import torch

if TYPE_CHECKING:
    from zeroshard.core.engine import Engine
    from zeroshard.core.parameter import Slot

__all__ = ["LogicalGradient", "MasterGradient", "MasterSlice", "assign", "read"]

Tensor = torch.Tensor

NORMS = frozenset(["norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "_foreach_norm"])
ZEROS = frozenset(["zero_", "_foreach_zero_"])
SCALES = frozenset(["mul_", "div_", "_foreach_mul_", "_foreach_div_", "__imul__", "__itruediv__"])
SCALER_CHECK = "_amp_foreach_non_finite_check_and_unscale_"
ANSWERED = NORMS | ZEROS | SCALES | {SCALER_CHECK}
NO_OPS = frozenset(["detach_", "requires_grad_", "detach"])


@final
class LogicalGradient(torch.Tensor):
    """A gradient of the parameter's global shape whose elements are spread over ranks.

    Norms of any order (one collective for all parameters of the model, every rank asks), multiplication and division by
    a scalar, and zeroing work in place on this rank's elements. `full_tensor()` gathers the values; every rank must
    call it.
    """

    _slot: "Slot"

    @staticmethod
    def __new__(cls, slot: "Slot") -> "LogicalGradient":
        """Make the gradient of a slot's parameter."""
        bucket, parameter = slot.bucket, slot.parameter
        made: LogicalGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=bucket.dtypes.grad, device=bucket.device
        )
        made._slot = slot
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in NORMS:
            return _norms(args, kwargs or {})
        if name in ZEROS or name in SCALES:
            return _change(name, func, args, kwargs or {})
        if name in NO_OPS:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        slot = next(a._slot for a in _flatten(args) if isinstance(a, LogicalGradient))
        engine = slot.engine()
        raise RuntimeError(
            f"{engine.mesh if engine else ''} The gradient of '{slot.name}' {tuple(slot.parameter.shape)} is spread "
            f"over ranks, so {func} can not read it here. Norms, clip_grad_norm_, scaling and zeroing work as they "
            "are; `p.grad.full_tensor()` gathers the values (every rank must call it). An optimizer that meets this "
            "gradient was built from sharded parameters: hand it to zero.attach(optimizer)."
        )

    def full_tensor(self) -> Tensor:
        """Return the whole gradient as a plain tensor. Collective: all-gather of its bucket; every rank must call."""
        return _engine_of(self._slot).full_gradient(self._slot)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LogicalGradient('{self._slot.name}', shape={tuple(self.shape)}, dtype={self.dtype})"


@final
class MasterGradient(torch.Tensor):
    """This rank's elements of a gradient, flat; norms of it are norms of the whole gradient."""

    _slot: "Slot"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Updates mix gradients with plain tensors; only what is asked of gradients themselves is answered here.
        if (name := func.__name__) in ANSWERED:
            first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
            if isinstance(first, MasterGradient) and name == SCALER_CHECK:
                return _check_scaled(func, args)
            if isinstance(first, MasterGradient):
                return _norms(args, kwargs or {}) if name in NORMS else _change(name, func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@final
class MasterSlice(torch.nn.Parameter):
    """What an optimizer holds in place of a parameter: this rank's part of its master values, flat, possibly empty."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:
        """This rank's elements of the reduced gradient; None where no rank used the parameter."""
        slot: Slot = self.__dict__["_zeroshard"]
        grads = slot.bucket.grads
        engine = slot.engine()
        if not slot.has_grad or (engine is not None and engine.is_skipping):
            return None
        if slot.master_grad is None:
            part = grads.slice(slot.index, grads.hold())
            if not grads.sums_are_whole or slot.form.has_axis:
                part = part.as_subclass(MasterGradient)
                part._slot = slot
            slot.master_grad = part
        if grads.dtype != self.dtype:
            # Optimizers want one dtype: gradients held in another are converted for the update alone.
            wide = slot.master_grad.to(self.dtype).as_subclass(MasterGradient)
            wide._slot = slot
            return wide
        return slot.master_grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        slot: Slot = self.__dict__["_zeroshard"]
        if value is not None and value is not slot.master_grad:
            raise RuntimeError(
                f"The gradient of the optimizer's slice of '{slot.name}' can not be replaced; assign a tensor of the "
                "parameter's shape to the parameter's own .grad, or change the slice's gradient in place."
            )
        if value is None:
            assign(slot, None)


def read(slot: "Slot") -> Tensor | None:
    """Return what `parameter.grad` is: None, a view of what is held where that is all of it, or a logical gradient."""
    if not slot.has_grad:
        return None
    grads, engine = slot.bucket.grads, slot.engine()
    # What `no_sync` left to a later reduction may lie apart, and its norm is of one rank: a view would hide both.
    waits = (grads.staged[slot.index] or grads.is_of_one_copy) and engine and len(engine.mesh.data_ranks) > 1
    is_plain = grads.is_whole and grads.sums_are_whole and not slot.form.has_axis and not waits
    if slot.grad_view is None or is_plain == isinstance(slot.grad_view, LogicalGradient):
        slot.grad_view = grads.views_of(grads.hold())[slot.index] if is_plain else LogicalGradient(slot)
    return slot.grad_view


def assign(slot: "Slot", value: Tensor | None) -> None:
    """Set `parameter.grad`: None forgets it; a tensor of the parameter's shape, equal on all ranks, replaces it."""
    engine = slot.engine()
    if engine is not None:
        engine.gradients_changed()
    grads = slot.bucket.grads
    if value is None:
        _clear(slot)
    elif value is not slot.grad_view:
        shape, part = slot.bucket.shapes[slot.index], slot.form.part(value)
        if tuple(part.shape) != shape:
            raise RuntimeError(f"The gradient of '{slot.name}' must have shape {shape} here; got {tuple(part.shape)}.")
        _clear(slot)
        with torch.no_grad():
            grads.set_reduced(slot.index, part)


def _clear(slot: "Slot") -> None:
    """Forget a gradient, and the views of it, whose memory may be gone."""
    slot.bucket.grads.clear(slot.index)
    slot.grad_view = slot.master_grad = None


def _norms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a norm function for one gradient or for a list of them."""
    grads, rest = args[0], args[1:]
    p = kwargs.get("ord", kwargs.get("p", rest[0] if rest else 2.0))
    p = 2.0 if p in (None, "fro") else float(p)
    several = isinstance(grads, (list, tuple))
    norms = [_norm_of(cast("LogicalGradient | MasterGradient", g)._slot, p) for g in (grads if several else [grads])]
    return norms if several else norms[0]


def _norm_of(slot: "Slot", p: float) -> Tensor:
    return _engine_of(slot).norms(p)[slot.name]


def _change(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place function on this rank's elements of one gradient or of a list."""
    targets = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    parts: list[Tensor] = []
    for target in targets:
        parts += _local_parts(target._slot)
    rest = args[1:]
    if any(isinstance(a, (LogicalGradient, list, tuple)) for a in rest):
        raise RuntimeError(f"{name} of gradients that are spread over ranks takes one scalar for all of them.")
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        operate = getattr(torch, name) if name.startswith("_foreach_") else None
        if operate is not None:
            operate(parts, *rest, **kwargs)
        else:
            for part in parts:
                getattr(part, name)(*rest, **kwargs)
    return args[0]


def _check_scaled(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run torch.amp.GradScaler's check on this rank's elements, and let all ranks see the same overflow."""
    grads, found_inf, inverse_scale = args
    engine = _engine_of(grads[0]._slot)
    if engine.loss_scale is not None:
        raise RuntimeError(
            "torch.amp.GradScaler and the engine's own loss scale would both divide the gradients. Use precision with "
            "loss_scale=None for GradScaler, or leave the scaler out."
        )
    with torch._C.DisableTorchFunctionSubclass():
        func(grads, found_inf, inverse_scale)
    found_inf.fill_(float(-engine.comm.agree([-int(found_inf.item() > 0)], "the overflow check of GradScaler")[0]))


def _engine_of(slot: "Slot") -> "Engine":
    engine = slot.engine()
    if engine is None:
        raise RuntimeError(f"The model of '{slot.name}' was deleted; its gradients are gone.")
    return engine


def _local_parts(slot: "Slot") -> list[Tensor]:
    """Return this rank's tensors behind a gradient: reduced elements, and what is staged apart and not reduced yet."""
    grads, is_staged = slot.bucket.grads, slot.bucket.grads.staged[slot.index]
    is_apart = grads.stage is not grads.held
    parts = [grads.slice(slot.index, grads.hold())] if grads.used[slot.index] and (is_apart or not is_staged) else []
    if is_staged:
        parts.append(grads.staged_view(slot.index))
    return [part.as_subclass(torch.Tensor) for part in parts]


def local_norms(slots: Iterable["Slot"], p: float) -> Tensor:
    """Return (number of slots,) fp64: each gradient's sum of |x|^p over this rank's elements (maximum for infinity)."""
    parts, places, count = [], [], 0
    device: torch.device | None = None
    for place, slot in enumerate(slots):
        grads, count, device = slot.bucket.grads, place + 1, slot.bucket.device
        part = grads.own_part(slot.index) if grads.used[slot.index] and slot.form.is_counted else None
        if part is not None and part.numel():
            parts.append(part)
            places.append(place)
    out = torch.zeros(count, dtype=torch.float64, device=device)
    if parts:
        norms = torch.stack([n.double() for n in torch._foreach_norm(parts, p)])
        out[places] = norms if p == float("inf") else norms**p
    return out


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]
