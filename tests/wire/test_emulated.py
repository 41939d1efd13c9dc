"""The emulated GPU finds what a GPU would compute wrongly or wait for: planted defects, one by one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, WATCHDOG_S, Case, assert_same, engine_run, single_run
from tools.emulated import Device, EmulatedLinks, gpu
from zeroshard.table.trace import Ledger
from zeroshard.testing import run_ranks
from zeroshard.wire.codec import Rounded
from zeroshard.wire.comm import Pending, Tag
from zeroshard.wire.links import Links
from zeroshard.wire.mesh import current_mesh
from zeroshard.wire.nccl import NcclComm

STEPS = 4
WARM = 2
"""Steps after which passes are recorded."""
CASE = Case(lambda: models.build(models.GPT), models.gpt_loss, partial(models.adamw, fused=True), steps=STEPS)
"""On a device the engine chooses fused kernels, which round as themselves alone."""

Found = tuple[list[float], list[str], list[str]]


def train(plant: Callable[[Device], Any] | None) -> Found:
    """Train on an emulated GPU with something planted after the first steps; return losses, defects and waits."""
    device, losses, text = Device(), list[float](), ""
    try:
        with gpu() as device:
            model = CASE.build()
            optimizer = CASE.optimizer(model)
            settings = zs.Settings(watchdog_s=WATCHDOG_S)
            zs.shard(model, optimizer, stage=3, settings=settings)
            for step in range(STEPS):
                if step == WARM:
                    device.host_waits.clear()
                    device.eagerness = 0.0
                    if plant is not None:
                        plant(device)
                loss = CASE.loss(model, step, dist.get_rank())
                loss.backward()
                losses.append(loss.item())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    except (AssertionError, RuntimeError) as error:
        text = "\n".join([str(error), *device.found()])
    return losses, text.splitlines(), device.host_waits


def no_wait(device: Device) -> None:
    """Every second gather is not waited for."""
    gather, count, device.eagerness = NcclComm.gather, 0, 1.0

    def forgetful(self: NcclComm, *given: Any, **options: Any) -> Pending:
        nonlocal count
        count += 1
        pending = gather(self, *given, **options)
        return pending if count % 2 else Pending(lambda: None)

    NcclComm.gather = forgetful  # type: ignore[method-assign]


def read_first(device: Device) -> None:
    """The stream waits for a gather when the next collective is issued, not before it is read."""
    late: list[Any] = []
    wait, issue = Device.wait, Device.issue

    def later(self: Device, work: Any) -> None:
        if work.name.startswith("all-gather"):
            late.append(work)
        else:
            wait(self, work)

    def issue_after(self: Device, stream: str, work: Any) -> Any:
        while late:
            wait(self, late.pop())
        return issue(self, stream, work)

    Device.wait, Device.issue = later, issue_after  # type: ignore[method-assign]


def reuse(device: Device) -> None:
    """A buffer of gradients is given to somebody else, who clears it, when its reduction is issued."""
    reduce = NcclComm.reduce

    def careless(self: NcclComm, full: Tensor, *rest: Any) -> Pending:
        pending = reduce(self, full, *rest)
        full.zero_()
        return pending

    NcclComm.reduce = careless  # type: ignore[method-assign]


def host_wait(device: Device) -> None:
    """Waits are the host's, with the watchdog's limit."""

    def wait(self: Links, work: Any, what: str, **options: Any) -> None:
        self.wait([work], what)

    EmulatedLinks.wait_on_stream = wait  # type: ignore[method-assign]


def launch(*given: Any) -> list[Found]:
    return run_ranks(train, 2, *given, timeout_s=TIMEOUT_S)


def test_nothing_is_found_where_nothing_is_planted() -> None:
    expected = single_run(Case(CASE.build, CASE.loss, CASE.optimizer, steps=STEPS, clip=1.0), 2)
    for rank, (losses, defects, waits) in enumerate(launch(None)):
        assert losses == expected["losses"][rank]
        assert (defects, waits) == ([], [])


def test_a_missing_wait_is_found() -> None:
    for _, defects, _ in launch(no_wait):
        assert any("nobody waited for it" in line or "nobody has waited for" in line for line in defects), defects


def test_a_read_before_its_wait_is_found() -> None:
    for losses, defects, _ in launch(read_first):
        assert all(loss == loss for loss in losses[:WARM])
        assert losses[WARM] != losses[WARM] or any("is not finite" in line for line in defects), (losses, defects)


def test_memory_that_is_used_again_before_its_collective_ended_is_found() -> None:
    for _, defects, _ in launch(reuse):
        assert any("overwritten before it ended" in line or "written to before" in line for line in defects), defects


def test_a_wait_of_the_host_in_the_steady_state_is_found() -> None:
    for _, defects, waits in launch(host_wait):
        assert defects == []
        assert any(name.startswith("all-gather") for name in waits)


def on_device(*, has_all: bool = True, eagerness: float = 0.0) -> tuple[NcclComm, Device]:
    device = Device(eagerness=eagerness)
    return NcclComm(EmulatedLinks(current_mesh(), 20.0, 20.0, device, has_all=has_all), Ledger()), device


def free_early() -> list[str]:
    """Free what a gather fills, and what another one reads, before they end."""
    comm, device = on_device()
    full = torch.zeros(64)
    work = comm.all_gather(full, full[32 * comm.mesh.rank :][:32], group=comm.links.groups["all"], async_op=True)
    full.untyped_storage().resize_(0)
    work.wait()
    full, own = torch.zeros(64), torch.ones(32)
    work = comm.all_gather(full, own, group=comm.links.groups["all"], async_op=True)
    del own
    work.wait()
    return device.defects


def test_memory_that_is_freed_before_its_collective_ended_is_found() -> None:
    for defects in run_ranks(free_early, 2, timeout_s=TIMEOUT_S):
        assert sum("freed before it ended" in line for line in defects) >= 2, defects


def things_of_the_host() -> tuple[int, list[str], Tensor, Tensor, Tensor]:
    """Send what lies on the host: an AdamW's step, a buffer of integers, and texts."""
    comm, device = on_device(has_all=False)
    rank = comm.mesh.rank
    step, whole = torch.tensor(3.0 + rank), torch.arange(6, dtype=torch.int16).view(2, 3) + rank
    comm.broadcast(step, "a step", "state")
    comm.broadcast(whole, "a buffer", "start")
    rows = comm.collect(torch.tensor([rank, 7], dtype=torch.int16), "rows")
    return device.issued, comm.texts(f"rank {rank}", "texts"), step, whole, rows


def test_what_lies_on_the_host_never_touches_the_device() -> None:
    for issued, texts, step, whole, rows in run_ranks(things_of_the_host, 2, timeout_s=TIMEOUT_S):
        assert issued == 0
        assert texts == ["rank 0", "rank 1"]
        assert_same(torch.tensor(3.0), step)
        assert_same(torch.arange(6, dtype=torch.int16).view(2, 3), whole)
        assert_same(torch.tensor([[0, 7], [1, 7]], dtype=torch.int16), rows)


def scaled(held: torch.dtype, wire: str, scale: float, value: float) -> float:
    """Reduce one value of all ranks; return the shard's."""
    comm, device = on_device()
    ranks = comm.mesh.world_size
    full, own = torch.full((4 * ranks,), value, dtype=held), torch.zeros(4, dtype=held)
    comm.reduce(full, own, Rounded(wire), scale, Tag(0, 0, "a reduction")).wait()
    device.check()
    assert bool((full == value).all())
    return float(own[0])


@pytest.mark.product
@pytest.mark.parametrize(
    ("held", "wire", "scale", "value", "expected"),
    [
        (torch.float32, "float16", 1 / 3, 40000.0, 40000.0),  # 3 times that is more than fp16 has
        (torch.float32, "float16", 1.0, 40000.0, 120000.0),
        (torch.float16, "float16", 1 / 3, 40000.0, 40000.0),
        (torch.float32, "bfloat16", 1 / 3, 1.0, 1.0),
        (torch.bfloat16, "bfloat16", 1 / 3, 1.0, 1.0),
        (torch.float32, "float32", 1 / 6, 3.0, 1.5),
        (torch.float64, "float64", 1.0, 3.0, 9.0),
    ],
)
def test_a_scale_is_a_part_of_the_reduction(
    held: torch.dtype, wire: str, scale: float, value: float, expected: float
) -> None:
    step = 2 * torch.finfo(getattr(torch, wire)).eps
    for found in run_ranks(scaled, 3, held, wire, scale, value, timeout_s=TIMEOUT_S):
        assert abs(found - expected) <= step * expected, found


def test_parity_of_all_stages_on_the_device() -> None:
    expected = single_run(CASE, 3)
    for rank, by_stage in enumerate(run_ranks(all_stages, 3, timeout_s=TIMEOUT_S)):
        for stage, found in by_stage.items():
            assert_same(expected["losses"][rank], found["losses"], f"stage {stage}")
            assert_same(expected["parameters"], found["parameters"], f"stage {stage}")


def all_stages() -> dict[int, Any]:
    found = {}
    for stage in range(4):
        with gpu(stage):
            found[stage] = engine_run(CASE, stage)
    return found
