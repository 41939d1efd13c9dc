"""What islands have in common when they are made: options and models.

Owns the checks of `zs.shard(outer=)`. It must not know exchanges. Read `places.py` first.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from zeroshard.core.engine import Engine
from zeroshard.join.start import accepted_by_all
from zeroshard.optim.admission import check_optimizers
from zeroshard.optim.whole import whole_of
from zeroshard.outer.apart import Apart
from zeroshard.outer.islands import Islands
from zeroshard.outer.mailed import Mailed
from zeroshard.outer.options import Outer
from zeroshard.outer.places import split
from zeroshard.setup.equal import check_equal, options_text
from zeroshard.setup.request import Described
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh

__all__ = ["Start"]


@final
class Start:
    """What `zs.shard` does for islands, before it has made an engine; nothing without `outer=`.

    Args:
        options: the argument `outer=`.
        asked: the argument `mesh=`.
        domain: its ranks.

    Raises:
        TypeError, ValueError: the mesh has no islands; see `split`.
    """

    def __init__(self, options: Outer | None, asked: Any, domain: Mesh) -> None:
        self._options = options
        self._comm: Comm | None = None
        self.across: Mesh | None = None
        """This rank and its counterparts on the other islands; None without islands."""
        self.asked, self.own, self.launch = asked, domain, domain
        """What `mesh=` means on this island, its ranks, and the ranks of all islands."""
        self.saved_as_one: Islands | None = None
        """Islands whose checkpoint is one, of all of them; None where each launch has its own. Made by `islands`."""
        self._known: Sequence[torch.optim.Optimizer] = ()
        if options is not None and not getattr(options, "address", ""):
            found = split(asked, domain)
            self.asked, self.own, self.launch, self.across = found.asked, found.own, found.launch, found.across

    def check(self, described: Described) -> None:
        """Raise ValueError or TypeError unless islands can exchange the described model."""
        self._known = described.optimizers
        if self._options is not None:
            _check_outer(self._options, described)

    def connect(self, comm: Comm) -> None:
        """Take what connects this rank with its counterparts."""
        self._comm = comm
        comm.pool.keeps = False  # exchanges are rare, and between them buffers would be of no use

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which an error of one island is an error of all."""
        return nullcontext() if self._comm is None else accepted_by_all(self.launch, "zs.shard()")

    def compare(self, facts: Sequence[str]) -> None:
        """Raise on all islands unless all have equal models and options. Collective: as `check_equal`.

        Args:
            facts: lines that the ranks of an island have compared already.
        """
        if self._options is not None and self._comm is not None:
            check_equal(self._comm.mesh, self._comm, [*_facts_of(self._options), *facts])

    def islands(self, engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer]) -> Apart | None:
        """Give all islands the first values of the first one, and return them.

        Collective: see `Islands.align`; every rank of all islands must call. An island that is a launch of its own: see
        `Mailed`.
        """
        if self._options is not None and self._options.is_alone:
            return Mailed(engine, self._options, optimizers, self._known)
        if self._options is None or self._comm is None:
            return None
        self.saved_as_one = Islands(engine, model, self._comm, self._options, optimizers)
        return self.saved_as_one


def _check_outer(options: object, described: Described) -> None:
    """Raise unless islands can exchange a model as the options say.

    Raises:
        TypeError, ValueError: an option, or the outer optimizer, is not supported; the text says why.
    """
    if not isinstance(options, Outer):
        raise TypeError(f"outer must be a zs.Outer; got {options!r}. Write outer=zs.Outer(every=50).")
    options.check()
    options.check_axes(dict(described.mesh.axes))
    for name, module in described.model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            raise ValueError(
                f"Module '{name}' is a SyncBatchNorm over all ranks of the launch, so islands would wait for each "
                "other in each forward. Give it a process group of the ranks of an island, or use BatchNorm."
            )
    options.check_units(sum(bool(unit.reduced) for unit in described.units))
    if (optimizer := options.trial()) is not None:
        if whole_of(optimizer) is not None:
            raise ValueError(
                f"Outer(optimizer=): {type(optimizer).__name__} needs whole matrices, and anchors are sharded. Use an "
                "element-wise optimizer, such as torch.optim.SGD."
            )
        names = {id(one): "an anchor" for group in optimizer.param_groups for one in group["params"]}
        check_optimizers(names, [optimizer], described.settings.elementwise, is_cut=True)


def _facts_of(options: Outer) -> list[str]:
    """Return the facts of an exchange that must be equal on all islands, one per line."""
    fields = ("every", "fragments", "delay", "mix", "bits", "memory")
    lines = ["outer: " + ", ".join(f"{name}={getattr(options, name)!r}" for name in fields)]
    optimizer = options.trial()
    for group in optimizer.param_groups if optimizer is not None else ():
        lines.append(f"outer optimizer: {type(optimizer).__name__}, {options_text(group)}")
    return lines
