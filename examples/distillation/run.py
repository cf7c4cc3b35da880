"""On-policy distillation: a student that adds badly learns from a teacher alone, with the teacher in two places.

python examples/distillation/run.py [--placements engine trainer] [--device cpu|cuda] [--seed N] [--output-dir DIR]
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

import placements  # noqa: E402
import task  # noqa: E402
import tiny_copying  # noqa: E402
import tiny_run  # noqa: E402

import slime  # noqa: E402

BATCH = 64
"""Demonstrations in a step of copying."""
QUESTIONS = 128
"""In a step of distillation, each answered once: without rewards there is nothing to compare within a group."""
HELD_OUT = 256
TEACHER_WIDTH, STUDENT_WIDTH = 128, 96
CLOSED = 0.75
"""Of the gap between the student and its teacher in accuracy, what distillation has to close."""
ALIKE, APART = 0.98, 1e-3
"""Both placements have to sample the same in the first step, and the teacher has to say the same about it."""


def main(words: list[str] | None = None) -> int:
    parser = tiny_copying.arguments(__doc__, "distillation", warm_up_steps=140)
    parser.add_argument("--teacher-steps", type=int, default=60, help="of copying right sums")
    parser.add_argument("--steps", type=int, default=12, help="of distillation")
    parser.add_argument("--eval-interval", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--placements", nargs="+", choices=["engine", "trainer"], default=["engine", "trainer"])
    parser.add_argument("--teacher", type=Path, help="a model folder, instead of making a teacher")
    parser.add_argument("--student", type=Path, help="a model folder, instead of making a student")
    args = parser.parse_args(words)
    began = time.monotonic()
    out: Path = args.output_dir
    files = task.write_files(out / "data", held_out=HELD_OUT, seed=args.seed)
    common = {"device": args.device, "dtype": "float32", "seed": args.seed, "rollout_seed": args.seed}
    teacher = args.teacher or copied("teacher", "right sums", files.right, args, common)
    student = args.student or copied("student", "a pupil who leaves summands out", files.pupil, args, common)
    for place in args.placements:
        print(f"distillation, with the teacher in the {place}", flush=True)
        distil(place, args, files, teacher, student, common)
    return report(args, task.accuracy(teacher, files.held_out), (time.monotonic() - began) / 60)


def copied(who: str, whom: str, demonstrations: Path, args: argparse.Namespace, common: dict[str, Any]) -> Path:
    """A model that was trained on demonstrations; the student is the smaller one."""
    print(f"the {who} copies {whom}", flush=True)
    steps, width = (args.teacher_steps, TEACHER_WIDTH) if who == "teacher" else (args.warm_up_steps, STUDENT_WIDTH)
    folder = args.output_dir / who
    return tiny_copying.copied(folder, demonstrations, steps=steps, batch=BATCH, width=width, **common)


def distil(
    place: str, args: argparse.Namespace, files: task.Files, teacher: Path, student: Path, common: dict[str, Any]
) -> None:
    """The student answers, the teacher says how likely it finds each token; there is no reward but in evaluations."""
    folder = args.output_dir / place
    folder.mkdir(parents=True, exist_ok=True)
    held_out = {"name": "held-out", "path": str(files.held_out), "label_key": "label"}
    held_out["custom_rm_path"] = f"{HERE / 'task.py'}:right_answer"
    evaluations = folder / "eval.json"
    evaluations.write_text(json.dumps({"eval": {"datasets": [held_out]}}))
    slime.run(
        **common,
        use_opd=True,
        opd_type=place,
        opd_teacher_load=str(teacher),
        hf_checkpoint=str(student),
        prompt_data=str(files.questions),
        input_key="prompt",
        eval_config=str(evaluations),
        eval_interval=args.eval_interval,
        eval_temperature=0.0,
        rollout_shuffle=True,
        rollout_temperature=1.0,
        rollout_max_response_len=task.SUMMANDS + 2,
        num_rollout=args.steps,
        rollout_batch_size=QUESTIONS,
        n_samples_per_prompt=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        lr=2e-3,
        lr_warmup_iters=3,
        output_dir=str(folder),
        save_hf=str(folder / "model"),
        save_debug_train_data=str(folder / placements.TRAIN_DUMP),
    )


def report(args: argparse.Namespace, teacher: float, minutes: float) -> int:
    """What came of it, in sentences, and the exit code."""
    runs = {place: args.output_dir / place for place in args.placements}
    learned = True
    for place, run in runs.items():
        found, kl = placements.scores(run), placements.reverse_kls(run)
        (_, before), (_, after) = found[0], found[-1]
        learned &= after - before >= CLOSED * (teacher - before)
        print(
            f"{place}: of {HELD_OUT} held-out problems the student solves {after:.1%}, {before:.1%} before, its "
            f"teacher {teacher:.1%}; reverse KL {kl[0]:.3f} at first, {kl[-1]:.3f} in the last step"
        )
    agrees = True
    if len(runs) > 1:
        same = placements.agreement(*runs.values())
        agrees = same.holds(alike=ALIKE, apart=APART)
        print(
            f"first step: {same.alike:.1%} of the samples are the same in both placements; the teacher's log-probs of "
            f"their tokens differ by at most {same.apart:.1e}, reverse KLs by {same.kl_apart:.1e}"
        )
    print(f"the curves are in {placements.draw(runs, teacher, args.output_dir / 'curve.png')}")
    ending = "The student learned from its teacher alone" if learned else "The student did not learn enough"
    print(f"{ending}{'' if agrees else ', and the placements differ'} ({minutes:.1f} min).")
    return 0 if learned and agrees else 1


if __name__ == "__main__":
    sys.exit(tiny_run.exit_code(main))
