"""Events of a trace, on modules small enough to count by hand; sizes are in elements of 4 bytes unless marked."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.peaks import peak_of
from zeroshard import torch_checks
from zeroshard.plan.trace.events import Category, Phase, Trace
from zeroshard.plan.trace.tracer import trace_step
from zeroshard.train.models.gpt import GPT, GPTConfig

from .saved_bytes import saved_by_module, saved_within

B, S, H = 4, 32, 64
ROWS = B * S


def total(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.sum()


def traced(model: nn.Module, *, is_leaf: bool = False, **options: Any) -> Trace:
    """Trace the sum of a module's outputs, for an input of (B, S, H)."""
    x = torch.empty(B, S, H, device="meta", requires_grad=is_leaf)
    return trace_step(total, model.to("meta"), [x], **options)


def by_category(trace: Trace) -> dict[str, int]:
    """Return the bytes of all storages that appeared, by category."""
    found: dict[str, int] = {}
    for event in trace.events:
        if event.nbytes > 0:
            found[event.category] = found.get(event.category, 0) + event.nbytes
    return found


class Function(nn.Module):
    """A module that calls a function, after a layer whose output needs a gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(H, H, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


# -- what is saved ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "saved"),
    [
        (nn.Linear(H, 3 * H), {"": ROWS * H}),
        (nn.Sequential(nn.Linear(H, 2 * H), nn.ReLU()), {"0": ROWS * H, "1": 2 * ROWS * H}),
        (nn.Sequential(nn.Linear(H, 2 * H), nn.ReLU(), nn.Linear(2 * H, H)), {"0": ROWS * H, "1": 2 * ROWS * H}),
        (nn.Sequential(nn.Linear(H, 2 * H), nn.GELU()), {"0": ROWS * H, "1": 2 * ROWS * H}),
        # The input, the mean and the reciprocal deviation of each row.
        (nn.LayerNorm(H), {"": ROWS * H + 2 * ROWS}),
        (Function(torch.sigmoid), {"first": ROWS * H, "": ROWS * H}),
        (Function(lambda x: x + 1.0), {"first": ROWS * H}),
        (Function(lambda x: x * x), {"first": ROWS * H, "": ROWS * H}),
        (Function(lambda x: x.view(-1).exp()), {"first": ROWS * H, "": ROWS * H}),
        (Function(lambda x: F.dropout(x, 0.5)), {"first": ROWS * H, "": ROWS * H}),
    ],
    ids=str,
)
def test_a_module_saves_what_is_counted_by_hand(module: nn.Module, saved: dict[str, int]) -> None:
    trace = traced(module)
    assert dict(saved_by_module(trace)) == {name: 4 * numel for name, numel in saved.items()}
    assert trace.saved_bytes() == 4 * sum(saved.values())


def test_parameters_that_autograd_saves_are_no_activations() -> None:
    trace = traced(nn.Linear(H, 3 * H), is_leaf=True)
    assert by_category(trace)["parameter"] == 4 * (3 * H * H + 3 * H)
    assert {one.category for one in trace.events if one.storage in trace.saved} == {Category.INPUT}


def test_a_storage_counts_once_however_many_views_are_saved() -> None:
    trace = traced(Function(lambda x: x[..., :8] * x[..., 8:16]))
    assert dict(saved_by_module(trace)) == {"first": 4 * ROWS * H, "": 4 * ROWS * H}


def test_what_is_changed_in_place_is_one_storage() -> None:
    trace = traced(nn.Sequential(nn.Linear(H, H), nn.ReLU(inplace=True), nn.Dropout(0.0)))
    made = [event for event in trace.events if event.phase is Phase.FORWARD and event.nbytes == 4 * ROWS * H]
    assert [(event.module, event.category) for event in made] == [("0", Category.ACTIVATION)]
    assert saved_by_module(trace)["1"] == 4 * ROWS * H


def test_cross_entropy_saves_probabilities_and_targets() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(H, 1000, bias=False)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())

    x, targets = torch.empty(B, S, H, device="meta"), torch.empty(B, S, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Head()
    trace = trace_step(lambda model, *inputs: model(*inputs), model, [x, targets])
    # The logits in logarithms, the targets, the number of rows that count.
    assert dict(saved_by_module(trace)) == {"out": 4 * ROWS * H, "": 4 * ROWS * 1000 + 8 * ROWS + 4}
    assert by_category(trace)["input"] == 4 * ROWS * H + 8 * ROWS
    # Logits, then their gradient twice: of the logarithms and of themselves.
    assert peak_of(trace, Phase.BACKWARD).by_category["temporary in backward"] >= 2 * 4 * ROWS * 1000


def test_a_block_of_the_gpt_saves_what_is_counted_by_hand() -> None:
    config = GPTConfig(depth=2, context=S)
    width, heads = config.width, config.heads
    with torch.device("meta"):
        model, tokens = GPT(config), torch.empty(B, S, dtype=torch.int64)
    trace = trace_step(lambda model, *x: model(*x), model, [tokens, tokens])
    # Two norms: input and two numbers a row; the product behind each: its input. Rotated queries and keys; values, with
    # the storage of all three before; the mixed heads, as attention gives them and as the product behind it takes them,
    # and a sum for each. The MLP: its ReLU, which the square keeps as well, and the square.
    norms = 2 * (ROWS * width + 2 * ROWS) + 2 * ROWS * width
    attention = 2 * ROWS * width + 3 * ROWS * width + 2 * ROWS * width + ROWS * heads
    for name in ("blocks.0", "blocks.1"):
        assert saved_within(trace, name) == 4 * (norms + attention + 2 * ROWS * 4 * width)


# -- lifetimes and categories -----------------------------------------------------------------------------------------


def test_everything_that_appears_is_gone_once_and_in_order() -> None:
    trace = traced(nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, 1)), optimizer=torch.optim.AdamW, steps=2)
    assert [event.order for event in trace.events] == list(range(len(trace.events)))
    seen: dict[int, int] = {}
    for event in trace.events:
        seen[event.storage] = seen.get(event.storage, 0) + event.nbytes
        assert seen[event.storage] in (0, abs(event.nbytes))
    assert min(trace.live) >= 0
    left = {event.category for event in trace.events if event.nbytes > 0 and seen[event.storage]}
    assert left == {Category.PARAMETER, Category.INPUT, Category.OPTIMIZER}


def test_each_part_of_a_step_has_its_category() -> None:
    model = nn.Sequential(nn.Linear(H, H, bias=False), nn.BatchNorm1d(S))
    parameters, buffers = 4 * (H * H + 2 * S), 4 * 2 * S + 8
    found = by_category(traced(model, optimizer=torch.optim.AdamW))
    assert (found["parameter"], found["buffer"], found["input"]) == (parameters, buffers, 4 * ROWS * H)
    assert found["gradient"] == parameters
    assert found["optimizer"] == 2 * parameters + 4 * 3  # and a counter for each of three parameters


def test_gradients_are_added_up_in_place_over_micro_batches() -> None:
    one, two = (traced(nn.Linear(H, H), micro_batches=count) for count in (1, 2))
    assert by_category(one)["gradient"] == by_category(two)["gradient"] == 4 * (H * H + H)
    assert peak_of(two).nbytes > peak_of(one).nbytes


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, H)
            self.head = nn.Linear(H, 100, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens)).exp().sum()  # type: ignore[no-any-return]

    with torch.device("meta"):
        model, tokens = Tied(), torch.empty(B, S, dtype=torch.int64)
    trace = trace_step(lambda model, tokens: model(tokens), model, [tokens])
    assert by_category(trace)["parameter"] == by_category(trace)["gradient"] == 4 * 100 * H
    # Both gradients and their sum: the first is a view of a product, to which autograd does not add in place.
    whole = [e for e in trace.events if e.phase is Phase.BACKWARD and e.nbytes == 4 * 100 * H]
    assert len(whole) == 3


def test_parameters_that_share_a_storage_are_one() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.empty(2 * H * H, device="meta")
            self.first = nn.Parameter(flat[: H * H].view(H, H))
            self.second = nn.Parameter(flat[H * H :].view(H, H))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.first @ self.second

    trace = trace_step(total, Flat(), [torch.empty(B, S, H, device="meta")])
    assert [e.nbytes for e in trace.events if e.category is Category.PARAMETER and e.nbytes > 0] == [4 * 2 * H * H]


# -- activation checkpointing -----------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks whose forward is wrapped."""

    def __init__(self, wrap: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)) for _ in range(3)
        )
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x


HIDDEN, INNER = 4 * ROWS * H, 4 * ROWS * 4 * H
STATE = torch.get_rng_state().nbytes
"""Of the random numbers of a CPU, which a checkpoint restores for its recomputation."""
selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.parametrize(
    ("wrap", "saved"),
    [
        (lambda block, x: block(x), HIDDEN + 2 * INNER),
        (functools.partial(checkpoint, use_reentrant=False), HIDDEN),
        # The input, and the results of both products.
        (functools.partial(checkpoint, use_reentrant=False, context_fn=selective), 2 * HIDDEN + INNER),
    ],
    ids=["kept", "recompute", "selective"],
)
def test_a_checkpointed_block_saves_its_input(wrap: Callable[..., Tensor], saved: int) -> None:
    trace = traced(Stack(wrap), is_leaf=True)
    # A result that is kept is the next block's input.
    shared = HIDDEN * (saved == 2 * HIDDEN + INNER)
    assert trace.saved_bytes() == sum(saved_by_module(trace).values()) == 3 * saved - 2 * shared


@pytest.mark.parametrize(("personality", "kept"), [("cpu", 3), ("cuda", 0)])
def test_a_recomputation_on_a_cpu_keeps_a_state_of_random_numbers(personality: str, kept: int) -> None:
    before = torch.get_rng_state
    trace = traced(Stack(functools.partial(checkpoint, use_reentrant=False)), personality=personality)
    forward = [event.nbytes for event in trace.events if event.phase is Phase.FORWARD]
    assert forward.count(STATE) == kept
    assert forward.count(-STATE) == 0
    assert torch.get_rng_state is before


def test_a_recomputation_is_seen_in_the_backward() -> None:
    trace = traced(Stack(functools.partial(checkpoint, use_reentrant=False)))
    again = [
        e for e in trace.events if e.phase is Phase.BACKWARD and e.category is Category.ACTIVATION and e.nbytes > 0
    ]
    assert [(e.module, e.nbytes) for e in again if e.nbytes != STATE] == [
        (f"blocks.{block}.{layer}", INNER) for block in (2, 1, 0) for layer in (0, 1)
    ]
    assert (
        peak_of(trace).by_category["activation"]
        < peak_of(traced(Stack(lambda block, x: block(x)))).by_category["activation"]
    )


def test_a_reentrant_checkpoint_is_traced() -> None:
    trace = traced(Stack(functools.partial(checkpoint, use_reentrant=True)), is_leaf=True)
    assert trace.saved_bytes() == 3 * HIDDEN
    assert by_category(trace)["gradient"] == by_category(trace)["parameter"]


# -- the model is the user's ------------------------------------------------------------------------------------------


def test_a_real_and_a_meta_model_have_the_same_trace() -> None:
    real, config = [], GPTConfig(depth=2, context=S)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, tokens = GPT(config), torch.zeros(B, S, dtype=torch.int64)
        trace = trace_step(lambda model, *x: model(*x), model, [tokens, tokens], optimizer=torch.optim.AdamW)
        real.append(trace.events)
    assert real[0] == real[1]


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(S), nn.Dropout())
    random = torch.get_rng_state()
    objects = [*model.parameters(), *model.buffers()]
    values = [one.clone() for one in objects]
    x = torch.randn(B, S, H)
    trace_step(total, model, [x], optimizer=torch.optim.AdamW)
    after_trace = torch.get_rng_state()
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(objects, after, strict=True))
    assert all(torch.equal(one, value) for one, value in zip(after, values, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    # Making x took random numbers, the trace none.
    torch.set_rng_state(random)
    torch.randn(B, S, H)
    assert torch.equal(torch.get_rng_state(), after_trace)
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_model_of_many_layers_allocates_nothing() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(64)))
        x = torch.empty(2**12, 2**15)
    trace = trace_step(total, model, [x], optimizer=functools.partial(torch.optim.AdamW, foreach=False))
    assert peak_of(trace).by_category["parameter"] == 64 * 4 * 2**30
    assert peak_of(trace).by_category["optimizer"] >= 63 * 8 * 2**30


def test_bytes_at_two_batches_predict_a_third() -> None:
    def at(batch: int) -> tuple[int, int]:
        config = GPTConfig(depth=3, context=S)
        with torch.device("meta"):
            model, tokens = GPT(config), torch.empty(batch, S, dtype=torch.int64)
        trace = trace_step(lambda model, *x: model(*x), model, [tokens, tokens])
        return trace.saved_bytes(), peak_of(trace, Phase.BACKWARD).nbytes

    for two, four, eight in zip(at(2), at(4), at(8), strict=True):
        assert eight == four + 2 * (four - two)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said() -> None:
    x = torch.empty(B, S, H)
    with pytest.raises(ValueError, match=r"'tpu' is unknown; known: cpu, cuda\."):
        trace_step(total, nn.Linear(H, H), [x], personality="tpu")
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        trace_step(total, nn.Linear(H, H), [x], steps=0)
    with pytest.raises(TypeError, match=r"must return the loss, .* got a tensor of shape \(4, 32, 64\)"):
        trace_step(lambda model, x: model(x), nn.Linear(H, H), [x])
    with pytest.raises(TypeError, match="got NoneType"):
        trace_step(lambda model, x: None, nn.Linear(H, H), [x])  # type: ignore[arg-type, return-value]


class Branching(nn.Module):
    """Reads a value to choose what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.exp() if y.sum() > 0 else y


def test_a_value_that_is_read_is_named_or_answered() -> None:
    model, x = nn.Sequential(Branching()), torch.empty(B, S, H)
    weight = next(model.parameters())
    with pytest.raises(RuntimeError, match=r"module '0' reads some .*Give the value with reads="):
        trace_step(total, model, [x])
    assert next(model.parameters()) is weight  # also after an error
    yes, no = (
        trace_step(total, model, [x], reads=answer).saved_bytes() for answer in (lambda _: True, lambda _: False)
    )
    assert (yes, no) == (2 * HIDDEN, HIDDEN)
    with pytest.raises(RuntimeError, match="a shape that depends on values cannot be traced"):
        trace_step(lambda model, x: model(x[x > 0]).sum(), nn.Linear(1, 1), [x])


def test_a_torch_that_numbers_nodes_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_checks.check_tracing.cache_clear()
    monkeypatch.setattr(torch_checks, "running_node_number", lambda: None)
    with pytest.raises(RuntimeError, match=r"changed a private name: .*the number of the running node"):
        traced(nn.Linear(H, H))
    torch_checks.check_tracing.cache_clear()


def test_tensors_of_other_classes_are_named() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(H, H))
    model[0].weight = Special(torch.empty(H, H))
    with pytest.raises(TypeError, match=r"0\.weight is a Special"):
        trace_step(total, model, [torch.empty(B, S, H)])


def test_a_peak_of_no_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="no event in update"):
        peak_of(Trace((), (), (), (), {}, "cpu"), Phase.UPDATE)
