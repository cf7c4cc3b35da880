"""A tiny model learns to calculate with a Python interpreter, over several turns.

python examples/retool/run.py [--client openai] [--mode sync|partial|one-step|full] [--seed N] [--output-dir DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import task  # noqa: E402
import tiny_run  # noqa: E402

from slime.errors import RunFailed, UserError  # noqa: E402

LEARNED = 0.85
FUNCTIONS = {"none": "generate", "openai": "as_client"}


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "retool")
    parser.add_argument("--client", choices=list(FUNCTIONS), default="none", help="who talks to the model")
    args = parser.parse_args(words)
    shown = task.demonstrations(args.warm_up_steps * 32, seed=args.seed)
    files = task.write_files(args.output_dir / "data", shown, training=4000, held_out=128, seed=args.seed)
    outcome = tiny_run.run(
        tiny_run.Task(
            folder=args.output_dir,
            demonstrations=shown,
            demonstrations_file=files.demonstrations,
            training=files.training,
            held_out=files.held_out,
            words=task.WORDS,
            generate=f"{HERE / 'generate.py'}:{FUNCTIONS[args.client]}",
            reward=f"{HERE / 'task.py'}:right_answer",
            max_turns=4,
            turn_tokens=24,
        ),
        args,
    )
    print(outcome.verdict("problems", LEARNED))
    return 0 if outcome.after >= LEARNED else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(f"error: {error}")
