"""A tiny model learns to write fast kernels from what compiler, tests and clock say.

python examples/kernel_forge/run.py [--seed N] [--device cpu|cuda] [--maps N] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import c_programs  # noqa: E402
import pupil  # noqa: E402
import tiny_run  # noqa: E402
from bench import CBench  # noqa: E402
from judge import Judge  # noqa: E402
from problems import MAPS, split_problems  # noqa: E402

from slime.errors import RunFailed, UserError  # noqa: E402
from slime.observe.metrics import read_metrics  # noqa: E402

LEARNED = 0.85
"""The held-out reward after GRPO: right at once and full speed, in most attempts, or soon."""
TURNS = 3


async def make_data(args: argparse.Namespace, verdicts: Path) -> tuple[pupil.Files, list[dict[str, Any]]]:
    """Have all that the pupil may write judged, and write the files."""
    training, held_out = split_problems(args.maps)
    judge = Judge(CBench(), c_programs.naive, verdicts)
    try:
        known = await pupil.judge_drafts(judge, training)
    finally:
        await judge.aclose()
    shown = pupil.demonstrations(args.warm_up_steps * 32, known, seed=args.seed)
    files = pupil.write_files(args.output_dir / "data", shown, training, held_out, rows=args.held_out_rows)
    return files, shown


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "kernel_forge")
    parser.set_defaults(warm_up_steps=100, steps=20)
    parser.add_argument("--maps", type=int, default=4, choices=range(2, len(MAPS) + 1), help="three problems each")
    parser.add_argument("--held-out-rows", type=int, default=32, help="attempts at each held-out problem")
    args = parser.parse_args(words)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    verdicts = args.output_dir / "verdicts.jsonl"
    print("what a pupil may write is compiled, tested and timed in sandboxes", flush=True)
    began = time.monotonic()
    files, shown = asyncio.run(make_data(args, verdicts))
    print(f"{len(verdicts.read_text().splitlines())} kernels judged in {time.monotonic() - began:.0f} s", flush=True)
    settings = args.output_dir / "kernels.json"
    settings.write_text(json.dumps({"kernel_verdicts": str(verdicts.resolve())}))
    outcome = tiny_run.run(
        tiny_run.Task(
            folder=args.output_dir,
            demonstrations=shown,
            demonstrations_file=files.demonstrations,
            training=files.training,
            held_out=files.held_out,
            words=c_programs.WORDS,
            generate=f"{HERE / 'generate.py'}:generate",
            reward=f"{HERE / 'generate.py'}:reward",
            max_turns=TURNS,
            turn_tokens=48,
        ),
        args,
        custom_config_path=str(settings),
        custom_rollout_log_function_path=f"{HERE / 'generate.py'}:log_rollout",
        custom_eval_rollout_log_function_path=f"{HERE / 'generate.py'}:log_evaluation",
        eval_temperature=1.0,
    )
    print(verdict(args.output_dir / "metrics.jsonl", outcome))
    return 0 if outcome.after >= LEARNED else 1


def verdict(metrics: Path, outcome: tiny_run.Outcome) -> str:
    """Whether it learned, in a sentence."""
    rows = [row for row in read_metrics(metrics) if "eval/held-out/right" in row]
    first, last = rows[0], rows[-1]

    def change(name: str, form: str) -> str:
        key = f"eval/held-out/{name}"
        return f"{first.get(key, 0):{form}} before, {last.get(key, 0):{form}} after"

    learned = "It learned to write kernels" if outcome.after >= LEARNED else "It did not learn enough"
    return (
        f"{learned}: reward on held-out problems {outcome.before:.3f} before, {outcome.after:.3f} after; "
        f"compiles at once {change('compiles_at_once', '.0%')}; right at once {change('right_at_once', '.0%')}; "
        f"speed of the right ones {change('speed', '.1f')} ({outcome.minutes:.1f} min)."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        print("interrupted: the same command begins anew and knows what was judged", file=sys.stderr)
        sys.exit(130)
