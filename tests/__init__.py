"""The tests. A package, so that helpers are imported as `tests.name` and two folders may use one file name."""
