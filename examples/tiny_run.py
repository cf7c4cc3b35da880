"""A whole run of a tiny model with tools: copy demonstrations, then GRPO with the tools at hand."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from tiny_chat import Row, make_model  # noqa: E402

import slime  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": {"over_sampling_batch_size": 32, "partial_rollout": True},
    "one-step": {"async_mode": "one-step", "colocate": True},
    "full": {"async_mode": "full", "colocate": True},
}
PROMPTS, SAMPLES = 16, 8
"""Of a step of GRPO."""
WARM_UP_BATCH = 64
"""Demonstrations in a step of the warm-up."""


class Task(NamedTuple):
    """What differs from example to example."""

    folder: Path
    demonstrations: Sequence[Row]
    demonstrations_file: Path
    training: Path
    held_out: Path
    words: str
    generate: str
    reward: str | None
    max_turns: int
    turn_tokens: int
    held_out_reward: str | None = None
    """Another reward for held-out tasks, where that of training says nothing about a single attempt."""
    width: int = 128
    """Of the model."""
    warm_up_batch: int = WARM_UP_BATCH


class Outcome(NamedTuple):
    """Success on held-out tasks, before and after."""

    before: float
    after: float
    minutes: float

    def verdict(self, what: str, wanted: float) -> str:
        """Whether it learned, in a sentence."""
        scores = f"of held-out {what} {self.after:.1%} end well, {self.before:.1%} before GRPO ({self.minutes:.1f} min)"
        return (
            f"It learned to use its tool: {scores}." if self.after >= wanted else f"It did not learn enough: {scores}."
        )


def arguments(about: str | None, name: str, *, compares: bool = False) -> argparse.ArgumentParser:
    """The flags that all of these examples have; those that compare modes run several of them."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs") / name)
    parser.add_argument("--seed", type=int, default=1)
    how = "how generation and training overlap"
    if compares:
        parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help=how)
    else:
        parser.add_argument("--mode", choices=list(MODES), default="sync", help=how)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--warm-up-steps", type=int, default=180)
    parser.add_argument("--steps", type=int, default=24, help="of GRPO")
    parser.add_argument("--warm-up-only", action="store_true", help="make the model that GRPO begins with, and end")
    parser.add_argument("--warm-model", type=Path, help="a model folder of an earlier warm-up, instead of another one")
    return parser


def run(task: Task, args: argparse.Namespace, **flags: Any) -> Outcome:
    """Warm-up and GRPO; `flags` go to the latter."""
    began = time.monotonic()
    warm = args.warm_model or demonstrated(task, args)
    print("GRPO: attempts with the tool, reward for the right answer, train, send the weights back", flush=True)
    usual: dict[str, Any] = {
        "hf_checkpoint": str(warm),
        "prompt_data": str(task.training),
        "input_key": "prompt",
        "label_key": "label",
        "custom_generate_function_path": task.generate,
        "custom_rm_path": task.reward,
        "max_turns": task.max_turns,
        "rollout_max_response_len": task.turn_tokens,
        "eval_interval": 10,
        "eval_temperature": 0.0,
        "rollout_shuffle": True,
        "num_rollout": args.steps,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192,
        "eps_clip_high": 0.28,
        "lr": 5e-4,
        "lr_warmup_iters": 3,
        "output_dir": str(task.folder),
        "save_hf": str(task.folder / "model"),
    }
    result = slime.run(**{**_common(args), **usual, **_evaluated(task), **MODES[args.mode], **flags})
    before, after = (result.evaluations[i][1]["eval/held-out"] for i in (0, -1))
    return Outcome(before, after, (time.monotonic() - began) / 60)


def _evaluated(task: Task) -> dict[str, Any]:
    if task.held_out_reward is None:
        return {"eval_prompt_data": [("held-out", str(task.held_out))]}
    dataset = {"name": "held-out", "path": str(task.held_out), "custom_rm_path": task.held_out_reward}
    file = task.folder / "eval.json"
    file.write_text(json.dumps({"eval": {"datasets": [dataset]}}))
    return {"eval_config": str(file)}


def exit_code(main: Callable[[], int]) -> int:
    """What a program ends with: a mistake of the user's (2), a failure (1) and Ctrl-C (130) with a sentence."""
    try:
        return main()
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def demonstrated(task: Task, args: argparse.Namespace) -> Path:
    """A model that copies the demonstrations of a task, as a folder; the end of the program with --warm-up-only."""
    print("a model of 0.4 M parameters with random weights, and demonstrations of an imperfect pupil", flush=True)
    base = make_model(task.folder / "base", task.demonstrations, words=task.words, seed=args.seed, width=task.width)
    flags = {"input_key": "messages", "tool_key": "tools", "rollout_batch_size": task.warm_up_batch}
    return warmed_up(base, task.demonstrations_file, task.folder, args, **flags)


def warmed_up(base: Path, demonstrations: Path, folder: Path, args: argparse.Namespace, **flags: Any) -> Path:
    """The same from a model and a file of demonstrations; `flags` say how to read it, or change what is usual."""
    print("warm-up: copy what the pupil does", flush=True)
    usual = {"rollout_batch_size": WARM_UP_BATCH, "lr": 4e-3}
    slime.run(
        **_common(args),
        **{**usual, **flags},
        hf_checkpoint=str(base),
        prompt_data=str(demonstrations),
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        rollout_shuffle=True,
        num_rollout=args.warm_up_steps,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        lr_warmup_iters=20,
        lr_decay_style="cosine",
        output_dir=str(folder / "warmup"),
        save_hf=str(folder / "warmup/model"),
    )
    warm = folder / "warmup/model"
    if args.warm_up_only:
        print(f"the model is in {warm}")
        raise SystemExit(0)
    return warm


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return {"device": args.device, "dtype": "float32", "seed": args.seed}
