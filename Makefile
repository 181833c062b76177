# Everything that a developer or a user runs, by name. `make help` lists it.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ROOTS := services libs kernels
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup model demo up down test test-fast lint type proto proto-check bench soak clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	@touch $@

setup: $(STAMP) model ## the environment and the bundled model

model: $(STAMP)
	@$(BIN)/kvrelay model

proto: $(STAMP) ## generate the wire's Python code
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=libs/common \
	  --grpc_python_out=libs/common --mypy_out=quiet:libs/common --mypy_grpc_out=quiet:libs/common proto/kvrelay/v1/*.proto
