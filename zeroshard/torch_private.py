"""Names of torch that are private, each behind one of ours, with a test of what is expected of it.

Owns every use of them in the package. It must not know parameters, passes or transports. A release of torch that
changes one makes the first `shard()` of a process raise, by name, before anything is changed.

Note: what a change would do
    Most names are loud: without them nothing runs. Three would be silent, and are tested by what they are for: the
    function by which GradScaler checks gradients (ranks would skip different steps), the place of a reentrant
    checkpoint on the stack (gradients would be reduced several times), and the local tensor of a DTensor (a released
    parameter would be read).
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

__all__ = [
    "BatchNorm",
    "DisabledFunction",
    "NoFunctionTransforms",
    "NoSubclasses",
    "SCALER_CHECK",
    "WeakStorage",
    "accept_in_foreach",
    "accumulator_of",
    "call_after_backward",
    "check_dtensor",
    "check_torch",
    "default_store",
    "foreach_lerp_",
    "foreach_norm",
    "graph_task",
    "innermost_hooks",
    "is_called_by_checkpoint",
    "is_inside_reentrant_checkpoint",
    "local_of",
    "nodes_before",
    "raw_data",
    "raw_local",
    "set_local",
    "set_slot",
    "slot_grad",
    "storage_of",
    "users_of_storage",
    "version_of",
    "will_run",
    "without_storage",
]

Tensor = torch.Tensor

BatchNorm: Final = torch.nn.modules.batchnorm._BatchNorm
"""The class of all batch norms."""
DisabledFunction: Final = torch._C._disabled_torch_function_impl
"""As `__torch_function__`: a subclass whose operations run as those of plain tensors."""
NoSubclasses: Final = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses are plain tensors."""
NoFunctionTransforms: Final = torch._C._DisableFuncTorch
"""A context outside the transforms of torch.func."""
WeakStorage: Final[Any] = StorageWeakRef
"""Keeps what `storage_of` returned from being given to another storage, and the memory not."""
SCALER_CHECK: Final = "_amp_foreach_non_finite_check_and_unscale_"
"""What GradScaler calls with gradients."""

# Asked many times a step: torch's own functions, and nothing around them.
graph_task: Final = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread is in, -1 outside."""
will_run: Final = torch._C._will_engine_execute_node
"""Tells whether the backward pass that this thread is in will run a node."""
foreach_norm: Final = torch._foreach_norm
"""Returns the norm of each tensor of a list."""
foreach_lerp_: Final = torch._foreach_lerp_
"""Moves each tensor of a list towards another, in place."""
version_of: Final = operator.attrgetter("_version")
"""Returns how often a tensor was changed in place."""
slot_grad: Final[Callable[[Tensor], Tensor | None]] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
"""Returns what lies in autograd's own slot, whatever a subclass answers to `.grad`."""
set_slot: Final[Callable[[Tensor, Tensor | None], None]] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""Fills or empties autograd's own slot."""
raw_data: Final[Callable[[Tensor], Tensor]] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Returns `.data`, whatever a subclass answers to it."""


def call_after_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward pass that this thread is in ends."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def accumulator_of(parameter: Tensor) -> Any:
    """Return the node that accumulates the parameter's gradient, which torch makes anew where no graph holds it."""
    with torch.enable_grad(), NoSubclasses():
        return nodes_before(parameter.view_as(parameter).grad_fn)[0]


def nodes_before(node: Any) -> list[Any]:
    """Return the nodes that a node hands gradients to."""
    return [one for one, _ in node.next_functions if one is not None]


def storage_of(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage for as long as it lives, also where it is empty."""
    found: int = tensor.untyped_storage()._cdata
    return found


def users_of_storage(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    # One use is that of the storage object here.
    return torch._C._storage_Use_Count(storage._cdata) - 1


def without_storage(
    cls: type, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of a subclass that has a shape and no memory."""
    made: Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
    # Some of torch's C functions know no subclasses (DLPack); without a storage they would hand out address 0.
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, and of any other the tensor itself; nothing is communicated."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def raw_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, whatever a subclass answers to it."""
    from torch.distributed.tensor import DTensor  # half a second to import

    found: Tensor = DTensor._local_tensor.__get__(tensor)  # type: ignore[attr-defined]
    return found


def set_local(tensor: Any, local: Tensor, like: Any) -> None:
    """Make `local` the local tensor of a DTensor, with the dtype and placement of the DTensor `like`."""
    tensor._local_tensor, tensor._spec = local, like._spec


def default_store() -> dist.Store:
    """Return the store of the default process group, which ranks share also when the group is stuck."""
    return dist.distributed_c10d._get_default_store()


def accept_in_foreach(*classes: type) -> None:
    """Have torch's functions on lists of tensors take tensors of these classes; twice changes nothing."""
    for types in _foreach_types():
        types.extend(one for one in classes if one not in types)


def _foreach_types() -> Iterator[list[type]]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_foreach_supported_types"):
            yield module._foreach_supported_types


def is_called_by_checkpoint() -> bool:
    """Tell whether activation checkpointing has a tensor packed or unpacked; asked in a saved-tensor hook itself.

    Of a module that it recomputes it saves the inputs, and nothing else, past its own hooks.
    """
    frame = sys._getframe(2)
    if _is_of(frame, "torch/autograd/function.py"):
        # Up to torch 2.12 it saves them in a node of autograd, whose `apply` is Python.
        frame = frame.f_back or frame
    return _is_of(frame, "torch/utils/checkpoint.py")


def _is_of(frame: FrameType, path: str) -> bool:
    return frame.f_code.co_filename.replace("\\", "/").endswith(path)


def innermost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the pair of saved-tensor hooks that autograd runs here, the innermost one."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_inside_reentrant_checkpoint() -> bool:
    """Tell whether a reentrant checkpoint is recomputing: its backward function is then on this thread's stack."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return _is_of(frame, "torch/utils/checkpoint.py")
    return False


# -- tests ------------------------------------------------------------------------------------------------------------


@functools.cache
def check_torch() -> None:
    """Test once a process that torch's private names do what the engine expects.

    Raises:
        RuntimeError: one is missing, or does something else; the text names it.
    """
    for name, test in _TESTS:
        try:
            with torch.device("cpu"), torch.enable_grad():
                is_right = test()
        except Exception as error:
            raise _changed(name) from error
        if not is_right:
            raise _changed(name)


def check_dtensor(tensor: Tensor) -> None:
    """Test that a DTensor's local tensor is where it was.

    Raises:
        RuntimeError: it is not.
    """
    local = getattr(tensor, "_local_tensor", None)
    if not isinstance(local, Tensor) or storage_of(local) != storage_of(tensor.to_local()):  # type: ignore[attr-defined]
        raise _changed("DTensor._local_tensor")


def _changed(name: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has changed what is private to it: {name} is missing, or does something else. "
        "Install a release of zeroshard that knows this torch, or an earlier torch."
    )


def _tests_autograd() -> bool:
    """A backward has a number, knows what it will run, and calls back at its end; the slot is autograd's own."""
    seen: list[Any] = [graph_task()]
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def look(grad: Tensor) -> None:
        call_after_backward(lambda: seen.append("end"))
        seen.extend([graph_task() >= 0, will_run(accumulator_of(weight)), will_run(accumulator_of(other))])

    product = weight * 2.0
    product.register_hook(look)
    product.sum().backward()
    grad = slot_grad(weight)
    set_slot(weight, None)
    return seen == [-1, True, True, False, "end"] and grad is not None and weight.grad is None


def _tests_reentrant_checkpoint() -> bool:
    seen = [is_inside_reentrant_checkpoint()]
    x = torch.ones(2, requires_grad=True)

    def run(y: Tensor) -> Tensor:
        product = y * 2.0
        if product.requires_grad:  # the first time it does not
            product.register_hook(lambda grad: seen.append(is_inside_reentrant_checkpoint()))
        return product

    checkpoint(run, x, use_reentrant=True).sum().backward()
    return seen == [False, True]


def _tests_inputs_of_checkpoint() -> bool:
    seen: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(is_called_by_checkpoint())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        seen.append(is_called_by_checkpoint())
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        product = checkpoint(torch.sin, x * x, use_reentrant=False) * x
        found = innermost_hooks()
    product.sum().backward()
    # Two factors each time, and one input in between.
    expected = [False, False, True, False, False]
    return seen == 2 * expected and found == (pack, unpack) and innermost_hooks() is None


class _Seen(torch.Tensor):
    names: list[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _Seen.names.append(func.__name__)
        with NoSubclasses():
            return func(*args, **(kwargs or {}))


class _Hollow(torch.Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


def _tests_scaler() -> bool:
    _Seen.names = []
    weight = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0), torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum()).backward()
    weight.grad = torch.ones(2).as_subclass(_Seen)
    scaler.unscale_(optimizer)
    return SCALER_CHECK in _Seen.names


def _tests_storage() -> bool:
    tensor = torch.ones(2)
    view = tensor[1:]
    weak = WeakStorage(torch.ones(2).untyped_storage())
    if WeakStorage(tensor.untyped_storage()).expired() or not weak.expired():
        return False
    return storage_of(tensor) == storage_of(view) != storage_of(torch.ones(2)) and [
        users_of_storage(tensor),
        users_of_storage(torch.ones(2)),
    ] == [2, 1]


def _tests_version() -> bool:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.add_(1.0)
    return bool(version_of(tensor) == before + 1 == version_of(tensor.detach()))


def _tests_wrapper() -> bool:
    made = without_storage(_Hollow, torch.Size((2, 3)), (3, 1), torch.float32, torch.device("cpu"))
    try:
        with NoSubclasses():
            made.data_ptr()
    except RuntimeError:
        return tuple(made.shape) == (2, 3)
    return False


def _tests_foreach() -> bool:
    norms = foreach_norm([torch.tensor([3.0, 4.0])], 2.0, dtype=torch.float32)
    return float(norms[0]) == 5.0 and all(torch.Tensor in types for types in _foreach_types())


_TESTS: Final = (
    ("the number, the nodes or the callbacks of a backward pass", _tests_autograd),
    ("torch.utils.checkpoint with use_reentrant=True", _tests_reentrant_checkpoint),
    ("how torch.utils.checkpoint saves inputs", _tests_inputs_of_checkpoint),
    (f"torch.amp.GradScaler's use of {SCALER_CHECK}", _tests_scaler),
    ("torch._C._storage_Use_Count, or the identity of a storage", _tests_storage),
    ("Tensor._version", _tests_version),
    ("Tensor._make_wrapper_subclass", _tests_wrapper),
    ("torch._foreach_norm, or the types that its kind takes", _tests_foreach),
)
