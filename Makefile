# Each target makes the environment it needs; a second run finds it made.
# Needs GNU make and a Python from 3.11 on. ARGS goes to the demo or to pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules

BIN := .venv/bin
ARGS ?=

# The first of the candidates that runs and is new enough (a pyenv shim may exist and not run).
first_python = $(shell for p in $(1); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$p"; break; }; done)
PYTHON ?= $(call first_python,python3.11 python3.12 python3.13 python3)
python_of = $(call first_python,python$(1) $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)))
# The other Pythons of this machine, for what needs no vLLM.
OTHERS := $(foreach v,3.12 3.13,$(if $(call python_of,$(v)),$(v)))

.PHONY: help env demo test lint quick others chaos e2e fuzz audit soak bench clean $(OTHERS:%=quick-%)

help: ## show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## make .venv: this package beside a CPU vLLM
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; set PYTHON=/path/to/python" >&2; exit 2; }
	@"$(PYTHON)" tools/make_env.py

demo: env ## run a real producer/consumer pair on tiny models (ARGS="--image photo.jpg")
	@$(BIN)/ec-connector demo $(ARGS)

test: lint quick others chaos e2e ## everything: lint, types, import rules, all tests

lint: .venv/.lint-tools ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: env ## all tests that take no minutes
	$(BIN)/python -m pytest -q -n auto -m "not e2e and not chaos" $(ARGS)

others: $(OTHERS:%=quick-%) ## the same without vLLM, on the other Pythons found here

chaos: env ## processes killed and stopped, networks broken, overload (two minutes)
	$(BIN)/python -m pytest -q -m chaos $(ARGS)

e2e: env ## the tests that start vLLM engines (minutes)
	$(BIN)/python -m pytest -q -m e2e $(ARGS)

FUZZ_SECONDS ?= 600
fuzz: .venv/.fuzz-tools ## fuzz decoders and state machines (ten minutes each of nine; FUZZ_SECONDS=60)
	$(BIN)/python -m tests.fuzz $(FUZZ_SECONDS) $(ARGS)

audit: .venv/.audit-tools ## known vulnerabilities of what the package depends on (asks pypi.org)
	$(BIN)/pip-audit --strict $(ARGS) .

SECONDS_OF_SOAK ?= 600
soak: env ## random load and random faults (ten minutes; SECONDS_OF_SOAK=60)
	$(BIN)/python -m tests.chaos.soak $(SECONDS_OF_SOAK)

bench: .venv/.bench-tools ## measure beside the in-tree pair (minutes; ARGS="--json FILE --plot FILE")
	$(BIN)/ec-connector bench $(ARGS)

clean: ## remove all that these targets made
	rm -rf .venv .venv-* build dist .fuzz .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Beside the environment, not part of it: the demo needs no linter.
.venv/.lint-tools: pyproject.toml | env
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

.venv/.fuzz-tools: pyproject.toml | env
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[fuzz]'
	@touch $@

.venv/.audit-tools: pyproject.toml | env
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[audit]'
	@touch $@

.venv/.bench-tools: pyproject.toml | env
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[bench]'
	@touch $@

$(OTHERS:%=quick-%): quick-%: .venv-%/.made
	.venv-$*/bin/python -m pytest -q -n auto -m "not e2e and not chaos" $(ARGS)

.venv-%/.made: pyproject.toml
	@echo "making .venv-$* (no vLLM)"
	@"$(call python_of,$*)" -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check -e '.[cli,proxy,test]'
	@touch $@
