"""Encodings of saved tensors: what comes back, bit for bit or within the bound, and how many bytes are kept."""

import math

import pytest
import torch
from torch import Tensor

from zeroshard.activations import compress_codes as codes
from zeroshard.activations import compress_rounded as rounded
from zeroshard.activations.values import Values, is_plain, values_of
from zeroshard.torch_private import fake_tensors, is_dense

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 7, 8, 9, 1000, codes._CHUNK - 1, codes._CHUNK + 8, 2 * codes._CHUNK + 3)


def draw(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(key))


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(codes._INTEGERS[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(bits_of(actual), bits_of(expected))


@pytest.mark.parametrize("numel", SIZES)
def test_bits_come_back(numel: int) -> None:
    mask = draw(numel) > 0.3
    packed = codes.pack_bits(mask)
    assert packed.numel() == math.ceil(numel / 8)
    assert_same_bits(codes.Bits(packed, torch.bool, codes.form_of(mask), 0, 1).restore(), mask)
    values = torch.where(mask, 1.25, 0.0)
    assert_same_bits(codes.Bits(packed, torch.float32, codes.form_of(values), 0.0, 1.25).restore(), values)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nonzero_values_come_back(numel: int, dtype: torch.dtype) -> None:
    flat = draw(numel).relu().to(dtype)
    flat[::5], flat[::7], flat[::11] = -0.0, math.nan, math.inf
    mask = codes.pattern_of(flat)
    count = int(mask.sum())
    values = codes.nonzero_values(flat, mask, count)[: count + 1]
    kept = codes.Nonzero(codes.pack_bits(mask), values, numel)
    assert_same_bits(kept.flat(()), flat)
    for steps, expected in (
        (("square",), flat.square()),
        ((torch.float64, "square", torch.bfloat16), flat.double().square().bfloat16()),
    ):
        derived = kept.flat(steps)
        # Which NaN a cast makes of a NaN depends on its place in memory, in torch itself.
        assert torch.equal(derived.isnan(), expected.isnan())
        assert_same_bits(derived.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_values_past_the_capacity_are_left_out() -> None:
    flat = torch.ones(100)
    values = codes.nonzero_values(flat, codes.pattern_of(flat), 10)
    assert values.numel() == 12
    assert values[0] == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(0, 2),
        lambda x: x[:, 1:3],
        lambda x: x[..., ::2],
        lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1),
        lambda x: x.permute(2, 0, 1).unsqueeze(0),
    ],
)
def test_forms_keep_shape_and_strides(view: object) -> None:
    tensor = view(draw(4, 5, 6))  # type: ignore[operator]
    form = codes.form_of(tensor)
    if tensor.stride()[1] != 0:
        assert_same_bits(form.spread(codes.flat_of(tensor).clone()), tensor)
    assert (form.offset is not None) == is_dense(tensor)


@pytest.mark.parametrize("kernel", [2, 3, (3, 2)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_indices_of_a_pool_come_back(kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = draw(2, 3, 11, 9).to(memory_format=layout)
        settings = (kernel, stride, padding, dilation)
        _, indices = torch.nn.functional.max_pool2d(
            x, kernel, stride, padding, dilation, ceil_mode, return_indices=True
        )
        pairs = [one if isinstance(one, tuple) else (one, one) for one in settings]
        code = codes.window_of(indices, 9, pairs)
        assert code is not None
        assert code.places.dtype is torch.uint8
        assert_same_bits(code.restore(), indices)


def test_a_window_that_a_byte_cannot_tell_is_left_alone() -> None:
    _, indices = torch.nn.functional.max_pool2d(draw(1, 1, 40, 40), 17, return_indices=True)
    assert codes.window_of(indices, 40, [(17, 17), (17, 17), (0, 0), (1, 1)]) is None


# -- rounding ---------------------------------------------------------------------------------------------------------


def hard(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return blocks of many sizes: normal numbers, every code's neighbours and midpoints, one large number."""
    steps = torch.linspace(-1, 1, 64 * rounded.BLOCK, dtype=torch.float64)
    blocks = [draw(64 * rounded.BLOCK, key=1).double(), steps, steps.sign() * 2.0 ** (-20 * steps.abs())]
    large = 1e-3 * draw(rounded.BLOCK, key=2).double()
    large[5] = 1.0
    scaled = [one * 10.0**power for one in (*blocks, large) for power in (-30, -4, 0, 4, 30)]
    return torch.cat(scaled).to(dtype)


def maxima_of(flat: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % rounded.BLOCK)).view(-1, rounded.BLOCK)
    return blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: flat.numel()]


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_keeps_to_its_bound(kind: str, dtype: torch.dtype) -> None:
    flat = hard(dtype)[:-3]  # no whole number of blocks
    memory = rounded.round_to(kind, flat)  # type: ignore[arg-type]
    back = memory.flat()
    assert (back.dtype, back.shape) == (flat.dtype, flat.shape)
    x, error, most = flat.double(), (back.double() - flat.double()).abs(), maxima_of(flat).double()
    if kind == "bf16":
        bound = x.abs() / 256
    elif kind == "fp8":
        bound = torch.maximum(x.abs() / 16, most / 416 / 1024) * (1 + 2.0**-20)
    else:
        bound = most / 252 * (1 + 2.0**-14) + 1e-38
    assert bool((error <= bound).all())
    # The bound says no more than is true.
    assert float((error / bound.clamp(min=1e-300)).max()) > 0.98


@pytest.mark.parametrize(("kind", "part"), [("bf16", 2), ("fp8", 4 / (1 + 4 / 128)), ("int8", 4 / (1 + 4 / 128))])
def test_rounding_keeps_so_many_bytes(kind: str, part: float) -> None:
    flat = draw(128 * 64)
    memory = rounded.round_to(kind, flat)  # type: ignore[arg-type]
    kept = sum(one.numel() * one.element_size() for one in (memory.codes, memory.scales) if one is not None)
    assert flat.numel() * 4 / kept == pytest.approx(part)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
def test_what_is_not_finite_comes_back(kind: str) -> None:
    flat = draw(1000)
    flat[3], flat[200], flat[201], flat[999] = math.nan, math.inf, -math.inf, math.inf
    back = rounded.round_to(kind, flat).flat()  # type: ignore[arg-type]
    is_finite = flat.isfinite()
    assert torch.equal(back.isfinite(), is_finite)
    assert torch.equal(back.isnan(), flat.isnan())
    assert torch.equal(back[200:202], flat[200:202])
    assert float((back - flat)[is_finite].abs().max()) < 0.25


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
def test_zeros_come_back(kind: str) -> None:
    assert torch.equal(rounded.round_to(kind, torch.zeros(300)).flat(), torch.zeros(300))  # type: ignore[arg-type]


# -- without values ---------------------------------------------------------------------------------------------------


def test_a_tensor_says_whether_its_values_may_be_read() -> None:
    assert values_of(torch.ones(2)) is Values.HOST
    assert values_of(torch.ones(2, device="meta")) is Values.NEVER
    with fake_tensors():
        found = torch.ones(2)
    assert values_of(found) is Values.NEVER
    assert is_plain(found)
    assert not is_plain(torch.nn.Parameter(torch.ones(2)))


def test_a_trace_encodes_sizes_and_leaves_nothing_to_later_runs() -> None:
    codes._table.cache_clear()
    with fake_tensors():
        flat = torch.empty(2 * codes._CHUNK + 3)
        mask = codes.pattern_of(flat)
        bits = codes.Bits(codes.pack_bits(mask), torch.float32, codes.form_of(flat), 0.0, 1.0)
        values = codes.nonzero_values(flat, mask, 100)
        kept = codes.Nonzero(bits.packed, values, flat.numel())
        assert bits.restore().shape == kept.flat(()).shape == flat.shape
    assert (bits.packed.numel(), values.numel()) == (math.ceil(flat.numel() / 8), 102)
    test_bits_come_back(9)
