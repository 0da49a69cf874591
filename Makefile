# Two commands from a clone: `make quickstart` and `make test`. Both make their own environment in .venv first.
#   make test PIP_ARGS="--index-url ..."    passed on to pip      PYTHON=python3.12    the interpreter to build on

PYTHON  ?= python3
VENV    ?= .venv
PIP_ARGS ?=
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed

.PHONY: install quickstart test prove lint format clean help

help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

install: $(STAMP)  ## the environment in .venv, the project and its development tools in it

# A torch that the interpreter already has (a cluster's own build) is kept: the environment then sees the system's
# packages, and the pin on torch is left out. Not so from inside a virtual environment, which a second one can't see
# into: there torch is installed anew, at the version that is tested. Modules are compiled by all processors, not one by one by pip: where
# PYTHONDONTWRITEBYTECODE is set, each process would otherwise compile torch for itself. A file that is no Python of this version is passed.
$(STAMP): pyproject.toml constraints.txt
	@if $(PYTHON) -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null; then \
	  test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV); \
	  grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	else \
	  test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	  cp constraints.txt $(VENV)/constraints.txt; \
	fi
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c $(VENV)/constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $(STAMP)

quickstart: install  ## raw text to a trained, stopped, resumed and sampled model, on this machine
	$(BIN)/mlite quickstart

test: install  ## lint, types and every test that this machine can run; says what it skipped and why
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

prove: install  ## the full tables into tests/proofs
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.proofs.prove

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) quickstart build *.egg-info
