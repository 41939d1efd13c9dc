"""The operations of nanotron's units in a step: instructions written from its source, tensor by tensor.

Owns the forward and the backward of embedding, layer and head. It must not know the order of a step, which the film
plays as that of any program, or published runs. Needs no torch. Read `tape.py` first, then `_block_forward`.

Source: huggingface/nanotron, branch nouamane/bench2 (that of the Ultra-Scale Playbook's benchmark): models/llama.py,
parallel/tensor_parallel/functional.py, nn/layer_norm.py; Dao-AILab/flash-attention, flash_attn_interface.py and
layers/rotary.py.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.shape.tape import GIVEN, INPUT, Exchange, Instruction, Parts

__all__ = ["nanotron_parts"]

BF16: Final = 2
FP32: Final = 4
MULTIPROCESSORS: Final = 132


@final
class _Sizes:
    """Sizes of a micro-batch: `whole` and `own` are the bytes of hidden states of all tokens, and of this rank's."""

    def __init__(self, model: Transformer, batch: int, sequence: int, t: int) -> None:
        self.model, self.batch, self.sequence, self.t, self.rows = model, batch, sequence, t, batch * sequence
        self.whole = self.rows * model.hidden * BF16
        self.own = self.whole // t


@final
class _Script:
    """The instructions of a unit: named tensors, kernels and collectives; a name stands for its last tensor."""

    def __init__(self) -> None:
        self.lines: list[Instruction] = []
        self.numbers = {"input": INPUT, "g": GIVEN}
        self._sizes: dict[int, int] = {}

    def make(self, **tensors: int) -> "_Script":
        """Allocate tensors, in order."""
        for name, nbytes in tensors.items():
            number = self.numbers[name] = len(self._sizes) + 1
            self._sizes[number] = nbytes
            self.lines.append(Instruction("make", name, number, nbytes))
        return self

    def drop(self, *names: str, kind: str = "drop") -> "_Script":
        """Free tensors."""
        numbers = [(name, self.numbers[name]) for name in names]
        self.lines += [Instruction(kind, name, one, self._sizes.get(one, 0)) for name, one in numbers]
        return self

    def drop_late(self, *names: str) -> "_Script":
        """Free tensors that a collective used on its stream."""
        return self.drop(*names, kind="late")

    def gradient(self, name: str, numel: int) -> "_Script":
        """Allocate the gradient of a parameter, which lives until the end of the backward."""
        self.lines.append(Instruction("keep", f"gradient of {name}", nbytes=numel * BF16))
        return self

    def moved(self, *nbytes: int) -> "_Script":
        """Run kernels that read and write `nbytes`, one kernel per number."""
        return self.run(*(Cost(0, one) for one in nbytes))

    def product(self, rows: int, inputs: int, outputs: int) -> "_Script":
        """Run a matrix product."""
        moved = BF16 * (rows * inputs + inputs * outputs + rows * outputs)
        return self.run(Cost(2.0 * rows * inputs * outputs, moved, "matmul", rows, outputs))

    def run(self, *costs: Cost) -> "_Script":
        """Run kernels."""
        self.lines += [Instruction("run", "", cost=one) for one in costs]
        return self

    def exchange(self, kind: str, nbytes: int) -> "_Script":
        """Run a collective of the tensor ranks; kernels wait for it."""
        self.lines.append(Instruction("exchange", kind, exchange=Exchange(kind, nbytes)))
        return self

    def hand(self, name: str) -> None:
        """Leave a gradient to the module before."""
        self.lines.append(Instruction("hand", name, self.numbers[name]))

    def taken(self) -> tuple[Instruction, ...]:
        """Return the instructions since the last call."""
        lines, self.lines = tuple(self.lines), []
        return lines


@lru_cache(64)
def nanotron_parts(model: Transformer, batch: int, sequence: int, tensor: int) -> Mapping[str, Parts]:
    """Return the instructions of each kind of unit, as `transformer.tapes` has their operations.

    Args:
        batch: sequences of a micro-batch, each of `sequence` tokens.
        tensor: number of ranks of tensor parallelism, with the tokens of other operations split over them.

    Raises:
        ValueError: the model has other blocks than nanotron's Llama.
    """
    if model.block != "llama" or model.experts or model.latent or model.has_qk_norm or model.dropout:
        raise ValueError(f"The kernels of nanotron are written for blocks of Llama; {model.name} has others.")
    sizes, found = _Sizes(model, batch, sequence, tensor), dict[str, Parts]()
    for kind, forward, backward in (
        ("embedding", _embedding, _embedding_backward),
        ("block", _block, _block_backward),
        ("head", _head, _head_backward),
    ):
        script = _Script()
        forward(script, sizes)
        first, output = script.taken(), script.numbers["output"]
        backward(script, sizes)
        found[kind] = Parts(first, script.taken(), output)
    return MappingProxyType(found)


def _embedding(s: _Script, sizes: _Sizes) -> None:
    if sizes.t > 1:
        s.make(out=sizes.whole, masked=sizes.whole).drop("out")
        s.make(output=sizes.own).drop("masked")
    else:
        s.make(output=sizes.whole)


def _embedding_backward(s: _Script, sizes: _Sizes) -> None:
    if sizes.t > 1:
        s.make(gathered=sizes.whole).drop("g").make(g=sizes.whole).drop("gathered")
    s.gradient("the embedding", sizes.model.vocabulary // sizes.t * sizes.model.hidden)
    s.make(sums=2 * sizes.whole).drop("sums", "g")  # fp32 sums of the rows of each token


def _block(s: _Script, sizes: _Sizes) -> None:
    u, own, t, h, rows = sizes.whole, sizes.own, sizes.t, sizes.model.hidden, sizes.rows
    q, inner = u // t, rows * sizes.model.inner * BF16 // t
    s.make(y1=own, rstd1=rows * FP32 // t).moved(2 * own)
    # Queries, keys and values are permuted into one tensor; keys and values are concatenated and permuted again.
    s.make(qkv=3 * q)
    _gathered(s, sizes, h, 3 * h // t)
    s.make(split=3 * q).drop("qkv").make(kv=2 * q, keyvalue=2 * q).drop("kv").moved(6 * q, 4 * q, 4 * q, 2 * q, 2 * q)
    s.moved(*[0] * 8)  # lengths of sequences: two zeros, two sums, two scans of two kernels
    s.make(context=q, lse=rows * sizes.model.heads // t * FP32).run(
        Cost(2.0 * rows * sizes.sequence * h / t, 0, "attention")
    )
    if sizes.batch > 1:  # the context is transposed, and a product needs it contiguous
        s.make(copy=q).moved(2 * q)
    s.make(out=u).product(rows, h // t, h)
    if sizes.batch > 1:
        s.drop("copy")
    if t > 1:
        s.make(scattered=own).exchange("reduce", u).drop_late("out")
    s.make(x2=own).moved(3 * own)
    s.drop_late("scattered") if t > 1 else s.drop("out")
    s.make(y2=own, rstd2=rows * FP32 // t).moved(2 * own)
    s.make(gateup=2 * inner)
    _gathered(s, sizes, h, 2 * sizes.model.inner // t)
    s.make(active=inner, product=inner).moved(2 * inner, 3 * inner).make(down=u)
    s.product(rows, sizes.model.inner // t, h)
    if t > 1:
        s.make(scattered=own).exchange("reduce", u).drop_late("down")
    s.make(output=own).moved(3 * own)
    s.drop_late("scattered") if t > 1 else s.drop("down")


def _gathered(s: _Script, sizes: _Sizes, inputs: int, outputs: int) -> None:
    """Add a product whose rows are gathered at the same time: of the own rows, then (on the first rank) of the rest."""
    rows, t = sizes.rows, sizes.t
    if t > 1:
        s.exchange("gather", sizes.whole)
        s.product(rows // t, inputs, outputs)
    s.product(rows - (rows // t if t > 1 else 0), inputs, outputs)


def _block_backward(s: _Script, sizes: _Sizes) -> None:
    """Add the backward of a layer; the gradient of its input takes the memory of that of its output."""
    u, own, t, h, rows = sizes.whole, sizes.own, sizes.t, sizes.model.hidden, sizes.rows
    q, wide = u // t, sizes.model.inner // t
    inner, parts = rows * sizes.model.inner * BF16 // t, MULTIPROCESSORS * h * FP32
    s.make(dproduct=inner)
    _gathered(s, sizes, h, wide)
    s.gradient("down", h * wide).product(h, rows, wide).drop("product")
    s.make(dactive=inner, dup=inner).moved(3 * inner, 3 * inner).drop("dproduct", "active")
    s.make(dgate=inner).moved(3 * inner).drop("dactive")
    s.make(dgateup=2 * inner).moved(4 * inner).drop("dgate", "dup", "gateup")
    _column_backward(s, sizes, "gate_up", 2 * wide, "dgateup", "y2")
    d = "dscattered" if t > 1 else "dy"
    s.make(dx=own, partial=parts).gradient("post_attention_layernorm", h).drop("partial").moved(4 * own, parts, 0)
    s.drop_late(d) if t > 1 else s.drop(d)
    s.drop("rstd2", "x2", "dx").moved(3 * own)
    s.make(dcontext=q)
    _gathered(s, sizes, h, h // t)
    s.gradient("o", h * h // t).product(h, rows, h // t)
    s.make(dq=q, dk=q, dv=q, sums=2 * q, softmax=rows * sizes.model.heads // t * FP32).drop("sums", "softmax")
    s.moved(2 * q, 2 * q).run(Cost(5.0 * rows * sizes.sequence * h / t, 0, "attention")).moved(3 * q)
    s.drop("dcontext", "context", "lse", "split", "keyvalue")
    s.make(dkeyvalue=2 * q).drop("dk", "dv").make(dsplit=3 * q).drop("dq", "dkeyvalue")
    s.moved(4 * q, 2 * q, 2 * q, 6 * q)
    s.make(folded=3 * q).moved(6 * q)
    _column_backward(s, sizes, "qkv", 3 * h // t, "dsplit", "y1")
    s.make(dx=own, partial=parts).gradient("input_layernorm", h).drop("partial").moved(4 * own, parts, 0)
    s.drop_late(d) if t > 1 else s.drop(d)
    s.drop("rstd1", "input", "dx").moved(3 * own)
    s.hand("g")


def _column_backward(s: _Script, sizes: _Sizes, name: str, outputs: int, gradient: str, x: str) -> None:
    """Add the backward of a product with a gathered input: the input is gathered again."""
    rows, h, whole = sizes.rows, sizes.model.hidden, sizes.whole
    s.make(dy=whole)
    if sizes.t > 1:
        s.exchange("gather", whole)
    s.product(rows, outputs, h)
    if name == "qkv":  # its gradient is a non-contiguous view: one copy for each of the two products
        s.drop("folded").make(ordered=3 * whole // sizes.t).moved(6 * whole // sizes.t)
    if sizes.t > 1:
        s.make(dscattered=sizes.own).exchange("reduce", whole)
    s.gradient(name, h * outputs).product(outputs, rows, h)
    if name == "qkv":
        s.drop("ordered")
    s.drop(gradient)
    s.drop_late(x, "dy") if sizes.t > 1 else s.drop(x)


def _head(s: _Script, sizes: _Sizes) -> None:
    """Add the final norm, the logits and their cross entropy, sharded over the tensor ranks."""
    rows, local = sizes.rows, sizes.model.vocabulary // sizes.t
    numel = rows * local
    s.make(y=sizes.own, rstd=rows * FP32 // sizes.t).moved(2 * sizes.own)
    # `forward_with_hidden_states` holds the bf16 logits until it returns, `LlamaForTraining.forward` the fp32 logits.
    s.make(logits=numel * BF16)
    _gathered(s, sizes, sizes.model.hidden, local)
    s.make(wide=numel * FP32).moved(numel * 6).drop("logits").moved(numel * 4)
    s.make(softmax=numel * FP32).moved(numel * 8, *[0] * 8)
    if sizes.t > 1:
        for _ in range(3):
            s.exchange("all-reduce", rows * FP32)
    s.moved(numel * 8, numel * 4, 0, 0, numel * 8, 0, 0, 0, 0).make(output=FP32).drop("wide")


def _head_backward(s: _Script, sizes: _Sizes) -> None:
    rows, t, h = sizes.rows, sizes.t, sizes.model.hidden
    local = sizes.model.vocabulary // t
    # The gradient overwrites the softmax, and is then rounded.
    s.moved(*[0] * 7, rows * local * 8).make(dlogits=rows * local * BF16).moved(rows * local * 6).drop("softmax")
    _column_backward(s, sizes, "the head", local, "dlogits", "y")
    s.make(g=sizes.own, partial=MULTIPROCESSORS * h * FP32).gradient("the last norm", h)
    s.moved(4 * sizes.own, 0, 0).drop("partial", "rstd", "input")
    s.drop_late("dscattered") if t > 1 else s.drop("dy")
    s.hand("g")
