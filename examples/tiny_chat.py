"""A tiny chat model that can call tools, for examples: random weights, and a tokenizer made for the texts of the task.

The chat template (`tiny_chat.jinja`) is Qwen's way to write, with one difference: of the tools it shows only the names.
A model of half a million parameters would not read their descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_suffix(".jinja")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TEXTS = 4000
"""Demonstrations that the tokenizer is made of."""

Row = Mapping[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """A file of prompts or demonstrations, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def result(text: str) -> dict[str, Any]:
    """What a tool answers."""
    return {"role": "tool", "content": text}


def asking(text: str) -> dict[str, Any]:
    """What the user says."""
    return {"role": "user", "content": text}


def saying(text: str) -> dict[str, Any]:
    """What the assistant says in the end."""
    return {"role": "assistant", "content": text}


def make_model(
    folder: Path,
    demonstrations: Sequence[Row],
    *,
    words: str,
    seed: int,
    width: int = 128,
    layers: int = 2,
    tied: bool = True,
) -> Path:
    """A Qwen3-shaped model with random weights in `folder`, with a tokenizer trained on the demonstrations.

    `words` is a regular expression for what is never joined with its neighbours: each match becomes a token of its own
    (or several), so that a number or a name is written alike wherever it stands and copying it is easy to learn. All
    else that stays the same from one demonstration to the next becomes a few long tokens. With `tied` embeddings it
    is easy to learn to copy; without, to learn what follows a token whatever stands before it.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = _make_tokenizer(demonstrations, words)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 8 * 8,
            num_hidden_layers=layers,
            num_attention_heads=width // 16,
            num_key_value_heads=width // 32,
            head_dim=16,
            initializer_range=width**-0.5,  # see slime/quickstart/arithmetic.py
            max_position_embeddings=1024,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _make_tokenizer(demonstrations: Sequence[Row], words: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    wrapped.chat_template = TEMPLATE.read_text()
    texts = (
        piece
        for row in demonstrations[:TEXTS]
        for piece in _between_marks(
            wrapped.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        )
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2000,  # it ends long before, when nothing is left that comes often
        min_frequency=max(2, min(TEXTS, len(demonstrations)) // 500),
        special_tokens=[*SPECIAL, *MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    trained.chat_template = wrapped.chat_template
    return trained


def _between_marks(text: str) -> list[str]:
    import re

    return [piece for piece in re.split("|".join(map(re.escape, (*SPECIAL, *MARKS))), text) if piece]
