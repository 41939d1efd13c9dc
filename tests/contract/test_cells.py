"""Nothing outside the table asks which class a cell has: what follows from a cell are answers, compared.

Nor does anything outside `table/` and `store/` compare the name of a memory, and few conditions ask where something is.
"""

import ast

import pytest

from tools import places

from .source import Module, package_modules, plant

CELLS = frozenset(["Cell", "Elsewhere", "Replicated", "Sharded"])
MOST_CONDITIONS, MOST_FILES = 47, 25
"""Conditions outside `table/` and `store/` that ask where something is, without those of the modules below.

When buckets were cut between memories there were 101 in 26 files.
"""
COUNTS = ["zeroshard.plan.step.film"]
"""What compares names: the film counts bytes by memory."""
ASKS = frozenset(["isinstance", "issubclass", "type"])


def outside() -> list[Module]:
    """Return the modules of the package besides those that know memories."""
    return [m for m in package_modules() if not m.name.startswith(("zeroshard.table", "zeroshard.store"))]


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


def test_only_tables_and_stores_compare_the_names_of_memories() -> None:
    assert [m.name for m in outside() if places.names_compared(m.tree)] == COUNTS


def test_few_conditions_ask_where_something_is() -> None:
    found = {m.name: len(lines) for m in outside() if m.name not in COUNTS and (lines := places.places_in(m.tree))}
    assert sum(found.values()) <= MOST_CONDITIONS, found
    assert len(found) <= MOST_FILES, found


@pytest.mark.parametrize(
    "text",
    [
        "def f(cell):\n    return cell.memory == 'host'",
        "def f(cell):\n    return cell.memory in ('host', 'file')",
        "def f(memory):\n    return memory != DEVICE",
    ],
)
def test_a_name_that_is_compared_is_found(text: str) -> None:
    module = plant("zeroshard.core.unit", text)
    assert len(places.names_compared(module.tree)) == 1
    assert len(places.places_in(module.tree)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f(self):\n    return 1 if self.disk is None else 2",
        "def f(comm):\n    while comm.is_on_host:\n        pass",
        "def f(spec):\n    return [one for one in spec if one.states.is_in_file]",
        "def f(grads):\n    return not grads.landing.is_direct",
        "from zeroshard.store.stored import is_stored\ndef f(one):\n    return 1 if is_stored(one) else 2",
    ],
)
def test_a_condition_is_found(text: str) -> None:
    assert places.places_in(plant("zeroshard.core.unit", text).tree)


def test_what_asks_a_memory_to_act_is_no_condition() -> None:
    text = "def f(self, values):\n    return self.store.bring(values, self.masters) if values.numel() else None"
    assert places.places_in(plant("zeroshard.core.unit", text).tree) == []
