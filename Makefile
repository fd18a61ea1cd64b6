# p2pkv: `make` by itself lists the targets. Everything lives in .venv and build/; nothing is installed elsewhere.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := $(shell find native -type f -not -path '*/.*')
PROMPT ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-native test-slow check format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(STAMP): pyproject.toml $(NATIVE)
	@tools/system-packages $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing p2pkv and building its native core into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# through the environment and unexpanded, so that $$, quotes and the empty text arrive as they were typed
unexport PROMPT
demo: export DEMO_PROMPT := $(value PROMPT)
demo: $(STAMP)  ## two prefill nodes and a decode node share KV pages; PROMPT="..." takes your text
	@$(BIN)/python -m demo $(if $(filter command,$(origin PROMPT))$(value PROMPT),-- "$$DEMO_PROMPT")

test: $(STAMP)  ## all fast tests
	$(BIN)/python -m pytest

test-native: $(STAMP)  ## the native tests under ASan + UBSan, then under TSan
	$(BIN)/python native/test/run.py

test-slow: $(STAMP)  ## the long tests: 1,000 connect and kill cycles, the full torn-read hunt
	$(BIN)/python -m pytest -m slow

check: $(STAMP)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	git ls-files 'native/*.h' 'native/*.cc' | xargs $(BIN)/clang-format --dry-run --Werror

format:  ## rewrite the sources in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files 'native/*.h' 'native/*.cc' | xargs $(BIN)/clang-format -i

clean:  ## remove .venv and build/
	rm -rf $(VENV) build
