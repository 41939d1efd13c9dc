"""The most memory that a step takes from torch's CPU allocator, from the profiler's record of each allocation.

    python -m benchmarks.peaks --depth 6 --batch 4

Owns the measurement that predictions are judged by. It is exact: every block, those that a kernel takes for itself
included, from the first parameter on. As a program it shows a step of the GPT of `zeroshard.train.models.gpt` beside
what `zeroshard.plan.trace.tracer` predicts, with blocks kept, recomputed and selectively recomputed.

Note: memory that other threads free
    The profiler writes an event for the allocations of the thread that started it, and of autograd's. A tensor may end
    on another thread: gloo's workers drop the last reference to what they sent. torch's allocator keeps a table of all
    blocks, in which each event reads the bytes that are live; but without a profiler on its thread, an allocation or a
    free skips the table too, unless c10's flag `caffe2_report_cpu_memory_usage` is set. torch gives that flag no name
    in Python, so `follow_all_threads` sets the variable in libc10, and each measurement begins with a free on another
    thread, which must be seen. What another thread allocates and frees between two events stays unseen.
"""

import argparse
import ctypes
import functools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zeroshard.plan.trace.events import Event, Phase, Trace
from zeroshard.plan.trace.tracer import trace_step
from zeroshard.table.activations import PRODUCTS
from zeroshard.table.sizes import MIB
from zeroshard.train.models.gpt import GPT, GPTConfig

__all__ = ["Block", "Measured", "follow_all_threads", "measure_gpt", "measure_peak", "peak_of", "trace_gpt", "treat"]

TREATMENTS = ("kept", "recompute", "selective")
FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
CHECKED_BYTES = 1 << 16


@final
@dataclass(frozen=True)
class Block:
    """One allocation, or the end of one.

    Args:
        nbytes: bytes; negative where memory is given back.
        live_bytes: of all blocks after this event, whichever thread allocated or freed them.
        operations: that ran, outermost first.
    """

    nbytes: int
    live_bytes: int
    operations: tuple[str, ...]


@final
@dataclass(frozen=True)
class Measured:
    """What a run took from the allocator.

    Args:
        peak_bytes: live at the highest moment.
        at: the operations that ran then, outermost first.
        blocks: everything in order.
    """

    peak_bytes: int
    at: tuple[str, ...]
    blocks: tuple[Block, ...]


def follow_all_threads(is_on: bool = True) -> None:
    """Let torch's table of CPU blocks follow every thread, until the process ends; see the module's Note."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, FLAG).value = is_on


def measure_peak(run: Callable[[], Any]) -> Measured:
    """Measure what a function allocates on the CPU; what exists before is not counted.

    The end of a block that existed before is not counted either, so `run` makes everything: the model, the inputs and
    the optimizer.

    Raises:
        RuntimeError: a block that another thread freed still counts.
    """
    follow_all_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _free_on_another_thread()
        kept = run()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _add_up(events)


def _free_on_another_thread() -> None:
    """Allocate a block whose end the profiler cannot see, and one more, whose event shows whether it still counts."""
    blocks = [torch.empty(CHECKED_BYTES, dtype=torch.uint8)]
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    torch.empty(1, dtype=torch.uint8)


def _add_up(events: list[dict[str, Any]]) -> Measured:
    moments: list[tuple[float, int, int, dict[str, Any]]] = []
    for index, event in enumerate(events):
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0:
            moments.append((event["ts"], 1, event["args"]["Ev Idx"], event))
        elif event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            moments.append((event["ts"], 0, index, event))
    moments.sort(key=lambda moment: moment[:3])
    running: list[dict[str, Any]] = []
    blocks: list[Block] = []
    # The events of `_free_on_another_thread`: a block, then another one and its end.
    first, second, _ = [event["args"] for _, is_memory, _, event in moments if is_memory][:3]
    before = first["Total Allocated"] - first["Bytes"]
    if second["Total Allocated"] - second["Bytes"] != before:
        raise RuntimeError(
            f"torch {torch.__version__} counts {CHECKED_BYTES:,} bytes that another thread has freed: {FLAG} of libc10 "
            "no longer has its table of CPU blocks follow every thread, so peaks cannot be measured."
        )
    for ts, is_memory, _, event in moments:
        running = [one for one in running if one["ts"] + one["dur"] >= ts]
        if not is_memory:
            running.append(event)
            continue
        args = event["args"]
        blocks.append(Block(args["Bytes"], args["Total Allocated"] - before, tuple(one["name"] for one in running)))
    blocks = blocks[3:]
    top = max(blocks, key=lambda block: block.live_bytes)
    return Measured(top.live_bytes, top.operations, tuple(blocks))


# -- the step that both sides run -------------------------------------------------------------------------------------


def treat(blocks: list[nn.Module], treatment: str) -> None:
    """Have the forward of each block recomputed in the backward, wholly or but for products and attention."""
    if treatment == "kept":
        return
    contexts: dict[str, Any] = {}
    if treatment == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in PRODUCTS]
        contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)}
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def make_gpt(config: GPTConfig, batch: int, treatment: str) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return a model and a batch of tokens and targets."""
    model = GPT(config)
    treat(list(model.blocks), treatment)
    size = (batch, config.context)
    return model, (torch.randint(config.vocabulary, size), torch.randint(config.vocabulary, size))


def measure_gpt(config: GPTConfig, batch: int, treatment: str, steps: int = 1) -> Measured:
    """Measure steps of AdamW on a GPT."""

    def run() -> tuple[GPT, torch.optim.Optimizer]:
        model, inputs = make_gpt(config, batch, treatment)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(*inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return measure_peak(run)


def trace_gpt(config: GPTConfig, batch: int, treatment: str, steps: int = 1, personality: str = "cpu") -> Trace:
    """Trace the same steps."""
    with torch.device("meta"):
        model, inputs = make_gpt(config, batch, treatment)
    return trace_step(
        lambda model, *inputs: model(*inputs),
        model,
        inputs,
        optimizer=torch.optim.AdamW,
        steps=steps,
        personality=personality,
    )


@final
@dataclass(frozen=True)
class Peak:
    """The time of the most live bytes.

    Args:
        order: index of the event that reaches the peak.
        by_category: live bytes at that time.
        by_module: the same, by the module that made them.
    """

    nbytes: int
    order: int
    phase: Phase
    module: str
    operation: str
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]


def peak_of(trace: Trace, *phases: Phase) -> Peak:
    """Return the peak within some phases; without arguments, within all phases.

    Raises:
        ValueError: the trace has no event in these phases.
    """
    wanted = [e.order for e in trace.events if not phases or e.phase in phases]
    if not wanted:
        raise ValueError(f"The trace has no event in {', '.join(phases) or 'any phase'}.")
    order = max(wanted, key=trace.live.__getitem__)
    event = trace.events[order]
    live: dict[int, Event] = {}
    for other in trace.events[: order + 1]:
        if other.nbytes > 0:
            live[other.storage] = other
        else:
            live.pop(other.storage, None)
    return Peak(
        trace.live[order],
        order,
        event.phase,
        event.module,
        event.operation,
        _sums((one.category, one.nbytes) for one in live.values()),
        _sums((one.module, one.nbytes) for one in live.values()),
    )


def _sums(items: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for key, nbytes in items:
        found[str(key)] = found.get(str(key), 0) + nbytes
    return MappingProxyType(found)


def main() -> None:
    """Print what is predicted beside what is measured."""
    parser = argparse.ArgumentParser()
    for name, default in (("depth", 6), ("context", 512), ("vocabulary", 256), ("batch", 4), ("steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    config = GPTConfig(sizes.depth, sizes.context, sizes.vocabulary)
    for treatment in TREATMENTS:
        measured = measure_gpt(config, sizes.batch, treatment, sizes.steps)
        start_s = time.perf_counter()
        trace = trace_gpt(config, sizes.batch, treatment, sizes.steps)
        trace_s = time.perf_counter() - start_s
        peak = peak_of(trace)
        print(
            f"{treatment:10} measured {measured.peak_bytes / MIB:9.3f} MiB, predicted {peak.nbytes / MIB:9.3f} MiB "
            f"({peak.nbytes / measured.peak_bytes - 1:+.3%}) in {trace_s:.1f} s; "
            f"{peak.phase}, {peak.module}, {peak.operation}; measured at {' > '.join(measured.at[-2:])}"
        )


if __name__ == "__main__":
    main()
