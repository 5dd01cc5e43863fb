# Every target first makes .venv with all that it needs; when it is there, that costs nothing.
#
#   make test ARGS="-k store"         more arguments for the command that the target runs
#   make test PYTHON=python3.12       the interpreter (3.11 or later) that a new .venv is made with
#   make wheels PYTHONS=python3.13    the other Pythons on which the wheel is tried
#   make test TORCH=torch==2.11.0     the torch that a new .venv gets, e.g. on a machine with GPUs

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
PYTHONS ?= python3.12 python3.13
SEED ?= $(shell date +%s)

BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: help train test test-all fuzz wheels check docs format bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

train: $(READY) ## Train a small language model on two processes of this machine.
	$(BIN)/disttrain-launch --standalone --nproc-per-node 2 examples/train_llama.py $(ARGS)

test: $(READY) ## Run the tests, of those with many cases a few: ten minutes of two cores.
	$(BIN)/python -m pytest -n auto --dist worksteal --representatives $(ARGS)

test-all: $(READY) ## Run all tests with all their cases.
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

fuzz: $(READY) ## Look by random programs, uses and faults for what no test has shown: for each 10 minutes, from SEED on.
	$(BIN)/python -m tests.dtensor_programs --seconds 600 --seed $(SEED)
	$(BIN)/python -m tests.view_programs --seconds 600 --first $(SEED)
	$(BIN)/python -m tests.fsdp2_uses --seconds 600 --seed $(SEED)
	$(BIN)/python -m tests.launch_faults --runs 200 --seed $(SEED)

wheels: $(READY) ## Follow the tutorial with the wheel, on other Pythons too (PYTHONS), each with a torch of its own.
	@mkdir -p build/wheels; ready="$(CURDIR)/$(BIN)/python"; for python in $(PYTHONS); do \
	  "$$python" -c '' 2>/dev/null || { echo "skipped: $$python does not start here (PYTHONS: paths will do)"; continue; }; \
	  home=build/wheels/$$(basename $$python); "$$python" -m venv $$home && \
	  $$home/bin/python -m pip install --quiet '$(TORCH)' msgpack numpy uvloop xxhash || exit 1; \
	  ready="$$ready:$(CURDIR)/$$home/bin/python"; done; \
	DISTTRAIN_TEST_PYTHONS="$$ready" $(BIN)/python -m pytest -rs tests/multirank/test_tutorial.py $(ARGS)

check: docs ## Format, lint, types, import layers, dead code, spelling, the documentation's site.
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/codespell

docs: $(READY) $(DOCS_READY) ## Build the documentation's site into build/site.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built: build/site/index.html"

format: $(READY) ## Format the code and mend what the linter can mend.
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

bench: $(READY) ## Run the benchmarks of this machine's processors: one table against torch.
	$(BIN)/python benchmarks $(ARGS)

clean: ## Remove caches and builds; .venv stays.
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# torch goes first and by itself, at an exact version: left to the resolver, it may draw gigabytes of CUDA packages.
# pyuv may fail (no compiler, no headers): the store then runs on uvloop, which is libuv as well.
# CFLAGS replaces Python's own, optimization included: without -O2 here the store's server takes a tenth longer.
$(READY): pyproject.toml Makefile tools/pyuv_compat.h
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "disttrain needs Python 3.11 or later; '$(PYTHON)' is not. Try: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  { echo "making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear .venv; }
	@echo "installing $(TORCH) (minutes, the first time)"
	@$(PIP) '$(TORCH)'
	@echo "installing disttrain with its tools"
	@$(PIP) --editable '.[dev,clients,examples,trackers]'
	@echo "building pyuv"
	@CFLAGS='-O2 -include "$(CURDIR)/tools/pyuv_compat.h"' $(PIP) pyuv==1.4.0 >.venv/pyuv.log 2>&1 && \
	  $(BIN)/python -c 'import pyuv' 2>>.venv/pyuv.log || \
	  echo "pyuv could not be built here (.venv/pyuv.log says why); the store runs on uvloop instead"
	@touch $@

$(DOCS_READY): $(READY)
	@echo "installing what builds the documentation"
	@$(PIP) --editable '.[docs]'
	@touch $@
