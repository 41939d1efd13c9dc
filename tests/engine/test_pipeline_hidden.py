"""Ways of values that a pipe does not see: models that use them are refused by name, on all ranks, instead of trained.

Each case was trained silently, on other losses or gradients than those of one process.
"""

import functools
import random
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.oracle import run_cases
from zeroshard.parallel.drawn import Drawn, drawn
from zeroshard.testing import run_ranks

Forward = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """A block that can also count, note and change, as a case asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor, beside: Any = None) -> Any:
        y = x + torch.tanh(self.layer(x))
        if isinstance(beside, list):
            beside.append(y.square().mean())
        elif isinstance(beside, Tensor):
            beside.add_(y.detach().mean())
        elif beside == "number":
            return y, float(y.detach().mean())
        elif beside == "buffer":
            self.last = y.detach().mean(0)
        elif beside == "attribute":
            self.kept = y.square().mean()
        return y


class Model(nn.Module):
    """A stem, blocks and a head, called as `way` does."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.way = way
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.skips, self.forwards, self.largest = False, 0, 0.0

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return self.way(self, (x, skip)) if self.way is with_a_flag else self.way(self, x)


def plain(m: Model, x: Tensor) -> Tensor:
    h = m.stem(x)
    for block in m.blocks:
        h = block(h)
    return m.head(h)


def with_a_flag(m: Model, given: Any) -> Tensor:
    x, skip = given
    first = h = m.stem(x)
    for block in m.blocks:
        h = block(h)
    return m.head(h + first if skip or m.skips else h)


def checkpointed(m: Model, x: Tensor) -> Tensor:
    h = m.stem(x)
    for block in m.blocks:
        h = checkpoint(block, h, use_reentrant=False)
    return m.head(h)


def beside(make: Callable[[Tensor], Any], use: Callable[[Any, Any, Tensor], Tensor]) -> Forward:
    """Return a forward that passes something beside to each block, and uses that at the end."""

    def way(m: Model, x: Tensor) -> Tensor:
        told = make(x)
        h = m.stem(x)
        for block in m.blocks:
            found = block(h, told)
            h = found[0] if isinstance(found, tuple) else found
        return use(m, told, m.head(h))

    return way


def reads(read: Callable[[Tensor], float]) -> Forward:
    """Return a forward that reads the value of the stem between blocks."""

    def way(m: Model, x: Tensor) -> Tensor:
        h = m.stem(x)
        scale = read(h.detach().abs().mean())
        for block in m.blocks:
            h = block(h) * scale
        return m.head(h)

    return way


def writes_through_a_view(m: Model, x: Tensor) -> Tensor:
    kept = x.new_zeros(2, *x.shape)
    kept[0].copy_(h := m.stem(x))
    for block in m.blocks:
        h = block(h)
    return m.head(h) + kept.sum(0)


def counts(m: Model, x: Tensor) -> Tensor:
    y = plain(m, x)
    m.count += 1
    return y


def counts_forwards(m: Model, x: Tensor) -> Tensor:
    m.forwards += 1
    return plain(m, x) / m.forwards


def follows_inputs(m: Model, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.mean()
    return plain(m, x - m.mean)


def draws(m: Model, x: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    h = m.stem(x + noise)
    for block in m.blocks:
        h = block(h)
    return m.head(h) - noise


def draws_a_number(m: Model, x: Tensor) -> Tensor:
    factor = 1 + 2 * torch.rand(()).item()
    return plain(m, x * factor) / factor


def draws_by_python(m: Model, x: Tensor) -> Tensor:
    factor = 1 + random.random()
    return plain(m, x * factor) / factor


def in_place(m: Model, x: Tensor) -> Tensor:
    m.largest = float(x.max())  # the same after each chunk
    factor = 1 + torch.rand(()).item()  # for the first chunk alone
    h = m.stem(x.div_(2) * factor / factor)
    h += 1
    for block in m.blocks:
        if torch.rand(()).item() >= 0:  # layers that are dropped at random, of which none is
            h = block(h)
    return m.head(h)


def pipe_of(way: Forward, loss: Any = F.mse_loss, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    model = Model(way).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipe", "shard"))
    settings = zs.Settings(watchdog_s=20.0)
    pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=2, loss=loss, settings=settings, **options)
    return pipe, model, optimizer


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(8, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    return x, y


def stepped(way: Forward, **options: Any) -> str:
    pipe_of(way, **options)[0].step(*batch())
    return ""


def with_a_later_flag() -> str:
    pipe, _, optimizer = pipe_of(with_a_flag)
    x, y = batch()
    pipe.step({"x": x, "skip": False}, y)
    optimizer.zero_grad()
    pipe.step({"x": x, "skip": True}, y)
    return ""


def with_a_later_attribute() -> str:
    pipe, model, optimizer = pipe_of(with_a_flag)
    pipe.step(*batch())
    optimizer.zero_grad()
    model.skips = True
    pipe.step(*batch())
    return ""


def warned(way: Forward) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stepped(way)
    return " ".join(str(one.message) for one in told)


def with_a_detached_loss() -> str:
    return stepped(plain, loss=lambda output, target: F.mse_loss(output.detach(), target))


def with_parameters_of_a_loss() -> str:
    torch.manual_seed(7)
    model, weight = Model(plain).double(), nn.Parameter(torch.ones(8, dtype=torch.float64))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipe", "shard"))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    zs.pipeline(model, optimizer, mesh=mesh, micro_batches=2)
    return ""


def clipped_by_module() -> str:
    pipe, model, _ = pipe_of(plain)
    pipe.step(*batch())
    for part in (model.stem, model.head):
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    return ""


def clipped_by_group() -> str:
    pipe, model, _ = pipe_of(plain)
    pipe.step(*batch())
    torch.nn.utils.clip_grad_norm_([p for name, p in model.named_parameters() if "weight" in name], 1.0)
    return ""


def with_a_hook_of_the_whole() -> str:
    pipe, model, _ = pipe_of(plain)
    model.register_forward_hook(lambda module, args, output: output)
    pipe.step(*batch())
    return ""


def with_an_input_that_is_trained() -> str:
    x, y = batch()
    pipe_of(plain)[0].step(x.requires_grad_(), y)
    return ""


def without_gradients() -> str:
    pipe = pipe_of(plain)[0]
    with torch.no_grad():
        pipe.step(*batch())
    return ""


def compiled_whole() -> str:
    torch.manual_seed(7)
    model = Model(plain)
    model.compile()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipe", "shard"))
    zs.pipeline(model, mesh=mesh, micro_batches=2)
    return ""


def interleaved_on_one_place() -> str:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pipe", "shard"))
    zs.pipeline(Model(plain), mesh=mesh, micro_batches=2, schedule="interleaved")
    return ""


def outputs_of_other_kinds() -> str:
    pipe_of(plain)[0].forward(batch()[0], take=lambda output: output.reshape(-1, *[1] * 7, 8))
    return ""


REFUSED: MappingProxyType[str, tuple[Callable[[], str], str]] = MappingProxyType(
    {
        "a flag that changes": (with_a_later_flag, "'head' needs a value of 'stem'"),
        "an attribute that changes": (with_a_later_attribute, "'head' needs a value of 'stem'"),
        "torch.utils.checkpoint": (functools.partial(stepped, checkpointed), "Write activations='recompute'"),
        "a list": (
            functools.partial(stepped, beside(lambda x: [], lambda m, told, y: y + sum(told))),
            "'blocks.0' changes an argument in place",
        ),
        "an argument": (
            functools.partial(stepped, beside(lambda x: x.new_zeros(()), lambda m, told, y: y * told)),
            "'blocks.0' changes an argument in place",
        ),
        "a buffer of a part": (
            functools.partial(stepped, beside(lambda x: "buffer", lambda m, told, y: y + m.blocks[0].last)),
            "needs a value of 'blocks.0'",
        ),
        "an attribute of a part": (
            functools.partial(warned, beside(lambda x: "attribute", lambda m, told, y: y)),
            "Module 'blocks.0' keeps a value of its forward as 'kept'",
        ),
        "a number": (
            functools.partial(stepped, beside(lambda x: "number", lambda m, told, y: y)),
            "beside its tensors, and returned",
        ),
        "item()": (functools.partial(stepped, reads(lambda t: t.item())), "reads a value of 'stem' (item)"),
        "float()": (functools.partial(stepped, reads(float)), "reads a value of 'stem' (__float__)"),
        "if": (
            functools.partial(stepped, reads(lambda t: 2.0 if t > 0 else 1.0)),
            "reads a value of 'stem' (__bool__)",
        ),
        "numpy": (functools.partial(stepped, reads(lambda t: t.numpy()[()])), "reads a value of 'stem' (numpy)"),
        "a view": (functools.partial(stepped, writes_through_a_view), "needs a value of 'stem'"),
        "a counter": (functools.partial(stepped, counts), "changes the buffer 'count'"),
        "a count of forwards": (
            functools.partial(stepped, counts_forwards, schedule="interleaved"),
            "changes 'forwards' of a module without parameters each time",
        ),
        "a running mean": (
            functools.partial(stepped, follows_inputs, schedule="interleaved"),
            "changes 'mean' of a module without parameters each time",
        ),
        "noise": (functools.partial(stepped, draws), "needs random numbers that the code between modules draws"),
        "a drawn number": (
            functools.partial(stepped, draws_a_number),
            "needs random numbers that the code between modules draws (rand)",
        ),
        "a number that Python draws": (
            functools.partial(warned, draws_by_python),
            "The code between modules draws random numbers by Python or NumPy",
        ),
        "a loss without a graph": (with_a_detached_loss, "the loss has no graph"),
        "parameters of a loss": (
            with_parameters_of_a_loss,
            "has a parameter of shape (8,) that the model does not have",
        ),
        "clipping by module": (clipped_by_module, "Clip all parameters together"),
        "clipping by group": (clipped_by_group, "Clip all parameters together"),
        "no_grad": (without_gradients, "gradients are off here"),
        "a hook of the whole": (with_a_hook_of_the_whole, "hook of Model as a whole would run at each chunk"),
        "a trained input": (with_an_input_that_is_trained, "An input of a pipe's step requires a gradient"),
        "a compiled model": (compiled_whole, "is compiled as a whole"),
        "interleaved on one place": (interleaved_on_one_place, "needs at least 2 places"),
        "nine dimensions": (outputs_of_other_kinds, "at most 8 dimensions"),
    }
)


def each() -> dict[str, str]:
    """Return what came of each case on this rank."""
    found = {}
    for name, (act, _) in REFUSED.items():
        try:
            found[name] = act()
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def test_what_a_pipe_does_not_see_is_refused_on_all_ranks() -> None:
    by_rank = run_ranks(each, 2, timeout_s=200.0)
    for name, (_, text) in REFUSED.items():
        told = [found[name] for found in by_rank]
        assert any(text in one for one in told), (name, told)
        # The warning is that of the rank that has the module; all others are errors everywhere.
        assert all(told), (name, told)


def test_drawn_numbers_are_known_through_arithmetic() -> None:
    half, three = drawn(0.5, "rand"), drawn(3, "randint")
    found = [1 + half, half + 1, 2 * half - 1, 1 / half, half**2, -half, three // 2, 7 % three, half * three]
    assert found == [1.5, 1.5, 0.0, 2.0, 0.25, -0.5, 1, 1, 1.5]
    assert all(isinstance(one, Drawn) for one in found)
    assert torch.equal(half * torch.ones(2) * three, torch.full((2,), 1.5))
    assert drawn(True, "rand") is True  # a decision


def both(**options: Any) -> Any:
    """Train where an input and a value are changed in place, evaluate in other modes; return losses and the batch."""
    pipe, _, optimizer = pipe_of(in_place, **options)
    x, y = batch()
    losses = [pipe.step(x, y).item()]
    optimizer.zero_grad()
    with torch.inference_mode():
        losses.append(pipe.evaluate(x, y).item())
    losses.append(pipe.step(x, y).item())
    return losses, torch.equal(x, batch()[0])


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved"}, {"recompute": True}])
def test_what_a_pipe_sees_trains(options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    x, y = batch()
    expected = F.mse_loss(Model(in_place).double()(x), y).item()
    for losses, is_unchanged in run_ranks(functools.partial(both, **options), 2, timeout_s=90.0):
        assert losses == pytest.approx([expected] * 3, rel=1e-12) and is_unchanged


def uneven() -> float:
    pipe = pipe_of(plain, stage=3)[0]
    x, y = batch()
    rows = 7 + dist.get_rank() % 2
    return float(pipe.evaluate(x[:rows], y[:rows]).item())


def test_ranks_with_other_lengths_evaluate_in_equally_many_passes() -> None:
    torch.manual_seed(7)
    (x, y), model = batch(), Model(plain).double()
    expected = sum(F.mse_loss(model(x[:rows]), y[:rows]).item() for rows in (7, 8)) / 2
    assert run_ranks(uneven, 4, timeout_s=90.0) == pytest.approx([expected] * 4, rel=1e-12)


def split_model(p: float) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8))).double()


def split_at_the_border(is_local: bool, p: float) -> tuple[float, str]:
    """Cut a model where activations are split over their rows; return the loss and the error of a step."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor")), split_model(p)
    to_parts = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=is_local)
    plan = {"0": to_parts, "1.0": ColwiseParallel(input_layouts=Shard(0)), "1.2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    settings = zs.Settings(watchdog_s=20.0)
    pipe = zs.pipeline(model, mesh=mesh, micro_batches=2, loss=F.mse_loss, settings=settings)
    torch.manual_seed(7)
    try:
        return pipe.step(*batch()).item(), ""
    except RuntimeError as error:
        return 0.0, str(error)


def test_parts_of_activations_cross_a_border_and_dtensors_are_refused() -> None:
    (x, y), model = batch(), split_model(0.0)
    expected = F.mse_loss(model(x), y).item()
    cases = [(True, 0.0), (True, 0.5), (False, 0.0)]
    by_case = run_cases(split_at_the_border, 4, cases, timeout_s=120.0)
    for loss, error in by_case[True, 0.0]:
        assert not error and loss == pytest.approx(expected, rel=1e-12)
    for _, error in by_case[True, 0.5]:
        assert not error  # a part of a pipe is not taken for a compiled one, which may draw nothing
    for _, error in by_case[False, 0.0]:
        assert "'1' begins chunk 1, and is given a DTensor" in error
