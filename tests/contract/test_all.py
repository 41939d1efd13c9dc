"""`__all__` is an index one can trust, and every public name shows how it is used by an example that runs."""

import ast
import doctest
import importlib
import inspect
import types
from typing import Any

import pytest

import zeroshard

from .blocks import examples, run_block
from .source import Module, package_modules, plant

# Third-party packages that are extras: a module that needs one which is not installed cannot be imported here.
EXTRAS = frozenset(
    ["accelerate", "deepspeed", "lightning", "matplotlib", "peft", "pyarrow", "tokenizers", "transformers"]
)


def public_modules() -> list[Module]:
    """List the modules whose dotted name has no underscore in front of any part."""
    return [m for m in package_modules() if not any(part.startswith("_") for part in m.name.split("."))]


def listed_names(module: Module) -> list[str] | None:
    """Return the strings of `__all__`, or None where there is none."""
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return list(ast.literal_eval(statement.value))
    return None


def index_faults(module: Module) -> list[str]:
    """Say what is wrong with a module's `__all__`, as far as its text shows."""
    names = listed_names(module)
    if names is None:
        return [module.at(1, "a public module needs __all__")]
    faults = [module.at(1, f"__all__ repeats {name}") for name in sorted(set(names)) if names.count(name) > 1]
    if names != sorted(names):
        faults.append(module.at(1, f"__all__ must be in sorted() order: {sorted(names)}"))
    return faults


def load(module: Module) -> types.ModuleType | None:
    """Import a module of the package; None where it needs an extra that is not installed."""
    try:
        return importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in EXTRAS:
            return None
        raise


def absent(loaded: types.ModuleType, names: list[str]) -> list[str]:
    """List the names that a loaded module does not have."""
    return [name for name in names if not hasattr(loaded, name)]


def has_example(obj: Any) -> bool:
    """Tell whether an object's own docstring shows its use."""
    text = obj.__dict__.get("__doc__") if isinstance(obj, type) else obj.__doc__
    return ">>> " in (text or "") or bool(examples(text))


def public_objects() -> dict[str, Any]:
    """Return the public functions and classes by name; constants explain themselves where they are defined."""
    named = {name: getattr(zeroshard, name) for name in zeroshard.__all__}
    return {name: obj for name, obj in named.items() if inspect.isclass(obj) or inspect.isroutine(obj)}


def documented() -> dict[str, Any]:
    """Return everything whose examples run: what `__all__` lists in any public module, and the members of classes."""
    found: dict[str, Any] = {}
    for module in public_modules():
        loaded = load(module)
        for name in listed_names(module) or [] if loaded else []:
            obj = getattr(loaded, name, None)
            is_ours = str(getattr(obj, "__module__", None)).startswith("zeroshard")  # torch_private has torch's own
            if is_ours and (inspect.isclass(obj) or inspect.isroutine(obj)):
                found[f"{obj.__module__}.{obj.__qualname__}"] = obj
                found.update(members(obj) if inspect.isclass(obj) else {})
    return {name: obj for name, obj in found.items() if has_example(obj)}


def members(cls: type) -> dict[str, Any]:
    """Return the public methods and properties of a class that have a docstring."""
    prefix = f"{cls.__module__}.{cls.__qualname__}"
    named = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    return {
        f"{prefix}.{name}": value
        for name, value in named.items()
        if inspect.isroutine(value) or isinstance(value, property)
    }


def run_prompts(obj: Any, where: str) -> int:
    """Run the `>>>` examples of a docstring, with nothing imported for them; return how many statements failed."""
    runner = doctest.DocTestRunner(verbose=False)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(obj) or "", {}, where, None, 0)
    return runner.run(test).failed


DOCUMENTED = documented()


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.name)
def test_all_is_there_sorted_and_true(module: Module) -> None:
    assert index_faults(module) == []
    loaded = load(module)
    if loaded is None:
        pytest.skip(f"{module.name} needs an extra that is not installed")
    assert absent(loaded, listed_names(module) or []) == []


def test_faults_of_an_index_are_found() -> None:
    assert "needs __all__" in index_faults(plant("m", "x = 1"))[0]
    assert "sorted() order" in index_faults(plant("m", "__all__ = ['b', 'a']"))[0]
    assert "repeats a" in index_faults(plant("m", "__all__ = ['a', 'a']"))[0]
    assert index_faults(plant("m", "__all__: list[str] = ['B', 'a']")) == []
    assert absent(types.ModuleType("m"), ["gone", "__name__"]) == ["gone"]


def test_every_public_name_has_an_example() -> None:
    assert [name for name, obj in public_objects().items() if not has_example(obj)] == []


def test_a_name_without_an_example_is_found() -> None:
    class Bare:
        """Says what it is and not how it is used."""

    class Shown(Bare):
        """
        ```python
        Shown()
        ```
        """

    class Inheriting(Shown):
        pass

    assert [has_example(cls) for cls in (Bare, Shown, Inheriting)] == [False, True, False]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_examples_run(name: str) -> None:
    for program in examples(inspect.getdoc(DOCUMENTED[name])):
        run_block(program, name)
    assert run_prompts(DOCUMENTED[name], name) == 0


def test_a_broken_example_is_found() -> None:
    def wrong() -> None:
        """
        >>> 1 + 1
        3

        ```python
        assert 1 + 1 == 3
        ```
        """

    (program,) = examples(inspect.getdoc(wrong))
    with pytest.raises(AssertionError):
        run_block(program, "wrong")
    assert run_prompts(wrong, "wrong") == 1
