"""The browser of the tests of the report page."""

from tests.report.conftest import browser

__all__ = ["browser"]
