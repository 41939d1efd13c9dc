"""The needs of autograd nodes for their saved tensors (values, signs, a shape), and the origin of these tensors.

Owns the names of nodes and the walk over a unit's part of the graph. It must not know encodings. A node that is not
named here needs every bit of its saved tensors. Private names of torch are in `torch_private.py`.

Note: one walk, each node once
    The walk at a unit's exit begins at its outputs and marks each visited node. It stops at nodes of earlier walks, so
    a forward is walked once in total. The walk also meets nodes of modules around the unit, whose tensors are treated
    later: their uses are kept until then.
"""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch

from zeroshard.torch_private import edge_of, nodes_before, note_visit, saved_by, setting_of
from zeroshard.tree import find

__all__ = ["Need", "Origin", "Packed", "Use", "Uses"]

Tensor = torch.Tensor

_NOTE = "zeroshard: treated"
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias")
    for number in range(3)
)
_POOL = "MaxPool2DWithIndicesBackward0"

# The saved tensors that are inputs of a node, and those that are results, where an error causes a bounded error of
# gradients, in proportion to the other factors. Queries and keys of attention are in an exponent: not listed.
_ATTENTION = frozenset(
    f"ScaledDotProduct{name}Backward0"
    for name in ("FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention")
)
_INPUTS: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("MmBackward0", "self"): 0,
        ("MmBackward0", "mat2"): 1,
        ("AddmmBackward0", "mat1"): 1,
        ("AddmmBackward0", "mat2"): 2,
        ("BmmBackward0", "self"): 0,
        ("BmmBackward0", "mat2"): 1,
        ("BaddbmmBackward0", "batch1"): 1,
        ("BaddbmmBackward0", "batch2"): 2,
        ("LinearBackward0", "input"): 0,
        ("LinearBackward0", "weight"): 1,
        ("ConvolutionBackward0", "input"): 0,
        ("ConvolutionBackward0", "weight"): 1,
        ("NativeBatchNormBackward0", "input"): 0,
        ("CudnnBatchNormBackward0", "input"): 0,
        ("NativeLayerNormBackward0", "input"): 0,
        ("NativeGroupNormBackward0", "input"): 0,
        ("FusedRmsNormBackward0", "input"): 0,
        ("MulBackward0", "self"): 0,
        ("MulBackward0", "other"): 1,
        ("PowBackward0", "self"): 0,
        ("GeluBackward0", "self"): 0,
        ("SiluBackward0", "self"): 0,
        ("ScaledDotProductFlashAttentionForCpuBackward0", "value"): 2,
        ("ScaledDotProductFlashAttentionBackward0", "value"): 2,
        ("ScaledDotProductEfficientAttentionBackward0", "value"): 2,
        ("ScaledDotProductCudnnAttentionBackward0", "value"): 2,
    }
)
_RESULTS = frozenset((("SigmoidBackward0", "result"), ("TanhBackward0", "result"))) | frozenset(
    (name, "output") for name in _ATTENTION
)


class Packed:
    """The box that saved-tensor hooks put in place of a tensor: its `value`, until a treatment replaces the value."""

    __slots__ = ()
    value: Any


@final
@dataclass(frozen=True, slots=True)
class Need:
    """The part of a saved tensor that its node needs.

    Args:
        kind: "values"; "nonzero", "positive" or "inside", whether elements are not zero, above zero, or neither at nor
            beyond `low` and `high`; "shape"; "window", the place of an index in the window of a pool; or "opaque":
            another program reads it, so it is left alone.
        settings: of a pool: kernel size, stride, padding and dilation; width of its input at the end.
    """

    kind: str
    low: float = 0.0
    high: float = 1.0
    settings: tuple[tuple[int, ...], ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """The result of a ReLU that a tensor is derived from.

    Args:
        root: identifies the result as a node saved it; None if no node saved it here.
        steps: the steps from the result: "square" and dtypes; () for the result itself.
    """

    root: int | None
    steps: tuple[Any, ...]


@final
@dataclass(frozen=True, slots=True)
class Use:
    """A tensor that a node saved.

    Args:
        node: the name of the node, and the name of the tensor in the node.
        origin: the origin of the tensor, if it is derived from the result of a ReLU.
        has_edge: whether the tensor needs a gradient, so that the graph computed it.
        can_round: whether errors of the tensor cause bounded errors of gradients.
    """

    node: str
    place: str
    need: Need
    origin: Origin | None = None
    has_edge: bool = True
    can_round: bool = False


_VALUES = Need("values")
_OPAQUE = Need("opaque")


@final
class Uses:
    """The uses of saved tensors that are not treated yet."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], Use]] = {}

    def walk(self, outputs: Any) -> None:
        """Collect the uses of tensors saved on the paths to outputs."""
        stack = [tensor.grad_fn for tensor in find(outputs, Tensor) if tensor.grad_fn is not None]
        while stack:
            node = stack.pop()
            if not note_visit(node, _NOTE):
                continue
            name = node.name()
            for place, packed in saved_by(node):
                tensor = _tensor_of(packed)
                if tensor is not None:
                    self._found[id(tensor)] = weakref.ref(tensor), _use(node, name, place, tensor)
            stack += nodes_before(node)

    def of(self, tensor: Tensor) -> Use | None:
        """Return and remove the use of a box's tensor; None if no walk met the node that saved it."""
        known, use = self._found.pop(id(tensor), (None, None))
        return use if known is not None and known() is tensor else None

    def forget_dead(self) -> None:
        """Remove tensors that were released."""
        if any(known() is None for known, _ in self._found.values()):
            self._found = {key: one for key, one in self._found.items() if one[0]() is not None}


def _tensor_of(packed: Any) -> Tensor | None:
    """Return the tensor of a box that no treatment has replaced."""
    return packed.value if isinstance(packed, Packed) and isinstance(packed.value, Tensor) else None


def _use(node: Any, name: str, place: str, tensor: Tensor) -> Use:
    if place == "tensors":
        # A user function, or a compiled block.
        return Use(name, place, _OPAQUE)
    if name == "ReluBackward0" and place == "result":
        return Use(name, place, Need("nonzero"), Origin(id(tensor), ()))
    if name == "LeakyReluBackward0" and place == "self" and setting_of(node, "negative_slope") >= 0:
        return Use(name, place, Need("positive"))
    if name == "HardtanhBackward0" and place == "self":
        low, high = float(setting_of(node, "min_val")), float(setting_of(node, "max_val"))
        return Use(name, place, Need("inside", low, high) if -math.inf < low < high < math.inf else _VALUES)
    if name == _POOL and place == "self" and tensor.device.type in ("cpu", "cuda"):
        return Use(name, place, Need("shape"), has_edge=edge_of(node, 0) is not None)
    if name == _POOL and place == "result1":
        settings = [tuple(setting_of(node, one)) for one in ("kernel_size", "stride", "padding", "dilation")]
        settings[1] = settings[1] or settings[0]
        pooled = next((one for known, one in saved_by(node) if known == "self"), None)
        source = pooled.value if isinstance(pooled, Packed) else None
        width = (source.shape if isinstance(source, Tensor) else torch.Size((0,)))[-1]
        return Use(name, place, Need("window", settings=(*settings, (width,))) if width else _VALUES)
    position = _INPUTS.get((name, place))
    if position is None:
        return Use(name, place, _VALUES, can_round=(name, place) in _RESULTS)
    can_round = name != "PowBackward0" or setting_of(node, "exponent") == 2
    made_by = edge_of(node, position)
    return Use(name, place, _VALUES, _origin(made_by, tensor), made_by is not None, can_round)


def _origin(node: Any, tensor: Tensor) -> Origin | None:
    """Return the ReLU result that a tensor, which a node's output is a view of, is derived from."""
    steps: tuple[Any, ...] = ()
    node = _behind_views(node)
    if is_copied := node is not None and node.name() == "ToCopyBackward0":
        steps, node = (tensor.dtype,), edge_of(node, 0)
    if node is None:
        return None
    is_square = node.name() != "ReluBackward0"
    if is_square and not _is_square(node):
        return None
    root = _root(node, "self" if is_square else "result")
    if root is None or (is_copied and not _has_same_order(root, tensor)):
        return None
    return Origin(id(root), ("square", *steps) if is_square else steps)


def _has_same_order(one: Tensor, other: Tensor) -> bool:
    """Return whether the elements of two tensors are in the same order in memory; False if this is not certain."""
    if one.shape == other.shape:
        return one.stride() == other.stride()
    return one.is_contiguous() and other.is_contiguous()


def _is_square(node: Any) -> bool:
    if node.name() == "PowBackward0":
        return bool(setting_of(node, "exponent") == 2)
    if node.name() != "MulBackward0" or edge_of(node, 0) is not edge_of(node, 1):
        return False
    factors = [_tensor_of(packed) for _, packed in saved_by(node)]
    first, second = factors if len(factors) == 2 else (None, None)
    return (
        first is not None
        and second is not None
        and (first.data_ptr(), first.shape, first.stride()) == (second.data_ptr(), second.shape, second.stride())
    )


def _root(node: Any, place: str) -> Tensor | None:
    tensors = [_tensor_of(packed) for name, packed in saved_by(node) if name == place]
    return tensors[0] if tensors else None


def _behind_views(node: Any) -> Any:
    """Return the node that allocated the memory of a node's output."""
    while node is not None and node.name() in _VIEWS:
        node = edge_of(node, 0)
    return node
