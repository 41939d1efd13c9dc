"""One fork server with Transformers imported, one thread: as for the tests of the engine."""

from tests.engine.conftest import one_thread, warm_fork_server

__all__ = ["one_thread", "warm_fork_server"]
