"""What nanotron does in a step, as its source says: tensors of a unit by name, buffers of a rank, and when they go.

Owns the layout that the published runs of the Ultra-Scale Playbook were measured with. Must not know the runs, nor this
project's engine. Needs no torch. Read `nanotron_reserved` first.

Source: huggingface/nanotron, branch nouamane/bench2 (the benchmark's own): trainer.py, helpers.py, models/llama.py,
optim/gradient_accumulator.py, optim/zero.py, parallel/tensor_parallel/functional.py, distributed.py.

Note: what was measured
    `log_memory` (logging.py) resets the peaks of the allocator before and after the passes of each step, and
    `create_table_log` (helpers.py) reads them behind the update. So `max_memory_allocated` is that of an update, and
    the one number that depends on the micro-batch is `max_memory_reserved`: what the allocator has taken by step 3.
Note: the order of a rank's memory
    `measure_bandwidth` leaves free segments of 1 GiB, which the model's parameters are cut from. Then come DDP's buckets
    (ZeRO-0), fp32 gradients and fp32 masters, one buffer each. `torch.cuda.empty_cache` returns the free segments.
    Adam's states are made in the first update, in what the first passes left free.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, final

from zeroshard.plan.allocator import Allocator
from zeroshard.plan.hardware import Cost
from zeroshard.plan.rules import Rules
from zeroshard.plan.tape import Exchange, Instruction

__all__ = ["Rank", "reserved_bytes"]

MIB: Final = 1 << 20
BF16: Final = 2
FP32: Final = 4
BUCKET_BYTES: Final = 25 * MIB
"""`ddp_bucket_cap_mb`."""
FIRST_BUCKET_BYTES: Final = MIB
"""torch/nn/parallel/distributed.py: `dist._DEFAULT_FIRST_BUCKET_BYTES`."""
WORKSPACE_BYTES: Final = 32 * MIB
"""pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp: of each handle on Hopper; the backward's thread has its own."""
QUEUE_LENGTH: Final = 1024
"""Of CUDA: so many launches may wait for the device; the next one makes the host wait."""
EXCHANGE: Final = 2
"""What a collective puts on the stream of kernels: an event before it, and a wait behind it."""
GATHERED: Final = 2 + EXCHANGE
"""A product whose input is gathered: one of the own part, meanwhile, and one of the rest, on the first rank."""
MULTIPROCESSORS: Final = 132


@final
class Script:
    """The instructions of a pass, with tensors by name."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, int]] = []
        self.costs: list[tuple[Cost, Exchange | None]] = []

    def make(self, **tensors: int) -> "Script":
        """Allocate tensors, in order."""
        self.lines += [("make", name, nbytes) for name, nbytes in tensors.items()]
        return self

    def drop(self, *names: str) -> "Script":
        """Free tensors."""
        self.lines += [("drop", name, 0) for name in names]
        return self

    def drop_late(self, *names: str) -> "Script":
        """Free tensors that a collective used on its own stream."""
        self.lines += [("late", name, 0) for name in names]
        return self

    def run(self, count: int) -> "Script":
        """Queue a number of kernels, and of events, on the device's stream."""
        self.lines.append(("run", "", count))
        return self

    def gradient(self, name: str, numel: int) -> "Script":
        """Allocate the gradient of a parameter, which stays to the end of the backward."""
        self.lines.append(("land", name, numel * BF16))
        return self


@final
@dataclass(frozen=True)
class Rank:
    """One rank of nanotron.

    Args:
        layers: of this rank.
        batch: sequences of a micro-batch.
        data, tensor: ranks.
        zero: 0 or 1.
        has_embedding, has_head: whether the rank is the first and the last of its pipeline.
        in_flight: micro-batches whose forward comes before the first backward.
        micro_batches: of a step.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    data: int = 1
    tensor: int = 1
    zero: int = 0
    micro_batches: int = 1
    is_tied: bool = False
    has_embedding: bool = True
    has_head: bool = True
    in_flight: int = 1

    @cached_property
    def whole(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.sequence * self.batch * self.hidden * BF16

    @cached_property
    def local(self) -> int:
        """Bytes of the hidden states of this rank's tokens."""
        return self.whole // self.tensor

    @property
    def has_ddp(self) -> bool:
        """Tell whether the model is wrapped: `_init_model` does not where ZeRO-1 sums gradients in fp32."""
        return self.data > 1 and self.zero == 0

    def block_parameters(self) -> list[tuple[str, int]]:
        """Return names and elements, in order of registration."""
        h, t = self.hidden, self.tensor
        return [
            ("input_layernorm", h),
            ("qkv", 3 * h * h // t),
            ("o", h * h // t),
            ("post_attention_layernorm", h),
            ("gate_up", 2 * h * self.inner // t),
            ("down", h * self.inner // t),
        ]

    @cached_property
    def parameters(self) -> list[tuple[str, int]]:
        """All parameters of the rank."""
        table = self.vocabulary // self.tensor * self.hidden
        found = [("embedding", table)] if self.has_embedding else []
        for layer in range(self.layers):
            found += [(f"{layer}.{name}", numel) for name, numel in self.block_parameters()]
        if self.has_head:
            found.append(("norm", self.hidden))
            if not (self.is_tied and self.has_embedding):
                found.append(("head", table))
        return found


def block_forward(rank: Rank) -> Script:
    """Return the forward of a decoder layer; its input stays."""
    u, l, t = rank.whole, rank.local, rank.tensor
    q, inner = u // t, rank.sequence * rank.batch * rank.inner * BF16 // t
    rows = rank.sequence * rank.batch
    gather = GATHERED if t > 1 else 1
    s = Script().make(y1=l, rstd1=rows * FP32 // t).run(1)
    # Queries, keys and values are permuted into one tensor; keys and values are joined and permuted once more.
    s.make(qkv=3 * q).run(gather).make(split=3 * q).drop("qkv").make(kv=2 * q, keyvalue=2 * q).drop("kv").run(5)
    s.run(8)  # lengths of sequences: two zeros, two sums, two scans of two kernels
    s.make(context=q, lse=rows * rank.heads // t * FP32).run(1)
    if rank.batch > 1:  # the context is transposed, and a product wants it in order
        s.make(copy=q).run(1)
    s.make(out=u).run(1)
    if rank.batch > 1:
        s.drop("copy")
    if t > 1:
        s.make(scattered=l).run(EXCHANGE).drop_late("out")
    s.make(x2=l).run(1)
    s.drop_late("scattered") if t > 1 else s.drop("out")
    s.make(y2=l, rstd2=rows * FP32 // t).run(1)
    s.make(gateup=2 * inner).run(gather).make(active=inner, product=inner, down=u).run(3)
    if t > 1:
        s.make(scattered=l).run(EXCHANGE).drop_late("down")
    s.make(output=l).run(1)
    return s.drop_late("scattered") if t > 1 else s.drop("down")


def block_backward(rank: Rank) -> Script:
    """Return the backward of a decoder layer, from the gradient of its output to the one of its input."""
    u, l, t, h = rank.whole, rank.local, rank.tensor, rank.hidden
    q, inner = u // t, rank.sequence * rank.batch * rank.inner * BF16 // t
    rows = rank.sequence * rank.batch
    parts = MULTIPROCESSORS * h * FP32
    gather = GATHERED if t > 1 else 1
    s = Script().make(dproduct=inner).run(gather).gradient("down", h * rank.inner // t).drop("product").run(1)
    s.make(dactive=inner, dup=inner).drop("dproduct", "active").run(2)
    s.make(dgate=inner).drop("dactive").make(dgateup=2 * inner).drop("dgate", "dup", "gateup").run(2)
    _column_backward(s, rank, "gate_up", 2 * h * rank.inner // t, "dgateup", "y2")
    d = "dscattered" if t > 1 else "dy"
    s.make(dx=l, partial=parts).gradient("post_attention_layernorm", h).drop("partial").run(3)
    s.drop_late(d) if t > 1 else s.drop(d)
    s.drop("rstd2", "x2", "dx").run(1)
    s.make(dcontext=q).run(gather).gradient("o", h * h // t).run(1)
    s.make(dq=q, dk=q, dv=q, sums=2 * q, softmax=rows * rank.heads // t * FP32).drop("sums", "softmax").run(4)
    s.drop("dcontext", "context", "lse", "split", "keyvalue")
    s.make(dkeyvalue=2 * q).drop("dk", "dv").make(dsplit=3 * q).drop("dq", "dkeyvalue").run(4)
    s.make(folded=3 * q).run(1)
    _column_backward(s, rank, "qkv", 3 * h * h // t, "dsplit", "y1")
    s.make(dx=l, partial=parts).gradient("input_layernorm", h).drop("partial").run(3)
    s.drop_late(d) if t > 1 else s.drop(d)
    return s.drop("rstd1", "input", "dx").run(1)


def _column_backward(s: Script, rank: Rank, name: str, numel: int, gradient: str, x: str) -> None:
    """Write the backward of a product whose input was gathered: the input is gathered once more."""
    s.make(dy=rank.whole).run(1)
    if name == "qkv":  # its gradient is a view that is not in order: one copy for each of both products
        s.drop("folded").make(ordered=3 * rank.whole // rank.tensor).run(1)
    if rank.tensor > 1:
        s.make(dscattered=rank.local).run(2 * EXCHANGE)
    s.gradient(name, numel).run(1)
    if name == "qkv":
        s.drop("ordered")
    s.drop(gradient)
    if rank.tensor > 1:
        s.drop_late(x, "dy")
    else:
        s.drop(x)


def head_forward(rank: Rank) -> Script:
    """Return the final norm, the logits and their cross entropy, sharded over the tensor ranks."""
    rows = rank.sequence * rank.batch
    numel = rows * (rank.vocabulary // rank.tensor)
    s = Script().make(y=rank.local, rstd=rows * FP32 // rank.tensor).run(1)
    # `forward_with_hidden_states` holds the bf16 logits till it returns, `LlamaForTraining.forward` the fp32 ones.
    s.make(logits=numel * BF16).run(GATHERED if rank.tensor > 1 else 1).make(wide=numel * FP32).drop("logits").run(1)
    return s.make(softmax=numel * FP32).run(30).drop("wide")


def head_backward(rank: Rank) -> Script:
    """Return the backward of the head; it leaves "g"."""
    rows, t = rank.sequence * rank.batch, rank.tensor
    local = rank.vocabulary // t
    # The gradient is written over the softmax, then rounded.
    s = Script().run(8).make(dlogits=rows * local * BF16).run(1).drop("softmax")
    _column_backward(s, rank, "head", local * rank.hidden, "dlogits", "y")
    s.make(g=rank.local, partial=MULTIPROCESSORS * rank.hidden * FP32).gradient("norm", rank.hidden).run(3)
    s.drop("partial", "rstd", "input")
    return s.drop_late("dscattered") if t > 1 else s.drop("dy")


@final
class _Memory:
    """A rank's memory while its steps are played."""

    def __init__(self, rank: Rank, rules: Rules) -> None:
        self.rank, self.allocator = rank, Allocator(rules)
        self.next = self.queued = 0
        self.waiting: deque[tuple[int, int]] = deque()
        self.gradients: dict[str, int] = {}
        self.scripts = {
            "forward": block_forward(rank).lines, "backward": block_backward(rank).lines,
            "head": head_forward(rank).lines, "head backward": head_backward(rank).lines,
        }  # fmt: skip
        self.buffers: dict[str, int] = {}
        self.order: list[str] = []

    def take(self, nbytes: int) -> int:
        while self.waiting and self.waiting[0][0] <= self.queued:
            self.allocator.free(self.waiting.popleft()[1])
        self.next += 1
        if not self.allocator.allocate(self.next, nbytes):
            raise MemoryError
        return self.next

    def synchronize(self) -> None:
        """Let the device finish what was queued."""
        while self.waiting:
            self.allocator.free(self.waiting.popleft()[1])

    def free(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.allocator.free(key)

    def play(self, lines: Sequence[tuple[str, str, int]], live: dict[str, int], prefix: str) -> None:
        for kind, name, nbytes in lines:
            if kind == "make":
                live[name] = self.take(nbytes)
            elif kind == "drop":
                self.allocator.free(live.pop(name))
            elif kind == "run":
                self.queued += nbytes
            elif kind == "late":
                self.waiting.append((self.queued + QUEUE_LENGTH, live.pop(name)))
            else:
                self.land(f"{prefix}{name}", nbytes)

    def land(self, name: str, nbytes: int) -> None:
        if name == "head" and self.rank.is_tied and self.rank.has_embedding:
            name = "embedding"
        key = self.take(nbytes)
        if name in self.gradients:
            self.allocator.free(key)  # a second gradient is added to the first
        else:
            self.gradients[name] = key

    # -- before the first step ------------------------------------------------------------------------------------

    def set_up(self) -> None:
        rank = self.rank
        self.free([self.take(1 << 30) for _ in range(8)])
        for _, numel in rank.parameters:
            self.take(numel * BF16)
        if rank.has_ddp:
            # One bucket of everything, until the order of gradients is known.
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
        self.queued += len(self.gradients)  # each is added to its fp32 sum
        self.order, self.gradients = list(self.gradients), {}

    def workspace(self, thread: str) -> None:
        """Take the workspace of cuBLAS for a thread of torch, which stays."""
        if thread not in self.buffers:
            self.buffers[thread] = self.take(WORKSPACE_BYTES)
            if thread == "forward":
                width = self.rank.hidden // self.rank.heads
                for _ in range(2 * self.rank.layers):
                    self.take(self.rank.sequence * width // 2 * BF16)  # cosines and sines

    def buffers_of_tensor(self) -> None:
        """Take the two buffers that gathered hidden states go to (`MemoryBuffer`), which stay."""
        if self.rank.tensor > 1 and "allgather" not in self.buffers:
            self.buffers["allgather"] = self.take(self.rank.whole)
            self.buffers["allgather2"] = self.take(self.rank.whole)

    def step(self, *, is_first: bool) -> None:
        rank = self.rank
        self.buffers_of_tensor()
        waiting: list[list[dict[str, int]]] = []
        for _ in range(min(rank.micro_batches, rank.in_flight + 1)):
            waiting.append(self.forward())
            if len(waiting) == rank.in_flight:
                self.backward(waiting.pop(0))
        while waiting:
            self.backward(waiting.pop(0))
        if is_first:
            for numel in self.shards:
                self.take(4)
                self.take(numel * FP32)
                self.take(numel * FP32)
        if rank.zero and rank.data > 1:
            self.publish()
        self.synchronize()
        if rank.has_ddp and is_first:
            self.free(self.ddp)
            sizes = dict(rank.parameters)
            self.ddp = [self.take(n) for n in bucket_sizes([sizes[name] for name in self.order])]

    def publish(self) -> None:
        """Gather the updated parameters: `all_gather_coalesced` copies them flat, one tensor a rank, and NCCL again."""
        shard = sum(self.shards) * BF16
        taken = [self.take(shard), *(self.take(shard) for _ in range(self.rank.data))]
        taken.append(self.take(shard * self.rank.data))
        self.free(taken)


def bucket_sizes(numels: Sequence[int]) -> list[int]:
    """Return the bytes of DDP's buckets, as `compute_bucket_assignment_by_size` fills them."""
    found, now, limit = list[int](), 0, FIRST_BUCKET_BYTES
    for numel in numels:
        now += numel * BF16
        if now >= limit:
            found.append(now)
            now, limit = 0, BUCKET_BYTES
    return [*found, now] if now else found


@lru_cache(maxsize=4096)
def reserved_bytes(rank: Rank, device_bytes: int | None = None, steps: int = 2) -> int:
    """Return what torch's allocator has taken after some steps, or 0 where the device has not got that much."""
    memory = _Memory(rank, Rules(device_bytes=device_bytes))
    try:
        memory.set_up()
        for number in range(steps):
            memory.step(is_first=number == 0)
    except MemoryError:
        return 0
    return memory.allocator.peak_reserved_bytes
