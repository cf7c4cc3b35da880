"""A tokenizer for each family's chat template: one small trained vocabulary, and that family's own added tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """The added tokens of a family: those its tokenizer calls special, and the others."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_QWEN = Family(_CHATML, ("<|fim_prefix|>", *_TAGS), eos="<|im_end|>")
_HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_ARGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
_DEEPSEEK = Family(
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    (
        *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
        *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
)
FAMILIES = {
    "qwen2_5": Family(_CHATML, ("<tool_call>", "</tool_call>"), eos="<|im_end|>"),
    "qwen3": _QWEN,
    "qwen3_instruct": _QWEN,
    "qwen3_coder": _QWEN,
    "qwen3_5": _QWEN,
    "llama3": Family(_HEADERS, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "llama3_1": Family((*_HEADERS, "<|eom_id|>", "<|python_tag|>"), bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "glm4": Family(_GLM, eos="<|endoftext|>"),
    "glm4_5": Family(_GLM, (*_TAGS, *_ARGS), eos="<|endoftext|>"),
    "deepseek_r1": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": Family(
        ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        bos="[BOS]",
        eos="[EOS]",
    ),
    "gpt_oss": Family(
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|call|>"),
        ),
        bos="<|startoftext|>",
        eos="<|return|>",
    ),
    "gemma3": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<table>", "<unused0>", "\n\n"),
        bos="<bos>",
        eos="<eos>",
    ),
    "gemma4": Family(
        (
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>'),
        ),
        bos="<bos>",
        eos="<eos>",
    ),
    "nemotron": _QWEN,
    "mistral": Family(
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        eos="</s>",
    ),
    "marked": Family(_CHATML, eos="<|im_end|>"),
    "plain": Family(("<|endoftext|>",), eos="<|endoftext|>"),
}


@cache
def _vocabulary() -> str:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [path.read_text() for path in [Path(__file__), *sorted(TEMPLATES.glob("*.jinja"))]]
    tokenizer.train_from_iterator([*texts, json.dumps(texts[:2]), '{"name": "bash", "arguments": {}}'], trainer)
    return str(tokenizer.to_str())


@cache
def family_tokenizer(name: str) -> Any:
    """The tokenizer of a family; shared, so nothing of it may be changed."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(_vocabulary())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos)
    fast.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return fast
