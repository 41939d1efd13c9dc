"""The layers of each place of a pipe, as a system cuts a shape.

Owns the cuts. It must not know what a place does (`pipes.py`). Needs no torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from zeroshard.plan.shape.shapes import Transformer
from zeroshard.table.pipeline import balanced

__all__ = ["layers_of", "mixed"]


def mixed(times: Sequence[float], sizes: Sequence[int], part: float) -> list[int]:
    """Return what blocks cost, in billionths of the whole: their part of the time, and of all bytes.

    Args:
        part: how much bytes count, from 0 to 1.
    """
    whole_s, whole_bytes = sum(times) or 1, sum(sizes) or 1
    return [
        round(1e9 * ((1 - part) * took_s / whole_s + part * nbytes / whole_bytes))
        for took_s, nbytes in zip(times, sizes, strict=True)
    ]


@lru_cache(256)
def layers_of(
    model: Transformer, count: int, cut: str = "bytes", seconds: tuple[float, ...] = (), part: float = 0.0
) -> Sequence[range]:
    """Return what each chunk of a pipe has: -1 is the embedding, the numbers from 0 layers, their count the head.

    Args:
        cut: as in `System`; "bytes" is that of `zs.pipeline`.
        seconds, part: instead, divide what these seconds of each block, with embedding and head, and bytes cost.

    Raises:
        ValueError: there are fewer layers than chunks.
    """
    if cut == "compute" and not seconds:
        return _by_compute(model, count)
    if model.layers < count:
        raise ValueError(f"{model.name} has {model.layers} blocks, too few for a pipe of {count} chunks.")
    if cut == "even" and not seconds:
        return [
            range(*pair)
            for pair in pairwise([-1, *(-(-n * model.layers // count) for n in range(1, count)), model.layers + 1])
        ]
    sizes = [sum(numel for _, numel in model.block_parameters(layer)) for layer in range(model.layers)]
    for place in (0, -1):  # the embedding, and the head, which counts also where it is tied
        sizes[place] += model.vocabulary * model.hidden
    if seconds:
        sizes = mixed(seconds, sizes, part)
    return [range(*pair) for pair in pairwise([-1, *balanced(sizes, count)[1:], model.layers + 1])]


def _by_compute(model: Transformer, count: int) -> Sequence[range]:
    """Return the blocks of each place as nanotron divides them: the next place starts at a place's share of the work.

    The source (`build_model`, models/base.py) requires more than the share; the memory of runs of 1.34B on 2 and 4
    places shows equality. Positions, the last norm and the loss are blocks that cost nothing.
    """
    h, inner = model.hidden, model.inner
    costs = [0] + [4 * h * h + 3 * inner * h] * model.layers + [0, model.vocabulary * h, 0, 0]
    done, at, firsts = 0, 0, [0]
    for block, cost in enumerate(costs):
        done += cost
        if at < count - 1 and done * count >= sum(costs) * (at + 1):
            at += 1
            firsts.append(block + 1)
    if len(firsts) < count or firsts[-1] >= len(costs):
        raise ValueError(f"{count} places exceed the {model.layers} layers and the head of {model.name}; use fewer.")
    # Block 0 is the embedding; the last norm and the head are one entry here.
    ends = [min(first - 1, model.layers) for first in firsts[1:]]
    return [range(*pair) for pair in pairwise([-1, *ends, model.layers + 1])]
