# A checkout needs Python >= 3.11 with venv, make and, for DeepSpeed's fused optimizer, g++. `make help` lists the rest.

.DEFAULT_GOAL := help

VENV ?= .venv
MODEL ?= deepspeed/llama3-8b
ARGS ?=
PYTEST_ARGS ?=
# Most tests wait for one process at a time. A file stays with one of them, since its tests share what they set up.
TEST_PROCESSES ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# The first Python that is new enough; python3 where none is, so that the error names it.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	if $$p -c '$(NEW_ENOUGH)' 2>/dev/null; then echo $$p; exit; fi; done; echo python3)
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup benchmark test lint format types reference lock build clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON (the interpreter to start from), VENV, MODEL and ARGS (for benchmark), PYTEST_ARGS and TEST_PROCESSES (for test).'

setup: $(STAMP) ## create .venv with the locked versions and this project in it

# Done again only when the locked versions or the project's own metadata have changed.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		found=$$($(PYTHON) --version 2>/dev/null) || found='not there'; \
		echo "This project needs Python 3.11 or newer; $(PYTHON) is $$found." >&2; \
		echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module." >&2; \
		echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --requirement requirements.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $@

benchmark: $(STAMP) ## train MODEL on real text and measure it; further options in ARGS
	$(BIN)/ljperf benchmark --model $(MODEL) $(ARGS)

test: lint ## lint, then all tests; such as PYTEST_ARGS="tests/unit -x"
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy alone
	$(BIN)/mypy

reference: $(STAMP) ## write docs/reference from the code
	$(BIN)/python scripts/make_reference.py

lock: $(STAMP) ## resolve requirements.lock anew; ARGS="--torch VERSION" moves torch too
	$(BIN)/python scripts/make_lock.py $(ARGS)

build: $(STAMP) ## wheel and source distribution in dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean: ## remove what was built and cached, but neither .venv nor runs
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv too
	rm -rf $(VENV)
