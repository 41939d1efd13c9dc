"""The option that has browser tests write their screenshots, and the browser that they share."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Nothing of a test may look for updates, or for a network.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="write screenshots of the report page's views to FOLDER")


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """The folder for screenshots; None where none are wanted."""
    folder = request.config.getoption("--pictures", default=None)
    return Path(folder) if folder else None


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; tests are skipped where it, or Playwright, is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with (
        sync_api.sync_playwright() as playwright,
        contextlib.closing(playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))) as chromium,
    ):
        yield chromium
