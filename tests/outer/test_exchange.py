"""What an exchange sends and keeps: bytes by the transport, few bits with what rounding loses, copies, memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from benchmarks.peaks import measure_peak
from tests.outer.plain import loss_of, mesh_of, nesterov
from zeroshard.outer.exchange import is_finite
from zeroshard.outer.fragments import fragments_of, store_of
from zeroshard.testing import run_ranks
from zeroshard.wire.transports import codec_of

TIMEOUT_S = 120.0


def trained(zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[dict[str, int]]:
    """Train; return the bytes sent so far, after each step."""
    found = []
    for step in steps:
        loss_of(model, step, dist.get_rank(), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(zero.traffic().sent_bytes)
    return found


# -- bytes ------------------------------------------------------------------------------------------------------------


class Even(nn.Module):
    """Two weights of which each rank has whole blocks of 256 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def bytes_of_steps(options: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Train 100 steps; return the bytes over the axis after each step, and those of agreements within an island."""
    torch.manual_seed(0)
    model = Even()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = None if options is None else zs.Outer(**options)
    settings = zs.Settings(shared_memory=False, watchdog_s=60.0)
    zero = zs.shard(model, optimizer, stage=3, mesh=mesh_of(2), outer=outer, settings=settings)
    found, agreed = [], []
    for step in range(100):
        torch.manual_seed(1000 * step + dist.get_rank())
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = zero.traffic().sent_bytes
        found.append(sent.get("replicate", 0))
        agreed.append(sum(zero._islands.comm.sent_bytes.values()) if zero._islands is not None else 0)
    return found, agreed


def bytes_of_all() -> dict[int, tuple[list[int], list[int]]]:
    """Return `bytes_of_steps` of synchronous training (0) and of islands with each number of bits."""
    return {bits: bytes_of_steps({"every": 10, "bits": bits} if bits else None) for bits in (0, 32, 8, 4)}


@pytest.mark.rotates
def test_an_exchange_sends_what_is_said_and_nothing_is_sent_between() -> None:
    for found in run_ranks(bytes_of_all, 4, timeout_s=TIMEOUT_S):
        synchronous = found[0][0][-1]
        for bits, least in ((32, 10 / 1.01), (8, 39.0), (4, 75.0)):
            sent, every_byte = found[bits]
            assert synchronous / sent[-1] >= least, f"{bits} bits: {synchronous} and {sent[-1]} bytes"
            for step in range(99):
                has_exchange = (step + 2) % 10 == 0
                assert (every_byte[step + 1] > every_byte[step]) is has_exchange, f"{bits} bits, step {step + 1}"
            # The numbers of an exchange, which say that islands are at the same one.
            assert every_byte[-1] - sent[-1] - (every_byte[0] - sent[0]) == 10 * 4 * 8
        assert synchronous / found[32][0][-1] <= 10 * 1.01


# -- few bits ---------------------------------------------------------------------------------------------------------


def test_rounding_keeps_the_largest_and_the_nearest() -> None:
    for bits, most in ((8, 127), (4, 7)):
        codec, values = codec_of(f"scaled{bits}"), torch.randn(3 * 65536 + 770, dtype=torch.float64)
        values[:256] = 0.0
        message = torch.empty(codec.message_numel(len(values)), dtype=codec.dtype)
        codec.encode(values, message)
        told = torch.cat(list(codec.decoded_blocks(message, torch.float64)))
        assert len(told) == len(values)
        assert message.numel() == -(-len(values) * bits // 8) + 4 * -(-len(values) // 256)
        scales = torch.nn.functional.pad(values, (0, -len(values) % 256)).view(-1, 256).abs().amax(1) / most
        off = torch.nn.functional.pad(told - values, (0, -len(values) % 256)).view(-1, 256).abs().amax(1)
        assert torch.all(off <= scales * 0.50001)
        assert torch.all(told[:256] == 0.0)
        assert not any((part[:1] == 255).any() for part in message.split(codec.message_numel(65536)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rounding_does_not_hide_what_is_not_finite(value: float) -> None:
    for bits in (8, 4):
        codec, values = codec_of(f"scaled{bits}"), torch.ones(512)
        values[300] = value
        assert not torch.isfinite(codec.round(values, torch.float32)[300])


def test_four_bits_need_pairs() -> None:
    with pytest.raises(ValueError, match="encodes pairs of values; got 3"):
        codec_of("scaled4").round(torch.ones(3), torch.float32)


def test_new_anchors_are_the_parameters_and_nothing_is_owed() -> None:
    torch.manual_seed(0)
    model, options = Even(), zs.Outer(every=4, bits=8)
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()))._engine
    for fragment in fragments_of(engine.units, options, store_of(options, engine.mesh.device)):
        assert fragment.lost is not None
        fragment.lost.fill_(1.0)
        fragment.take_anchors()
        assert not fragment.lost.any()
        for part in fragment.parts:
            assert torch.equal(part.of(fragment.anchor.data), part.values())
            assert part.values().any()


# -- memory -----------------------------------------------------------------------------------------------------------


def sizes_at_the_peak(outer: dict[str, Any]) -> float:
    """Return the most bytes of a training with exchanges, in sizes of its parameters."""

    def train() -> Any:
        model = nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zs.shard(model, optimizer, mesh=mesh_of(dist.get_world_size()), outer=zs.Outer(every=1, **outer))
        for _ in range(3):
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero

    return measure_peak(train).peak_bytes / 4e6


@pytest.mark.parametrize(
    ("islands", "outer", "sizes"),
    [
        # Parameters, gradients and anchors, then two messages and their mean.
        (2, {}, 3 + 3),
        # The momentum and the mean more, and what nesterov's step takes; what rounding lost.
        (2, {"optimizer": nesterov, "bits": 8}, 3 + 2 + 2),
        # The sum, and the change that goes into it; the sum and the buffers of its parts.
        (3, {}, 3 + 2),
    ],
)
def test_an_exchange_drops_what_it_no_longer_needs(islands: int, outer: dict[str, Any], sizes: int) -> None:
    for found in run_ranks(sizes_at_the_peak, islands, outer, timeout_s=TIMEOUT_S):
        assert found == pytest.approx(sizes, abs=0.2)


def test_a_sum_that_overflows_is_no_value_that_is_not_finite() -> None:
    values = torch.full((1 << 17,), 3e38)
    assert is_finite(values)
    for wrong in (float("inf"), float("nan")):
        values[-1] = wrong
        assert not is_finite(values)
