# Each target works alone in a fresh clone: it needs Python 3.11 or later, make and git.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test coverage lint format docs docs-check clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

demo: $(STAMP)  ## Grow a network on scikit-learn's digits; writes auxin-demo.html
	$(BIN)/auxin demo

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

coverage: $(STAMP)  ## Run the tests and list the lines of src/auxin that none of them reached
	$(BIN)/python -m pytest -q -n $(WORKERS) --cov --cov-report=term-missing:skip-covered

lint: $(STAMP)  ## Style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Bring the sources into the format that lint checks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## Write docs/api.md from the docstrings
	$(BIN)/python tools/make_api.py

docs-check: $(STAMP)  ## Fail if docs/api.md is not what the docstrings say
	$(BIN)/python tools/make_api.py --check

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "auxin needs Python 3.11 or later; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@
