"""Random programs train as plain torch does: a part of what `tools/programs` runs by the thousand."""

import json

import pytest

from tools.programs.draw import draw, draw_pair
from tools.programs.ranks import BAD, examine
from tools.programs.write import script_of

PROGRAMS, PAIRS = 170, 30
REFUSED = 0.05


def test_random_programs_equal_the_oracle_and_one_another() -> None:
    seeds = range(PROGRAMS + PAIRS)
    tasks = [(draw(seed, 2),) if seed < PROGRAMS else draw_pair(seed, 2) for seed in seeds]
    verdicts = examine(tasks, 2)
    bad = [(seed, one) for seed, one in zip(seeds, verdicts, strict=True) if one.kind in BAD]
    assert not bad, f"python -m tools.programs --replay {bad[0][0]}: {bad[0][1].kind} {bad[0][1].text}"
    assert sum(one.kind == "refused" for one in verdicts) <= REFUSED * len(verdicts)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_a_program_is_drawn_alike_from_its_seed_and_written_as_python(processes: int) -> None:
    for seed in range(50):
        spec = draw(seed, processes)
        assert spec == draw(seed, processes) == json.loads(json.dumps(spec))
        compile(script_of(spec), "program", "exec")
