"""The report page: one HTML file that holds its code, its style and its data, and asks nothing of any server.

Owns how the parts in `assets/` become one file, and how the data lies in it. Must not know torch, nor where the data
comes from. Read `write_page` first; `zeroshard/report/schema.py` has the data.

Note: how modules become one script
    The scripts in `assets/` are ES modules without a build step. A page that is opened from a file cannot import
    others, so the modules are joined in the order of their imports, and import and export go: every name at the top of
    a module is one of the page's, and must be there once.
"""

import base64
import html
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zeroshard.report.check import check_page
from zeroshard.report.schema import PageData
from zeroshard.report.stages import table_rows
from zeroshard.report.walk import read_walk

__all__ = ["join_modules", "make_page", "write_page"]

_ASSETS: Final = Path(__file__).parent / "assets"
_IMPORT: Final = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)
_LEVEL: Final = 9
_TIME_DIGITS: Final = 9


def write_page(data: PageData | Mapping[str, Any], path: str | Path) -> Path:
    """Write a page that opens from a file, without a network.

    Args:
        data: what the page shows; views whose data is missing are left out. Without "walk" the bundled walk is shown,
            with None for it none.
        path: the file, overwritten; its folder must be there.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: the data is not as `zeroshard/report/schema.py` says.
        OSError: the file cannot be written.

    ```python
    import pathlib, tempfile
    from zeroshard.report.page import write_page

    losses = [{"run": "a", "step": [1, 2], "loss": [5.5, 5.1]}]
    with tempfile.TemporaryDirectory() as folder:
        page = {"version": 1, "kind": "run", "title": "a run", "losses": losses}
        assert write_page(page, pathlib.Path(folder, "a.html")).stat().st_size < 300_000
    ```
    """
    path = Path(path)
    path.write_text(make_page(data), "utf-8")
    return path


def make_page(data: PageData | Mapping[str, Any]) -> str:
    """Return the text of a page; `write_page` says what of.

    >>> from zeroshard.report.page import make_page
    >>> make_page({"version": 1, "kind": "run", "title": "a run", "walk": None}).startswith("<!doctype html>")
    True
    """
    check_page(data)
    shown = {"walk": read_walk(), **data, "rows": table_rows()}
    parts = {
        "title": html.escape(data["title"]),
        "style": _read("style.css"),
        "script": join_modules("main.js"),
        "data": _pack(shown),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def join_modules(name: str, folder: Path = _ASSETS) -> str:
    """Return a module and all that it imports, as one script.

    Args:
        name: file of the module that imports the others.
        folder: where they are.

    Raises:
        ValueError: modules import each other in a circle.

    >>> from zeroshard.report.page import join_modules
    >>> "import" in join_modules("units.js")
    False
    """
    texts: dict[str, str] = {}

    def add(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            raise ValueError(f"{' imports '.join((*path, module))}: take what both need into a module of its own")
        if module in texts:
            return
        text = (folder / module).read_text("utf-8")
        for imported in _IMPORT.findall(text):
            add(imported, (*path, module))
        texts[module] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(name, ())
    return "\n".join(texts.values())


def _read(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


def _pack(data: Mapping[str, Any]) -> str:
    """Return data as JSON, deflated, as base64; times of events are rounded to nanoseconds."""
    if film := data.get("film"):
        film = {part: _rounded(columns) if part in ("events", "ticks") else columns for part, columns in film.items()}
        data = {**data, "film": film}
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), _LEVEL)).decode()


def _rounded(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {**columns, "t_s": [round(time, _TIME_DIGITS) for time in columns["t_s"]]}
