# Everything sets itself up: `make run` is enough on a machine with Python 3.11 or newer.
#   make run [SEED=0] [RUN=runs/quickstart-0]   train the quickstart model, watch it, write a report
#   make check | test | test-slow | bench        format, lint, types | tests | slow tests | measurements
#   make fuzz                                    the property tests again, on new random examples

SHELL := /bin/bash
SEED ?= 0
WORKERS ?= 2
RUN ?= runs/quickstart-$(SEED)

BIN := .venv/bin
# One line of what happens; pip itself speaks only when something fails.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install -c .venv/constraints.txt
HAS_TORCH := import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)

.DEFAULT_GOAL := help
.PHONY: help run test test-slow fuzz check bench

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

run: .venv/.runtime
	@$(BIN)/rollstream run examples/quickstart.toml --seed $(SEED) --run $(RUN)

test: .venv/.testing
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: .venv/.testing
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile || test $$? -eq 5  # 5: there is none

fuzz: .venv/.testing
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m "hypothesis and not slow"

check: .venv/.testing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: .venv/.runtime
	$(BIN)/python -m benchmarks

# ---- set-up: each stamp is newer than what it was installed from --------------------------------

.venv/.made:
	@for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=$$python; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo 'Rollstream needs Python 3.11 or newer; install one and run make again.' >&2; exit 1; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
	  echo "making .venv with $$($$found --version)"; \
	  $$found -m venv .venv || { echo 'python3 -m venv failed; is the venv module installed (Debian: python3-venv)?' >&2; exit 1; }; \
	fi
	@touch $@

.venv/.runtime: .venv/.made pyproject.toml constraints.txt
	@# a torch that is already there stays, whatever its build
	@if $(BIN)/python -c '$(HAS_TORCH)'; then grep -v '^torch==' constraints.txt; \
	  else cat constraints.txt; fi > .venv/constraints.txt
	@echo 'installing Rollstream and what it needs into .venv (once, minutes)'
	@$(PIP) -e .
	@touch $@

.venv/.testing: .venv/.runtime
	@echo 'installing what the tests need into .venv (once)'
	@$(PIP) -e '.[test]'
	@touch $@
