# Everything sets itself up in .venv with the exact versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Quick tests that skip where the extras are not installed.
NEED_EXTRAS := tests/deploy

# Two processes, a file at a time: what a file's tests share is made once.
PARALLEL := -n 2 --dist loadfile

.PHONY: demo test test-slow fuzz lint types docs clean bench bench-quick bench-scale bench-figure2

demo: $(VENV)/.core
	$(BIN)/fedbandit demo --out demo

test: $(VENV)/.dev lint types
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-slow: $(VENV)/.extras
	$(BIN)/python -m pytest -m slow --ignore tests/test_docs.py
	$(BIN)/python -m pytest -m slow -n 2 tests/test_docs.py
	$(BIN)/python -m pytest -m "not slow" $(NEED_EXTRAS)

# Damages real files and messages of every kind for eight minutes; each must be harmless or refused in one line.
fuzz: $(VENV)/.extras
	$(BIN)/python scripts/fuzz.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev
	$(BIN)/mypy

# The documentation site, in site/: open site/index.html in a browser, no server needed.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedbandit needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable '.[simulation]'
	@touch $@

# torch first and exactly: what depends on it then finds it satisfied and asks for no other build.
$(VENV)/.torch: $(VENV)/.core
	@$(INSTALL) torch
	@$(INSTALL) --editable '.[torch]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.extras: $(VENV)/.dev
	@$(INSTALL) --editable '.[dev,ray,tensorboard,mlflow,wandb,flower]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@$(INSTALL) --editable '.[simulation,docs]'
	@touch $@

# Side by side with a plain torch loop and, in environments of their own, with pfl, FedJAX and Flower.
bench: $(VENV)/.torch
	$(BIN)/python -m benchmarks.run

bench-quick: $(VENV)/.torch
	$(BIN)/python -m benchmarks.run --quick

bench-scale: $(VENV)/.torch
	$(BIN)/python -m benchmarks.scale

# The four panels of figure 2 on 342,477 generated users: 6 GB and a quarter of an hour.
bench-figure2: $(VENV)/.torch
	$(BIN)/python -m benchmarks.figure2

clean:
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache
