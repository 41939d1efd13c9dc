"""The report page: one HTML file that contains its code, style and data, and makes no requests.

Owns the assembly of `assets/` into one file, and the encoding of the data. It must not know torch or the source of the
data. Read `write_page` first; `zeroshard/report/schema.py` defines the data.

Note: how modules become one script
    The scripts in `assets/` are ES modules without a build step. A page opened from a file cannot import modules, so
    the modules are concatenated in the order of their imports, without import and export statements: all their
    top-level names share one scope, and must be unique.
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
from zeroshard.report.player import table_rows
from zeroshard.report.schema import PageData
from zeroshard.report.walk import read_walk
from zeroshard.text_files import write_whole

__all__ = ["join_modules", "make_page", "write_page"]

_ASSETS: Final = Path(__file__).parent / "assets"
_IMPORT: Final = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)
_LEVEL: Final = 9
_TIME_DIGITS: Final = 9


def write_page(data: PageData | Mapping[str, Any], path: str | Path) -> Path:
    """Write a page that opens from a file, without a network.

    Args:
        data: the data of the page; views without data are omitted. Without "walk" the page has the bundled walk, and
            with None for it no walk.
        path: the file, overwritten; its folder must exist.

    Returns:
        The path.

    Raises:
        TypeError, ValueError: the data does not conform to `zeroshard/report/schema.py`.
        OSError: the file cannot be written.

    ```python
    import pathlib, tempfile
    from zeroshard.report.page import write_page

    curves = [{"run": "a", "step": [1, 2], "loss": [5.5, 5.1]}]
    with tempfile.TemporaryDirectory() as folder:
        page = {"version": 2, "title": "a run", "curves": curves}
        assert write_page(page, pathlib.Path(folder, "a.html")).stat().st_size < 300_000
    ```
    """
    write_whole(path, make_page(data))
    return Path(path)


def make_page(data: PageData | Mapping[str, Any]) -> str:
    """Return the text of a page, from the same data as `write_page`.

    >>> from zeroshard.report.page import make_page
    >>> make_page({"version": 2, "title": "a run", "walk": None}).startswith("<!doctype html>")
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
    """Return a module and all its imports as one script.

    Args:
        name: file of the top-level module.
        folder: folder of the modules.

    Raises:
        ValueError: modules import each other in a cycle.

    >>> from zeroshard.report.page import join_modules
    >>> "import" in join_modules("units.js")
    False
    """
    texts: dict[str, str] = {}

    def add(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            raise ValueError(f"{' imports '.join((*path, module))}: move the shared code into a separate module")
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
    """Return data as JSON, deflated, in base64; times of events are rounded to nanoseconds."""
    if film := data.get("film"):
        film = {part: _rounded(columns) if part in ("events", "ticks") else columns for part, columns in film.items()}
        data = {**data, "film": film}
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), _LEVEL)).decode()


def _rounded(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {**columns, "t_s": [round(time, _TIME_DIGITS) for time in columns["t_s"]]}
