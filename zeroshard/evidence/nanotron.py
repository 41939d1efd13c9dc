"""The operations of a unit of nanotron in a step, from its source: tensors by name, kernels and collectives.

Owns the passes of a layer and of the head, and the parameters of each pipeline rank. It must not know the order of a
step (`nanotron_memory.py`) or the published runs. Needs no torch. Read `block_forward` first.

Source: huggingface/nanotron, branch nouamane/bench2 (that of the Ultra-Scale Playbook's benchmark):
models/llama.py, parallel/tensor_parallel/functional.py, nn/layer_norm.py, models/base.py; Dao-AILab/flash-attention,
flash_attn_interface.py and layers/rotary.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.machine.hardware import Cost, Device, Span

__all__ = ["Clock", "Rank", "SCRIPTS", "Script", "blocks_of"]

MIB: Final = 1 << 20
BF16: Final = 2
FP32: Final = 4
MULTIPROCESSORS: Final = 132


@final
class Script:
    """The instructions of a pass: named tensors, kernels and collectives."""

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
        """Free tensors that a collective used on its stream."""
        self.lines += [("late", name, 0) for name in names]
        return self

    def gradient(self, name: str, numel: int) -> "Script":
        """Allocate the gradient of a parameter, which lives until the end of the backward."""
        self.lines.append(("land", name, numel * BF16))
        return self

    def moved(self, *nbytes: int) -> "Script":
        """Run kernels that read and write `nbytes`, one kernel per number."""
        self.lines += [("run", "", self._clock.moved_s(one)) for one in nbytes]
        return self

    def product(self, rows: int, inputs: int, outputs: int) -> "Script":
        """Run a matrix product."""
        self.lines.append(("run", "", self._clock.product_s(rows, inputs, outputs)))
        return self

    def attention(self, flops: float) -> "Script":
        """Run fused attention."""
        self.lines.append(("run", "", self._clock.attention_s(flops)))
        return self

    def exchange(self, kind: str, nbytes: int) -> "Script":
        """Run a collective of the tensor ranks; kernels wait for it."""
        self.lines.append(("exchange", "", self._clock.tensor_s(kind, nbytes)))
        return self


@final
@dataclass(frozen=True)
class Clock:
    """The time of a rank's kernels and collectives.

    Args:
        span: placement of the tensor ranks.
    """

    device: Device
    span: Span

    def moved_s(self, nbytes: int) -> float:
        """Return the seconds of a memory-bound kernel."""
        return self.device.kernel_s(Cost(0, nbytes), "bfloat16")

    def product_s(self, rows: int, inputs: int, outputs: int) -> float:
        """Return the seconds of a matrix product."""
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
        layers: number of layers of this rank.
        batch: sequences per micro-batch.
        data, tensor: numbers of ranks.
        zero: 0 or 1.
        has_embedding, has_head: whether the rank is the first and the last of its pipeline.
        is_waiting: whether the host waits for each collective, and does not run ahead of the device.
        in_flight: number of micro-batches whose forward precedes the first backward.
        micro_batches: number of micro-batches per step.
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
    is_waiting: bool = False

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
        """Whether DDP wraps the model: `_init_model` does not wrap it if ZeRO-1 sums gradients in fp32."""
        return self.data > 1 and self.zero == 0

    def block_parameters(self) -> list[tuple[str, int]]:
        """Return names and numbers of elements, in order of registration."""
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
    """Return the forward of a decoder layer; its input stays allocated."""
    u, own, t, h = rank.whole, rank.local, rank.tensor, rank.hidden
    rows = rank.sequence * rank.batch
    q, inner = u // t, rows * rank.inner * BF16 // t
    s = Script(clock).make(y1=own, rstd1=rows * FP32 // t).moved(2 * own)
    # Queries, keys and values are permuted into one tensor; keys and values are concatenated and permuted again.
    s.make(qkv=3 * q)
    _gathered(s, rank, h, 3 * h // t)
    s.make(split=3 * q).drop("qkv").make(kv=2 * q, keyvalue=2 * q).drop("kv").moved(6 * q, 4 * q, 4 * q, 2 * q, 2 * q)
    s.moved(*[0] * 8)  # lengths of sequences: two zeros, two sums, two scans of two kernels
    s.make(context=q, lse=rows * rank.heads // t * FP32).attention(2.0 * rows * rank.sequence * h / t)
    if rank.batch > 1:  # the context is transposed, and a product needs it contiguous
        s.make(copy=q).moved(2 * q)
    s.make(out=u).product(rows, h // t, h)
    if rank.batch > 1:
        s.drop("copy")
    if t > 1:
        s.make(scattered=own).exchange("reduce", u).drop_late("out")
    s.make(x2=own).moved(3 * own)
    s.drop_late("scattered") if t > 1 else s.drop("out")
    s.make(y2=own, rstd2=rows * FP32 // t).moved(2 * own)
    s.make(gateup=2 * inner)
    _gathered(s, rank, h, 2 * rank.inner // t)
    s.make(active=inner, product=inner).moved(2 * inner, 3 * inner).make(down=u).product(rows, rank.inner // t, h)
    if t > 1:
        s.make(scattered=own).exchange("reduce", u).drop_late("down")
    s.make(output=own).moved(3 * own)
    return s.drop_late("scattered") if t > 1 else s.drop("down")


def _gathered(s: Script, rank: Rank, inputs: int, outputs: int) -> None:
    """Add a product whose rows are gathered at the same time: of the own rows, then (on the first rank) of the rest."""
    rows, t = rank.sequence * rank.batch, rank.tensor
    if t > 1:
        s.exchange("gather", rows * rank.hidden * BF16)
        s.product(rows // t, inputs, outputs)
    s.product(rows - (rows // t if t > 1 else 0), inputs, outputs)


def block_backward(rank: Rank, clock: Clock) -> Script:
    """Return the backward of a decoder layer, from the gradient of its output to the gradient of its input."""
    u, own, t, h = rank.whole, rank.local, rank.tensor, rank.hidden
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
    s.make(dx=own, partial=parts).gradient("post_attention_layernorm", h).drop("partial").moved(4 * own, parts, 0)
    s.drop_late(d) if t > 1 else s.drop(d)
    s.drop("rstd2", "x2", "dx").moved(3 * own)
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
    s.make(dx=own, partial=parts).gradient("input_layernorm", h).drop("partial").moved(4 * own, parts, 0)
    s.drop_late(d) if t > 1 else s.drop(d)
    return s.drop("rstd1", "input", "dx").moved(3 * own)


def _column_backward(s: Script, rank: Rank, name: str, outputs: int, gradient: str, x: str) -> None:
    """Add the backward of a product with a gathered input: the input is gathered again."""
    rows, h = rank.sequence * rank.batch, rank.hidden
    s.make(dy=rank.whole)
    if rank.tensor > 1:
        s.exchange("gather", rank.whole)
    s.product(rows, outputs, h)
    if name == "qkv":  # its gradient is a non-contiguous view: one copy for each of the two products
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
    # `forward_with_hidden_states` holds the bf16 logits until it returns, `LlamaForTraining.forward` the fp32 logits.
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
    # The gradient overwrites the softmax, and is then rounded.
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


@lru_cache(maxsize=256)
def blocks_of(layers: int, layer_cost: int, head_cost: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return (blocks, decoder layers) of each pipeline rank (`build_model`, models/base.py).

    Blocks are distributed by compute: the next rank starts when the rank's share of the total is reached. (The source
    requires more than the share; the memory of the tied runs, of 1.34B on 2 and 4 pipeline ranks, shows equality.)
    """
    costs = [0] + [layer_cost] * layers + [0, head_cost, 0, 0]
    done, at, found = 0, 0, [[0, 0] for _ in range(ranks)]
    for place, cost in enumerate(costs):
        done += cost
        found[min(at, ranks - 1)][0] += 1
        found[min(at, ranks - 1)][1] += 1 <= place <= layers
        at += done * ranks >= sum(costs) * (at + 1)
    return tuple((blocks, own) for blocks, own in found)
