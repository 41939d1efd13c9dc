"""Imports point downwards only: the layers of docs/design.md."""

import ast

import pytest

from .source import Module, package_modules, plant

# Bottom to top: a layer may import itself and what stands before it. "zeroshard" is the package's own `__init__`.
LAYERS = (
    "testing",
    "faults",
    "host",
    "core",
    "state",
    "activations",
    "parallel",
    "checkpoint",
    "plan",
    "rehearse",
    "report",
    "handle",
    "zeroshard",
    "integrations",
    "train",
    "cli",
)
# The planner runs without an engine, and predicts from the same table, layout and schedule that the engine runs on.
PLAN_READS_OF_CORE = frozenset(
    f"zeroshard.core.{name}" for name in ("errors", "layout", "residency", "schedule", "stages")
)
# The product does not use its test helper.
TEST_ONLY = "testing"
# What the planner shares with the engine stays integers, so that it never needs a device.
WITHOUT_TORCH = (
    "zeroshard.core.layout",
    "zeroshard.core.schedule",
    "zeroshard.core.stages",
    "zeroshard.core.residency",
)


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
            elif module.name in WITHOUT_TORCH and target.partition(".")[0] == "torch":
                found.append(module.at(line, "imports torch, but it is integers only"))
    return found


def reasons_against(layer: str, target: str) -> list[str]:
    """Say why a module of `layer` must not import `target`; empty where it may."""
    below = layer_of(target)
    if below not in LAYERS:
        return [f"imports {target}, which is in no known layer"]
    if LAYERS.index(below) > LAYERS.index(layer):
        return [f"{layer} imports {target}, which is above it"]
    if below == TEST_ONLY and layer != TEST_ONLY:
        return [f"{layer} imports {target}, which is for tests"]
    if layer == "plan" and below == "core" and target not in PLAN_READS_OF_CORE:
        return [f"plan imports {target}: of core it may read {', '.join(sorted(PLAN_READS_OF_CORE))}"]
    return []


def test_imports_point_downwards() -> None:
    assert violations(package_modules()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("zeroshard.core.unit", "from zeroshard.state import full", "core imports zeroshard.state, which is above"),
        ("zeroshard.core.unit", "import zeroshard as zs", "core imports zeroshard, which is above"),
        ("zeroshard.core.unit", "from ..plan.memory import predict", "core imports zeroshard.plan.memory, which is"),
        ("zeroshard.core.unit", "def f():\n    from .. import cli", "core imports zeroshard.cli, which is above"),
        ("zeroshard.state.full", "import zeroshard.checkpoint.save", "state imports zeroshard.checkpoint.save"),
        ("zeroshard.plan.memory", "from zeroshard.core import engine", "plan imports zeroshard.core.engine: of core"),
        ("zeroshard.plan.memory", "from zeroshard.core import Zero", "plan imports zeroshard.core: of core it may"),
        ("zeroshard.report.page", "from zeroshard.train import loop", "report imports zeroshard.train, which is above"),
        ("zeroshard.train.loop", "from zeroshard.cli import main", "train imports zeroshard.cli, which is above"),
        ("zeroshard.train.loop", "from zeroshard.testing import run_ranks", "zeroshard.testing, which is for tests"),
        ("zeroshard.train.loop", "import zeroshard.extras", "imports zeroshard.extras, which is in no known layer"),
        ("zeroshard.extras.page", "", "unknown layer 'extras'"),
        ("zeroshard.core.layout", "import torch.distributed", "imports torch, but it is integers only"),
    ],
)
def test_a_planted_import_is_found(name: str, text: str, message: str) -> None:
    others = (plant("zeroshard.cli", ""), plant("zeroshard.core.engine", ""))
    (found,) = violations((*others, plant(name, text)))
    assert message in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zeroshard.plan.memory", "from zeroshard.core import layout\nfrom zeroshard.core.stages import STAGES"),
        ("zeroshard.train.loop", "import zeroshard as zs\nfrom zeroshard.core.stages import STAGES\nimport torch"),
        ("zeroshard.cli", "from zeroshard.train.loop import train"),
        ("zeroshard.core.unit", "from . import layout\nfrom .buffer import Bucket"),
    ],
)
def test_an_import_downwards_passes(name: str, text: str) -> None:
    assert violations((plant("zeroshard.core.layout", ""), plant(name, text))) == []
