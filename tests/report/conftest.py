"""One fork server that has imported enough, one thread: as for the tests of the engine."""

from tests.engine.conftest import one_thread, warm_fork_server

__all__ = ["one_thread", "warm_fork_server"]
