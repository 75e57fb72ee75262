# Every target sets up what it needs in .venv: nothing but Python >= 3.11 and its venv module is assumed.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full check format bench bench-accuracy bench-collectives bench-memory bench-runtime bench-testbed docs clean

# The first interpreter that runs, is new enough and has venv. Override: make test PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.12 python3.11 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo "$$python" && break; done)
UV := $(shell command -v uv 2>/dev/null)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with the venv module found; name one with PYTHON=..." >&2; exit 2; }
ifdef UV
	"$(UV)" venv --quiet --allow-existing --python "$(PYTHON)" $(VENV)
	"$(UV)" pip install --python $(BIN)/python --editable '.[mpi,checkpoint]' --group dev
else
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'  # the first with --group
	$(BIN)/python -m pip install --quiet --editable '.[mpi,checkpoint]' --group dev
endif
	@touch $@

setup: $(STAMP)  ## create .venv with everything in it

demo: $(STAMP)  ## plan GPT-2 for unequal GPUs, then train a small GPT on four unequal ranks
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the tests that every change must pass
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-full: $(STAMP)  ## every test, with ten times as many random cases
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "" --hypothesis-profile=full

check: $(STAMP)  ## lint, format, types, import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## run the benchmarks; results land in bench/results as JSON
	$(BIN)/python -m bench

bench-accuracy: $(STAMP)  ## predicted against measured: plans on local MPI ranks, after a calibration
	$(BIN)/python -m bench accuracy

bench-collectives: $(STAMP)  ## how often the strategy predicted fastest is: sizes × shares on four ranks
	$(BIN)/python -m bench collectives

bench-testbed: $(STAMP)  ## a mixed fleet on this machine: plan against data parallelism (needs root)
	$(BIN)/python -m bench testbed

bench-runtime: $(STAMP)  ## our backends against the same step written by hand
	$(BIN)/python -m bench runtime

bench-memory: $(STAMP)  ## memory predicted against what XLA allocates for the examples
	$(BIN)/python -m bench memory-steps memory-plans memory-frontier memory-refused

docs: $(STAMP)  ## run the code of the documentation pages, build the site in build/site
	$(BIN)/python -m pytest tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
