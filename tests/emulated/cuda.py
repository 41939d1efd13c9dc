"""Two CUDA devices in emulation, for tests of what code does with devices where there is no GPU.

Owns `cuda.cpp` beside it: how it is built, loaded and asked. It has to be there before torch looks for CUDA, once a
process, so `run` starts an interpreter for each case. Tests of values on real kernels need a GPU all the same.

    python -m tests.emulated.cuda tests.emulated.cases:moved      # one case by itself
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["Devices", "build", "run"]

SOURCE: Final = Path(__file__).with_name("cuda.cpp")
REPOSITORY: Final = Path(__file__).parents[2]
COMPILER: Final = "g++"
BUILD_S: Final = 600.0
"""Half a minute of a core that is not busy otherwise."""
RUN_S: Final = 120.0
STREAMS: Final = {"back": 1234, "readers": 1235, "out": 1236}
"""The separate streams, by use."""


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def build() -> Path | str:
    """Return the library, built once for each torch and source; why there is none, where there is none."""
    if shutil.which(COMPILER) is None:
        return f"needs {COMPILER}"
    torch = _torch()
    if (torch / "lib" / "libtorch_cuda.so").exists():
        return "needs a build of torch without CUDA"
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"zeroshard-emulated-{os.getuid()}-{key}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        links = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [COMPILER, "-O0", "-std=c++20", "-fPIC", "-shared", *includes, str(SOURCE), "-o", str(made), *links]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[:4000])
        made.replace(path)
    return path


def run(case: str, **variables: str) -> Any:
    """Run a function "module:name" in an interpreter with emulated devices; return what it returns, as JSON has it."""
    path = build()
    assert isinstance(path, Path), path
    known = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    done = subprocess.run(
        [sys.executable, "-m", __name__, case],
        cwd=REPOSITORY,
        env=known | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{case}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


class Event:
    """A mark in a stream whose kernels have run when they are launched."""

    def __init__(self, devices: "Devices") -> None:
        self._devices, self._stream = devices, devices.stream()

    def wait(self) -> None:
        self._devices.waits.append((self._stream, self._devices.stream()))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class Devices:
    """What stands for CUDA in this process; it is in the place of the functions of `zeroshard.devices`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        import torch

        from zeroshard import devices

        self._library, self.is_capturing_now = library, False
        self.number = 2
        """How many there seem to be; two work."""
        self.waits: list[tuple[int, int]] = []
        """(from, to): streams that were told to wait for another one."""
        library.emulated_held.restype = library.emulated_peak.restype = library.emulated_stream.restype = ctypes.c_int64
        torch.cuda._lazy_init = lambda: None
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, nbytes: int) -> None:
            if storage.device.type != "cuda":
                plain(storage, nbytes)
            else:
                library.emulated_resize(ctypes.c_void_p(storage._cdata), ctypes.c_int64(nbytes))

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        devices.count = lambda: self.number
        devices.current = lambda: int(library.emulated_device())
        devices.use = lambda device: library.emulated_use_device(device.index)
        devices.identity = lambda device: f"GPU-{device.index}"
        devices.free_bytes = lambda device: 1 << 40
        devices.stream_of = lambda device: self.stream(device.index or 0)
        devices.is_capturing = lambda: self.is_capturing_now
        devices.mark = lambda device: Event(self)
        devices.lane = lambda device, use, after: self._on(STREAMS[use], after)
        devices.on_stream = lambda device, stream: self._to(stream)
        devices.used_on = lambda device, use, memory: None
        devices.pinned = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cpu")
        devices.order_after = lambda device, stream: self.waits.append((stream, self.stream(device.index or 0)))

    @contextmanager
    def _on(self, stream: int, after: Event | None) -> Iterator[None]:
        """Let what is launched inside go to a stream of its own, after a mark."""
        before = self.stream()
        if after is not None:
            self.use_stream(stream)
            after.wait()
        try:
            yield
        finally:
            self.use_stream(before)

    @contextmanager
    def _to(self, stream: int) -> Iterator[None]:
        """Make a stream the current one inside."""
        before = self.stream()
        self.use_stream(stream)
        try:
            yield
        finally:
            self.use_stream(before)

    def stream(self, device: int = 0) -> int:
        """Return this thread's current stream."""
        return int(self._library.emulated_stream(device))

    def use_stream(self, stream: int, device: int = 0) -> None:
        """Make a stream this thread's current one."""
        self._library.emulated_use_stream(device, ctypes.c_int64(stream))

    def use(self, device: int) -> None:
        """Make a device this thread's current one."""
        self._library.emulated_use_device(device)

    def held_bytes(self, device: int = 0) -> int:
        """Return the bytes of a device that are in use."""
        return int(self._library.emulated_held(device))

    def peak_bytes(self, device: int = 0) -> int:
        """Return the most bytes of a device that were in use since `reset`."""
        return int(self._library.emulated_peak(device))

    def reset(self, device: int = 0) -> None:
        """Count the peak anew."""
        self._library.emulated_reset(device)


def main(case: str) -> None:
    """Run one case in this interpreter, which has not imported torch."""
    assert "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(build()))
    module, _, name = case.partition(":")
    devices = Devices(library)
    found = getattr(importlib.import_module(module), name)(devices)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
