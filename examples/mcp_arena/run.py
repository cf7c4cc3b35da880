"""A tiny model plans trips with the tools of an MCP server; its plans are ranked by a tournament.

python examples/mcp_arena/run.py [--topology NAME] [--judge model|function] [--seed N] [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import arena  # noqa: E402
import judge  # noqa: E402
import task  # noqa: E402
import tiny_run  # noqa: E402
from tournament import TOPOLOGIES, expected_matches  # noqa: E402

LEARNED = 0.6
GROUP = 8
JUDGE_STEPS = 200
WARM_UP_BATCH = 48


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "mcp_arena")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="seeded_single_elimination")
    parser.add_argument("--judge", choices=["model", "function"], default="model", help="who compares two plans")
    parser.set_defaults(steps=20)
    args = parser.parse_args(words)
    for name in TOPOLOGIES:
        print(f"{name}: {expected_matches(name, GROUP)} matches among {GROUP} plans")
    shown = task.demonstrations(args.warm_up_steps * WARM_UP_BATCH, seed=args.seed)
    files = task.write_files(args.output_dir / "data", shown, seed=args.seed)
    plan = tiny_run.Task(
        folder=args.output_dir,
        demonstrations=shown,
        demonstrations_file=files.demonstrations,
        training=files.training,
        held_out=files.held_out,
        words=task.WORDS,
        generate=f"{HERE / 'generate.py'}:generate",
        reward=f"{HERE / 'arena.py'}:by_rank",
        held_out_reward=f"{HERE / 'arena.py'}:is_cheapest",
        max_turns=3,
        turn_tokens=32,
        width=96,
        warm_up_batch=WARM_UP_BATCH,
    )
    args.warm_model = args.warm_model or tiny_run.demonstrated(plan, args)
    settings = {"arena_topology": args.topology, "arena_judge_url": None}
    with ExitStack() as alive:
        if args.judge == "model" and not args.warm_up_only:
            url = alive.enter_context(
                judge.serving(_judge(plan, args), args.device, args.output_dir / "logs/judge.log")
            )
            print(judge.measured(arena.served(url), seed=args.seed), flush=True)
            settings["arena_judge_url"] = url
        chosen = args.output_dir / "arena.json"
        chosen.write_text(json.dumps(settings))
        outcome = tiny_run.run(plan, args, lr=1e-3, eval_temperature=1.0, group_rm=True, custom_config_path=str(chosen))
    print(_calls(args.output_dir))
    ends = f"{outcome.after:.1%} of held-out trips get the cheapest plan, {outcome.before:.1%} before GRPO"
    verdict = "It learned from ranks" if outcome.after >= LEARNED else "It did not learn enough"
    print(f"{verdict}: {ends} ({outcome.minutes:.1f} min).")
    return 0 if outcome.after >= LEARNED else 1


def _judge(plan: tiny_run.Task, args: argparse.Namespace) -> Path:
    """A model of its own that has learned to compare two prices, and stays as it is."""
    print("the judge: a model that copies comparisons", flush=True)
    shown = task.comparisons(JUDGE_STEPS * WARM_UP_BATCH, seed=args.seed)
    folder = args.output_dir / "judge"
    file = task.write_rows(folder / "comparisons.jsonl", shown)
    lesson = plan._replace(folder=folder, demonstrations=shown, demonstrations_file=file)
    return tiny_run.demonstrated(lesson, argparse.Namespace(**{**vars(args), "warm_up_steps": JUDGE_STEPS}))


def _calls(folder: Path) -> str:
    """What judging took, over the whole run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("matches", "judge_calls", "judge_failures", "ties", "undecided")
    total = {name: round(sum(row.get(f"rollout/tournament_{name}", 0) for row in rows)) for name in names}
    return "tournaments: " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in total.items())


if __name__ == "__main__":
    sys.exit(tiny_run.exit_code(main))
