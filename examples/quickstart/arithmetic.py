"""The task: sums of two two-digit numbers, and the tiny model that learns them.

The answer is written ones first, the order in which one adds on paper: `47+85=` wants `231` (it is 132).
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parent / "tokenizer"


def exact_match(args: Any, sample: Any) -> float:
    """1 if the response is the right answer and nothing else."""
    return float(sample.response.strip() == sample.label)


def write_problems(folder: Path, *, held_out: int, seed: int) -> tuple[Path, Path]:
    """All 8,100 sums, shuffled: `held_out` of them for evaluation, the others for training."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    evaluation, training = folder / "eval.jsonl", folder / "train.jsonl"
    for path, chosen in ((evaluation, pairs[:held_out]), (training, pairs[held_out:])):
        rows = ({"prompt": f"{a}+{b}=", "label": str(a + b)[::-1]} for a, b in chosen)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return training, evaluation


def make_model(folder: Path, *, seed: int) -> Path:
    """A Qwen3-shaped model of 1.6 M parameters with random weights, and the shipped character tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=48,
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
