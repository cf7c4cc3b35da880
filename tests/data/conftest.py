"""A tokenizer with one token per byte, so that token counts can be checked with `len(text.encode())`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking %}<think>{% endif %}"
)


def make_byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = chat_template
    return wrapped


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer(chat_template=None)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    return folder
