# gspo: every command that a user or CI needs. `make help` lists them.
VENV ?= .venv
BIN = $(VENV)/bin
SEED ?= 0
COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup demo test compose-test lint bench chaos proto lock clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: ## Make the virtual environment with the locked packages
	@VENV=$(VENV) deploy/setup.sh

demo: setup ## Train a small model on arithmetic, from nothing to a report (SEED=0)
	$(BIN)/python examples/arithmetic/demo.py --seed $(SEED)

test: setup lint ## Everything CI runs: lint, types, unit and integration tests with the real engines
	$(BIN)/python -m pytest

compose-test: setup ## docker-compose.yml with a real engine: build, run, scale, kill (exit code 3 without an engine)
	$(BIN)/python -m tests.compose.drive

lint: setup ## ruff and mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## Measure speed and write docs/benchmarks.md
	$(BIN)/python -m benchmarks.speed

chaos: setup ## Strike a simulated run with everything that can go wrong, check it, write docs/chaos.md (SEED=0; an hour)
	$(BIN)/python -m benchmarks.chaos --seed $(SEED)

proto: setup ## Generate the contract's Python code
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto proto/gspo_proto/*.proto

lock: setup ## Resolve the dependencies anew
	$(COMPILE) pyproject.toml -o deploy/requirements.lock
	$(COMPILE) pyproject.toml --extra cpu --extra tensorboard --extra wandb --extra dev --overrides deploy/overrides.txt \
	  --no-emit-package torch -o deploy/requirements-cpu.lock
	$(COMPILE) pyproject.toml --extra cpu --extra tensorboard --extra wandb --overrides deploy/overrides.txt \
	  --no-emit-package torch --no-emit-package triton -c deploy/requirements-cpu.lock -o deploy/docker/engine.lock
	env -u UV_FIND_LINKS $(BIN)/uv pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --no-annotate --no-header pyproject.toml --extra cuda --extra tensorboard --extra wandb -o deploy/docker/engine-cuda.lock
	for image in light coordinator reward; do $(COMPILE) deploy/docker/$$image.in -c deploy/requirements.lock \
	  --no-emit-package hf-xet -o deploy/docker/$$image.lock; done

clean: ## Remove the virtual environment and caches; runs stay
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache
