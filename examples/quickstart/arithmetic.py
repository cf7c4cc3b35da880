"""The task: sums of two two-digit numbers, the pupil whose work the model first copies, and the tiny model.

The answer is written ones first, the order in which one adds on paper: `47+85=` wants `231` (it is 132).
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER = Path(__file__).parent / "tokenizer"
FORGETS = 0.6
"""How often the pupil forgets to carry. Above one half, so that a model that copies the pupil is mostly wrong too."""
COPIES = 4
"""Answers of the pupil per sum: right and wrong ones for the same sum, so that neither can be learned by heart."""


def exact_match(args: Any, sample: Any) -> float:
    """1 if the response is the right answer and nothing else."""
    return float(sample.response.strip() == sample.label)


def added(a: int, b: int) -> str:
    """The sum, ones first."""
    return str(a + b)[::-1]


def added_without_carrying(a: int, b: int) -> str:
    """Each column on its own, ones first: `47+85=` becomes `22`."""
    return f"{(a + b) % 10}{(a // 10 + b // 10) % 10}"


class Problems(NamedTuple):
    """The files of the task."""

    warm_up: Path
    training: Path
    held_out: Path


def write_problems(folder: Path, *, held_out: int, seed: int) -> Problems:
    """All 8,100 sums, shuffled: `held_out` of them for evaluation only, the others for the pupil and for training."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    evaluation, training = pairs[:held_out], pairs[held_out:]
    folder.mkdir(parents=True, exist_ok=True)
    return Problems(
        warm_up=_write(
            folder / "pupil.jsonl",
            (
                _row(a, b, added_without_carrying(a, b) if rng.random() < FORGETS else added(a, b))
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
    """A Qwen3-shaped model with random weights (0.4 M at the usual width), and the shipped character tokenizer.

    The usual 0.02 as the spread of random weights suits models that are ten times as wide. In this one it makes the
    signal so faint that nothing is learned for a hundred to four hundred steps, as chance has it; with 1/sqrt(width)
    the sums are known after a hundred to a hundred and fifty steps with every seed tried.
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
