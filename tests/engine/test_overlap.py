"""Which collectives and copies of a steady step have no computation beside them on a device: the first and the last."""

import pytest

from tools.overlap import CASES, Case, exposed

FIRST = "blocks.0"


def expected(case: Case) -> set[str]:
    """Return what nothing can be beside: what comes first in a pass, and the sums that come last."""
    times = f" ({case.micro_batches} times)" * (case.micro_batches > 1)
    found = {f"reduce-scatter in backward: {unit}{times}" for unit in (FIRST, "root")}
    if case.stage == 3:
        found |= {f"all-gather in forward: {unit}{times}" for unit in ("root", FIRST)}
    else:
        found |= {f"publish: {unit}" for unit in ("root", FIRST)}
    if case.replicas > 1:
        # The sum over replicas follows that of its replica, one unit later.
        found |= {f"all-reduce in backward: {unit}{times}" for unit in ("blocks.1", FIRST, "root")}
    if case.offload:
        found |= {f"copy out: {unit}" for unit in (FIRST, "root")}
        # At the end of a backward the last sums leave together, and the memory of two units is under way.
        before = ["blocks.1"] + ["blocks.2"] * (case.replicas > 1)
        found |= {f"copy out: {unit} ({case.micro_batches + 1} times)" for unit in before}
    return found


@pytest.mark.product
@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_the_ends_of_a_pass_are_exposed(case: Case) -> None:
    assert set(exposed(case)) == expected(case)
