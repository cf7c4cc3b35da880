"""GRPO on a real pretrained model: SmolLM2-135M-Instruct learns to answer word problems, on two CPU cores.

python examples/smollm2/run.py [--device cpu|cuda] [--output-dir DIR] [--seed N] [--num-rollout N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from pretrained import convert  # noqa: E402
from word_problems import write_questions  # noqa: E402

import slime  # noqa: E402
from slime.errors import RunFailed, UserError  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-rollout", type=int, default=20)
    args = parser.parse_args()
    out: Path = args.output_dir

    print("1/2  SmolLM2-135M-Instruct as a Hugging Face folder, and word problems", flush=True)
    base = convert(out / "base")
    training, evaluation = write_questions(out / "data", training=4000, held_out=100, seed=args.seed)

    print("2/2  GRPO: sample answers, reward the right ones, train, send the weights back", flush=True)
    result = slime.run(
        device=args.device,
        seed=args.seed,
        hf_checkpoint=str(base),
        prompt_data=str(training),
        input_key="messages",
        label_key="label",
        apply_chat_template=True,
        custom_rm_path=f"{HERE / 'word_problems.py'}:right_answer",
        eval_prompt_data=[("held-out", str(evaluation))],
        eval_interval=5,
        eval_temperature=0.0,
        rollout_shuffle=True,
        num_rollout=args.num_rollout,
        rollout_batch_size=12,
        n_samples_per_prompt=8,
        rollout_temperature=0.6,
        rollout_max_response_len=12,
        rollout_stop=["\n"],
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        eps_clip_high=0.28,
        lr=3e-5,
        lr_warmup_iters=3,
        output_dir=str(out),
        save_hf=str(out / "model"),
    )
    before, after = result.evaluations[0][1]["eval/held-out"], result.evaluations[-1][1]["eval/held-out"]
    print(f"held-out word problems answered right: {before:.1%} before, {after:.1%} after GRPO")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(f"error: {error}")
