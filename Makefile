# Every target sets up .venv by itself, and again when pyproject.toml or constraints.txt change.
PYTHON ?= python3
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.stamp

# One thread a process: ranks share the cores of this host.
export OMP_NUM_THREADS ?= 1

.PHONY: train test check clean

train: $(STAMP)
	$(VENV)/bin/zeroshard train $(ARGS)

test: $(STAMP)
	$(VENV)/bin/pytest $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest tests/contract

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
