# Everything runs in a virtual environment that is made on first use. VENV=... puts it elsewhere.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

# Two ranks on two cores: more threads than cores only get in each other's way.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format bench clean

help: ## Show this list.
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

venv: $(STAMP) ## Make the virtual environment, if the lock or pyproject.toml changed.

$(STAMP): pyproject.toml requirements-dev.lock requirements-examples.lock
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq -r requirements-dev.lock
	$(BIN)/python -m pip install -qq --no-deps -r requirements-examples.lock
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP) ## Fine-tune SmolLM2-135M on the King James Bible, on two processes.
	rm -rf outputs/demo
	$(BIN)/python examples/finetune_lightning.py --output outputs/demo

test: $(STAMP) ## Run the tests.
	$(BIN)/python -m pytest

lint: $(STAMP) ## Check style, format, types and spelling.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP) ## Format the code and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Compare step time, memory and copied bytes with FSDP2.
	$(BIN)/python -m tests.benchmarks

clean: ## Remove the virtual environment and all caches.
	rm -rf $(VENV) .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
