"""torch's private names, each wrapped by a name of this module, with a test of the expected behavior.

Owns every use of private names in the package. It must not know parameters, passes or transports. If a release of
torch changes a private name, the first `shard()` of a process raises with that name, before any change. Names that
only a memory trace uses are tested by the first trace.

Note: effects of a change in torch
    Most changes raise errors at once. Three would be silent, so their effect is tested: the function by which
    GradScaler checks gradients (ranks would skip different steps), the place of a reentrant checkpoint on the stack
    (gradients would be reduced several times), and the local tensor of a DTensor (a released parameter would be
    read). A fourth, the settings of torch.compile, is tested only by the test suite, since torch's compiler takes
    seconds to import (graphs that cannot be replayed would not be rejected).
"""

import functools
import inspect
import math
import operator
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CellType, FrameType
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees each operation below autograd
from torch.utils.checkpoint import checkpoint

from zeroshard.tree import find

__all__ = [
    "BatchNorm",
    "Call",
    "DisabledFunction",
    "DispatchMode",
    "IGNORED_BY_DDP",
    "NoFunctionTransforms",
    "NoSubclasses",
    "SCALER_CHECK",
    "WeakStorage",
    "accept_in_foreach",
    "accumulator_of",
    "adafactor_step",
    "body_of",
    "call_after_backward",
    "captured_by_checkpoint",
    "check_dtensor",
    "check_torch",
    "check_tracing",
    "count_users",
    "default_store",
    "edge_of",
    "emulated_group",
    "fake_errors",
    "fake_tensors",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "graph_task",
    "has_kernel",
    "has_split",
    "innermost_hooks",
    "is_called_by_checkpoint",
    "is_called_by_cuda_graphs",
    "is_dense",
    "is_inside_functional_call",
    "is_inside_reentrant_checkpoint",
    "is_inside_transform",
    "is_profiling",
    "keep_first",
    "keep_last",
    "keeps_graph",
    "local_of",
    "muon_step",
    "next_node_number",
    "nodes_before",
    "note_visit",
    "own_client_of",
    "premultiplied_sum",
    "profiled",
    "raw_data",
    "raw_local",
    "raw_stream",
    "run_backward",
    "running_node_number",
    "saved_by",
    "set_local",
    "set_slot",
    "setting_of",
    "slot_grad",
    "storage_of",
    "users_of_storage",
    "uses_cuda_graphs",
    "version_of",
    "versions_below_autograd",
    "while_inferring",
    "will_run",
    "without_modes",
    "without_storage",
]

Tensor = torch.Tensor

BatchNorm: Final = torch.nn.modules.batchnorm._BatchNorm
"""The class of all batch norms."""
DisabledFunction: Final = torch._C._disabled_torch_function_impl
"""A `__torch_function__` with which a subclass's operations run as those of plain tensors."""
NoSubclasses: Final = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses are plain tensors."""
NoFunctionTransforms: Final = torch._C._DisableFuncTorch
"""A context outside the transforms of torch.func."""
WeakStorage: Final[Any] = StorageWeakRef
"""Keeps the identity from `storage_of` reserved, without keeping the memory."""
IGNORED_BY_DDP: Final = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the parameter names that DistributedDataParallel ignores."""
SCALER_CHECK: Final = "_amp_foreach_non_finite_check_and_unscale_"
"""The function that GradScaler calls with gradients."""

# Called many times a step: torch's own functions, without wrappers.
graph_task: Final = torch._C._current_graph_task_id
"""Returns the number of this thread's backward pass; -1 outside."""
keeps_graph: Final = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns whether this thread's backward pass keeps the graph; True outside a backward pass."""
will_run: Final = torch._C._will_engine_execute_node
"""Returns whether this thread's backward pass will run a node."""
_FUNCTIONAL_CALL: Final = inspect.unwrap(torch.nn.utils.stateless._functional_call).__code__
is_profiling: Final = torch.autograd._profiler_enabled
"""Returns whether torch's profiler runs."""
foreach_norm: Final = torch._foreach_norm
"""Returns the norm of each tensor of a list."""
foreach_copy_: Final = torch._foreach_copy_
"""Copies each tensor of a list to another, in place."""
foreach_mul_: Final = torch._foreach_mul_
"""Multiplies each tensor of a list by a number, in place."""
foreach_lerp_: Final = torch._foreach_lerp_
"""Moves each tensor of a list towards another, in place."""
muon_step: Final[Any] = torch.optim._muon.muon
"""Updates lists of matrices as torch.optim.Muon does, from lists of gradients and momentum."""
adafactor_step: Final[Any] = torch.optim._adafactor.adafactor
"""Updates lists of tensors as torch.optim.Adafactor does, from lists of gradients and states."""
version_of: Final = operator.attrgetter("_version")
"""Returns the number of in-place changes to a tensor."""
slot_grad: Final[Callable[[Tensor], Tensor | None]] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
"""Returns the value of autograd's own slot, also if a subclass overrides `.grad`."""
set_slot: Final[Callable[[Tensor, Tensor | None], None]] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""Sets or clears autograd's own slot."""
raw_data: Final[Callable[[Tensor], Tensor]] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Returns `.data`, also if a subclass overrides it."""


def call_after_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of this thread's backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def accumulator_of(parameter: Tensor) -> Any:
    """Return the node that accumulates the parameter's gradient; torch creates a new node if no graph holds one."""
    with torch.enable_grad(), NoSubclasses():
        return nodes_before(parameter.view_as(parameter).grad_fn)[0]


def nodes_before(node: Any) -> list[Any]:
    """Return the nodes that receive gradients from a node."""
    return [one for one, _ in node.next_functions if one is not None]


def edge_of(node: Any, position: int) -> Any:
    """Return the node that computed an input of a node; None if the input needs no gradient."""
    edges = node.next_functions
    return edges[position][0] if position < len(edges) else None


def saved_by(node: Any) -> list[tuple[str, Any]]:
    """Return the values that saved-tensor hooks packed for a node, each with its name in the node."""
    found: list[tuple[str, Any]] = []
    cls: Any = type(node)
    for name in _places_of(cls):
        try:
            raw = getattr(node, _RAW + name)
            found += [(name, one.data) for one in (raw if isinstance(raw, tuple) else (raw,)) if one is not None]
        except RuntimeError:
            # A backward has freed the saved tensor.
            continue
    return found


_RAW: Final = "_raw_saved_"


@functools.lru_cache(maxsize=1024)
def _places_of(cls: Hashable) -> tuple[str, ...]:
    return tuple(name.removeprefix(_RAW) for name in dir(cls) if name.startswith(_RAW))


def setting_of(node: Any, name: str) -> Any:
    """Return a number that a node saved, such as an exponent."""
    return getattr(node, f"_saved_{name}")


def note_visit(node: Any, key: str) -> bool:
    """Mark a node as visited; return whether this is the first visit."""
    notes = node.metadata
    return key not in notes and not notes.update({key: True})


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while the storage lives, also if it is empty."""
    found: int = tensor.untyped_storage()._cdata
    return found


def users_of_storage(tensor: Tensor) -> int:
    """Return the number of tensors that share a tensor's memory, including the tensor."""
    storage = tensor.untyped_storage()
    # One use is the storage object of this function.
    return torch._C._storage_Use_Count(storage._cdata) - 1


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill contiguous memory without gaps or overlaps; torch's test is private."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def fake_tensors() -> Any:
    """Return a context in which tensors have shapes and no memory; real inputs of their operations become fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def without_modes() -> AbstractContextManager[Any]:
    """Return a context whose operations modes do not see; selective checkpointing would count them in recomputation."""
    from torch.utils._python_dispatch import _disable_current_modes

    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def versions_below_autograd() -> AbstractContextManager[Any]:
    """Return a context below autograd in which a detached tensor shares the version counter, as above autograd."""
    guard: AbstractContextManager[Any] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


def fake_errors() -> tuple[type[Exception], ...]:
    """Return the errors of fake tensors when a program reads values, or shapes that depend on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return (DataDependentOutputException, DynamicOutputShapeException)


def count_users(tensor: Tensor) -> int:
    """Return the number of references to a tensor that torch counts, including those of the caller."""
    found: int = tensor._use_count()  # type: ignore[attr-defined]
    return found


def next_node_number() -> int:
    """Return the number of the next graph node that this thread creates."""
    found: int = torch._C._autograd._get_sequence_nr()
    return found


def run_backward(loss: Tensor) -> None:
    """Run the backward of a loss; unlike in `loss.backward()`, function modes stay active."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def running_node_number() -> int | None:
    """Return the number of the node whose backward runs on this thread; None outside, or for a node without one."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    found: int = node._sequence_nr()
    # Nodes that accumulate gradients run after all others, with a number that no other node has.
    return found if found < 2**63 else None


def without_storage(
    cls: type, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor of a subclass with a shape and without memory."""
    made: Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
    # Some of torch's C functions ignore subclasses (DLPack); without a storage they would return address 0.
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself, without communication."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def has_split(types: Iterable[type]) -> bool:
    """Return whether a class of tensors is DTensor."""
    return any(hasattr(one, "_local_tensor") for one in types)


@contextmanager
def while_inferring(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Make torch enter a context, possibly repeatedly, while it infers shapes of DTensors by running operations.

    torch infers shapes at the first use of an operation, on tensors of the whole shapes.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    if not hasattr(ShardingPropagator, "_fake_mode_lock"):
        raise _changed("ShardingPropagator._fake_mode_lock of torch.distributed.tensor", "is missing")
    before, ShardingPropagator._fake_mode_lock = ShardingPropagator._fake_mode_lock, context  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before


@contextmanager
def emulated_group(ranks: int) -> Iterator[None]:
    """Create a default process group with this process as rank 0; its collectives communicate nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Present(FakeStore):
        """A store in which all ranks are present."""

        def add(self, key: str, amount: int) -> int:
            return 0

    store = Present()  # torch keeps only the C++ part alive
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def raw_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, also if a subclass overrides the attribute."""
    from torch.distributed.tensor import DTensor  # half a second to import

    found: Tensor = DTensor._local_tensor.__get__(tensor)  # type: ignore[attr-defined]
    return found


def set_local(tensor: Any, local: Tensor, like: Any) -> None:
    """Make `local` the local tensor of a DTensor, with the dtype and placement of the DTensor `like`."""
    tensor._local_tensor, tensor._spec = local, like._spec


def default_store() -> dist.Store:
    """Return the store of the default process group, which works even if the group hangs."""
    return dist.distributed_c10d._get_default_store()


def own_client_of(store: dist.Store) -> dist.Store:
    """Return a client of the same store with its own connection; the same client if torch cannot clone it."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def premultiplied_sum(factor: float) -> Any:
    """Return the NCCL reduction that multiplies each rank's elements by a factor and sums them."""
    return dist._make_nccl_premul_sum(factor)


def accept_in_foreach(*classes: type) -> None:
    """Make torch's functions on lists of tensors accept tensors of these classes; idempotent."""
    for types in _foreach_types():
        types.extend(one for one in classes if one not in types)


def body_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a function that updates an optimizer's parameters once: its class's `step` without hooks.

    Hooks also do not run if a class calls the `step` of its base class.
    """
    step: Any = type(optimizer).step
    body = step.__wrapped__ if getattr(step, "hooked", False) else step

    def run() -> Any:
        # New dictionaries, since torch may be iterating over the present ones.
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        held = [(name, vars(optimizer)[name]) for name in names]
        vars(optimizer).update({name: type(hooks)() for name, hooks in held})
        try:
            return body(optimizer)
        finally:
            vars(optimizer).update(held)

    return run


def keep_first(handle: Any) -> None:
    """Make a hook run before the other hooks of its kind."""
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)


def keep_last(handle: Any) -> None:
    """Make a hook run after the present hooks of its kind."""
    handle.hooks_dict_ref().move_to_end(handle.id)


def has_kernel(name: str, device: torch.device) -> bool:
    """Return whether torch implements an operation for a device."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device.type.upper())
    return found


def _foreach_types() -> Iterator[list[type]]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_foreach_supported_types"):
            yield module._foreach_supported_types


def is_inside_functional_call() -> bool:
    """Return whether torch.func.functional_call has replaced a module's tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            return True
        frame = frame.f_back
    return False


def is_called_by_checkpoint() -> bool:
    """Return whether activation checkpointing packs or unpacks a tensor; call this only in a saved-tensor hook.

    For a recomputed module, only the inputs bypass checkpointing's own hooks.
    """
    frame = sys._getframe(2)
    if _is_of(frame, "torch/autograd/function.py"):
        # Up to torch 2.12, checkpointing saves inputs in an autograd node, whose `apply` is Python.
        frame = frame.f_back or frame
    return _is_of(frame, "torch/utils/checkpoint.py")


def captured_by_checkpoint() -> list[Tensor]:
    """Return the tensors, except parameters, that activation checkpointing keeps besides its positional inputs.

    Call this where `is_called_by_checkpoint` is called. The tensors are in keyword arguments, in arguments bound by
    `functools.partial`, and in the closure of a function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _CHECKPOINT:
        frame = frame.f_back
    if frame is None:
        return []
    own = frame.f_locals
    inputs = {storage_of(local_of(one)) for one in find(own["args"], Tensor)}
    tensors = find([own["kwargs"], *_bound_to(own["fn"])], Tensor)
    return [
        one for one in tensors if not isinstance(one, torch.nn.Parameter) and storage_of(local_of(one)) not in inputs
    ]


_CHECKPOINT: Final = "_checkpoint_without_reentrant_generator"


def _bound_to(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.args, function.keywords, *_bound_to(function.func)]
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]


def _is_of(frame: FrameType, path: str) -> bool:
    return frame.f_code.co_filename.replace("\\", "/").endswith(path)


@final
class Call:
    """The running call of a hook's module; torch does not call later hooks if a KeyboardInterrupt ends the module.

    Args:
        hooks: the name of the Python module of the hook; if it is not on the stack, the thread represents the call.
    """

    __slots__ = ("_frame", "_thread")

    def __init__(self, hooks: str) -> None:
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") != hooks and frame.f_back is not None:
            frame = frame.f_back
        # Dynamo wraps each function that it must not compile.
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((hooks, "torch._dynamo.")):
            frame = frame.f_back
        self._frame, self._thread = frame, threading.get_ident()

    def is_running(self) -> bool:
        """Return whether the call is still running; any thread may ask, such as that of a backward on a GPU."""
        is_here = threading.get_ident() == self._thread
        frame = sys._getframe(1) if is_here else sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def innermost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pair of saved-tensor hooks that autograd runs here."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_inside_transform() -> bool:
    """Return whether a transform of torch.func, such as vmap, runs on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_inside_reentrant_checkpoint() -> bool:
    """Return whether a reentrant checkpoint is recomputing: its backward function is then on this thread's stack."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return _is_of(frame, "torch/utils/checkpoint.py")
    return False


def raw_stream(index: int) -> int:
    """Return the address of a CUDA device's current stream, without creating an object; not in torch for CPUs."""
    found: int = torch._C._cuda_getCurrentRawStream(index)
    return found


def uses_cuda_graphs(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled to CUDA graphs, by `module.compile(...)` or `torch.compile`."""
    for one in (module, module.__dict__.get("_compiled_call_impl")):
        tell = getattr(one, "__dict__", {}).get("get_compiler_config")
        if tell is not None and _has_cuda_graphs(tell()):
            return True
    return False


def is_called_by_cuda_graphs() -> bool:
    """Return whether a function compiled to CUDA graphs called the running function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _COMPILED and _is_of(frame, "torch/_dynamo/eval_frame.py"):
            compiled: Any = frame.f_locals.get("self")
            if _has_cuda_graphs(getattr(compiled, "compiler_config", None)):
                return True
        frame = frame.f_back
    return False


_COMPILED: Final = frozenset(["compile_wrapper", "_fn"])
"""The function around compiled code, in torch 2.13 and before."""


def _has_cuda_graphs(config: Any) -> bool:
    return bool(config) and bool(config.get("triton.cudagraphs"))


# -- tests ------------------------------------------------------------------------------------------------------------


@functools.cache
def check_torch() -> None:
    """Test once per process that torch's private names behave as the engine expects.

    Raises:
        RuntimeError: a name is missing or behaves differently; the error states the name and what was seen.
    """
    _run_apart(_TESTS)


@functools.cache
def check_tracing() -> None:
    """Test once per process that torch's private names behave as a memory trace expects.

    Raises:
        RuntimeError: a name is missing or behaves differently.
    """
    _run_apart((("the number of the running node, or torch's fake tensors", _tests_tracing),))


Test = Callable[[], tuple[Any, Any]]
"""Returns what it saw, and what was expected."""


def _run_apart(tests: Iterable[tuple[str, Test]]) -> None:
    """Run tests in a new thread, where no mode, hook or context of the caller is active, such as a default device.

    torch's default dtype is that of the process: tests name dtypes.
    """

    def run() -> None:
        for name, test in tests:
            try:
                seen, expected = test()
            except Exception as error:
                raise _changed(name, f"raises {type(error).__name__}: {error}") from error
            if seen != expected:
                raise _changed(name, f"gives {seen!r}, expected {expected!r}")

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def check_dtensor(tensor: Tensor) -> None:
    """Test that `local_of` finds a DTensor's local tensor.

    Raises:
        RuntimeError: the attribute changed in this torch.
    """
    local = getattr(tensor, "_local_tensor", None)
    if not isinstance(local, Tensor) or storage_of(local) != storage_of(tensor.to_local()):  # type: ignore[attr-defined]
        raise _changed("DTensor._local_tensor", f"is {type(local).__name__}")


def _changed(name: str, what: str) -> RuntimeError:
    """Return the error for a name; `what` describes its behaviour."""
    return RuntimeError(
        f"torch {torch.__version__} changed a private name: {name} is missing or behaves differently (a test {what}). "
        "Install a release of zeroshard that supports this torch, or an earlier torch."
    )


_NOTHING: Final = nullcontext()


def profiled(kind: str, unit: str) -> AbstractContextManager[Any]:
    """Return a range of torch's profiler named "zeroshard::kind unit"; an empty context without a profiler."""
    return torch.profiler.record_function(f"zeroshard::{kind} {unit or '(root)'}") if is_profiling() else _NOTHING


def _ones(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.ones(*shape, dtype=torch.float32, requires_grad=requires_grad)


def _zeros(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float32, requires_grad=requires_grad)


def _tensor(values: Any, requires_grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=requires_grad)


def _arange(end: float, requires_grad: bool = False) -> Tensor:
    return torch.arange(end, dtype=torch.float32, requires_grad=requires_grad)


def _tests_functional_call() -> tuple[Any, Any]:
    """A module can detect a call with replaced tensors."""
    module, seen = torch.nn.Identity(), [is_inside_functional_call()]
    module.register_forward_pre_hook(lambda *_: seen.append(is_inside_functional_call()))
    torch.func.functional_call(module, {}, (_ones(1),))
    return seen, [False, True]


def _tests_profiler() -> tuple[Any, Any]:
    """`is_profiling` returns whether a profiler runs."""
    return type(is_profiling()), bool


def _tests_autograd() -> tuple[Any, Any]:
    """A backward has a number, knows its nodes, and runs callbacks at its end; the slot is autograd's own."""
    seen: list[Any] = [graph_task()]
    weight, other = _ones(2, requires_grad=True), _ones(2, requires_grad=True)

    def look(grad: Tensor) -> None:
        call_after_backward(lambda: seen.append("end"))
        seen.extend([graph_task() >= 0, will_run(accumulator_of(weight)), will_run(accumulator_of(other))])

    product = weight * 2.0
    product.register_hook(look)
    product.sum().backward()
    grad = slot_grad(weight)
    set_slot(weight, None)
    seen += [grad is not None, weight.grad is None]
    return seen, [-1, True, True, False, "end", True, True]


def _tests_reentrant_checkpoint() -> tuple[Any, Any]:
    seen = [is_inside_reentrant_checkpoint()]
    x = _ones(2, requires_grad=True)

    def run(y: Tensor) -> Tensor:
        product = y * 2.0
        if product.requires_grad:  # the first time it does not
            product.register_hook(lambda grad: seen.append(is_inside_reentrant_checkpoint()))
        return product

    checkpoint(run, x, use_reentrant=True).sum().backward()
    return seen, [False, True]


def _tests_transforms() -> tuple[Any, Any]:
    seen = [is_inside_transform()]

    def look(x: Tensor) -> Tensor:
        seen.append(is_inside_transform())
        return x

    torch.vmap(look)(_ones(2))
    return [*seen, is_inside_transform()], [False, True, False]


class _Below(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        with versions_below_autograd():
            self.alias = made.detach()
        return made


def _tests_selective() -> tuple[Any, Any]:
    """Below autograd an alias shares the version counter; a backward reports whether it keeps its graph."""
    x, seen = _ones(2, requires_grad=True), []
    with (below := _Below()):  # type: ignore[no-untyped-call]
        made = x * 2.0
    made.add_(1.0)
    y = x * 3.0
    y.register_hook(lambda grad: seen.append(keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return [*seen, version_of(below.alias), version_of(made)], [True, False, 1, 1]


def _tests_inputs_of_checkpoint() -> tuple[Any, Any]:
    seen: list[bool] = []
    captured: list[list[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(is_called_by_checkpoint())
        captured.append(captured_by_checkpoint())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        seen.append(is_called_by_checkpoint())
        return tensor

    x = _ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        # A closure, a bound argument, and a keyword argument.
        bound, other, x_2 = _ones(2), _ones(2), x.detach() * 2.0
        run = functools.partial(lambda y, factor, other: y * factor * other * x_2, factor=bound)
        product = checkpoint(run, x * x, other=other, use_reentrant=False) * x
        found = innermost_hooks()
    product.sum().backward()
    # Two factors each time, and one input in between.
    expected = [False, False, True, False, False]
    names = {id(other): "other", id(bound): "bound", id(x_2): "x_2"}
    named = [[names.get(id(one), "?") for one in some] for some in captured]
    has_hooks = found == (pack, unpack), innermost_hooks() is None
    return (seen, named, has_hooks), (2 * expected, [[], [], ["other", "bound", "x_2"], [], []], (True, True))


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


def _tests_scaler() -> tuple[Any, Any]:
    _Seen.names = []
    weight = torch.nn.Parameter(_ones(2))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0), torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum()).backward()
    weight.grad = _ones(2).as_subclass(_Seen)
    scaler.unscale_(optimizer)
    return [name for name in _Seen.names if name == SCALER_CHECK][:1] or _Seen.names, [SCALER_CHECK]


def _tests_storage() -> tuple[Any, Any]:
    tensor, other = _ones(2), _ones(2)
    view = tensor[1:]
    kept, gone = WeakStorage(tensor.untyped_storage()), WeakStorage(_ones(2).untyped_storage())
    is_same = storage_of(tensor) == storage_of(view), storage_of(tensor) == storage_of(other)
    users = users_of_storage(tensor), users_of_storage(other)
    return (kept.expired(), gone.expired(), is_same, users), (False, True, (True, False), (2, 1))


def _tests_version() -> tuple[Any, Any]:
    tensor = _ones(2)
    before = version_of(tensor)
    tensor.add_(1.0)
    return (version_of(tensor) - before, version_of(tensor.detach()) - before), (1, 1)


def _tests_wrapper() -> tuple[Any, Any]:
    made = without_storage(_Hollow, torch.Size((2, 3)), (3, 1), torch.float32, torch.device("cpu"))
    try:
        with NoSubclasses():
            made.data_ptr()
    except RuntimeError:
        return tuple(made.shape), (2, 3)
    return "an address of memory", "an error"


def _tests_foreach() -> tuple[Any, Any]:
    norms = foreach_norm([_tensor([3.0, 4.0])], 2.0, dtype=torch.float32)
    return (float(norms[0]), all(torch.Tensor in types for types in _foreach_types())), (5.0, True)


def _tests_optimizers() -> tuple[Any, Any]:
    """Muon turns a multiple of a rotation into a rotation; the root mean square of Adafactor's update is 1."""
    turn, grad = _tensor([[0.0, 1.0], [-1.0, 0.0]]), _ones(2)
    matrix, moved = _zeros(2, 2), _zeros(2)
    rest: dict[str, Any] = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    flags: dict[str, Any] = {"nesterov": False, "adjust_lr_fn": None, "has_complex": False}
    muon_step([matrix], [3 * turn], [_zeros(2, 2)], lr=1.0, weight_decay=0.0, momentum=0.0, **rest, **flags)
    settings: dict[str, Any] = {"d": 1.0, "lr": 0.5, "beta2_decay": -0.8, "weight_decay": 0.0, "maximize": False}
    state = [None], [None], [_zeros(2)], [_tensor(0.0)]
    adafactor_step([moved], [3 * grad], *state, eps1=None, eps2=1.0, **settings)
    is_right = bool((matrix + turn).abs().max() < 0.4), torch.allclose(moved, -0.5 * grad)
    return (is_right, matrix.tolist(), moved.tolist()), ((True, True), matrix.tolist(), moved.tolist())


def _tests_distributed() -> tuple[Any, Any]:
    if not dist.is_available():
        return (), ()
    store = dist.HashStore()
    own_client_of(store).set("key", "value")
    return (store.get("key"), premultiplied_sum(0.5) == dist.ReduceOp.PREMUL_SUM), (b"value", True)


def _tests_steps() -> tuple[Any, Any]:
    weight, calls = torch.nn.Parameter(_ones(2)), list[str]()

    def update(*_: Any) -> None:
        calls.append("last")
        body_of(optimizer)()

    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = _ones(2)
    last = optimizer.register_step_pre_hook(update)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    first = optimizer.register_step_post_hook(lambda *_: calls.append("first"))
    keep_last(last)
    keep_first(first)
    optimizer.step()
    return (calls, weight.tolist()), (["pre", "last", "first", "post"], [-1.0, -1.0])


def _tests_kernels() -> tuple[Any, Any]:
    cpu = torch.device("cpu")
    return (has_kernel("_fused_adamw_", cpu), has_kernel("_cudnn_init_dropout_state", cpu)), (True, False)


def _tests_tracing() -> tuple[Any, Any]:
    """Fake tensors have no memory; modes see operations of a backward, with the number of their node."""
    seen: list[tuple[str, int | None]] = []

    class _Listener(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            seen.append((str(func), running_node_number()))
            return func(*args, **(kwargs or {}))

    with fake_tensors(), _Listener():  # type: ignore[no-untyped-call]
        weight = _ones(2**60, requires_grad=True)
        first = next_node_number()
        weight.exp().sum().backward()
    expected = [("aten.exp.default", None), ("aten.mul.Tensor", first)]
    return [one for one in expected if one in seen] or seen, expected


def _tests_nodes() -> tuple[Any, Any]:
    """Nodes expose packed values, the nodes of their inputs, and settings; kernels read the expected tensors."""
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        packed.append((tensor.detach(),))
        return packed[-1]

    x, weight = _tensor([[-1.0, 2.0]], requires_grad=True), _ones(2, 1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one[0]):
        product = torch.relu(x).square() @ weight
    square = edge_of(product.grad_fn, 0)
    relu = edge_of(square, 0)
    nodes: list[Any] = [product.grad_fn, square, relu]
    names = [node.name() for node in nodes]
    places = [sorted(name for name, _ in saved_by(node)) for node in nodes]
    boxes = [one for node in nodes for _, one in saved_by(node)]
    visits = [note_visit(edge_of(product.grad_fn, 0), "test"), note_visit(square, "test")]
    has_all = sorted(map(id, boxes)) == sorted(map(id, packed))
    return (names, places, has_all, setting_of(square, "exponent"), edge_of(relu, 7), visits), (
        ["MmBackward0", "PowBackward0", "ReluBackward0"],
        [["mat2", "self"], ["self"], ["result"]],
        True,
        2,
        None,
        [True, False],
    )


def _tests_pool() -> tuple[Any, Any]:
    """The gradient of a max pool follows from indices and the shape of its input."""
    x = _arange(16.0).view(1, 1, 4, 4)
    _, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    run = torch.ops.aten.max_pool2d_with_indices_backward
    grads = [run(x[..., ::2, ::2], one, [2, 2], [2, 2], [0, 0], [1, 1], False, indices) for one in (x, x * math.nan)]
    pooled: Any = torch.nn.functional.max_pool2d(x.clone().requires_grad_(), 2, 2).grad_fn
    settings = [tuple(setting_of(pooled, name)) for name in ("kernel_size", "stride", "padding", "dilation")]
    return (torch.equal(*grads), settings), (True, [(2, 2), (2, 2), (0, 0), (1, 1)])


_TESTS: Final = (
    ("the number, the nodes or the callbacks of a backward pass", _tests_autograd),
    ("the test for a running profiler", _tests_profiler),
    ("the place of functional_call on the stack", _tests_functional_call),
    ("torch.utils.checkpoint with use_reentrant=True", _tests_reentrant_checkpoint),
    ("the saving of inputs by torch.utils.checkpoint", _tests_inputs_of_checkpoint),
    ("the stack of transforms of torch.func", _tests_transforms),
    ("aliases below autograd, or the test for a backward that keeps its graph", _tests_selective),
    (f"torch.amp.GradScaler's use of {SCALER_CHECK}", _tests_scaler),
    ("torch._C._storage_Use_Count, or the identity of a storage", _tests_storage),
    ("Tensor._version", _tests_version),
    ("the saved values of autograd nodes (_raw_saved_*, next_functions, metadata)", _tests_nodes),
    ("the inputs of the backward of torch.nn.functional.max_pool2d", _tests_pool),
    ("Tensor._make_wrapper_subclass", _tests_wrapper),
    ("torch._foreach_norm, or the types that functions on lists accept", _tests_foreach),
    ("the update functions of torch.optim.Muon or torch.optim.Adafactor", _tests_optimizers),
    ("Store.clone, or torch.distributed._make_nccl_premul_sum", _tests_distributed),
    ("the test for operations of a device", _tests_kernels),
    ("the wrapper of torch.optim.Optimizer around `step`, or its hooks", _tests_steps),
)
