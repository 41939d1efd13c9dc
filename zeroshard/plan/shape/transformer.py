"""The operations of a transformer in a step: the tape of each unit, for a batch, a sequence length and a split.

Owns the operations of embedding, block and head. It must not know ranks that share parameters, or schedules. Needs no
torch; `tests/plan` compares the tapes with traces of the same modules. Read `tape.py` and `shapes.py` first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, final

from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.shape.tape import INPUT, Exchange, Tape

__all__ = ["Kernels", "Workload", "tapes"]

FP32: Final = 4
CHUNK_TOKENS: Final = 1024
"""Of a chunked loss."""


@final
@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a program, as far as they affect memory.

    Args:
        attention: "flash" keeps one sum per row; "plain" keeps scores, their softmax and, with dropout, a mask;
            "stepwise" keeps the same, copies queries, keys and values by head, and scales and masks scores in separate
            kernels, as programs of 2019 did.
        fused_gate: whether one kernel computes SiLU and product of a gate.
        fused_bias: whether a product adds its bias.
        mask_bytes: bytes of an element of a dropout mask.
        loss: "logits" keeps logits, their fp32 copy and the fp32 log-softmax; "fused" keeps only logits; "sharded"
            (over the tensor ranks) keeps an fp32 softmax; "chunked" keeps the hidden states, and has logits of
            `CHUNK_TOKENS` tokens at a time, which the backward computes again.
        grad_bytes: bytes of an element of a weight's gradient from autograd; 0 for the bytes of the weight.
        program: whose units are written operation by operation (`nanotron.py`); "" for those of this module.
    """

    attention: Literal["flash", "plain", "stepwise"] = "flash"
    fused_gate: bool = False
    fused_bias: bool = True
    mask_bytes: int = 1
    loss: Literal["logits", "fused", "sharded", "chunked"] = "logits"
    grad_bytes: int = 0
    program: Literal["", "nanotron"] = ""


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """One micro-batch of one rank.

    Args:
        batch, sequence: number of sequences, and tokens per sequence.
        itemsize: bytes of an element of activations.
        tensor: number of tensor-parallel ranks.
        is_sequence_parallel: whether operations outside split products are split by tokens.
    """

    batch: int
    sequence: int
    itemsize: int = 2
    tensor: int = 1
    is_sequence_parallel: bool = False
    kernels: Kernels = Kernels()

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch."""
        return self.batch * self.sequence


@cache
def tapes(model: Transformer, load: Workload) -> Mapping[str, Tape]:
    """Return the tape of each kind of unit: "embedding", "block", "dense" (a block without experts) and "head"."""
    found = {"embedding": _embedding(model, load), "block": _block(model, load, model.layers - 1)}
    if model.experts and model.dense_layers:
        found["dense"] = _block(model, load, 0)
    found["head"] = _head(model, load)
    return found


@final
class _Writer:
    """Records operations of a transformer on a tape."""

    def __init__(self, model: Transformer, load: Workload, input_bytes: int) -> None:
        self.model, self.load = model, load
        self.tape = Tape(input_bytes)
        self.e, self.n, self.t = load.itemsize, load.tokens, load.tensor
        self.part = load.tensor if load.is_sequence_parallel else 1
        """Divisor of the tokens outside products."""
        self._gathered: dict[int, int] = {}
        """For each tensor gathered along the tensor axis: the part before the gather."""
        self._is_read: set[int] = set()

    def product(
        self,
        name: str,
        x: int,
        inputs: int,
        outputs: int,
        *,
        rows: int = 0,
        weights: int = 1,
        exchanged: Exchange | None = None,
    ) -> int:
        """Record a linear layer.

        Args:
            rows: number of tokens; by default all of the micro-batch.
            weights: number of matrices of this size, each used for its part of the rows.
            exchanged: the collective after the product in the forward.
        """
        n = rows or self.n
        weight_numel = weights * inputs * outputs
        has_bias = not self.load.kernels.fused_bias and self.model.block == "gpt2" and name != "head"
        # A tensor gathered along the tensor axis is not kept, but gathered again.
        kept = self._gathered.get(x, x)
        again = Exchange("gather", self.tape.sizes[x]) if kept != x and x not in self._is_read else None
        self._is_read.add(x)
        made = self.tape.add(
            name,
            [x],
            [n * outputs * self.e],
            [kept],
            flops=2 * n * inputs * outputs,
            kind="matmul",
            shape=(n, outputs),
            weight_bytes=weight_numel * (self.load.kernels.grad_bytes or self.e),
            read_weight_bytes=weight_numel * self.e,
            workspace=(0, self.tape.sizes[x] if kept != x else 0),
            is_kept=True,
            exchanged=exchanged,
            exchanged_back=again,
        )
        nbytes = self.tape.sizes[made]
        # The backward reads the gradient, for the sum over rows, and forwards it.
        return self.tape.add("bias", [made], [nbytes], passes=True, moved=(2 * nbytes, nbytes)) if has_bias else made

    def chunked_loss(self, x: int, width: int) -> None:
        """Record a cross-entropy of a part of the tokens at a time, with its product."""
        rows, flops, numel = min(self.n, CHUNK_TOKENS), 2 * self.n * self.model.hidden * width, self.n * width
        # Logits, their fp32 copy and log-softmax; in the backward the last of these and two gradients.
        scratch_bytes = rows * width * (self.e + 2 * FP32), rows * width * 3 * FP32
        made = self.tape.add(
            "head", [x], [self.n * FP32], [x], flops=flops, backward_flops=3 * flops, kind="matmul",
            shape=(rows, width), workspace=scratch_bytes, is_kept=True,
            weight_bytes=width * self.model.hidden * (self.load.kernels.grad_bytes or self.e),
        )  # fmt: skip
        self.tape.add("loss", [made], [FP32], moved=(numel * (self.e + 3 * FP32), numel * (2 * self.e + 8 * FP32)))

    def norm(self, name: str, x: int, width: int, tokens: int, *, heads: int = 1, is_split: bool = False) -> int:
        """Record a norm: a layer norm keeps two numbers per row, an RMS norm one.

        Args:
            width: width of a row.
            heads: rows per token.
            is_split: whether products after it are split, which makes the gradient a sum over the tensor ranks.
        """
        statistics = 2 if self.model.block == "gpt2" else 1
        nbytes = tokens * heads * width * self.e
        made = [nbytes] + [tokens * heads * FP32] * statistics
        back = Exchange("all-reduce", nbytes) if is_split and self.t > 1 and self.part == 1 else None
        saves_made = range(1, 1 + statistics)
        normed = self.tape.add(
            name, [x], made, [x], saves_made=saves_made, weight_bytes=statistics * width * self.e, exchanged_back=back
        )
        if not is_split or self.part == 1:
            return normed
        whole_bytes = nbytes * self.part
        gather, reduce = Exchange("gather", whole_bytes), Exchange("reduce", whole_bytes)
        whole = self.tape.add(
            f"{name} gather", [normed], [whole_bytes], moved=(0, 0), exchanged=gather, exchanged_back=reduce
        )
        self._gathered[whole] = normed
        return whole

    def last_product(self, name: str, x: int, inputs: int, *, rows: int = 0, weights: int = 1) -> int:
        """Record a linear layer back to the hidden width with split inputs: results are summed over ranks."""
        outputs = self.model.hidden
        is_summed = self.t > 1 and not rows
        whole_bytes = self.n * outputs * self.e
        if not is_summed or self.part == 1:
            summed = Exchange("all-reduce", whole_bytes) if is_summed else None
            return self.product(name, x, inputs, outputs, rows=rows, weights=weights, exchanged=summed)
        made = self.product(name, x, inputs, outputs)
        return self.scatter(f"{name} sum", made)

    def scatter(self, name: str, x: int) -> int:
        """Sum over the tensor ranks, and keep an equal part of the tokens."""
        nbytes = self.tape.sizes[x]
        reduce, gather = Exchange("reduce", nbytes), Exchange("gather", nbytes)
        return self.tape.add(name, [x], [nbytes // self.part], moved=(0, 0), exchanged=reduce, exchanged_back=gather)

    def elementwise(self, name: str, x: int, nbytes: int) -> int:
        """Record an operation whose backward needs only the gradient: each reads and writes `nbytes`."""
        return self.tape.add(name, [x], [nbytes], moved=(2 * nbytes, 2 * nbytes))

    def add(self, name: str, one: int, other: int) -> int:
        """Record a sum; both inputs share its gradient."""
        return self.tape.add(name, [one, other], [self.tape.sizes[one]], passes=True)

    def dropout(self, name: str, x: int) -> int:
        """Record a dropout that keeps a mask, unless the probability is 0."""
        if not self.model.dropout:
            return x
        nbytes = self.tape.sizes[x]
        mask_bytes = nbytes // self.e * self.load.kernels.mask_bytes
        return self.tape.add(name, [x], [nbytes, mask_bytes], saves_made=[1])


def _embedding(model: Transformer, load: Workload) -> Tape:
    write = _Writer(model, load, 0)
    nbytes = load.tokens * model.hidden * load.itemsize
    weight_bytes = model.vocabulary // load.tensor * model.hidden * (load.kernels.grad_bytes or load.itemsize)
    # Tokens are inputs of the step; the backward fills a gradient of the table's size.
    x = write.tape.add("embedding", [], [nbytes], weight_bytes=0 if model.is_tied else weight_bytes)
    if model.block == "gpt2":
        positions = write.tape.add(
            "positions",
            [],
            [load.sequence * model.hidden * load.itemsize],
            weight_bytes=model.sequence * model.hidden * load.itemsize,
        )
        x = write.tape.add("add", [x, positions], [nbytes], passes=True)
        x = write.dropout("dropout", x)
    if load.tensor > 1 and write.part == 1:
        write.tape.add("embedding sum", [x], [0], passes=True, moved=(0, 0), exchanged=Exchange("all-reduce", nbytes))
    elif load.tensor > 1:
        write.scatter("embedding sum", x)
    return write.tape


def _block(model: Transformer, load: Workload, layer: int) -> Tape:
    tokens = load.tokens // (load.tensor if load.is_sequence_parallel else 1)
    write = _Writer(model, load, tokens * model.hidden * load.itemsize)
    x = INPUT
    y = write.norm("norm_1", x, model.hidden, tokens, is_split=True)
    mixed = _latent(write, y) if model.latent else _mixed(write, y)
    width = (model.heads * model.latent[4] if model.latent else model.query_width) // load.tensor
    out = write.last_product("out", mixed, width)
    x = write.add("add_1", x, write.dropout("dropout_1", out))
    y = write.norm("norm_2", x, model.hidden, tokens, is_split=True)
    out = write.dropout("dropout_2", _experts(write, y) if model.has_experts(layer) else _mlp(write, y))
    write.add("add_2", x, out)
    return write.tape


def _mixed(write: _Writer, y: int) -> int:
    model, t = write.model, write.t
    q, kv = model.query_width // t, model.kv_width // t
    if model.block == "gpt2":
        qkv = write.product("qkv", y, model.hidden, q + 2 * kv)
        return attention(write, [qkv], q, model.head_width, is_joined=True)
    query = write.product("query", y, model.hidden, q)
    key = write.product("key", y, model.hidden, kv)
    value = write.product("value", y, model.hidden, kv)
    if model.has_qk_norm:
        query = write.norm("q_norm", query, model.head_width, write.n, heads=q // model.head_width)
        key = write.norm("k_norm", key, model.head_width, write.n, heads=kv // model.head_width)
    query = write.tape.add("rotate", [query], [write.n * q * write.e])
    key = write.tape.add("rotate", [key], [write.n * kv * write.e])
    return attention(write, [query, key, value], q, model.head_width)


def attention(write: _Writer, reads: list[int], width: int, head_width: int, *, is_joined: bool = False) -> int:
    """Record causal attention over queries, keys and values.

    Args:
        width: width of all values on this rank.
        head_width: width of one query.
        is_joined: whether queries, keys and values are one tensor, whose gradients are then also joined.
    """
    load, n, e = write.load, write.n, write.e
    heads = max(1, width // head_width)
    flops = 4 * n * load.sequence * heads * head_width
    joined_bytes = sum(write.tape.sizes[one] for one in reads) * is_joined
    if load.kernels.attention == "flash":
        # Half of the scores are masked; the backward has five products, the forward two.
        return write.tape.add(
            "attention", reads, [n * width * e, n * heads * FP32], reads, saves_made=[0, 1], flops=flops / 2,
            backward_flops=flops * 5 / 4, kind="attention", is_kept=True,
            workspace=(0, n * width * FP32 + joined_bytes),
        )  # fmt: skip
    scores_numel = load.batch * heads * load.sequence**2
    if load.kernels.attention == "stepwise":
        reads = [write.elementwise(f"{name} by head", reads[0], n * width * e) for name in ("query", "key", "value")]
    scores = write.tape.add(
        "scores", reads[:2], [scores_numel * e], reads[:2], flops=flops / 2, kind="matmul",
        shape=(n * heads, load.sequence),
    )  # fmt: skip
    if load.kernels.attention == "stepwise":
        for name in ("scale", "mask", "shift"):
            scores = write.elementwise(name, scores, scores_numel * e)
    weights = write.tape.add("softmax", [scores], [scores_numel * e], saves_made=[0])
    weights = write.dropout("attention dropout", weights)
    values = reads[-1]
    return write.tape.add(
        "attention", [weights, values], [n * width * e], [weights, values], flops=flops / 2, kind="matmul",
        shape=(n * heads, head_width), workspace=(0, joined_bytes),
    )  # fmt: skip


def _latent(write: _Writer, y: int) -> int:
    model, t, n = write.model, write.t, write.n
    q_rank, kv_rank, plain, rotary, value = model.latent
    heads = model.heads // t
    q = write.norm("q_a_norm", write.product("q_a", y, model.hidden, q_rank), q_rank, n)
    query = write.product("q_b", q, q_rank, heads * (plain + rotary))
    query = write.tape.add("rotate", [query], [write.tape.sizes[query]])
    joint = write.product("kv_a", y, model.hidden, kv_rank + rotary)
    kv = write.norm("kv_a_norm", joint, kv_rank, n)
    kv = write.product("kv_b", kv, kv_rank, heads * (plain + value))
    key = write.tape.add("join", [kv, joint], [n * heads * (plain + rotary) * write.e])
    return attention(write, [query, key, kv], heads * value, plain + rotary)


def _mlp(write: _Writer, y: int) -> int:
    model, t = write.model, write.t
    if model.block == "gpt2":
        up = write.product("up", y, model.hidden, model.inner // t)
        active = write.tape.add("gelu", [up], [write.tape.sizes[up]], [up])
        return write.last_product("down", active, model.inner // t)
    return gated(write, "", y, (model.dense_inner if model.experts else model.inner) // t, 0, 1)


def gated(write: _Writer, prefix: str, y: int, inner: int, rows: int, weights: int) -> int:
    """Record a gated MLP; `rows` and `weights` as in `_Writer.product`."""
    hidden = write.model.hidden
    gate = write.product(f"{prefix}gate", y, hidden, inner, rows=rows, weights=weights)
    up = write.product(f"{prefix}up", y, hidden, inner, rows=rows, weights=weights)
    nbytes = write.tape.sizes[gate]
    if write.load.kernels.fused_gate:
        made = write.tape.add(f"{prefix}swiglu", [gate, up], [nbytes], [gate, up])
    else:
        active = write.tape.add(f"{prefix}silu", [gate], [nbytes], [gate])
        made = write.tape.add(f"{prefix}multiply", [active, up], [nbytes], [active, up])
    return write.last_product(f"{prefix}down", made, inner, rows=rows, weights=weights)


def _experts(write: _Writer, y: int) -> int:
    """Record a mixture of experts with evenly distributed tokens."""
    model, n, e = write.model, write.n, write.e
    rows = n * model.experts_used
    logits = write.product("router", y, model.hidden, model.experts)
    weights = write.tape.add(
        "route", [logits], [n * model.experts_used * FP32, n * model.experts * FP32, rows * 8], saves_made=[1, 2]
    )
    sent = write.tape.add("dispatch", [y], [rows * model.hidden * e])
    made = gated(write, "experts.", sent, model.inner // write.t, rows, model.experts)
    nbytes, is_scattered = n * model.hidden * e, write.part > 1
    summed = Exchange("all-reduce", nbytes) if write.t > 1 and not is_scattered else None
    back = write.tape.add("combine", [made, weights], [nbytes], [made, weights], exchanged=summed)
    back = write.scatter("experts.sum", back) if is_scattered else back
    if not model.shared_inner:
        return back
    return write.add("add_shared", back, gated(write, "shared.", y, model.shared_inner // write.t, 0, 1))


def _head(model: Transformer, load: Workload) -> Tape:
    tokens = load.tokens // (load.tensor if load.is_sequence_parallel else 1)
    write = _Writer(model, load, tokens * model.hidden * load.itemsize)
    y = write.norm("norm", INPUT, model.hidden, tokens, is_split=True)
    width = -(-model.vocabulary // load.tensor)
    if load.kernels.loss == "chunked":
        write.chunked_loss(y, width)
        return write.tape
    logits = write.product("head", y, model.hidden, width)
    numel = load.tokens * width
    loss = load.kernels.loss
    if loss == "fused":
        write.tape.add("loss", [logits], [FP32], [logits])
    elif loss == "sharded":
        write.tape.add("loss", [logits], [FP32, numel * FP32], saves_made=[1])
    else:
        wide = write.tape.add("float", [logits], [numel * FP32]) if load.itemsize < FP32 else logits
        log = write.tape.add("log_softmax", [wide], [numel * FP32], saves_made=[0])
        write.tape.add("loss", [log], [FP32])
    return write.tape
