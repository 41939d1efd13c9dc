"""Nothing outside the table asks which class a cell has: what follows from a cell are answers, compared."""

import ast

import pytest

from .source import Module, package_modules, plant

CELLS = frozenset(["Cell", "Elsewhere", "Replicated", "Sharded"])
ASKS = frozenset(["isinstance", "issubclass", "type"])


def questions(modules: tuple[Module, ...]) -> list[str]:
    """List every place outside `table/` that asks for the class of a cell."""
    found = []
    for module in modules:
        if module.name.startswith("zeroshard.table"):
            continue
        for node in ast.walk(module.tree):
            asked: list[ast.AST] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKS:
                asked = [*node.args[1:]]
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                if any(isinstance(s, ast.Call) and getattr(s.func, "id", "") == "type" for s in sides):
                    asked = [*sides]
            elif isinstance(node, ast.MatchClass):
                asked = [node.cls]
            names = {getattr(one, "id", getattr(one, "attr", "")) for part in asked for one in ast.walk(part)}
            if names & CELLS:
                found.append(module.at(node.lineno if hasattr(node, "lineno") else 0, f"asks for {names & CELLS}"))
    return found


def test_nothing_outside_the_table_asks_for_the_class_of_a_cell() -> None:
    assert questions(package_modules()) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(cell):\n    return isinstance(cell, Elsewhere)",
        "def f(cell):\n    return isinstance(cell, (int, cells.Sharded))",
        "def f(cell):\n    return type(cell) is Replicated",
        "def f(cell):\n    match cell:\n        case Elsewhere():\n            return 1",
    ],
)
def test_such_a_question_is_found(text: str) -> None:
    assert len(questions((plant("zeroshard.core.unit", text),))) == 1
    assert questions((plant("zeroshard.table.unit", text),)) == []


def test_making_a_cell_is_no_question() -> None:
    assert questions((plant("zeroshard.describe.offload", "def f(row):\n    return Elsewhere(row.states)"),)) == []
