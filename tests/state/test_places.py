"""Each rank has a CUDA device of its own, or all ranks learn why not; CUDA's answers are made up here."""

import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard import devices
from zeroshard.join.start import everybody_at
from zeroshard.testing import run_ranks
from zeroshard.wire.mesh import current_mesh

TIMEOUT_S = 40.0


def pretend(count: int, *, name: str = "GPU-{0}", current: int = 0) -> list[str]:
    """Answer for CUDA, and for a torch with NCCL; return what is done, in order."""
    done: list[str] = []
    plain = dist.init_process_group

    def join(backend: str, *, device_id: torch.device | None = None, **options: Any) -> None:
        done.append(f"init_process_group({backend!r}, device_id={device_id})")
        plain("gloo", **options)

    devices.count = lambda: count
    devices.current = lambda: current
    devices.use = lambda device: done.append(f"set_device({device})")
    devices.identity = lambda device: name.format(device.index)
    dist.init_process_group = join
    return done


def at_init(
    counts: Sequence[int],
    names: Sequence[str] = (),
    local_ranks: Sequence[str | None] = (),
    currents: Sequence[int] = (),
    retry: int | None = None,
) -> list[str]:
    """Join with what each rank is told of its devices; return what it did, and the error."""
    rank = int(os.environ["RANK"])
    if local_ranks:
        os.environ.pop("LOCAL_RANK", None)
        if (mine := local_ranks[rank]) is not None:
            os.environ["LOCAL_RANK"] = mine
    done = pretend(counts[rank], name=names[rank] if names else "GPU-{0}", current=currents[rank] if currents else 0)
    for _ in range(2 if retry is not None else 1):
        try:
            zs.init(watchdog_s=20.0)
        except RuntimeError as error:
            done.append(str(error))
            if retry is not None and rank == retry:
                devices.current = lambda: retry
    if dist.is_initialized():
        dist.destroy_process_group()
    return done


def test_each_rank_s_device_is_set_before_it_joins() -> None:
    expected = ["set_device(cuda:{0})", "init_process_group('nccl', device_id=cuda:{0})"]
    for rank, done in enumerate(run_ranks(at_init, 2, [2, 2], timeout_s=TIMEOUT_S, process_group=False)):
        assert done[:2] == [text.format(rank) for text in expected]


def test_a_device_that_the_program_chose_is_kept() -> None:
    # Rank 0 has chosen cuda:1, and rank 1, without LOCAL_RANK, cuda:2.
    found = run_ranks(at_init, 2, [3, 3], [], ["0", None], [1, 2], timeout_s=TIMEOUT_S, process_group=False)
    assert [done[0] for done in found] == ["set_device(cuda:1)", "set_device(cuda:2)"]


def test_a_launcher_may_show_each_rank_one_device_of_its_own() -> None:
    found = run_ranks(at_init, 2, [1, 1], ["GPU-a", "GPU-b"], timeout_s=TIMEOUT_S, process_group=False)
    assert [done[0] for done in found] == ["set_device(cuda:0)"] * 2


@pytest.mark.parametrize(
    ("ranks", "arguments", "texts"),
    [
        (
            2,
            ([2, 2], [], [None, None]),
            r"has cuda:0, which is also the device of rank [01]: LOCAL_RANK is not set, and this process sees 2 CUDA",
        ),
        (2, ([1, 1],), r"has cuda:0, which is also the device of rank [01]: LOCAL_RANK is [01], .* sees 1 CUDA"),
        (3, ([2, 2, 2],), r"has no cuda:2: LOCAL_RANK is 2, and this process sees 2 CUDA device"),
        (2, ([2, 0],), r"has the backend '(nccl|gloo)' here and '(nccl|gloo)' on another rank.*backend='gloo'"),
    ],
    ids=["no LOCAL_RANK", "one device for two", "more ranks than devices", "a host without devices"],
)
def test_devices_that_will_not_do_are_refused_on_all_ranks(ranks: int, arguments: Any, texts: str) -> None:
    found = run_ranks(at_init, ranks, *arguments, timeout_s=TIMEOUT_S, process_group=False)
    assert [len(done) for done in found] == [1] * ranks, "nobody has joined"
    own = [rank for rank, (text,) in enumerate(found) if re.search(rf"\[rank \d/\d\] zs.init\(\) {texts}", text)]
    assert len(own) == 1
    for rank, (text,) in enumerate(found):
        assert rank in own or re.search(
            rf"zs.init\(\) was rejected on another rank, and therefore on all. rank {own[0]}: {texts}", text
        )


def test_ranks_may_join_after_a_refusal() -> None:
    # The rank that came second to cuda:0 is told so; both try again, rank 1 with another device.
    found = run_ranks(at_init, 2, [2, 2], [], [None, None], [], 1, timeout_s=TIMEOUT_S, process_group=False)
    assert [done[1] for done in found] == ["set_device(cuda:0)", "set_device(cuda:1)"]


def at_shard() -> list[str]:
    """Meet at `zs.shard()` with a process group that the user made, and whose config names NCCL for CUDA devices."""
    pretend(2)
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    dist.get_backend = lambda group=None: "undefined"
    del os.environ["LOCAL_RANK"]
    mesh, texts = current_mesh(), []
    texts.append(str(mesh.device))
    try:
        with everybody_at("zs.shard()", mesh, 20.0, 10.0):
            texts.append("all are here")
    except RuntimeError as error:
        texts.append(str(error))
    return texts


def test_a_group_without_a_named_backend_is_asked_what_it_uses() -> None:
    found = run_ranks(at_shard, 2, timeout_s=TIMEOUT_S)
    assert [device for device, _ in found] == ["cuda:0"] * 2
    assert sum("which is also the device of rank" in text for _, text in found) == 2
    assert sum("was rejected on another rank" in text for _, text in found) == 1


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda:nccl", "cuda:1"),
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:fake,cuda:fake", "cuda:1"),
        ("cpu:ucc,cuda:ucc", "cpu"),
    ],
)
def test_the_device_follows_the_group_s_backend_for_it(
    config: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(devices, "count", lambda: 2)
        monkeypatch.setattr(devices, "current", lambda: 0)
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
        assert str(current_mesh().device) == device
    finally:
        dist.destroy_process_group()
