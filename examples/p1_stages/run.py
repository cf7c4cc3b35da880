"""A tiny model learns to follow a cart in three stages: longer answers, larger groups, another filter.

python examples/p1_stages/run.py [--device cpu|cuda] [--seed N] [--output-dir DIR] [--stages FILE]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402
import tiny_copying  # noqa: E402
from drawing import draw_stages  # noqa: E402

from slime.driver.stages import run_stages  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402

BATCH = 64
LEARNED = 0.6


def main(words: list[str] | None = None) -> int:
    parser = tiny_copying.arguments(__doc__, "p1_stages", warm_up_steps=120)
    parser.add_argument("--stages", type=Path, default=HERE / "stages.yaml", help="the config file")
    args = parser.parse_args(words)
    began = time.monotonic()
    out, stages = args.output_dir.resolve(), args.stages.resolve()
    os.chdir(HERE.parents[1])  # the config file names this folder's functions from there
    files = task.write_files(out / "data", shown=args.warm_up_steps * BATCH, training=600, held_out=128, seed=args.seed)
    common = {"device": args.device, "seed": args.seed, "rollout_seed": args.seed}
    print("warm-up: copy a pupil who slips", flush=True)
    warm = tiny_copying.copied(
        out / "warmup", files.demonstrations, steps=args.warm_up_steps, batch=BATCH, dtype="float32", **common
    )
    print("GRPO, in the stages of", stages, flush=True)
    results = run_stages(
        stages,
        [
            *("--hf-checkpoint", str(warm)),
            *("--prompt-data", str(files.training)),
            *("--eval-prompt-data", "held-out", str(files.held_out)),
            *("--output-dir", str(out)),
            *(word for name, value in common.items() for word in (f"--{name.replace('_', '-')}", str(value))),
        ],
    )
    scores = {result.run_dir.name: _scores(result) for result in results}
    before, after = next(iter(scores.values()))[0][1], _scores(results[-1])[-1][1]
    print(verdict(before, after, len(results), (time.monotonic() - began) / 60), flush=True)
    print(f"success is drawn in {draw_stages(scores, out / 'stages.png')}")
    return 0 if after >= LEARNED else 1


def _scores(result: Any) -> list[tuple[int, float]]:
    return [(step, scores["eval/held-out"]) for step, scores in result.evaluations]


def verdict(before: float, after: float, stages: int, minutes: float) -> str:
    """Whether it learned, in a sentence."""
    facts = f"after {stages} stages it solves {after:.1%} of held-out problems, {before:.1%} before ({minutes:.1f} min)"
    return f"It learned: {facts}." if after >= LEARNED else f"It did not learn enough: {facts}."


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
