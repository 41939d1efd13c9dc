"""Write the tables of docs/paper.md.

    python -m tools.paper

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is there is replaced. `zeroshard paper` prints
the same tables.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from zeroshard.evidence.paper import reproduce

PAGE = Path(__file__).parent.parent / "docs" / "paper.md"


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return the page with its tables.

    Raises:
        KeyError: the page asks for a table that there is not.
    """
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda m: f"{m[1]}```text\n{tables[m[2]]}\n```\n{m[3]}", text)


def tables() -> dict[str, str]:
    """Return the tables as plain text, by name."""
    found = reproduce()
    return {**{name: table.render() for name, table in found.tables.items()}, "targets": found.target_table().render()}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables()))
