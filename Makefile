# `make demo` and `make test` are all a newcomer needs; both prepare everything they use, and nothing twice.
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench docs clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Stamps: the tools are installed, the wheel of the present sources is installed.
READY  := $(VENV)/.ready
WHEEL  := $(VENV)/.wheel
WANTED := import json, sys; project = json.load(sys.stdin); extras = project["optional-dependencies"]; \
	print(*project["dependencies"], *extras["bench"], *extras["dev"], *extras["train"], sep="\n")
# Folders count too, so that a deleted file is noticed.
SOURCES := $(shell find src -not -name '__pycache__' -not -name '*.pyc')

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/'

demo: $(WHEEL)  ## train the digits recipe on this machine
	$(BIN)/bigbatch train digits

test: $(WHEEL)  ## run every test against the installed wheel
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(READY)  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

bench: $(WHEEL)  ## measure; see benchmarks/
	$(BIN)/python -m benchmarks

docs: $(WHEEL)  ## run the code of README, docs and docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py

clean:  ## remove all that make has made, .venv included
	rm -rf $(VENV) dist build .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What to install is read from pyproject.toml, by the hatchling that also builds the wheel: every version, the
# builder's too, comes from constraints.txt, and torch comes in one step with what depends on it. Python compiles
# what it imports anyway; to compile all of it beforehand would double the wait.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt hatchling
	$(BIN)/hatchling metadata | $(BIN)/python -c '$(WANTED)' > $(VENV)/requirements.txt
	$(PIP) install --quiet --no-compile -c constraints.txt -r $(VENV)/requirements.txt
	touch $@

$(WHEEL): $(READY) $(SOURCES)
	rm -rf dist
	$(BIN)/hatchling build -t wheel -d dist
	$(PIP) install --quiet --no-deps --force-reinstall dist/*.whl
	touch $@
