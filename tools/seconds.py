"""How long a case of each test takes, measured: which tests run in each rotation of `make test`, and which rotate.

    make test-all ARGS="--durations=0 --durations-min=0.1" > log    # or rotations, one log each
    python -m tools.seconds log ...

Owns `tests/seconds.json`, and how durations are read from pytest's output. `tests/rotation.py` has the rule.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.machine import circumstances, write_result

__all__ = ["FILE", "LEAST_S", "main", "seconds_in", "seconds_of_tests"]

FILE = Path(__file__).parents[1] / "tests" / "seconds.json"
LEAST_S = 0.3
"""Tests whose cases take less are not listed."""
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S.*?)\s*")


def main() -> None:
    """Read logs and write the file."""
    parser = argparse.ArgumentParser(description="Write how long a case of each test takes.")
    parser.add_argument("logs", nargs="+", type=Path, help="outputs of pytest with --durations=0")
    arguments = parser.parse_args()
    found = seconds_in([log.read_text() for log in arguments.logs])
    tests = {name: took_s for name, took_s in sorted(found.items()) if took_s >= LEAST_S}
    write_result(FILE, circumstances("tools.seconds") | {"seconds": tests})
    print(f"{FILE}: {len(tests)} of {len(found)} tests take {LEAST_S:g} s or more a case")


def seconds_in(logs: Iterable[str]) -> dict[str, float]:
    """Return the mean seconds of a case, by test: setup, call and teardown together.

    Args:
        logs: outputs of pytest. Of a case that several have, the least time counts: a host may be busy for once.
    """
    least_s: dict[str, float] = {}
    for log in logs:
        cases: dict[str, float] = defaultdict(float)
        for line in log.splitlines():
            if (found := _LINE.fullmatch(line)) is not None:
                cases[found[2]] += float(found[1])
        for case, took_s in cases.items():
            least_s[case] = min(took_s, least_s.get(case, took_s))
    tests = defaultdict[str, list[float]](list)
    for case, took_s in least_s.items():
        tests[case.partition("[")[0]].append(took_s)
    return {name: round(sum(all_s) / len(all_s), 1) for name, all_s in tests.items()}


def seconds_of_tests() -> Mapping[str, float]:
    """Return what the file says."""
    seconds: dict[str, float] = json.loads(FILE.read_text())["seconds"]
    return seconds


if __name__ == "__main__":
    main()
