"""A tiny model learns in fourteen environments whose problems become harder as it learns.

python examples/adaptive_environments/run.py [--device cpu|cuda] [--seed N] [--output-dir DIR] [--lr 0 for a control]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402
import tiny_copying  # noqa: E402
from curves import draw_levels  # noqa: E402
from source import CURVES  # noqa: E402

import slime  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402

BATCH = 64
"""Demonstrations a step."""
RISEN = 8
"""Environments in which the level has to end above where it began."""


def main(words: list[str] | None = None) -> int:
    parser = tiny_copying.arguments(__doc__, "adaptive_environments", warm_up_steps=200)
    parser.add_argument("--steps", type=int, default=24, help="of GRPO")
    parser.add_argument("--lr", type=float, default=5e-4, help="of GRPO; 0 shows what the levels do without learning")
    args = parser.parse_args(words)
    began = time.monotonic()
    out: Path = args.output_dir
    common = {"device": args.device, "dtype": "float32", "seed": args.seed, "rollout_seed": args.seed}
    files = task.write_files(out / "data", shown=args.warm_up_steps * BATCH, seed=args.seed)
    print("warm-up: copy a careless pupil who knows the easy levels", flush=True)
    warm = tiny_copying.copied(out / "warmup", files.demonstrations, steps=args.warm_up_steps, batch=BATCH, **common)
    print("GRPO: problems at the edge of what the model can do, and the edge moves", flush=True)
    result = train(args, common, warm, files.problems)
    before, after = (result.evaluations[i][1]["eval/all-levels"] for i in (0, -1))
    history = json.loads((out / CURVES).read_text())
    sentence, learned = verdict(history, before, after, (time.monotonic() - began) / 60)
    print(sentence, flush=True)
    print(f"the levels are drawn in {draw_levels(history, out / 'difficulty.png')}")
    return 0 if learned else 1


def train(args: argparse.Namespace, common: dict[str, Any], warm: Path, problems: Path) -> Any:
    """GRPO; the data source makes the problems, hears of the rewards and is saved with the checkpoints."""
    return slime.run(
        **common,
        hf_checkpoint=str(warm),
        data_source_path=f"{HERE / 'source.py'}:AdaptiveEnvironments",
        custom_rm_path=f"{HERE / 'source.py'}:right_answer",
        eval_prompt_data=[("all-levels", str(problems))],
        input_key="prompt",
        eval_interval=20,
        eval_temperature=0.0,
        num_rollout=args.steps,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        rollout_max_response_len=14,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        eps_clip_high=0.28,
        lr=args.lr,
        lr_warmup_iters=3,
        output_dir=str(args.output_dir),
        save=str(args.output_dir),
        load=str(args.output_dir),
        save_interval=20,
        ckpt_keep=1,
    )


def verdict(history: list[dict[str, Any]], before: float, after: float, minutes: float) -> tuple[str, bool]:
    """Whether it learned, in a sentence."""
    first, last = history[0]["levels"], history[-1]["levels"]
    means = [sum(levels.values()) / len(levels) for levels in (first, last)]
    risen = sum(last[name] > 1 for name in last)
    facts = (
        f"the mean level rose from {means[0]:.1f} to {means[1]:.1f}, in {risen} of {len(last)} environments, and of "
        f"problems of all levels {after:.1%} are solved, {before:.1%} before GRPO ({minutes:.1f} min)"
    )
    learned = risen >= RISEN and after > before
    return (f"It learned: {facts}." if learned else f"It did not learn enough: {facts}."), learned


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
