"""Which parameters form a unit, found in the model or as the user says.

Owns the rules and nothing else: it reads the model and changes nothing. Units are in registration order, so that every
rank finds the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import nn

from zeroshard.core.hooks import Registered

__all__ = ["UnitPlan", "plan_units", "registered"]

Named = tuple[str, nn.Parameter]

SMALL_BYTES = 1 << 20
"""Below this a message costs more for being one than for its bytes."""
SMALL_PART = 16
"""A unit is not small that holds more than this part of the model: two of them are whole at a time."""


@dataclass
class UnitPlan:
    """One unit to be: its module's name ("" for the root), its parameters, and the modules whose forward needs them."""

    name: str
    module: nn.Module
    parameters: list[Named] = field(default_factory=list)
    entries: dict[nn.Module, str] = field(default_factory=dict)
    blocks: tuple[nn.Module, ...] = ()
    """Where it is of several blocks, these."""

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters as they are."""
        return sum(p.nbytes for _, p in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(p.numel() for _, p in self.parameters)


def plan_units(model: nn.Module, units: Sequence[object] | None) -> list[UnitPlan]:
    """Return the units of `model`, the root first.

    Args:
        units: modules, module classes or class names; by default blocks are found: the classes that Transformers names
            in `_no_split_modules`, else the outermost modules of a ModuleList whose members are of one class. Of those
            found, small neighbours are joined until they are worth their messages.

    Raises:
        ValueError: something in `units` is not in the model.
        TypeError: something in `units` is neither a module, a class nor a name.
    """
    if isinstance(units, str | type):
        raise TypeError(f"units= takes a list of modules, module classes or class names; got {units!r} itself.")
    names = {module: name for name, module in model.named_modules()}
    chosen = _find_blocks(model) if units is None else _choose(model, units)
    plans = [UnitPlan("", model)] + [UnitPlan(names[m], m) for m in model.modules() if m in chosen and m is not model]
    by_module = {plan.module: plan for plan in plans}
    home: dict[nn.Parameter, UnitPlan] = {}
    _assign(model, "", plans[0], by_module, home)
    _split_large(plans, model, home, names)
    for plan in plans:
        if plan.parameters:
            plan.entries[plan.module] = plan.name
    _add_other_owners(model, home, by_module, names)
    found = [plans[0]] + [plan for plan in plans[1:] if plan.parameters]
    return found if units is not None else _join_small(found, chosen)


def _find_blocks(model: nn.Module) -> set[nn.Module]:
    no_split: set[str] = set()
    for module in model.modules():
        # Some Transformers models leave the list empty; theirs are found like anybody's.
        no_split |= set(getattr(module, "_no_split_modules", None) or ())
    named = {m for m in model.modules() if type(m).__name__ in no_split}
    if named:
        return _outermost(model, named)
    repeated: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(m) for m in module}) == 1:
            repeated |= set(module)
    return _outermost(model, repeated)


def _outermost(module: nn.Module, candidates: set[nn.Module]) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for child in module.children():
        found |= {child} if child in candidates else _outermost(child, candidates)
    return found


def _choose(model: nn.Module, units: Sequence[object]) -> set[nn.Module]:
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
) -> None:
    """Give each parameter to the innermost unit around the first place where it is registered."""
    plan = by_module.get(module, plan)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in home:
            home[parameter] = plan
            plan.parameters.append((prefix + name, parameter))
    for name, child in module._modules.items():
        if child is not None:
            _assign(child, f"{prefix}{name}.", plan, by_module, home)


def _split_large(
    plans: list[UnitPlan], model: nn.Module, home: dict[nn.Parameter, UnitPlan], names: dict[nn.Module, str]
) -> None:
    """Make units of the root's parameters that are larger than the median unit: embeddings and heads.

    The root is whole during the whole pass, so a large parameter in it would cost its memory throughout.
    """
    root = plans[0]
    if len(plans) == 1:
        return
    limit = median(plan.numel for plan in plans[1:])
    first_owner: dict[nn.Parameter, nn.Module] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                first_owner.setdefault(parameter, module)
    for _, parameter in list(root.parameters):
        owner = first_owner[parameter]
        if parameter.numel() <= limit or owner is model:
            continue
        plan = UnitPlan(names[owner], owner)
        plan.parameters = [named for named in root.parameters if named[1] is parameter]
        root.parameters = [named for named in root.parameters if named[1] is not parameter]
        home[parameter] = plan
        before = [other for other in plans[1:] if _position(other, names) < _position(plan, names)]
        plans.insert(1 + len(before), plan)


def _join_small(plans: list[UnitPlan], blocks: set[nn.Module]) -> list[UnitPlan]:
    """Join blocks of one list with the next ones as long as they are small."""
    limit = min(SMALL_BYTES, sum(plan.nbytes for plan in plans) // SMALL_PART)
    runs: list[list[UnitPlan]] = []
    for plan in plans:
        run = runs[-1] if runs else []
        is_next = run and {plan.module, run[-1].module} <= blocks and _parent(plan) == _parent(run[-1])
        if is_next and sum(one.nbytes for one in run) < limit:
            run.append(plan)
        else:
            runs.append([plan])
    return [_join(run) if len(run) > 1 else run[0] for run in runs]


def _join(run: list[UnitPlan]) -> UnitPlan:
    """Return one unit of several blocks, called by the first and the last of them."""
    return UnitPlan(
        f"{run[0].name}-{run[-1].name.rpartition('.')[2]}",
        run[0].module,
        [named for plan in run for named in plan.parameters],
        {module: name for plan in run for module, name in plan.entries.items()},
        tuple(plan.module for plan in run),
    )


def _parent(plan: UnitPlan) -> str:
    return plan.name.rpartition(".")[0]


def _position(plan: UnitPlan, names: dict[nn.Module, str]) -> int:
    return list(names).index(plan.module)


def _add_other_owners(
    model: nn.Module,
    home: dict[nn.Parameter, UnitPlan],
    by_module: dict[nn.Module, UnitPlan],
    names: dict[nn.Module, str],
) -> None:
    """Let every module that holds a parameter of a unit it does not lie in gather that unit, too (tied weights)."""

    def visit(module: nn.Module, around: tuple[nn.Module, ...]) -> None:
        around = (*around, module)
        for parameter in module._parameters.values():
            if parameter is not None and (plan := home[parameter]).module not in around:
                plan.entries[module] = names[module]
        for child in module._modules.values():
            if child is not None:
                visit(child, around)

    visit(model, ())


def registered(plan: UnitPlan, model: nn.Module) -> list[Registered]:
    """Return every place where a parameter of the unit is registered, and the modules on the way there."""
    mine = {parameter for _, parameter in plan.parameters}
    found: dict[str, Registered] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter in mine:
                name = f"{path}.{key}" if path else key
                found[name] = Registered(name, module._parameters, key, id(parameter))
                found.update((one.name, one) for one in _way_to(model, path))
    return list(found.values())


def _way_to(model: nn.Module, path: str) -> Iterator[Registered]:
    """Yield the modules from the model down to `path`, each in its parent."""
    parent, parts = model, path.split(".") if path else []
    for place, key in enumerate(parts):
        child = parent._modules[key]
        assert child is not None
        yield Registered(".".join(parts[: place + 1]), parent._modules, key, id(child))
        parent = child
