"""One tiny model plays solvers, critics and a judge, and learns all three roles at once.

python examples/multi_agent/run.py [--seed N] [--output-dir DIR] [--device cpu|cuda]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402
import tiny_run  # noqa: E402

LEARNED = 0.6
HELD_OUT = 128


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "multi_agent")
    parser.set_defaults(warm_up_steps=120, steps=16)
    args = parser.parse_args(words)
    held_out = task.held_out_questions(HELD_OUT, args.seed)
    shown = task.demonstrations(args.warm_up_steps * tiny_run.WARM_UP_BATCH, held_out=held_out, seed=args.seed)
    files = task.write_files(args.output_dir / "data", shown, training=2000, held_out=held_out, seed=args.seed)
    plan = tiny_run.Task(
        folder=args.output_dir,
        demonstrations=shown,
        demonstrations_file=files.demonstrations,
        training=files.training,
        held_out=files.held_out,
        words=task.WORDS,
        generate=f"{HERE / 'team.py'}:generate",
        reward=None,
        max_turns=1,
        turn_tokens=4,
        width=96,
    )
    outcome = tiny_run.run(
        plan,
        args,
        n_samples_per_prompt=4,
        lr=1e-3,
        eval_temperature=1.0,
        custom_reward_post_process_path=f"{HERE / 'team.py'}:by_role",
        custom_rollout_log_function_path=f"{HERE / 'team.py'}:log_roles",
    )
    print(_roles(args.output_dir / "roles.jsonl"))
    ends = f"the team answers {outcome.after:.1%} of held-out questions, {outcome.before:.1%} before GRPO"
    verdict = "It learned to work together" if outcome.after >= LEARNED else "It did not learn enough"
    print(f"{verdict}: {ends} ({outcome.minutes:.1f} min).")
    return 0 if outcome.after >= LEARNED else 1


def _roles(file: Path) -> str:
    """How often each role did its own work well, in the first and the last quarter of the rollouts."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    quarter = max(len(rows) // 4, 1)

    def share(role: str, some: list[dict[str, float]]) -> str:
        return f"{fmean(row.get(role, 0.0) for row in some):.0%}"

    return "own work done well: " + ", ".join(
        f"{role} {share(role, rows[:quarter])} to {share(role, rows[-quarter:])}"
        for role in (task.SOLVER, task.CRITIC, task.JUDGE)
    )


if __name__ == "__main__":
    sys.exit(tiny_run.exit_code(main))
