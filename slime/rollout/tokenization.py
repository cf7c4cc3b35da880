"""Prompts to token ids, the same way wherever rollout needs them.

A prompt that is a string is taken as it is (special tokens included in the text, none added); messages are rendered
with the tokenizer's chat template first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.data.messages import checked_messages
from slime.data.sample import Sample


def render_messages(
    tokenizer: Any, sample: Sample, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    """The text of chat messages under the sample's tools and template arguments."""
    texts = checked_messages(messages, f"sample {sample.index}")
    options = {**sample.apply_chat_template_kwargs, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    return tokenizer.apply_chat_template(texts, tools=sample.metadata.get("tools") or None, **options)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_token_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Token ids of a sample's prompt."""
    if isinstance(sample.prompt, str):
        return encode(tokenizer, sample.prompt)
    return encode(tokenizer, render_messages(tokenizer, sample, sample.prompt, add_generation_prompt=True))
