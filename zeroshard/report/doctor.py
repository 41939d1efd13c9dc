"""The measurement of a machine: matrix products, memory and collectives, as a profile for plans.

Owns the measurements, and the fit of a collective's times. `plan/machine/profiles.py` stores profiles.
"""

import dataclasses
import functools
import os
import platform
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final

import torch

from zeroshard.plan.machine.hardware import Device
from zeroshard.wire.comm import gather_across_ranks

__all__ = ["fit_line", "measure_device", "measure_ranks"]

ROUNDS: Final = 7
PRODUCT: Final = MappingProxyType({"cpu": 1024, "cuda": 8192})
"""Rows and columns of the measured products."""
COPY_BYTES: Final = MappingProxyType({"cpu": 1 << 28, "cuda": 1 << 30})
SENT_BYTES: Final = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the measured collectives."""


def measure_device() -> Device:
    """Measure this process's device: products in each dtype, and copies. Takes some seconds.

    Source: the minimum of several rounds, because other programs can only slow a kernel down.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    dtypes = [torch.float32, torch.bfloat16, torch.float16] if kind == "cuda" else [torch.float32, torch.bfloat16]
    peaks = {str(dtype).removeprefix("torch."): _product_flops(device, dtype) for dtype in dtypes}
    moved_bytes_per_s = _copy_bytes_per_s(device)
    return Device(
        f"{platform.node()}-{torch.cuda.get_device_name(device) if kind == 'cuda' else 'cpu'}",
        MappingProxyType(peaks),
        _memory_bytes(device),
        moved_bytes_per_s,
        moved_bytes_per_s,
        moved_bytes_per_s,
        _host_bytes_per_s(device, moved_bytes_per_s),
        node_ranks=torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1,
        host_bytes=_host_bytes(),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 1,
        # Measured rates are the reached rates.
        matmul_part=1.0,
        attention_part=1.0,
        memory_part=1.0,
        link_part=1.0,
        node_part=1.0,
        launch_s=_launch_s(device),
        context_bytes=_context_bytes(device),
        communicator_bytes=Device.communicator_bytes if kind == "cuda" else 0,
        host_memory_bytes_per_s=_copy_bytes_per_s(torch.device("cpu")) if kind == "cuda" else moved_bytes_per_s,
    )


def measure_ranks(device: Device, ranks: int) -> Device:
    """Return a device with the measured collectives of the joined ranks: latency of a hop, bandwidth of a link.

    Args:
        ranks: number of joined ranks.

    Collective: gathers of up to 16 MB from each rank; every rank must call.
    """
    if ranks == 1:
        return device
    where = torch.device("cpu" if device.is_cpu else "cuda")
    times: list[float] = []
    for nbytes in SENT_BYTES:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=where)
        times.append(_least_s(functools.partial(gather_across_ranks, own), where))
    hop_s, bytes_per_s = fit_line([nbytes * (ranks - 1) for nbytes in SENT_BYTES], times)
    found = gather_across_ranks(torch.tensor([hop_s / (ranks - 1), bytes_per_s], dtype=torch.float64, device=where))
    hop_s, bytes_per_s = float(found[:, 0].max()), float(found[:, 1].min())
    return dataclasses.replace(
        device,
        link_bytes_per_s=bytes_per_s,
        node_bytes_per_s=bytes_per_s,
        hop_s=hop_s,
        node_hop_s=hop_s,
        half_bytes=0.0,
    )


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Return (seconds at zero bytes, bytes per second) of the line with the least relative error.

    >>> from zeroshard.report.doctor import fit_line
    >>> start_s, rate = fit_line([1e3, 1e6, 1e9], [1e-3 + size / 1e9 for size in (1e3, 1e6, 1e9)])
    >>> round(start_s, 6), round(rate)
    (0.001, 1000000000)
    """
    weights = [1 / took_s**2 for took_s in times]
    total = sum(weights)
    x = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    above = sum(w * (s - x) * (t - y) for w, s, t in zip(weights, sizes, times, strict=True))
    below = sum(w * (s - x) ** 2 for w, s in zip(weights, sizes, strict=True))
    slope = max(above / below, 1e-15)
    return max(0.0, y - slope * x), 1 / slope


def _least_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the minimum seconds of several rounds, after one warm-up round."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    found = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start_s)
    return min(found)


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    size = PRODUCT[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _least_s(lambda: one @ other, device)


def _copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes that a copy reads and writes per second."""
    nbytes = COPY_BYTES[device.type]
    source, target = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / _least_s(lambda: target.copy_(source), device)


def _host_bytes_per_s(device: torch.device, otherwise: float) -> float:
    if device.type != "cuda":
        return otherwise
    nbytes = COPY_BYTES["cpu"]
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8).pin_memory(),
        torch.zeros(nbytes, dtype=torch.uint8, device=device),
    )
    return nbytes / _least_s(lambda: target.copy_(source, non_blocking=True), device)


def _launch_s(device: torch.device) -> float:
    """Return the seconds of one small operation in a long sequence."""
    x, many = torch.zeros(1, device=device), 1000

    def run() -> None:
        for _ in range(many):
            x.add_(1)

    return _least_s(run, device) / many


def _memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else _host_bytes()


def _context_bytes(device: torch.device) -> int:
    """Return the device bytes that this process uses outside torch's allocator, as reported by the driver."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device))


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
