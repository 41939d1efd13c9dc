"""8-bit codes: the nearest one, in order, and the same again for what was decoded."""

import math

import pytest
import torch
from torch import Tensor

from tests.oracle import randn
from zeroshard.optim.blocks8 import BLOCK_NUMEL, block_count, code_of, decode, encode, from_rows, to_rows

CPU = torch.device("cpu")
SIGNS = (True, False)
LEAST = 2.0**-38


def values_of(numel: int, *, is_signed: bool, scale: float = 1.0, key: int = 0) -> Tensor:
    """Numbers over many decades."""
    values = randn(numel, key=(key, numel)) * 10.0 ** (2 * randn(numel, key=(key, numel, 1)).clamp(-3.0, 3.0)) * scale
    return values if is_signed else values.abs()


@pytest.mark.parametrize("is_signed", SIGNS)
def test_codes_are_in_order_and_reach_one(is_signed: bool) -> None:
    code = code_of(is_signed=is_signed, device=CPU)
    assert code.values.shape == (256,)
    assert (code.values.diff() > 0).all()
    assert code.values[code.zero] == 0.0
    assert code.values[-1] == 1.0
    assert code.values[0] == (-1.0 if is_signed else 0.0)


@pytest.mark.parametrize("is_signed", SIGNS)
def test_the_nearest_code_is_found_for_every_float_beside_a_border(is_signed: bool) -> None:
    code = code_of(is_signed=is_signed, device=CPU)
    borders = (code.values[1:] + code.values[:-1]) / 2
    around = [borders, torch.nextafter(borders, borders + 1), torch.nextafter(borders, borders - 1), code.values]
    decades = [torch.linspace(-1.0, 1.0, 100_001) * 10.0**-power for power in range(12)]
    numbers = torch.cat([*around, *decades, torch.tensor([0.0, -0.0, 1e-45, 2.0**-126])])
    numbers = numbers if is_signed else numbers[numbers >= 0]
    found = code.nearest(numbers)
    assert torch.equal(found, torch.bucketize(numbers, borders).to(torch.uint8))
    assert torch.equal(code.nearest(code.values), torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("is_signed", SIGNS)
def test_codes_follow_the_order_of_numbers(is_signed: bool) -> None:
    values = values_of(BLOCK_NUMEL, is_signed=is_signed).sort().values
    codes, _ = encode(values[None], is_signed=is_signed, least=LEAST)
    assert (codes.int().diff() >= 0).all()


@pytest.mark.parametrize("is_signed", SIGNS)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e30])
def test_what_was_decoded_is_encoded_as_before(is_signed: bool, scale: float) -> None:
    rows = to_rows(values_of(7 * BLOCK_NUMEL + 5, is_signed=is_signed, scale=scale))
    codes, scales = encode(rows, is_signed=is_signed, least=LEAST)
    decoded = decode(codes, scales, is_signed=is_signed)
    again, scales_again = encode(decoded, is_signed=is_signed, least=LEAST)
    assert torch.equal(codes, again)
    assert torch.equal(scales, scales_again)


def test_a_root_is_encoded_as_before_after_it_was_squared() -> None:
    """A moment is handed over as a square; the least of blocks that are not zero is the hardest."""
    for scale in (1.0, 1e-6, 2.0**-38 / 1e4, 1e10):
        rows = to_rows(values_of(4 * BLOCK_NUMEL, is_signed=False, scale=scale))
        codes, scales = encode(rows, is_signed=False, least=LEAST)
        squares = decode(codes, scales, is_signed=False).square_()
        again, scales_again = encode(squares.sqrt(), is_signed=False, least=LEAST)
        assert torch.equal(codes, again)
        assert torch.equal(scales, scales_again)


@pytest.mark.parametrize("is_signed", SIGNS)
def test_an_element_is_off_by_at_most_half_a_step(is_signed: bool) -> None:
    code = code_of(is_signed=is_signed, device=CPU)
    rows = to_rows(values_of(8 * BLOCK_NUMEL, is_signed=is_signed))
    codes, scales = encode(rows, is_signed=is_signed, least=LEAST)
    gaps = torch.maximum(*(torch.nn.functional.pad(code.values.diff(), pad) for pad in ((1, 0), (0, 1))))
    apart = (decode(codes, scales, is_signed=is_signed) - rows).abs()
    assert (apart <= gaps[codes.int()] / 2 * scales[:, None] * (1 + 1e-5)).all()
    largest = rows.abs().argmax(1, keepdim=True)
    assert torch.equal(apart.gather(1, largest), torch.zeros_like(scales)[:, None])


@pytest.mark.parametrize("is_signed", SIGNS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_hidden(is_signed: bool, value: float) -> None:
    rows = torch.ones(2, BLOCK_NUMEL)
    rows[1, 3] = value
    decoded = decode(*encode(rows, is_signed=is_signed, least=LEAST), is_signed=is_signed)
    assert not decoded[1].isfinite().any()
    assert torch.equal(decoded[0], rows[0])


@pytest.mark.parametrize("is_signed", SIGNS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-39])
def test_what_is_too_small_becomes_zero(is_signed: bool, value: float) -> None:
    codes, scales = encode(torch.full((1, BLOCK_NUMEL), value), is_signed=is_signed, least=LEAST)
    assert torch.equal(decode(codes, scales, is_signed=is_signed), torch.zeros(1, BLOCK_NUMEL))


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 1000])
def test_the_last_block_may_be_short(numel: int) -> None:
    values = values_of(numel, is_signed=True)
    rows = to_rows(values)
    assert rows.shape == (block_count(numel), BLOCK_NUMEL)
    assert (rows.data_ptr() == values.data_ptr()) == (numel % BLOCK_NUMEL == 0)
    back = from_rows(rows, values.shape)
    assert torch.equal(back, values)
    assert back.untyped_storage().nbytes() == 4 * numel
    assert block_count(numel) == math.ceil(numel / 256)
