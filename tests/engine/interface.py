"""Every way in which torch and Python can be asked something about a tensor, for differential tests of an interface.

Owns the enumeration: whatever the installed torch has, so that a function that is new is found by itself. It must not
know the engine. Read `calls_of` first.
"""

import builtins
import copy
import io
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

NAMES: Final = ("_VariableFunctions", "_nn", "_linalg", "_special", "_fft", "_sparse", "_nested")
NAMESPACES: Final = tuple(getattr(torch._C, name) for name in NAMES)
MODULES: Final = (torch.nn.utils, torch.nn.init, operator, math)
NOT_ASKED: Final = frozenset(
    """
    __class__ __init_subclass__ __subclasshook__ __new__ __init__ __getattribute__ __dict__ __weakref__ __module__
    __doc__ __annotations__
    """.split()
)
"""What belongs to every Python object, and is asked by the interpreter before torch knows of it."""

Call = Callable[[Any, Any, Any], Any]
"""Of (the tensor asked, another of its kind, a plain tensor of its shape)."""


def functions() -> dict[str, Callable[..., Any]]:
    """Return every function that may be given a tensor, by a name that says where it is from."""
    found: dict[str, Callable[..., Any]] = {}
    for function in get_testing_overrides():
        if callable(function):
            found[f"override {torch.overrides.resolve_name(function) or function}"] = function
    for space in (*NAMESPACES, *MODULES):
        for name in dir(space):
            function = getattr(space, name)
            if callable(function) and not isinstance(function, type) and not name.startswith("__"):
                found[f"{getattr(space, '__name__', space)}.{name}"] = function
    for name in dir(Tensor):
        function = getattr(Tensor, name)
        if callable(function) and not isinstance(function, type) and name not in NOT_ASKED:
            found[f"Tensor.{name}"] = function
    unique = {id(function): name for name, function in reversed(found.items())}
    return {name: found[name] for name in sorted(unique.values())}


def attributes() -> list[str]:
    """Return the names of what a tensor has that is no method."""
    return [name for name in dir(Tensor) if name not in NOT_ASKED and not callable(getattr(Tensor, name))]


ARGUMENTS: Final[dict[str, Callable[[Any, Any, Any], tuple[Any, ...]]]] = {
    "g": lambda g, o, t: (g,),
    "t, g": lambda g, o, t: (t, g),
    "[g]": lambda g, o, t: ([g],),
    "g, 2.0": lambda g, o, t: (g, 2.0),
    "g, t": lambda g, o, t: (g, t),
    "[t], [g]": lambda g, o, t: ([t], [g]),
    "[g], 2.0": lambda g, o, t: ([g], 2.0),
    "[g], [g]": lambda g, o, t: ([g], [g]),
    "[g, o]": lambda g, o, t: ([g, o],),
    "g, -1": lambda g, o, t: (g, -1),
    "g, 0": lambda g, o, t: (g, 0),
    "g, -inf": lambda g, o, t: (g, -math.inf),
    "g, 0, 0": lambda g, o, t: (g, 0, 0),
    "g, 0, 1": lambda g, o, t: (g, 0, 1),
    "g, 1.0, 1, True": lambda g, o, t: (g, 1.0, 1, True),
    "g, (0,)": lambda g, o, t: (g, (0,)),
    "g, 'fro'": lambda g, o, t: (g, "fro"),
    "g, 'nuc'": lambda g, o, t: (g, "nuc"),
    "g, None": lambda g, o, t: (g, None),
    "g, dtype": lambda g, o, t: (g, torch.float64),
    "g, o": lambda g, o, t: (g, o),
    "g, g": lambda g, o, t: (g, g),
    "g, number": lambda g, o, t: (g, torch.tensor(0.5, dtype=t.dtype)),
    "g, one": lambda g, o, t: (g, torch.tensor([0.5], dtype=t.dtype)),
    "g, mask, 1": lambda g, o, t: (g, t > 0, 1.0),
    "g, mask, t": lambda g, o, t: (g, t > 0, t),
    "g, t, t": lambda g, o, t: (g, t, t),
    "t, g, t": lambda g, o, t: (t, g, t),
    "t, t, g": lambda g, o, t: (t, t, g),
    "g, 0, index": lambda g, o, t: (g, 0, torch.zeros(1, dtype=torch.int64)),
    "g, 0, index, 1": lambda g, o, t: (g, 0, torch.zeros(1, dtype=torch.int64), 1.0),
    "[g], 0": lambda g, o, t: ([g], 0),
    "[g], [2.0]": lambda g, o, t: ([g], [2.0]),
    "[g, t], 2.0": lambda g, o, t: ([g, t], 2.0),
    "[t, g], 2.0": lambda g, o, t: ([t, g], 2.0),
    "[g], [t]": lambda g, o, t: ([g], [t]),
    "[g], [t], [t]": lambda g, o, t: ([g], [t], [t]),
    "[t], [g], [t]": lambda g, o, t: ([t], [g], [t]),
    "[t], [t], [g]": lambda g, o, t: ([t], [t], [g]),
}
"""Kinds of arguments for (the tensor asked, another, a plain one); those that tell most come first."""

KEYWORDS: Final[dict[str, dict[str, Any]]] = {
    "dim=0": {"dim": 0},
    "dim=()": {"dim": ()},
    "keepdim": {"keepdim": True},
    "dtype": {"dtype": torch.float64},
    "dtype half": {"dtype": torch.float16},
    "min, max": {"min": -0.01, "max": 0.01},
    "floor": {"rounding_mode": "floor"},
    "memory_format": {"memory_format": torch.contiguous_format},
}
WITH_KEYWORDS: Final = ("g", "[g]", "g, 2.0", "g, -1", "g, 0", "g, -inf", "g, 'fro'", "g, 'nuc'")
"""Arguments that are tried with keywords, too."""


VALUES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "True": lambda g, t: True,
    "False": lambda g, t: False,
    "None": lambda g, t: None,
    "t": lambda g, t: t,
    "g": lambda g, t: g,
}
BUILTINS: Final = (
    "bool int float complex len iter abs round hash repr str ascii format callable bytes divmod pow any all min"
).split()


def _saved(g: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(g, stream)
    return stream.getvalue()


PYTHON: Final[dict[str, Call]] = {
    "copy.copy": lambda g, o, t: copy.copy(g),
    "copy.deepcopy": lambda g, o, t: copy.deepcopy(g),
    "pickle": lambda g, o, t: pickle.dumps(g),
    "torch.save": lambda g, o, t: _saved(g),
    "list": lambda g, o, t: list(g),
    "tuple": lambda g, o, t: tuple(g),
    "in": lambda g, o, t: 1.0 in g,
    "sum": lambda g, o, t: sum(g),
    "max": lambda g, o, t: max(g),
    "sorted": lambda g, o, t: sorted(g),
    "reversed": lambda g, o, t: reversed(g),
    "f-string": lambda g, o, t: len(f"{g:.3f}") if not g.ndim else "",
    "numpy asarray": lambda g, o, t: np.asarray(g),
    "numpy array": lambda g, o, t: np.array(g),
    "numpy function": lambda g, o, t: np.abs(g),
    "numpy left": lambda g, o, t: np.ones(1) * g,
    "memoryview": lambda g, o, t: memoryview(g),
    "torch.tensor": lambda g, o, t: torch.tensor(g),
    "torch.as_tensor": lambda g, o, t: torch.as_tensor(g) + 0,
    "torch.asarray": lambda g, o, t: torch.asarray(g) + 0,
    "from_dlpack": lambda g, o, t: torch.from_dlpack(g),
    "to_dlpack": lambda g, o, t: torch.utils.dlpack.to_dlpack(g),
    "new of values": lambda g, o, t: torch.Tensor(g),
    "Parameter": lambda g, o, t: nn.Parameter(g) + 0,
    "Buffer": lambda g, o, t: nn.Buffer(g) + 0,
    "as_subclass": lambda g, o, t: g.as_subclass(Tensor) + 0,
    "_make_subclass": lambda g, o, t: Tensor._make_subclass(Tensor, g) + 0,  # type: ignore[attr-defined]
    "typed storage": lambda g, o, t: g.storage()[0],
    "write by index": lambda g, o, t: operator.setitem(g, 0, 0.5),
    "write by slice": lambda g, o, t: operator.setitem(g, slice(None), 0.5),
    "write by mask": lambda g, o, t: operator.setitem(g, t > 0, 0.5),
    "write by ellipsis": lambda g, o, t: operator.setitem(g, ..., 0.5),
    "write into": lambda g, o, t: operator.setitem(t, ..., g),
    "read by index": lambda g, o, t: g[0],
    "read by ellipsis": lambda g, o, t: g[...],
    "read by mask": lambda g, o, t: g[t > 0],
    "index of": lambda g, o, t: t[g],
    "out=": lambda g, o, t: torch.add(t, t, out=g),
    "out= of a norm": lambda g, o, t: torch.linalg.vector_norm(g, out=torch.empty(())),
    "item in a list": lambda g, o, t: [o, g].index(t),
    "swap": lambda g, o, t: torch.utils.swap_tensors(g, t),
    "vmap": lambda g, o, t: torch.func.vmap(torch.sin)(g),
    "grad of": lambda g, o, t: torch.func.grad(lambda x: x.sum())(g),
    "autograd": lambda g, o, t: (torch.ones((), requires_grad=True) * g).sum().backward(),
    "autograd grad": lambda g, o, t: torch.autograd.grad(t.clone().requires_grad_() * 2, [t], grad_outputs=g),
    "histogram": lambda g, o, t: torch.histc(g.detach().float(), 4),
    "mean of magnitudes": lambda g, o, t: g.abs().mean(),
    "mean of data": lambda g, o, t: g.data.mean(),
    "deviation": lambda g, o, t: g.detach().float().std(),
    "norm of data": lambda g, o, t: g.data.norm(2).item(),
    "norm of a wide copy": lambda g, o, t: g.detach().data.float().norm(),
    "norm of the same": lambda g, o, t: g.to(g.device).to(g.dtype).norm(p=2),
    "square of a norm": lambda g, o, t: g.norm(2).pow_(2) + 0 * g.norm(2),
    "norm again": lambda g, o, t: g.norm(2),
    "exponent": lambda g, o, t: g.norm(p=3, dtype=torch.float64),
    "aten": lambda g, o, t: torch.ops.aten.sum(g),
    "aten overload": lambda g, o, t: torch.ops.aten.add.Tensor(g, t),
    "aten in place": lambda g, o, t: torch.ops.aten.add_(g, t),
    "aten norm": lambda g, o, t: torch.ops.aten.linalg_vector_norm(g, 1),
    "aten norm overload": lambda g, o, t: torch.ops.aten.norm.Scalar(g, 2),
    "collective": lambda g, o, t: torch.distributed.get_world_size() and torch.distributed.all_reduce(g),
}


def calls_of(function: Callable[..., Any]) -> Iterator[tuple[str, Call]]:
    """Yield ways to call a function, as (its arguments, a call of it); many are no legal call, for an oracle either."""
    for shape, arguments in ARGUMENTS.items():
        yield shape, lambda g, o, t, make=arguments: function(*make(g, o, t))


def calls_with_keywords(function: Callable[..., Any]) -> Iterator[tuple[str, Call]]:
    """Yield ways to call a function with keywords."""
    for shape in WITH_KEYWORDS:
        for key, given in KEYWORDS.items():
            yield f"{shape}, {key}", lambda g, o, t, s=shape, k=given: function(*ARGUMENTS[s](g, o, t), **k)


def other_calls() -> Iterator[tuple[str, Call]]:
    """Yield ways to ask that are no function of torch's."""
    for name in attributes():
        yield f"read .{name}", lambda g, o, t, name=name: getattr(g, name)
        if name not in ("real", "grad_dtype"):  # torch 2.13 crashes, on any tensor
            yield f"delete .{name}", lambda g, o, t, name=name: delattr(g, name)
        for value, make in VALUES.items():
            yield f"set .{name} = {value}", lambda g, o, t, n=name, make=make: setattr(g, n, make(g, t))
    for name in BUILTINS:
        function = getattr(builtins, name)
        yield f"{name}(g)", lambda g, o, t, f=function: f(g)
        yield f"{name}(g, 2)", lambda g, o, t, f=function: f(g, 2)
    yield from PYTHON.items()
