"""The whole system in a few minutes on any machine: a tiny model copies a pupil who forgets to carry, and GRPO teaches
it to add.

python examples/quickstart/run.py [--device cpu|cuda] [--output-dir DIR] [--seed N] [--mode sync|partial|one-step|full]
                                  [--lora-rank N] [--tensor-parallel N] [--pipeline-parallel N] [--offload]
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

LEARNED = 0.90
LORA_RATE = 4e-3
"""Adapters want about ten times the learning rate of the weights."""
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": {"over_sampling_batch_size": 64, "partial_rollout": True},
    "one-step": {"async_mode": "one-step", "colocate": True},
    "full": {"async_mode": "full", "colocate": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=list(MODES), default="sync", help="how generation and training overlap")
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter of this rank in the third step")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="third step: cut matrices with Megatron-Core")
    parser.add_argument(
        "--pipeline-parallel", type=int, default=1, help="third step: cut the layers with Megatron-Core"
    )
    parser.add_argument("--offload", action="store_true", help="third step: trainer and engine take turns on the GPU")
    args = parser.parse_args()
    out: Path = args.output_dir
    common = {"device": args.device, "dtype": "float32", "input_key": "prompt", "label_key": "label", "seed": args.seed}

    print("1/3  a model of 0.4 M parameters with random weights, and 8,100 sums", flush=True)
    base = make_model(out / "base", seed=args.seed)
    problems = write_problems(out / "data", held_out=300, seed=args.seed)

    print("2/3  warm-up: copy the answers of a pupil who forgets to carry six times out of ten", flush=True)
    slime.run(
        **common,
        hf_checkpoint=str(base),
        prompt_data=str(problems.warm_up),
        loss_type="sft_loss",
        rollout_shuffle=True,
        num_rollout=400,
        rollout_batch_size=128,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        lr=4e-3,
        lr_warmup_iters=20,
        lr_decay_style="cosine",
        output_dir=str(out / "warmup"),
        save_hf=str(out / "warmup/model"),
    )

    print("3/3  GRPO: sample answers, reward the right ones, train, send the weights back", flush=True)
    result = slime.run(
        **common,
        hf_checkpoint=str(out / "warmup/model"),
        prompt_data=str(problems.training),
        custom_rm_path=f"{HERE / 'arithmetic.py'}:exact_match",
        eval_prompt_data=[("held-out", str(problems.held_out))],
        eval_interval=10,
        eval_temperature=0.0,
        rollout_shuffle=True,
        num_rollout=80,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        rollout_max_response_len=8,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192,
        eps_clip_high=0.28,
        lr=LORA_RATE if args.lora_rank else 4e-4,
        lora_rank=args.lora_rank,
        lr_warmup_iters=5,
        lr_decay_style="cosine",
        output_dir=str(out),
        save_hf=str(out / "model"),
        offload=args.offload,
        **MODES[args.mode],
        **cut_by_megatron(args.tensor_parallel, args.pipeline_parallel),
    )
    before, after = result.evaluations[0][1]["eval/held-out"], result.evaluations[-1][1]["eval/held-out"]
    print(verdict(before, after))
    return 0 if after >= LEARNED else 1


def cut_by_megatron(tensor: int, pipeline: int) -> dict[str, Any]:
    """Flags for as many training processes as share the model; none for one process, which FSDP trains with."""
    if tensor * pipeline == 1:
        return {}
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    return {"train_backend": "megatron", "actor_num_gpus_per_node": tensor * pipeline, "rollout_num_gpus": 1, **sizes}


def verdict(before: float, after: float) -> str:
    """Whether it learned, in a sentence."""
    scores = f"of 300 sums it never trained on it answers {after:.1%}, after the warm-up it was {before:.1%}"
    if after >= LEARNED:
        return f"It learned to add: {scores}."
    return (
        f"It did not learn to add ({LEARNED:.0%} is expected): {scores}. Please report this with the seed and the CPU."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, RunFailed) as error:
        sys.exit(f"error: {error}")
