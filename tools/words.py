"""Count the words of the documentation that people write: all pages but what tools write into them, code and results.

    python -m tools.words              # by page, and the sum
    python -m tools.words --most 25000 # ends with status 1 above that

Owns what counts. Not counted are fenced blocks, comments, targets of links, blocks between `<!-- table: ... -->` or
`<!-- command: ... -->` and `<!-- end -->`, which tools write, and tables of results. Other tables are counted.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
RESULTS = tuple(ROOT / "benchmarks" / "results" / name for name in ("measured.md", "reliability.md"))
"""Files of results that people write: their tables do not count."""
WRITTEN_BY_TOOLS = re.compile(r"<!-- (?:table|command): .*?<!-- end -->", re.DOTALL)
FENCED = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TARGET = re.compile(r"\]\([^)]*\)")
WORD = re.compile(r"\w")


def words_of(text: str) -> int:
    """Return the number of words that a person wrote in a page."""
    for pattern in (WRITTEN_BY_TOOLS, FENCED, COMMENT):
        text = pattern.sub("", text)
    return len([word for word in TARGET.sub("]", text).split() if WORD.search(word)])


def pages() -> list[Path]:
    """Return all pages: the README, CONTRIBUTING, results, and what is below docs/ and examples/."""
    return [*PAGES, *RESULTS, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def count(page: Path) -> int:
    """Return the words of a page that count."""
    lines = page.read_text().splitlines(keepends=True)
    return words_of("".join(line for line in lines if page not in RESULTS or not line.startswith("|")))


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, help="the largest sum that is not an error")
    most = parser.parse_args().most
    counts = {page.relative_to(ROOT): count(page) for page in pages()}
    for page, words in counts.items():
        print(f"{words:7,}  {page}")
    total = sum(counts.values())
    print(f"{total:7,}  words")
    if most is not None and total > most:
        sys.exit(f"{total:,} words are more than {most:,}: say each thing once, or move it to a docstring.")


if __name__ == "__main__":
    main()
