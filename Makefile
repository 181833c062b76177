# Everything that a developer or a user runs, by name. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := var/models/smollm2/.complete
TORCH ?= torch==2.13.0
# For the tests of GPU kernels, which it interprets; torch brings its own where it is for a GPU.
TRITON ?= triton==3.6.0
PIP := $(BIN)/python -m pip --disable-pip-version-check
ROOTS := services libs kernels
GENERATED := libs/common/kvrelay/v1
ARGS ?=
PROMPT ?=
# Test processes beside each other. A worker has one compute thread.
WORKERS ?= 2
# As typed, with nothing in it expanded by make or by the shell.
export DEMO_PROMPT := $(value PROMPT)
unexport PROMPT
# Processes by the hundred are started here: what one has compiled the next one reads.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup model demo up down status test test-fast e2e k8s-test browser-test console-screenshot soak compose-tools compose-test lint format type proto proto-check bench bench-kv bench-router clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-19s %s\n", $$1, $$2}'

# A torch for CUDA 13 brings libraries that UCX for CUDA 12 does not take, and goes with another build of UCX.
$(STAMP): pyproject.toml requirements.lock requirements-ucx.lock requirements-ucx-cu13.lock
	@echo "setting up $(VENV): some minutes, once"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet pip==26.3
	$(PIP) install --progress-bar on '$(TORCH)'
	ucx=$$($(BIN)/python -c 'from torch.version import cuda; print("ucx-cu13" if (cuda or "").startswith("13.") else "ucx")'); \
	$(PIP) install --progress-bar on --constraint requirements.lock --constraint "requirements-$$ucx.lock" --editable ".[dev,$$ucx]"
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --progress-bar on '$(TRITON)'
	@touch $@

$(MODEL): | $(STAMP)
	@$(BIN)/kvrelay model

setup: $(STAMP) $(MODEL) ## the environment in .venv and the bundled model; quick when done
	@:

model: $(STAMP) ## the bundled model alone
	@$(BIN)/kvrelay model

demo: setup ## start a stack, ask a question (PROMPT=...), show what happened, stop
	@$(BIN)/kvrelay demo --prompt "$$DEMO_PROMPT" $(ARGS)

up: setup ## start the local stack and leave it running (ARGS="--prefill 2 --decode 2")
	@$(BIN)/kvrelay up $(ARGS)

down: ## end what `make up` started
	@[ ! -x $(BIN)/kvrelay ] || $(BIN)/kvrelay down

status: ## pods, what they hold, bytes pushed
	@$(BIN)/kvrelay status

# By file, for a file's tests share servers; in the order of their names, for the long ones are not last then.
fast = $(BIN)/python -m pytest -m 'not e2e and not browser and not compose' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
# One after the other: a stack wants all cores.
stacks = $(BIN)/python -m pytest -m e2e $(ARGS)
# What ARGS names may all be of the one kind: pytest's code for no tests is 5.
or_none = $(if $(strip $(ARGS)),|| [ $$? -eq 5 ])

test: setup lint proto-check ## everything: lint, types, wire, all tests
	$(fast) $(or_none)
	$(stacks) $(or_none)

test-fast: setup ## without whole stacks of real processes
	$(fast)

e2e: setup ## whole stacks of real processes alone
	$(stacks)

k8s-test: setup ## the Kubernetes manifests alone: they build, are valid, and name what this code has
	$(BIN)/python -m pytest tests/deploy/k8s $(ARGS)

# Beside the environment: nothing else wants a browser.
BROWSER := var/cache/browser
browser = PIP="$(PIP)" tests/browser/install.sh $(BROWSER) && PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest -m browser

browser-test: setup ## the console in a real Chromium, which is installed where there is none (Debian, as root)
	$(browser) tests/browser $(ARGS)

console-screenshot: setup ## docs/console.png anew: the console over a stack under load
	KVRELAY_CONSOLE_SCREENSHOT=docs/console.png; export KVRELAY_CONSOLE_SCREENSHOT; $(browser) tests/browser/test_real.py $(ARGS)

soak: setup ## the full counts of what `test` samples, and a report; hours (ARGS="--list", ARGS="--only 'faults-*'")
	$(BIN)/python -m benchmarks.soak $(ARGS)

compose-tools: ## a Docker engine and mmdebstrap, for compose-test, where there are none (Debian, as root)
	tests/deploy/install.sh

compose-test: setup ## images and `docker compose up` for real, on a Docker engine of its own, without pulling anything
	TORCH='$(TORCH)' $(BIN)/python -m pytest -m compose tests/deploy $(ARGS)

lint: $(STAMP) type ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## what lint would complain of, put right where that is mechanical
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## mypy, strict
	$(BIN)/mypy $(ROOTS)

# $(1): where the code goes.
protoc = PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) \
  --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) proto/kvrelay/v1/*.proto

proto: $(STAMP) ## generate the wire's Python code
	$(call protoc,libs/common)

proto-check: $(STAMP) ## is the generated code that of the protos?
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; $(call protoc,"$$scratch"); \
	for file in "$$scratch"/kvrelay/v1/*; do diff -u "$(GENERATED)/$$(basename "$$file")" "$$file" \
	  || { echo "run make proto and commit"; exit 1; }; done; echo "the generated code is current"

bench: setup ## against the offline engine and transformers (ARGS="--clients 8 --dtype bfloat16")
	$(BIN)/python -m benchmarks.serve $(ARGS)

bench-router: setup ## the router on one core with stub pods and wrk (ARGS="--only streams --out FILE")
	$(BIN)/python -m benchmarks.router $(ARGS)

bench-kv: setup ## the KV store against memory, files, S3, UCX and Redis alone, and hits against computing (ARGS="--only cpu,ttft")
	$(BIN)/python -m benchmarks.kv $(ARGS)

clean: down ## the environment, the model, logs and caches
	rm -rf $(VENV) var .mypy_cache .ruff_cache .pytest_cache .coverage
