"""An agent whose tools sometimes take long, trained while it works: generation never stops, weights change under it.

python examples/fully_async/run.py [--modes full sync] [--max-weight-staleness N] [--seed N] [--device cpu|cuda]
                                   [--output-dir DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import side_by_side  # noqa: E402
import task  # noqa: E402
import tiny_run  # noqa: E402

LEARNED = 0.5


def main(words: list[str] | None = None) -> int:
    parser = tiny_run.arguments(__doc__, "fully_async", compares=True)
    parser.add_argument("--max-weight-staleness", type=int, default=3, help="versions that samples may be behind")
    parser.set_defaults(warm_up_steps=140, steps=12, modes=["full", "sync"])
    args = parser.parse_args(words)
    out: Path = args.output_dir
    shown = args.warm_up_steps * tiny_run.WARM_UP_BATCH
    files, demonstrations = task.write_files(
        out / "data", demonstrations=shown, training=4000, held_out=64, seed=args.seed
    )
    work = tiny_run.Task(
        folder=out,
        demonstrations=demonstrations,
        demonstrations_file=files.demonstrations,
        training=files.training,
        held_out=files.held_out,
        words=task.WORDS,
        generate=f"{HERE / 'generate.py'}:generate",
        reward=f"{HERE / 'task.py'}:right_answer",
        max_turns=5,
        turn_tokens=24,
    )
    args.warm_model = args.warm_model or tiny_run.demonstrated(work, args)
    runs = {mode: trained(work, mode, args) for mode in args.modes}
    print(side_by_side.table(runs))
    files_of = {mode: out / mode / "metrics.jsonl" for mode in runs}
    picture = side_by_side.draw_comparison(files_of, out / "modes.png", "Slow notes: reward by mode")
    print(f"reward against time: {picture}")
    return verdict(runs, args.max_weight_staleness)


def trained(work: tiny_run.Task, mode: str, args: argparse.Namespace) -> side_by_side.Figures:
    """GRPO in one mode, and what it was like."""
    print(f"{mode}:", flush=True)
    # samples of earlier weights are weighed by how much likelier the present ones make them
    flags = {"max_weight_staleness": args.max_weight_staleness, "use_tis": True} if mode == "full" else {}
    folder = args.output_dir / mode
    tiny_run.run(
        work._replace(folder=folder), argparse.Namespace(**vars(args), mode=mode), eval_interval=args.steps, **flags
    )
    return side_by_side.figures_of(folder, tiny_run.PROMPTS * tiny_run.SAMPLES)


def verdict(runs: dict[str, side_by_side.Figures], bound: int) -> int:
    """In a sentence whether it learned and kept to the bound, and the exit code."""
    for mode, one in runs.items():
        scores = f"{one.after:.1%} of the held-out tasks end well, {one.before:.1%} before GRPO"
        if one.after < LEARNED:
            print(f"{mode} did not learn enough ({LEARNED:.0%} is expected): {scores}.")
            return 1
        if mode == "full" and one.oldest > bound:
            print(f"{mode} trained on a sample that was {one.oldest:.0f} versions behind, and {bound} are allowed.")
            return 1
    first = next(iter(runs))
    one = runs[first]
    print(
        f"It learned to read on: {one.after:.1%} of the held-out tasks end well, {one.before:.1%} before GRPO; {first} "
        f"trained on {one.samples_per_s:.1f} samples a second, at most {one.oldest:.0f} versions behind."
    )
    return 0


if __name__ == "__main__":
    sys.exit(tiny_run.exit_code(main))
