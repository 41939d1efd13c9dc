"""The argument `precision=`, and the formats of each column that follow from it.

Owns `Precision` and its checks. `core/dtypes.py` says where values are rounded; `setup/casts.py` has the casts at
the edges of the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from zeroshard.describe.precision_names import precision_name, refusal_of_precision
from zeroshard.table.spec import CODECS, Formats
from zeroshard.torch_private import BatchNorm

__all__ = ["Chosen", "Precision", "PrecisionLike", "chosen_modules", "formats_of_model", "precision_of"]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model's training state; None keeps the dtype of the parameters.

    Args:
        param: dtype in which modules compute.
        reduce: dtype of gradients in messages, or the name of a codec; by default the dtype of `grad`.
        grad: dtype of the gradients that are held between micro-batches.
        master: dtype of the weights that the optimizer updates.
        keep: module classes whose parameters keep their dtype; their inputs are cast to it, their outputs back.
        loss_scale: "dynamic", a fixed number, or None for no loss scale, or a scale of the caller
            (torch.amp.GradScaler).
        output: dtype of the model's floating-point outputs, fp32 by default. For a module in `modules`, the default is
            the dtype of the surrounding modules.
        modules: pairs of a module class, or a pattern of module names, and the precision of these modules and their
            submodules. Inputs are cast to that precision, outputs back. The innermost module has priority, and for one
            module the first matching pair. `zs.shard(precision={"": "bf16", "blocks.*.router": "fp32"})` creates the
            pairs.
        rounding: rounding of updated masters, "nearest" or "stochastic". Stochastic rounding is for masters in
            bfloat16, which otherwise lose small updates: the update runs in fp32, and the result is rounded up or down
            with unbiased probability. States stay in fp32, and an update takes 4 more bytes per element temporarily.

    ```python
    import torch, zeroshard as zs

    paper = zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32)  # 16 bytes a parameter
    model = torch.nn.Linear(4, 4)
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()), precision=paper)
    assert model.weight.dtype == torch.bfloat16
    ```
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | str | None = None
    grad: torch.dtype | None = None
    master: torch.dtype | None = None
    keep: tuple[type[nn.Module], ...] = (BatchNorm,)
    loss_scale: Literal["dynamic"] | float | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    output: torch.dtype | None = None
    modules: tuple[tuple[str | type[nn.Module], "Precision"], ...] = ()

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "grad", "master", "output"):
            dtype = getattr(self, name)
            is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not (is_float or dtype is None or (name == "reduce" and dtype in CODECS)):
                raise TypeError(f"Precision({name}=...) takes a floating-point torch.dtype or None; got {dtype!r}.")
        if not isinstance(self.keep, tuple) or not all(isinstance(kind, type) for kind in self.keep):
            raise TypeError(f"Precision(keep=...) takes a tuple of module classes; got {self.keep!r}.")
        is_number = isinstance(self.loss_scale, int | float) and 0 < self.loss_scale < float("inf")
        if self.loss_scale is not None and self.loss_scale != "dynamic" and not is_number:
            raise ValueError(f"loss_scale must be 'dynamic', a positive number or None; got {self.loss_scale!r}.")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic'; got {self.rounding!r}.")
        for key, one in self.modules:
            if not isinstance(one, Precision) or not (isinstance(key, str) or _is_class(key)):
                raise TypeError(
                    f"Precision(modules=) takes pairs of a name or class and a Precision; got {(key, one)!r}."
                )
            if one.loss_scale is not None or one.modules:
                raise ValueError(
                    f"Precision of {key!r}: loss_scale and modules belong to the precision of the whole model. Set "
                    "them there, and write zs.Precision(param=torch.float16) for modules that compute in fp16."
                )
        if self.rounding == "stochastic" and self.master != torch.bfloat16:
            raise ValueError(f"rounding='stochastic' needs master=torch.bfloat16; got master={self.master}.")

    def formats_of(self, dtype: torch.dtype, *, is_kept: bool) -> Formats:
        """Return the formats for a parameter that has `dtype` in the model."""
        # One-byte weights are quantized, with separate scales: a cast would undo the quantization.
        if is_kept or not dtype.is_floating_point or dtype.itemsize == 1:
            return _formats(dtype, dtype, dtype, dtype, dtype)
        param, least = self.param or dtype, dtype if self.param is None else torch.float32
        grad = self.grad or torch.promote_types(param, least)
        master = self.master or torch.promote_types(dtype, least)
        state = torch.float32 if self.rounding == "stochastic" else master
        return _formats(param, self.reduce or grad, grad, master, state)


def _formats(*kinds: torch.dtype | str) -> Formats:
    return Formats(*(str(kind).removeprefix("torch.") for kind in kinds))


PrecisionLike = str | torch.dtype | Precision | Mapping[str | type[nn.Module], str | torch.dtype | Precision]
"""Values of the argument `precision=`; in a mapping, "" is the model itself."""


def precision_of(choice: PrecisionLike) -> Precision:
    """Return the precision of a name or of a mapping.

    Raises:
        ValueError: no precision has this name, or a mapping has no precision of the model.
        TypeError: a key of a mapping is neither a pattern nor a module class.
    """
    if isinstance(choice, Precision):
        return choice
    if isinstance(choice, Mapping):
        if "" not in choice:
            raise ValueError(f'precision= as a mapping needs the key "" for the model itself; got {choice!r}.')
        whole = precision_of(choice[""])
        return replace(whole, modules=tuple((key, precision_of(one)) for key, one in choice.items() if key != ""))
    named = {
        "fp32": Precision(),
        "bf16": Precision(param=torch.bfloat16),
        "fp16": Precision(param=torch.float16, loss_scale="dynamic"),
    }
    if (name := precision_name(choice)) is None:
        raise refusal_of_precision(choice)
    return named[name]


@dataclass(frozen=True)
class Chosen:
    """A module with a precision of its own.

    Args:
        inside: dtype to which its floating-point inputs are cast.
        outside: dtype to which its floating-point outputs are cast.
    """

    module: nn.Module
    precision: Precision
    inside: torch.dtype
    outside: torch.dtype


def chosen_modules(model: nn.Module, precision: Precision) -> list[Chosen]:
    """Return the modules that a precision names, outer modules first.

    Call it before parameters are converted.

    Raises:
        ValueError: a pattern or class matches no module.
    """
    places = [*_modules(model)] if precision.modules else []
    met = {key for _, module, name in places for key, _ in precision.modules if _fits(module, name, key)}
    if missed := [key for key, _ in precision.modules if key not in met]:
        names = ", ".join([name for _, _, name in places if name][:8])
        raise ValueError(f"precision= names {missed[0]!r}, which matches no module; modules: {names}, ...")
    found: dict[nn.Module, Chosen] = {}
    for around, module, name in places:
        one = next((one for key, one in precision.modules if _fits(module, name, key)), None)
        own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        if one is not None and own is not None and module not in found:
            outer = next((found[outer].precision for outer in reversed(around) if outer in found), precision)
            found[module] = Chosen(module, one, one.param or own, one.output or outer.param or own)
    return [*found.values()]


def formats_of_model(model: nn.Module, precision: Precision) -> dict[int, Formats]:
    """Return the formats of each parameter, by identity.

    Raises:
        ValueError: modules of different precision share a parameter.
    """
    kept = {id(p) for m in model.modules() if isinstance(m, precision.keep) for p in m.parameters()}
    chosen = {one.module: one.precision for one in chosen_modules(model, precision)}
    found: dict[int, tuple[str, Precision, Formats]] = {}
    for around, module, name in _modules(model):
        one = next((chosen[outer] for outer in reversed((*around, module)) if outer in chosen), precision)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            formats = one.formats_of(parameter.dtype, is_kept=id(parameter) in kept)
            full = f"{name}.{key}" if name else key
            first, _, known = found.setdefault(id(parameter), (full, one, formats))
            if known != formats:
                raise ValueError(
                    f"precision=: '{first}' and '{full}' are one parameter in modules of different precision "
                    f"({known.param} and {formats.param}). Name both modules in precision=, or neither."
                )
    return {key: formats for key, (_, _, formats) in found.items()}


def _modules(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, ...], nn.Module, str]]:
    """Yield (enclosing modules, outermost first; module; name) for each place in a model."""
    stack: list[tuple[tuple[nn.Module, ...], nn.Module, str]] = [((), model, "")]
    while stack:
        around, module, name = stack.pop()
        yield around, module, name
        for key, child in reversed(module._modules.items()):
            if child is not None:
                stack.append(((*around, module), child, f"{name}.{key}" if name else key))


def _fits(module: nn.Module, name: str, key: str | type[nn.Module]) -> bool:
    return bool(name) and (fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key))


def _is_class(key: object) -> bool:
    return isinstance(key, type) and issubclass(key, nn.Module)
