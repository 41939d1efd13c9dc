"""The modules that random programs are built of.

Owns one class for each way in which a model uses its parameters: called or read, whole or in part, by choice, twice,
under `no_grad`, in a nested module, behind a checkpoint. Values stay near 1 and change smoothly, so that rounding stays
as small as it was and a gradient that is lost does not. Nothing here knows zeroshard.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = [
    "IDS",
    "KINDS",
    "Bare",
    "Block",
    "Buffers",
    "Experts",
    "Fickle",
    "Fields",
    "Gru",
    "Halves",
    "Lstm",
    "Mlp",
    "Modes",
    "Nested",
    "Net",
    "Norms",
    "Peek",
    "Plain",
    "Recompute",
    "Rnn",
    "Side",
    "Stop",
    "Strided",
    "Table",
    "Twice",
    "View",
    "groups_of",
    "split_parameters",
]

IDS = 40
"""Rows of an embedding."""


class Block(nn.Module):
    """A residual block: (rows, width) to the same; `choice` is what ranks and steps may differ in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, choice: int = 0) -> Tensor:
        """Return the block's output."""
        return x + 0.5 * torch.tanh(self._compute(x, choice))

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        """Return what is added."""
        raise NotImplementedError


class Plain(Block):
    """A linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return self.linear(x)


class Mlp(Block):
    """A norm and two linear layers, the last without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width, eps=1e-2)
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width, bias=False)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Bare(Block):
    """Parameters without a module of their own, one of them 0-d, one empty."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.rand(width))
        self.shift = nn.Parameter(torch.randn(width) * 0.1)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0))

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return (x * self.scale + self.shift) * self.gate + self.nothing.sum()


class Strided(Block):
    """A parameter whose memory is not in the order of its shape."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter((torch.randn(width + 1, width) * 0.3).t())

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return (x @ self.weight)[:, : self.width]


class Experts(Block):
    """Three linear layers of which `choice` uses one."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return self.experts[choice % 3](x)


class Halves(Block):
    """Two linear layers: `choice` uses both, the left, the right, or none."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        y = x * 0.5
        if choice % 4 in (0, 1):
            y = y + self.left(x)
        if choice % 4 in (0, 2):
            y = y + self.right(x)
        return y


class Nested(Block):
    """Blocks inside a block, in an order of choice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = nn.ModuleList([Plain(width), Mlp(width)])
        self.linear = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        for at in [(0, 1), (1, 0), (0,), (1, 1)][choice % 4]:
            x = self.inner[at](x, choice)
        return self.linear(x)


class Peek(Block):
    """A linear layer that is never called: its weight is read by another module."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.hidden = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return F.linear(x, self.hidden.weight) + self.hidden.bias


class View(Block):
    """Returns a view, which the model changes in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: Tensor, choice: int = 0) -> Tensor:
        """Return the first columns of the layer's output."""
        return (x.repeat(1, 1) + 0.0) if choice % 5 == 4 else self.linear(x)[:, : self.width]


class Stop(Block):
    """A gate computed under `no_grad`: its parameters never get gradients."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Linear(width, 1)
        self.linear = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(x))
        return gate * self.linear(x)


class Table(Block):
    """An embedding of which few rows are used."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Embedding(11, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        ids = (torch.arange(len(x)) * 3 + choice) % 11
        return x + self.table(ids)


class Recompute(Block):
    """A part of the block is recomputed in backward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        y = checkpoint(lambda z: torch.tanh(self.first(z)), x, use_reentrant=False)
        return self.second(y)


class Twice(Block):
    """One linear layer, applied twice."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Side(Block):
    """A part of the loss is taken from inside the block."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width)
        self.side: Tensor | None = None

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        y = self.linear(x)
        self.side = y.square().mean()
        return y


class Fields(Block):
    """Inner modules that take and return mappings."""

    class Inner(nn.Module):
        """A linear layer between mappings."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, fields: dict[str, Any]) -> dict[str, Any]:
            """Return the mapping with `x` replaced and `more` added."""
            y = self.linear(fields["x"])
            return {"x": y, "more": [y * 2.0, None]}

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = Fields.Inner(width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        found = self.inner({"x": x})
        return found["x"] + (found["more"][0] if choice % 2 else 0.0)


class Gru(Block):
    """A recurrent layer along the rows."""

    layer: type[nn.RNNBase] = nn.GRU

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.cells = self.layer(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return self.cells(x)[0]


class Lstm(Gru):
    """The same, with two states."""

    layer = nn.LSTM


class Rnn(Gru):
    """The same, with two layers."""

    def __init__(self, width: int) -> None:
        Block.__init__(self, width)
        self.cells = nn.RNN(width, width, num_layers=2)


class Fickle(Block):
    """Computes with another layer, another number or another mask once `which` is 1; `width` says what it changes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.which = 0

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        kind = self.width % 3
        y = self.layers[self.which if kind == 0 else 0](x)
        if kind == 1:
            return y * (1.0 + 0.5 * self.which)
        return y * (torch.arange(self.width) % 2 == self.which) if kind == 2 else y


class Norms(Block):
    """A batch norm and a linear layer; `choice` may leave the norm out."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width, eps=0.1)
        self.linear = nn.Linear(width, width)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        return self.linear(x if choice % 5 == 4 else self.norm(x))


class Modes(Block):
    """A batch norm that is used in eval mode and then in the block's own mode, in one forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width, eps=0.1)

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        self.norm.eval()
        y = self.norm(x)
        self.norm.train(self.training)
        return self.norm(torch.tanh(y))


class Buffers(Block):
    """Buffers that forwards change: in place, by another tensor, and one that counts."""

    mean: Tensor
    last: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("last", torch.zeros(width), persistent=width % 2 == 0)
        self.register_buffer("count", torch.tensor(0))

    def _compute(self, x: Tensor, choice: int) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                now = x.mean(0).to(self.mean.dtype)
                self.mean.lerp_(now, 0.3)
                if choice % 2:
                    self.last = self.last * 0.5 + now
                self.count += 1
        return self.linear(x + torch.tanh(self.mean + self.last).to(x.dtype)) * (1.0 + 0.1 * torch.sin(self.count))


_ALL = (
    Plain, Mlp, Bare, Strided, Experts, Halves, Nested, Peek, View, Stop, Table, Recompute, Twice, Side, Fields,
)  # fmt: skip
KINDS = {kind.__name__: kind for kind in _ALL}
"""What every drawing may choose from; the others are added by `wide.py`."""


class Net(nn.Module):
    """A stem, blocks in a container, and a head; each call says which blocks run, and in which order.

    Args:
        container: "list", "dict", "stages" (lists in a list) or "sequential" (called as one where all blocks run).
        takes_ids: the stem is an embedding, else a linear layer of 3 features.
        is_tied: the head's weight is the embedding's.
    """

    def __init__(
        self, width: int, blocks: Sequence[nn.Module], container: str, *, takes_ids: bool, is_tied: bool
    ) -> None:
        super().__init__()
        self.stem = nn.Embedding(IDS, width) if takes_ids else nn.Linear(3, width)
        if takes_ids:
            nn.init.normal_(self.stem.weight, std=0.3)
        if container == "dict":
            self.blocks: nn.Module = nn.ModuleDict({f"b{at}": block for at, block in enumerate(blocks)})
        elif container == "stages":
            middle = len(blocks) // 2
            self.blocks = nn.ModuleList(nn.ModuleList(part) for part in (blocks[:middle], blocks[middle:]) if len(part))
        else:
            self.blocks = (nn.Sequential if container == "sequential" else nn.ModuleList)(
                *_arguments(container, blocks)
            )
        self._order, self._container = list(blocks), container
        self.head = nn.Linear(width, IDS, bias=False) if is_tied else nn.Linear(width, 2)
        if is_tied:
            self.head.weight = self.stem.weight  # type: ignore[assignment]

    def forward(
        self, x: Tensor, path: Sequence[int], choice: int = 0, recomputed: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the blocks of `path`; return the output, and the parts of the loss that come from inside blocks."""
        x, sides = self.stem(x), []
        if self._container == "sequential" and list(path) == list(range(len(self._order))):
            return self.head(self.blocks(x)), [block.side for block in self._order if isinstance(block, Side)]
        for at in path:
            block = self._order[at]
            if at in recomputed:
                x = checkpoint(block, x, choice, use_reentrant=False)
            else:
                x = block(x, choice)
            if isinstance(block, View):
                x.mul_(0.8)
            if isinstance(block, Side) and at not in recomputed:
                sides.append(block.side)
        return self.head(x), sides


def _arguments(container: str, blocks: Sequence[nn.Module]) -> Sequence[Any]:
    return blocks if container == "sequential" else [blocks]


def split_parameters(
    net: nn.Module, owners: Sequence[Sequence[str]], ignored: Sequence[str] = ()
) -> list[list[nn.Parameter]]:
    """Return the parameters of the modules named, a list for each owner; each parameter once, the rest to the first.

    Args:
        ignored: modules whose parameters nobody gets.
    """
    taken = {p for name in ignored for p in net.get_submodule(name).parameters()}
    parts: list[list[nn.Parameter]] = [[] for _ in owners]
    for part, names in zip(parts, owners, strict=True):
        for name in names:
            for p in net.get_submodule(name).parameters():
                if p not in taken:
                    taken.add(p)
                    part.append(p)
    parts[0] += [p for p in net.parameters() if p not in taken]
    return parts


def groups_of(parameters: Sequence[nn.Parameter], lr: float) -> list[dict[str, Any]]:
    """Return two groups: matrices, and the rest, which is updated half as fast and does not decay."""
    wide = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": wide}, {"params": rest, "lr": lr / 2, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
