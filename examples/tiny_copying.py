"""The warm-up that examples with plain prompts share: a tiny model with random weights copies answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import slime  # noqa: E402
from slime.quickstart.arithmetic import make_model  # noqa: E402


def arguments(about: str | None, name: str, *, warm_up_steps: int) -> argparse.ArgumentParser:
    """The flags that such examples have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs") / name)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--warm-up-steps", type=int, default=warm_up_steps)
    return parser


def copied(folder: Path, demonstrations: Path, *, steps: int, batch: int, width: int = 128, **common: Any) -> Path:
    """The folder of a model (0.4 M parameters, or of another width) trained on `demonstrations`; killed, it goes on."""
    base = make_model(folder / "base", seed=common["seed"], width=width)
    slime.run(
        **common,
        hf_checkpoint=str(base),
        prompt_data=str(demonstrations),
        input_key="prompt",
        label_key="label",
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        rollout_shuffle=True,
        num_rollout=steps,
        rollout_batch_size=batch,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        lr=4e-3,
        lr_warmup_iters=20,
        lr_decay_style="cosine",
        output_dir=str(folder),
        save=str(folder),
        load=str(folder),
        save_hf=str(folder / "model"),
    )
    return folder / "model"
