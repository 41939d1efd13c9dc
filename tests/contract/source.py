"""The package as syntax trees, for rules that read the source instead of running it. Read `Module` first."""

import ast
import dataclasses
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "zeroshard"

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Module:
    """One module of the package, or a text that stands for one.

    Args:
        name: dotted name, as in `zeroshard.wire.comm`.
        text: its source.
        is_package: whether it is an `__init__.py`.
    """

    name: str
    text: str
    is_package: bool = False

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for: `import numpy as np` gives `np` -> `numpy`."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for item in node.names:
                    full = item.name if item.asname else item.name.partition(".")[0]
                    names[item.asname or full] = full
            elif isinstance(node, ast.ImportFrom):
                for item in node.names:
                    names[item.asname or item.name] = f"{self.origin(node)}.{item.name}"
        return names

    def origin(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that `from ... import` reads."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*base, *([node.module] if node.module else [])])

    def full_name(self, node: ast.expr) -> str:
        """Return the dotted name of an expression with imported names resolved; '' where it is no dotted name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    @functools.cached_property
    def references(self) -> tuple[tuple[int, str], ...]:
        """Line and full name of every dotted name in the module, and of every name it imports."""
        return tuple(self._references())

    def _references(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                if name := self.full_name(node):
                    yield node.lineno, name
            elif isinstance(node, ast.Import):
                yield from ((node.lineno, item.name) for item in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, f"{self.origin(node)}.{item.name}") for item in node.names)

    def at(self, line: int, what: str) -> str:
        """Format a violation as place and text."""
        return f"{self.name}:{line}: {what}"


def plant(name: str, text: str) -> Module:
    """Make a module of an indented text, to show that a rule can fail."""
    return Module(name, textwrap.dedent(text))


@functools.cache
def package_modules() -> tuple[Module, ...]:
    """Read every module of the package."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["zeroshard", *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        modules.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return tuple(modules)
