"""What the engine refuses, each with an error that names the culprit and the way out."""

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, run_cases
from tools.settled import settled
from zeroshard.testing import run_ranks
from zeroshard.update import background


def shard(model: nn.Module, *optimizers: Optimizer, **options: Any) -> zs.Zero:
    """Shard with the watchdog's limit of the tests."""
    which = optimizers[0] if len(optimizers) == 1 else list(optimizers) or None
    return zs.shard(model, which, **settled({"watchdog_s": WATCHDOG_S, **options}))


def sharded(stage: int = 3) -> tuple[nn.Module, Optimizer, zs.Zero]:
    """Return a stack that has made one step."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = shard(model, optimizer, stage=stage)
    step_once(model, optimizer, 0)
    return model, optimizer, zero


def step_once(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Take one ordinary step."""
    models.stack_loss(model, step, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Trust(Optimizer):
    """An optimizer that looks at the norm of each whole parameter, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm() / (p.grad.norm() + 1e-6), alpha=group["lr"])


# ---- at shard(): each refusal is a function that raises, and what its text must hold


def not_elementwise() -> None:
    model = models.build(models.Stack)
    shard(model, Trust(model.parameters()))


def lbfgs() -> None:
    model = models.build(models.Stack)
    shard(model, torch.optim.LBFGS(model.parameters()))


def sparse_adam() -> None:
    model = models.build(models.Stack)
    shard(model, torch.optim.SparseAdam(model.parameters()))


def parameter_in_no_optimizer() -> None:
    model = models.build(models.Stack)
    shard(model, torch.optim.AdamW([p for name, p in model.named_parameters() if name != "blocks.1.up.bias"]))


def parameter_not_in_the_model() -> None:
    model = models.build(models.Stack)
    stray = nn.Parameter(torch.zeros(3, 7))
    shard(model, torch.optim.AdamW([*model.parameters(), stray]))


def parameter_in_two_optimizers() -> None:
    model = models.build(models.Stack)
    shard(model, torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.head.parameters()))


def scripted_module() -> None:
    model = models.build(models.Stack)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.head = torch.jit.script(model.head)
    shard(model, models.adamw(model))


def tensor_parallel_module() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(models.build(models.Stack), mesh, {"head": ColwiseParallel()})
    shard(model, models.adamw(model))


def sharded_twice() -> None:
    model, optimizer, _ = sharded()
    shard(model, optimizer)


def part_of_a_sharded_model() -> None:
    model, _, _ = sharded()
    outer = nn.Sequential(model)
    shard(outer)


def unknown_stage() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), stage=4)


def stage_and_residency() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), stage=2, residency=zs.Residency())


def old_cut() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), cut="column")


def unknown_reduction() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), reduction="median")


def unknown_unit_name() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), units=["Blok"])


def unit_of_another_model() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), units=[models.Block()])


def unit_of_a_wrong_kind() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), units=[3])


def unknown_forward_method(methods: Any = ("generate",)) -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), forward_methods=methods)


OPTIONS = {
    "shared_memory": ("no", "True or False"),
    "compare_inputs": ("x", "True or False"),
    "elementwise": ("x", "True, False or None"),
    "device_bytes": (-1, "a number of bytes above 0, or None"),
    "wire_bytes": (1.5, "a number of bytes above 0"),
    "buffers": ("rank 1", "'rank 0', 'own' or 'mean'"),
}


def option_of_no_value(name: str) -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), **{name: OPTIONS[name][0]})


def not_a_module() -> None:
    shard([nn.Linear(2, 2)])  # type: ignore[arg-type]


def differentiable() -> None:
    model = models.build(models.Stack)
    shard(model, torch.optim.AdamW(model.parameters(), differentiable=True))


def capturable(**options: Any) -> None:
    """Train: torch refuses it in a step, which may be one in the background, whose end each rank awaits elsewhere."""
    model = models.build(models.Stack)
    optimizer = torch.optim.NAdam(model.parameters(), capturable=True)
    with patch.object(background, "is_worthwhile", lambda device: True):
        shard(model, optimizer, **options)
    for step in range(2):
        step_once(model, optimizer, step)


def not_an_optimizer() -> None:
    model = models.build(models.Stack)
    zs.shard(model, 1e-3)  # type: ignore[arg-type]


CAPTURABLE = ["capturable=True of NAdam", "host", "Leave capturable=True out"]
AT_SHARD: dict[str, tuple[Callable[[], None], tuple[type[Exception], ...], list[str]]] = {
    "not element-wise": (
        not_elementwise,
        (ValueError, TypeError),
        ["Trust", "element", "whole_matrix", "elementwise=True"],
    ),
    "LBFGS": (lbfgs, (ValueError, TypeError), ["LBFGS"]),
    "SparseAdam": (sparse_adam, (ValueError, TypeError), ["SparseAdam"]),
    "in no optimizer": (
        parameter_in_no_optimizer,
        (ValueError,),
        [r"blocks\.1\.up\.bias", "optimizer", "requires_grad"],
    ),
    "not in the model": (parameter_not_in_the_model, (ValueError,), [r"\(3, 7\)", "not in the model|model"]),
    "in two optimizers": (parameter_in_two_optimizers, (ValueError,), [r"head\.weight", "AdamW", "SGD"]),
    "TorchScript": (scripted_module, (ValueError, TypeError), ["head", "TorchScript|torch.jit"]),
    "tensor parallel": (tensor_parallel_module, (TypeError,), [r"head\.weight", "DTensor", "parallelize_module"]),
    "sharded twice": (sharded_twice, (ValueError, RuntimeError), ["already"]),
    "part sharded": (part_of_a_sharded_model, (ValueError, RuntimeError), ["already", "0"]),
    "stage": (unknown_stage, (ValueError,), ["stage", "0.*1.*2.*3", "4"]),
    "stage and residency": (stage_and_residency, (ValueError, TypeError), ["stage", "residency"]),
    "cut": (old_cut, (TypeError,), [r"shard\(\) has no argument cut=", "cut anywhere"]),
    "reduction": (unknown_reduction, (ValueError,), ["reduction", "mean", "sum", "median"]),
    "unit name": (unknown_unit_name, (ValueError,), ["units", "Blok", "Block"]),
    "unit elsewhere": (unit_of_another_model, (ValueError,), ["units", "Block"]),
    "unit kind": (unit_of_a_wrong_kind, (TypeError,), ["units", "3"]),
    "forward method": (unknown_forward_method, (ValueError, AttributeError), ["generate"]),
    "forward methods": (
        partial(unknown_forward_method, 3),
        (TypeError,),
        [r"forward_methods=\)", "list of names", "3"],
    ),
    **{
        name: (
            partial(option_of_no_value, name),
            (ValueError,),
            [rf"Settings\({name}=\) must be {text}; got {value!r}"],
        )
        for name, (value, text) in OPTIONS.items()
    },
    "no module": (not_a_module, (TypeError,), ["Module", "list"]),
    "differentiable": (differentiable, (ValueError,), ["AdamW", "autograd", "leaves"]),
    "capturable": (partial(capturable, stage=2), (ValueError,), CAPTURABLE),
    "capturable, by messages": (partial(capturable, stage=3, shared_memory=False), (ValueError,), CAPTURABLE),
    "capturable, on the host": (partial(capturable, offload="states=1.0"), (ValueError,), CAPTURABLE),
    "capturable, a part on the host": (
        partial(capturable, offload="states=0.3", shared_memory=False),
        (ValueError,),
        CAPTURABLE,
    ),
    "no optimizer": (not_an_optimizer, (TypeError,), ["Optimizer", "float"]),
}


def caught(action: Callable[[], Any]) -> tuple[list[str], str]:
    """Run something that must raise; return the error's classes and its text."""
    try:
        action()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "nothing was raised"


def refused(action: Callable[[], Any]) -> tuple[list[str], str]:
    """Run one of several that must raise; end the group of ranks if it does not: the next would run beside it."""
    names, text = caught(action)
    assert names, f"{action}: {text}"
    return names, text


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[tuple[list[str], str]]]:
    """What each refusal by shard() comes to, by rank: one group of ranks has all, one after the other."""
    actions = [(action,) for action, *_ in AT_SHARD.values()]
    return dict(zip(AT_SHARD, run_cases(refused, 2, actions, timeout_s=2 * TIMEOUT_S).values(), strict=True))


@pytest.mark.parametrize("what", AT_SHARD)
def test_refused_by_shard(what: str, refusals: dict[str, list[tuple[list[str], str]]]) -> None:
    _, kinds, words = AT_SHARD[what]
    for names, text in refusals[what]:
        assert any(kind.__name__ in names for kind in kinds), f"{names[:1]}: {text}"
        assert_words(text, words)


def assert_words(text: str, words: list[str]) -> None:
    """Require that a text matches each of some patterns."""
    missing = [word for word in words if not re.search(word, text, re.DOTALL)]
    assert not missing, f"the text lacks {missing}: {text}"


def shard_then_go_on() -> float:
    """After a refusal the model is as it was: plain training goes on."""
    model = models.build(models.Stack)
    with pytest.raises((ValueError, TypeError)):
        shard(model, Trust(model.parameters()))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    optimizer = models.adamw(model)
    zero = shard(model, optimizer)
    step_once(model, optimizer, 0)
    with zero.gathered():
        return float(sum(p.detach().double().sum() for p in model.parameters()))


class Apart(nn.Module):
    """Two layers, of which the second has memory of the first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if kind == "transposed":
            self.second.weight = nn.Parameter(self.first.weight.t())
        elif kind == "data":
            self.second.weight.data = self.first.weight.data
        elif kind == "slices":
            whole = torch.randn(6, 4)
            self.first.weight, self.second.weight = nn.Parameter(whole[:4]), nn.Parameter(whole[2:])
        elif kind == "buffer":
            self.second.register_buffer("row", self.first.weight.detach()[1])
        elif kind == "column":
            self.second.register_buffer("row", self.first.weight.detach()[:, 1])
        elif kind == "attribute":
            self.second.row = self.first.weight.detach()[1]
        elif kind == "attribute's column":
            self.second.row = self.first.weight.detach()[:, 1]
        elif kind == "list":
            self.second.rows = {"of the first": [None, (self.first.weight.data,)]}
        elif kind == "no view":
            held, row = [self.first.weight], self.first.weight.detach()[1].clone()
            held.append(held)
            self.second.held, self.second.rows = held, (row, row[:2], torch.nested.nested_tensor([row, row[:2]]))
        elif kind == "side by side":
            whole = torch.randn(8, 4)
            self.first.weight, self.second.weight = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
        elif kind == "frozen":
            self.second.weight = nn.Parameter(self.first.weight.t(), requires_grad=False)
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", ["transposed", "data", "slices", "buffer", "column"])
def test_tensors_that_share_memory_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=r"'(first|second)\.\w+' and '(first|second)\.\w+' share memory"):
        zs.shard(Apart(kind))


@pytest.mark.parametrize("kind", ["attribute", "attribute's column", "list"])
def test_a_plain_attribute_that_is_a_view_of_a_parameter_is_refused_by_name(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"share memory.*'second\.rows?' is neither a parameter nor a buffer.*compute the values in"
    ):
        zs.shard(Apart(kind))


def test_a_plain_attribute_may_be_a_view_of_a_parameter_that_is_not_sharded_or_not_trained() -> None:
    model = Apart("attribute")
    zs.shard(model, ignored=[model.first.weight])
    (frozen := Apart("attribute")).requires_grad_(False)
    zs.shard(frozen)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["side by side", "frozen", "no view", ""])
def test_memory_that_is_shared_without_harm_is_not_refused(kind: str) -> None:
    model = Apart(kind)
    zs.shard(model)
    model(torch.ones(2, 4))


@pytest.mark.parametrize("activations", ["recompute", "recompute-rest"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_recomputed_forward_that_changes_a_parameter_is_refused(activations: str, trains: bool) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count = nn.Linear(4, 4), nn.Parameter(torch.zeros(1), requires_grad=trains)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.count.add_(1)
            return self.linear(x)

    model = nn.Sequential(Counting(), Counting())
    zs.shard(model, stage=1, activations=activations, units=[Counting])
    with pytest.raises(RuntimeError, match="which is recomputed, changed a parameter in place"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("activations", ["recompute", "recompute-rest", "compress", "offload"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_of_a_graph_are_kept(activations: str, layout: torch.layout) -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return torch.relu(torch.sparse.mm(adjacency, self.linear(x)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Convolution(), Convolution()])

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, adjacency)
            return x

    plain, model = Stack(), Stack()
    zero = zs.shard(model, stage=1, activations=activations, units=[Convolution])
    adjacency = torch.eye(5).roll(1, 0).to_sparse(layout=layout)
    for one in (plain, model):
        one(torch.ones(5, 4), adjacency).sum().backward()
    with zero.gathered():
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_an_optimizer_may_have_a_frozen_integer() -> None:
    model = nn.Linear(4, 4)
    model.step = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    zs.shard(model, optimizer, stage=2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_refused_model_is_as_it_was() -> None:
    first, second = run_ranks(shard_then_go_on, 2, timeout_s=TIMEOUT_S)
    assert first == second


# ---- later: each refusal is a function of (model, optimizer, zero)


def arguments_of_step(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    optimizer.step(None, 1.0)


def create_graph(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    models.stack_loss(model, 1, dist.get_rank()).backward(create_graph=True)


def reentrant_checkpoint(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    x = models.features(1, dist.get_rank()).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint(model, x, use_reentrant=True).square().mean().backward()


def to_double(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.to(torch.float64)


def to_half(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.half()


def to_meta(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.to("meta")
    models.stack_loss(model, 1, dist.get_rank())


def block_to_bfloat16(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.blocks[1].bfloat16()


def assign_data(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.stem.weight.data = torch.zeros(models.WIDTH, 5)


def replace_parameter(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.head.weight = nn.Parameter(torch.zeros(3, models.WIDTH))
    models.stack_loss(model, 1, dist.get_rank())


def replace_module(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.blocks[1].up = nn.Linear(models.WIDTH, 2 * models.WIDTH)
    models.stack_loss(model, 1, dist.get_rank())


def backward_under_gathered(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered():
        models.stack_loss(model, 1, dist.get_rank()).backward()


def gathered_inside_gathered(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered(), zero.gathered():
        pass


def changed_without_writeback(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered(), torch.no_grad():
        model.head.bias.add_(1.0)


def step_unreduced(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.no_sync():
        models.stack_loss(model, 1, dist.get_rank()).backward()
    optimizer.step()


def norm_unreduced(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.no_sync():
        models.stack_loss(model, 1, dist.get_rank()).backward()
    zero.grad_norm()


def model_state_dict(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.state_dict()


def block_state_dict(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.blocks[1].state_dict()


def model_load(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.load_state_dict(models.Stack().state_dict())


def model_load_without_writeback(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered():
        model.load_state_dict(models.Stack().state_dict())


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    optimizer.state_dict()


def optimizer_state_dict_without_states(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered():
        optimizer.state_dict()


def optimizer_load(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    optimizer.load_state_dict(models.adamw(models.Stack()).state_dict())


def optimizer_load_without_writeback(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered(states=True):
        optimizer.load_state_dict(models.adamw(models.Stack()).state_dict())


def foreign_group(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 7))]})


def group_under_gathered(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    with zero.gathered(states=True, writeback=True):
        optimizer.add_param_group({"params": [model.head.bias]})


def attach_twice(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    zero.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def unattached_optimizer(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    stray = torch.optim.SGD(model.parameters(), lr=0.1)
    models.stack_loss(model, 1, dist.get_rank()).backward()
    stray.step()


LATER: dict[str, tuple[Callable[..., None], str, list[str]]] = {
    "arguments of step": (arguments_of_step, "TypeError", [r"step\(\) takes a closure and no other"]),
    "create_graph": (create_graph, "RuntimeError", ["create_graph"]),
    "reentrant checkpoint": (reentrant_checkpoint, "RuntimeError", ["eentrant", "use_reentrant=False"]),
    "to(float64)": (to_double, "RuntimeError", [r"'stem\.weight'", r"before zs\.shard\(\)"]),
    "half()": (to_half, "RuntimeError", [r"'stem\.weight'", r"before zs\.shard\(\)"]),
    "to(meta)": (to_meta, "RuntimeError", ["stem", "weight", r"before zs\.shard\(\)"]),
    "bfloat16() of a block": (block_to_bfloat16, "RuntimeError", [r"blocks\.1\.", r"before zs\.shard\(\)"]),
    "p.data =": (assign_data, "RuntimeError", [r"'stem\.weight'", r"writeback=True", r"\(12, 5\)"]),
    "replaced parameter": (replace_parameter, "RuntimeError", ["head", "weight", "replaced", r"writeback=True"]),
    "replaced module": (replace_module, "RuntimeError", [r"blocks\.1", "up", "replaced"]),
    "backward under gathered": (backward_under_gathered, "RuntimeError", ["gathered", "backward"]),
    "gathered inside gathered": (gathered_inside_gathered, "RuntimeError", ["gathered"]),
    "changed without writeback": (changed_without_writeback, "RuntimeError", [r"head\.bias", "writeback=True"]),
    "step unreduced": (step_unreduced, "RuntimeError", ["no_sync", "step"]),
    "norm unreduced": (norm_unreduced, "RuntimeError", ["no_sync", "norm"]),
    "state_dict": (model_state_dict, "RuntimeError", ["state_dict", r"with zero\.gathered\("]),
    "state_dict of a block": (block_state_dict, "RuntimeError", [r"zero\.gathered\("]),
    "load_state_dict": (model_load, "RuntimeError", ["load_state_dict", r"gathered\(writeback=True"]),
    "load_state_dict, no writeback": (model_load_without_writeback, "RuntimeError", [r"gathered\(.*writeback=True"]),
    "optimizer.state_dict": (optimizer_state_dict, "RuntimeError", ["state_dict", r"gathered\(states=True"]),
    "optimizer.state_dict, no states": (
        optimizer_state_dict_without_states,
        "RuntimeError",
        ["state_dict", r"gathered\(states=True"],
    ),
    "optimizer.load_state_dict": (optimizer_load, "RuntimeError", ["load_state_dict", "states=True", "writeback=True"]),
    "optimizer.load_state_dict, no writeback": (
        optimizer_load_without_writeback,
        "RuntimeError",
        ["load_state_dict", "writeback=True"],
    ),
    "foreign group": (foreign_group, "ValueError", [r"\(3, 7\)", "model"]),
    "group under gathered": (
        group_under_gathered,
        "RuntimeError",
        ["add_param_group", r"leave gathered\(\) first"],
    ),
    "attached twice": (attach_twice, "ValueError RuntimeError", [r"stem\.weight", "more than one|two"]),
    "unattached optimizer": (unattached_optimizer, "RuntimeError", [r"stem\.weight", r"attach\(|gathered\("]),
}


def refuse_later(action: Callable[..., None], stage: int) -> tuple[list[str], str]:
    return caught(lambda: action(*sharded(stage)))


@pytest.mark.product
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("what", LATER)
def test_refused_later(what: str, stage: int) -> None:
    action, kinds, words = LATER[what]
    for rank, (names, text) in enumerate(run_ranks(refuse_later, 2, action, stage, timeout_s=TIMEOUT_S)):
        if stage == 2 and what in ("state_dict", "state_dict of a block"):
            assert names == [], f"rank {rank}: {text}"  # the parameters are whole
            continue
        assert set(kinds.split()) & set(names), f"rank {rank}: {names[:1]}: {text}"
        assert_words(text, words)


# ---- reading a released parameter

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "index": lambda p: p[0],
    "add": lambda p: p + 1,
    "reversed add": lambda p: torch.ones(models.WIDTH, 5) + p,
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "numpy by protocol": lambda p: np.asarray(p),
    "item": lambda p: p[0, 0].item(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "functional": lambda p: nn.functional.linear(torch.ones(1, 5), p),
    "matmul": lambda p: torch.ones(1, models.WIDTH) @ p,
    "stack": lambda p: torch.stack([p, p]),
    "equal": lambda p: torch.equal(p, p),
    "comparison": lambda p: (p == 0).all(),
    "iteration": list,
    "contains": lambda p: 1.0 in p,
    "deepcopy": copy.deepcopy,
    "copy from": lambda p: torch.empty(models.WIDTH, 5).copy_(p),
    "copy into": lambda p: p.detach().copy_(torch.zeros(models.WIDTH, 5)),
    "init": lambda p: nn.init.normal_(p),
    "in place": lambda p: torch.no_grad()(p.mul_)(2.0),
    "write by index": lambda p: torch.no_grad()(p.__setitem__)(0, 1.0),
    "to": lambda p: p.to(torch.float64),
    "double": lambda p: p.double(),
    "storage": lambda p: p.untyped_storage(),
    "data_ptr": lambda p: p.data_ptr(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "isnan": lambda p: p.isnan().any(),
    "format": lambda p: f"{p.sum():.3f}",
}


def read_all_released() -> dict[str, tuple[list[str], str]]:
    model, _, _ = sharded()
    return {what: caught(lambda read=read: read(model.stem.weight)) for what, read in READS.items()}


@pytest.fixture(scope="module")
def reads() -> dict[str, tuple[list[str], str]]:
    """What each way of reading a released parameter comes to."""
    return run_ranks(read_all_released, 2, timeout_s=TIMEOUT_S)[1]


@pytest.mark.parametrize("what", READS)
def test_reading_a_released_parameter_raises_by_name(what: str, reads: dict[str, tuple[list[str], str]]) -> None:
    names, text = reads[what]
    assert "RuntimeError" in names, f"{names[:1]}: {text}"
    assert_words(text, [r"'stem\.weight'", r"`with zero\.gathered\(\):`", r"\[rank 1/2\]"])


def harmless() -> str:
    """What reads no values is answered also while released."""
    model, _, _ = sharded()
    p = model.stem.weight
    assert (p.shape, p.dtype, p.numel(), p.ndim) == ((models.WIDTH, 5), torch.float32, models.WIDTH * 5, 2)
    assert p.requires_grad and p.is_leaf and len(p) == models.WIDTH
    assert isinstance(p, nn.Parameter) and p in set(model.parameters())
    assert sum(q.numel() for q in model.parameters()) == sum(q.numel() for q in models.Stack().parameters())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in models.Stack().named_parameters()]
    assert p.grad is None
    repr(model), str(p)
    return repr(p)


def test_what_reads_no_values_works_while_released() -> None:
    for text in run_ranks(harmless, 2, timeout_s=TIMEOUT_S):
        assert "stem.weight" in text and "(12, 5)" in text, text


def copy_released() -> tuple[list[str], str]:
    model, _, _ = sharded()
    return caught(lambda: copy.deepcopy(model))


def test_copying_a_released_model_raises() -> None:
    for names, text in run_ranks(copy_released, 2, timeout_s=TIMEOUT_S):
        assert "RuntimeError" in names, f"{names[:1]}: {text}"
        assert_words(text, [r"zero\.gathered\(\)"])


ANSWERED = {model_state_dict: 2, optimizer_state_dict: 0}
"""The last stage at which a rank has all that it is asked for."""


def training_goes_on(stage: int) -> list[float]:
    """Refusals leave the engine as it was: the next steps are those of an undisturbed run."""
    losses = []
    for is_disturbed in (False, True):
        model, optimizer, zero = sharded(stage)
        for step in range(1, 4):
            for action in (
                model_state_dict,
                optimizer_state_dict,
                arguments_of_step,
                assign_data,
                to_double,
            ) * is_disturbed:
                is_answered = stage <= ANSWERED.get(action, -1)
                refused = pytest.raises((RuntimeError, TypeError, ValueError))
                with contextlib.nullcontext() if is_answered else refused:
                    action(model, optimizer, zero)
            step_once(model, optimizer, step)
        with zero.gathered():
            losses.append(float(sum(p.detach().double().square().sum() for p in model.parameters())))
    return losses


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_refusals_do_not_disturb_training(stage: int) -> None:
    for plain, disturbed in run_ranks(training_goes_on, 2, stage, timeout_s=TIMEOUT_S):
        assert plain == disturbed


# ---- ranks that differ


def other_width() -> None:
    model = models.build(models.Stack, width=12 + 4 * dist.get_rank())
    shard(model, models.adamw(model))


def other_depth() -> None:
    model = models.build(models.Stack, depth=3 + dist.get_rank())
    shard(model, models.adamw(model))


def other_order() -> None:
    model = models.build(models.Stack)
    if dist.get_rank() == 1:
        model.stem = model._modules.pop("stem")  # registered last, now
    shard(model, models.adamw(model))


def other_dtype() -> None:
    model = models.build(models.Stack)
    if dist.get_rank() == 1:
        model.double()
    shard(model, models.adamw(model))


def other_trainability() -> None:
    model = models.build(models.Stack)
    model.blocks[1].requires_grad_(dist.get_rank() == 0)
    shard(model, models.adamw(model))


def other_stage() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), stage=2 + dist.get_rank())


def other_units() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), units=[["Block"], []][dist.get_rank()])


def other_reduction() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model), reduction=["mean", "sum"][dist.get_rank()])


def other_torch() -> None:
    model = models.build(models.Stack)
    with patch.object(torch, "__version__", "2.99.0" if dist.get_rank() == 1 else torch.__version__):
        shard(model, models.adamw(model))


def other_optimizer() -> None:
    model = models.build(models.Stack)
    shard(model, (models.adamw, models.sgd)[dist.get_rank()](model))


def other_learning_rate() -> None:
    model = models.build(models.Stack)
    shard(model, models.adamw(model, lr=1e-3 * (1 + dist.get_rank())))


def other_groups() -> None:
    model = models.build(models.Stack)
    parameters = list(model.parameters())
    cut = 4 + dist.get_rank()
    shard(model, torch.optim.AdamW([{"params": parameters[:cut]}, {"params": parameters[cut:]}]))


def existing_state_on_one_rank() -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    if dist.get_rank() == 1:
        models.stack_loss(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    shard(model, optimizer)


def refused_on_one_rank() -> None:
    """Rank 1's model is refused by itself: the others must end, too, at once and by its error."""
    model = models.build(models.Stack)
    optimizer = Trust(model.parameters()) if dist.get_rank() == 1 else models.adamw(model)
    shard(model, optimizer)


MISMATCHES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "width": (other_width, [r"stem\.weight", "12", "16"]),
    "depth": (other_depth, [r"blocks\.3|\b26\b.*\b32\b|parameters"]),
    "order": (other_order, ["stem"]),
    "dtype": (other_dtype, ["float32", "float64"]),
    "trainability": (other_trainability, [r"blocks\.1|requires_grad|trainab"]),
    "stage": (other_stage, ["stage", "2", "3"]),
    "units": (other_units, ["unit"]),
    "reduction": (other_reduction, ["reduction", "mean", "sum"]),
    "torch": (other_torch, ["torch", r"2\.99\.0", re.escape(torch.__version__.split("+")[0])]),
    "optimizer": (other_optimizer, ["AdamW", "SGD"]),
    "learning rate": (other_learning_rate, ["lr|learning"]),
    "groups": (other_groups, ["group"]),
    "existing state": (existing_state_on_one_rank, ["state"]),
    "refused by one": (refused_on_one_rank, ["Trust"]),
}


@pytest.fixture(scope="module")
def mismatches() -> dict[str, list[tuple[list[str], str]]]:
    """What each difference between ranks comes to, by rank."""
    actions = [(action,) for action, _ in MISMATCHES.values()]
    return dict(zip(MISMATCHES, run_cases(refused, 2, actions, timeout_s=2 * TIMEOUT_S).values(), strict=True))


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_differ_are_told_how(what: str, mismatches: dict[str, list[tuple[list[str], str]]]) -> None:
    _, words = MISMATCHES[what]
    for rank, (names, text) in enumerate(mismatches[what]):
        if what == "refused by one" and rank == 1:
            assert names, text
        else:
            assert "RankMismatchError" in names, f"rank {rank}: {names[:1]}: {text}"
            assert_words(text, ["rank 0", "rank 1"] if what != "refused by one" else ["rank 1"])
        assert_words(text, words)


def collective_of_one_process() -> list[str]:
    """Without any process group everything works for one rank."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer)
    models.stack_loss(model, 0, 0).backward()
    zero.grad_norm()
    optimizer.step()
    optimizer.zero_grad()
    with zero.gathered(states=True):
        optimizer.state_dict()
        return list(model.state_dict())


def test_one_process_needs_no_process_group() -> None:
    (keys,) = run_ranks(collective_of_one_process, 1, timeout_s=TIMEOUT_S, process_group=False)
    assert keys == list(models.Stack().state_dict())


def added_later(stage: int) -> list[str]:
    """Add modules and parameters after shard() and take them away again; return what forwards with them say."""
    model, optimizer, _ = sharded(stage)
    block, said = model.blocks[0], []

    def ask() -> None:
        try:
            step_once(model, optimizer, 1)
        except RuntimeError as error:
            said.append(str(error))

    block.note = nn.Identity()
    ask()
    block.extra = nn.Linear(2, 2)
    ask()
    del block.extra
    block.scale = nn.Parameter(torch.ones(2))
    ask()
    del block.scale
    model.blocks.append(nn.Linear(2, 2))
    ask()
    del model.blocks[-1]
    block.note = nn.Linear(2, 2)
    ask()
    block.note = nn.Identity()
    step_once(model, optimizer, 2)
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_added_after_shard_is_named(stage: int) -> None:
    for said in run_ranks(added_later, 2, stage, timeout_s=TIMEOUT_S):
        names = [text.split("'")[1] for text in said]
        assert names == ["blocks.0.extra.weight", "blocks.0.scale", "blocks.3.weight", "blocks.0.note.weight"]
        assert all("Add modules and parameters before zs.shard()" in text for text in said)


def test_what_is_added_is_named_as_long_as_it_is_there() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    zs.shard(model)
    model[0].extra = nn.Linear(2, 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'0\.extra\.weight' was added to the model after zs\.shard\(\)"):
            model(x)
    del model[0].extra
    assert model(x).isfinite().all()


def left_to_the_caller() -> None:
    """Replace what shard() was told to ignore, which is the caller's."""
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if not name.startswith("head")], lr=0.1)
    shard(model, optimizer, stage=3, ignored=[model.head])
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
    step_once(model, optimizer, 0)


def test_what_is_ignored_may_be_replaced() -> None:
    run_ranks(left_to_the_caller, 2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("wrong", [5, [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)]])
def test_what_is_no_optimizer_is_not_attached(wrong: Any) -> None:
    zero = zs.shard(nn.Linear(4, 1))
    with pytest.raises(TypeError, match=rf"must be a torch\.optim\.Optimizer .*; got {type(wrong).__name__}\."):
        zero.attach(wrong)


def share_an_optimizer() -> None:
    """Shard two models of one optimizer as the error says, and compare with plain torch."""
    made = [[nn.Linear(4, 4), nn.Linear(4, 2)] for _ in range(2)]
    for ours, theirs in zip(*made, strict=True):
        theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW([*a.parameters(), *b.parameters()], lr=0.1) for a, b in made]
    with pytest.raises(
        ValueError, match=r"not in the model.*shard these as one: zs\.shard\(nn\.ModuleList\(\[a, b\]\)"
    ):
        zs.shard(made[0][0], optimizers[0], stage=3)
    zero = zs.shard(nn.ModuleList(made[0]), optimizers[0], stage=3)
    for (a, b), optimizer in zip(made, optimizers, strict=True):
        for _ in range(2):
            b(a(torch.ones(2, 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with zero.gathered():
        for ours, theirs in zip(*made, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_one_optimizer_over_several_models_is_told_how() -> None:
    run_ranks(share_an_optimizer, 2)
