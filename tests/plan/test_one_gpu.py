"""The page on one device says what plans say: its second table follows from the first, whose rows are plans."""

import pytest

from tools import one_gpu
from zeroshard.plan.machine.presets import DEVICES

TEXT = one_gpu.PAGE.read_text()
NEEDS = one_gpu.read_needs(TEXT)


def test_the_page_has_all_models_and_places() -> None:
    assert [(one.model, one.place) for one in NEEDS] == [(m, p) for m in one_gpu.MODELS for p in one_gpu.PLACES]
    assert one_gpu.needs_table(NEEDS) in TEXT


def test_what_fits_follows_from_what_models_take() -> None:
    assert one_gpu.best_table(NEEDS) in TEXT


@pytest.mark.parametrize("place", ["states on the host", "states and parameters in files"])
def test_a_row_is_a_plan(place: str) -> None:
    (row,) = [one for one in NEEDS if (one.model, one.place) == ("llama-3.2-1b", place)]
    assert row == one_gpu.needs_of("llama-3.2-1b", place)


def test_fitting_by_the_page_is_fitting_by_the_plan() -> None:
    plan = one_gpu.plan_of("llama-3.2-1b", "states on the host", DEVICES["rtx4090"])
    assert plan.verdict == "fits" and plan.total_bytes < plan.asked.device.memory_bytes
