"""The tiny model of the CPU run, its tokenizer, and the pupil whose trajectories it copies before tests train it.

The pupil works as mini_agent.py lets it: reads the file, replaces the line that is wrong, looks at what the tests say.
Too often it takes the first way to write that line that comes to mind, and it mostly gives up when the tests fail.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repositories import Repository, make_repository

GUESSES = 0.85
"""How often the pupil writes the line in any of the ways that it knows."""
TRIES_AGAIN = 0.3
"""How often it tries again after a failure."""
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>"]
VOCABULARY = 640
TRAINED_ON = 400
"""Trajectories that the tokenizer is made of."""


def trajectory(repository: Repository, rng: random.Random) -> list[dict[str, Any]]:
    """The pupil's work on a repository, as a conversation."""
    path, right = repository.path, repository.bug.right
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": repository.row()["problem_statement"]},
        _call("read", path=path),
        _result("\n".join(f"{number} {line}" for number, line in enumerate(repository.source(), 1))),
    ]
    while True:
        choices = [choice for choice in repository.bug.choices() if choice != repository.bug.written]
        written = rng.choice(choices) if rng.random() < GUESSES else right
        line, text = repository.bug_line(written)
        messages += [
            _call("edit", path=path, line=line, text=text),
            _result("all passed" if written == right else "1 failed"),
        ]
        if written == right or rng.random() > TRIES_AGAIN or len(messages) > 8:
            return [*messages, {"role": "assistant", "content": "Done."}]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def trajectories(count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """One for each of `count` repositories from `seed` on."""
    for number in range(seed, seed + count):
        yield trajectory(make_repository(number), random.Random(f"pupil {number}"))


def write_trajectories(path: Path, count: int, seed: int) -> Path:
    """As data for supervised training."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in trajectories(count, seed)))
    return path


def make_tokenizer(seed: int) -> Any:
    """A byte-level BPE made of trajectories, with their chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    texts = [fast.apply_chat_template(messages, tokenize=False) for messages in trajectories(TRAINED_ON, seed)]
    marks = re.compile("|".join(map(re.escape, [*SPECIAL, *MARKS])))
    tokenizer.train_from_iterator((piece for text in texts for piece in marks.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(folder: Path, *, seed: int) -> Path:
    """A Qwen3-shaped model of 0.4 M parameters with random weights, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer(seed)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            initializer_range=0.09,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
