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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.allocator import Allocator
from zeroshard.plan.hardware import Cost, Device, Span, device_named
from zeroshard.plan.rules import Rules

__all__ = ["Clock", "Rank", "SCRIPTS", "Script", "blocks_of", "reserved_bytes"]

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
EXCHANGE_QUEUED: Final = 3
"""What a collective queues: an event of the stream of kernels, its own kernel, and a wait for that."""
MULTIPROCESSORS: Final = 132


@final
class Script:
    """The instructions of a pass: tensors by name, and what the device does."""

    def __init__(self, clock: "Clock") -> None:
        self.lines: list[tuple[str, str, float]] = []
        self._clock = clock

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

    def gradient(self, name: str, numel: int) -> "Script":
        """Allocate the gradient of a parameter, which stays to the end of the backward."""
        self.lines.append(("land", name, numel * BF16))
        return self

    def moved(self, *nbytes: int) -> "Script":
        """Run kernels that read and write so many bytes, one each."""
        self.lines += [("run", "", self._clock.moved_s(one)) for one in nbytes]
        return self

    def product(self, rows: int, inputs: int, outputs: int) -> "Script":
        """Run a product of matrices."""
        self.lines.append(("run", "", self._clock.product_s(rows, inputs, outputs)))
        return self

    def attention(self, flops: float) -> "Script":
        """Run fused attention."""
        self.lines.append(("run", "", self._clock.attention_s(flops)))
        return self

    def exchange(self, kind: str, nbytes: int) -> "Script":
        """Run a collective of the tensor ranks, which kernels wait for."""
        self.lines.append(("exchange", "", self._clock.tensor_s(kind, nbytes)))
        return self


@final
@dataclass(frozen=True)
class Clock:
    """How long a rank's kernels and collectives take.

    Args:
        span: of the tensor ranks.
    """

    device: Device
    span: Span

    def moved_s(self, nbytes: int) -> float:
        """Return the seconds of a kernel that is bound by memory."""
        return self.device.kernel_s(Cost(0, nbytes), "bfloat16")

    def product_s(self, rows: int, inputs: int, outputs: int) -> float:
        """Return the seconds of a product."""
        moved = BF16 * (rows * inputs + inputs * outputs + rows * outputs)
        return self.device.kernel_s(Cost(2.0 * rows * inputs * outputs, moved, "matmul", rows, outputs), "bfloat16")

    def attention_s(self, flops: float) -> float:
        """Return the seconds of fused attention."""
        return self.device.kernel_s(Cost(flops, 0, "attention"), "bfloat16")

    def tensor_s(self, kind: str, nbytes: int) -> float:
        """Return the seconds of a collective of the tensor ranks."""
        return self.device.collective_s(kind, nbytes, self.span)


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


def block_forward(rank: Rank, clock: Clock) -> Script:
    """Return the forward of a decoder layer; its input stays."""
    u, l, t, h = rank.whole, rank.local, rank.tensor, rank.hidden
    rows = rank.sequence * rank.batch
    q, inner = u // t, rows * rank.inner * BF16 // t
    s = Script(clock).make(y1=l, rstd1=rows * FP32 // t).moved(2 * l)
    # Queries, keys and values are permuted into one tensor; keys and values are joined and permuted once more.
    s.make(qkv=3 * q)
    _gathered(s, rank, h, 3 * h // t)
    s.make(split=3 * q).drop("qkv").make(kv=2 * q, keyvalue=2 * q).drop("kv").moved(6 * q, 4 * q, 4 * q, 2 * q, 2 * q)
    s.moved(*[0] * 8)  # lengths of sequences: two zeros, two sums, two scans of two kernels
    s.make(context=q, lse=rows * rank.heads // t * FP32).attention(2.0 * rows * rank.sequence * h / t)
    if rank.batch > 1:  # the context is transposed, and a product wants it in order
        s.make(copy=q).moved(2 * q)
    s.make(out=u).product(rows, h // t, h)
    if rank.batch > 1:
        s.drop("copy")
    if t > 1:
        s.make(scattered=l).exchange("reduce", u).drop_late("out")
    s.make(x2=l).moved(3 * l)
    s.drop_late("scattered") if t > 1 else s.drop("out")
    s.make(y2=l, rstd2=rows * FP32 // t).moved(2 * l)
    s.make(gateup=2 * inner)
    _gathered(s, rank, h, 2 * rank.inner // t)
    s.make(active=inner, product=inner).moved(2 * inner, 3 * inner).make(down=u).product(rows, rank.inner // t, h)
    if t > 1:
        s.make(scattered=l).exchange("reduce", u).drop_late("down")
    s.make(output=l).moved(3 * l)
    return s.drop_late("scattered") if t > 1 else s.drop("down")


def _gathered(s: Script, rank: Rank, inputs: int, outputs: int) -> None:
    """Write a product whose rows are gathered meanwhile: that of the own part, then (on the first rank) of the rest."""
    rows, t = rank.sequence * rank.batch, rank.tensor
    if t > 1:
        s.exchange("gather", rows * rank.hidden * BF16)
        s.product(rows // t, inputs, outputs)
    s.product(rows - (rows // t if t > 1 else 0), inputs, outputs)


def block_backward(rank: Rank, clock: Clock) -> Script:
    """Return the backward of a decoder layer, from the gradient of its output to the one of its input."""
    u, l, t, h = rank.whole, rank.local, rank.tensor, rank.hidden
    rows = rank.sequence * rank.batch
    q, inner = u // t, rows * rank.inner * BF16 // t
    parts = MULTIPROCESSORS * h * FP32
    s = Script(clock).make(dproduct=inner)
    _gathered(s, rank, h, rank.inner // t)
    s.gradient("down", h * rank.inner // t).product(h, rows, rank.inner // t).drop("product")
    s.make(dactive=inner, dup=inner).moved(3 * inner, 3 * inner).drop("dproduct", "active")
    s.make(dgate=inner).moved(3 * inner).drop("dactive")
    s.make(dgateup=2 * inner).moved(4 * inner).drop("dgate", "dup", "gateup")
    _column_backward(s, rank, "gate_up", 2 * rank.inner // t, "dgateup", "y2")
    d = "dscattered" if t > 1 else "dy"
    s.make(dx=l, partial=parts).gradient("post_attention_layernorm", h).drop("partial").moved(4 * l, parts, 0)
    s.drop_late(d) if t > 1 else s.drop(d)
    s.drop("rstd2", "x2", "dx").moved(3 * l)
    s.make(dcontext=q)
    _gathered(s, rank, h, h // t)
    s.gradient("o", h * h // t).product(h, rows, h // t)
    s.make(dq=q, dk=q, dv=q, sums=2 * q, softmax=rows * rank.heads // t * FP32).drop("sums", "softmax")
    s.moved(2 * q, 2 * q).attention(5.0 * rows * rank.sequence * h / t).moved(3 * q)
    s.drop("dcontext", "context", "lse", "split", "keyvalue")
    s.make(dkeyvalue=2 * q).drop("dk", "dv").make(dsplit=3 * q).drop("dq", "dkeyvalue")
    s.moved(4 * q, 2 * q, 2 * q, 6 * q)
    s.make(folded=3 * q).moved(6 * q)
    _column_backward(s, rank, "qkv", 3 * h // t, "dsplit", "y1")
    s.make(dx=l, partial=parts).gradient("input_layernorm", h).drop("partial").moved(4 * l, parts, 0)
    s.drop_late(d) if t > 1 else s.drop(d)
    return s.drop("rstd1", "input", "dx").moved(3 * l)


def _column_backward(s: Script, rank: Rank, name: str, outputs: int, gradient: str, x: str) -> None:
    """Write the backward of a product whose input was gathered: the input is gathered once more."""
    rows, h = rank.sequence * rank.batch, rank.hidden
    s.make(dy=rank.whole)
    if rank.tensor > 1:
        s.exchange("gather", rank.whole)
    s.product(rows, outputs, h)
    if name == "qkv":  # its gradient is a view that is not in order: one copy for each of both products
        s.drop("folded").make(ordered=3 * rank.whole // rank.tensor).moved(6 * rank.whole // rank.tensor)
    if rank.tensor > 1:
        s.make(dscattered=rank.local).exchange("reduce", rank.whole)
    s.gradient(name, h * outputs).product(outputs, rows, h)
    if name == "qkv":
        s.drop("ordered")
    s.drop(gradient)
    if rank.tensor > 1:
        s.drop_late(x, "dy")
    else:
        s.drop(x)


def head_forward(rank: Rank, clock: Clock) -> Script:
    """Return the final norm, the logits and their cross entropy, sharded over the tensor ranks."""
    rows = rank.sequence * rank.batch
    local = rank.vocabulary // rank.tensor
    numel = rows * local
    s = Script(clock).make(y=rank.local, rstd=rows * FP32 // rank.tensor).moved(2 * rank.local)
    # `forward_with_hidden_states` holds the bf16 logits till it returns, `LlamaForTraining.forward` the fp32 ones.
    s.make(logits=numel * BF16)
    _gathered(s, rank, rank.hidden, local)
    s.make(wide=numel * FP32).moved(numel * 6).drop("logits").moved(numel * 4)
    s.make(softmax=numel * FP32).moved(numel * 8, *[0] * 8)
    if rank.tensor > 1:
        for _ in range(3):
            s.exchange("all-reduce", rows * FP32)
    return s.moved(numel * 8, numel * 4, 0, 0, numel * 8, 0, 0, 0, 0).drop("wide")


def head_backward(rank: Rank, clock: Clock) -> Script:
    """Return the backward of the head; it leaves "g"."""
    rows, t = rank.sequence * rank.batch, rank.tensor
    local = rank.vocabulary // t
    # The gradient is written over the softmax, then rounded.
    s = Script(clock).moved(*[0] * 7, rows * local * 8).make(dlogits=rows * local * BF16)
    s.moved(rows * local * 6).drop("softmax")
    _column_backward(s, rank, "head", local, "dlogits", "y")
    s.make(g=rank.local, partial=MULTIPROCESSORS * rank.hidden * FP32).gradient("norm", rank.hidden)
    s.moved(4 * rank.local, 0, 0).drop("partial", "rstd", "input")
    return s.drop_late("dscattered") if t > 1 else s.drop("dy")


SCRIPTS: Final[Mapping[str, Callable[[Rank, Clock], Script]]] = MappingProxyType(
    {"forward": block_forward, "backward": block_backward, "head": head_forward, "head backward": head_backward}
)
"""The passes of a layer, and of the head, by name."""


@final
class _Memory:
    """A rank's memory while its steps are played."""

    def __init__(self, rank: Rank, device: Device, rules: Rules) -> None:
        self.rank, self.allocator = rank, Allocator(rules)
        self.next = self.queued = 0
        clock = Clock(device, device.spread(rank.tensor))
        # In a pipeline the host polls for each message (`_send_meta`, `_recv_meta`), and is not ahead.
        self.ahead = QUEUE_LENGTH if rank.has_embedding and rank.has_head else 0
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
        """Queue kernels; the host runs ahead of the device by as many as its queue holds."""
        self.queued += kernels

    def synchronize(self) -> None:
        """Let the device finish what was queued."""
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
        self.queue(len(self.gradients))  # each is added to its fp32 sum
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
        """Clip gradients, then update each parameter, which is a group of its own, then round."""
        self.queue(2 * len(self.shards))
        for numel in self.shards:
            if is_first:
                self.take(4)
                self.take(numel * FP32)
                self.take(numel * FP32)
            self.queue(2)
        self.queue(len(self.shards))

    def publish(self) -> None:
        """Gather the updated parameters: `all_gather_coalesced` copies them flat, one tensor a rank, and NCCL again."""
        shard = sum(self.shards) * BF16
        taken = [self.take(shard) for _ in range(self.rank.data + 1)]
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
    memory = _Memory(rank, device_named("h100-80"), Rules(device_bytes=device_bytes))
    try:
        memory.set_up()
        for number in range(steps):
            memory.step(is_first=number == 0)
    except MemoryError:
        return 0
    return memory.allocator.peak_reserved_bytes


@lru_cache(maxsize=256)
def blocks_of(layers: int, layer_cost: int, head_cost: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return blocks, and decoder layers among them, of each pipeline rank (`build_model`, models/base.py).

    Blocks are dealt out by what they compute: the next rank begins where its share of the whole is reached. (The source
    says exceeded; by their memory, the runs with a tie, of 1.34B on 2 and 4 pipeline ranks, had it reached.)
    """
    costs = [0] + [layer_cost] * layers + [0, head_cost, 0, 0]
    done, at, found = 0, 0, [[0, 0] for _ in range(ranks)]
    for place, cost in enumerate(costs):
        done += cost
        found[min(at, ranks - 1)][0] += 1
        found[min(at, ranks - 1)][1] += 1 <= place <= layers
        at += done * ranks >= sum(costs) * (at + 1)
    return tuple((blocks, own) for blocks, own in found)
