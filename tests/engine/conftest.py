"""What every test of the engine needs: one thread, as on the ranks, and a fork server that has imported enough.

Note: the fork server
    A rank is forked from a server, and imports for itself what the server has not. torch imports its compiler when the
    first optimizer is made, which takes 2.3 s of a core on every rank of every test; the server does it once instead.
"""

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "transformers",
    "pytest",
    "zeroshard.handle",
    "zeroshard.testing",
    "tests.engine.oracle",
)


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server() -> None:
    """Start the server that `run_ranks` forks ranks from, unless it runs already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run the test with the thread count of a rank, so that oracles in this process round as they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
