"""torch's private names, each wrapped by a name of this module.

Owns every use of private names in the package but those of process groups (`torch_groups.py`). It must not know
parameters, passes or transports. `torch_checks.py` tests the expected behavior of each.
"""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CellType, FrameType
from typing import Any, Final, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees each operation below autograd

from zeroshard.tree import find

__all__ = [
    "BatchNorm",
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
    "base_of",
    "body_of",
    "bytes_in",
    "call_after_backward",
    "call_through",
    "captured_by_checkpoint",
    "changed",
    "count_users",
    "edge_of",
    "fake_errors",
    "fake_tensors",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_types",
    "graph_task",
    "groups_of",
    "has_compiled",
    "has_kernel",
    "has_split",
    "innermost_hooks",
    "is_called_by_checkpoint",
    "is_called_by_compiled",
    "is_called_by_cuda_graphs",
    "is_compiled",
    "is_dense",
    "is_fake",
    "is_inside_functional_call",
    "is_inside_reentrant_checkpoint",
    "is_inside_transform",
    "is_lazy",
    "is_profiling",
    "is_read_for_tracing",
    "keep_first",
    "keep_last",
    "keeps_graph",
    "local_of",
    "muon_step",
    "next_node_number",
    "nodes_before",
    "note_visit",
    "owns_memory",
    "parts_of_groups",
    "profiled",
    "raw_data",
    "raw_local",
    "raw_stream",
    "recompute_to_the_end",
    "run_backward",
    "running_node_number",
    "saved_by",
    "set_local",
    "set_slot",
    "setting_of",
    "slot_grad",
    "storage_of",
    "untraced",
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


def changed(name: str, what: str) -> RuntimeError:
    """Return the error for a name; `what` describes its behaviour."""
    return RuntimeError(
        f"torch {torch.__version__} changed a private name: {name} is missing or behaves differently (a test {what}). "
        "Install a release of zeroshard that supports this torch, or an earlier torch."
    )


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a Python function, such as a lambda, at the end of this thread's backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(untraced(call))


def untraced(function: Any) -> Any:
    """Have Dynamo skip a function that torch calls, and all that it calls; unlike torch.compiler.disable it is free."""
    frames, skip = torch._C._dynamo.eval_frame, torch._C._dynamo.eval_frame._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def accumulator_of(parameter: Tensor) -> Any:
    """Return the node that accumulates the parameter's gradient; torch creates a new node if no graph holds one."""
    # A view that DTensor makes would read, and so gather, the values of a released parameter.
    with torch.enable_grad(), NoSubclasses(), torch._C._DisableTorchDispatch():
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


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another one is a view of, or None."""
    return tensor._base


def owns_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's values fill its memory, and no other tensor shares it."""
    is_filled = tensor.untyped_storage().nbytes() == tensor.nbytes and not is_lazy(tensor)
    return is_filled and users_of_storage(tensor) == 1


def is_lazy(tensor: Tensor) -> bool:
    """Return whether torch conjugates or negates the values in memory whenever they are read."""
    return tensor.is_conj() or tensor.is_neg()


def bytes_in(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's values, flat, on its memory if they are there in order."""
    # Fewer than two elements may have another stride than 1.
    return tensor.resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill contiguous memory without gaps or overlaps; torch's test is private."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def fake_tensors() -> Any:
    """Return a context in which tensors have shapes and no memory; real inputs of their operations become fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: object) -> bool:
    """Return whether a tensor has a shape and no memory; see `fake_tensors`."""
    return hasattr(tensor, "fake_mode")


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
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor))


def has_split(types: Iterable[type]) -> bool:
    """Return whether a class of tensors is DTensor."""
    return any(hasattr(one, "_local_tensor") for one in types)


def groups_of(placement: Any) -> int:
    """Return how many groups of a dimension's indices a placement splits, each over all ranks; 0 if it splits nothing.

    `Shard` splits the whole dimension. `_StridedShard` splits each of several groups of equal size, such as the gate
    and the up projection in one weight, so that a rank has a block of each; transformers' packed styles use it.
    """
    from torch.distributed.tensor import Shard  # half a second to import

    return int(getattr(placement, "split_factor", isinstance(placement, Shard)))


def parts_of_groups(tensor: Tensor, dim: int, groups: int, ranks: int) -> Sequence[Tensor]:
    """Return the part of each rank of a tensor with the placement `_StridedShard`: its block of each group."""
    from torch.distributed.tensor.placement_types import _StridedShard

    parts, _ = _StridedShard(dim, split_factor=groups)._split_tensor(tensor, ranks, with_padding=False)
    return parts


@contextmanager
def while_inferring(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Make torch enter a context, possibly repeatedly, while it infers shapes of DTensors by running operations.

    torch infers shapes at the first use of an operation, on tensors of the whole shapes.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    if not hasattr(ShardingPropagator, "_fake_mode_lock"):
        raise changed("ShardingPropagator._fake_mode_lock of torch.distributed.tensor", "is missing")
    before, ShardingPropagator._fake_mode_lock = ShardingPropagator._fake_mode_lock, context  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before


def raw_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, also if a subclass overrides the attribute."""
    from torch.distributed.tensor import DTensor  # half a second to import

    found: Tensor = DTensor._local_tensor.__get__(tensor)  # type: ignore[attr-defined]
    return found


def set_local(tensor: Any, local: Tensor, like: Any) -> None:
    """Make `local` the local tensor of a DTensor, with the dtype and placement of the DTensor `like`."""
    tensor._local_tensor, tensor._spec = local, like._spec


def accept_in_foreach(*classes: type) -> None:
    """Make torch's functions on lists of tensors accept tensors of these classes; idempotent."""
    for types in foreach_types():
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
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device.type.upper())


def foreach_types() -> Iterator[list[type]]:
    """Yield the lists of types that functions on lists of tensors accept."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_foreach_supported_types"):
            yield module._foreach_supported_types


def is_inside_functional_call() -> bool:
    """Return whether torch.func.functional_call has replaced a module's tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
        frame = frame.f_back
    return frame is not None


def is_called_by_checkpoint() -> bool:
    """Return whether activation checkpointing packs or unpacks a tensor; call this only in a saved-tensor hook.

    For a recomputed module, only the inputs bypass checkpointing's own hooks.
    """
    frame = sys._getframe(2)
    if _is_of(frame, "torch/autograd/function.py"):
        # Up to torch 2.12, checkpointing saves inputs in an autograd node, whose `apply` is Python.
        frame = frame.f_back or frame
    return _is_of(frame, "torch/utils/checkpoint.py")


def is_read_for_tracing() -> bool:
    """Return whether torch reads `grad` to make a fake tensor like its owner; call this only below that property."""
    frame = sys._getframe(2).f_back
    if frame is not None and frame.f_code.co_name == "grad":
        frame = frame.f_back  # the property of a split parameter reads this one
    if frame is None or frame.f_code.co_name != "safe_grad":
        return False
    return _is_of(frame, "torch/_subclasses/meta_utils.py")


def captured_by_checkpoint() -> list[Tensor]:
    """Return the tensors, except parameters, that activation checkpointing keeps besides its positional inputs.

    Call this where `is_called_by_checkpoint` is called. The tensors are in keyword arguments, in arguments bound by
    `functools.partial`, and in the closure of a function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.startswith(_CHECKPOINT):
        frame = frame.f_back
    if frame is None:
        return []
    own = frame.f_locals
    inputs = {storage_of(local_of(one)) for one in find(own["args"], Tensor) if one.layout is torch.strided}
    tensors = [one for one in find([own["kwargs"], *_bound_to(own["fn"])], Tensor) if one.layout is torch.strided]
    return [
        one for one in tensors if not isinstance(one, torch.nn.Parameter) and storage_of(local_of(one)) not in inputs
    ]


_CHECKPOINT: Final = "_checkpoint_without_reentrant_generator"
"""Begins the name of the function of a checkpoint, which torch 2.14 has changed."""


def _bound_to(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.args, function.keywords, *_bound_to(function.func)]
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]


def _is_of(frame: FrameType, path: str) -> bool:
    return frame.f_code.co_filename.replace("\\", "/").endswith(path)


def innermost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pair of saved-tensor hooks that autograd runs here."""
    return cast("tuple[Any, Any] | None", torch._C._autograd._top_saved_tensors_default_hooks(True))


def recompute_to_the_end(pack: Callable[..., Any]) -> None:
    """Have torch.utils.checkpoint recompute a forward as a whole, not only as far as its last saved tensor.

    Args:
        pack: its hook around that forward, or around a recomputation of it, from `innermost_hooks`.
    """
    cells = inspect.getclosurevars(inspect.unwrap(pack)).nonlocals
    (cells["frame"] if "frame" in cells else cells["target_frame_ref"]()).early_stop = False


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
    return torch._C._cuda_getCurrentRawStream(index)


def uses_cuda_graphs(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled to CUDA graphs, by `module.compile(...)` or `torch.compile`."""
    for one in (module, module.__dict__.get("_compiled_call_impl")):
        tell = getattr(one, "__dict__", {}).get("get_compiler_config")
        if tell is not None and _has_cuda_graphs(tell()):
            return True
    return False


def is_called_by_cuda_graphs() -> bool:
    """Return whether a function compiled to CUDA graphs called the running function."""
    return any(_has_cuda_graphs(getattr(one, "compiler_config", None)) for one in _compiled_callers())


def has_compiled() -> bool:
    """Return whether this process has compiled anything."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0) > 0


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled, by `module.compile(...)` or `torch.compile`."""
    call = module.__dict__.get("_compiled_call_impl")
    return getattr(call, "args", (call,))[-1] not in (None, module._call_impl) or "_orig_mod" in module._modules


def call_through(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Have each call of a module run `call`, with what it would run, hooks included, and the arguments."""
    if not isinstance(own := module.__dict__.get("_compiled_call_impl"), functools.partial):
        module._compiled_call_impl = functools.partial(call, own or module._call_impl)


def is_called_by_compiled() -> bool:
    """Return whether a compiled function called the running function."""
    return any(type(one).__name__ == "OptimizeContext" for one in _compiled_callers())


def _compiled_callers() -> Iterator[Any]:
    """Yield torch's records of the functions that it compiles, or does not, and that called the running function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _COMPILED and _is_of(frame, "torch/_dynamo/eval_frame.py"):
            yield frame.f_locals.get("self")
        frame = frame.f_back


_COMPILED: Final = frozenset(["compile_wrapper", "_fn"])
"""The function around compiled code, in torch 2.13 and before."""


def _has_cuda_graphs(config: Any) -> bool:
    return bool(config) and bool(config.get("triton.cudagraphs"))


_NOTHING: Final = nullcontext()


def profiled(kind: str, unit: str) -> AbstractContextManager[Any]:
    """Return a range of torch's profiler named "zeroshard::kind unit"; an empty context without a profiler."""
    return torch.profiler.record_function(f"zeroshard::{kind} {unit or '(root)'}") if is_profiling() else _NOTHING
