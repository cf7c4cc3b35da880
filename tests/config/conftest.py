"""A model folder and a prompt file that a config can point to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_files import add_weights

TINY_QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    return add_weights(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input": "1+1=", "label": "2"}\n')
    return file


@pytest.fixture
def valid(model_dir: Path, prompts: Path, tmp_path: Path) -> dict[str, Any]:
    """Keyword arguments of a config that resolves."""
    return {
        "hf_checkpoint": str(model_dir),
        "prompt_data": str(prompts),
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "num_rollout": 10,
        "rollout_max_response_len": 16,
        "rm_type": "math",
        "output_dir": str(tmp_path / "out"),
        "device": "cpu",
    }


@pytest.fixture
def valid_argv(valid: dict[str, Any]) -> list[str]:
    """The same config as command-line arguments."""
    return [word for name, value in valid.items() for word in ("--" + name.replace("_", "-"), str(value))]
