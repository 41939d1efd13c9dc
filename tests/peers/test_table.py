"""The table of docs/others-defects.md: one row for each test of this folder, as its docstring says.

`python -m tests.peers.test_table` writes the table anew.
"""

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Final

from .shapes import RIGHT, Shape

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "others-defects.md"
NAMES: Final = {
    "Megatron-LM": "Megatron",
    "accelerate": "Accelerate",
    "pytorch": "PyTorch",
    "pytorch-lightning": "Lightning",
    "transformers": "Transformers",
    "trl": "TRL",
}
VERDICTS: Final = (RIGHT, "refused", "mended", "as there")


def shapes() -> list[tuple[str, str, Shape]]:
    """List (file, name, shape) of all tests of this folder that ranks run."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        found += [
            (path.stem, name, one.shape)
            for name, one in vars(module).items()
            if name.startswith("test_") and hasattr(one, "shape") and one.shape.script.__module__ == module.__name__
        ]
    return found


def table() -> str:
    """Return the counts and the table, in Markdown."""
    kept = shapes()
    counts = Counter(verdict_of(shape) for _, _, shape in kept)
    told = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS)
    lines = [f"{len(kept)} reports: {told}.", "", "| report | there | here | test |", "|---|---|---|---|"]
    for file, name, shape in sorted(kept, key=lambda one: (_library(one[2]), _number(one[2]))):
        report = f"[{_library(shape)} {_number(shape)}]({shape.link}), {shape.year}"
        lines.append(f"| {report} | {shape.defect} | {shape.here} | `{file}.py` {name.removeprefix('test_')} |")
    return "\n".join(lines)


def verdict_of(shape: Shape) -> str:
    """Return what happens here, as one of `VERDICTS`."""
    return next(verdict for verdict in VERDICTS if shape.here.startswith(verdict))


def _library(shape: Shape) -> str:
    repository = shape.link.split("/")[4]
    return NAMES.get(repository, repository)


def _number(shape: Shape) -> int:
    return int(shape.link.rpartition("/")[2])


def page_with(text: str, made: str) -> str:
    """Return the page with a table put between its two marks."""
    return re.sub(r"(<!-- table: defects -->\n).*?(\n<!-- end -->)", lambda m: m[1] + made + m[2], text, flags=re.S)


def test_the_page_has_the_table_of_the_tests() -> None:
    text = PAGE.read_text()
    assert text == page_with(text, table()), "run python -m tests.peers.test_table"


def test_each_report_is_tried_once() -> None:
    links = [shape.link for _, _, shape in shapes()]
    assert len(links) == len(set(links)) and all(re.fullmatch(r"https://github\.com/\S+/\d+", link) for link in links)


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), table()))
