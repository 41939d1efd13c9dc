"""The allocations of a rank of nanotron: the memory that torch's allocator has reserved after some steps.

Owns the order of allocations and releases. It must not know the operations of a unit (`nanotron.py`) or the published
runs. Needs no torch. Read `_Memory.step` first.

Source: huggingface/nanotron, branch nouamane/bench2: trainer.py, helpers.py, optim/gradient_accumulator.py,
optim/zero.py, distributed.py, parallel/pipeline_parallel/p2p.py; pytorch 2.1, torch/nn/parallel/distributed.py and
torch/csrc/distributed/c10d/reducer.cpp and ProcessGroupNCCL.cpp.

Note: what was measured
    `log_memory` (logging.py) resets the peaks of the allocator before and after the passes of each step, and
    `create_table_log` (helpers.py) reads them after the update. Therefore `max_memory_allocated` is that of an update,
    and only `max_memory_reserved` depends on the micro-batch: the memory reserved by step 3.
Note: the order of a rank's memory
    `measure_bandwidth` leaves free segments of 1 GiB, which then serve parameters. The buckets of DDP (ZeRO-0), fp32
    gradients and fp32 masters follow, one buffer each. `torch.cuda.empty_cache` returns the free segments. The first
    update allocates Adam's states in memory that the first passes left free.
Note: memory that waits
    ProcessGroupNCCL records its stream for each tensor of a collective, so a freed tensor is reused only when the
    device has passed the collective. The host runs ahead by as many kernels as CUDA queues, so the tensors of the last
    thousand kernels wait. Runs whose host waits for each collective (`Rank.is_waiting`; their steps took many times as
    long) have no such memory; for some of these runs, the configuration does not show the reason.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, final

from zeroshard.evidence.nanotron import BF16, FP32, MIB, SCRIPTS, Clock, Rank
from zeroshard.plan.machine.allocator import Allocator
from zeroshard.plan.machine.hardware import DEVICES
from zeroshard.plan.machine.rules import Rules

__all__ = ["reserved_bytes"]

BUCKET_BYTES: Final = 25 * MIB
"""`ddp_bucket_cap_mb`."""
FIRST_BUCKET_BYTES: Final = MIB
"""torch/nn/parallel/distributed.py: `dist._DEFAULT_FIRST_BUCKET_BYTES`."""
WORKSPACE_BYTES: Final = 32 * MIB
"""pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp: per handle on Hopper; the thread of the backward has another."""
QUEUE_LENGTH: Final = 1024
"""CUDA's limit of queued launches; the next launch makes the host wait."""
EXCHANGE_QUEUED: Final = 3
"""Queue entries of a collective: an event on the stream of kernels, its kernel, and a wait for that kernel."""


@final
class _Memory:
    """A rank's memory during the simulation of its steps."""

    def __init__(self, rank: Rank, rules: Rules) -> None:
        self.rank, self.allocator = rank, Allocator(rules)
        self.next = self.queued = 0
        clock = Clock(DEVICES["h100-80"], DEVICES["h100-80"].spread(rank.tensor))  # only the order matters here
        self.ahead = 0 if rank.is_waiting else QUEUE_LENGTH
        self.waiting: deque[tuple[int, int]] = deque()
        self.gradients: dict[str, int] = {}
        self.scripts = {name: write(rank, clock).lines for name, write in SCRIPTS.items()}
        self.buffers: dict[str, int] = {}
        self.order: list[str] = []

    def take(self, nbytes: int) -> int:
        while self.waiting and self.waiting[0][0] <= self.queued:
            self.allocator.free(self.waiting.popleft()[1])
        self.next += 1
        if not self.allocator.allocate(self.next, nbytes):
            self.synchronize()
            if not self.allocator.allocate(self.next, nbytes):
                raise MemoryError
        return self.next

    def queue(self, kernels: int) -> None:
        """Queue kernels; the host runs ahead of the device by at most the length of the queue."""
        self.queued += kernels

    def synchronize(self) -> None:
        """Let the device finish the queued work."""
        while self.waiting:
            self.allocator.free(self.waiting.popleft()[1])

    def free(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.allocator.free(key)

    def play(self, lines: Sequence[tuple[str, str, float]], live: dict[str, int], prefix: str) -> None:
        for kind, name, nbytes in lines:
            if kind == "make":
                live[name] = self.take(int(nbytes))
            elif kind == "drop":
                self.allocator.free(live.pop(name))
            elif kind == "run":
                self.queue(1)
            elif kind == "exchange":
                self.queue(EXCHANGE_QUEUED)
            elif kind == "late":
                self.waiting.append((self.queued + self.ahead, live.pop(name)))
            else:
                self.land(f"{prefix}{name}", int(nbytes))

    def land(self, name: str, nbytes: int) -> None:
        if name == "head" and self.rank.is_tied and self.rank.has_embedding:
            name = "embedding"
        key = self.take(nbytes)
        if name in self.gradients:
            self.allocator.free(key)  # a second gradient is added to the first gradient
        else:
            self.gradients[name] = key

    # -- before the first step ------------------------------------------------------------------------------------

    def set_up(self) -> None:
        rank = self.rank
        self.free([self.take(1 << 30) for _ in range(8)])
        for _, numel in rank.parameters:
            self.take(numel * BF16)
        if rank.has_ddp:
            # One bucket of all parameters, until the order of gradients is known.
            self.ddp = [self.take(sum(numel for _, numel in rank.parameters) * BF16)]
        held = sum(numel for _, numel in rank.parameters)
        self.take(held * FP32)
        shards = rank.data if rank.zero else 1
        self.shards = [-(-numel // shards) for _, numel in rank.parameters]
        self.take(sum(self.shards) * FP32)
        self.allocator.empty()

    # -- a step ---------------------------------------------------------------------------------------------------

    def forward(self) -> list[dict[str, int]]:
        rank = self.rank
        rows = rank.sequence * rank.batch
        self.workspace("forward")
        inputs = {"tokens": self.take(rows * 8), "mask": self.take(rows), "labels": self.take(rows * 8)}
        if rank.has_embedding:
            output = self.take(rank.whole)
            if rank.tensor > 1:
                masked = self.take(rank.whole)
                self.free([output])
                output = self.take(rank.local)
                self.free([masked])
        else:
            output = self.take(rank.local)
        saved = []
        for _ in range(rank.layers):
            live = {"input": output}
            self.play(self.scripts["forward"], live, "")
            output = live.pop("output")
            saved.append(live)
        if rank.has_head:
            live = {"input": output}
            self.play(self.scripts["head"], live, "")
            saved.append(live)
        else:
            self.free([output])
        saved.append(inputs)
        return saved

    def backward(self, saved: list[dict[str, int]]) -> None:
        rank = self.rank
        inputs = saved.pop()
        self.workspace("backward")
        if rank.has_head:
            live = saved.pop()
            self.play(self.scripts["head backward"], live, "")
            gradient = live["g"]
        else:
            gradient = self.take(rank.local)
        for layer in reversed(range(rank.layers)):
            self.play(self.scripts["backward"], saved[layer], f"{layer}.")
        if rank.has_embedding:
            if rank.tensor > 1:
                gathered = self.take(rank.whole)
                self.free([gradient])
                gradient = self.take(rank.whole)
                self.free([gathered])
            self.land("embedding", rank.vocabulary // rank.tensor * rank.hidden * BF16)
            self.free([self.take(2 * rank.whole)])  # fp32 sums of the rows of each token
        self.free([gradient, *inputs.values()])
        self.free(self.gradients.values())
        self.queue(len(self.gradients))  # each gradient is added to its fp32 sum
        self.order, self.gradients = list(self.gradients), {}

    def workspace(self, thread: str) -> None:
        """Allocate the workspace of cuBLAS for a thread of torch, permanently."""
        if thread not in self.buffers:
            self.buffers[thread] = self.take(WORKSPACE_BYTES)
            if thread == "forward":
                width = self.rank.hidden // self.rank.heads
                for _ in range(2 * self.rank.layers):
                    self.take(self.rank.sequence * width // 2 * BF16)  # cosines and sines

    def buffers_of_tensor(self) -> None:
        """Allocate the two permanent buffers for gathered hidden states (`MemoryBuffer`)."""
        if self.rank.tensor > 1 and "allgather" not in self.buffers:
            self.buffers["allgather"] = self.take(self.rank.whole)
            self.buffers["allgather2"] = self.take(self.rank.whole)

    def step(self, *, is_first: bool) -> None:
        rank = self.rank
        self.buffers_of_tensor()
        waiting: list[list[dict[str, int]]] = []
        number = min(rank.micro_batches, rank.in_flight + 1)
        for _ in range(number):
            waiting.append(self.forward())
            if len(waiting) == rank.in_flight:
                self.backward(waiting.pop(0))
        while waiting:
            self.backward(waiting.pop(0))
        self.update(is_first=is_first)
        if rank.zero and rank.data > 1:
            self.publish()
        self.synchronize()
        if rank.has_ddp and is_first:
            self.free(self.ddp)
            sizes = dict(rank.parameters)
            self.ddp = [self.take(n) for n in bucket_sizes([sizes[name] for name in self.order])]

    def update(self, *, is_first: bool) -> None:
        """Clip gradients, update each parameter (a separate group), then round."""
        self.queue(2 * len(self.shards))
        for numel in self.shards:
            if is_first:
                self.take(4)
                self.take(numel * FP32)
                self.take(numel * FP32)
            self.queue(2)
        self.queue(len(self.shards))

    def publish(self) -> None:
        """Gather the updated parameters: `all_gather_coalesced` copies them flat, one tensor per rank, as does NCCL."""
        shard = sum(self.shards) * BF16
        taken = [self.take(shard) for _ in range(self.rank.data + 1)]
        taken.append(self.take(shard * self.rank.data))
        self.free(taken)


def bucket_sizes(numels: Sequence[int]) -> list[int]:
    """Return the bytes of DDP's buckets, as filled by `compute_bucket_assignment_by_size`."""
    found, now, limit = list[int](), 0, FIRST_BUCKET_BYTES
    for numel in numels:
        now += numel * BF16
        if now >= limit:
            found.append(now)
            now, limit = 0, BUCKET_BYTES
    return [*found, now] if now else found


@lru_cache(maxsize=4096)
def reserved_bytes(rank: Rank, device_bytes: int | None = None, steps: int = 2) -> int:
    """Return the memory that torch's allocator has reserved after some steps, or 0 if the device has too little."""
    memory = _Memory(rank, Rules(device_bytes=device_bytes))
    try:
        memory.set_up()
        for number in range(steps):
            memory.step(is_first=number == 0)
    except MemoryError:
        return 0
    # The peak was reset before the last update, so it excludes memory that a full device returned earlier.
    return memory.allocator.reserved_bytes
