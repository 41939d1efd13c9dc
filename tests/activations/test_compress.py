"""The link that compresses: what each saved tensor becomes, that gradients keep their bits, and what is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.activations import compress as module
from zeroshard.activations.chain import Chained
from zeroshard.activations.compress import Compress
from zeroshard.activations.values import Values
from zeroshard.core.saved import SavedTensors
from zeroshard.table.trace import Ledger

Function = Callable[..., Tensor]


def draw(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(key)).requires_grad_()


def run(function: Function, inputs: tuple[Tensor, ...], link: Compress, unit: int = 0) -> Tensor:
    """Run a function as the forward of a unit."""
    saved = SavedTensors([], lambda number: None, Chained({unit: [link]}, Ledger()), lambda: unit)
    with saved.context():
        output = function(*inputs)
        saved.treat(unit, output)
    return output


def grads(output: Tensor, inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    return torch.autograd.grad(output, [one for one in inputs if one.requires_grad], seed, **options)


def compare(
    function: Function, *inputs: Tensor, link: Compress | None = None, is_compiled: bool = False
) -> dict[str, tuple[int, int]]:
    """Require the same bits of gradients, twice, and return the bytes by encoding."""
    link = link or Compress(None)
    torch.manual_seed(3)
    expected = grads(function(*inputs), inputs)
    torch.manual_seed(3)
    output = run(function, inputs, link)
    for is_first in (True, False)[is_compiled:]:
        actual = grads(output, inputs, retain_graph=is_first)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    return link.saved()


def after_of(counts: dict[str, tuple[int, int]], code: str) -> float:
    """Return the part of the bytes that is left of what has one encoding."""
    before, after = counts[code]
    return after / before


X, W, V = draw(64, 32, key=1), draw(32, 128, key=2), draw(128, 16, key=3)


def test_of_a_relu_alone_the_signs_stay() -> None:
    counts = compare(lambda x: F.relu(x * 1.0).sum(1), X)
    assert after_of(counts, "signs") == 1 / 32


@pytest.mark.parametrize("act", [F.leaky_relu, F.relu6, F.hardtanh, lambda x: F.relu_(x * 1.0)])
def test_signs_of_its_like(act: Function) -> None:
    # Of NaN hardtanh's own kernels make this or that.
    odd = 0.0 if act in (F.relu6, F.hardtanh) else torch.nan
    special = torch.tensor([-0.0, 0.0, 6.0, 1.0, -1.0, torch.inf, -torch.inf, odd])
    x = torch.cat([draw(64, 8).detach() * 5, special.expand(4, 8)]).requires_grad_()
    counts = compare(lambda x: act(x * 1.0) + 1, x)
    assert after_of(counts, "signs") == 1 / 32


@pytest.mark.parametrize("limits", [(0.0, torch.inf), (-torch.inf, 0.5), (-1.0, 1.0)])
def test_a_limit_may_be_infinite(limits: tuple[float, float]) -> None:
    compare(lambda x: F.hardtanh(x * 1.0, *limits) + 1, draw(64, 8))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_copy_in_another_order_is_not_derived(is_transposed: bool) -> None:
    if is_transposed:
        narrow = W.detach().to(torch.float64).requires_grad_()
        compare(
            lambda x, w: (
                F.relu(x * 1.0).t().to(torch.float64, memory_format=torch.contiguous_format) @ w[:, :64].t()[:64]
            ),
            X,
            narrow,
        )
        return
    images, kernel = draw(2, 3, 6, 6), draw(4, 3, 3, 3, key=2)
    compare(lambda x, w: F.conv2d(F.relu(x * 1.0).to(memory_format=torch.channels_last), w), images, kernel)


def test_of_a_relu_whose_values_are_read_the_nonzero_stay_once() -> None:
    counts = compare(lambda x, w, v: F.relu(x @ w) @ v, X, W, V)
    assert counts["nonzero"][0] == 64 * 128 * 4
    assert 0.45 < after_of(counts, "nonzero") < 0.6


def test_negative_zeros_of_a_relu_stay_closed() -> None:
    """Dropout before a ReLU makes them; their pattern is not zero, and their sign is not positive."""
    x = draw(64, 128).detach()
    x[::4, ::4] = -0.0
    assert bool(torch.signbit(F.relu(x)).any())
    assert "nonzero" in compare(lambda x, v: F.relu(x) @ v, x.requires_grad_(), V)


@pytest.mark.parametrize("square", [torch.square, lambda x: x**2, lambda x: x * x])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_square_is_derived(square: Function, dtype: torch.dtype) -> None:
    inputs = [one.detach().to(dtype).requires_grad_() for one in (X, W, V)]
    counts = compare(lambda x, w, v: square(F.relu(x @ w)) @ v, *inputs)
    assert counts["derived"] == (64 * 128 * dtype.itemsize, 0)
    assert "nonzero" in counts


def test_the_square_is_derived_through_casts() -> None:
    inputs = [one.detach().bfloat16().requires_grad_() for one in (X, W, V)]
    counts = compare(lambda x, w, v: F.relu(x @ w).float().square().bfloat16() @ v, *inputs)
    # The values themselves are kept once, in 16 bits.
    assert counts["derived"][0] == 64 * 128 * (4 + 2)
    assert counts["derived"][1] < 0.6 * 64 * 128 * 2


def test_the_square_of_a_relu_that_stays_is_derived_too() -> None:
    counts = compare(lambda x, v: F.relu(x.abs() + 1).square() @ v, draw(64, 128), V)
    assert counts["derived"] == (64 * 128 * 4, 0)
    assert "nonzero" not in counts


@pytest.mark.parametrize("change", [lambda y: y.mul_(2.0), lambda y: y.detach().mul_(2.0)])
def test_a_square_that_was_changed_since_is_kept(change: Function) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.relu(x @ w).square()
        change(y)
        return y @ v

    assert "derived" not in compare(function, X, W, V)


def test_a_convolutional_block_with_a_relu_in_place() -> None:
    conv, norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = F.relu_(norm(F.conv2d(x, weight, padding=1)))
        return F.relu_(F.conv2d(y, weight, padding=1) + x)

    for layout in (torch.contiguous_format, torch.channels_last):
        x = draw(2, 8, 10, 12).detach().to(memory_format=layout).requires_grad_()
        counts = compare(function, x, conv.weight.detach().requires_grad_())
        assert {"nonzero", "signs"} <= counts.keys()


@pytest.mark.parametrize("settings", [(2,), (3, 2, 1), (3, 2, 1, 2)])
def test_of_a_pool_a_byte_an_index_stays(settings: tuple[int, ...]) -> None:
    counts = compare(lambda x: F.max_pool2d(F.relu(x * 1.0), *settings), draw(2, 4, 20, 21))
    assert after_of(counts, "window") == 1 / 8
    assert after_of(counts, "signs") == pytest.approx(1 / 32, rel=0.01)


def test_booleans_are_bits() -> None:
    mask = draw(64, 32, key=5) > 0
    counts = compare(lambda x: (x * 2.0).masked_fill(mask.clone(), 0.0), X)
    assert counts["booleans"] == (64 * 32, 64 * 32 // 8)


def test_booleans_that_live_on_stay() -> None:
    mask = draw(64, 32, key=5) > 0
    assert compare(lambda x: (x * 2.0).masked_fill(mask, 0.0), X).keys() == {"kept"}


def test_views_of_much_larger_memory_keep_their_own_part() -> None:
    def function(x: Tensor) -> Tensor:
        wide = torch.cat([x, x, x, x], 1)
        return torch.tanh(wide[:, :32] * 2) * (wide * 3)[:, 5:9].exp().sum(1, keepdim=True)

    assert 0 < after_of(compare(lambda x: (torch.cat([x] * 4, 1) * 3)[:, 5:9] ** 3, X), "views") < 0.1
    compare(function, X)


def test_a_view_of_memory_that_lives_on_is_not_copied() -> None:
    kept = []

    def function(x: Tensor) -> Tensor:
        kept.append(torch.cat([x] * 4, 1) * 3)
        return kept[-1][:, 5:9] ** 3

    assert compare(function, X).keys() == {"kept"}


def test_attention_keeps_its_value_alone_of_the_joint_product() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        query, key, value = (x @ w).view(4, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query.contiguous(), key * 2, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(64, 64) @ w[:, :64].t()

    counts = compare(function, X, draw(32, 192))
    assert after_of(counts, "views") == pytest.approx(1 / 3)


class Doubled(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2 + ctx.saved_tensors[0] * 0


@pytest.mark.parametrize("rest", [None, "bf16", "fp8", "int8"])
def test_functions_of_the_users_are_left_alone(rest: Any) -> None:
    counts = compare(lambda x: Doubled.apply(F.relu(x * 1.0)), X, link=Compress(rest))
    assert counts == {"opaque": (64 * 32 * 4, 64 * 32 * 4)}


def test_compiled_blocks_are_left_alone() -> None:
    block = torch.compile(lambda x, w: F.relu(x @ w).square() @ w.t(), backend="aot_eager")
    counts = compare(block, X, W, link=Compress("fp8"), is_compiled=True)
    assert counts.keys() == {"opaque"}
    assert counts["opaque"][0] >= 64 * 128 * 4


def test_a_tensor_changed_in_place_still_raises() -> None:
    hidden = []

    def function(x: Tensor) -> Tensor:
        hidden.append(x.exp())
        return hidden[0] * 2

    output = run(function, (X,), Compress("fp8"))
    with torch.no_grad():
        hidden[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(output, (X,))


def test_derivatives_of_derivatives() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.relu(x @ w).square() @ v

    inputs = (X, W, V)

    def penalty(output: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), inputs)  # type: ignore[arg-type]

    for one, other in zip(penalty(run(function, inputs, Compress(None))), penalty(function(*inputs)), strict=True):
        assert torch.equal(one, other)


def test_units_walk_each_node_once() -> None:
    """What a walk of one unit finds of tensors around it is known when these are treated."""
    link = Compress(None)
    owner = [0]
    saved = SavedTensors(
        [], lambda number: None, Chained({0: [link], 1: [link], 2: [link]}, Ledger()), lambda: owner[0]
    )
    with saved.context():
        y = F.relu(X * 1.0)
        for unit in (1, 2):
            owner[0] = unit
            y = y @ (W @ W.t())
            saved.treat(unit, y)
            owner[0] = 0
        saved.treat(0, y)
    counts = link.saved()
    assert after_of(counts, "signs") == 1 / 32
    # The result of the ReLU is the input of a product in unit 1.
    assert "nonzero" in counts
    expected = grads(F.relu(X * 1.0) @ (W @ W.t()) @ (W @ W.t()), (X, W))
    assert all(torch.equal(one, other) for one, other in zip(grads(y, (X, W)), expected, strict=True))


def test_memory_is_free_once_the_backward_is_over() -> None:
    import weakref

    link = Compress(None)
    output = run(lambda x, w, v: F.relu(x @ w).square() @ v, (X, W, V), link)
    codes = [box.value.value for _, box in module_saved(output) if hasattr(box.value, "value")]
    values = weakref.ref(next(one.source.values for one in codes if hasattr(one, "source")))
    del codes
    grads(output, (X, W, V))
    del output
    assert values() is None


def module_saved(output: Tensor) -> list[tuple[str, Any]]:
    from zeroshard.torch_private import nodes_before, saved_by

    stack, found = [output.grad_fn], []
    while stack:
        node = stack.pop()
        found += saved_by(node)
        stack += nodes_before(node)
    return found


# -- without reading the count ----------------------------------------------------------------------------------------


class Device:
    """Stands for a device whose counts arrive when a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.under_way: list[tuple[Tensor, Tensor]] = []
        patch.setattr(module, "values_of", lambda tensor: Values.DEVICE)
        patch.setattr(module, "_post", self.post)

    def post(self, count: Tensor) -> Tensor:
        self.under_way.append((posted := torch.tensor(-1), count))
        return posted

    def arrive(self) -> None:
        for posted, count in self.under_way:
            posted.copy_(count)
        self.under_way = []


def square_of(link: Compress, x: Tensor) -> Tensor:
    return run(lambda x, w, v: F.relu(x @ w).square() @ v, (x, W, V), link)


def spares(output: Tensor) -> list[Any]:
    values = [box.value.value for _, box in module_saved(output) if hasattr(box.value, "value")]
    return [one.source.spare for one in values if hasattr(one, "source") and hasattr(one.source, "spare")]


@pytest.mark.parametrize("when", ["before", "never"])
@pytest.mark.parametrize("fits", [True, False])
def test_room_is_fixed_from_earlier_steps(monkeypatch: pytest.MonkeyPatch, when: str, fits: bool) -> None:
    device, link = Device(monkeypatch), Compress(None)
    first = square_of(link, X)
    assert not spares(first)  # nothing is known yet, so the ReLU's result stays
    device.arrive()
    x = X if fits else (X @ (W @ W.t())).detach().requires_grad_()
    wide = W if fits else W.abs()
    x = x if fits else x.detach().abs().mul(0.1).requires_grad_()
    function = lambda x, w, v: F.relu(x @ w).square() @ v  # noqa: E731
    inputs = (x, wide.detach().requires_grad_(), V)
    output = run(function, inputs, link)
    (spare, *others) = spares(output)
    assert spare.dense is not None
    assert all(one is spare for one in others)
    if when == "before":
        device.arrive()
    for one, other in zip(grads(output, inputs), grads(function(*inputs), inputs), strict=True):
        assert torch.equal(one, other)
    assert (spare.dense is None) == (fits and when == "before")


def test_a_treatment_lets_go_of_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    device, link = Device(monkeypatch), Compress(None)
    square_of(link, X)
    device.arrive()
    output = square_of(link, X)
    device.arrive()
    run(lambda x: x.exp(), (X,), link, unit=1)
    assert spares(output)[0].dense is None


# -- rounded ----------------------------------------------------------------------------------------------------------


def rounds(function: Function, *inputs: Tensor, rest: Any = "fp8") -> bool:
    link = Compress(rest)
    run(function, inputs, link)
    return rest in link.saved()


@pytest.mark.parametrize("rest", ["bf16", "fp8", "int8"])
def test_inputs_of_products_and_norms_are_rounded(rest: Any) -> None:
    assert rounds(lambda x, w: (x * 2) @ w, X, W, rest=rest)
    assert rounds(lambda x: F.layer_norm(x * 2, (32,)), X, rest=rest)
    assert rounds(lambda x: F.gelu(x * 2), X, rest=rest)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x * 2, 1),
        lambda x: torch.log_softmax(x * 2, 1),
        lambda x: torch.log(x * 2),
        lambda x: (x * 2) ** 3,
        lambda x: torch.exp(x * 2),
        lambda x: (x * 2).abs(),
        lambda x: (x * 2)[:8] @ torch.ones(32, 2),
    ],
)
def test_what_has_no_bound_or_is_small_stays_whole(function: Function) -> None:
    assert not rounds(function, X)


def test_half_precision_stays_in_bf16() -> None:
    x = X.detach().bfloat16().requires_grad_()
    assert not rounds(lambda x: F.gelu(x * 2), x, rest="bf16")
    assert rounds(lambda x: F.gelu(x * 2), x, rest="fp8")


def test_rounding_to_zero_closes_no_relu() -> None:
    """A ReLU's result that is dense is rounded for the product, and keeps its own signs."""
    x = draw(64, 128).detach().abs().mul(1e-6).add(1e-9)
    x[:, 0] = 1e3
    x.requires_grad_()
    link = Compress("int8")
    output = run(lambda x, v: F.relu(x) @ v, (x, V.detach()), link)
    assert "int8" in link.saved() or "signs" in link.saved()
    (grad,) = grads(output, (x,))
    (expected,) = grads(F.relu(x) @ V.detach(), (x,))
    assert torch.equal(grad, expected)


def test_gradients_are_off_by_no_more_than_the_rounding() -> None:
    y = (X * 2).detach()
    output = run(lambda x, w: (x * 2) @ w, (X, W), Compress("int8"))
    _, actual = grads(output, (X, W))
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    _, expected = grads((X * 2) @ W, (X, W))
    blocks = y.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(y.shape) / 252
    assert bool(((actual - expected).abs() <= 1.001 * (blocks.t() @ seed.abs()) + 1e-5).all())
    assert not torch.equal(actual, expected)
