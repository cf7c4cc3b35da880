"""A tiny model learns to write fast kernels from what compiler, tests and clock say.

python examples/kernel_forge/run.py [--seed N] [--device cpu|cuda] [--maps N] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import pupil  # noqa: E402
import tiny_run  # noqa: E402
from drawing import draw_kernels  # noqa: E402
from generate import make_judge  # noqa: E402
from languages import LANGUAGES, Language, language_for  # noqa: E402
from problems import MAPS, split_problems  # noqa: E402
from tiny_chat import make_model  # noqa: E402

from slime.errors import RunFailed, UserError  # noqa: E402
from slime.observability.metrics import read_metrics  # noqa: E402

LEARNED = 0.7
"""The held-out reward after GRPO: right at once and full speed, in most attempts, or soon."""
TURNS = 3
WARM_UP_BATCH = 32
"""Conversations in a step of the warm-up."""


async def make_data(args: argparse.Namespace, verdicts: Path) -> tuple[pupil.Files, list[dict[str, Any]]]:
    """Have all that the pupil may write judged, and write the files."""
    training, held_out = split_problems(args.maps)
    judge, language = make_judge(args.kernels, "auto", args.card, verdicts), LANGUAGES[args.kernels]
    try:
        known = await pupil.judge_drafts(judge, language, training)
    finally:
        await judge.aclose()
    problems = [*training, *held_out]
    shown = pupil.demonstrations(args.warm_up_steps * WARM_UP_BATCH, language, known, problems, seed=args.seed)
    files = pupil.write_files(args.output_dir / "data", language, shown, training, held_out, rows=args.held_out_rows)
    return files, shown


def warmed_up(args: argparse.Namespace, language: Language, files: pupil.Files, shown: list[dict[str, Any]]) -> Path:
    """A model that copies the pupil, as a folder: many steps of few conversations, which are all alike."""
    print("a model of 0.4 M parameters with random weights, and demonstrations of a careless pupil", flush=True)
    base = make_model(args.output_dir / "base", shown, words=language.words, seed=args.seed)
    keys = {"input_key": "messages", "tool_key": "tools"}
    return tiny_run.warmed_up(
        base, files.demonstrations, args.output_dir, args, rollout_batch_size=WARM_UP_BATCH, **keys
    )


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "kernel_forge")
    parser.set_defaults(warm_up_steps=70, steps=8)
    parser.add_argument("--maps", type=int, default=2, choices=range(2, len(MAPS) + 1), help="three problems each")
    parser.add_argument("--held-out-rows", type=int, default=24, help="attempts at each held-out problem")
    parser.add_argument("--kernels", choices=list(LANGUAGES), help="in which language; triton with --device cuda")
    parser.add_argument("--card", type=int, default=0, help="the GPU that Triton kernels are judged on")
    args = parser.parse_args(words)
    args.kernels = language_for(args.device, args.kernels)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    verdicts = args.output_dir / "verdicts.jsonl"
    print("what a pupil may write is compiled, tested and timed in sandboxes", flush=True)
    began = time.monotonic()
    files, shown = asyncio.run(make_data(args, verdicts))
    print(f"{len(verdicts.read_text().splitlines())} kernels judged in {time.monotonic() - began:.0f} s", flush=True)
    settings = args.output_dir / "kernels.json"
    settings.write_text(
        json.dumps(
            {
                "kernel_verdicts": str(verdicts.resolve()),
                "kernel_language": args.kernels,
                "kernel_card": args.card,
            }
        )
    )
    language = LANGUAGES[args.kernels]
    args.warm_model = args.warm_model or warmed_up(args, language, files, shown)
    outcome = tiny_run.run(
        tiny_run.Task(
            folder=args.output_dir,
            demonstrations=shown,
            demonstrations_file=files.demonstrations,
            training=files.training,
            held_out=files.held_out,
            words=language.words,
            generate=f"{HERE / 'generate.py'}:generate",
            reward=f"{HERE / 'generate.py'}:reward",
            max_turns=TURNS,
            turn_tokens=language.turn_tokens,
        ),
        args,
        custom_config_path=str(settings),
        custom_rollout_log_function_path=f"{HERE / 'generate.py'}:log_rollout",
        custom_eval_rollout_log_function_path=f"{HERE / 'generate.py'}:log_evaluation",
        eval_temperature=1.0,
    )
    rows = list(read_metrics(args.output_dir / "metrics.jsonl"))
    print(verdict(rows, outcome))
    print(f"kernels are drawn in {draw_kernels(rows, args.output_dir / 'kernels.png')}")
    return 0 if outcome.after >= LEARNED else 1


def verdict(rows: Sequence[Mapping[str, Any]], outcome: tiny_run.Outcome) -> str:
    """Whether it learned, in a sentence."""
    evaluated = [row for row in rows if "eval/held-out/right" in row]
    first, last = evaluated[0], evaluated[-1]

    def change(name: str, form: str) -> str:
        key = f"eval/held-out/{name}"
        return f"{first.get(key, 0):{form}} before, {last.get(key, 0):{form}} after"

    learned = "It learned to write kernels" if outcome.after >= LEARNED else "It did not learn enough"
    return (
        f"{learned}: reward on held-out problems {outcome.before:.3f} before, {outcome.after:.3f} after; "
        f"right at once {change('right_at_once', '.0%')}; right in {TURNS} turns {change('right', '.0%')}; "
        f"speed of the right ones, times naive, {change('speed', '.1f')} ({outcome.minutes:.1f} min)."
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
