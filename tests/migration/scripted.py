"""A real model whose weights encode a script: the probability of each next token given the previous token.

A test chooses the share of tool calls, answers and mistakes, and knows the log-prob of every sampled token without an
engine. One-hot embeddings pass through layers that add nothing, and the head looks up the next token. A piece of one
character is that character's own token; a longer piece is added to the vocabulary. A word spelled in single characters
therefore gets other tokens when its text is encoded again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import SMALL, make_tokenizer

END = "<|im_end|>"
NEVER = -40.0
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
Script = dict[str, dict[str, float]]


@dataclass(frozen=True)
class ScriptedModel:
    """A model folder, its tokenizer, and next-token probabilities; tokens without a script entry end the turn."""

    folder: Path
    tokenizer: Any
    follows: dict[int, dict[int, float]]

    def log_prob(self, before: int, token: int) -> float:
        """Log-prob of `token` sampled after `before`."""
        return math.log(self.follows.get(before, {self.tokenizer.eos_token_id: 1.0})[token])


def make_scripted_model(folder: Path, script: Script) -> ScriptedModel:
    """Write the folder of a model that starts a turn after a newline and follows the script."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    pieces = dict.fromkeys([*script, *(piece for after in script.values() for piece in after)])
    tokenizer.add_tokens([piece for piece in pieces if len(piece) > 1 and piece != END])
    ids = {piece: _id_of(tokenizer, piece) for piece in pieces}
    follows = {ids[piece]: {ids[next_]: p for next_, p in after.items()} for piece, after in script.items()}
    width = 64 * math.ceil(len(tokenizer) / 64)
    config = AutoConfig.for_model(
        "qwen3", **{**SMALL, "vocab_size": width, "hidden_size": width, "max_position_embeddings": 2048}
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(width))
        model.lm_head.weight.copy_(_logits(follows, width, tokenizer.eos_token_id).T / _norm_scale(width, config))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return ScriptedModel(folder, tokenizer, follows)


def _id_of(tokenizer: Any, piece: str) -> int:
    [token] = tokenizer.encode(piece, add_special_tokens=False)
    return int(token)


def _norm_scale(width: int, config: Any) -> float:
    """Value that the last norm gives to the 1 of a one-hot vector."""
    return 1 / math.sqrt(1 / width + config.rms_norm_eps)


def _logits(follows: dict[int, dict[int, float]], width: int, end: int) -> torch.Tensor:
    table = torch.full((width, width), NEVER)
    for before in range(width):
        for token, probability in follows.get(before, {end: 1.0}).items():
            table[before, token] = math.log(probability)
    return table
