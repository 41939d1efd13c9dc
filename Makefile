# Every target sets up .venv by itself, and again when pyproject.toml or constraints.txt change.
PYTHON ?= python3
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.stamp

# One thread a process: ranks share the cores of this host.
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-all torture bench docs dist lint check browser clean

train: $(STAMP)
	$(VENV)/bin/zeroshard train $(ARGS)

# Three at once: tests with several ranks wait more than they compute. The slowest are listed: CONTRIBUTING.md.
PYTEST := $(VENV)/bin/pytest -n 3 --dist worksteal --durations=25
# Which share of what takes time: the next commit has the next one, and ROTATION=2 names it.
ROTATION ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

test: $(STAMP)
	$(PYTEST) --rotation $(ROTATION) $(ARGS)

test-all: $(STAMP)
	$(PYTEST) --rotation all $(ARGS)

# Kills a training at random; ARGS='--minutes 60' for longer (docs/reliability.md).
torture: $(STAMP)
	$(VENV)/bin/python -m tools.torture $(ARGS)

# All that is published, which takes hours; ARGS='--case tiny' and its like measure less (docs/benchmarks.md).
bench: $(STAMP)
	DS_BUILD_OPS=0 $(VENV)/bin/pip install --quiet -c constraints.txt -e '.[bench]'
	$(VENV)/bin/python -m benchmarks.run $(or $(ARGS),--plan all)
	$(if $(ARGS),,$(VENV)/bin/python -m benchmarks.report)

# The documentation site: open build/site/index.html. Warnings are errors.
docs: $(STAMP)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# Wheel and sdist, from the sdist, with their metadata, description and contents checked.
dist: $(STAMP)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[release]'
	rm -rf dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/check-wheel-contents dist/*.whl

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

check: lint
	$(VENV)/bin/pytest tests/contract
	$(VENV)/bin/python -m tools.ages

# Chromium of Debian or Ubuntu, for the tests of the report page; they are skipped where it is missing.
browser:
	command -v chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
