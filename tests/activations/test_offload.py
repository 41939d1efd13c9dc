"""Offload of activations: what moves, in which order, and that no bit changes."""

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
import zeroshard.activations
from tests import models
from tests.oracle import STAGES, TIMEOUT_S
from tools.virtual_clock import VirtualClock
from zeroshard.activations.chain import Chained, Held, Link
from zeroshard.activations.offloaded import Offload
from zeroshard.activations.saved import Box, Treatment
from zeroshard.activations.spans import bytes_of, place_of, spans_in
from zeroshard.store.bus import CudaBus, EmulatedBus, HostPool, RealClock
from zeroshard.table.activations import Offloaded
from zeroshard.table.trace import Ledger
from zeroshard.testing import run_ranks
from zeroshard.torch_private import version_of

MB = 2**18  # elements of fp32
MB_BYTES = 2**20
GBPS = MB_BYTES / 1e9  # a megabyte takes a second, so that times are small numbers


class Hooks:
    """Stands for `core/saved.py`: boxes what is saved in a unit, and treats it at the unit's end."""

    def __init__(self, treatment: Treatment) -> None:
        self.treatment = treatment
        self.boxes: list[Box] = []

    def pack(self, tensor: Tensor) -> Any:
        box = Box(tensor.detach(), version_of(tensor), False)
        self.boxes.append(box)
        return box

    def unpack(self, box: Box) -> Tensor:
        if box.treatment is None:
            assert version_of(box.value) == box.version, "modified by an inplace operation"
            return box.value
        return box.treatment.restore(box)

    def run(self, unit: int, call: Callable[..., Any], *args: Any) -> Any:
        """Run the forward of a unit."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            out = call(*args)
        boxes, self.boxes = self.boxes, []
        if boxes:
            self.treatment.treat(boxes, unit, out)
        return out


def hooks_of(offload: Offload, units: int = 16, *before: Link) -> Hooks:
    return Hooks(Chained(dict.fromkeys(range(units), (*before, offload)), Ledger()))


def virtual(**options: Any) -> EmulatedBus:
    """Return a bus on which a megabyte takes a second."""
    return EmulatedBus(GBPS, clock=VirtualClock(**options), keeps=True)


def put(offload: Offload, *tensors: Any, unit: int = 0) -> list[Held]:
    """Treat tensors as what one forward of a unit has saved."""
    held = [Held(tensor, False) for tensor in tensors]
    offload.treat(held, unit, None)
    return held


def get(offload: Offload, one: Held) -> Any:
    return offload.restore(offload.start(one.value)) if one.steps else one.value


class Squares(nn.Module):
    """Units that each save a megabyte: their input."""

    def __init__(self, units: int, hooks: Hooks, numel: int = MB) -> None:
        super().__init__()
        self.units, self.hooks, self.numel = units, hooks, numel
        self.between: Callable[[int], None] = lambda unit: None

    def forward(self, x: Tensor) -> Tensor:
        for unit in range(self.units):
            x = self.hooks.run(unit, torch.square, x)
            self.between(unit)
        return x


def squares(offload: Offload, units: int) -> tuple[Tensor, Tensor]:
    """Run a forward over units of a megabyte; return input and output."""
    x = torch.full((MB,), 1.01).requires_grad_()
    return x, Squares(units, hooks_of(offload))(x * 1.0)


# -- order ------------------------------------------------------------------------------------------------------------


def test_copies_are_issued_ahead_of_use() -> None:
    bus = virtual()
    offload = Offload(Offloaded(), bus)
    _, y = squares(offload, 4)
    outs = [("issue", "out", 0), ("wait", "out", 0), ("issue", "out", 1), ("wait", "out", 1)]
    outs += [("issue", "out", 2), ("wait", "out", 2), ("issue", "out", 3)]
    assert bus.events == outs, "each unit's tensors are let go of when the next unit is over"
    y.sum().backward()
    # What unit 3 saved is still there. Before each use the copy of the unit before is under way.
    backs = [("issue", "back", 4), ("issue", "back", 5), ("wait", "back", 4)]
    backs += [("issue", "back", 6), ("wait", "back", 5), ("wait", "back", 6)]
    assert bus.events == outs + backs


def test_stalls_are_what_the_bus_is_short_of() -> None:
    compute_s = [0.0]
    bus = virtual(compute=lambda: compute_s[0])
    offload = Offload(Offloaded(), bus)
    x = torch.full((MB,), 1.01).requires_grad_()
    model = Squares(3, hooks_of(offload))
    model.between = lambda unit: compute_s.__setitem__(0, compute_s[0] + 0.75)
    y = model(x * 1.0)
    got = [(t.lane, t.issued_s, t.done_s, t.waited_s, t.stall_s) for t in bus.transfers]
    # A unit takes 0.75 s and its copy 1 s: each but the last is waited for by a quarter.
    assert got == [("out", 0.0, 1.0, 0.75, 0.25), ("out", 1.0, 2.0, 1.75, 0.25), ("out", 2.0, 3.0, None, 0.0)]
    y.sum().backward()
    got = [(t.lane, t.issued_s, t.done_s, t.waited_s, t.stall_s) for t in bus.transfers[3:]]
    assert got == [("back", 2.75, 3.75, 2.75, 1.0), ("back", 2.75, 4.75, 3.75, 1.0)]
    assert bus.stalled_s == 2.5


def test_a_bus_that_is_fast_enough_stalls_nobody() -> None:
    compute_s = [0.0]

    def work(*_: Any) -> None:
        compute_s[0] += 1.5

    bus = virtual(compute=lambda: compute_s[0])
    hooks = hooks_of(Offload(Offloaded(), bus))
    model = Squares(4, hooks)
    model.between = work
    x = torch.full((MB,), 1.01).requires_grad_()
    y = x * 1.0
    for unit in range(4):
        y = hooks.run(unit, torch.square, y)
        work()
        # This hook runs before the unit's backward: the copy of the unit before has the time of that backward.
        y.register_hook(lambda grad: work())
    y.sum().backward()
    # One copy is not ahead of anything: that of the unit before the last, issued as the backward begins.
    assert [t.number for t in bus.transfers if t.stall_s] == []
    assert bus.stalled_s == 0.0
    assert sum(t.lane == "back" for t in bus.transfers) == 3


def test_what_is_on_the_device_is_two_units_at_a_time() -> None:
    offload = Offload(Offloaded(), virtual())
    _, y = squares(offload, 6)
    assert (offload.host_bytes, offload.device_bytes) == (6 * MB_BYTES, MB_BYTES)
    assert offload.device_peak_bytes == MB_BYTES
    y.sum().backward()
    assert offload.device_peak_bytes == 2 * MB_BYTES
    assert (offload.host_bytes, offload.device_bytes) == (0, 0)


def test_a_unit_that_ends_again_and_again_keeps_the_last_of_it() -> None:
    bus = virtual()
    offload = Offload(Offloaded(), bus)
    kept = [put(offload, torch.ones(MB)) for _ in range(5)]
    assert offload.device_bytes == 2 * MB_BYTES
    assert [number for kind, _, number in bus.events if kind == "wait"] == [0, 1, 2]
    assert kept


def test_a_copy_that_is_under_way_is_waited_for_before_it_comes_back() -> None:
    bus = virtual()
    offload = Offload(Offloaded(), bus)
    x, y = squares(offload, 2)
    graph = y.sum()
    graph.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    # The last unit's tensor served the first backward itself; now it comes from the host, after its copy there.
    graph.backward()
    assert torch.equal(x.grad, first)
    assert [(t.lane, t.done_s) for t in bus.transfers if t.number in (1, 3)] == [("out", 2.0), ("back", 3.0)]


def test_lanes_run_beside_one_another_and_a_copy_back_after_the_one_out() -> None:
    bus = virtual()
    source, host = torch.zeros(MB_BYTES, dtype=torch.uint8), bus.allocate(MB_BYTES)
    outs = [bus.out(source, host, None) for _ in range(2)]
    bus.back(host, outs[1])
    bus.back(host, outs[0])
    assert [(t.lane, t.issued_s, t.done_s) for t in bus.transfers] == [
        ("out", 0.0, 1.0),
        ("out", 0.0, 2.0),
        ("back", 0.0, 3.0),
        ("back", 0.0, 4.0),
    ]


def test_a_real_clock_sleeps() -> None:
    bus = EmulatedBus(gbps=1.0, latency_s=0.05, clock=RealClock())
    offload = Offload(Offloaded(), bus)
    assert bus.small_bytes == int(0.05 * 1e9)
    bus.small_bytes = 0
    one, two = put(offload, torch.ones(4)), put(offload, torch.ones(4), unit=1)
    began = bus.clock.now()
    assert torch.equal(get(offload, one[0]), torch.ones(4))
    assert bus.clock.now() - began > 0.04
    assert two


# -- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(300.0)[137:],
        torch.tensor(3.5),
        torch.tensor([True, False]),
        torch.arange(5),
        torch.arange(5, dtype=torch.int16)[1:],
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex128) * 1j,
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ],
    ids=str,
)
def test_tensors_come_back_as_they_were(tensor: Tensor) -> None:
    offload = Offload(Offloaded(), virtual())
    (one,) = put(offload, tensor)
    put(offload, torch.ones(1), unit=1)  # so that it is on the host alone
    back = get(offload, one)
    assert one.steps
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert back.data_ptr() % 64 == tensor.data_ptr() % 64
    assert torch.equal(torch.nan_to_num(back), torch.nan_to_num(tensor))
    assert torch.equal(back.isnan(), tensor.isnan())
    assert not back.requires_grad


LEFT_ALONE: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "without rows": lambda: torch.empty(0, 4),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "without values": lambda: torch.ones(3, device="meta"),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
}


class Subclass(Tensor):
    """Might be anything."""


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_more_than_numbers_in_a_storage_is_left_alone(name: str) -> None:
    offload = Offload(Offloaded(), virtual())
    (one,) = put(offload, LEFT_ALONE[name]())
    assert not one.steps
    assert offload.host_bytes == 0


def test_small_tensors_stay() -> None:
    bus = EmulatedBus(gbps=1.0, latency_s=1e-6, clock=VirtualClock())
    offload = Offload(Offloaded(), bus)
    small, large = put(offload, torch.ones(249), torch.ones(250))
    assert not small.steps and large.steps


class Views(torch.autograd.Function):
    """Saves views of one storage, and returns what it got of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, got: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*views_of(whole))
        ctx.got = got
        return whole.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.got.extend(ctx.saved_tensors)
        return grad.expand(4, 24), None


def views_of(whole: Tensor) -> tuple[Tensor, ...]:
    return (*whole.chunk(3, dim=1), whole.t(), whole[1:, ::2])


def test_views_of_one_storage_move_once() -> None:
    bus = virtual()
    hooks = hooks_of(Offload(Offloaded(), bus))
    whole, got = torch.arange(96.0).view(4, 24).requires_grad_(), []
    y = hooks.run(0, Views.apply, whole * 1.0, got)
    hooks.run(1, torch.square, y * 2.0).backward()
    assert [(t.lane, t.nbytes) for t in bus.transfers] == [("out", 96 * 4), ("out", 4), ("back", 96 * 4)]
    assert len({one.untyped_storage().data_ptr() for one in got}) == 1
    for one, view in zip(got, views_of(whole.detach()), strict=True):
        assert torch.equal(one, view) and one.stride() == view.stride()


def test_a_small_view_of_a_large_storage_moves_alone() -> None:
    bus = virtual()
    put(Offload(Offloaded(), bus), torch.ones(100_000)[50_000:50_100])
    assert [t.nbytes for t in bus.transfers] == [400 + (50_000 * 4) % 512]


def test_what_several_units_save_moves_once_between_two_backwards() -> None:
    bus = virtual()
    offload = Offload(Offloaded(), bus)
    hooks, mask = hooks_of(offload), torch.rand(MB)
    for _ in range(2):
        x = torch.ones(MB, requires_grad=True)
        y = x * 1.0
        for unit in range(3):
            y = hooks.run(unit, torch.mul, y, mask)
        y.sum().backward()
        assert torch.equal(x.grad, mask * mask * mask)
    sizes = [(t.lane, t.nbytes) for t in bus.transfers if t.nbytes == MB_BYTES]
    assert sizes == [("out", MB_BYTES), ("back", MB_BYTES)] * 2


def test_a_changed_tensor_is_another_one() -> None:
    offload = Offload(Offloaded(), virtual())
    table = torch.zeros(8)
    (one,) = put(offload, table)
    between = put(offload, torch.ones(1), unit=1)
    table.add_(1.0)
    (two,) = put(offload, table, unit=2)
    between += put(offload, torch.ones(1), unit=3)
    assert get(offload, one).tolist() == [0.0] * 8
    assert get(offload, two).tolist() == [1.0] * 8


def test_after_a_backward_a_tensor_is_copied_anew() -> None:
    """A change through `.data` has no version; torch reads such a tensor as it is at the next forward."""
    hooks, table = hooks_of(Offload(Offloaded(), virtual())), torch.ones(8)
    x = torch.ones(8, requires_grad=True)
    kept = hooks.run(0, torch.mul, x * 1.0, table).sum()
    kept.backward(retain_graph=True)
    table.data.add_(1.0)
    x.grad = None
    hooks.run(1, torch.square, hooks.run(0, torch.mul, x * 1.0, table)).sum().backward()
    assert x.grad.tolist() == [8.0] * 8


def test_a_storage_in_the_place_of_one_that_is_gone_is_another_one() -> None:
    offload = Offload(Offloaded(), virtual())
    kept = []
    for value in range(50):
        kept.append(put(offload, torch.full((1000,), float(value)), unit=value)[0])
    assert [float(get(offload, one)[0]) for one in kept] == [float(value) for value in range(50)]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What a link before has made of a tensor."""

    parts: tuple[Tensor, ...]
    scale: Tensor
    shape: torch.Size


class Encoding(Link):
    def treat(self, held: Any, unit: int, outputs: Any) -> None:
        for one in held:
            one.put(self, Encoded((one.value.bool(), one.value * 0.5), one.value.max(), one.value.shape))

    def restore(self, value: Any) -> Any:
        assert isinstance(value, Encoded) and value.shape == value.parts[0].shape
        return value.parts[1] * 2.0


def test_fields_of_what_other_links_made_move() -> None:
    bus = virtual()
    offload = Offload(Offloaded(), bus)
    hooks = hooks_of(offload, 16, Encoding())
    x = torch.rand(32).requires_grad_()
    y = hooks.run(1, torch.square, hooks.run(0, torch.square, x * 1.0))
    assert sorted(t.nbytes for t in bus.transfers) == [4, 4, 32, 32, 128, 128]
    y.sum().backward()
    assert torch.allclose(x.grad, 4 * x.detach() ** 3)
    assert offload.host_bytes == 0


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """What a link before has made of a tensor, which takes a while to undo."""

    tensor: Tensor


class Wrapping(Link):
    def treat(self, held: Any, unit: int, outputs: Any) -> None:
        for one in held:
            one.put(self, Wrapped(one.value))

    def restore(self, started: Any) -> Any:
        return started.tensor


def test_before_a_link_that_begins_early_copies_begin_earlier() -> None:
    bus = virtual()
    hooks = hooks_of(Offload(Offloaded(), bus), 16, Wrapping())
    y = torch.full((MB,), 1.01).requires_grad_() * 1.0
    for unit in range(6):
        y = hooks.run(unit, torch.square, y)
        y.register_hook(lambda grad, unit=unit: bus.events.append(("backward", "back", unit)))
    y.sum().backward()
    found: dict[int, list[tuple[str, int]]] = {}
    for kind, lane, number in bus.events:
        if kind == "backward":
            found[number] = []
        elif lane == "back":
            found[min(found)].append((kind, number - 6))
    # The other link undoes its part of a unit's tensors one unit ahead, so copies are issued two units ahead of use.
    assert found == {
        5: [("issue", 0), ("issue", 1), ("wait", 0)],
        4: [("issue", 2), ("wait", 1)],
        3: [("issue", 3), ("wait", 2)],
        2: [("issue", 4), ("wait", 3)],
        1: [("wait", 4)],
        0: [],
    }


def test_dtensors_come_back_as_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.arange(12.0).view(3, 4).t()
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        offload = Offload(Offloaded(), virtual())
        (one,) = put(offload, tensor)
        put(offload, torch.ones(1), unit=1)
        back = get(offload, one)
        assert isinstance(back, DTensor)
        assert (back.placements, back.shape, back.stride()) == (tensor.placements, tensor.shape, tensor.stride())
        assert torch.equal(back.to_local(), local)
        assert back.to_local().data_ptr() != local.data_ptr()
    finally:
        dist.destroy_process_group()


# -- a fraction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_of_a_fraction_the_last_units_stay(fraction: float) -> None:
    bus = virtual()
    offload = Offload(Offloaded(fraction), bus)
    for step in range(3):
        x, y = squares(offload, 8)
        moved = round(8 * fraction)
        assert offload.host_bytes == moved * MB_BYTES, "also in the first step, in which nothing is known"
        y.sum().backward()
        assert torch.isfinite(x.grad).all()
        outs = [t for t in bus.transfers if t.lane == "out"]
        backs = [t for t in bus.transfers if t.lane == "back"]
        if step:
            # All moved tensors were let go of in the forward, as units that stay followed them.
            assert len(outs) == len(backs) == moved
        bus.transfers.clear()


def test_copies_of_a_fraction_are_issued_in_the_backward_of_a_unit_that_stays() -> None:
    bus = virtual()
    hooks = hooks_of(Offload(Offloaded(0.5), bus))
    for _ in range(2):
        bus.events.clear()
        y = torch.full((MB,), 1.01).requires_grad_() * 1.0
        for unit in range(4):
            y = hooks.run(unit, torch.square, y)
            y.register_hook(lambda grad, unit=unit: bus.events.append(("backward", "back", unit)))
        y.sum().backward()
    first = bus.transfers[-2].number
    assert [event for event in bus.events if event[1] == "back"] == [
        ("backward", "back", 3),
        ("backward", "back", 2),
        ("issue", "back", first),
        ("backward", "back", 1),
        ("issue", "back", first + 1),
        ("wait", "back", first),
        ("backward", "back", 0),
        ("wait", "back", first + 1),
    ]


def test_the_device_keeps_the_rest_of_a_fraction() -> None:
    offload = Offload(Offloaded(0.5), virtual())
    for step in range(2):
        x = torch.full((MB,), 1.01).requires_grad_()
        seen: list[Tensor] = []
        hooks = hooks_of(offload)
        y = x * 1.0
        for unit in range(8):
            seen.append(y.detach())
            y = hooks.run(unit, torch.square, y)
        # The list holds each saved storage once; a graph that keeps it there, too, is another user.
        kept = [index for index, one in enumerate(seen) if users(one) > 1 + (index == 0)]
        assert len(kept) == 4
        if step:
            assert kept == [4, 5, 6, 7]
        y.sum().backward()


def users(tensor: Tensor) -> int:
    from zeroshard.torch_private import users_of_storage

    return users_of_storage(tensor)


def test_a_fraction_follows_sizes_of_another_forward() -> None:
    offload = Offload(Offloaded(0.5), virtual())
    for numel in (MB, MB, 2 * MB, MB // 2):
        x = torch.full((numel,), 1.01).requires_grad_()
        y = Squares(4, hooks_of(offload), numel)(x * 1.0)
        assert offload.host_bytes == 2 * numel * 4
        y.sum().backward()


# -- hazards ----------------------------------------------------------------------------------------------------------


def test_a_change_while_the_copy_is_under_way_raises() -> None:
    hooks = hooks_of(Offload(Offloaded(), virtual()))
    x = torch.ones(8, requires_grad=True)
    y = x * 1.0
    z = hooks.run(0, torch.square, y)
    with torch.no_grad():
        y.add_(1.0)
    z = hooks.run(1, torch.square, z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_change_after_the_copy_does_not_reach_it() -> None:
    hooks = hooks_of(Offload(Offloaded(), virtual()))
    x = torch.full((8,), 3.0, requires_grad=True)
    y = x * 1.0
    z = hooks.run(1, torch.square, hooks.run(0, torch.square, y))
    with torch.no_grad():
        y.add_(1.0)
    z.sum().backward()
    assert x.grad.tolist() == [4 * 27.0] * 8


def test_a_change_of_a_tensor_that_serves_the_backward_itself_raises() -> None:
    offload = Offload(Offloaded(), virtual())
    x, y = torch.full((8,), 3.0, requires_grad=True), None
    y = x * 1.0
    z = hooks_of(offload).run(0, lambda t: torch.square(t) + torch.exp(t).detach() * t, y)

    def change(grad: Tensor) -> None:
        with torch.no_grad():
            y.add_(1.0)

    z.register_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_graph_that_is_freed_gives_its_memory_back() -> None:
    offload = Offload(Offloaded(), virtual())
    for _ in range(3):
        _, y = squares(offload, 4)
        assert offload.host_bytes == 4 * MB_BYTES
        del y
        put(offload, torch.ones(2))
        assert offload.host_bytes <= 2 * 8
        assert offload.device_bytes <= 2 * 8
    assert offload.pinned_bytes <= 4 * MB_BYTES + 2 * 8


def test_host_memory_is_used_again() -> None:
    class Counting:
        count = 0

    bus = virtual()
    allocate = bus.allocate

    def counted(nbytes: int) -> Tensor:
        Counting.count += 1
        return allocate(nbytes)

    bus.allocate = counted  # type: ignore[method-assign]
    offload = Offload(Offloaded(), bus)
    for _ in range(3):
        _, y = squares(offload, 4)
        y.sum().backward()
    assert Counting.count == 4
    assert offload.host_peak_bytes == offload.pinned_bytes == 4 * MB_BYTES


def test_an_exception_in_a_forward_leaves_nothing_behind() -> None:
    offload = Offload(Offloaded(0.5), virtual())
    _, y = squares(offload, 4)
    y.sum().backward()

    def fail() -> None:
        hooks, y = hooks_of(offload), torch.ones(MB, requires_grad=True) * 1.0
        for unit in range(3):
            y = hooks.run(unit, torch.square, y)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    for _ in range(2):
        x, y = squares(offload, 4)
        assert offload.host_bytes == 2 * MB_BYTES
        y.sum().backward()
        assert x.grad is not None
    assert (offload.host_bytes, offload.device_bytes) == (0, 0)


def test_an_exception_in_a_backward_leaves_nothing_behind() -> None:
    offload = Offload(Offloaded(), virtual())
    hooks = hooks_of(offload)
    x = torch.ones(MB, requires_grad=True)
    y = x * 1.0
    for unit in range(4):
        y = hooks.run(unit, torch.square, y)
        if unit == 1:
            y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward(retain_graph=True)
    _, z = squares(offload, 4)
    assert (offload.host_bytes, offload.device_bytes) == (8 * MB_BYTES, MB_BYTES)
    del x, y
    z.sum().backward()
    assert (offload.host_bytes, offload.device_bytes) == (0, 0)


def test_a_graph_is_used_twice() -> None:
    offload = Offload(Offloaded(), virtual())
    x, y = squares(offload, 4)
    loss = y.sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    assert offload.device_bytes == 0, "what came back is let go of"
    assert offload.device_peak_bytes == 2 * MB_BYTES, "also while the graph stays"
    loss.backward()
    assert torch.equal(x.grad, first)


def test_a_part_of_a_graph_leaves_nothing_on_the_device() -> None:
    offload = Offload(Offloaded(), virtual())
    hooks = hooks_of(offload)
    x = torch.ones(MB, requires_grad=True)
    mid = hooks.run(1, torch.square, hooks.run(0, torch.square, x * 1.0))
    y = hooks.run(3, torch.square, hooks.run(2, torch.square, mid))
    torch.autograd.grad(y.sum(), mid, retain_graph=True)
    assert offload.device_bytes == 0, "that of unit 1 had been issued"
    y.sum().backward()
    assert x.grad.unique().tolist() == [16.0]


def test_two_forwards_before_one_backward() -> None:
    offload = Offload(Offloaded(), virtual())
    pairs = [squares(offload, 3), squares(offload, 3)]
    sum(y.sum() for _, y in pairs).backward()
    plain = torch.full((MB,), 1.01, requires_grad=True)
    (((plain * 1.0) ** 2) ** 2).square().sum().backward()
    assert all(torch.equal(x.grad, plain.grad) for x, _ in pairs)
    assert (offload.host_bytes, offload.device_bytes) == (0, 0)


def test_forwards_without_gradients_move_nothing() -> None:
    offload = Offload(Offloaded(), virtual())
    with torch.no_grad():
        Squares(3, hooks_of(offload))(torch.ones(MB))
    assert offload.host_peak_bytes == 0


def test_derivatives_of_derivatives() -> None:
    offload = Offload(Offloaded(), virtual())
    x = torch.full((4,), 2.0, requires_grad=True)
    y = hooks_of(offload).run(1, torch.square, hooks_of(offload).run(0, torch.square, x * 1.0))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert (grad.tolist(), second.tolist()) == ([32.0] * 4, [48.0] * 4)


def test_saved_tensors_can_be_read_outside_a_backward() -> None:
    offload = Offload(Offloaded(), virtual())
    x, y = squares(offload, 2)
    assert y.grad_fn._saved_self.shape == (MB,)
    assert offload.device_bytes <= MB_BYTES
    y.sum().backward()
    assert x.grad is not None


def test_backwards_on_several_threads() -> None:
    offload = Offload(Offloaded(), EmulatedBus())
    graphs = [squares(offload, 4) for _ in range(4)]
    threads = [threading.Thread(target=y.sum().backward) for _, y in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = torch.full((MB,), 1.01, requires_grad=True)
    (plain * 1.0).square().square().square().square().sum().backward()
    assert all(torch.equal(x.grad, plain.grad) for x, _ in graphs)
    put(offload, torch.ones(2))
    assert offload.host_bytes == 8
    assert offload.device_bytes == 8


def test_inputs_of_recomputed_modules_move() -> None:
    bus = virtual()
    hooks = hooks_of(Offload(Offloaded(), bus))
    x = torch.rand(MB).requires_grad_()
    y = x * 1.0
    for unit in range(3):
        y = hooks.run(unit, lambda t: checkpoint(lambda s: s.sin().exp().cos(), t, use_reentrant=False), y)
    y.sum().backward()
    plain = x.detach().clone().requires_grad_()
    z = plain * 1.0
    for _ in range(3):
        z = z.sin().exp().cos()
    z.sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert [(t.lane, t.nbytes) for t in bus.transfers] == [("out", MB_BYTES)] * 3 + [("back", MB_BYTES)] * 2


# -- host memory ------------------------------------------------------------------------------------------------------


def test_a_buffer_has_the_size_of_its_tensor_and_serves_others_up_to_a_quarter_smaller() -> None:
    pool = HostPool(EmulatedBus())
    first = pool.take(1001)
    assert (first.whole.numel(), pool.total_bytes) == (1001, 1001)
    pool.give(first)
    smaller = pool.take(801)
    assert smaller.whole is first.whole
    assert smaller.memory.shape == (801,)
    assert (pool.total_bytes, pool.in_use_bytes) == (1001, 801)
    pool.give(smaller)
    larger = pool.take(1002)
    assert larger.whole.numel() == 1002
    assert first.whole.numel() not in pool._free, "the pool had no room for both"


def test_lengths_that_vary_pin_nothing_after_the_longest() -> None:
    """Each step has hidden values and products four times as large, of another length."""
    bus, pinned = EmulatedBus(), Counter[int]()
    pool, allocate = HostPool(bus), bus.allocate

    def counted(nbytes: int) -> Tensor:
        pinned[nbytes] += 1
        return allocate(nbytes)

    bus.allocate = counted  # type: ignore[method-assign]
    lengths = random.Random(0)
    for step in range(60):
        length = 2048 if step == 20 else lengths.randrange(512, 2048, 64)
        before = pinned.total()
        buffers = [pool.take(length * each) for each in (16, 64) * 6]
        for buffer in buffers:
            pool.give(buffer)
        assert step < 30 or pinned.total() == before
        assert pool.total_bytes <= 1.5 * pool.peak_bytes
    assert pool.peak_bytes == 2048 * 80 * 6


def test_the_best_of_the_free_buffers_is_used() -> None:
    pool = HostPool(EmulatedBus())
    buffers = [pool.take(nbytes) for nbytes in (1200, 1050, 1100)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.take(1040).whole is buffers[1].whole
    assert pool.take(1040).whole is buffers[2].whole
    assert pool.take(900).whole is buffers[0].whole, "the pool is full"


def test_the_pool_is_bounded() -> None:
    pool = HostPool(EmulatedBus())
    for nbytes in range(1000, 100_000, 500):
        buffers = [pool.take(nbytes) for _ in range(3)]
        assert all(buffer.memory.shape == (nbytes,) for buffer in buffers)
        for buffer in buffers:
            pool.give(buffer)
        assert pool.total_bytes <= 1.25 * pool.peak_bytes + 3 * nbytes * 0.25
    assert pool.in_use_bytes == 0


# -- CUDA -------------------------------------------------------------------------------------------------------------


class FakeEvent:
    def __init__(self, cuda: "FakeCuda", stream: "FakeStream") -> None:
        self.stream, self.place = stream, len(stream.told)
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name, self.told = cuda, name, []

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.cuda, self)

    def wait_event(self, event: FakeEvent) -> None:
        self.told.append(("after", event.stream.name, event.place))


class FakeCuda:
    """Streams that note what they are told."""

    def __init__(self) -> None:
        self.compute = FakeStream(self, "compute")
        self.now = self.compute
        self.made: list[FakeStream] = []

    def Stream(self, device: Any) -> FakeStream:
        self.made.append(FakeStream(self, ("out", "back")[len(self.made)]))
        return self.made[-1]

    def current_stream(self, device: Any) -> FakeStream:
        return self.now

    def stream(self, stream: FakeStream) -> Any:
        return Inside(self, stream)


class Inside:
    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self.cuda, self.stream = cuda, stream

    def __enter__(self) -> None:
        self.before, self.cuda.now = self.cuda.now, self.stream
        self.stream.told.append(("copy",))

    def __exit__(self, *_: Any) -> None:
        self.cuda.now = self.before


def fake_bus() -> tuple[CudaBus, FakeCuda]:
    cuda = FakeCuda()
    bus = CudaBus(torch.device("cpu"), cuda)
    bus.allocate = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
    bus.small_bytes = 0
    return bus, cuda


def test_streams_wait_for_one_another() -> None:
    bus, cuda = fake_bus()
    out_lane, back_lane = cuda.made
    assert CudaBus(torch.device("cpu"), cuda)._lanes == bus._lanes, "all buses of a device share its lanes"
    source, host = torch.arange(4, dtype=torch.uint8), bus.allocate(4)
    out = bus.out(source, host, None)
    assert out_lane.told == [("after", "compute", 0), ("copy",)], "after what the compute stream was told"
    assert not bus.is_done(out)
    back, arrival = bus.back(host, out)
    # After what may still use that memory, and after the bytes are on the host.
    assert back_lane.told == [("after", "compute", 0), ("after", "out", 2), ("copy",)]
    assert cuda.compute.told == [], "nobody has waited yet"
    bus.wait(arrival, back)
    assert cuda.compute.told == [("after", "back", 3)] and arrival.is_waited
    assert torch.equal(back, source)
    bus.out(source, host, arrival)
    assert out_lane.told[2:] == [("after", "compute", 1), ("after", "back", 3), ("copy",)], "after the last reader"


def test_the_stream_that_asked_for_memory_waits_also_if_another_uses_it() -> None:
    bus, cuda = fake_bus()
    host = bus.allocate(4)
    back, arrival = bus.back(host, bus.out(torch.ones(4, dtype=torch.uint8), host, None))
    cuda.now = other = FakeStream(cuda, "other")
    recorded = []

    class Memory:
        def record_stream(self, stream: Any) -> None:
            recorded.append(stream)

    bus.wait(arrival, Memory())  # type: ignore[arg-type]
    assert other.told == cuda.compute.told == [("after", "back", 3)]
    assert recorded == [other]
    assert back is not None


def test_what_came_back_in_vain_is_not_freed_under_its_copy() -> None:
    bus, cuda = fake_bus()
    offload = Offload(Offloaded(), bus)
    hooks = hooks_of(offload)
    x = torch.ones(MB, requires_grad=True)
    mid = hooks.run(1, torch.square, hooks.run(0, torch.square, x * 1.0))
    y = hooks.run(3, torch.square, hooks.run(2, torch.square, mid))
    waits = len(cuda.compute.told)
    torch.autograd.grad(y.sum(), mid)
    # Unit 2's copy was used and unit 1's was not: the compute stream waits for both before their memory is free.
    assert [told for told in cuda.compute.told[waits:] if told[1] == "back"] == [
        ("after", "back", 3),
        ("after", "back", 6),
    ]
    assert offload.device_bytes == 0


def test_a_whole_step_over_streams() -> None:
    bus, cuda = fake_bus()
    offload = Offload(Offloaded(), bus)
    x, y = squares(offload, 4)
    assert [told[:2] for told in cuda.compute.told] == [("after", "out")] * 3, "one for each unit that is let go of"
    y.sum().backward()
    assert [told[:2] for told in cuda.compute.told[3:]] == [("after", "back")] * 3
    plain = torch.full((MB,), 1.01, requires_grad=True)
    (plain * 1.0).square().square().square().square().sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert len(offload._busy) == 1, "the last unit's tensor, whose copy is not over"
    told = len(cuda.compute.told)
    _, again = squares(offload, 4)
    assert len(offload._busy) == 0
    assert cuda.compute.told[told] == ("after", "out", 8), "the compute stream has waited for it"
    # Host memory is written again after the last copy that read it: three buffers were read, one never.
    assert [told[:2] for told in cuda.made[0].told[8:] if told[0] == "after"].count(("after", "back")) == 3
    assert again is not None


@pytest.mark.gpu
def test_a_step_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def run(offload: Offload | None) -> tuple[Tensor, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        x = torch.rand(8 * MB, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        hooks = None if offload is None else hooks_of(offload)
        y = x * 1.0
        for unit in range(12):
            y = torch.sin(y) if hooks is None else hooks.run(unit, torch.sin, y)
        y.sum().backward()
        torch.cuda.synchronize()
        return x.grad.cpu(), torch.cuda.max_memory_allocated()

    plain, most = run(None)
    offload = Offload(Offloaded())
    for _ in range(5):
        grad, less = run(offload)
        assert torch.equal(grad, plain)
    assert less < most - 5 * 8 * MB_BYTES
    assert offload.host_peak_bytes == 12 * 8 * MB_BYTES


@pytest.mark.gpu
def test_the_host_never_waits_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    offload = Offload(Offloaded())
    hooks = hooks_of(offload)
    for step in range(3):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            y = torch.ones(MB, device=device, requires_grad=True)
            for unit in range(6):
                y = hooks.run(unit, torch.sin, y)
            y.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_pinned_memory_is_that_of_the_pool() -> None:
    assert CudaBus(torch.device("cuda", torch.cuda.current_device())).allocate(1000).is_pinned()


# -- through shard() --------------------------------------------------------------------------------------------------


ASKED = (None, "offload", "recompute+offload", zs.Offloaded(0.5), {"blocks.*": "recompute+offload"})


def train(stage: int, kind: str) -> list[dict[str, Any]]:
    """Train with each treatment; return what it came to, and what was copied."""
    return [train_with(stage, kind, activations) for activations in ASKED]


def train_with(stage: int, kind: str, activations: Any) -> dict[str, Any]:
    bus = virtual()
    zeroshard.activations.LINKS = {Offloaded: lambda cell, comm: Offload(cell, bus)}
    if kind == "stack":
        model, loss_of = models.build(models.Stack, 4), models.stack_loss
    else:
        model, loss_of = models.build(models.GPT, 3), models.gpt_loss
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, activations=activations, settings=zs.Settings(watchdog_s=10.0))
    losses = []
    for step in range(3):
        for micro in range(2):
            loss = loss_of(model, step, zero.mesh.rank, micro)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    lanes = [t.lane for t in bus.transfers]
    return {"losses": losses, "weights": weights, "out": lanes.count("out"), "back": lanes.count("back")}


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_no_bit_changes(stage: int, world: int) -> None:
    for kept, *others in run_ranks(train, world, stage, ("stack", "gpt")[stage % 2], timeout_s=TIMEOUT_S):
        assert kept["out"] == 0
        for one in others:
            assert one["losses"] == kept["losses"]
            assert all(torch.equal(one["weights"][name], weight) for name, weight in kept["weights"].items())
            assert one["out"] >= one["back"] > 0
        alone, recomputed, half, blocks = (one["out"] for one in others)
        assert alone > recomputed > blocks
        assert alone > half > alone // 4


def test_no_bit_changes_over_the_bus_of_a_cpu() -> None:
    """Without a bus of the test's, too."""
    model = models.build(models.Stack)
    plain = models.build(models.Stack)
    zs.shard(model, models.adamw(model), stage=0, activations="recompute+offload")
    losses = [models.stack_loss(one, 0, 0) for one in (model, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_range_has_all_views_of_its_storage_whichever_comes_first() -> None:
    whole = torch.arange(4096.0)
    late, early, alone = whole[2048:], whole[256:512], torch.ones(8)
    found = [(one.low, one.high) for one in spans_in([late, early, alone]).values()]
    assert found == [(1024, 16384), (0, 32)]
    memory = bytes_of(whole, 1024, 16384 - 1024).clone()
    for view in (late, early):
        assert torch.equal(place_of(view, 1024).of(memory), view)
