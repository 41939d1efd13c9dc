"""The search for the blocks of a model, if the user names no units.

Owns the rule below. It reads the model and changes nothing. `describe/units.py` makes units from blocks.

Note: the rule
    No unit besides a single leaf holds more than an eighth of the model and more than 64 MiB, nor more than one of at
    least 8 equal blocks. A block is a member of a container (ModuleList, Sequential, ModuleDict, also nested) or of a
    class that Transformers names in `_no_split_modules`. Blocks stay whole otherwise, so that a compiled block is one
    graph. Small neighbours that `describe/units.py` joins are the exception.
Note: exclusions
    A module that is never called cannot be a block, because the call of a module gathers its unit: containers, the
    projection in torch's MultiheadAttention, the modules of a parametrization. Their parameters would stay gathered
    until the end of the pass.
"""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import final

from torch import nn

__all__ = ["LARGE_PART", "SMALL_BYTES", "SMALL_PART", "apart_bytes", "find_blocks", "is_leaf", "large_bytes", "members"]

SMALL_BYTES = 1 << 20
"""Below this size, the latency of a message exceeds the cost of its bytes."""
SMALL_PART = 16
"""A unit above this fraction of the model is not small. Two units are gathered at a time."""
LARGE_BYTES = 64 << 20
"""A unit up to this size is not large in any model."""
LARGE_PART = 8
"""The fraction of the model above which a unit is large."""
EQUAL_BLOCKS = 8
"""This many equal blocks are separate units, even inside a common parent block."""
ALIKE_PART = 10
"""Blocks of one class are alike if their bytes differ by at most this fraction."""
APART_BYTES = 16 << 20
"""Larger parameters outside blocks leave the root, which stays gathered for a whole pass."""

Shape = tuple[object, ...]


def find_blocks(model: nn.Module) -> tuple[set[nn.Module], float]:
    """Find the modules that become units.

    The result is equal on all ranks, because it depends only on classes, shapes and their order.

    Returns: the modules, possibly nested and without containers, and the size in bytes above which a parameter outside
        them becomes a separate unit.
    """
    tree = _Tree(model)
    tree.choose_blocks(model)
    total, small = tree.nbytes[model], tree.small_bytes
    # Parameters outside blocks leave the root if they are as large as a block or, without blocks, worth a message.
    apart = apart_bytes([tree.nbytes[module] for module in tree.chosen])
    if tree.chosen or total > SMALL_PART * SMALL_BYTES:
        apart = apart if tree.chosen else small
        if tree.is_large(tree.choose_apart(model, apart)):
            apart = small
            tree.choose_apart(model, apart)
    return tree.chosen, apart


def members(model: nn.Module, prefix: str = "") -> dict[nn.Module, str]:
    """Return the modules that user code calls, with their names: the model, or the members of a container."""
    if _is_called(model):
        return {model: prefix[:-1]}
    return {part: n for name, one in model.named_children() for part, n in members(one, f"{prefix}{name}.").items()}


def large_bytes(total_bytes: int) -> float:
    """Return the bytes above which a unit is large, in a model of `total_bytes`."""
    return max(LARGE_BYTES, total_bytes / LARGE_PART)


def apart_bytes(block_bytes: list[int]) -> float:
    """Return the bytes above which a parameter of the root becomes a unit, given the bytes of the other units."""
    return min(median(block_bytes), APART_BYTES) if block_bytes else float("inf")


@final
class _Tree:
    """A model as a tree: modules and parameters belong to their first owner in registration order."""

    def __init__(self, model: nn.Module) -> None:
        self.children: dict[nn.Module, list[nn.Module]] = {}
        self.nbytes: dict[nn.Module, int] = {}
        self._own: dict[nn.Module, list[int]] = {}
        self._measure(model, {model}, set())
        self.small_bytes = min(SMALL_BYTES, self.nbytes[model] // SMALL_PART)
        self._large_bytes = large_bytes(self.nbytes[model])
        self.chosen: set[nn.Module] = set()
        self._container: dict[nn.Module, nn.Module] = {}
        """The outermost container of each member."""
        self._blocks = self._find_members() | self._find_named(model)
        self._shapes = {module: self._shape(module) for module in self._blocks}
        counts = Counter(self._shapes.values())
        self._equals = {module: counts[shape] for module, shape in self._shapes.items()}
        self._holding: set[nn.Module] = set()
        """Modules that contain a block at any depth."""
        self._note_holding(model)
        weights = [self.nbytes[module] for module in self._outermost(model)]
        self._heavy_bytes = min(self.nbytes[model] / LARGE_PART, 2 * median(weights or [0]))

    def _measure(self, module: nn.Module, seen: set[nn.Module], counted: set[nn.Parameter]) -> None:
        own = [p for p in module._parameters.values() if p is not None and p not in counted]
        counted.update(own)
        self._own[module] = [parameter.nbytes for parameter in own]
        nbytes = sum(self._own[module])
        self.children[module] = children = []
        for child in module.children():
            if child not in seen:
                seen.add(child)
                children.append(child)
                self._measure(child, seen, counted)
                nbytes += self.nbytes[child]
        self.nbytes[module] = nbytes

    # -- what could be a block --------------------------------------------------------------------------------------

    def _find_members(self) -> set[nn.Module]:
        """Return the members of containers with at least two members that have parameters."""
        for module, children in self.children.items():
            if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                members = list(self._members(children))
                if len(members) > 1 and self.nbytes[module] > self.small_bytes:
                    for member in members:
                        self._container.setdefault(member, module)
        return self._container.keys() - self._inside_leaves()

    def _members(self, children: list[nn.Module]) -> Iterator[nn.Module]:
        """Yield the modules with parameters among `children`, with nested lists flattened."""
        for child in children:
            if not _is_called(child):
                yield from self._members(self.children[child])
            elif self.nbytes[child]:
                yield child

    def _find_named(self, model: nn.Module) -> set[nn.Module]:
        named: set[str] = set()
        for module in self.children:
            named |= set(getattr(module, "_no_split_modules", None) or ())
        return {m for m in self.children if type(m).__name__ in named and self.nbytes[m] > self.small_bytes} - {model}

    def _inside_leaves(self) -> set[nn.Module]:
        found: set[nn.Module] = set()
        for module in self.children:
            if is_leaf(module):
                found |= {*module.modules()} - {module}
            elif nn.utils.parametrize.is_parametrized(module):
                found |= {*module.parametrizations.modules()}  # type: ignore[union-attr]
        return found

    def _shape(self, module: nn.Module) -> Shape:
        """Return the key by which blocks are equal; single layers are equal only within one container."""
        where = None if self._is_divisible(module) else self._container.get(module)
        return type(module), where, *(parameter.shape for parameter in module.parameters())

    def _note_holding(self, module: nn.Module) -> bool:
        for child in self.children[module]:
            if self._note_holding(child) or child in self._blocks:
                self._holding.add(module)
        return module in self._holding

    def _outermost(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the outermost blocks below a module, in registration order."""
        for child in self.children[module]:
            if child in self._blocks:
                yield child
            else:
                yield from self._outermost(child)

    # -- what is one ------------------------------------------------------------------------------------------------

    def choose_blocks(self, module: nn.Module) -> None:
        """Choose the outermost blocks inside `module`; descend into blocks that are large or consist of blocks."""
        for block in self._outermost(module):
            if self._is_opened(block):
                self.choose_blocks(block)
            else:
                self.chosen.add(block)

    def _is_opened(self, block: nn.Module) -> bool:
        if not self._is_divisible(block) or self._equals[block] >= EQUAL_BLOCKS:
            return False
        if self.is_large(self.nbytes[block]):
            return True
        # A block is a list of blocks if they hold most of its bytes: true for experts, false for attention heads.
        inner = [one for one in self._outermost(block) if self._is_divisible(one) or self._equals[one] >= EQUAL_BLOCKS]
        if len(inner) < 2 or 2 * sum(self.nbytes[one] for one in inner) < self.nbytes[block]:
            return False
        families = Counter(self._shapes[one] for one in inner if self._equals[one] >= EQUAL_BLOCKS)
        is_alone = self.nbytes[block] > self._heavy_bytes and not any(self._are_alike(block, o) for o in self._blocks)
        return is_alone or any(count > 1 for count in families.values())

    def _are_alike(self, block: nn.Module, other: nn.Module) -> bool:
        """Return whether two blocks are alike. The first block of T5 holds an extra table that all blocks use."""
        difference = abs(self.nbytes[block] - self.nbytes[other])
        return other is not block and type(other) is type(block) and ALIKE_PART * difference <= self.nbytes[block]

    def is_large(self, nbytes: int) -> bool:
        """Return whether a unit of `nbytes` breaks the rule, unless it is a leaf."""
        return nbytes > self._large_bytes

    def _is_divisible(self, module: nn.Module) -> bool:
        return not is_leaf(module) and any(self.nbytes[child] for child in self.children[module])

    # -- the rest ---------------------------------------------------------------------------------------------------

    def choose_apart(self, module: nn.Module, least_bytes: float) -> int:
        """Choose modules above `least_bytes` inside `module` but in no block; return the bytes left.

        A parameter above that size that is most of its module is left to `describe/units.py`, which makes it a separate
        unit: its gradient is then reduced in place (`core/gradient.py`).
        """
        left = sum(nbytes for nbytes in self._own[module] if nbytes <= least_bytes)
        for child in self.children[module]:
            if child in self.chosen:
                continue
            nbytes = self._left_bytes(child)
            is_mixed = self._is_divisible(child) and (child in self._holding or self.is_large(nbytes))
            if is_mixed or not _is_called(child):
                left += self.choose_apart(child, least_bytes)
            elif nbytes <= least_bytes:
                left += nbytes
            elif not is_leaf(child) and max(p.nbytes for p in child.parameters()) > max(least_bytes, nbytes / 2):
                left += self.choose_apart(child, least_bytes)
            else:
                self.chosen.add(child)
        return left

    def _left_bytes(self, module: nn.Module) -> int:
        """Return the bytes inside `module` that are in no chosen module."""
        if module in self.chosen:
            return 0
        return sum(self._own[module]) + sum(self._left_bytes(child) for child in self.children[module])


def _is_called(module: nn.Module) -> bool:
    """Return whether a module can be called: containers cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module reads its submodules without calling them."""
    return isinstance(module, nn.MultiheadAttention) or [*module._modules] == ["parametrizations"]
