"""Fixtures: programs installed by `make test-agents`, a model folder, and endpoints in front of a scripted engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.agent.conftest import make_agent_runtime
from tests.agent.scripted_engine import Script, ScriptedEngine

ROOT = Path(__file__).parents[2]
INSTALLED = Path(os.environ.get("SLIME_AGENTS_CLI", ROOT / ".agents-cli")).absolute()
FOLDERS = ("npm/node_modules/.bin", "npm_more/node_modules/.bin", "mini/bin")
CONTEXT = 262_144
"""Context length in tokens; the longest first prompt, Qwen Code's, has 77 KB."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    """Put the installed programs first on the PATH."""
    folders = [str(INSTALLED / folder) for folder in FOLDERS]
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder without weights: a BPE tokenizer trained on the documentation, and Qwen3's template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [(ROOT / "docs" / page).read_text() for page in ("agents.md", "architecture.md", "engine.md", "testing.md")]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (ROOT / "tests/data/templates/qwen3.jinja").read_text()
    path = tmp_path_factory.mktemp("model")
    fast.save_pretrained(path)
    facts = {"model_type": "qwen3", "max_position_embeddings": CONTEXT, "vocab_size": len(fast)}
    (path / "config.json").write_text(json.dumps(facts))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(folder: str):
    from slime.data.chat_template import load_tokenizer

    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def served(folder, tokenizer, tmp_path_factory):
    """(engine, runtime): endpoints in their own process, as in a run, in front of a scripted engine."""
    engine = ScriptedEngine(Script(tokenizer), chunk=3)
    with engine.serving() as url:
        run = tmp_path_factory.mktemp("run")
        runtime = make_agent_runtime(folder, run, [url], rollout_max_response_len=8192)
        yield engine, runtime
        runtime.close()
