"""What every test has in common: one thread, no process group left behind, GPU tests only where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


def pytest_configure(config: pytest.Config) -> None:
    """Give this process one thread, as ranks have: an oracle computed here must round as they do."""
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    """Say what the results depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"torch {torch.__version__}, {torch.get_num_threads()} thread, GPU: {gpu}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, by name: the closing summary lists them."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a test that leaves a process group in this process: the next test would run inside it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")
