"""What the launcher says of the network, and what is refused; the ranks along the axes of a mesh."""

import contextlib
import os
import socket

import pytest
import torch

from zeroshard.wire import mesh
from zeroshard.wire.mesh import Mesh, find_launch, refuse_blocking_nccl


def launched(monkeypatch: pytest.MonkeyPatch, address: str, local: int) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def chosen(monkeypatch: pytest.MonkeyPatch, address: str, local: int) -> str | None:
    launched(monkeypatch, address, local)
    find_launch()
    return os.environ.pop("GLOO_SOCKET_IFNAME", None)


def test_ranks_of_one_host_use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "192.0.2.1", 4) == "lo"


def test_ranks_of_several_hosts_use_the_interface_towards_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this host has no route to other networks")
        own = asking.getsockname()[0]
    name = chosen(monkeypatch, "192.0.2.1", 2)
    assert name in {name for _, name in socket.if_nameindex()} - {"lo"}
    # Where this is the master's host, its own address is told, or what its name stands for there.
    assert chosen(monkeypatch, own, 2) == name
    assert chosen(monkeypatch, "127.0.1.1", 2) == name


def test_without_a_route_gloo_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "OTHER_NETWORK", "127.0.0.1")
    assert chosen(monkeypatch, "127.0.0.1", 2) is None


def test_a_given_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, "192.0.2.1", 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    find_launch()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_communicators_of_nccl_run_in_one_order(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    launched(monkeypatch, "192.0.2.1", 4)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    find_launch()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == expected


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_waits_of_nccl_that_stop_the_host_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str, is_refused: bool
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
    says = f"TORCH_NCCL_BLOCKING_WAIT={value} makes the host wait"
    with pytest.raises(RuntimeError, match=says) if is_refused else contextlib.nullcontext():
        refuse_blocking_nccl()


def test_the_last_axis_is_over_neighbouring_ranks_and_ranks_along_axes_are_in_order() -> None:
    axes = (("replicate", 2), ("shard", 3), ("tensor", 2))
    one = Mesh(9, 12, 0, torch.device("cpu"), axes)
    assert (one.tensor_ranks, one.shard_ranks, one.replica_ranks) == ((8, 9), (7, 9, 11), (3, 9))
    assert one.data_ranks == (1, 3, 5, 7, 9, 11)
    other = Mesh(9, 12, 0, torch.device("cpu"), axes[::-1])
    assert (other.tensor_ranks, other.shard_ranks, other.replica_ranks) == ((3, 9), (7, 9, 11), (8, 9))
    assert other.data_ranks == (6, 7, 8, 9, 10, 11)
