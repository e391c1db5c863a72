# `make demo` and `make test` do all set-up themselves, in .venv. See README.md.

PYTHON ?= python3
# Package index for torch alone, for example torch's index of CPU builds. Empty: pip's own index.
TORCH_INDEX ?=
# Further arguments for pytest or the demo: make test ARGS="-k resolve", make demo ARGS=--quick
ARGS ?=

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test check test-slow bench wheel clean

help:
	@echo "make demo        set up, then show a prompt's KV cache being kept, lost and found again"
	@echo "make test        set up, check, and run the test suite (less the slow tests)"
	@echo "make setup       only set up .venv (the others do it too; nothing to do takes no time)"
	@echo "make check       formatting, lint, types, layers, sizes"
	@echo "make test-slow   the slow tests"
	@echo "make bench       the benchmarks, in their quick form"
	@echo "make wheel       build the wheel into dist/"
	@echo "make clean       remove .venv, build output and tools' caches"
	@echo
	@echo "PYTHON=python3.12        another interpreter for .venv (3.11 or newer)"
	@echo "TORCH_INDEX=https://...  package index for torch alone, to choose its CPU or another build"

setup:
	@$(PYTHON) tools/setup.py --torch-index "$(TORCH_INDEX)"

demo: setup
	@$(BIN)/hicache demo $(ARGS)

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_sizes.py

test: check
	$(BIN)/python -m pytest -m "not slow and not device" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not device" --timeout 900 $(ARGS)

bench: setup
	@for script in $(filter-out bench/common.py,$(wildcard bench/*.py)); do \
		echo "== $$script"; $(BIN)/python "$$script" --quick || exit 1; \
	done

wheel: setup
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf .venv .venv.lock build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
