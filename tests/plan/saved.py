"""Bytes that a transformer block keeps for the backward, in closed form: tables of terms, by block and treatment.

Owns the tables and their sums, in integers; it runs no model and needs no torch. A test traces the same blocks
(`tests/plan/blocks.py`) and compares the numbers. It must not know other models: those are traced.

Note: how to read a table
    A term is a number of elements in the block's dtype, and a number of bytes, each times a product of sizes. b is the
    batch, s the sequence, h the hidden width, a the number of heads and f the inner width of the MLP. With T tensor
    ranks, the widths inside attention and the MLP are divided by T, "h/T" and "f/T"; "k/T" is the width of keys, which
    is smaller than h with grouped queries. Treatments: "kept" is what autograd saves; "recompute" is activation
    checkpointing of the block, which saves its input; "selective" recomputes everything except products and attention
    (`PRODUCTS` of `table/activations.py`).

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1, whose 34
bytes of b s h are those of the GPT-2 block in half precision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

__all__ = ["SAVED", "Shape", "TREATMENTS", "Table", "Term", "saved_bytes"]


@final
@dataclass(frozen=True)
class Shape:
    """The sizes of a block, and its number of tensor ranks.

    Args:
        inner: width of the MLP; 0 for four times the hidden width.
        kv_heads: number of heads of keys and values; 0 for the number of query heads.

    Raises:
        ValueError: a size is less than 1, or is not divisible as required.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    inner: int = 0
    kv_heads: int = 0
    tensor: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", self.inner or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        for name in ("batch", "sequence", "hidden", "heads", "inner", "kv_heads", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"Shape.{name} must be at least 1, got {getattr(self, name)}.")
        for name, of in (("hidden", "heads"), ("heads", "kv_heads"), ("kv_heads", "tensor"), ("inner", "tensor")):
            if getattr(self, name) % getattr(self, of):
                raise ValueError(
                    f"Shape.{name} must be a multiple of {of}, got {getattr(self, name)} and {getattr(self, of)}."
                )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def own_heads(self) -> int:
        """Number of query heads on one tensor rank."""
        return self.heads // self.tensor

    @property
    def own_hidden(self) -> int:
        """Width of the queries on one tensor rank."""
        return self.hidden // self.tensor

    @property
    def own_kv_hidden(self) -> int:
        """Width of the keys on one tensor rank."""
        return self.kv_heads * self.head_width // self.tensor

    @property
    def own_inner(self) -> int:
        """Width of the MLP on one tensor rank."""
        return self.inner // self.tensor

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes by their names in terms."""
        return {
            "b": self.batch,
            "s": self.sequence,
            "h": self.hidden,
            "a/T": self.own_heads,
            "h/T": self.own_hidden,
            "k/T": self.own_kv_hidden,
            "f/T": self.own_inner,
        }


@final
@dataclass(frozen=True)
class Term:
    """Elements and bytes per unit of a product of sizes.

    Args:
        of: names of sizes, separated by spaces.
        elements: number of elements in the block's dtype.
        nbytes: number of bytes, independent of the dtype.
    """

    of: str
    elements: int = 0
    nbytes: int = 0


_INPUT: Final = (Term("b s h", 1),)
# Of flash attention: the state of the random generator, even without dropout.
_SEED: Final = Term("", nbytes=24)

# Kept by all blocks: queries and attention outputs, keys and values, and the sums of the softmax in fp32.
_ATTENTION: Final = (Term("b s h/T", 2), Term("b s k/T", 2), Term("b s a/T", nbytes=4))


@final
@dataclass(frozen=True)
class Table:
    """The kept tensors of a block.

    Args:
        itemsizes: bytes per element for which the table is valid.
        kept, selective: terms of these treatments; with "recompute", every block keeps its input.
    """

    itemsizes: tuple[int, ...]
    kept: tuple[Term, ...]
    selective: tuple[Term, ...]

    def terms(self, treatment: str) -> tuple[Term, ...]:
        """Return the terms of a treatment."""
        return {"kept": self.kept, "recompute": _INPUT, "selective": self.selective}[treatment]


SAVED: Final[Mapping[tuple[str, str], Table]] = MappingProxyType(
    {
        ("gpt2", "cuda"): Table(
            (2,),
            # Inputs of both norms and of the product after each, two masks of one byte; inputs of the GELU and of the
            # last product; two statistics of each norm.
            kept=(Term("b s h", 4, 2), Term("b s f/T", 2), Term("b s", nbytes=16), *_ATTENTION, _SEED),
            # The input, the results of all products, and the attention output.
            selective=(Term("b s h", 3), Term("b s f/T", 1), *_ATTENTION, _SEED),
        ),
        ("gpt2", "cpu"): Table(
            (2, 4),
            # Masks and statistics have the block's dtype.
            kept=(Term("b s h", 6), Term("b s f/T", 2), Term("b s", 4), *_ATTENTION),
            selective=(Term("b s h", 3), Term("b s f/T", 1), *_ATTENTION),
        ),
        ("llama", "cuda"): Table(
            (2,),
            # Inputs of both norms and of the products after each; the gate, its SiLU, its other factor and the product;
            # one statistic of each norm.
            kept=(Term("b s h", 4), Term("b s f/T", 4), Term("b s", nbytes=8), *_ATTENTION, _SEED),
            selective=(Term("b s h", 3), Term("b s f/T", 2), *_ATTENTION, _SEED),
        ),
        ("llama", "cpu"): Table(
            (4,),
            # The norm consists of several operations, and the factor of its weight is also kept.
            kept=(Term("b s h", 6), Term("b s f/T", 4), Term("b s", nbytes=8), *_ATTENTION),
            selective=(Term("b s h", 3), Term("b s f/T", 2), *_ATTENTION),
        ),
    }
)
"""Tables by block and personality."""

TREATMENTS: Final = ("kept", "recompute", "selective")
"""Treatments of the tables."""


def saved_bytes(block: str, shape: Shape, treatment: str = "kept", personality: str = "cuda", itemsize: int = 2) -> int:
    """Return the bytes that a block keeps for the backward, including its input.

    Args:
        block: "gpt2" or "llama".
        treatment: "kept", "recompute" or "selective".
        personality: "cuda" or "cpu".
        itemsize: bytes of an element.

    Raises:
        ValueError: no table exists for this block, personality, treatment and element size.

    >>> from tests.plan.saved import Shape, saved_bytes
    >>> shape = Shape(batch=1, sequence=1024, hidden=768, heads=12)
    >>> round(saved_bytes("gpt2", shape) / (1024 * 768), 2)
    34.08
    >>> saved_bytes("gpt2", shape, "recompute") / (1024 * 768)
    2.0
    """
    table = SAVED.get((block, personality))
    if table is None or treatment not in TREATMENTS or itemsize not in table.itemsizes:
        known = ", ".join(f"{one} on {whose} ({'/'.join(map(str, t.itemsizes))})" for (one, whose), t in SAVED.items())
        raise ValueError(
            f"There is no table for {block} on {personality}, {treatment}, with elements of {itemsize} bytes. "
            f"Known tables: {known}; each with {', '.join(TREATMENTS)}."
        )
    sizes = shape.sizes()
    terms = table.terms(treatment)
    return sum((t.elements * itemsize + t.nbytes) * math.prod(sizes[name] for name in t.of.split()) for t in terms)
