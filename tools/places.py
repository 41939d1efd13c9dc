"""Count the conditions of the package that ask where something is: on the device, on the host or in a file.

    python -m tools.places           # by file
    python -m tools.places --lines   # each of them

A condition is what an `if`, a `while`, a comprehension, a comparison or a boolean operator decides by. It
counts if it compares the name of a memory, asks whether a place such as a disk is there (`is None`), or reads a name
that says where something is, such as `is_on_host`. `table/` and `store/`, which answer such questions, are exempt.
`tests/contract/test_cells.py` holds the limits.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

__all__ = ["conditions_in", "names_compared", "places_in"]

PACKAGE = Path(__file__).parent.parent / "zeroshard"
EXEMPT = ("table", "store")
MEMORIES = frozenset(["device", "host", "file"])
NAMES = frozenset(["memory", "master_memory", "DEVICE"])
"""Names that stand for the name of a memory."""
WORDS = re.compile(
    r"(^|_)(apart|away|elsewhere|on_host|on_device|in_file|filed)($|_)"
    r"|^(is_direct|moves_gradients|can_update_late|_cut)$"
)
"""Attributes and functions that say where something is."""
PLACES = frozenset(["disk", "landing", "home", "_home", "_apart", "apart"])
"""What is None where something is not in another memory."""


def names_compared(tree: ast.AST) -> list[int]:
    """Return the lines that compare the name of a memory."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Compare) and _compares_memory(node)]


def places_in(tree: ast.AST) -> list[int]:
    """Return the lines of all conditions that ask where something is, one for each question."""
    found, asked = set[tuple[int, int]](), _names_of_store(tree)
    for condition in conditions_in(tree):
        for node in ast.walk(condition):
            is_compared = isinstance(node, ast.Compare) and (_compares_memory(node) or _asks_for_place(node))
            is_called = isinstance(node, ast.Call) and WORDS.search(_name_of(node.func))
            is_read = isinstance(node, ast.Attribute) and WORDS.search(node.attr)
            if is_compared or is_called or is_read or _name_of(node) in asked:
                found.add((node.lineno, node.col_offset))
    return sorted(line for line, _ in found)


def conditions_in(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what is decided by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            yield node


def _names_of_store(tree: ast.AST) -> set[str]:
    """Return what a module imports from `store/`: to ask for its classes is to ask where something is."""
    sources = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {name.name for node in sources if (node.module or "").startswith("zeroshard.store.") for name in node.names}


def _asks_for_place(node: ast.Compare) -> bool:
    sides = [side.value if isinstance(side, ast.NamedExpr) else side for side in (node.left, *node.comparators)]
    return any(map(_is_none, sides)) and any(_name_of(side) in PLACES for side in sides)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _compares_memory(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    sides += [one for side in sides if isinstance(side, ast.Tuple | ast.List | ast.Set) for one in side.elts]
    # A member of another class, such as an answer whether values may be read, is no memory.
    names = {_name_of(side) for side in sides if not isinstance(side, ast.Attribute) or side.attr != "DEVICE"}
    is_text = any(isinstance(side, ast.Constant) and side.value in MEMORIES for side in sides)
    return bool(names & NAMES and not any(map(_is_none, sides))) or (is_text and bool(names & {"place", "where"}))


def _name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def main() -> None:
    """Print the count by file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="print each condition")
    is_long, found = parser.parse_args().lines, Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text()
        lines = [] if name.split("/")[0] in EXEMPT else places_in(ast.parse(text))
        found[name] = len(lines)
        for line in lines if is_long else ():
            print(f"{name}:{line}: {text.splitlines()[line - 1].strip()}")
    for name, count in found.most_common():
        if count:
            print(f"{count:5}  {name}")
    print(f"{found.total():5}  zeroshard, {sum(map(bool, found.values()))} files")


if __name__ == "__main__":
    main()
