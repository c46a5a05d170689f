# Everything happens in .venv, with the versions of constraints.txt. `make` lists the targets.
#
#   make setup PYTHON=python3.12              another interpreter
#   make train ARGS="env=search-v0"           overrides, passed to `agent-rl train`
#
# pip takes its options from the environment. On Linux, PyTorch's wheel brings gigabytes of CUDA; without a GPU, set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU index (pytorch.org, "Get started", names it): 0.2 GB instead.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --use-pep517 -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev train test check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.train  ## make .venv with all that training needs
	@:

setup-dev: $(VENV)/.dev  ## the same, with pytest, ruff and mypy
	@:

train: setup  ## train; ARGS="key=value ..." overrides the config
	@$(BIN)/agent-rl train $(ARGS)

test: setup-dev  ## run the tests: offline
	@$(BIN)/python -m pytest $(ARGS)

check: setup-dev  ## lint, format, types, house rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_imports.py tests/test_house.py

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the stamps: an install is done once, and again when what it installs from has changed
$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "installing agent_rl and PyTorch into $(VENV): 1 to 2 minutes, 1.3 GB on disk"
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@echo "installing agent_rl, PyTorch and the development tools into $(VENV): 1 to 2 minutes, 1.4 GB on disk"
	@$(PIP) -e '.[train,dev]'
	@touch $(VENV)/.train $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	"agent_rl needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
