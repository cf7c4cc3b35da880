"""A coding agent learns from tests: a tiny model copies a pupil who guesses, and GRPO teaches it to fix bugs, through
an agent program in a sandbox that talks to it over HTTP.

python examples/coding_agent/run.py [--output-dir DIR] [--seed N] [--num-rollout N] [--warm-up N]
python examples/coding_agent/run.py --model DIR --agent claude_code [--tasks TASKS.jsonl]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from repositories import make_rows  # noqa: E402
from tasks import read_tasks, write_prompts  # noqa: E402
from tiny import make_model, write_trajectories  # noqa: E402

import slime  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402

TRAINING_SEED, HELD_OUT_SEED, PUPIL_SEED = 1_000_000, 2_000_000, 3_000_000
"""Of the first repository of each kind: no repository is in two of them."""
TRAINING = 1024
"""Repositories to train on; as many whatever the length of the run, so that a longer one goes on from a shorter."""
AGENT_COMMAND = [os.path.realpath(sys.executable), "-I", "-S", "-B", str(HERE / "mini_agent.py"), "--max-turns", "6"]


def main() -> int:
    args = arguments()
    out: Path = args.output_dir
    if args.agent == "command":
        os.environ.setdefault("SWE_AGENT_COMMAND", json.dumps(AGENT_COMMAND))
        os.environ.setdefault("SWE_AGENT_VISIBLE", str(HERE))
        os.environ.setdefault("SWE_CONCURRENCY", "16")
    os.environ["SWE_AGENT"] = args.agent
    model = args.model or warmed_up(out, args.seed, args.warm_up, args.device)
    training, held_out = prompts(args, out / "data")
    result = slime.run(**rl_flags(args, str(model), training, held_out))
    before, after = (evaluation["eval/held-out"] for _, evaluation in (result.evaluations[0], result.evaluations[-1]))
    rewards = [round(step["rollout/raw_reward"], 4) for step in result.metrics]
    curve = {"held_out": [[step, values["eval/held-out"]] for step, values in result.evaluations], "reward": rewards}
    (out / "curve.json").write_text(json.dumps(curve))
    whose = f"Of {args.held_out} repositories it never trained on"
    print(f"{whose} it repairs {after:.1%}; before the tests taught it, it was {before:.1%}.")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--agent", default=os.environ.get("SWE_AGENT", "command"), help="claude_code, codex, ..., command"
    )
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face folder; without it a tiny model is made and warmed up"
    )
    parser.add_argument("--tasks", type=Path, help="a file of tasks (README.md); without it repositories are made")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/coding_agent"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=160, help="steps of supervised training on the pupil's work")
    parser.add_argument("--num-rollout", type=int, default=18)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--rollout-batch-size", type=int, default=4)
    parser.add_argument("--n-samples-per-prompt", type=int, default=8)
    return parser.parse_args()


def warmed_up(out: Path, seed: int, steps: int, device: str) -> Path:
    """A tiny model that works as the pupil does; one that is there already is taken."""
    if (out / "warmup/model/config.json").is_file():
        return out / "warmup/model"
    print("1/2  warm-up: copy a pupil who guesses and gives up", flush=True)
    batch = 16
    slime.run(
        device=device,
        dtype="float32",
        seed=seed,
        hf_checkpoint=str(make_model(out / "base", seed=seed)),
        prompt_data=str(write_trajectories(out / "data/pupil.jsonl", steps * batch, PUPIL_SEED)),
        input_key="messages",
        loss_type="sft_loss",
        num_rollout=steps,
        rollout_batch_size=batch,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        lr=4e-3,
        lr_warmup_iters=min(20, steps),
        lr_decay_style="cosine",
        output_dir=str(out / "warmup"),
        save_hf=str(out / "warmup/model"),
    )
    print("2/2  GRPO: agents work in sandboxes, tests judge them", flush=True)
    return out / "warmup/model"


def prompts(args: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Prompt files for training and evaluation."""
    if args.tasks is None:
        training = make_rows(TRAINING, TRAINING_SEED)
        return (
            write_prompts(training, folder / "train.jsonl"),
            write_prompts(make_rows(args.held_out, HELD_OUT_SEED), folder / "eval.jsonl"),
        )
    rows = [row for row, _ in read_tasks(args.tasks)]
    if len(rows) <= args.held_out:
        raise UserError(f"{args.tasks} has {len(rows)} tasks: give --held-out a smaller number than that")
    return (
        write_prompts(iter(rows[args.held_out :]), folder / "train.jsonl"),
        write_prompts(iter(rows[: args.held_out]), folder / "eval.jsonl"),
    )


def rl_flags(args: argparse.Namespace, model: str, training: Path, held_out: Path) -> dict[str, Any]:
    tiny = args.model is None
    return {
        "device": args.device,
        "seed": args.seed,
        "hf_checkpoint": model,
        "prompt_data": str(training),
        "eval_prompt_data": [("held-out", str(held_out))],
        "eval_interval": max(1, args.num_rollout // 3),
        "eval_temperature": 0.0 if tiny else None,
        "input_key": "prompt",
        "custom_generate_function_path": str(HERE / "generate.py"),
        "num_rollout": args.num_rollout,
        "rollout_batch_size": args.rollout_batch_size,
        "n_samples_per_prompt": args.n_samples_per_prompt,
        "rollout_max_response_len": 64 if tiny else 8192,
        "max_turns": 6 if tiny else 50,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192 if tiny else 32768,
        "eps_clip_high": 0.28,
        "lr": 1e-3 if tiny else 1e-6,
        "lr_warmup_iters": 3 if tiny else 0,
        "output_dir": str(args.output_dir),
        "save": str(args.output_dir / "checkpoints"),
        "load": str(args.output_dir / "checkpoints"),
        "save_interval": 1 if tiny else 20,
        "save_hf": str(args.output_dir / "model"),
        **({"dtype": "float32"} if tiny else {}),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(f"error: {error}")
