"""Tests of torch's private names: `torch_private.py` relies on the behavior that these expect.

Owns the tests and their error. It must not know parameters, passes or transports. If a release of torch changes a
private name, the first `shard()` of a process raises with that name, before any change. Names that only a memory trace
uses are tested by the first trace.

Note: effects of a change in torch
    Most changes raise errors at once. Three would be silent, so their effect is tested: the function by which
    GradScaler checks gradients (ranks would skip different steps), the place of a reentrant checkpoint on the stack
    (gradients would be reduced several times), and the local tensor of a DTensor (a released parameter would be
    read). What concerns torch.compile is tested only by the test suite, since torch's compiler takes
    seconds to import: graphs that cannot be replayed, and equal random numbers, would not be rejected.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from zeroshard.torch_groups import own_client_of, premultiplied_sum
from zeroshard.torch_private import (
    SCALER_CHECK,
    DispatchMode,
    NoSubclasses,
    WeakStorage,
    accumulator_of,
    adafactor_step,
    body_of,
    call_after_backward,
    captured_by_checkpoint,
    changed,
    edge_of,
    fake_tensors,
    foreach_norm,
    foreach_types,
    graph_task,
    has_kernel,
    innermost_hooks,
    is_called_by_checkpoint,
    is_fake,
    is_inside_functional_call,
    is_inside_reentrant_checkpoint,
    is_inside_transform,
    is_profiling,
    keep_first,
    keep_last,
    keeps_graph,
    muon_step,
    next_node_number,
    note_visit,
    parts_of_groups,
    running_node_number,
    saved_by,
    set_slot,
    setting_of,
    slot_grad,
    storage_of,
    users_of_storage,
    version_of,
    versions_below_autograd,
    will_run,
    without_storage,
)

__all__ = ["check_dtensor", "check_torch", "check_tracing"]

Tensor = torch.Tensor


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
                raise changed(name, f"raises {type(error).__name__}: {error}") from error
            if seen != expected:
                raise changed(name, f"gives {seen!r}, expected {expected!r}")

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def check_dtensor(tensor: Tensor) -> None:
    """Test that `local_of` finds a DTensor's local tensor.

    Raises:
        RuntimeError: the attribute changed in this torch.
    """
    local = getattr(tensor, "_local_tensor", None)
    if not isinstance(local, Tensor) or storage_of(local) != storage_of(tensor.to_local()):  # type: ignore[attr-defined]
        raise changed("DTensor._local_tensor", f"is {type(local).__name__}")
    _check_strided()


@functools.cache
def _check_strided() -> None:
    """Test that a rank has a block of each group."""
    if (seen := [one.tolist() for one in parts_of_groups(_arange(8), 0, 2, 2)]) != [[0, 1, 4, 5], [2, 3, 6, 7]]:
        raise changed("_StridedShard", f"splits 8 numbers into {seen}")


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
        # Up to torch 2.12, an empty tensor is saved beside the inputs.
        if tensor.numel():
            seen.append(is_called_by_checkpoint())
            captured.append(captured_by_checkpoint())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        if tensor.numel():
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
    return (float(norms[0]), all(torch.Tensor in types for types in foreach_types())), (5.0, True)


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


def _tests_groups() -> tuple[Any, Any]:
    if not dist.is_available():
        return (), ()
    c10d = dist.distributed_c10d
    made = [*inspect.signature(c10d._new_process_group_helper).parameters]
    first = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]
    expected = first, True, ["tag", "ranks"], True, True
    named = {"timeout", "pg_tag", "device_id"} <= {*made}
    sought = [*inspect.signature(c10d._find_pg_by_ranks_and_tag).parameters]
    return (made[:6], named, sought, hasattr(c10d._world, "pg_group_ranks"), hasattr(c10d._world, "pg_map")), expected


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
        seen.append(("is_fake", int(is_fake(weight.detach()) and not is_fake(None))))
    expected = [("aten.exp.default", None), ("aten.mul.Tensor", first), ("is_fake", 1)]
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
    ("how torch.distributed makes and finds process groups", _tests_groups),
    ("the test for operations of a device", _tests_kernels),
    ("the wrapper of torch.optim.Optimizer around `step`, or its hooks", _tests_steps),
)
