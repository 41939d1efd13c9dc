"""The option that has browser tests write their screenshots, and the pages that they open."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.opening import READY, Open, Opened
from zeroshard.report.page import write_page


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="write screenshots of the report page's views to FOLDER")


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """The folder for screenshots; None where none are wanted."""
    folder = request.config.getoption("--pictures", default=None)
    return Path(folder) if folder else None


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open data as a page; afterwards there must be no error, no message and no request but for the file."""
    opened: list[Opened] = []
    contexts = []

    def open_(data: dict[str, Any], view: str = "", width: int = 1200, **options: Any) -> Opened:
        path = write_page(data, tmp_path / f"page-{len(opened)}.html")
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        one = Opened(page, data, path, [], [])
        page.on("console", lambda message: one.problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: one.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (one.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: one.requests.append(request.url))
        page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        opened.append(one)
        page.goto(f"{path.as_uri()}#{view}")
        page.wait_for_selector(READY, state="attached")
        return one

    yield open_
    for context in contexts:
        context.close()
    for one in opened:
        assert one.problems == []
        assert {url.partition("#")[0] for url in one.requests if url != "data:,"} == {one.path.as_uri()}
