"""The layers of each place of a pipe, as a system cuts a shape.

Owns the cuts. It must not know what a place does (`pipes.py`). Needs no torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from zeroshard.plan.shape.shapes import Transformer
from zeroshard.table.pipeline import balanced

__all__ = ["layers_of"]


@lru_cache(256)
def layers_of(model: Transformer, count: int, cut: str = "bytes") -> Sequence[range]:
    """Return what each chunk of a pipe has: -1 is the embedding, the numbers from 0 layers, their count the head.

    Args:
        cut: as in `System`; "bytes" is that of `zs.pipeline`.

    Raises:
        ValueError: there are fewer layers than chunks.
    """
    if cut == "compute":
        return _by_compute(model, count)
    if model.layers < count:
        raise ValueError(f"{model.name} has {model.layers} blocks, too few for a pipe of {count} chunks.")
    if cut == "even":
        return [
            range(*pair)
            for pair in pairwise([-1, *(-(-n * model.layers // count) for n in range(1, count)), model.layers + 1])
        ]
    sizes = [sum(numel for _, numel in model.block_parameters(layer)) for layer in range(model.layers)]
    for place in (0, -1):  # the embedding, and the head, which counts also where it is tied
        sizes[place] += model.vocabulary * model.hidden
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
