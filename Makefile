# rllaunch. `make` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Pins a torch that fits a machine without a GPU; `make CONSTRAINTS= install` takes the newest of everything.
CONSTRAINTS ?= constraints/cpu.txt
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help install train test test-stack lint type bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Make the virtual environment and install rllaunch into it

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rllaunch needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	@echo "installing rllaunch and what it needs (torch and ray are large: a few minutes) …"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed plugins/rllaunch-example/pyproject.toml plugins/rllaunch-miles/pyproject.toml
	@echo "installing what the tests need …"
	$(PIP) -e '.[test]'
	$(PIP) --no-deps -e plugins/rllaunch-example -e plugins/rllaunch-miles
	@touch $@

train: $(VENV)/.installed ## Watch a policy learn on this machine (ARGS="--num-rollout 50" …)
	$(BIN)/rllaunch train --model tiny --hardware cpu $(ARGS)

test: $(VENV)/.installed-test ## Everything that runs without a GPU (ARGS="-k handoff" …)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)
	$(BIN)/python -m pytest -q plugins/rllaunch-example
	$(BIN)/python -m pytest -q plugins/rllaunch-miles

# Beside the environment, not in it: what is installed there decides what launches may choose. Uncompiled, because most of it is
# never imported.
STACK := $(VENV)/stack
$(STACK)/.installed: $(VENV)/.installed-test constraints/stack.txt
	@echo "installing Megatron-core and SGLang for the CPU (1.4 GB: a minute or two) …"
	rm -rf $(STACK)
	$(PIP) --no-deps --no-compile --target $(STACK) -r constraints/stack.txt
	@touch $@

test-stack: $(STACK)/.installed ## The megatron trainer and SGLang engines on this machine's CPU (ARGS="-k pair" …)
	PYTHONPATH=$(abspath $(STACK)) $(BIN)/python -m pytest -m stack tests/stack $(ARGS)

lint: $(VENV)/.installed-test ## ruff, and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(VENV)/.installed-test ## mypy --strict
	$(BIN)/mypy

bench: $(VENV)/.installed-test ## Start-up times, the loop's own overhead, bytes a second of a handoff
	$(BIN)/python benchmarks/bench.py $(ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the documentation needs …"
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs ## Write the generated pages of docs/ again, and build the site into site/
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
