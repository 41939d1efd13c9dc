"""Tables of saved bytes are what a trace of the same blocks finds, for every term of them."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.plan.saved import SAVED, TREATMENTS, Shape, saved_bytes
from zeroshard.plan.trace.tracer import trace_step
from zeroshard.table.activations import PRODUCTS

from .blocks import GPT2Block, LlamaBlock

BLOCKS: dict[str, type[nn.Module]] = {"gpt2": GPT2Block, "llama": LlamaBlock}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
BASE = Shape(batch=2, sequence=64, hidden=128, heads=8, inner=256, kv_heads=4)
# Each size changes on its own, so that no two terms can stand for one another.
SHAPES = (
    BASE,
    Shape(3, 64, 128, 8, 256, 4),
    Shape(2, 96, 128, 8, 256, 4),
    Shape(2, 64, 192, 8, 256, 4),
    Shape(2, 64, 128, 4, 256, 4),
    Shape(2, 64, 128, 8, 384, 4),
    Shape(2, 64, 128, 8, 256, 2),
    Shape(2, 64, 128, 8, 256, 4, tensor=2),
    Shape(1, 160, 256, 8, tensor=4),
)


def traced_bytes(block: str, shape: Shape, treatment: str, personality: str, itemsize: int) -> int:
    """Return what a trace of the block finds."""
    dtype = DTYPES[itemsize]
    with torch.device("meta"):
        model = BLOCKS[block](shape).to(dtype)
        x = torch.empty(shape.batch, shape.sequence, shape.hidden, dtype=dtype, requires_grad=True)
    run = model.forward
    if treatment != "kept":
        kept = [getattr(torch.ops.aten, name).default for name in PRODUCTS]
        contexts = functools.partial(create_selective_checkpoint_contexts, kept)
        options: dict[str, Any] = {"context_fn": contexts} if treatment == "selective" else {}
        run = functools.partial(checkpoint, run, use_reentrant=False, **options)
    return trace_step(lambda _, x: run(x).sum(), model, [x], personality=personality).saved_bytes()


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize(
    ("block", "personality", "itemsize"),
    [(*key, itemsize) for key, table in SAVED.items() for itemsize in table.itemsizes],
)
def test_a_table_is_what_a_trace_finds(block: str, personality: str, itemsize: int, treatment: str) -> None:
    for shape in SHAPES:
        if block == "gpt2":  # its queries are not grouped
            shape = Shape(shape.batch, shape.sequence, shape.hidden, shape.heads, shape.inner, 0, shape.tensor)
        traced = traced_bytes(block, shape, treatment, personality, itemsize)
        assert saved_bytes(block, shape, treatment, personality, itemsize) == traced, shape


def test_the_gpt2_block_is_that_of_the_paper() -> None:
    """34 bytes of b s h: Korthikanti et al. 2022, equation 1, without the scores, which are not kept here."""
    shape = Shape(batch=8, sequence=2048, hidden=4096, heads=32)
    elements = 8 * 2048 * 4096
    assert saved_bytes("gpt2", shape) == 34 * elements + 8 * 2048 * (16 + 4 * 32) + 24
    split = Shape(batch=8, sequence=2048, hidden=4096, heads=32, tensor=8)
    assert saved_bytes("gpt2", split) == 10 * elements + 24 * elements // 8 + 8 * 2048 * (16 + 4 * 4) + 24


def test_what_has_no_table_is_refused() -> None:
    for block, treatment, itemsize in (("bert", "kept", 2), ("gpt2", "offloaded", 2), ("gpt2", "kept", 4)):
        with pytest.raises(ValueError, match=r"There is no table for .* Known tables: gpt2 on cuda \(2\)"):
            saved_bytes(block, BASE, treatment, "cuda", itemsize)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 8, 2), "batch must be at least 1"),
        ((1, 1, 8, 3), "hidden must be a multiple of heads"),
        ((1, 1, 8, 4, 0, 3), "heads must be a multiple of kv_heads"),
        ((1, 1, 8, 4, 0, 2, 4), "kv_heads must be a multiple of tensor"),
        ((1, 1, 8, 2, 7, 2, 2), "inner must be a multiple of tensor"),
    ],
)
def test_a_shape_that_does_not_divide_is_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(*sizes)
