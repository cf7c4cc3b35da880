"""The whole system in a few minutes on any machine: make a tiny model, warm it up, and let GRPO teach it to add.

python examples/quickstart/run.py [--device cpu|cuda] [--output-dir DIR] [--seed N] [--mode sync|partial|one-step|full]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from arithmetic import make_model, write_problems  # noqa: E402

import slime  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": {"over_sampling_batch_size": 64, "partial_rollout": True},
    "one-step": {"async_mode": "one-step"},
    "full": {"async_mode": "full"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=list(MODES), default="sync", help="how generation and training overlap")
    args = parser.parse_args()
    out: Path = args.output_dir
    common = {"device": args.device, "dtype": "float32", "input_key": "prompt", "label_key": "label", "seed": args.seed}

    print("1/3  a model of 1.6 M parameters with random weights, and 8,100 sums", flush=True)
    base = make_model(out / "base", seed=args.seed)
    training, evaluation = write_problems(out / "data", held_out=300, seed=args.seed)

    print("2/3  warm-up: supervised steps that teach the format and a little arithmetic", flush=True)
    slime.run(
        **common,
        hf_checkpoint=str(base),
        prompt_data=str(training),
        loss_type="sft_loss",
        rollout_shuffle=True,
        num_rollout=185,
        rollout_batch_size=128,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        lr=1e-3,
        lr_warmup_iters=20,
        output_dir=str(out / "warmup"),
        save_hf=str(out / "warmup/model"),
    )

    print("3/3  GRPO: sample answers, reward the right ones, train, send the weights back", flush=True)
    result = slime.run(
        **common,
        hf_checkpoint=str(out / "warmup/model"),
        prompt_data=str(training),
        custom_rm_path=f"{HERE / 'arithmetic.py'}:exact_match",
        eval_prompt_data=[("held-out", str(evaluation))],
        eval_interval=20,
        eval_temperature=0.0,
        rollout_shuffle=True,
        num_rollout=120,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        rollout_max_response_len=8,
        rollout_skip_special_tokens=True,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        eps_clip_high=0.28,
        lr=1e-4,
        lr_warmup_iters=5,
        lr_decay_style="cosine",
        output_dir=str(out),
        save_hf=str(out / "model"),
        **MODES[args.mode],
    )
    before, after = result.evaluations[0][1]["eval/held-out"], result.evaluations[-1][1]["eval/held-out"]
    print(f"held-out sums answered exactly: {before:.1%} after the warm-up, {after:.1%} after GRPO")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(f"error: {error}")
