"""Run a function on several ranks of one host, and return the results.

Owns the rank processes: how they start, report, fail and end. It must not know the engine: any test of
`torch.distributed` code can use it. Read `run_ranks` first.

Note: the life of a rank process
    Ranks are forked from a server process that has imported torch, `zeroshard.sharding` and torch's compiler (which the
    first optimizer of a process imports). The imports take seconds once per test process; a rank then starts in
    hundredths of a second. Plain fork hangs after a parallel region in the parent, and a new interpreter would import
    torch each time. Two restrictions follow: a rank sees the environment of the first call, and its target must be
    importable, that is, a function at the top level of a module. The ranks use a file store, which survives the end of
    any rank; torch's TCP store would also ask the name server for the name of each address. A rank that raises reports
    and exits immediately. Its sockets close, and its peers fail as under torchrun. A rank is finished when its process
    has ended, so a thread that the target leaves running is also a failure.

Note: by value
    torch makes multiprocessing send tensors as handles of shared memory, which become invalid when the rank ends. This
    module sends the bytes; tensors arrive contiguous on the CPU (parameters as plain parameters).
"""

import contextlib
import dataclasses
import faulthandler
import gc
import io
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, TypeVar, cast, final

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankFailure", "run_ranks"]

_PRELOAD: Final = ("torch", "torch.distributed", "torch._dynamo", "zeroshard.sharding", "zeroshard.testing")
_PRELOAD_IF_IMPORTED: Final = ("pytest", "transformers")
_STACK_DUMP_S: Final = 0.3

_T = TypeVar("_T")


@final
@dataclasses.dataclass(frozen=True)
class RankError:
    """The error of one rank.

    Args:
        type_name: class name of the exception; `TimeoutError` for a rank that did not finish, or the signal's name
            (`SIGKILL`) or `ProcessExit` for a process that ended without a report.
        message: `str()` of the exception, or a description of the end of the process.
        traceback: the traceback; for a rank that did not finish, the stacks of all its threads.
    """

    type_name: str
    message: str
    traceback: str


@final
class RankFailure(RuntimeError):
    """At least one rank did not return.

    Args:
        errors: by rank, in order of arrival: the first is most often the cause.
        results: by rank, the results of the other ranks.
        world_size: the number of ranks.
    """

    def __init__(self, errors: dict[int, RankError], results: dict[int, Any], world_size: int) -> None:
        self.errors = errors
        self.results = results
        self.world_size = world_size
        heads = [f"[rank {rank}/{world_size}] {e.type_name}: {e.message}" for rank, e in errors.items()]
        bodies = [f"--- rank {rank} ---\n{e.traceback.rstrip()}" for rank, e in errors.items() if e.traceback]
        super().__init__("\n".join([f"{len(errors)} of {world_size} ranks failed", *heads, *bodies]))


def run_ranks(
    target: Callable[..., _T],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    process_group: bool = True,
) -> list[_T]:
    """Run `target(*args)` on `world_size` processes of this host and return the results, by rank.

    Every rank has one compute thread, the variables of torchrun (`RANK`, `WORLD_SIZE`, ...) and gloo bound to the
    loopback interface. All rank processes have ended when this function returns or raises.

    Args:
        target: a function at the top level of an importable module.
        world_size: number of ranks.
        args: arguments of `target`, passed by value like the results: tensors arrive contiguous on the CPU.
        timeout_s: seconds for the whole call, after which unfinished ranks are killed and reported with their stacks.
        grace_s: seconds for the other ranks to finish after a rank has failed.
        process_group: initialize the default process group (gloo) before the call, and destroy it afterwards. With
            False, `MASTER_ADDR` and `MASTER_PORT` are set, and the target can initialize it.

    Returns:
        The results, indexed by rank.

    Raises:
        RankFailure: a rank raised, died or did not finish.
        ValueError, TypeError: an argument is out of range, or `target` cannot be imported by a rank.

    >>> import operator
    >>> from zeroshard.testing import run_ranks
    >>> run_ranks(operator.add, 2, 20, 22, process_group=False)
    [42, 42]
    """
    _check_arguments(target, world_size, timeout_s)
    blob = _dumps((target, args))
    store = None if process_group else _host_store()
    port = None if store is None else store.port
    with tempfile.TemporaryDirectory(prefix="zeroshard-ranks-") as scratch:
        context = _forkserver()
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(_start(context, _Place(rank, world_size, scratch, port, timeout_s), blob))
            results, errors = _collect(ranks, timeout_s, grace_s)
        finally:
            _end(ranks)
    if errors:
        raise RankFailure(errors, results, world_size)
    return [cast(_T, results[rank]) for rank in range(world_size)]


def _check_arguments(target: Callable[..., Any], world_size: int, timeout_s: float) -> None:
    """Check the arguments here, where the error is clearer than on a rank."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s}")
    name = getattr(target, "__qualname__", "")
    if "<" in name:
        raise TypeError(f"target must be a function at the top level of a module, as ranks import it; got {name}")


@final
@dataclasses.dataclass(frozen=True)
class _Place:
    """The data that a rank process needs before it can run the target."""

    rank: int
    world_size: int
    folder: str
    port: int | None
    timeout_s: float

    @property
    def stack_path(self) -> str:
        """Name the file for the stacks of this rank's threads."""
        return os.path.join(self.folder, f"rank-{self.rank}.stacks")


@final
@dataclasses.dataclass(frozen=True)
class _Report:
    """The single message of a rank: its result or its error."""

    result: Any = None
    error: RankError | None = None


@final
@dataclasses.dataclass
class _Rank:
    """One rank, on the caller's side. `is_open` until its report arrives."""

    place: _Place
    process: ForkServerProcess
    connection: Connection
    is_open: bool = True
    is_ended: bool = False

    def waits_on(self) -> list[Any]:
        """Return the handles that become ready when this rank reports or ends."""
        if self.is_ended:
            return []
        return [self.process.sentinel, self.connection] if self.is_open else [self.process.sentinel]


# ---- the caller's side


def _forkserver() -> ForkServerContext:
    """Return the context of the server that all calls in this process share; the first rank starts the server."""
    context = multiprocessing.get_context("forkserver")
    extra = [name for name in _PRELOAD_IF_IMPORTED if name in sys.modules]
    context.set_forkserver_preload([*_PRELOAD, *extra])
    return context


def _host_store() -> dist.TCPStore:
    """Host the store at `MASTER_ADDR` and `MASTER_PORT`, as torchrun's agent does."""
    # Bound here, because a store that opens its own port listens on all interfaces.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _start(context: ForkServerContext, place: _Place, blob: bytes) -> _Rank:
    """Start the process of one rank."""
    ours, theirs = context.Pipe(duplex=False)
    name = f"rank {place.rank}/{place.world_size}"
    process = context.Process(target=_rank_main, args=(theirs, place, blob), name=name)
    process.start()
    theirs.close()
    return _Rank(place, process, ours)


def _collect(ranks: Sequence[_Rank], timeout_s: float, grace_s: float) -> tuple[dict[int, Any], dict[int, RankError]]:
    """Wait for every rank or the timeout, and return results and errors."""
    results: dict[int, Any] = {}
    errors: dict[int, RankError] = {}
    deadline_s = time.monotonic() + timeout_s
    reason = f"not finished {timeout_s:g} s after the start"
    while waited := [handle for rank in ranks for handle in rank.waits_on()]:
        ready = wait(waited, max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for rank in ranks:
            if not rank.is_ended and any(handle in ready for handle in rank.waits_on()):
                _advance(rank, results, errors)
        if errors and time.monotonic() + grace_s < deadline_s:
            deadline_s = time.monotonic() + grace_s
            reason = f"not finished {grace_s:g} s after rank {next(iter(errors))} failed"
    errors.update(_unfinished([rank for rank in ranks if not rank.is_ended], reason, results))
    return {rank: result for rank, result in results.items() if rank not in errors}, errors


def _advance(rank: _Rank, results: dict[int, Any], errors: dict[int, RankError]) -> None:
    """Handle an event of one rank: first its report, then the end of its process."""
    number = rank.place.rank
    if rank.is_open and rank.connection.poll():
        rank.is_open = False
        report = _receive(rank.connection)
        if report is not None and report.error is None:
            results[number] = report.result
        elif report is not None:
            errors[number] = cast(RankError, report.error)
    code = rank.process.exitcode
    if code is None or (rank.is_open and rank.connection.poll()):
        return
    rank.is_ended = True
    if number not in errors and (code != 0 or number not in results):
        errors[number] = _death(code, number in results)


def _receive(connection: Connection) -> _Report | None:
    """Read the report of one rank; None if the process ended before the report was complete."""
    try:
        data = connection.recv_bytes()
    except (EOFError, OSError):
        return None
    return cast(_Report, ForkingPickler.loads(data))


def _death(code: int, has_result: bool) -> RankError:
    """Describe a process that ended without a report."""
    name = signal.Signals(-code).name if code < 0 else "ProcessExit"
    how = f"ended by {name} (signal {-code})" if code < 0 else f"ended with exit code {code}"
    when = "after its target had returned" if has_result else "without a report"
    return RankError(name, f"the process {how} {when}", "")


def _unfinished(ranks: Sequence[_Rank], reason: str, results: dict[int, Any]) -> dict[int, RankError]:
    """Describe the ranks that are still running, with the stacks of their threads."""
    for rank in ranks:
        # A process without the file has not installed the handler, and the signal would end it.
        if os.path.exists(rank.place.stack_path) and rank.process.pid is not None and rank.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the fork server has not said so yet
                os.kill(rank.process.pid, signal.SIGUSR1)
    if ranks:
        time.sleep(_STACK_DUMP_S)
    errors: dict[int, RankError] = {}
    for rank in ranks:
        path = pathlib.Path(rank.place.stack_path)
        stacks = path.read_text() if path.exists() else "(the process had not reached its target)"
        what = "its target returned, but its process is still running" if rank.place.rank in results else "running"
        errors[rank.place.rank] = RankError("TimeoutError", f"{reason}: {what}, killed", stacks)
    return errors


def _end(ranks: Iterable[_Rank]) -> None:
    """Kill all running processes and release every handle."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.connection.close()


# ---- the rank's side


def _rank_main(connection: Connection, place: _Place, blob: bytes) -> None:
    """Run the target in this process, report, and exit non-zero if it raised."""
    gc.freeze()  # a full collection over all imported modules would take a quarter of a second
    threading.Thread(target=_die_with_caller, daemon=True).start()
    _dump_stacks_on_signal(place.stack_path)
    data, is_error = _run_target(place, blob)
    connection.send_bytes(data)
    connection.close()
    if is_error:
        raise SystemExit(1)


def _dump_stacks_on_signal(path: str) -> None:
    """Write the stacks of all threads to `path` at SIGUSR1. The file exists once the handler is installed."""
    descriptor = os.open(path + ".part", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    os.rename(path + ".part", path)


def _run_target(place: _Place, blob: bytes) -> tuple[bytes, bool]:
    """Run the target and return the report as bytes, and whether it is an error."""
    try:
        torch.set_num_threads(1)
        _enter(place)
        target, args = ForkingPickler.loads(blob)
        result = target(*args)
        if place.port is None and dist.is_initialized():
            dist.destroy_process_group()
        return _dumps(_Report(result=result)), False
    except BaseException as error:  # SystemExit and pytest's skip are failures, too
        # Call the hook as for an uncaught error: the watchdog may need to tell the other ranks.
        sys.excepthook(type(error), error, error.__traceback__)
        what = RankError(type(error).__name__, str(error), traceback.format_exc())
        return _dumps(_Report(error=what)), True


def _enter(place: _Place) -> None:
    """Set the environment that torchrun sets, and create the process group if requested."""
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.world_size),
        GLOO_SOCKET_IFNAME=next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
    )
    if place.port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.port), TORCHELASTIC_USE_AGENT_STORE=str(True))
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.folder}/store",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.timeout_s),
    )
    # Joining does not wait for the others: a rank that ends early would fail ranks that are still connecting.
    dist.barrier()


def _die_with_caller() -> None:
    """End this process when its caller ends for any reason."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)


# ---- tensors by value


class _ByValue(ForkingPickler):
    """The pickler of multiprocessing, with tensors as bytes."""

    def reducer_override(self, obj: Any) -> Any:
        """Bypass torch's shared-memory reductions for tensors."""
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        is_parameter = isinstance(obj, torch.nn.Parameter)
        data = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (raw, data.dtype, tuple(data.shape), is_parameter, obj.requires_grad and is_parameter)


def _tensor(
    raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], is_parameter: bool, requires_grad: bool
) -> torch.Tensor:
    """Build a tensor from a copy of its bytes: `frombuffer` would share read-only memory."""
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def _dumps(obj: Any) -> bytes:
    """Serialize with tensors by value."""
    buffer = io.BytesIO()
    _ByValue(buffer).dump(obj)
    return buffer.getvalue()
