"""How far trainer and engine are apart with and without routing replay: short GRPO runs of a tiny model with experts.

    python benchmarks/routing_replay.py [--train-backend fsdp|megatron] [--rollouts N] [--seed N]

The engine computes in bfloat16 and the trainer in float32, so that routers near a tie choose differently, as kernels
and dtypes of real engines make them. All runs begin with the same weights and seeds; what differs is which experts the
trainer's tokens go to. With megatron two processes share the experts (EP2). Printed are means over the rollouts: the
difference of log-probs, which replay cannot make smaller than the rounding of the engine's numbers, and the share of
the repeated choices of experts that the trainer would not have made.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import slime  # noqa: E402
from slime.data.sample import Sample  # noqa: E402
from tests.tiny_models import make_model_folder  # noqa: E402

EXPERTS: dict[str, Any] = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "no replay": {},
    "R2 (own first pass)": {"use_routing_replay": True},
    "R3 (the engine's)": {"use_rollout_routing_replay": True},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp": {"actor_num_gpus_per_node": 1},
    "megatron": {
        "train_backend": "megatron",
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
GAP, LARGEST, MISMATCH = (
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_logprob_abs_diff_max",
    "train/routing_mismatch",
)


def share_of_low_tokens(args: Any, sample: Sample) -> float:
    response = sample.tokens[-sample.response_length :]
    return sum(token < 160 for token in response) / len(response)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-backend", choices=list(BACKENDS), default="fsdp")
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    gaps: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="slime-routing-") as folder:
        model = make_model_folder(Path(folder) / "model", "qwen3_moe", seed=args.seed, **EXPERTS)
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
        print(f"{args.train_backend}, {args.rollouts} rollouts; log-prob difference of trainer and engine")
        for name, flags in RUNS.items():
            metrics = run(model, prompts, Path(folder) / name, args, flags)
            gaps[name] = fmean(one[GAP] for one in metrics)
            shares = [one[MISMATCH] for one in metrics if MISMATCH in one]
            mismatch = f"{fmean(shares):.2%}" if shares else "-"
            rewards = [one["rollout/raw_reward"] for one in metrics]
            print(
                f"{name:22} mean {gaps[name]:.5f}, largest {max(one[LARGEST] for one in metrics):.3f}, experts that "
                f"the trainer would not have chosen {mismatch}, reward {fmean(rewards[:2]):.3f} to "
                f"{fmean(rewards[-2:]):.3f}",
                flush=True,
            )
    print(f"without replay the mean is {gaps['no replay'] / gaps[next(reversed(RUNS))]:.2f} times that with R3")


def run(
    model: Path, prompts: Path, out: Path, args: argparse.Namespace, flags: dict[str, Any]
) -> list[dict[str, float]]:
    """The metrics of each rollout; of two updates each, so that R2 has something to repeat."""
    result = slime.run(
        hf_checkpoint=str(model),
        prompt_data=str(prompts),
        reward=share_of_low_tokens,
        device="cpu",
        dtype="float32",
        rollout_dtype="bfloat16",
        num_rollout=args.rollouts,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        num_steps_per_rollout=2,
        rollout_max_response_len=24,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        lr=1e-3,
        seed=args.seed,
        progress="none",
        output_dir=str(out),
        **BACKENDS[args.train_backend],
        **flags,
    )
    return [dict(one) for one in result.metrics]


if __name__ == "__main__":
    main()
