"""A tiny model learns three tasks in one run, each with its own data, reward, weight and evaluation.

python examples/multi_task/run.py [--device cpu|cuda] [--seed N] [--output-dir DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import tasks  # noqa: E402
import tiny_copying  # noqa: E402

import slime  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402

BATCH = 64
"""Demonstrations a step."""
LEARNED = 0.8
"""What every task has to reach."""


def main(words: list[str] | None = None) -> int:
    parser = tiny_copying.arguments(__doc__, "multi_task", warm_up_steps=200)
    parser.add_argument("--steps", type=int, default=32, help="of GRPO")
    args = parser.parse_args(words)
    began = time.monotonic()
    out = args.output_dir.resolve()
    common = {"device": args.device, "dtype": "float32", "seed": args.seed, "rollout_seed": args.seed}
    files = tasks.write_files(out / "data", shown=args.warm_up_steps * BATCH, seed=args.seed)
    print("warm-up: copy a pupil who is wrong more often than right", flush=True)
    warm = tiny_copying.copied(out / "warmup", files.demonstrations, steps=args.warm_up_steps, batch=BATCH, **common)
    print("GRPO: three tasks in every batch, 2 to 1 to 1, each with a reward of its own", flush=True)
    evaluations = train(args, common, warm, files.config).evaluations
    first, last = (evaluations[place][1] for place in (0, -1))
    print(verdict(first, last, time.monotonic() - began), flush=True)
    return 0 if all(last[f"eval/{task}"] >= LEARNED for task in tasks.TASKS) else 1


def train(args: argparse.Namespace, common: dict[str, Any], warm: Path, config: Path) -> Any:
    """GRPO on all tasks at once; killed, it goes on with the prompt that comes next."""
    return slime.run(
        **common,
        hf_checkpoint=str(warm),
        prompt_config=str(config),
        eval_config=str(config),
        eval_interval=4,
        rollout_shuffle=True,
        num_rollout=args.steps,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        rollout_max_response_len=5,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        eps_clip_high=0.28,
        lr=5e-4,
        lr_warmup_iters=3,
        output_dir=str(args.output_dir),
        save=str(args.output_dir),
        load=str(args.output_dir),
        save_interval=8,
        ckpt_keep=1,
    )


def verdict(first: Mapping[str, float], last: Mapping[str, float], seconds: float) -> str:
    """Whether it learned, in a sentence."""
    scores = {task: (first[f"eval/{task}"], last[f"eval/{task}"]) for task in tasks.TASKS}
    facts = ", ".join(f"{task} {after:.1%} ({before:.1%} before)" for task, (before, after) in scores.items())
    behind = [task for task, (_, after) in scores.items() if after < LEARNED]
    begin = f"It did not learn {' and '.join(behind)} well enough" if behind else "It learned all three tasks"
    return f"{begin}: of held-out problems it solves {facts}; {seconds:.0f} s."


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunFailed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")
