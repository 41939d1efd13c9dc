"""Ranks as processes: launch with torchrun's launcher, join an existing launch, and stop on a signal.

Owns the child processes of `--ranks`, their environment, and signals. It must not know what the ranks do: each rank
runs the same command again and detects the launch. Read `launch_ranks` first, then `StopSignal`.

Note: Ctrl-C
    The launcher starts each rank in a session of its own, so the terminal signals only the launcher. The launcher
    forwards the signal and waits; the ranks finish their step, agree to stop, save, and exit. They have as long as a
    rank waits for other ranks (`zero.watchdog_s`). A second signal kills them. A rank that is still starting has
    nothing to save, and exits at once. A rank suspended by SIGSTOP is continued, because it cannot handle the signal.
Note: network
    Ranks of one host need no network: the launcher's store and gloo's connections use the loopback interface, which
    other hosts cannot reach.
Note: no orphans
    A killed launcher cannot forward a signal. Therefore each rank watches its parent process, and exits with it.
"""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self, final

__all__ = [
    "StopSignal",
    "follow_launcher",
    "is_first_rank",
    "is_own_launch",
    "joined_world_size",
    "launch_ranks",
    "name_launcher",
    "seconds_running",
    "shows_all",
]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Of these the last is that of a lost terminal; `nohup` has this process and its ranks ignore it."""
_LAUNCHER_SIGNALS: Final = (*_SIGNALS, signal.SIGQUIT)
"""Signals that torch's launcher handles."""
_LOOK_S: Final = 1.0
_LOOPBACK: Final = "127.0.0.1"
_LAUNCHER: Final = "ZEROSHARD_LAUNCHER"
"""Environment variable with the launcher's process id: the launcher may exit before its ranks read their parent."""
_TRACEBACK: Final = "ZEROSHARD_TRACEBACK"
_SETTINGS: Final = "SettingsError: "
"""Beginning of an error of the user's settings, which only ranks can find."""
_MISTAKE: Final = 2
_STARTED: Final = 19
"""Place of the start time among the values of /proc/PID/stat after the name."""
_RANK_MAIN: Final = """
import os, signal, sys
sys.path[:] = {path!r}
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
from zeroshard.cli import main
main()
"""
"""The program of a rank, which imports from where its launcher does. Otherwise `-c` puts the current folder first."""


def joined_world_size() -> int | None:
    """Return the number of ranks that torchrun (or `launch_ranks`) started, or None without such a launch."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and "RANK" not in os.environ:
        return None
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or the only process."""
    return int(os.environ.get("RANK", "0")) == 0


def name_launcher() -> str:
    """Return which torchrun started this rank: the same text after a restart by it, and empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    # Another process may get the number later, also on a host or in a container of the same name.
    process, boot = os.getppid(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[_STARTED]
    return f"process {process} on {socket.gethostname()}, started {started} ticks after the boot {boot}"


def shows_all() -> bool:
    """Return whether an error is to be told with all its frames."""
    return os.environ.get(_TRACEBACK) == "full"


def is_own_launch() -> bool:
    """Return whether `launch_ranks` has started this process, which then says what a rank's error is."""
    return _LAUNCHER in os.environ and "RANK" in os.environ


def seconds_running() -> float:
    """Return the seconds since the command began: this process, or the one whose `launch_ranks` started it."""
    from zeroshard.train.speed import seconds_of

    return seconds_of(int(os.environ[_LAUNCHER]) if is_own_launch() else None)


def follow_launcher() -> None:
    """End this process when its launcher has ended, for any reason, even before this call."""
    launcher = int(os.environ.get(_LAUNCHER, os.getppid()))
    threading.Thread(target=_end_without, args=(launcher,), daemon=True).start()


def _end_without(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_S)
    if is_first_rank():  # not by print: the lock of a stream may be held by another thread
        told = f"zeroshard: the launcher (process {launcher}) ended, so its ranks end; the same command resumes\n"
        with suppress(OSError):
            os.write(2, told.encode())
    os._exit(1)


def launch_ranks(
    ranks: int, arguments: Sequence[str], *, patience_s: float, shows_all: bool = False
) -> tuple[int, str]:
    """Run `zeroshard` with these arguments once for each rank, and wait for all ranks.

    Each rank uses one thread unless OMP_NUM_THREADS is set, because the ranks of a host share its cores.

    Args:
        ranks: number of processes to start on this host.
        arguments: arguments of the command line.
        patience_s: seconds that ranks have after a signal to finish their step before they are killed.
        shows_all: whether an error of a rank is told with all its frames.

    Returns:
        The exit status: 0, the status of the first rank that failed, or 128 plus the number of the signal that ended
        the run; and, if a rank failed, a text with the rank, and its error or the end of its process.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # An environment variable: not every torch has this argument of LaunchConfig, and the default is 30 seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(patience_s)))
    os.environ[_LAUNCHER] = str(os.getpid())
    if shows_all:
        os.environ[_TRACEBACK] = "full"
    else:  # a lost store is a warning with a page of C++ frames
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _quieten()
    listener = socket.socket()
    listener.bind((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    # A store that opens its own port listens on all interfaces. Stores of one port in a process share a listener, so
    # the launcher's own store, created with the same port, also listens on loopback.
    store = TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="static",
        rdzv_endpoint=f"{_LOOPBACK}:{store.port}",
        rdzv_configs={"rank": 0},
        local_addr=_LOOPBACK,
        max_restarts=0,
        # Without these alone, torch handles ignored signals, too; a rank, to which no handler goes, would end by them.
        signals_to_handle=",".join(one.name for one in _LAUNCHER_SIGNALS if signal.getsignal(one) != signal.SIG_IGN),
    )
    try:
        with _insisting():
            elastic_launch(config, sys.executable)("-P", "-c", _RANK_MAIN.format(path=sys.path), *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told: Any = failure.message  # torch says that it is a text
        if isinstance(told, dict):  # the file that the rank has written: `zeroshard/watch/cause_file.py`
            return _told(told["message"], told["extraInfo"]["py_callstack"], rank, ranks)
        return _status(failure.exitcode), f"rank {rank} of {ranks} {_how(failure.exitcode)}; the others were ended"
    except SignalException as error:
        return 128 + error.sigval, ""
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, ""
    return 0, ""


def _told(error: str, text: str, rank: int, ranks: int) -> tuple[int, str]:
    """Return the exit status and the text of the error of a rank: the cause first."""
    if error.startswith(_SETTINGS):  # found by all ranks alike
        return _MISTAKE, error.removeprefix(_SETTINGS)
    lines = [line for line in text.splitlines() if _TRACEBACK not in line]
    return 1, "\n".join(
        [*lines, f"This was rank {rank} of {ranks}; the others were ended. --verbose shows all frames."]
    )


@contextmanager
def _insisting() -> Iterator[None]:
    """Continue suspended ranks at the first signal to this process, and kill all ranks at the second.

    torch's launcher installs its own handlers, which wait for the ranks. This thread instead reads the interpreter's
    wakeup descriptor, which does not depend on handlers. No rank survives the end of the launcher.
    """
    others = _children()
    signals, written = socket.socketpair()
    written.setblocking(False)
    before = signal.set_wakeup_fd(written.fileno())

    def insist() -> None:
        count = 0
        while number := signals.recv(1):
            count += number[0] in _SIGNALS
            if number[0] in _SIGNALS:
                _send(signal.SIGCONT if count == 1 else signal.SIGKILL, _children() - others)

    thread = threading.Thread(target=insist, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _send(signal.SIGKILL, _children() - others)
        written.close()
        thread.join()
        signals.close()


def _children() -> set[int]:
    """Return the living child processes of this process."""
    return {int(child) for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()}


def _send(number: signal.Signals, processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _quieten() -> None:
    """Drop the launcher's log: failed ranks have printed tracebacks, and stopped ranks have printed a message."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def _how(exit_code: int) -> str:
    """Return a text about the end of a process."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit status {exit_code}"


def _status(exit_code: int) -> int:
    """Return a process's exit status as a shell reports it: 128 plus the signal's number if a signal ended it."""
    return 128 - exit_code if exit_code < 0 else exit_code


@final
class StopSignal:
    """Records the first SIGINT, SIGTERM or SIGHUP, which the loop polls; a second signal ends the process at once.

    >>> from zeroshard.train.launch import StopSignal
    >>> with StopSignal() as stop:
    ...     stop.is_wanted()
    False
    """

    def __init__(self) -> None:
        self.number = 0
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def __enter__(self) -> Self:
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_wanted(self) -> bool:
        """Return whether a signal arrived."""
        return self.number != 0

    @property
    def exit_status(self) -> int:
        """128 plus the signal's number; that of SIGINT on a rank that stopped because of another rank."""
        return 128 + (self.number or signal.SIGINT)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
