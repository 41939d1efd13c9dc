"""A page that is open in a browser, and how a test opens one: the fixture `open_page` of `conftest.py`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY = "html[data-is-ready]"


@dataclasses.dataclass
class Opened:
    """A page in the browser, the data it was made from, and what went wrong in it."""

    page: Any
    data: dict[str, Any]
    path: Path
    problems: list[str]
    requests: list[str]

    def show(self, view: str) -> None:
        self.page.click(f"#tab-{view}")

    def number(self, selector: str, name: str = "bytes") -> float:
        return float(self.page.get_attribute(selector, f"data-{name}"))

    def script(self, text: str) -> Any:
        return self.page.evaluate(text)


Open = Callable[..., Opened]
