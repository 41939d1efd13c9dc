"""The programs in fenced blocks of pages and docstrings, and how one runs.

A module of its own, because each rank imports the file of its test: `test_all.py` imports the whole package.
"""

import inspect
import re
import textwrap

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(text: str | None) -> list[str]:
    """Return the fenced blocks of a page or a docstring, as programs."""
    return [textwrap.dedent(block) for block in BLOCK.findall(inspect.cleandoc(text or ""))]


def run_block(program: str, where: str, names: dict[str, object] | None = None) -> None:
    """Run one fenced block: as a program of its own, or with the names of the blocks before it."""
    exec(compile(program, f"<example in {where}>", "exec"), {"__name__": "__example__"} if names is None else names)
