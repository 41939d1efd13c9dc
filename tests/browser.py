"""The browser that tests of pages share: one for each process of the tests, which can run one alone."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["browser"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Nothing of a test may look for updates, or for a network.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


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
