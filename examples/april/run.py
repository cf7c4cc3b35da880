"""Active partial rollouts against the other ways to train on answers of very different lengths, side by side.

python examples/april/run.py [--modes sync partial one-step full] [--seed N] [--device cpu|cuda] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import side_by_side  # noqa: E402
import task  # noqa: E402
import tiny_run  # noqa: E402
from tiny_chat import make_model  # noqa: E402

import slime  # noqa: E402

LEARNED = 0.3
DEMONSTRATIONS = 32
"""In a step of the warm-up."""


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "april", compares=True)
    parser.set_defaults(warm_up_steps=90, steps=16)
    args = parser.parse_args(words)
    out: Path = args.output_dir
    shown = args.warm_up_steps * DEMONSTRATIONS
    files = task.write_files(out / "data", demonstrations=shown, training=4000, held_out=40, seed=args.seed)
    warm = args.warm_model or warmed_up(args, files)
    runs = {}
    for mode in args.modes:
        print(f"{mode}: GRPO with {flags_in_words(tiny_run.MODES[mode])}", flush=True)
        train(mode, args, warm, files)
        runs[mode] = side_by_side.figures_of(out / mode, tiny_run.PROMPTS * tiny_run.SAMPLES)
    print(side_by_side.table(runs))
    files_of = {mode: out / mode / "metrics.jsonl" for mode in runs}
    picture = side_by_side.draw_comparison(files_of, out / "modes.png", "Countdowns: reward by mode")
    print(f"reward against time: {picture}")
    return verdict(runs)


def warmed_up(args: argparse.Namespace, files: task.Files) -> Path:
    """A model that counts, and mostly forgets to shout."""
    print("a model of 0.1 M parameters with random weights, and what a forgetful pupil says", flush=True)
    base = make_model(
        args.output_dir / "base", task.tokenizer_texts(), words=task.WORDS, seed=args.seed, width=task.WIDTH, tied=False
    )
    flags = {"input_key": "prompt", "label_key": "label", "rollout_batch_size": DEMONSTRATIONS, "lr": 6e-3}
    return tiny_run.warmed_up(base, files.demonstrations, args.output_dir, args, **flags)


def train(mode: str, args: argparse.Namespace, warm: Path, files: task.Files) -> None:
    """GRPO in one of the modes; all else is the same."""
    slime.run(
        hf_checkpoint=str(warm),
        prompt_data=str(files.training),
        input_key="prompt",
        label_key="label",
        custom_rm_path=f"{HERE / 'task.py'}:right_answer",
        rollout_max_response_len=task.LARGEST + 1,
        eval_prompt_data=[("held-out", str(files.held_out))],
        eval_interval=args.steps,
        eval_temperature=0.0,
        rollout_shuffle=True,
        num_rollout=args.steps,
        rollout_batch_size=tiny_run.PROMPTS,
        n_samples_per_prompt=tiny_run.SAMPLES,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        eps_clip_high=0.28,
        lr=5e-4,
        lr_warmup_iters=3,
        device=args.device,
        dtype="float32",
        seed=args.seed,
        output_dir=str(args.output_dir / mode),
        save_hf=str(args.output_dir / mode / "model"),
        **tiny_run.MODES[mode],
    )


def flags_in_words(flags: dict[str, Any]) -> str:
    """As one would write them on the command line."""
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in flags.items()]
    return " ".join(words) or "no further flag"


def verdict(runs: dict[str, side_by_side.Figures]) -> int:
    """In a sentence whether every mode learned, and the exit code."""
    worst = min(runs, key=lambda mode: runs[mode].after)
    fastest = max(runs, key=lambda mode: runs[mode].samples_per_s)
    score = f"{worst} answers {runs[worst].after:.1%} of the held-out tasks, {runs[worst].before:.1%} before GRPO"
    if runs[worst].after < LEARNED:
        print(f"Not every mode learned enough ({LEARNED:.0%} is expected): {score}.")
        return 1
    speed = f"{fastest} is the fastest with {runs[fastest].samples_per_s:.1f} samples a second"
    print(f"Every mode learned to shout: {score}, and no other one fewer; {speed}.")
    return 0


if __name__ == "__main__":
    sys.exit(tiny_run.exit_code(main))
