"""`slime quickstart`: supervised warm-up and GRPO of a tiny model on a CPU, with engine, trainer and driver."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.errors import UserError

LEARNED = 0.90
"""Held-out accuracy that counts as learned."""
LORA_RATE = 4e-3
"""Adapters want about ten times the learning rate of the weights."""
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": {"over_sampling_batch_size": 64, "partial_rollout": True},
    "one-step": {"async_mode": "one-step", "colocate": True},
    "full": {"async_mode": "full", "colocate": True},
}
_ABOUT = """\
Trains a model of 0.4 million parameters with random weights to add two-digit numbers, on the real system: engine,
trainer and driver. Supervised fine-tuning on answers that drop the carry 60 % of the time comes first; then GRPO, whose
reward only says right or wrong, has to learn the carry. About two minutes on two cores.
"""


def quickstart_command(words: Sequence[str]) -> int:
    """Run the quickstart; return 0 if the model learned to add."""
    args = _parser().parse_args(list(words))
    for flag, least in (("steps", 0), ("warmup_steps", 1), ("tensor_parallel", 1), ("pipeline_parallel", 1)):
        if getattr(args, flag) < least:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least {least}")
    import slime
    from slime.quickstart.arithmetic import make_model, write_problems

    out: Path = args.output_dir
    common = {"device": args.device, "dtype": "float32", "input_key": "prompt", "label_key": "label", "seed": args.seed}

    print("1/3  writes 8,100 sums and a model of 0.4 M parameters with random weights", flush=True)
    base = make_model(out / "base", seed=args.seed)
    problems = write_problems(out / "data", held_out=300, seed=args.seed)

    print("2/3  warm-up: supervised fine-tuning on answers that drop the carry 60 % of the time", flush=True)
    slime.run(
        **common,
        hf_checkpoint=str(base),
        prompt_data=str(problems.warm_up),
        loss_type="sft_loss",
        rollout_shuffle=True,
        num_rollout=args.warmup_steps,
        rollout_batch_size=128,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        lr=4e-3,
        lr_warmup_iters=20,
        lr_decay_style="cosine",
        output_dir=str(out / "warmup"),
        save_hf=str(out / "warmup/model"),
    )

    print("3/3  GRPO: samples answers, rewards the right ones, trains, sends the weights to the engine", flush=True)
    result = slime.run(
        **common,
        hf_checkpoint=str(out / "warmup/model"),
        prompt_data=str(problems.training),
        custom_rm_path="slime.quickstart.arithmetic.exact_match",
        eval_prompt_data=[("held-out", str(problems.held_out))],
        eval_interval=10,
        eval_temperature=0.0,
        rollout_shuffle=True,
        num_rollout=args.steps,
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
        **_megatron_layout(args.tensor_parallel, args.pipeline_parallel),
    )
    before, after = result.evaluations[0][1]["eval/held-out"], result.evaluations[-1][1]["eval/held-out"]
    is_short = args.steps < _STEPS or args.warmup_steps < _WARMUP_STEPS
    print(verdict(before, after, is_short=is_short))
    return 0 if is_short or after >= LEARNED else 1


_STEPS, _WARMUP_STEPS = 80, 400


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime quickstart", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"steps of GRPO (default: {_STEPS})")
    parser.add_argument(
        "--warmup-steps", type=int, default=_WARMUP_STEPS, help=f"steps of the warm-up (default: {_WARMUP_STEPS})"
    )
    parser.add_argument("--mode", choices=list(MODES), default="sync", help="how generation and training overlap")
    parser.add_argument("--lora-rank", type=int, default=0, help="GRPO trains a LoRA adapter of this rank")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GRPO with Megatron-Core, matrices sharded")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="GRPO with Megatron-Core, layers in stages")
    parser.add_argument("--offload", action="store_true", help="GRPO: trainer and engine share the GPU in turns")
    return parser


def _megatron_layout(tensor: int, pipeline: int) -> dict[str, Any]:
    """Return the flags for a model on several Megatron processes; none for one process, which FSDP trains."""
    if tensor * pipeline == 1:
        return {}
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    return {"train_backend": "megatron", "actor_num_gpus_per_node": tensor * pipeline, "rollout_num_gpus": 1, **sizes}


def verdict(before: float, after: float, *, is_short: bool = False) -> str:
    """Return the result in one or two sentences."""
    scores = f"of 300 held-out sums it answers {after:.1%} right, after the warm-up it was {before:.1%}"
    if after >= LEARNED:
        return f"It learned to add: {scores}."
    if is_short:
        return f"A short run: {scores}. Without --steps and --warmup-steps it learns to add."
    return (
        f"It did not learn to add ({LEARNED:.0%} is expected): {scores}. Please report this with the seed and the CPU."
    )
