"""The assignment of parameters to units, found in the model or set by the user.

Owns the rules. It reads the model and changes nothing. Units are in registration order, so that every rank finds the
same units.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from zeroshard.describe.blocks import SMALL_BYTES, SMALL_PART, apart_bytes, find_blocks, is_leaf, large_bytes

__all__ = ["UnitPlan", "choose_units", "plan_units"]

Named = tuple[str, nn.Parameter]


@dataclass
class UnitPlan:
    """A planned unit: its module's name ("" for the root), its parameters, and the modules whose forward uses them."""

    name: str
    module: nn.Module
    parameters: list[Named] = field(default_factory=list)
    entries: dict[nn.Module, str] = field(default_factory=dict)
    blocks: tuple[nn.Module, ...] = ()
    """The blocks, if the unit joins several."""

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters in their current dtypes."""
        return sum(p.nbytes for _, p in self.parameters)

    @property
    def numel(self) -> int:
        """Number of elements of its parameters."""
        return sum(p.numel() for _, p in self.parameters)


def plan_units(
    model: nn.Module, units: Sequence[object] | None, ignored: Collection[int] = (), parts: Collection[nn.Module] = ()
) -> list[UnitPlan]:
    """Return the units of `model`, the root first.

    Args:
        units: modules, module classes or class names. By default `describe/blocks.py` finds blocks, and small
            neighbours are joined until a message is worth its latency.
        ignored: parameters that are in no unit, by identity.
        parts: modules that are called apart from each other: no unit has parameters of two.

    Raises:
        ValueError: an entry of `units` is not in the model.
        TypeError: an entry of `units` is neither a module, a class nor a name.
    """
    if isinstance(units, str | type):
        raise TypeError(f"units= takes a list of modules, module classes or class names; got {units!r} itself.")
    names = {module: name for name, module in model.named_modules()}
    roots, least_bytes = {model, *parts}, None
    if units is None:
        found = [find_blocks(part) for part in parts or (model,)]
        chosen, least_bytes = set().union(*(blocks for blocks, _ in found)), min(least for _, least in found)
    else:
        chosen = choose_units(model, units)
    own = (chosen | roots) - {model}
    plans = [UnitPlan("", model)] + [UnitPlan(names[m], m) for m in model.modules() if m in own]
    by_module = {plan.module: plan for plan in plans}
    home: dict[nn.Parameter, UnitPlan] = {}
    _assign(model, "", plans[0], by_module, home, ignored)
    if least_bytes is None:
        least_bytes = apart_bytes([plan.nbytes for plan in plans if plan.module not in roots])
    for root in [plan for plan in plans if plan.module in roots]:
        _split_large(plans, root, home, names, least_bytes)
    for plan in plans:
        if plan.parameters:
            plan.entries[plan.module] = plan.name
    _add_other_owners(model, home, by_module, names)
    kept = [plans[0]] + [plan for plan in plans[1:] if plan.parameters]
    return kept if units is not None else _join_small(kept, chosen)


def choose_units(model: nn.Module, units: Sequence[object]) -> set[nn.Module]:
    """Return the modules that a user's `units=` names; see `plan_units`."""
    modules = set(model.modules())
    chosen: set[nn.Module] = set()
    for unit in units:
        if isinstance(unit, nn.Module):
            matches = {unit} & modules
        elif isinstance(unit, type):
            matches = {m for m in modules if isinstance(m, unit)}
        elif isinstance(unit, str):
            matches = {m for m in modules if type(m).__name__ == unit}
        else:
            raise TypeError(f"units= takes modules, module classes or class names; got {unit!r}.")
        if not matches:
            shown = unit if isinstance(unit, str) else type(unit).__name__ if isinstance(unit, nn.Module) else unit
            classes = ", ".join(sorted({type(m).__name__ for m in modules}))
            raise ValueError(f"units= names {shown!r}, which is not in the model. Its classes are: {classes}.")
        chosen |= matches
    return chosen


def _assign(
    module: nn.Module,
    prefix: str,
    plan: UnitPlan,
    by_module: dict[nn.Module, UnitPlan],
    home: dict[nn.Parameter, UnitPlan],
    ignored: Collection[int],
) -> None:
    """Assign each parameter to the innermost unit around its first registration."""
    plan = by_module.get(module, plan)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in home and id(parameter) not in ignored:
            home[parameter] = plan
            plan.parameters.append((prefix + name, parameter))
    for name, child in module._modules.items():
        if child is not None:
            _assign(child, f"{prefix}{name}.", plan, by_module, home, ignored)


def _split_large(
    plans: list[UnitPlan],
    root: UnitPlan,
    home: dict[nn.Parameter, UnitPlan],
    names: dict[nn.Module, str],
    least_bytes: float,
) -> None:
    """Make separate units of root parameters above `least_bytes`: embeddings and heads.

    The root stays gathered for a whole pass, so a large parameter in it would take memory throughout.
    """
    first_owner: dict[nn.Parameter, nn.Module] = {}
    for module in names:
        for parameter in module.parameters(recurse=is_leaf(module)):
            first_owner.setdefault(parameter, module)
    kept: list[Named] = []
    for name, parameter in root.parameters:
        owner = first_owner[parameter]
        if parameter.nbytes <= least_bytes or owner is root.module:
            kept.append((name, parameter))
        else:
            home[parameter] = UnitPlan(names[owner], owner, [(name, parameter)])
            plans.append(home[parameter])
    root.parameters = kept
    place = {module: number for number, module in enumerate(names)}
    plans.sort(key=lambda plan: place[plan.module])


def _join_small(plans: list[UnitPlan], blocks: set[nn.Module]) -> list[UnitPlan]:
    """Join consecutive small blocks of one list until the unit would become large."""
    total = sum(plan.nbytes for plan in plans)
    small, large = min(SMALL_BYTES, total // SMALL_PART), large_bytes(total)
    runs: list[list[UnitPlan]] = []
    for plan in plans:
        run = runs[-1] if runs else []
        run_bytes = sum(one.nbytes for one in run)
        is_next = run and {plan.module, run[-1].module} <= blocks and _parent(plan) == _parent(run[-1])
        if is_next and run_bytes < small and run_bytes + plan.nbytes <= large:
            run.append(plan)
        else:
            runs.append([plan])
    return [_join(run) if len(run) > 1 else run[0] for run in runs]


def _join(run: list[UnitPlan]) -> UnitPlan:
    """Return one unit of several blocks, named after the first and the last block."""
    return UnitPlan(
        f"{run[0].name}-{run[-1].name.rpartition('.')[2]}",
        run[0].module,
        [named for plan in run for named in plan.parameters],
        {module: name for plan in run for module, name in plan.entries.items()},
        tuple(plan.module for plan in run),
    )


def _parent(plan: UnitPlan) -> str:
    return plan.name.rpartition(".")[0]


def _add_other_owners(
    model: nn.Module,
    home: dict[nn.Parameter, UnitPlan],
    by_module: dict[nn.Module, UnitPlan],
    names: dict[nn.Module, str],
) -> None:
    """Make every module that holds a parameter of another unit also gather that unit (tied weights)."""

    def visit(module: nn.Module, around: tuple[nn.Module, ...]) -> None:
        around = (*around, module)
        for parameter in module._parameters.values():
            if (plan := home.get(parameter)) is not None and plan.module not in around:  # type: ignore[arg-type]
                plan.entries[module] = names[module]
        for child in module._modules.values():
            if child is not None:
                visit(child, around)

    visit(model, ())
