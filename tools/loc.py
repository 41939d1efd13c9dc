"""Count lines of code: lines that hold a token which is neither comment nor docstring.

    python tools/loc.py zeroshard/core

Blank lines, comments and docstrings are free, because explaining must never cost anything; a docstring is any string
that stands alone as a statement (PEP 257 calls one after an assignment an attribute docstring). Other strings count, on
every line they span.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

_NOT_CODE = frozenset(
    [
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    ]
)


def count_code_lines(source: str) -> int:
    """Count the lines of code of one module.

    >>> count_code_lines('"Doc."' + chr(10) + 'x = 1  # why' + chr(10) * 2 + '# alone')
    1
    """
    docstrings = _docstring_spans(ast.parse(source))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        span = (token.start[0], token.end[0])
        if token.type not in _NOT_CODE and not (token.type == tokenize.STRING and span in docstrings):
            lines.update(range(span[0], span[1] + 1))
    return len(lines)


def count_tree(root: Path) -> dict[Path, int]:
    """Count the lines of code of every module under `root`, by path relative to it."""
    return {path.relative_to(root): count_code_lines(path.read_text()) for path in sorted(root.rglob("*.py"))}


def _docstring_spans(tree: ast.Module) -> set[tuple[int, int]]:
    """Return first and last line of every string that stands alone as a statement."""
    return {
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def main(roots: list[str]) -> None:
    """Print a table for each root."""
    for root in roots:
        counts = count_tree(Path(root))
        for path, lines in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{lines:6,}  {path}")
        print(f"{sum(counts.values()):6,}  {root}, {len(counts)} files")


if __name__ == "__main__":
    main(sys.argv[1:] or ["zeroshard"])
