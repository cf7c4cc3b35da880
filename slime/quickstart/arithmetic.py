"""The quickstart's task: sums of two-digit numbers, warm-up data that drops carries, and a tiny model.

Answers are written lowest digit first, the order of written addition: `47+85=` wants `231`, which is 132.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER = Path(__file__).parent / "tokenizer"
CARRY_DROPPED = 0.6
"""Share of warm-up answers without the carry. Above one half, so that a model that imitates them is mostly wrong."""
COPIES = 4
"""Warm-up answers per sum: right and wrong ones for the same sum, so that neither can be memorised."""


def exact_match(args: Any, sample: Any) -> float:
    """Return 1.0 if the response is the right answer and nothing else."""
    return float(sample.response.strip() == sample.label)


def added(a: int, b: int) -> str:
    """Return the sum, lowest digit first."""
    return str(a + b)[::-1]


def added_without_carrying(a: int, b: int) -> str:
    """Return the sum of each column alone, lowest digit first: `47+85=` becomes `22`."""
    return f"{(a + b) % 10}{(a // 10 + b // 10) % 10}"


class Problems(NamedTuple):
    """The files of the task."""

    warm_up: Path
    training: Path
    held_out: Path


def write_problems(folder: Path, *, held_out: int, seed: int) -> Problems:
    """Write all 8,100 sums, shuffled: `held_out` of them for evaluation, the others for warm-up and training."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    evaluation, training = pairs[:held_out], pairs[held_out:]
    folder.mkdir(parents=True, exist_ok=True)
    return Problems(
        warm_up=_write(
            folder / "warmup.jsonl",
            (
                _row(a, b, added_without_carrying(a, b) if rng.random() < CARRY_DROPPED else added(a, b))
                for _ in range(COPIES)
                for a, b in training
            ),
        ),
        training=_write(folder / "train.jsonl", (_row(a, b, added(a, b)) for a, b in training)),
        held_out=_write(folder / "eval.jsonl", (_row(a, b, added(a, b)) for a, b in evaluation)),
    )


def _row(a: int, b: int, answer: str) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "label": answer}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_model(folder: Path, *, seed: int, width: int = 128) -> Path:
    """Write a Qwen3-shaped model with random weights (0.4 M parameters at the default width) and its tokenizer.

    Weights have a standard deviation of 1/sqrt(width): the usual 0.02 suits models ten times as wide. In this one
    signals become so small that learning starts only after 100 to 400 steps.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=43 * width // 16,
            num_hidden_layers=2,
            num_attention_heads=width // 16,
            num_key_value_heads=width // 32,
            head_dim=16,
            initializer_range=round(width**-0.5, 2),
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    return folder
