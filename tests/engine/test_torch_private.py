"""What is private to torch is tested before it is used: a change that would be silent raises, by name."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import zeroshard as zs
from zeroshard import torch_checks


def shard() -> None:
    model = torch.nn.Linear(2, 2)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Have the tests run as in a new process."""
    torch_checks.check_torch.cache_clear()
    yield
    torch_checks.check_torch.cache_clear()


def test_this_torch_is_as_expected() -> None:
    with torch.no_grad(), torch.device("meta"):
        torch_checks.check_torch()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_is_no_change_of_torch(dtype: torch.dtype) -> None:
    torch_checks.check_tracing.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        torch_checks.check_torch()
        torch_checks.check_tracing()
    finally:
        torch.set_default_dtype(torch.float32)


def test_modes_of_the_caller_are_no_change_of_torch() -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), hooks:
        torch_checks.check_torch()


def test_a_failing_test_says_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checks, "version_of", lambda tensor: 7)
    with pytest.raises(
        RuntimeError, match=r"Tensor\._version is missing .* \(a test gives \(0, 0\), expected \(1, 1\)\)"
    ):
        torch_checks._run_apart([("Tensor._version", torch_checks._tests_version)])


def test_a_scaler_that_checks_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscale(self: Any, optimizer: Any, inverse: Any, found: Any, allow_fp16: bool) -> dict[Any, Any]:
        return {torch.device("cpu"): found}

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", unscale)
    with pytest.raises(RuntimeError, match=r"private name: .*GradScaler's use of _amp_foreach_non_finite_check"):
        shard()


def test_a_reentrant_checkpoint_that_is_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.utils.checkpoint.CheckpointFunction.backward

    def renamed(ctx: Any, *grads: Any) -> Any:
        ctx.get_input_device = None
        code = backward.__code__.replace(co_name="run_backward")
        return type(backward)(code, backward.__globals__)(ctx, *grads)

    monkeypatch.setattr(torch.utils.checkpoint.CheckpointFunction, "backward", staticmethod(renamed))
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        shard()


def test_a_local_tensor_that_is_elsewhere_is_named() -> None:
    class Moved:
        def to_local(self) -> torch.Tensor:
            return torch.ones(2)

    with pytest.raises(RuntimeError, match=r"DTensor\._local_tensor"):
        torch_checks.check_dtensor(Moved())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["will_run", "users_of_storage", "version_of", "foreach_norm", "graph_task"])
def test_a_name_that_does_something_else_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_checks, name, lambda *args, **options: 0)
    with pytest.raises(RuntimeError, match="changed a private name"):
        shard()
