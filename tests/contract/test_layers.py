"""Imports point downwards only: the layers of docs/design.md."""

import ast
import re
import sys
from collections.abc import Collection

import pytest

import zeroshard

from .source import REPOSITORY, Module, package_modules, plant

# Bottom to top: a layer may import itself and what stands before it. "zeroshard" is the package's own `__init__`.
LAYERS = (
    "testing",
    "table",
    "text_files",
    "tree",
    "peers",
    "argument_names",
    "callers",
    "torch_private",
    "torch_groups",
    "torch_checks",
    "accelerate_private",
    "devices",
    "transformers_files",
    "watch",
    "store",
    "describe",
    "optim",
    "activations",
    "wire",
    "join",
    "core",
    "values",
    "update",
    "setup",
    "whole",
    "account",
    "parallel",
    "outer",
    "checkpoint",
    "plan",
    "evidence",
    "report",
    "loader",
    "misuse",
    "handle",
    "sharding",
    "pipes",
    "zeroshard",
    "integrations",
    "train",
    "terminal",
    "cli",
    "__main__",
)
# The planner runs without an engine: it reads the table that the engine runs on and the description of a model that the
# engine is built from, and traces with torch's fake tensors, whose activations it treats as the engine does.
# The evidence plays the planner, and has no model of a step of its own.
EVIDENCE_READS = ("table", "plan", "evidence")
PLAN_READS = (
    "table",
    "text_files",
    "tree",
    "torch_checks",
    "torch_groups",
    "torch_private",
    "describe",
    "optim",
    "store",
    "activations",
    "plan",
)
# Of a pipe, a plan cuts the module and runs its chunks as the product does: this is before any engine.
PLAN_READS_ALSO = ("zeroshard.core.undo", "zeroshard.parallel.chunked", "zeroshard.parallel.cut")
# Optimizers are torch's, and work without the engine; the costs that owners are balanced by are the table's.
OPTIM_READS = ("table", "torch_private", "optim")
# The product does not use its test helper.
TEST_ONLY = "testing"
# The main job is a program like any user's: it imports the names that the package exports, and itself.
PUBLIC_ONLY = "train"
# Beside them: how its settings, which are texts, are read and refused as arguments are, how its ranks meet, and files.
PUBLIC_ALSO = (
    "zeroshard.describe.offload",
    "zeroshard.describe.treatments",
    "zeroshard.join.arrival",
    "zeroshard.join.start",
    "zeroshard.plan.machine.profiles",
    "zeroshard.table.errors",
    "zeroshard.table.sizes",
    "zeroshard.table.stages",
    "zeroshard.text_files",
)
# What the planner shares with the engine is names and integers, so that it needs no device.
WITHOUT_TORCH = "table"


def layer_of(name: str) -> str:
    """Return the layer of a module of the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "zeroshard"


def imports(module: Module, known: frozenset[str]) -> list[tuple[int, str]]:
    """List line and name of every module that a module imports, lazily or for types only included."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, item.name) for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = module.origin(node)
            # `from package import name` imports a submodule where there is one, else an attribute of the package.
            names = [f"{origin}.{item.name}" for item in node.names]
            found += [(node.lineno, name if name in known else origin) for name in names]
    return found


def violations(modules: tuple[Module, ...]) -> list[str]:
    """List every import that points upwards."""
    known = frozenset(module.name for module in modules)
    found = []
    for module in modules:
        layer = layer_of(module.name)
        if layer not in LAYERS:
            found.append(module.at(1, f"unknown layer {layer!r}: give it a place in LAYERS and in docs/design.md"))
            continue
        for line, target in imports(module, known):
            if target.partition(".")[0] == "zeroshard":
                found += [module.at(line, why) for why in reasons_against(layer, target)]
            elif layer == WITHOUT_TORCH and target.partition(".")[0] not in sys.stdlib_module_names:
                found.append(module.at(line, f"imports {target}, but it is names and integers only"))
        if layer == PUBLIC_ONLY:
            found += [module.at(line, f"names {name}, which is not exported") for line, name in unexported(module)]
    return found


def unexported(module: Module) -> list[tuple[int, str]]:
    """List line and name of every attribute of the package itself that a module uses, and `__all__` does not hold."""
    attributes = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    used = [(node.lineno, module.full_name(node), node.attr) for node in attributes]
    return [(line, name) for line, name, last in used if name == f"zeroshard.{last}" and last not in zeroshard.__all__]


def reasons_against(layer: str, target: str) -> list[str]:
    """Say why a module of `layer` must not import `target`; empty where it may."""
    below = layer_of(target)
    if below not in LAYERS:
        return [f"imports {target}, which is in no known layer"]
    if LAYERS.index(below) > LAYERS.index(layer):
        return [f"{layer} imports {target}, which is above it"]
    if below == TEST_ONLY and layer != TEST_ONLY:
        return [f"{layer} imports {target}, which is for tests"]
    if layer == PUBLIC_ONLY and below not in ("zeroshard", PUBLIC_ONLY) and target not in PUBLIC_ALSO:
        return [f"{layer} imports {target}: it uses the public interface alone"]
    if layer == "plan" and below not in PLAN_READS and target not in PLAN_READS_ALSO:
        return [f"plan imports {target}: it reads the table and descriptions alone"]
    if layer == "evidence" and below not in EVIDENCE_READS:
        return [f"evidence imports {target}: it plays plans alone"]
    if layer == "optim" and below not in OPTIM_READS:
        return [f"optim imports {target}: it is torch's optimizers alone"]
    return []


def layers_in_docs() -> list[str]:
    """Return the layers in the first column of docs/design.md's table, from top to bottom."""
    section = (REPOSITORY / "docs/design.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`([^`]*)`", cell)]
    return [name.removesuffix("/__init__.py").removesuffix(".py").rstrip("/") for name in names]


def test_the_page_has_the_same_layers() -> None:
    assert layers_in_docs() == [*reversed(LAYERS)]
    assert {layer_of(module.name) for module in package_modules()} == {*LAYERS}


def test_imports_point_downwards() -> None:
    assert violations(package_modules()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("zeroshard.core.unit", "from zeroshard.whole import full", "core imports zeroshard.whole, which is above"),
        (
            "zeroshard.activations.chain",
            "from zeroshard.core import saved",
            "activations imports zeroshard.core, which is",
        ),
        ("zeroshard.describe.units", "from zeroshard.core import hooks", "describe imports zeroshard.core, which is"),
        ("zeroshard.core.unit", "import zeroshard as zs", "core imports zeroshard, which is above"),
        ("zeroshard.core.unit", "from ..plan.memory import predict", "core imports zeroshard.plan.memory, which is"),
        ("zeroshard.core.unit", "def f():\n    from .. import cli", "core imports zeroshard.cli, which is above"),
        ("zeroshard.whole.full", "import zeroshard.checkpoint.save", "whole imports zeroshard.checkpoint.save"),
        (
            "zeroshard.evidence.paper",
            "from zeroshard.core import engine",
            "evidence imports zeroshard.core.engine: it plays",
        ),
        ("zeroshard.plan.memory", "import zeroshard.evidence.paper", "plan imports zeroshard.evidence.paper, which is"),
        (
            "zeroshard.plan.memory",
            "from zeroshard.core import engine",
            "plan imports zeroshard.core.engine: it reads the table",
        ),
        (
            "zeroshard.plan.memory",
            "from zeroshard.parallel.runner import Runner",
            "plan imports zeroshard.parallel.runner: it reads the table",
        ),
        ("zeroshard.plan.memory", "from zeroshard.core import Zero", "plan imports zeroshard.core: it reads the table"),
        ("zeroshard.optim.lion", "from zeroshard.tree import find", "optim imports zeroshard.tree: it is torch's"),
        ("zeroshard.report.page", "from zeroshard.train import loop", "report imports zeroshard.train, which is above"),
        ("zeroshard.train.loop", "from zeroshard.cli import main", "train imports zeroshard.cli, which is above"),
        ("zeroshard.train.loop", "from zeroshard.testing import run_ranks", "zeroshard.testing, which is for tests"),
        ("zeroshard.train.loop", "from zeroshard.join import start", "join: it uses the public interface alone"),
        (
            "zeroshard.train.loop",
            "import zeroshard as zs\nzs.sharding.shard_over",
            "zeroshard.sharding, which is not exported",
        ),
        ("zeroshard.train.loop", "import zeroshard.extras", "imports zeroshard.extras, which is in no known layer"),
        ("zeroshard.extras.page", "", "unknown layer 'extras'"),
        (
            "zeroshard.table.layout",
            "import torch.distributed",
            "imports torch.distributed, but it is names and integers",
        ),
        ("zeroshard.table.layout", "import numpy as np", "imports numpy, but it is names and integers only"),
    ],
)
def test_a_planted_import_is_found(name: str, text: str, message: str) -> None:
    others = (plant("zeroshard.cli", ""), plant("zeroshard.core.engine", ""))
    (found,) = violations((*others, plant(name, text)))
    assert message in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zeroshard.plan.memory", "from zeroshard.table import layout\nfrom zeroshard.table.stages import STAGES"),
        ("zeroshard.plan.trace.tracer", "from zeroshard.torch_private import fake_tensors"),
        ("zeroshard.plan.trace.uses", "from zeroshard.describe.units import plan_units"),
        ("zeroshard.plan.trace.treated", "from zeroshard.activations.chain import Chained"),
        ("zeroshard.train.loop", "import zeroshard as zs\nfrom zeroshard.train.run import Run\nzs.shard(zs.Mesh)"),
        ("zeroshard.cli", "from zeroshard.train.loop import train"),
        ("zeroshard.core.unit", "from . import engine\nfrom .buffer import Bucket"),
    ],
)
def test_an_import_downwards_passes(name: str, text: str) -> None:
    assert violations((plant("zeroshard.table.layout", ""), plant(name, text))) == []


# -- order within core ------------------------------------------------------------------------------------------------

# Each may import itself and what stands before it, for types only included.
CORE = (
    "version",
    "undo",
    "dtypes",
    "states",
    "votes",
    "passes",
    "followed",
    "changes",
    "grads",
    "loose",
    "buffer",
    "slot",
    "norms",
    "elements",
    "gradient",
    "slices",
    "guard",
    "parameter",
    "saved",
    "unit",
    "frames",
    "flights",
    "hints",
    "history",
    "order",
    "engine",
    "hooks",
)


def out_of_order(modules: tuple[Module, ...]) -> list[str]:
    """List every import within core that points upwards."""
    known, found = frozenset(module.name for module in modules), []
    for module in modules:
        if module.name.startswith("zeroshard.core."):
            own = module.name.split(".")[2]
            names = [(line, name) for line, name in imports(module, known) if name.startswith("zeroshard.core.")]
            found += [
                module.at(line, f"{own} imports {name}, which comes after it")
                for line, name in names
                if CORE.index(name.split(".")[2]) > CORE.index(own)
            ]
    return found


def circles(modules: tuple[Module, ...]) -> list[str]:
    """Name the modules that import themselves, directly or through others, for types only included."""
    known = frozenset(module.name for module in modules)
    reached = {module.name: {name for _, name in imports(module, known)} & known for module in modules}
    for through in known:
        for names in reached.values():
            if through in names:
                names |= reached[through]
    return sorted(name for name, names in reached.items() if name in names)


def test_imports_within_core_have_an_order() -> None:
    assert out_of_order(package_modules()) == []


def test_no_module_imports_itself_through_others() -> None:
    assert circles(package_modules()) == []


def test_a_planted_circle_is_found() -> None:
    one = plant("zeroshard.core.slot", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import engine")
    two = plant("zeroshard.core.engine", "from zeroshard.core.unit import Unit")
    three = plant("zeroshard.core.unit", "from zeroshard.core.slot import Slot")
    (found,) = out_of_order((one, two, three))
    assert "slot imports zeroshard.core.engine, which comes after it" in found
    assert circles((one, two, three)) == ["zeroshard.core.engine", "zeroshard.core.slot", "zeroshard.core.unit"]


# -- reach ------------------------------------------------------------------------------------------------------------

ENTRIES = ("zeroshard", "zeroshard.cli", "zeroshard.__main__", "zeroshard.testing")
"""Modules where programs start; imports that docs show are entries, too."""


def names_in_docs() -> set[str]:
    """Return the modules that imports in README.md and docs/ name."""
    texts = [path.read_text() for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))]
    return {name for text in texts for name in re.findall(r"^ *(?:from|import) (zeroshard[.\w]*)", text, re.MULTILINE)}


def unreached(modules: tuple[Module, ...], entries: Collection[str]) -> set[str]:
    """Return the modules that no path of imports from the entries reaches, imports in functions included."""
    known = {module.name: module for module in modules}
    left, found = [name for name in entries if name in known], set[str]()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            # An import of a module runs the packages around it.
            parts = name.split(".")
            left += [".".join(parts[:end]) for end in range(1, len(parts))]
            left += [target for _, target in imports(known[name], frozenset(known)) if target in known]
    return known.keys() - found


def test_each_module_is_reached() -> None:
    assert unreached(package_modules(), {*ENTRIES, *names_in_docs()}) == set()


def test_a_planted_module_that_nothing_imports_is_found() -> None:
    modules = (
        plant("zeroshard", "def shard():\n    from zeroshard.core import engine"),
        plant("zeroshard.core", ""),
        plant("zeroshard.core.engine", ""),
        plant("zeroshard.core.left", "from zeroshard.core import engine"),
    )
    assert unreached(modules, ENTRIES) == {"zeroshard.core.left"}
    assert unreached(modules, {*ENTRIES, "zeroshard.core.left"}) == set()
